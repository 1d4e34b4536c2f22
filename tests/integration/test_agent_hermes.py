"""What a user of Hermes Agent loses if these fail: the rl_* tools in the real hermes-agent.

Hermes Agent has an environment of its own: its package is pinned to other versions of what the other tests
need, and it brings a package called ``tools``. ``make test-hermes`` makes that environment;
``$HERMES_PYTHON`` names another one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.scripted_model import ScriptedModel, served
from tests.integration.short_runs import end_everything, short_workspace

from hermes_rl import runs
from hermes_rl.agent.toolset import TOOLS
from hermes_rl.config import RunConfig, Workspace

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("HERMES_PYTHON") or ROOT / ".venv-hermes" / "bin" / "python")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"no Hermes Agent: `make test-hermes` installs it, or set HERMES_PYTHON ({PYTHON})",
)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = short_workspace(tmp_path)
    yield found
    end_everything(found)


def hermes(home: Path, workspace: Workspace, *command: str, config: dict[str, Any]) -> str:
    """Run something of Hermes's with a home of its own; gives its standard output."""
    home.mkdir()
    enabled: dict[str, Any] = {"plugins": {"enabled": ["hermes-rl"]}}
    (home / "config.yaml").write_text(json.dumps(enabled | config), encoding="utf-8")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    answer = subprocess.run(
        command,
        cwd=home,
        env={
            **kept,
            "HOME": str(home),
            "HERMES_HOME": str(home),
            "HERMES_RL_WORKSPACE": str(workspace.root),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    return answer.stdout


def test_its_plugin_manager_loads_us_and_its_registry_starts_a_run(
    tmp_path: Path, workspace: Workspace
) -> None:
    driver = str(Path(__file__).with_name("hermes_dispatch.py"))
    # -P: the folder of the driver is not on the path, as it is not for Hermes itself.
    found = json.loads(hermes(tmp_path / "home", workspace, str(PYTHON), "-P", driver, config={}))
    assert found["error"] is None
    assert found["enabled"]
    assert found["names"] == sorted(TOOLS)
    assert found["toolset"] == "rl"
    assert "site-packages" in found["hermes_tools"]
    answers = found["answers"]
    assert answers["environments"]["count"] >= 3
    assert answers["edit"]["value"] == 6e-5
    assert "locked" in answers["locked"]["error"]
    assert answers["other"]["value"] == 4e-5, "another conversation sees the edit"
    assert answers["status"]["run_id"] == answers["started"]["run_id"]
    ended = runs.wait(workspace, answers["started"]["run_id"], timeout=240)
    assert ended.status == "completed", ended.reason


def test_a_conversation_trains(tmp_path: Path, workspace: Workspace) -> None:
    model = ScriptedModel(
        [
            lambda _: ("rl_list_environments", {}),
            lambda answers: (
                "rl_select_environment",
                {"name": next(e["name"] for e in answers[0]["environments"] if e["default"])},
            ),
            lambda _: ("rl_edit_config", {"field": "learning_rate", "value": 6e-5}),
            lambda _: ("rl_start_training", {}),
            lambda answers: ("rl_check_status", {"run_id": answers[3]["run_id"]}),
            lambda answers: f"Run {answers[3]['run_id']} is {answers[4]['status']}.",
        ]
    )
    with served(model) as url:
        settings = {"default": "scripted", "provider": "custom", "base_url": url, "context_length": 128_000}
        said = hermes(
            tmp_path / "home",
            workspace,
            str(PYTHON.with_name("hermes")),
            *("chat", "--quiet", "--toolsets", "rl", "--query", "Train a model, please."),
            config={"model": settings},
        )
    assert set(TOOLS) <= set(model.tools)
    run_id = model.answers[3]["run_id"]
    assert f"Run {run_id} is" in said
    assert model.answers[4]["run_id"] == run_id
    assert RunConfig.from_yaml(workspace.run_dir(run_id) / "run.yaml").tinker.learning_rate == 6e-5
    assert runs.wait(workspace, run_id, timeout=240).status == "completed"
