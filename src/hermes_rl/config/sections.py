"""The sections of a run's configuration, each field with its type, default, bounds and description.

These models are the single definition of what a run can be told. The catalogue is read from them,
the run's YAML is written from them, and every process of a run reads its settings through them.

The sections are those of the Hermes Agent RL module: ``env`` (what Atropos calls the environment's
configuration), ``openai`` (how the environment reaches the model) and ``tinker`` (the trainer). ``run``
holds what identifies the run. A field marked ``locked`` belongs to the operator: the agent-facing
functions show it and never change it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def _field(
    default: Any,
    description: str,
    *,
    locked: bool = False,
    unit: str | None = None,
    **constraints: Any,
) -> Any:
    return Field(
        default,
        description=description,
        json_schema_extra={"locked": locked, "unit": unit},
        **constraints,
    )


class RunSection(BaseModel):
    """What identifies a run: its environment, profile and seed."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    run_id: str = _field("", "Identifier of the run, set when it is created.", locked=True)
    environment: str = _field("", "Name of the environment, as `environments list` shows it.", locked=True)
    environment_file: str = _field("", "Path of the file that defines the environment.", locked=True)
    environment_class: str = _field("", "Name of the BaseEnv subclass in that file.", locked=True)
    profile: str = _field("embedded", "Model profile the defaults came from.", locked=True)
    seed: int = _field(
        0, "Seed of data order, adapter initialisation and sampling.", locked=True, ge=0, le=2**31 - 1
    )
    from_checkpoint: str | None = _field(
        None,
        "`tinker://` path of weights and optimizer that the run begins with, in place of a fresh adapter.",
        locked=True,
    )
    from_step: int = _field(
        0, "Optimizer steps that were taken before it began.", locked=True, unit="steps", ge=0
    )
    evaluation_steps: list[int] | None = _field(
        None,
        "Evaluate after these steps in place of every `steps_per_eval`; before the first step and after the "
        "last anyway.",
        locked=True,
        unit="steps",
    )
    baseline_run: str | None = _field(
        None,
        "A run that has evaluated the same untrained weights on the same items: its evaluation before the "
        "first step is taken over.",
        locked=True,
    )


class EnvSection(BaseModel):
    """What the environment process is told; the environment's own fields are kept beside these."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    group_size: int = _field(
        8, "Completions sampled and scored together for one prompt.", unit="sequences", ge=2, le=512
    )
    batch_size: int = _field(
        16,
        "Sequences that make one optimizer step; a multiple of group_size.",
        unit="sequences",
        ge=2,
        le=65536,
    )
    max_num_workers: int = _field(
        2048, "Most groups the environment samples at the same time.", unit="groups", ge=1, le=65536
    )
    max_eval_workers: int = _field(
        256, "Most evaluation items the environment works on at the same time.", unit="items", ge=1, le=65536
    )
    steps_per_eval: int = _field(
        25,
        "Optimizer steps between two evaluations; 0 evaluates only before the first and after the last step.",
        unit="steps",
        ge=0,
        le=1_000_000,
    )
    max_token_length: int = _field(
        8192, "Longest sequence (prompt and completion) the environment may produce.", locked=True,
        unit="tokens", ge=8, le=1_048_576,
    )  # fmt: skip
    inference_weight: float = _field(
        1.0, "Share of the inference capacity this environment may use.", gt=0, le=1000
    )
    max_batches_offpolicy: int = _field(
        3,
        "Batches the environment may sample ahead of the trainer; 0 waits for the new weights each step.",
        unit="batches",
        ge=0,
        le=64,
    )
    total_steps: int = _field(
        2500, "Optimizer steps of the whole run.", locked=True, unit="steps", ge=1, le=10_000_000
    )
    tokenizer_name: str = _field(
        "Qwen/Qwen3-8B", "Folder or hub name of the tokenizer the environment uses.", locked=True
    )
    use_wandb: bool = _field(
        True,
        "Whether the environment logs metrics (they are recorded here with or without W&B).",
        locked=True,
    )
    wandb_name: str | None = _field(
        None, "Name of the run in W&B and in listings; by itself {environment}-{timestamp}.", max_length=128
    )
    worker_timeout: float = _field(
        3600.0, "Longest time one group may take before it is given up.", locked=True, unit="seconds", gt=0
    )
    eval_handling: Literal["STOP_TRAIN", "LIMIT_TRAIN", "NONE"] = _field(
        "STOP_TRAIN", "What happens to training rollouts while an evaluation runs.", locked=True
    )
    eval_limit_ratio: float = _field(
        0.1, "Share of the workers kept for training under LIMIT_TRAIN.", locked=True, ge=0, le=1
    )
    ensure_scores_are_not_same: bool = _field(
        True, "Drop groups whose scores are all equal: they carry no learning signal.", locked=True
    )
    min_items_sent_before_logging: int = _field(
        0, "Groups the environment sends before it logs its own metrics.", locked=True, ge=0
    )


class OpenAISection(BaseModel):
    """How the environment reaches the model. URLs and keys are given to the process, never written."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    model_name: str = _field("Qwen/Qwen3-8B", "Model name sent with each inference request.", locked=True)
    server_type: Literal["openai", "sglang", "vllm"] = _field(
        "sglang", "Which of Atropos's clients the environment uses.", locked=True
    )
    num_requests_for_eval: int = _field(
        256, "Requests (held-out items) of one evaluation.", unit="requests", ge=1, le=1_000_000
    )
    num_max_requests_at_once: int = _field(
        512, "Most inference requests in flight.", locked=True, unit="requests", ge=1, le=65536
    )
    timeout: int = _field(
        3600, "Longest time one inference request may take.", locked=True, unit="seconds", ge=1
    )


