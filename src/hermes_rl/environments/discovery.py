"""Finding environments: subclasses of Atropos's ``BaseEnv`` in some folders, without importing anything.

A class counts when one of its bases leads to ``BaseEnv``, through imports, aliases and other files of the
same folders. A class that leaves ``get_next_item`` or ``evaluate`` abstract and has subclasses is only a
step on the way to them; without subclasses it is listed with that as its error. A file that cannot be read
is listed with the reason.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hermes_rl.environments.syntax import ParsedClass, ParsedFile, parse_file
from hermes_rl.errors import UnknownEnvironmentError

_ABSTRACT_IN_BASE_ENV = frozenset({"get_next_item", "evaluate"})
_MOST_FILES = 5000
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
        chains = {name: symbols.chain(path, name) for name in parsed.classes}
        usable = [
            name
            for name, chain in chains.items()
            if chain is not None and not (_missing(chain) and symbols.has_subclass(path, name))
        ]
        for name in usable:
            chain = chains[name]
            assert chain is not None
            found.append((_describe(path, parsed, chain, alone=len(usable) == 1), name))
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


class _Symbols:
    """What names mean across a set of files."""

    def __init__(self, files: dict[Path, ParsedFile]) -> None:
        self._files = files
        self._modules: dict[str, list[Path]] = {}
        for path in files:
            parts = list(path.parts[:-1]) if path.stem == "__init__" else [*path.parts[:-1], path.stem]
            for start in range(max(0, len(parts) - 6), len(parts)):
                self._modules.setdefault(".".join(parts[start:]), []).append(path)
        self._extended: set[tuple[Path, str]] = set()
        for path, parsed in files.items():
            for name, cls in parsed.classes.items():
                for base in cls.bases:
                    target = self._resolve(path, base, frozenset()) if base else None
                    if isinstance(target, tuple) and target != (path, name):
                        self._extended.add(target)

    def has_subclass(self, path: Path, name: str) -> bool:
        """Whether another class of these files extends this one."""
        return (path, name) in self._extended

    def chain(self, path: Path, name: str) -> list[ParsedClass | None] | None:
        """The class and its ancestors below ``BaseEnv``, nearest first; None when it does not lead there.

        A base that cannot be followed is None in the list.
        """
        found = self._ancestors(path, name, frozenset())
        return found[0] if found[1] else None

    def _ancestors(
        self, path: Path, name: str, seen: frozenset[tuple[Path, str]]
    ) -> tuple[list[ParsedClass | None], bool]:
        if (path, name) in seen:
            return [], False
        cls = self._files[path].classes[name]
        chain: list[ParsedClass | None] = [cls]
        reaches = False
        for base in cls.bases:
            target = self._resolve(path, base, frozenset(), skip=name) if base else None
            if target == "BaseEnv":
                reaches = True
            elif isinstance(target, tuple):
                inherited, leads = self._ancestors(*target, seen | {(path, name)})
                chain.extend(inherited)
                reaches = reaches or leads
            elif base and base.rpartition(".")[2] in ("ABC", "Generic", "Protocol", "object"):
                continue
            else:
                chain.append(None)
        return chain, reaches

    def _resolve(
        self, path: Path, dotted: str, seen: frozenset[tuple[Path, str]], skip: str | None = None
    ) -> tuple[Path, str] | str | None:
        """A class of these files as (path, name), ``"BaseEnv"``, or None."""
        if (path, dotted) in seen or path not in self._files:
            return None
        seen = seen | {(path, dotted)}
        parsed = self._files[path]
        head, _, rest = dotted.partition(".")
        if not rest and head in parsed.classes and head != skip:
            return path, head
        if head in parsed.names:
            meaning = parsed.names[head]
            if meaning.startswith("="):
                return self._resolve(path, meaning[1:] + (f".{rest}" if rest else ""), seen, skip)
            return self._resolve_absolute(path, meaning + (f".{rest}" if rest else ""), seen)
        for module in parsed.stars:
            joint = "" if module.endswith(".") else "."
            target = self._resolve_absolute(path, f"{module}{joint}{dotted}", seen)
            if target is not None:
                return target
        return None

    def _resolve_absolute(
        self, path: Path, dotted: str, seen: frozenset[tuple[Path, str]]
    ) -> tuple[Path, str] | str | None:
        if dotted.startswith("atroposlib."):
            return "BaseEnv" if dotted.endswith(".BaseEnv") else None
        module, _, name = dotted.rpartition(".")
        while module.strip("."):
            target = self._module_file(path, module)
            if target is not None:
                return self._resolve(target, name, seen)
            module, _, head = module.rpartition(".")
            name = f"{head}.{name}"
        if dotted.startswith("."):
            # ``from . import x`` names a module or a name of the package itself.
            target = self._module_file(path, "." * (len(dotted) - len(dotted.lstrip("."))))
            if target is not None:
                return self._resolve(target, dotted.lstrip("."), seen)
        return None

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


def _missing(chain: list[ParsedClass | None]) -> list[str]:
    """Abstract methods that no class of the chain implements."""
    abstract = set(_ABSTRACT_IN_BASE_ENV)
    if None in chain:
        # A base outside these folders may implement them.
        abstract.clear()
    for cls in reversed([cls for cls in chain if cls is not None]):
        abstract -= cls.defined
        abstract |= cls.abstract
    return sorted(abstract)


def _describe(
    path: Path, parsed: ParsedFile, chain: list[ParsedClass | None], *, alone: bool
) -> DiscoveredEnvironment:
    cls = chain[0]
    assert cls is not None
    name = cls.label or (path.stem if alone and path.stem != "__init__" else _snake_case(cls.name))
    missing = _missing(chain)
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
