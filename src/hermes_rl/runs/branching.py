"""A run that begins where another one stands: its weights and optimizer, under fields of its own."""

from __future__ import annotations

from hermes_rl.config import RunConfig, Workspace
from hermes_rl.errors import ConfigError, UnknownRunError
from hermes_rl.runs.files import RUN_CONFIG, read_checkpoints
from hermes_rl.trainer.retention import hold, release

_SAME = {
    "base_model": "the adapter belongs to its base model",
    "base_url": "the checkpoint lies on that server",
    "lora_rank": "the adapter's matrices have that size",
    "lora_alpha": "the adapter was trained under that scaling",
    "train_unembed": "the adapter covers those layers",
}
"""Fields that both runs must share, and why."""


def begin_from(workspace: Workspace, config: RunConfig, source: str) -> RunConfig:
    """The configuration of a run that begins with another run's checkpoint.

    The checkpoint stays until the new run has one of its own, whatever the other run removes meanwhile.

    Args:
        workspace: where both runs lie; the new one's folder is there already.
        config: the new run's configuration.
        source: ``RUN`` for the other run's last checkpoint, ``RUN@STEP`` for the one of a step.

    Raises:
        UnknownRunError: there is no such run.
        ConfigError: it has no such checkpoint, or the new run's fields do not fit it.
    """
    run_id, _, step = source.partition("@")
    run_dir = workspace.run_dir(run_id)
    if not (run_dir / RUN_CONFIG).exists():
        raise UnknownRunError(f"There is no run {run_id!r} to begin from.", hint="hermes-rl run list")
    saved = read_checkpoints(run_dir)
    checkpoints = sorted(
        (entry for entry in saved if not step or str(entry["step"]) == step), key=lambda entry: entry["step"]
    )
    if not checkpoints:
        raise ConfigError(
            f"Run {run_id} has no checkpoint{f' of step {step}' if step else ''}.",
            allowed=[f"{run_id}@{entry['step']}" for entry in saved] or None,
        )
    last = checkpoints[-1]
    before = RunConfig.from_yaml(run_dir / RUN_CONFIG)
    for name, reason in _SAME.items():
        if config.value(name) != before.value(name):
            raise ConfigError(
                f"{name} is {config.value(name)}, but run {run_id} was trained with {before.value(name)}.",
                hint=f"It cannot change on the way: {reason}.",
            )
    if last["step"] >= config.env.total_steps:
        raise ConfigError(
            f"The checkpoint is of step {last['step']}; total_steps ({config.env.total_steps}) leaves no "
            "step to take."
        )
    hold(run_dir, config.run.run_id, last["state_path"])
    if last not in read_checkpoints(run_dir):  # removed before it was held
        release(run_dir, config.run.run_id)
        return begin_from(workspace, config, source)
    begun = {"from_checkpoint": last["state_path"], "from_step": last["step"]}
    return config.model_copy(update={"run": config.run.model_copy(update=begun)})
