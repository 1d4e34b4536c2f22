"""What a reader of the article loses if these fail: its quick start, typed as it is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.short_runs import end_everything, short_workspace

from hermes_rl import runs
from hermes_rl.config import RunConfig, Workspace

ROOT = Path(__file__).resolve().parents[2]

AS_PRINTED = """\
from tools.rl_training_tool import rl_list_environments
print(rl_list_environments())
rl_select_environment("your_environment_name")
print(rl_get_current_config())
rl_edit_config("learning_rate", 0.00006)
rl_edit_config("batch_size", 32)
result = rl_start_training()
run_id = result["run_id"]
print(rl_check_status(run_id))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = short_workspace(tmp_path)
    yield found
    end_everything(found)


def test_the_quick_start_as_printed_trains(workspace: Workspace) -> None:
    environment = {**os.environ, "HERMES_RL_WORKSPACE": str(workspace.root)}
    answer = subprocess.run(
        [sys.executable, "-c", AS_PRINTED + "print(run_id)"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    run_id = answer.stdout.splitlines()[-1]
    ended = runs.wait(workspace, run_id, timeout=240)
    assert ended.status == "completed", ended.reason
    assert ended.step == ended.total_steps == 4
    assert ended.eval_percent_correct is not None

    config = RunConfig.from_yaml(workspace.run_dir(run_id) / "run.yaml")
    assert config.tinker.learning_rate == 0.00006
    assert config.env.batch_size == 32
    assert config.run.environment == "arithmetic_tinker"
    steps = [record for record in runs.read_metrics(workspace, run_id) if record["kind"] == "train"]
    assert len(steps) == 4
    assert all(record["learning_rate"] == 0.00006 for record in steps)
    assert all(record["groups"] == 32 / config.env.group_size for record in steps)
    for role in ("api", "trainer", "env"):
        assert (workspace.logs / f"{role}_{run_id}.log").is_file()


def test_each_name_of_the_quick_start_can_be_imported_from_the_root() -> None:
    names = (
        "rl_list_environments, rl_select_environment, rl_get_current_config, rl_edit_config, "
        "rl_start_training, rl_check_status, rl_stop_training, rl_get_results, rl_list_runs, "
        "rl_test_inference, rl_start_search, rl_check_search, rl_stop_search, rl_get_search_results"
    )
    subprocess.run(
        [sys.executable, "-c", f"from tools.rl_training_tool import {names}"],
        cwd=ROOT,
        check=True,
        timeout=240,
    )


def test_a_program_keeps_its_own_names_and_a_module_gets_none(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("from tools.rl_training_tool import rl_list_runs\n")
    code = (
        "rl_list_runs = 'mine'\nimport library\nassert not hasattr(library, 'rl_check_status')\n"
        "import tools.rl_training_tool\nassert rl_list_runs == 'mine'\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        timeout=240,
    )


def test_our_tools_folder_hides_no_other_package_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("OWNER = 'somebody else'\n")
    answer = subprocess.run(
        [sys.executable, "-c", "import tools; print(tools.OWNER)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert answer.stdout.strip() == "somebody else"


def test_importing_the_functions_is_quick(tmp_path: Path) -> None:
    code = "import sys; import tools.rl_training_tool; print(','.join(sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    loaded = set(answer.stdout.strip().split(","))
    assert not loaded & {"torch", "tinker", "atroposlib", "transformers", "optuna", "wandb"}
