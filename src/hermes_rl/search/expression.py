"""Conditions over parameter values: ``batch_size % group_size == 0``, ``loss_fn == 'ppo'``.

A small part of Python's expression syntax, read from the syntax tree and never evaluated as code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import SearchError

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_ALLOWED = "names, numbers, strings, + - * / // %, < <= > >= == != in, and, or, not, parentheses"


@dataclass(frozen=True)
class Condition:
    """One condition.

    Attributes:
        text: as it was written.
        names: the parameters it reads.
    """

    text: str
    names: frozenset[str]
    _tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            SearchError: it is not an expression, or uses more than the allowed syntax.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise SearchError(
                f"The condition {text!r} cannot be read: {error.msg}.", allowed=_ALLOWED
            ) from error
        names: set[str] = set()
        _check(tree, text, names)
        return cls(text.strip(), frozenset(names), tree)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition holds for these parameter values.

        Raises:
            SearchError: a name has no value, or the types do not fit.
        """
        try:
            return bool(_evaluate(self._tree, values))
        except KeyError as error:
            raise SearchError(
                f"The condition {self.text!r} reads {error.args[0]!r}, which is no field of this search."
            ) from error
        except (TypeError, ZeroDivisionError) as error:
            raise SearchError(f"The condition {self.text!r} cannot be computed: {error}.") from error


def _check(node: ast.expr, text: str, names: set[str]) -> None:
    match node:
        case ast.Name(id=name):
            names.add(name)
        case ast.Constant(value=value) if isinstance(value, int | float | str | bool) or value is None:
            pass
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, text, names)
            _check(right, text, names)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            _check(operand, text, names)
        case ast.BoolOp(values=values):
            for value in values:
                _check(value, text, names)
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(
            type(op) in _COMPARE for op in ops
        ):
            for part in (left, *comparators):
                _check(part, text, names)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                _check(part, text, names)
        case _:
            raise SearchError(f"The condition {text!r} uses {ast.unparse(node)!r}.", allowed=_ALLOWED)


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, values)
        case ast.UnaryOp(operand=operand):
            return not _evaluate(operand, values)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_evaluate(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            current = _evaluate(left, values)
            for op, comparator in zip(ops, comparators, strict=True):
                following = _evaluate(comparator, values)
                if not _COMPARE[type(op)](current, following):
                    return False
                current = following
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_evaluate(part, values) for part in parts]
    raise AssertionError(ast.dump(node))  # _check let through what _evaluate does not know
