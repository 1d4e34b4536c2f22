"""What an operator and a trainer lose if these fail: locked fields, and a configuration that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import call
from hermes_rl.config import FIELDS, Policy, RunConfig, Workspace, check_together, fields_in_force
from hermes_rl.environments.loading import Endpoints, env_values, load_class, server_config

OWN = ("digits", "operations", "system_prompt", "eval_temperature")
EDITS_A_SESSION = 20

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-1, max_value=128)
    | st.floats()
    | st.floats(min_value=0, max_value=1e-3)
    | st.text(max_size=20)
    | st.binary(max_size=5)
    | st.sampled_from(
        [
            "6e-5",
            "32",
            "true",
            "1e999",
            "-0",
            "0x10",
            "١٦",
            " 16 ",
            "1_6",
            "NaN",
            "null",
            "ppo",
            10**400,
            16,
            32,
        ]
    )
)
_UNWRITABLE = st.just(0).map(lambda _: 10**5000)
"""Python writes no integer of more than 4,300 digits, so no strategy may show it either."""
_VALUES = (
    _SCALARS
    | _UNWRITABLE
    | st.recursive(
        _SCALARS,
        lambda inner: (
            st.lists(inner | _UNWRITABLE, max_size=3)
            | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
_NAMES = (
    st.sampled_from([*FIELDS, *OWN])
    | st.sampled_from([f"{field.section}.{name}" for name, field in FIELDS.items()])
    | st.sampled_from([f"env.{name}" for name in FIELDS])
    | st.text(max_size=20)
    | _SCALARS
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.resolve(tmp_path_factory.mktemp("edits"))


@pytest.fixture(scope="module")
def accept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], None]:
    """What a run does with its configuration before it trains: the trainer's checks and the environment's."""
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    endpoints = Endpoints("http://127.0.0.1:1", "http://127.0.0.1:1/v1", "key")
    cls: list[Any] = []

    def check(config: RunConfig) -> None:
        if not cls:
            cls.append(load_class(Path(config.run.environment_file), config.run.environment_class))
        config.to_yaml(path)
        read = RunConfig.from_yaml(path)
        assert read == config
        check_together(read)
        env_default, server_default = cls[0].config_init()
        type(env_default)(**env_values(env_default, read, endpoints))
        server_config(server_default, read, endpoints)

    return check


@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(edits=st.lists(st.tuples(_NAMES, _VALUES), min_size=EDITS_A_SESSION, max_size=EDITS_A_SESSION))
def test_ten_thousand_edits_break_nothing(
    edits: list[tuple[Any, Any]], workspace: Workspace, accept: Callable[[RunConfig], None]
) -> None:
    session = AgentSession(workspace)
    locked = {
        name: item.value for name, item in fields_in_force("embedded", Policy()).items() if item.field.locked
    }
    for name, value in edits:
        answer = call(session, "rl_edit_config", {"field": name, "value": value})
        json.dumps(answer, allow_nan=False)
        assert "failed inside" not in answer.get("error", ""), answer
    config = session.next_run().config
    assert {name: config.value(name) for name in locked} == locked
    accept(config)


def test_an_edit_of_the_environments_own_field_reaches_its_configuration(workspace: Workspace) -> None:
    session = AgentSession(workspace)
    shown = call(session, "rl_get_current_config")["tunable"]["digits"]
    assert shown["source"] == "default"
    assert (shown["minimum"], shown["maximum"]) == (1, 6)
    assert call(session, "rl_edit_config", {"field": "digits", "value": "3"})["value"] == 3
    assert "error" in call(session, "rl_edit_config", {"field": "digits", "value": 7})
    assert call(session, "rl_get_current_config")["tunable"]["digits"]["source"] == "edit"
    assert session.next_run().config.value("digits") == 3


def test_what_a_user_sees_are_the_published_defaults(tmp_path: Path) -> None:
    workspace = Workspace.resolve(tmp_path)
    (tmp_path / "policy.toml").write_text('profile = "qwen3-8b"\n')
    session = AgentSession(workspace)
    shown = call(session, "rl_get_current_config")
    tunable, locked = shown["tunable"], shown["locked"]
    assert tunable["learning_rate"]["value"] == 0.00004
    assert locked["total_steps"]["value"] == 2500
    assert tunable["steps_per_eval"]["value"] == 25
    assert tunable["max_batches_offpolicy"]["value"] == 3
    assert tunable["wandb_name"]["automatic"].startswith("arithmetic_tinker-20")
    assert tunable["num_requests_for_eval"]["value"] == 256
    assert tunable["inference_weight"]["value"] == 1.0
    assert tunable["max_num_workers"]["value"] == 2048
    assert tunable["lora_rank"]["value"] == 32
    assert locked["max_token_trainer_length"]["value"] == 9000
    assert "batch_size" in tunable
    assert "group_size" in tunable
    assert "wandb_project" in tunable
    assert not set(tunable) & set(locked)


BROKEN = {
    "syntax.py": "class Broken(BaseEnv:\n",
    "exits.py": (
        "import sys\nfrom pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nsys.exit(3)\n"
        "from atroposlib.envs.base import BaseEnv\nclass Exits(BaseEnv):\n    name = 'exits'\n"
        "    async def evaluate(self): ...\n    async def get_next_item(self): ...\n"
    ),
    "endless.py": (
        "from atroposlib.envs.base import BaseEnv\nclass Endless(BaseEnv):\n    name = 'endless'\n"
        "while True:\n    pass\n"
    ),
    "aliased.py": (
        "from atroposlib.envs import base as b\nclass Middle(b.BaseEnv):\n    name = 'middle'\n"
        "class Last(Middle):\n    name = 'last'\n"
    ),
    "twin_a.py": "from atroposlib.envs.base import BaseEnv\nclass A(BaseEnv):\n    name = 'twin'\n",
    "twin_b.py": "from atroposlib.envs.base import BaseEnv\nclass B(BaseEnv):\n    name = 'twin'\n",
    "unreadable.py": b"\xff\xfe\x00class NotText(BaseEnv): pass\n",
}


def test_every_odd_file_is_listed_or_explained_and_none_is_run(tmp_path: Path) -> None:
    workspace = Workspace.resolve(tmp_path)
    for name, text in BROKEN.items():
        data = text if isinstance(text, bytes) else text.encode()
        (workspace.environments / name).write_bytes(data)
    session = AgentSession(workspace)
    listed = call(session, "rl_list_environments")
    assert listed["count"] == len(listed["environments"])
    by_file: dict[str, list[dict[str, Any]]] = {}
    for entry in listed["environments"]:
        by_file.setdefault(Path(entry["file_path"]).name, []).append(entry)
    assert not list(workspace.environments.glob("*.ran"))
    assert set(BROKEN) <= set(by_file), "a file is passed over in silence"
    assert all("error" in entry for entry in by_file["syntax.py"] + by_file["unreadable.py"])
    assert {entry["name"] for entry in by_file["aliased.py"]} >= {"last"}
    twins = by_file["twin_a.py"] + by_file["twin_b.py"]
    assert len({entry["name"] for entry in twins}) == 2 or any("error" in entry for entry in twins)
    for name in ("arithmetic_tinker", "exits"):
        assert "error" not in call(session, "rl_select_environment", {"name": name})
    shown = call(session, "rl_get_current_config")
    assert "status 3" in shown["own_fields_error"]
    assert shown["tunable"]["learning_rate"]["value"] == 4e-5
    typo = call(session, "rl_edit_config", {"field": "lerning_rate", "value": 1e-5})
    assert "learning_rate" in typo["allowed"]
