"""What travels between environments, API server and trainer, as pydantic models.

The first half is Atropos's protocol, field for field as the package ``atroposlib`` 0.4 sends it; the
second half is ours. ``docs/protocols.md`` describes both.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MaskValue = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Step = Annotated[int, Field(ge=0, lt=2**53)]
EnvId = Annotated[int, Field(ge=0, lt=2**31)]

TRAINER_KEY_HEADER = "x-trainer-key"
"""Carries the key that a trainer chose when it registered; what is the trainer's is refused without it."""


class Wire(BaseModel):
    """A body on the wire. Unknown fields are ignored: newer clients may send more."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")


# Atropos's protocol


class Registration(Wire):
    """The trainer introduces itself (``POST /register``).

    ``batch_size`` counts sequences; ``max_token_len`` is in tokens (0 or less: no limit);
    ``max_batches_offpolicy`` is ours and sizes the queue.
    """

    wandb_group: str | None
    wandb_project: str | None
    batch_size: Annotated[int, Field(ge=1, le=2**20)]
    max_token_len: Annotated[int, Field(ge=-1, lt=2**31)]
    checkpoint_dir: str
    save_checkpoint_interval: Annotated[int, Field(ge=-1, lt=2**53)]
    starting_step: Step
    num_steps: Annotated[int, Field(ge=-1, lt=2**53)]
    max_batches_offpolicy: Annotated[int, Field(ge=0, le=1024)] | None = None


class EnvironmentRegistration(Wire):
    """An environment introduces itself (``POST /register-env``)."""

    max_token_length: Annotated[int, Field(ge=-1, lt=2**31)]
    desired_name: Annotated[str, Field(max_length=1000)] | None = None
    weight: FiniteFloat | None = 1.0
    group_size: Annotated[int, Field(ge=1, le=2**20)]
    min_batch_allocation: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class EnvIdentifier(Wire):
    """Which environment asks (``/status-env``, ``/disconnect-env``)."""

    env_id: EnvId


class ScoredGroup(Wire):
    """One group of scored sequences, all answers to one prompt (``POST /scored_data``).

    Shapes, with G sequences of T_g tokens each: ``tokens``, ``masks``, ``inference_logprobs``,
    ``ref_logprobs`` and ``advantages`` are [G][T_g] (Atropos does not check the last three, neither is it
    done here: the trainer knows what it needs); ``scores`` [G]; ``distill_token_ids`` and
    ``distill_logprobs`` [G][T_g][top_k]. ``masks`` holds the token id where the token is trained and -100
    where it is not. Log probabilities are natural logarithms.
    """

    tokens: list[list[TokenId]]
    masks: list[list[MaskValue]]
    scores: list[FiniteFloat]
    advantages: list[list[FiniteFloat]] | None = None
    ref_logprobs: list[list[FiniteFloat]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[FiniteFloat]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: EnvId | None = None
    distill_token_ids: list[list[list[TokenId]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages")
    @classmethod
    def _messages_have_role_and_content(
        cls, value: list[list[dict[str, Any]]] | None
    ) -> list[list[dict[str, Any]]] | None:
        for conversation in value or ():
            for message in conversation:
                if "role" not in message or "content" not in message:
                    raise ValueError("a message must have 'role' and 'content'")
        return value

    @model_validator(mode="after")
    def _rows_agree(self) -> ScoredGroup:
        count = len(self.tokens)
        if count == 0:
            raise ValueError("a group must hold at least one sequence")
        if len(self.masks) != count or len(self.scores) != count:
            raise ValueError(
                f"tokens, masks and scores must have one row a sequence, got {count}, {len(self.masks)} "
                f"and {len(self.scores)}"
            )
        for index, (tokens, masks) in enumerate(zip(self.tokens, self.masks, strict=True)):
            if not tokens:
                raise ValueError(f"sequence {index} has no tokens")
            if len(tokens) != len(masks):
                raise ValueError(f"sequence {index} has {len(tokens)} tokens but {len(masks)} mask values")
        return self


# Ours


class Publication(Wire):
    """The trainer now serves the weights of ``weights_step`` optimizer steps (``POST /publish``)."""

    weights_step: Step
    evaluate: bool = False


class Evaluation(Wire):
    """What one evaluation found (``POST /evaluation``); ``seconds`` is its duration."""

    env_id: EnvId
    step: Step
    metrics: dict[str, FiniteFloat] = {}
    seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    error: Annotated[str, Field(max_length=20_000)] | None = None


class EnvironmentLog(Wire):
    """What an environment logged while it trained (``POST /environment-log``)."""

    env_id: EnvId
    step: Step
    metrics: dict[str, FiniteFloat] = {}
    counts: dict[str, FiniteFloat] = {}


class EnvironmentFailure(Wire):
    """Something went wrong in an environment (``POST /environment-failure``)."""

    env_id: EnvId | None = None
    where: Annotated[str, Field(max_length=200)]
    error: Annotated[str, Field(max_length=20_000)]
    count: Annotated[int, Field(ge=0, lt=2**53)] = 1


class Finish(Wire):
    """The run is over (``POST /finish``)."""

    reason: Annotated[str, Field(max_length=20_000)] = "completed"
