"""Finding environments: subclasses of Atropos's ``BaseEnv`` in some folders, without importing anything.

A class counts when one of its bases leads to ``BaseEnv``, through imports, aliases and other files of the
same folders. A class that leaves ``get_next_item`` or ``evaluate`` abstract and has subclasses is only a
step on the way to them; without subclasses it is listed with that as its error. A file that cannot be read
is listed with the reason.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from hermes_rl.environments.syntax import ParsedClass, ParsedFile, parse_file
from hermes_rl.errors import UnknownEnvironmentError

_ABSTRACT_IN_BASE_ENV = frozenset({"get_next_item", "evaluate"})
_NO_ANCESTORS = frozenset({"ABC", "Generic", "Protocol", "object"})
_MOST_FILES = 5000
_MOST_STEPS = 50_000
"""Names that are followed for one file; those of people take some dozens."""
_LONGEST_NAME = 1000
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


@dataclass(frozen=True)
class DiscoveredEnvironment:
    """One environment, or a file that might have held one.

    Attributes:
        name: how it is selected; unique among those found together.
        class_name: its class; empty when the file could not be read.
        file_path: its file.
        description: first paragraph of the class's docstring, else of the module's.
        error: why it cannot be used, or None.
    """

    name: str
    class_name: str
    file_path: Path
    description: str
    error: str | None = None


def discover(folders: Sequence[Path]) -> list[DiscoveredEnvironment]:
    """The environments in some folders and those below, sorted by name.

    Args:
        folders: scanned in this order; where two environments share a name, the first keeps it and the
            others get their file's or folder's name added.
    """
    files = {path: parse_file(path) for path in _python_files(folders)}
    symbols = _Symbols(files)
    found: list[tuple[DiscoveredEnvironment, str]] = []
    for path, parsed in files.items():
        if parsed.error is not None:
            broken = DiscoveredEnvironment(path.stem, "", path, "", f"{path.name} {parsed.error}.")
            found.append((broken, path.stem))
            continue
        try:
            lineages = {name: symbols.lineage(path, name) for name in parsed.classes}
        except _TooEntangledError:
            reason = f"{path.name} is too entangled: its classes and names lead on and on."
            found.append((DiscoveredEnvironment(path.stem, "", path, "", reason), path.stem))
            continue
        usable = [
            name
            for name, lineage in lineages.items()
            if lineage.reaches and not (_missing(lineage) and symbols.has_subclass(path, name))
        ]
        for name in usable:
            found.append((_describe(path, parsed, lineages[name], alone=len(usable) == 1), name))
    return sorted(_with_unique_names(found), key=lambda one: (one.name.lower(), str(one.file_path)))


def find(folders: Sequence[Path], name: str) -> DiscoveredEnvironment:
    """The environment called ``name``.

    Args:
        folders: where to look.
        name: a listed name; or, where that is unambiguous, a class's name, a file's name without ``.py``,
            or the path of a file (``PATH`` or ``PATH:Class``).

    Raises:
        UnknownEnvironmentError: there is none, or it cannot be used; names those that come close.
    """
    path_text, _, class_name = name.partition(":")
    if path_text.endswith(".py"):
        path = Path(path_text).expanduser()
        if not path.is_file():
            raise UnknownEnvironmentError(f"There is no file {path_text}.")
        candidates = [one for one in discover([path.parent]) if one.file_path.samefile(path)]
        matches = [one for one in candidates if not class_name or one.class_name == class_name]
    else:
        candidates = discover(folders)
        matches = []
        for key in (
            lambda one: one.name == name,
            lambda one: one.name.lower() == name.lower(),
            lambda one: one.class_name == name,
            lambda one: one.file_path.stem == name,
        ):
            matches = [one for one in candidates if key(one)]
            if matches:
                break
    usable = [one for one in matches if one.error is None]
    if len(usable) == 1:
        return usable[0]
    names = [one.name for one in candidates if one.error is None]
    if len(usable) > 1:
        raise UnknownEnvironmentError(
            f"{name!r} could be several environments.", allowed=[one.name for one in usable]
        )
    if matches:
        raise UnknownEnvironmentError(f"Environment {name!r} cannot be used: {matches[0].error}")
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    raise UnknownEnvironmentError(
        f"There is no environment {name!r}.",
        allowed=close or names,
        hint="`hermes-rl environments list` shows all of them.",
    )


def _python_files(folders: Iterable[Path]) -> Iterator[Path]:
    seen_folders: set[str] = set()
    seen_files: set[str] = set()
    for folder in folders:
        for current, below, names in os.walk(folder, followlinks=True):
            real = os.path.realpath(current)
            if real in seen_folders:
                below.clear()
                continue
            seen_folders.add(real)
            below[:] = sorted(
                name for name in below if not name.startswith(".") and name not in _SKIPPED_FOLDERS
            )
            for name in sorted(names):
                path = Path(current, name)
                real_file = os.path.realpath(path)
                if not name.endswith(".py") or name.startswith(".") or real_file in seen_files:
                    continue
                seen_files.add(real_file)
                if len(seen_files) > _MOST_FILES:
                    return
                yield path


_Meaning = tuple[Path, str] | Literal["BaseEnv"]
"""What a name can mean: a class of these files, by file and name, or ``BaseEnv``."""


class _Reference(NamedTuple):
    """A name in a file. The class ``skip`` of that file is not meant: its own bases are asked for."""

    path: Path
    dotted: str
    skip: str | None = None


@dataclass(frozen=True)
class _Lineage:
    """A class and what it inherits from.

    Attributes:
        classes: itself and its ancestors below ``BaseEnv``, each after those that it overrides.
        reaches: whether they lead to ``BaseEnv``.
        complete: whether every base could be followed.
    """

    classes: list[ParsedClass]
    reaches: bool
    complete: bool


class _TooEntangledError(Exception):
    """Following the names of one file takes too many steps."""


class _Symbols:
    """What names mean across a set of files."""

    def __init__(self, files: dict[Path, ParsedFile]) -> None:
        self._files = files
        self._modules: dict[str, list[Path]] = {}
        for path in files:
            parts = list(path.parts[:-1]) if path.stem == "__init__" else [*path.parts[:-1], path.stem]
            for start in range(max(0, len(parts) - 6), len(parts)):
                self._modules.setdefault(".".join(parts[start:]), []).append(path)
        self._resolved: dict[_Reference, _Meaning | None] = {}
        self._steps = dict.fromkeys(files, 0)
        self._extended: set[tuple[Path, str]] = set()
        for path, parsed in files.items():
            with contextlib.suppress(_TooEntangledError):  # which is said when its classes are looked at
                for name, cls in parsed.classes.items():
                    for base in cls.bases:
                        target = self._resolve(path, _Reference(path, base)) if base else None
                        if isinstance(target, tuple) and target != (path, name):
                            self._extended.add(target)

    def has_subclass(self, path: Path, name: str) -> bool:
        """Whether another class of these files extends this one."""
        return (path, name) in self._extended

    def lineage(self, path: Path, name: str) -> _Lineage:
        """A class and its ancestors below ``BaseEnv``.

        Raises:
            _TooEntangledError: following the names of this file takes too many steps.
        """
        classes: list[ParsedClass] = []
        reaches, complete = False, True
        seen: set[tuple[Path, str]] = set()
        pending = [((path, name), False)]
        while pending:
            place, bases_done = pending.pop()
            file, cls = place[0], self._files[place[0]].classes[place[1]]
            if bases_done:
                classes.append(cls)
            if bases_done or place in seen:
                continue
            seen.add(place)
            pending.append((place, True))
            for base in cls.bases:  # the last of them is followed first, so that the first overrides it
                target = self._resolve(path, _Reference(file, base, skip=cls.name)) if base else None
                if target == "BaseEnv":
                    reaches = True
                elif isinstance(target, tuple):
                    pending.append((target, False))
                elif base is None or base.rpartition(".")[2] not in _NO_ANCESTORS:
                    complete = False
        return _Lineage(classes, reaches, complete)

    def _resolve(self, asking: Path, start: _Reference) -> _Meaning | None:
        """What a name means, None when that cannot be followed; ``asking`` is the file that pays the steps.

        Raises:
            _TooEntangledError: that file has taken too many.
        """
        pending: list[_Reference | _Meaning] = [start]
        seen: set[_Reference] = set()
        branched = False
        meaning: _Meaning | None = None
        while pending and meaning is None:
            reference = pending.pop()
            if not isinstance(reference, _Reference):
                meaning = reference
                break
            self._steps[asking] += 1
            if self._steps[asking] > _MOST_STEPS:
                raise _TooEntangledError
            if reference in self._resolved:
                meaning = self._resolved[reference]
            elif reference not in seen and len(reference.dotted) <= _LONGEST_NAME:
                seen.add(reference)
                further = self._step(reference)
                branched = branched or len(further) > 1
                pending.extend(reversed(further))
        # All names on the way mean the same, unless there were several ways.
        for reference in [start] if branched else seen:
            self._resolved[reference] = meaning
        return meaning

    def _step(self, reference: _Reference) -> list[_Reference | _Meaning]:
        """What a name means by its file alone: that, or where to look further, in this order."""
        path, dotted, skip = reference
        if path not in self._files:
            return []
        parsed = self._files[path]
        head, _, rest = dotted.partition(".")
        if not rest and head in parsed.classes and head != skip:
            return [(path, head)]
        if head in parsed.names:
            meaning = parsed.names[head] + (f".{rest}" if rest else "")
            if meaning.startswith("="):
                return [_Reference(path, meaning[1:], skip)]
            return self._step_absolute(path, meaning)
        joints = ((module, "" if module.endswith(".") else ".") for module in parsed.stars)
        return [
            there for module, dot in joints for there in self._step_absolute(path, f"{module}{dot}{dotted}")
        ]

    def _step_absolute(self, path: Path, dotted: str) -> list[_Reference | _Meaning]:
        if dotted.startswith("atroposlib."):
            return ["BaseEnv"] if dotted.endswith(".BaseEnv") else []
        module, _, name = dotted.rpartition(".")
        while module.strip("."):
            target = self._module_file(path, module)
            if target is not None:
                return [_Reference(target, name)]
            module, _, head = module.rpartition(".")
            name = f"{head}.{name}"
        if dotted.startswith("."):
            # ``from . import x`` names a module or a name of the package itself.
            target = self._module_file(path, "." * (len(dotted) - len(dotted.lstrip("."))))
            if target is not None:
                return [_Reference(target, dotted.lstrip("."))]
        return []

    def _module_file(self, importer: Path, module: str) -> Path | None:
        level = len(module) - len(module.lstrip("."))
        if level:
            folder = importer.parent
            for _ in range(level - 1):
                folder = folder.parent
            target = folder.joinpath(*[part for part in module.lstrip(".").split(".") if part])
            for candidate in (target.with_name(target.name + ".py"), target / "__init__.py"):
                if candidate in self._files:
                    return candidate
            return None
        candidates = [path for path in self._modules.get(module, ()) if path != importer]
        candidates.sort(key=lambda path: -len(os.path.commonpath([path.parent, importer.parent])))
        return candidates[0] if candidates else None


def _missing(lineage: _Lineage) -> list[str]:
    """Abstract methods that no class of a lineage implements."""
    # A base outside these folders may implement BaseEnv's.
    abstract = set(_ABSTRACT_IN_BASE_ENV if lineage.complete else ())
    for cls in lineage.classes:
        abstract -= cls.defined
        abstract |= cls.abstract
    return sorted(abstract)


def _describe(path: Path, parsed: ParsedFile, lineage: _Lineage, *, alone: bool) -> DiscoveredEnvironment:
    cls = lineage.classes[-1]
    name = cls.label or (path.stem if alone and path.stem != "__init__" else _snake_case(cls.name))
    missing = _missing(lineage)
    error = f"{cls.name} is abstract: it does not define {' and '.join(missing)}." if missing else None
    return DiscoveredEnvironment(
        name=re.sub(r"[^\w.-]+", "_", name.strip())[:100],
        class_name=cls.name,
        file_path=path,
        description=_first_paragraph(cls.docstring or parsed.docstring or ""),
        error=error,
    )


def _with_unique_names(found: list[tuple[DiscoveredEnvironment, str]]) -> list[DiscoveredEnvironment]:
    taken: set[str] = set()
    unique: list[DiscoveredEnvironment] = []
    # A file that cannot be used never takes a name from one that can.
    for environment, class_name in sorted(found, key=lambda item: item[0].error is not None):
        name = environment.name
        stem, folder = environment.file_path.stem, environment.file_path.parent.name
        choices = [name]
        if stem != name:
            choices.append(f"{name}-{stem}")
        choices += [f"{name}-{folder}", f"{name}-{_snake_case(class_name)}"]
        choices += [f"{name}-{number}" for number in range(2, len(found) + 2)]
        chosen = next(choice for choice in choices if choice not in taken)
        taken.add(chosen)
        unique.append(replace(environment, name=chosen))
    return unique


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _first_paragraph(text: str) -> str:
    paragraph = re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0]
    return " ".join(paragraph.split())[:300]
