"""Searches over real runs: the embedded model, real processes, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.search.drive import stop_search
from hermes_rl.search.store import SearchStore, list_search_ids
from hermes_rl.search.summary import summarize

SHORT = ["--set", "total_steps=2", "--set", "steps_per_eval=1", "--set", "num_requests_for_eval=16"]
SHORT += ["--set", "group_size=4", "--set", "batch_size=8"]
TINY = [*SHORT, "--replicate", "0"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace of its own, in a folder with a space in its name."""
    root = tmp_path_factory.mktemp("search workspace")
    workspace = Workspace.resolve(root)
    yield workspace
    for run in runs.list_runs(workspace):
        if not run.is_final:
            runs.stop(workspace, run.run_id)


def hermes(workspace: Workspace, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    environment = {**os.environ, "HERMES_RL_WORKSPACE": str(workspace.root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hermes_rl", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.1)


def kill_driver(store: SearchStore) -> None:
    """Kill the detached process that drives a search, as a power cut would."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"hermes_rl.search.process" in words and store.search_id.encode() in words:
                os.kill(int(folder.name), signal.SIGKILL)
                wait_until(lambda: not store.is_driven(), "the end of the driver")
                return
    raise AssertionError("no driver")


def newest(workspace: Workspace) -> SearchStore:
    return SearchStore(workspace, list_search_ids(workspace)[-1])


def test_one_command_searches_and_its_last_line_trains_with_the_best(workspace: Workspace) -> None:
    done = hermes(workspace, "search", "start", "--space", "learning_rate=4e-5,8e-5", *SHORT)
    store = newest(workspace)
    summary = summarize(store)
    assert summary.state == "completed"
    assert [record.state for record in summary.records] == ["completed"] * 8, done.stdout
    assert all(record.eval_count == 16 and record.step == 2 for record in summary.records)
    # Both were run again on three fresh seeds, and what that allows to say is said.
    replicates = [(record.replicate_of, record.seed) for record in summary.records[2:]]
    assert len(set(replicates)) == 6
    assert {trial for trial, _ in replicates} == {0, 1}
    assert summary.replication is not None
    assert summary.replication.sentence in done.stdout
    assert "One run of each is no proof" not in done.stdout
    assert all(len(record.points("eval_percent_correct")) >= 2 for record in summary.records)
    assert "The default configuration came" in done.stdout
    assert "\x1b[" not in done.stdout
    tagged = runs.list_runs(workspace, store.search_id)
    assert {run.trial for run in tagged} == set(range(8))
    # Every trial begins from the same weights and sees the same evaluation items.
    assert len({record.points("eval_percent_correct")[0].value for record in summary.records[:2]}) == 1

    command = done.stdout.strip().splitlines()[-1]
    best = store.folder / "best.yaml"
    assert f"--config '{best}'" in command
    dry = hermes(workspace, "run", "start", "arithmetic_tinker", "--config", str(best), "--dry-run")
    config = yaml.safe_load(dry.stdout)
    assert summary.best is not None
    assert summary.recommended is not None
    assert config["tinker"]["learning_rate"] == summary.recommended.params["learning_rate"]
    assert config["env"]["total_steps"] == 2
    data = json.loads(hermes(workspace, "search", "results", "last", "--json").stdout)
    assert data["best"]["params"] == summary.best.params


def test_runs_whose_start_was_not_recorded_are_taken_over(workspace: Workspace) -> None:
    rates = ["--space", "learning_rate=4e-5,6e-5,8e-5"]
    hermes(workspace, "search", "start", *rates, "--set", "total_steps=12", *TINY[2:], "--detach")
    store = newest(workspace)
    wait_until(lambda: any(r.state == "running" and r.run_id for r in store.records()), "a running trial")
    kill_driver(store)
    started = {r.trial: r.run_id for r in store.records() if r.state == "running" and r.run_id}
    # As if it had been killed an instant earlier: the runs are there, and the trials name none.
    for record in store.records():
        if record.trial in started:
            store.append(record.model_copy(update={"run_id": None}))
    hermes(workspace, "search", "resume", store.search_id)
    assert store.state() == "completed"
    records = store.records()
    assert [record.state for record in records] == ["completed"] * 3
    assert {trial: records[trial].run_id for trial in started} == started
    assert len(runs.list_runs(workspace, store.search_id)) == 3


def test_a_stopped_search_leaves_no_run_behind_and_can_be_extended(workspace: Workspace) -> None:
    hermes(
        workspace,
        "search",
        "start",
        "--space",
        "lora_rank=8,16,32",
        "--strategy",
        "random",
        "--trials",
        "2",
        *TINY,
    )
    store = newest(workspace)
    assert len(store.records()) == 2
    hermes(workspace, "search", "resume", store.search_id, "--trials", "+1", "--detach")
    wait_until(lambda: any(r.state == "running" for r in store.records()), "the third trial")
    # From here, as the trial would be over by the time at which a command line has been loaded.
    assert stop_search(store) == "stopped"
    assert all(run.is_final for run in runs.list_runs(workspace, store.search_id))
    hermes(workspace, "search", "resume", store.search_id)
    assert [record.state for record in store.records()] == ["completed"] * 3


def test_a_promoted_trial_goes_on_from_its_checkpoint(workspace: Workspace, tmp_path: Path) -> None:
    file = tmp_path / "search.toml"
    file.write_text(
        "pruner = 'promote'\nreplicate = 0\nrungs = 2\nreduction_factor = 2\n"
        "[space]\nlearning_rate = [2e-5, 3e-5, 5e-5]\n"
        "[set]\ntotal_steps = 24\nsteps_per_eval = 6\nsave_checkpoint_interval = 6\n"
        "num_requests_for_eval = 16\ngroup_size = 4\nbatch_size = 8\n"
    )
    hermes(workspace, "search", "start", str(file))
    store = newest(workspace)
    records = store.records()
    assert len(records) == 4  # the default as an extra trial
    # One that came to its end before it could be paused has completed.
    assert {record.state for record in records} <= {"completed", "pruned"}
    completed = [r for r in records if r.state == "completed"]
    assert len(completed) >= 2
    assert all([p.step for p in r.points("eval_percent_correct")] == [0, 6, 12, 18, 24] for r in completed)
    paused = [run for run in runs.list_runs(workspace, store.search_id) if run.status == "stopped"]
    assert len(paused) == sum(r.state == "pruned" for r in records)


def test_trials_are_evaluated_at_their_rungs_and_untrained_weights_once(workspace: Workspace) -> None:
    options = ["--set", "total_steps=9", "--set", "num_requests_for_eval=16", "--set", "batch_size=8"]
    options += ["--space", "learning_rate=3e-5,5e-5", "--pruner", "asha", "--parallel", "1"]
    options += ["--replicate", "0"]
    hermes(workspace, "search", "start", *options)
    store = newest(workspace)
    measured = []
    for record in store.records():
        assert record.run_id is not None
        evaluations = [r for r in runs.read_metrics(workspace, record.run_id) if r["kind"] == "eval"]
        steps = [evaluation["step"] for evaluation in evaluations]
        assert steps == [0, 1, 3, 9] if record.state == "completed" else steps in ([0, 1], [0, 1, 3])
        measured.append(evaluations[0])
    assert measured[0]["eval_count"] == 16
    assert "baseline_run" not in measured[0]
    for taken_over in measured[1:]:
        assert taken_over["baseline_run"] == store.records()[0].run_id
        assert taken_over["eval_percent_correct"] == measured[0]["eval_percent_correct"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "article-gird"], "article-grid"),
        (["--space", "lora_rnak=16,32"], "lora_rank"),
        (["--space", "lora_rank=16,100000"], "lora_rank"),
        (["--space", "learning_rate=log:1e-5..2e-4"], "--strategy random"),
        (["--preset", "article-grid", "--environment", "arithmetic_tinkre"], "arithmetic_tinker"),
        (["--preset", "article-grid", "--set", "group_size=24"], "group_size"),
        (
            ["--preset", "article-grid", "--replicate", "3", "--objective", "loss:min", "--objective", "kl"],
            "one objective",
        ),
        (["no-such-file.toml"], "no-such-file.toml"),
    ],
)
def test_bad_input_is_refused_in_words_before_anything_starts(
    workspace: Workspace, arguments: list[str], said: str
) -> None:
    before = list_search_ids(workspace)
    done = hermes(workspace, "search", "start", *arguments, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list_search_ids(workspace) == before


def test_what_a_trial_finds_does_not_depend_on_how_many_run_beside_it(workspace: Workspace) -> None:
    options = ["--space", "learning_rate=4e-5,8e-5", "--replicate", "0", "--set", "total_steps=3"]
    # As the guide to learning says, one worker and no batch from older weights make a run repeatable.
    options += ["--set", "max_num_workers=1", "--set", "max_batches_offpolicy=0", *SHORT[2:]]
    found = []
    for parallel in ("1", "2"):
        hermes(workspace, "search", "start", *options, "--parallel", parallel)
        records = newest(workspace).records()
        assert [record.state for record in records] == ["completed"] * 2
        together = records[0].ended_at is not None and records[1].started_at < records[0].ended_at
        assert together == (parallel == "2")
        found.append([(r.params, r.points("eval_percent_correct"), r.points("loss")) for r in records])
    assert all(len(evaluations) == len(losses) + 1 == 4 for _, evaluations, losses in found[0])
    assert found[0][0][2] != found[0][1][2], "the two trials are not the same"
    assert found[0] == found[1]
