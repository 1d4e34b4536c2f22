import os

from stand_in_server import misbehave, serve, wait_for_ever


def main() -> int:
    misbehave("api")
    serve(os.environ["HERMES_RL_TRAJECTORIES_URL"])
    wait_for_ever()
    return 0