class TinkerSection(BaseModel):
    """The trainer: model, adapter, loss, optimizer, checkpoints, tracking."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    base_model: str = _field(
        "Qwen/Qwen3-8B", "Base model: a local folder or a name the Tinker server knows.", locked=True
    )
    base_url: str | None = _field(
        None,
        'Tinker server: "local" for this machine\'s engine, a URL, or empty for the Tinker cloud.',
        locked=True,
    )
    device: str = _field("auto", "Device of the local engine: auto, cpu, cuda or cuda:N.", locked=True)
    lora_rank: int = _field(32, "Rank of the LoRA adapter.", ge=1, le=512)
    lora_alpha: float = _field(
        32.0,
        "LoRA scaling numerator (scaling = lora_alpha / lora_rank) of the local engine.",
        locked=True,
        gt=0,
        le=1e6,
    )
    train_unembed: bool = _field(False, "Whether the unembedding layer gets an adapter too.", locked=True)
    learning_rate: float = _field(4e-5, "Step size of the optimizer.", ge=0, le=1.0)
    beta1: float = _field(0.9, "Adam's decay of the running mean of gradients.", locked=True, ge=0, lt=1)
    beta2: float = _field(
        0.95, "Adam's decay of the running mean of squared gradients.", locked=True, ge=0, lt=1
    )
    adam_eps: float = _field(1e-8, "Adam's denominator offset.", locked=True, gt=0, le=1)
    weight_decay: float = _field(0.0, "Decoupled weight decay.", ge=0, le=1)
    grad_clip_norm: float = _field(0.0, "Largest global gradient norm; 0 does not clip.", ge=0, le=1e6)
    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = _field(
        "importance_sampling", "Policy-gradient loss, by Tinker's names."
    )
    loss_fn_config: dict[str, float] | None = _field(
        None, "Options of the loss, such as clip_low_threshold and clip_high_threshold.", locked=True
    )
    normalize_advantages: bool = _field(
        False, "Divide advantages by the standard deviation of their group's scores."
    )
    max_token_trainer_length: int = _field(
        9000, "Longest sequence the trainer accepts; longer ones are dropped and counted.", locked=True,
        unit="tokens", ge=8, le=1_048_576,
    )  # fmt: skip
    max_seconds_without_batch: float = _field(
        600.0, "A run that gets no batch for this long fails, with the reason.", locked=True,
        unit="seconds", gt=0,
    )  # fmt: skip
    max_equal_score_groups: int = _field(
        2000, "A run ends when this many groups in a row had equal scores or taught nothing otherwise.",
        locked=True, unit="groups", ge=1,
    )  # fmt: skip
    max_environment_failures: int = _field(
        20, "A run in which the environment failed this many times in a row ends.", locked=True,
        unit="failures", ge=1, le=1_000_000,
    )  # fmt: skip
    max_environment_timeouts: int = _field(
        3, "A run in which this many groups in a row exceeded worker_timeout ends.", locked=True,
        unit="groups", ge=1, le=1_000_000,
    )  # fmt: skip
    max_evaluation_seconds: float = _field(
        1200.0,
        "A run in which one evaluation takes longer than this fails, with the reason; "
        "max_seconds_without_progress bounds it as well.",
        locked=True, unit="seconds", gt=0, le=604_800,
    )  # fmt: skip
    max_kl: float = _field(
        10.0,
        "A run ends when kl_sampler_trainer, averaged over the last max_kl_steps steps, is above this.",
        locked=True, unit="nats/token", gt=0, le=1e9,
    )  # fmt: skip
    max_kl_steps: int = _field(
        10, "Optimizer steps that the divergence is averaged over.", locked=True, unit="steps", ge=1, le=1000
    )
    max_seconds_without_answer: float = _field(
        120.0, "A run whose API server, trainer or local engine does not answer for this long ends.",
        locked=True, unit="seconds", gt=0, le=86_400,
    )  # fmt: skip
    max_seconds_without_progress: float = _field(
        3600.0,
        "A run in which a step, evaluation or checkpoint takes longer than this, besides "
        "max_seconds_without_batch for its batch, ends.",
        locked=True, unit="seconds", gt=0,
    )  # fmt: skip
    min_free_disk_mb: int = _field(
        200, "A run with less free space in its workspace saves a checkpoint and ends; 0 does not look.",
        locked=True, unit="MB", ge=0, le=1_000_000_000,
    )  # fmt: skip
    save_checkpoint_interval: int = _field(
        25, "Optimizer steps between two checkpoints; 0 saves only the last.", locked=True, unit="steps", ge=0
    )
    keep_checkpoints: int = _field(
        3,
        "Newest checkpoints of a run that are kept, beside the one with the best evaluation; 0 keeps all.",
        locked=True, unit="checkpoints", ge=0, le=1_000_000,
    )  # fmt: skip
    wandb_project: str | None = _field(
        None, "W&B project the run is logged to; without it, or without a key, W&B stays off.", max_length=128
    )
    wandb_group: str | None = _field(None, "Group of the run in W&B.", locked=True, max_length=128)
    wandb_sweep: str | None = _field(
        None, "W&B sweep that the run is part of, as ENTITY/PROJECT/ID; set by a search.", locked=True,
        max_length=512,
    )  # fmt: skip
