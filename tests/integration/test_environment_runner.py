"""The environment runner as a process, against the real API server."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml
from environment_stand_ins.run_bench import ENVIRONMENTS, RunBench, until
from environment_stand_ins.tokenizer_folder import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def bench(tmp_path: Path, tokenizer: Path) -> AsyncIterator[RunBench]:
    bench = RunBench(tmp_path / "run", tokenizer)
    try:
        await bench.start_api()
        bench.start_inference()
        yield bench
    finally:
        await bench.close()


async def test_a_run_gets_batches_evaluations_and_logs_and_ends(bench: RunBench) -> None:
    bench.configure(ENVIRONMENTS / "digits.py", "DigitsEnv")
    runner = bench.start_runner()
    await bench.register()

    evaluation = await until(lambda: _evaluated(bench, 0), "the baseline evaluation")
    assert evaluation["error"] is None
    assert 0.0 <= evaluation["metrics"]["eval/percent_correct"] <= 1.0

    batches = []
    for step in range(1, 7):
        batch = await bench.client.batch(wait=60)
        assert batch is not None
        assert sum(len(group["tokens"]) for group in batch) == 8
        batches.append(batch)
        await bench.client.publish(step, evaluate=step == 6)
    for group in (group for batch in batches for group in batch):
        assert group["inference_logprobs"] is not None
        assert len(set(group["scores"])) > 1
    assert (await until(lambda: _evaluated(bench, 6), "the last evaluation"))["error"] is None

    records, _ = await bench.client.drain_environment_log()
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record["counts"].items():
            totals[name] = totals.get(name, 0) + value
    assert totals["groups"] == totals["rollouts"] / 4 >= 12
    assert (
        totals["groups"] == totals["groups_mixed"] + totals["groups_all_right"] + totals["groups_all_wrong"]
    )
    assert any("train/percent_correct" in record["metrics"] for record in records)

    async with httpx.AsyncClient() as http:
        asked = (await http.get(bench.inference.rpartition("/")[0] + "/asked")).json()
    assert asked["step/0/v1/chat/completions"] == asked["step/6/v1/chat/completions"] == 8
    assert "v1/chat/completions" not in asked
    assert asked["generate"] >= totals["groups"]

    await bench.client.finish()
    assert await bench.exit_status("env") == 0
    state = await bench.client.state()
    assert not state["envs"][0]["connected"]
    saved = json.loads(
        (bench.folder / "checkpoints" / "env_checkpoints" / "test_0" / "step-5.json").read_text()
    )
    assert saved["position"] >= 10
    assert runner.returncode == 0
    assert bench.url.rpartition("/")[2] not in bench.log("env")


async def _evaluated(bench: RunBench, step: int) -> dict | None:
    found = await bench.client.evaluation(step, wait=1)
    return found if "metrics" in found else None


async def test_a_resumed_environment_goes_on_where_it_was(bench: RunBench) -> None:
    """It was stopped before its trainer, and the disk was full when it saved its position last."""
    folder = bench.folder / "checkpoints" / "env_checkpoints" / "test_0"
    folder.mkdir(parents=True)
    for step, text in {5: '{"position": 500}', 8: '{"position": 1000}', 9: "", 12: "{"}.items():
        (folder / f"step-{step}.json").write_text(text)
    bench.configure(ENVIRONMENTS / "digits.py", "DigitsEnv", digits=10)
    bench.start_runner()
    await bench.register(starting_step=10)
    await until(lambda: _evaluated(bench, 10), "the evaluation of the weights resumed from")
    for step in range(11, 16):
        assert await bench.client.batch(wait=60) is not None
        await bench.client.publish(step)
    assert (await bench.client.state())["current_step"] == 15
    later = folder / "step-15.json"
    await until(later.exists, "the next checkpoint")
    assert 1000 < json.loads(later.read_text())["position"] < 1500
    assert "step-9.json is damaged" in bench.log("env")


async def test_synchronous_training_never_samples_ahead(bench: RunBench) -> None:
    bench.configure(ENVIRONMENTS / "digits.py", "DigitsEnv", max_batches_offpolicy=0)
    bench.start_runner()
    await bench.register()
    for step in range(1, 4):
        batch = await bench.client.batch(wait=60)
        assert batch is not None
        # Until new weights are served nothing may be sampled, however long the step takes.
        state = await bench.client.state()
        later = await bench.client.state(state["revision"], wait=1)
        assert later["queue_groups"] == 0
        assert later["groups"]["received"] == 2 * step
        await bench.client.publish(step)


async def test_an_environment_serves_itself_against_our_server(bench: RunBench) -> None:
    """``python FILE serve``: no runner of ours, an Atropos client as it is."""
    config = bench.configure(ENVIRONMENTS / "digits.py", "DigitsEnv")
    values = config.model_dump(mode="json")
    foreign = {
        "env": {**values["env"], "use_wandb": False, "rollout_server_url": bench.url},
        "openai": [{**values["openai"][0], "base_url": f"{bench.inference}/v1", "api_key": "x"}],
    }
    path = bench.folder / "environment.yaml"
    path.write_text(yaml.safe_dump(foreign))
    bench.spawn("env", str(ENVIRONMENTS / "digits.py"), "serve", "--config", str(path))
    await bench.register()
    for step in range(1, 3):
        batch = await bench.client.batch(wait=60)
        assert batch is not None
        assert sum(len(group["tokens"]) for group in batch) == 8
        await bench.client.publish(step)
    assert await bench.client.evaluation(0) == {"evaluator": False}
