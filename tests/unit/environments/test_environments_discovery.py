"""Environments are found by reading, never by running."""

import os
from pathlib import Path

import pytest

from hermes_rl.environments.discovery import discover, find
from hermes_rl.errors import UnknownEnvironmentError

METHODS = """
    async def get_next_item(self): ...
    async def evaluate(self, *args, **kwargs): ...
"""
RUINOUS = "open({marker!r}, 'w').write('executed')\n"


def _write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize(
    "head",
    [
        "from atroposlib.envs.base import BaseEnv\nclass E(BaseEnv):",
        "from atroposlib.envs.base import BaseEnv as B\nclass E(B):",
        "import atroposlib.envs.base as b\nclass E(b.BaseEnv):",
        "import atroposlib.envs.base\nclass E(atroposlib.envs.base.BaseEnv):",
        "from atroposlib.envs import base\nclass E(base.BaseEnv):",
        "from atroposlib.envs.base import *\nfrom atroposlib.envs.base import BaseEnv\nclass E(BaseEnv):",
        "from atroposlib.envs.base import BaseEnv\nBase = BaseEnv\nclass E(Base):",
        "try:\n from atroposlib.envs.base import BaseEnv\nexcept ImportError:\n raise\nclass E(BaseEnv):",
        "from atroposlib.envs.base import BaseEnv\nclass Mixin: ...\nclass E(Mixin, BaseEnv):",
        "from atroposlib.envs.base import BaseEnv\nfrom typing import Generic, TypeVar\n"
        "T = TypeVar('T')\nclass E(BaseEnv, Generic[T]):",
        "if True:\n  from atroposlib.envs.base import BaseEnv\nclass E(BaseEnv, metaclass=type(BaseEnv)):",
    ],
)
def test_every_way_to_name_the_base_class_is_understood(tmp_path: Path, head: str) -> None:
    _write(tmp_path, {"mine.py": head + METHODS})
    (found,) = discover([tmp_path])
    assert (found.name, found.class_name, found.error) == ("mine", "E", None)


@pytest.mark.parametrize(
    "text",
    [
        "class BaseEnv: ...\nclass E(BaseEnv): ...",
        "from gym import BaseEnv\nclass E(BaseEnv): ...",
        "class E(E): ...",
        "class A(B): ...\nclass B(A): ...",
        "# class E(BaseEnv)\n'''from atroposlib.envs.base import BaseEnv'''",
        "A = B\nB = A\nclass E(A): ...",
    ],
)
def test_what_only_looks_like_an_environment_is_not_listed(tmp_path: Path, text: str) -> None:
    _write(tmp_path, {"mine.py": text})
    assert discover([tmp_path]) == []


def test_indirect_subclasses_are_found_across_files(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/steps.py": "from atroposlib.envs.base import BaseEnv\n"
            "class Step(BaseEnv):\n    async def evaluate(self): ...\n",
            "pkg/relative.py": "from .steps import Step as S\nclass Relative(S):" + METHODS,
            "pkg/module.py": "from . import steps\nclass Module(steps.Step):" + METHODS,
            "absolute.py": "from pkg.steps import Step\nclass Absolute(Step):" + METHODS,
            "dotted.py": "import pkg.steps\nclass Dotted(pkg.steps.Step):" + METHODS,
            "again.py": "from absolute import *\nclass Again(Absolute):\n 'More.'\n name = 'once_more'\n",
        },
    )
    found = {one.class_name: one for one in discover([tmp_path])}
    assert set(found) == {"Relative", "Module", "Absolute", "Dotted", "Again"}
    assert all(one.error is None for one in found.values())
    assert found["Again"].name == "once_more"
    assert found["Again"].description == "More."


