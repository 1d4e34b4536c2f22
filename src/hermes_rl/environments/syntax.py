"""What one Python file defines, by its syntax tree: classes, and what its names stand for.

Nothing is imported and nothing is executed.
"""

from __future__ import annotations

import ast
import io
import os
import stat
import tokenize
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

LARGEST_FILE_BYTES = 2 << 20


@dataclass(frozen=True)
class ParsedClass:
    """One class statement.

    Attributes:
        name: the class's name.
        bases: dotted names of its bases, as written; bases that are not dotted names are ``None``.
        defined: methods and attributes that its body defines.
        abstract: those of ``defined`` that are decorated as abstract.
        label: the string assigned to ``name`` in its body, if it is a literal.
        docstring: its docstring.
    """

    name: str
    bases: tuple[str | None, ...]
    defined: frozenset[str]
    abstract: frozenset[str]
    label: str | None
    docstring: str | None


@dataclass(frozen=True)
class ParsedFile:
    """One file.

    Attributes:
        classes: class statements by name, the last one of a name.
        names: what imports and plain assignments make names stand for: a dotted name, starting with a dot
            per level where the import is relative.
        stars: modules that are star-imported.
        docstring: the module's docstring.
        error: why the file could not be read; everything else is empty then.
    """

    classes: dict[str, ParsedClass]
    names: dict[str, str]
    stars: tuple[str, ...]
    docstring: str | None
    error: str | None = None


def parse_file(path: Path) -> ParsedFile:
    """Parse a file; remembered until the file changes."""
    try:
        status = path.stat()
    except OSError as error:
        return _broken(f"cannot be read: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):
        return _broken("is not a regular file")
    if status.st_size > LARGEST_FILE_BYTES:
        return _broken(f"is larger than {LARGEST_FILE_BYTES >> 20} MB")
    return _parse(os.fspath(path), status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=4096)
def _parse(path: str, _modified: int, _size: int, _inode: int) -> ParsedFile:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        return _broken(f"cannot be read: {error.strerror}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # An encoding declared in the file is honoured, as Python does.
            encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
            source.decode(encoding)
            return _read_module(ast.parse(source))
    except UnicodeDecodeError as error:
        return _broken(f"is not valid {error.encoding}: byte {source[error.start]:#04x} at {error.start}")
    except SyntaxError as error:
        place = f"line {error.lineno}: " if error.lineno else ""
        return _broken(f"is not valid Python: {place}{error.msg}")
    except ValueError as error:
        return _broken(f"is not valid Python: {error}")
    except (RecursionError, MemoryError):
        return _broken("is nested too deeply to be read")


def _broken(error: str) -> ParsedFile:
    return ParsedFile(classes={}, names={}, stars=(), docstring=None, error=error)


def _read_module(tree: ast.Module) -> ParsedFile:
    classes: dict[str, ParsedClass] = {}
    names: dict[str, str] = {}
    stars: list[str] = []
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = _read_class(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is None:
                    root = alias.name.partition(".")[0]
                    names[root] = root
                else:
                    names[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    stars.append(module)
                else:
                    joint = "" if module.endswith(".") else "."
                    names[alias.asname or alias.name] = f"{module}{joint}{alias.name}"
        elif isinstance(node, ast.Assign) and (value := _dotted(node.value)) is not None:
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id != value:
                    names[target.id] = f"={value}"
    return ParsedFile(classes, names, tuple(stars), ast.get_docstring(tree))


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that run at import, also those under if, try, with and loops."""
    found: list[ast.stmt] = []
    pending = list(reversed(body))
    while pending:
        node = pending.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        inner: list[ast.stmt] = []
        for field in ("body", "handlers", "orelse", "finalbody"):
            for child in getattr(node, field, ()):
                inner.extend(child.body if isinstance(child, ast.ExceptHandler) else [child])
        pending.extend(reversed(inner))
    return found


def _read_class(node: ast.ClassDef) -> ParsedClass:
    defined: set[str] = set()
    abstract: set[str] = set()
    label: str | None = None
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(statement.name)
            decorators = {(_dotted(one) or "").rpartition(".")[2] for one in statement.decorator_list}
            if "abstractmethod" in decorators:
                abstract.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    defined.add(target.id)
                    if target.id == "name" and isinstance(statement.value, ast.Constant):
                        value = statement.value.value
                        label = value if isinstance(value, str) and value.strip() else None
    return ParsedClass(
        name=node.name,
        bases=tuple(_dotted(base) for base in node.bases),
        defined=frozenset(defined),
        abstract=frozenset(abstract),
        label=label,
        docstring=ast.get_docstring(node),
    )


def _dotted(node: ast.expr) -> str | None:
    """``a.b.c`` for names and attributes, also below a subscript (``Generic[T]``)."""
    if isinstance(node, ast.Subscript):
        node = node.value
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join(reversed([*parts, node.id]))
