"""Trials as runs: what keeps one from starting is told apart from what would keep all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.config import Workspace
from hermes_rl.errors import ConfigError, TrialRefusedError, WorkspaceError
from hermes_rl.search.run_trials import RunTrials
from hermes_rl.search.runner import TrialRequest


def trials(folder: Path, profile: str = "embedded") -> RunTrials:
    return RunTrials(Workspace.resolve(folder), "s1", "arithmetic_tinker", profile, {})


def test_a_missing_key_is_no_fault_of_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="TINKER_API_KEY is not set") as caught:
        trials(tmp_path, "qwen3-8b").start(TrialRequest(0, {"batch_size": 32}, 0))
    assert not isinstance(caught.value, TrialRefusedError)


def test_a_full_disk_is_no_fault_of_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hermes_rl.config.runfile.write_private", full)
    with pytest.raises(WorkspaceError, match="No space left on device"):
        trials(tmp_path).start(TrialRequest(0, {"batch_size": 32}, 0))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (TrialRequest(0, {"batch_size": 12}, 0), "group_size"),
        (TrialRequest(1, {"batch_size": 32}, 0, from_run="gone", until=4), "no checkpoint"),
        (TrialRequest(2, {"batch_size": 32}, 0, run_id="taken"), "taken already"),
    ],
)
def test_what_is_wrong_with_one_trial_is_that_trials_fault(
    tmp_path: Path, request_: TrialRequest, said: str
) -> None:
    Workspace.resolve(tmp_path).run_dir("taken").mkdir(parents=True)
    with pytest.raises(TrialRefusedError, match=said):
        trials(tmp_path).start(request_)