def test_an_abstract_class_without_subclasses_is_explained(tmp_path: Path) -> None:
    head = "from atroposlib.envs.base import BaseEnv\nfrom abc import abstractmethod\n"
    body = METHODS + "    @abstractmethod\n    def ask(self): ...\n"
    _write(tmp_path, {"lonely.py": f"{head}class Lonely(BaseEnv):{body}"})
    (found,) = discover([tmp_path])
    assert found.error == "Lonely is abstract: it does not define ask."
    _write(
        tmp_path, {"child.py": "from lonely import Lonely\nclass Child(Lonely):\n    def ask(self): ...\n"}
    )
    assert [one.class_name for one in discover([tmp_path])] == ["Child"]


def test_files_that_cannot_be_used_are_listed_with_the_reason_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    ruin = RUINOUS.format(marker=str(marker))
    folder = _write(
        tmp_path / "envs",
        {
            "syntax.py": ruin + "def broken(:\n",
            "bytes.py": b"# caf\xe9\n" + ruin.encode(),
            "nul.py": b"x = 1\x00\n",
            "deep.py": "x = " + "-" * 100_000 + "1\n",
            "long.py": "x = " + "+".join(["1"] * 100_000) + "\n",
            "huge.py": b"#" * (3 << 20),
            "ruinous.py": ruin
            + "raise SystemExit\nfrom atroposlib.envs.base import BaseEnv\nclass E(BaseEnv):"
            + METHODS,
            "latin.py": b"# -*- coding: latin-1 -*-\n'''caf\xe9'''\n"
            b"from atroposlib.envs.base import BaseEnv as B\n"
            b"class Latin(B):" + METHODS.encode(),
            "empty.py": "",
            ".hidden.py": "def broken(:",
            "__pycache__/cached.py": "def broken(:",
        },
    )
    (folder / "gone.py").symlink_to(folder / "nowhere.py")
    (folder / "circle.py").symlink_to(folder / "circle.py")
    (folder / "again.py").symlink_to(folder / "syntax.py")
    (folder / "round").symlink_to(folder)
    os.mkfifo(folder / "pipe.py")
    (folder / "directory.py").mkdir()
    found = {one.name: one for one in discover([folder])}
    reasons = {name: one.error for name, one in found.items() if one.error}
    assert set(reasons) <= {
        "again",
        "syntax",
        "bytes",
        "nul",
        "deep",
        "long",
        "huge",
        "gone",
        "circle",
        "pipe",
    }
    assert {"bytes", "nul", "deep", "huge", "gone", "circle", "pipe"} <= set(reasons)
    assert len({"again", "syntax"} & set(reasons)) == 1
    assert "line 2" in str(reasons.get("syntax") or reasons["again"])
    assert found["ruinous"].error is None
    assert found["latin"].description == "café"
    assert not marker.exists()
    with pytest.raises(UnknownEnvironmentError, match=r"huge\.py is larger than 2 MB"):
        find([folder], "huge")


BASE_ENV = "from atroposlib.envs.base import BaseEnv\n"
ENTANGLED = {
    "doubling": f"{BASE_ENV}class C0(BaseEnv):{METHODS}"
    + "".join(f"class C{number}(C{number - 1}, C{number - 1}): ...\n" for number in range(1, 60))
    + "class Doubling(C59): ...\n",
    "aliases": f"{BASE_ENV}a0 = BaseEnv\n"
    + "".join(f"a{number} = a{number - 1}\n" for number in range(1, 1200))
    + f"class Aliases(a1199):{METHODS}",
    "circle": f"{BASE_ENV}a = b\nb = a\nclass Circle(a, BaseEnv):{METHODS}",
    "growing": f"{BASE_ENV}a = b.c\nb = a.d\nclass Growing(a.e, BaseEnv):{METHODS}",
    "stars": "from stars import *\nfrom aliases import *\n" * 50 + f"class Stars(a7):{METHODS}",
    "ring": f"{BASE_ENV}class Ring(Around, BaseEnv):{METHODS}class Around(Ring): ...\n",
}


