"""What each ``rl_*`` function takes: the one definition of arguments, for Python, Hermes and MCP alike.

Each model's docstring is the description that a language model reads; its fields' descriptions are those
of the arguments. :func:`parameters_schema` turns a model into the JSON schema of a tool.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hermes_rl.errors import HermesRLError

RunId = Annotated[
    str | None,
    Field(description="Id of the run, as rl_start_training gave it. Without it: the latest run."),
]
SearchId = Annotated[
    str | None,
    Field(description="Id of the search, as rl_start_search gave it. Without it: the latest search."),
]
WaitSeconds = Annotated[
    float | None,
    Field(ge=0, le=3600, description="Longest time to wait until everything has ended; 0 returns at once."),
]


class Request(BaseModel):
    """Arguments of one function."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """Language models send null for what they leave out."""
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if value is not None or name == "value" or name not in cls.model_fields
        }


class ListEnvironments(Request):
    """List the environments that a model can be trained on, with name, what each teaches, and its file. Call
    this first; then rl_select_environment with one of the names. An entry with "error" cannot be used."""


class SelectEnvironment(Request):
    """Choose the environment that the next run trains on. Begins again from the default configuration: edits
    made before are dropped and listed in the answer. Next: rl_get_current_config."""

    name: str = Field(description="Name of the environment, as rl_list_environments shows it.")
    profile: str | None = Field(
        None,
        description="Model profile, when the operator allows several (the answer of rl_get_current_config "
        "lists them). Leave it out for the default.",
    )


class GetCurrentConfig(Request):
    """Show the configuration of the next run. "tunable" holds the fields that rl_edit_config can change, each
    with its value, default, where the value came from (default, profile, policy or edit), bounds and meaning;
    "locked" holds those that only the operator can change."""


class EditConfig(Request):
    """Change one tunable field for the next run, for example field="learning_rate", value=0.00006. The value
    is checked at once; a refusal says what is allowed. Running runs are not affected. Good first changes:
    learning_rate (unstable: 0.00002, slow: 0.00006), batch_size (16, 32, 64), lora_rank (16, 32, 64)."""

    field: str = Field(description='Name of the field, for example "batch_size".')
    value: Any = Field(description="The new value: number, text, true/false; null where the field allows it.")


class StartTraining(Request):
    """Start a training run with the current configuration. Returns at once with a run_id; the run goes on by
    itself. Then call rl_check_status with that run_id, after as many seconds as the answer suggests."""


class CheckStatus(Request):
    """How a run stands: status (starting, running, completed, failed, stopped), step of total steps,
    reward_mean, percent_correct and eval_percent_correct (fractions from 0 to 1; eval_percent_correct is
    measured on held-out items and is the one to judge by), its processes with CPU and memory, log files,
    and check_again_in_seconds. Cheap: may be called at any time."""

    run_id: RunId = None


class StopTraining(Request):
    """Stop a run and all its processes. What it has learned and measured so far is kept. The answer says
    "stopping" while they end; rl_check_status says when they have."""

    run_id: str = Field(description="Id of the run to stop.")
    wait_seconds: WaitSeconds = None


class GetResults(Request):
    """What came of a run, also while it goes on: last and best evaluation, curves over steps, checkpoints,
    time, tokens, files."""

    run_id: RunId = None
    max_points: int = Field(40, ge=2, le=1000, description="Most points of each curve; thinned out evenly.")


class ListRuns(Request):
    """List the training runs of this workspace, the newest first, with their status and last metrics."""

    limit: int = Field(20, ge=1, le=500, description="Most runs to list.")


class TestInference(Request):
    """Try the selected environment before training: a few of its own steps against the base model (or another
    model that the operator has configured), to see whether prompts, parsing and scoring work. Tells per model
    the scores, how many groups would teach something (scores not all equal), lengths, truncations and example
    texts. Takes from ten seconds to a few minutes: the answer has a test_id to ask with again, or wait
    with wait_seconds."""

    __test__ = False

    models: list[str] | None = Field(
        None,
        description='Which models: "base" is the base model of the profile; other names are those the '
        "operator has configured. Default: base.",
    )
    num_steps: int = Field(3, ge=1, le=50, description="Number of prompts (groups) per model.")
    group_size: int | None = Field(
        None, ge=1, le=64, description="Completions per prompt. Default: that of the configuration."
    )
    test_id: str | None = Field(None, description="Ask for the result of a test that was started earlier.")
    wait_seconds: float | None = Field(
        None, ge=0, le=3600, description="Longest time to wait for the result before returning a test_id."
    )


class StartSearch(Request):
    """Search for good hyperparameters: many runs on the selected environment, ranked by held-out accuracy.
    The current configuration is the starting point. Returns at once with a search_id; then rl_check_search.
    Without arguments: the grid learning_rate {2e-5, 4e-5, 6e-5} x batch_size {16, 32, 64} x lora_rank
    {16, 32, 64}."""

    preset: str | None = Field(
        None,
        description="article-grid (27 configurations), article-random (24 samples, the best 4 refined) or "
        "article-bayes (24, each chosen from the earlier results).",
    )
    space: dict[str, Any] | None = Field(
        None,
        description="Tunable field -> its values, in place of the preset's: a list [16, 32], or a range as "
        '{"log_uniform": [1e-5, 2e-4]}, {"uniform": [0.1, 0.5]}, {"int": [4, 16]}, or in short '
        '"log:1e-5..2e-4".',
    )
    strategy: Literal["grid", "random", "tpe", "gp", "pbt"] | None = Field(
        None,
        description="How configurations are chosen: grid, random, Bayesian (tpe, gp), or population-based "
        "training (pbt), in which trials is the number of members.",
    )
    trials: int | None = Field(None, ge=1, le=1000, description="Number of configurations to try.")
    parallel: int | None = Field(None, ge=1, le=16, description="Runs at the same time. Default 2.")
    refine: int | None = Field(
        None, ge=0, le=20, description="Explore around the best K configurations afterwards."
    )
    replicate: int | None = Field(
        None,
        ge=0,
        le=100,
        description="At the end, run the best two and the default again on this many fresh seeds, so that a "
        "lucky run is not taken for a better setting. Default 3 (none with pbt); 0 leaves it out.",
    )
    pruner: Literal["none", "median", "asha", "promote", "hyperband"] | None = Field(
        None, description="Stop poor trials early."
    )
    objective: str | None = Field(
        None,
        description='Metric to rank by, for example "eval_percent_correct:best". Default: its last value.',
    )
    constraints: list[str] | None = Field(
        None, description='Conditions such as "batch_size % group_size == 0".'
    )
    max_minutes: float | None = Field(
        None, gt=0, description="End the search after this many minutes; the replicates come on top."
    )
    max_steps: int | None = Field(
        None, gt=0, description="End it after this many optimizer steps in all; as max_minutes."
    )


class CheckSearch(Request):
    """How a search stands: trials done and running, the best so far, and check_again_in_seconds."""

    search_id: SearchId = None


class StopSearch(Request):
    """Stop a search and its running trials; finished trials are kept. The answer says "stopping" while the
    trials end; rl_check_search says when they have."""

    search_id: str = Field(description="Id of the search to stop.")
    wait_seconds: WaitSeconds = None


class GetSearchResults(Request):
    """The ranked trials of a search, the best configuration, how it compares with the default one, and where
    the report is. Apply the best with rl_edit_config, field by field, then rl_start_training."""

    search_id: SearchId = None
    limit: int = Field(20, ge=1, le=500, description="Most trials to list.")


_MOST_BITS = 1024
"""A longer whole number is no number that a float can hold, and Python may refuse to write it."""


def _can_be_written(value: Any) -> bool:
    pending, seen = [value], set[int]()
    while pending:
        item = pending.pop()
        if id(item) in seen:  # a list may hold itself
            continue
        seen.add(id(item))
        if isinstance(item, int) and item.bit_length() > _MOST_BITS:
            return False
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            pending += item
    return True


AnyRequest = TypeVar("AnyRequest", bound=Request)


def parse(model: type[AnyRequest], arguments: Any) -> AnyRequest:
    """The arguments of a call, checked.

    Raises:
        HermesRLError: something is missing, unknown or of the wrong type.
    """
    if isinstance(arguments, dict):
        for name, given in arguments.items():
            if name != "value" and not _can_be_written(given):  # a value is checked against its field
                raise HermesRLError(
                    f"The argument {str(name)[:80]!r} holds a number that is too long to be written.",
                    allowed=f"whole numbers of at most {_MOST_BITS} bits",
                )
    try:
        return model.model_validate(arguments)
    except ValidationError as error:
        raise _explained(model, error) from None


def _explained(model: type[Request], error: ValidationError) -> HermesRLError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    known = list(model.model_fields)
    if first["type"] == "extra_forbidden":
        return HermesRLError(f"There is no argument {name!r}.", allowed=known or "no arguments")
    if first["type"] == "missing":
        return HermesRLError(f"The argument {name!r} is missing.", allowed=known)
    description = model.model_fields[name].description if name in model.model_fields else None
    return HermesRLError(f"{name or 'The arguments'}: {first['msg']}.", allowed=description)


def description_of(model: type[Request]) -> str:
    """The tool's description for a language model."""
    return " ".join(inspect.getdoc(model).split())  # type: ignore[union-attr]


def parameters_schema(model: type[Request]) -> dict[str, Any]:
    """JSON schema of a tool's arguments, in the plain form that every client understands."""
    schema = model.model_json_schema()
    properties = {name: _simplified(part) for name, part in schema.get("properties", {}).items()}
    return {
        "type": "object",
        "properties": properties,
        "required": schema.get("required", []),
        "additionalProperties": False,
    }


def _simplified(part: dict[str, Any]) -> dict[str, Any]:
    """Without titles, and without the null of optional arguments: leaving them out means the same."""
    part = {name: value for name, value in part.items() if name != "title"}
    if part.get("default", 0) is None:
        del part["default"]
    options = [option for option in part.pop("anyOf", []) if option.get("type") != "null"]
    if len(options) == 1:
        part = {**options[0], **part}
    return part
