"""Conditions over parameter values: ``batch_size % group_size == 0``, ``loss_fn == 'ppo'``.

A small part of Python's expression syntax, read from the syntax tree and never evaluated as code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import SearchError


def _number(value: Any) -> int | float:
    """A number; what Python's operators do with text and lists (``'a' * 10**9``) is not meant."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: function(_number(left), _number(right))


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _of_numbers(operator.add),
    ast.Sub: _of_numbers(operator.sub),
    ast.Mult: _of_numbers(operator.mul),
    ast.Div: _of_numbers(operator.truediv),
    ast.FloorDiv: _of_numbers(operator.floordiv),
    ast.Mod: _of_numbers(operator.mod),
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
_LONGEST = 1000
_MOST_LEVELS = 50
"""An expression longer, or nested deeper, than this is no condition that somebody meant."""
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
    _tree: ast.expr = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: Any) -> Condition:
        """Read a condition.

        Raises:
            SearchError: it is not an expression, or uses more than the allowed syntax.
        """
        if not isinstance(text, str):
            raise SearchError(
                f"A condition is a text, not {text!r}.", allowed="such as 'batch_size % group_size == 0'"
            )
        if len(text) > _LONGEST:
            raise SearchError(f"The condition {_short(text)} is longer than {_LONGEST} characters.")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
            raise SearchError(
                f"The condition {_short(text)} cannot be read: {reason}.", allowed=_ALLOWED
            ) from error
        names: set[str] = set()
        _check(tree, text.strip(), names)
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
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise SearchError(f"The condition {self.text!r} cannot be computed: {error}.") from error


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}…")


def _check(node: ast.expr, text: str, names: set[str], level: int = 0) -> None:
    if level > _MOST_LEVELS:
        raise SearchError(f"The condition {_short(text)} is nested more than {_MOST_LEVELS} levels deep.")
    level += 1
    match node:
        case ast.Name(id=name):
            names.add(name)
        case ast.Constant(value=value) if isinstance(value, int | float | str | bool) or value is None:
            pass
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, text, names, level)
            _check(right, text, names, level)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            _check(operand, text, names, level)
        case ast.BoolOp(values=values):
            for value in values:
                _check(value, text, names, level)
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(
            type(op) in _COMPARE for op in ops
        ):
            for part in (left, *comparators):
                _check(part, text, names, level)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                _check(part, text, names, level)
        case _:
            raise SearchError(
                f"The condition {_short(text)} uses {_short(ast.get_source_segment(text, node) or '')}.",
                allowed=_ALLOWED,
            )


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(_evaluate(operand, values))
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
