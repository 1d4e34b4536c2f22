"""Takes total_steps steps once an environment is there, one each $STAND_IN_STEP_SECONDS.

While the file $STAND_IN_HOLD is there, it goes no further than the step written in it.
"""

import json
import os
import time
from pathlib import Path

import yaml
from stand_in_server import arguments, get, misbehave, post, serve


def held_at(step: int) -> bool:
    try:
        return step >= int(Path(os.environ["STAND_IN_HOLD"]).read_text())
    except (KeyError, OSError):
        return False


def main() -> int:
    misbehave("trainer")
    run_dir = Path(arguments()["--run-dir"])
    steps = yaml.safe_load((run_dir / "run.yaml").read_text())["env"]["total_steps"]
    print(
        "secrets", sorted(name for name in os.environ if name.endswith(("API_KEY", "STATE_URL"))), flush=True
    )
    serve(os.environ["HERMES_RL_INFERENCE_URL"])
    api = os.environ["HERMES_RL_TRAJECTORIES_URL"]
    state = get(f"{api}/state")
    while not state["envs"]:
        state = get(f"{api}/state?revision={state['revision']}&wait=5")
    begun = 0
    if (run_dir / "checkpoints.json").exists():
        begun = json.loads((run_dir / "checkpoints.json").read_text())[-1]["step"]
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        for step in range(begun + 1, steps + 1):
            while held_at(step - 1):
                time.sleep(0.02)
            time.sleep(float(os.environ.get("STAND_IN_STEP_SECONDS", "0.01")))
            train = {
                "kind": "train",
                "step": step,
                "reward_mean": step / steps,
                "percent_correct": 0.5,
                "loss": 0.1,
            }
            metrics.write(json.dumps(train) + "\n")
            metrics.flush()
            if os.environ.get("STAND_IN_CHECKPOINTS") and step % 3 == 0:
                (run_dir / ".checkpoints").write_text(json.dumps([{"step": step, "state_path": "a/b"}]))
                (run_dir / ".checkpoints").replace(run_dir / "checkpoints.json")
            progress = {"step": step, "total_steps": steps, "phase": "training", "latest": train}
            (run_dir / ".progress").write_text(json.dumps(progress))
            (run_dir / ".progress").replace(run_dir / "progress.json")
        metrics.write(
            json.dumps({"kind": "eval", "step": steps, "eval_percent_correct": 0.75, "eval_count": 256})
            + "\n"
        )
    (run_dir / ".progress").write_text(json.dumps(progress | {"phase": "completed"}))
    (run_dir / ".progress").replace(run_dir / "progress.json")
    post(f"{api}/finish")
    return 0
