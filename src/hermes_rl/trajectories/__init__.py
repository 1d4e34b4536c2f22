"""The Atropos trajectory protocol: the API server between environments and the trainer, and its client.

Nothing is imported here, so that ``hermes_rl.trajectories.client`` (trainer, runner) and
``hermes_rl.trajectories.process`` (the server) each pay for their own imports only.
"""
