"""Importing atroposlib without torch, for environments that have no use for it.

``atroposlib`` needs ``transformers`` for its tokenizers, and importing ``transformers`` pulls in torch,
scikit-learn and pandas: over a second of processor time and 400 MB in each environment process, for
nothing. While ``atroposlib`` is imported, those packages are made to look absent to whoever asks whether
they are installed; ``import torch`` itself works all the time.

A ``transformers`` imported that way has no models. So this is done only for environments whose files, and
the neighbours they import, use nothing but packages known to need none.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HEAVY = frozenset({"torch", "sklearn", "scipy", "pandas"})
_HARMLESS = frozenset(sys.stdlib_module_names) | {
    "aiohttp", "atroposlib", "datasets", "dotenv", "httpx", "hermes_rl", "jsonlines", "latex2sympy2_extended",
    "math_verify", "numpy", "openai", "pydantic", "reasoning_gym", "regex", "requests", "rich", "sympy",
    "tenacity", "tqdm", "typing_extensions", "wandb", "yaml",
}  # fmt: skip
_TOKENIZERS = frozenset({"AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"})
_MOST_FILES = 50


def import_atroposlib(environment_file: Path) -> bool:
    """Import ``atroposlib.envs.base``, without torch if the environment allows it.

    Args:
        environment_file: the environment that will be loaded afterwards.

    Returns:
        Whether torch and its like were left out.
    """
    light = "transformers" not in sys.modules and needs_tokenizers_only(environment_file)
    if not light:
        importlib.import_module("atroposlib.envs.base")
        return False
    with _looking_absent(_HEAVY):
        importlib.import_module("atroposlib.envs.base")
    _forget_answers()
    return True


@contextmanager
def light_imports() -> Iterator[None]:
    """While it lasts, everything that is imported finds no torch, not even by trying.

    For a process that imports once what others need: its forks can import torch themselves. Environments for
    which :func:`needs_tokenizers_only` does not hold must not be forks of it.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        with _looking_absent(_HEAVY):
            yield
    finally:
        if hidden:
            del sys.modules["torch"]
        _forget_answers()


def _forget_answers() -> None:
    """Let transformers look again for what is installed."""
    checks = sys.modules.get("transformers.utils.import_utils")
    for value in list(vars(checks).values()) if checks is not None else ():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def needs_tokenizers_only(file: Path) -> bool:
    """Whether a file and the neighbours it imports use only packages that need no models."""
    pending, seen = [file.resolve()], set[Path]()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        if len(seen) > _MOST_FILES:
            return False
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        for module, name in _imports(tree):
            root = module.partition(".")[0]
            if module == "transformers" and name in _TOKENIZERS:
                continue
            # Reward functions of atroposlib load models of their own.
            if root in _HARMLESS and not module.startswith("atroposlib.envs.reward_fns"):
                continue
            neighbours = _neighbours(path.parent, module, name)
            if not neighbours:
                return False
            pending.extend(neighbours)
    return True


def _imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield "." * node.level + (node.module or ""), alias.name


def _neighbours(folder: Path, module: str, name: str | None) -> list[Path]:
    level = len(module) - len(module.lstrip("."))
    for _ in range(level - 1):
        folder = folder.parent
    parts = [part for part in module.split(".") if part]
    # An absolute import may start at the folder itself or at a package that holds it.
    starts = [folder] if level else [folder, *list(folder.parents)[:4]]
    found: list[Path] = []
    for start in starts:
        target = start.joinpath(*parts)
        candidates = [target.with_name(target.name + ".py")] if parts else []
        candidates.append(target / "__init__.py")
        if name is not None:
            candidates.append(target / f"{name}.py")
        found = [candidate.resolve() for candidate in candidates if candidate.is_file()]
        if found:
            break
    return found


@contextmanager
def _looking_absent(packages: frozenset[str]) -> Iterator[None]:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name in packages else find_spec(name, package)

    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    importlib.util.find_spec = find
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
        if advice is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice
