import os

from stand_in_server import get, misbehave, post


def main() -> int:
    misbehave("env")
    print(
        "secrets", sorted(name for name in os.environ if name.endswith(("API_KEY", "STATE_URL"))), flush=True
    )
    api = os.environ["HERMES_RL_TRAJECTORIES_URL"]
    post(f"{api}/register-env")
    state = get(f"{api}/state")
    while not state["finished"]:
        state = get(f"{api}/state?revision={state['revision']}&wait=5")
    return 0