@pytest.mark.parametrize("name", ENTANGLED)
def test_names_that_lead_on_and_on_are_followed(tmp_path: Path, name: str) -> None:
    _write(tmp_path, {f"{name}.py": ENTANGLED[name], "aliases.py": ENTANGLED["aliases"]})
    found = {one.class_name: one for one in discover([tmp_path]) if one.file_path.stem == name}
    assert {one.error for one in found.values()} == {None}
    assert name.capitalize() in found


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"class C{number}(C{number - 1}): ...\n" for number in range(1, 2000)),
        "x = " + "f" + "()" * 50_000 + "\n",
        "x = " + ".".join(["a"] * 50_000) + "\n",
        "x = " + "lambda: " * 20_000 + "1\n",
        "if x: ...\n" + "elif x: ...\n" * 20_000,
    ],
    ids=["classes", "calls", "attributes", "lambdas", "branches"],
)
def test_a_file_that_cannot_be_followed_leaves_the_others_listed(tmp_path: Path, text: str) -> None:
    good = f"{BASE_ENV}class Good(BaseEnv):{METHODS}"
    _write(tmp_path, {"bad.py": f"{BASE_ENV}class C0(BaseEnv):{METHODS}{text}", "good.py": good})
    found = {one.name: one for one in discover([tmp_path])}
    assert set(found) == {"bad", "good"}
    assert found["good"].error is None
    assert "too" in str(found["bad"].error)


def test_the_first_base_overrides_the_others(tmp_path: Path) -> None:
    text = (
        f"{BASE_ENV}from abc import abstractmethod\n"
        f"class Step(BaseEnv):{METHODS}    @abstractmethod\n    def ask(self): ...\n"
        "class Left(Step): ...\nclass Right(Step):\n    def ask(self): ...\n"
        "class Both(Left, Right): ...\n"
    )
    _write(tmp_path, {"diamond.py": text})
    assert {one.class_name: one.error for one in discover([tmp_path])} == {"Both": None, "Right": None}


def test_environments_of_one_name_stay_apart(tmp_path: Path) -> None:
    text = "from atroposlib.envs.base import BaseEnv\nclass E(BaseEnv):\n    name = 'same'" + METHODS
    first = _write(tmp_path / "first", {"a.py": text})
    second = _write(tmp_path / "second", {"a.py": text, "b.py": text, "same.py": "def broken(:"})
    names = {one.name: one.file_path for one in discover([first, second])}
    assert names["same"] == first / "a.py"
    assert len(names) == 4
    assert names["same-a"] == second / "a.py"


def test_several_environments_in_one_file(tmp_path: Path) -> None:
    text = "from atroposlib.envs.base import BaseEnv\n" + "".join(
        f"class {name}(BaseEnv):{METHODS}" for name in ("EasyMathEnv", "HardMathEnv")
    )
    _write(tmp_path, {"both.py": text})
    assert [one.name for one in discover([tmp_path])] == ["easy_math_env", "hard_math_env"]
    assert find([tmp_path], "HardMathEnv").name == "hard_math_env"
    with pytest.raises(UnknownEnvironmentError, match="could be several"):
        find([tmp_path], "both")
    assert find([], f"{tmp_path}/both.py:EasyMathEnv").class_name == "EasyMathEnv"


def test_a_misspelt_name_gets_the_names_that_come_close(tmp_path: Path) -> None:
    text = "from atroposlib.envs.base import BaseEnv\nclass E(BaseEnv):" + METHODS
    _write(tmp_path, {"gsm8k_tinker.py": text, "arithmetic.py": text})
    with pytest.raises(UnknownEnvironmentError) as caught:
        find([tmp_path, tmp_path / "missing"], "gsm8k_tinkr")
    assert caught.value.allowed == ["gsm8k_tinker"]
    assert find([tmp_path], "ARITHMETIC").name == "arithmetic"


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    _write(tmp_path, {"a.py": "def broken(:"})
    assert discover([tmp_path])[0].error
    _write(tmp_path, {"a.py": "from atroposlib.envs.base import BaseEnv\nclass E(BaseEnv):" + METHODS})
    assert discover([tmp_path])[0].error is None
