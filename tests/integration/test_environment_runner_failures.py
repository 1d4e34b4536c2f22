"""An environment that goes wrong ends its process with the reason; it never hangs it."""

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from environment_stand_ins.run_bench import ENVIRONMENTS, RunBench, until
from environment_stand_ins.tokenizer_folder import write_tokenizer

HOSTILE = ENVIRONMENTS.parent / "hostile_environments"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def bench(tmp_path: Path, tokenizer: Path) -> AsyncIterator[RunBench]:
    bench = RunBench(tmp_path / "run", tokenizer)
    try:
        await bench.start_api()
        yield bench
    finally:
        await bench.close()


def _failure(bench: RunBench) -> dict[str, Any]:
    return json.loads((bench.folder / "failure_env.json").read_text())


async def _start(bench: RunBench, misbehave: str, *options: str, **env: Any) -> None:
    bench.configure(ENVIRONMENTS / "misbehaving.py", "MisbehavingEnv", misbehave=misbehave, **env)
    bench.start_runner(*options)
    await bench.register()


@pytest.mark.parametrize(
    ("misbehave", "options", "env", "reason"),
    [
        ("raise in setup", (), {}, "setup raised RuntimeError: no data today"),
        ("hang in setup", ("--setup-timeout", "1"), {}, "setup did not return within 1 s"),
        ("block in setup", ("--setup-timeout", "3"), {"worker_timeout": 3.0}, "stuck in"),
        ("raise in get_next_item", (), {}, "get_next_item failed 20 times in a row"),
        ("raise in collect_trajectories", (), {}, "collect_trajectories failed 20 times in a row"),
        ("wrong group size", (), {}, "a group of 5 sequences where 4 were expected"),
        ("return nonsense", (), {}, "must return (group or groups, backlog), got str"),
        ("never return", (), {"worker_timeout": 1.0}, "a group took longer than 1 s"),
        ("not at all", (), {"group_size": 3}, "group_size (3) does not divide batch_size (8)"),
        ("not at all", (), {"reasoning_effort": "colossal"}, "Invalid reasoning_effort"),
    ],
)
async def test_the_reason_is_told_when_an_environment_cannot_go_on(
    bench: RunBench, misbehave: str, options: tuple[str, ...], env: dict[str, Any], reason: str
) -> None:
    await _start(bench, misbehave, *options, **env)
    assert await bench.exit_status("env") == 1
    failure = _failure(bench)
    assert failure["type"] == "EnvironmentFailedError"
    assert reason in failure["error"]
    if misbehave.startswith(("raise", "never", "wrong")):
        assert (await bench.client.state())["failures"]


@pytest.mark.parametrize(
    ("misbehave", "error"),
    [
        ("raise in evaluate", "ZeroDivisionError: no items"),
        ("hang in evaluate", "evaluate did not return within 2 s (max_evaluation_seconds)"),
    ],
)
async def test_a_failed_evaluation_is_reported_and_training_goes_on(
    bench: RunBench, misbehave: str, error: str
) -> None:
    await _start(bench, misbehave, tinker={"max_evaluation_seconds": 2.0})
    record = await until(lambda: _evaluated(bench), "the evaluation")
    assert record["error"] == error
    assert await bench.client.batch(wait=60) is not None
    assert bench.processes["env"].poll() is None
    await bench.client.finish()
    assert await bench.exit_status("env") == 0


async def test_groups_that_teach_nothing_are_counted(bench: RunBench) -> None:
    await _start(bench, "equal scores")

    async def seen() -> float:
        records, _ = await bench.client.drain_environment_log()
        return sum(record["counts"].get("groups_all_right", 0) for record in records) >= 5

    await until(seen, "five groups that were all right")
    assert (await bench.client.state())["queue_groups"] == 0
    bench.processes["env"].send_signal(signal.SIGTERM)
    assert await bench.exit_status("env") == 0
    assert not (await bench.client.state())["envs"][0]["connected"]


async def test_a_stuck_environment_still_stops_when_told_to(bench: RunBench) -> None:
    await _start(bench, "block in setup")
    # It gets stuck a moment after this; told to stop before or after, it must end in time.
    await until(lambda: "environment test, process" in bench.log("env"), "the start")
    bench.processes["env"].send_signal(signal.SIGTERM)
    assert await bench.exit_status("env") == 0


@pytest.mark.parametrize(
    ("misbehave", "patience"),
    [("not at all", "1"), ("ask the server for its info again and again", "600")],
)
async def test_a_runner_whose_api_server_is_gone_gives_up(
    bench: RunBench, misbehave: str, patience: str
) -> None:
    await _start(bench, misbehave, "--silence-patience", patience)
    await until(lambda: _registered(bench), "the registration")
    bench.processes["api"].kill()
    assert await bench.exit_status("env") == 1
    failure = _failure(bench)
    assert failure["type"] == "ServiceError"
    assert "gone" in failure["error"]


@pytest.mark.parametrize(
    ("file", "class_name", "options", "reason"),
    [
        ("exits.py", "ExitsEnv", (), "ended the interpreter (status 3)"),
        ("loops.py", "LoopsEnv", ("--import-timeout", "15"), "stuck in importing"),
    ],
)
async def test_an_environment_that_cannot_be_imported_is_explained(
    bench: RunBench, file: str, class_name: str, options: tuple[str, ...], reason: str
) -> None:
    bench.configure(HOSTILE / file, class_name)
    bench.start_runner(*options)
    assert await bench.exit_status("env") == 1
    assert reason in _failure(bench)["error"]


async def _evaluated(bench: RunBench) -> dict[str, Any] | None:
    found = await bench.client.evaluation(0, wait=1)
    return found if "metrics" in found else None


async def _registered(bench: RunBench) -> bool:
    return bool((await bench.client.state())["envs"])
