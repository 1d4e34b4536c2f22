"""What a search is: everything that decides it, as one checked value that is kept with the search."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hermes_rl.config import DEFAULT_ENVIRONMENT, DEFAULT_PROFILE
from hermes_rl.errors import SearchError
from hermes_rl.search.objective import Objective
from hermes_rl.search.presets import PRESETS
from hermes_rl.search.space import MOST_POINTS, Space, build_space, space_tables

StrategyName = Literal["grid", "random", "tpe", "gp", "wandb", "pbt"]
PrunerName = Literal["none", "median", "asha", "promote", "hyperband"]
SweepMethod = Literal["grid", "random", "bayes"]
DEFAULT_TRIALS = 24
DEFAULT_MEMBERS = 8
DEFAULT_REPLICATES = 3
FIXED_IN_POPULATION = {
    "lora_rank": "a copied adapter has the rank that it was trained with",
    "group_size": "members would be compared after steps of different size",
    "batch_size": "members would be compared after steps of different size",
    "num_requests_for_eval": "members would be compared on different items",
    "steps_per_eval": "members are evaluated at the end of each segment",
    "total_steps": "members are compared at the same step",
}
"""Fields that population-based training cannot change on the way, and why."""


class Budget(BaseModel):
    """Limits over a whole search; the one that is reached first ends it.

    The replicates, which say what the search's result is worth, come after it and count towards none.

    Attributes:
        steps: optimizer steps of all trials together.
        tokens: trained tokens of all trials together.
        minutes: wall time, counted over all sittings of a search that was resumed.
    """

    model_config = ConfigDict(extra="forbid")

    steps: int | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, gt=0)
    minutes: float | None = Field(default=None, gt=0)


class SearchDefinition(BaseModel):
    """One search.

    Attributes:
        environment: name of the environment every trial trains on.
        profile: model profile of every trial.
        space: field → its values, as a TOML file writes them.
        constraints: conditions that every configuration satisfies.
        strategy: how configurations are chosen.
        trials: how many configurations are tried; None takes the whole grid, or 24. In population-based
            training the number of members; None takes 8.
        segments: of population-based training: in how many parts a trial is cut.
        sweep: of the strategy ``wandb``: the sweep to join, ``ENTITY/PROJECT/ID``; None creates one.
        sweep_method: of the strategy ``wandb``: how a sweep that is created chooses.
        sweep_config: the W&B sweep file that the search was read from; a sweep that is created keeps to it.
        refine: how many of the best are explored in a shrinking neighbourhood afterwards.
        refine_rounds: how many times each of them, each time in half the neighbourhood.
        objectives: what is looked for; several give a Pareto front.
        pruner: how poor trials are stopped early.
        rungs: for the pruners: the first step at which a trial can be stopped; None is an eighth of a trial.
        reduction_factor: but for ``median``: one in how many trials goes on past a rung.
        evaluate_at_rungs: evaluate trials at the rungs and at their end only.
        parallel: trials at the same time.
        seed: seed of every trial and of the strategy: all trials see the same items in the same order.
        replicate: fresh seeds on which the best and the default are run again; 0 leaves it out, None takes 3
            where runs can be repeated and compared (one objective, no population).
        replicate_top: how many of the best.
        overrides: fields set alike in all trials.
        budget: limits over the whole search.
        warm_start: id of an earlier search whose results the strategy begins with.
        in_force: the values of the fields that constraints and conditions read, as they are where a trial
            does not set them; filled in when the search is created.
    """

    model_config = ConfigDict(extra="forbid")

    environment: str = DEFAULT_ENVIRONMENT
    profile: str = DEFAULT_PROFILE
    space: dict[str, Any]
    constraints: list[str] = []
    strategy: StrategyName = "grid"
    trials: int | None = Field(None, ge=1)
    segments: int = Field(5, ge=2, le=100)
    sweep: str | None = None
    sweep_method: SweepMethod = "bayes"
    sweep_config: dict[str, Any] = {}
    refine: int = Field(0, ge=0, le=20)
    refine_rounds: int = Field(2, ge=1, le=10)
    objectives: list[str] = Field(["eval_percent_correct"], min_length=1)
    pruner: PrunerName = "none"
    rungs: int | None = Field(None, ge=1)
    reduction_factor: int = Field(3, ge=2)
    evaluate_at_rungs: bool = False
    parallel: int = Field(2, ge=1, le=256)
    seed: int = Field(0, ge=0, lt=2**31)
    replicate: int | None = Field(None, ge=0, le=1000)
    replicate_top: int = Field(2, ge=1, le=20)
    overrides: dict[str, Any] = {}
    budget: Budget = Budget()
    warm_start: str | None = None
    in_force: dict[str, Any] = {}

    @field_validator("space", mode="before")
    @classmethod
    def _space_is_plain(cls, value: Any) -> dict[str, Any]:
        return space_tables(value)

    @field_validator("objectives")
    @classmethod
    def _objectives_can_be_read(cls, value: list[str]) -> list[str]:
        return [str(Objective.parse(text)) for text in value]

    @model_validator(mode="after")
    def _fits_together(self) -> SearchDefinition:
        space = self.build_space()
        both = sorted(set(space.names) & set(self.overrides))
        if both:
            raise SearchError(
                f"{', '.join(both)} is both searched and set.", hint="Leave one of the two out."
            )
        if self._is_grid():
            self._has_grid(space)
        self._fits_strategy(space)
        if len(self.objectives) > 1 and self.pruner != "none":
            raise SearchError("Early stopping needs one objective, not several.", hint="Use --pruner none.")
        if len(self.objectives) > 1 and self.refine:
            raise SearchError("Refining needs one objective, not several.")
        return self

    def _is_grid(self) -> bool:
        return self.strategy == "grid" or (self.strategy == "wandb" and self.sweep_method == "grid")

    def _has_grid(self, space: Space) -> None:
        if space.size() > MOST_POINTS and self.strategy == "grid":
            raise SearchError(
                f"The grid has {space.describe_size()} points, more than {MOST_POINTS:,}.",
                hint="List fewer values, give ranges of whole numbers a step (int:LOW..HIGH:STEP), or use "
                "--strategy random, tpe or gp.",
            )
        if space.countable() and not space.count(1):
            raise SearchError("No configuration of the grid satisfies the constraints.")

    def _fits_strategy(self, space: Space) -> None:
        """What the strategies that are not Optuna's leave out."""
        if self.sweep is not None and self.strategy != "wandb":
            raise SearchError("A sweep is joined by the strategy wandb only.", hint="--strategy wandb")
        if self.strategy in ("wandb", "pbt"):
            if len(self.objectives) > 1:
                raise SearchError(f"The strategy {self.strategy} needs one objective, not several.")
            if self.refine or self.warm_start:
                raise SearchError(f"The strategy {self.strategy} has no refinement and no warm start.")
        if self.strategy == "wandb" and self.pruner not in ("none", "hyperband"):
            raise SearchError(
                f"A W&B sweep stops trials itself; it has no {self.pruner}.", allowed=["none", "hyperband"]
            )
        if self.strategy == "pbt":
            for name in space.names:
                if name in FIXED_IN_POPULATION:
                    why = FIXED_IN_POPULATION[name]
                    raise SearchError(
                        f"{name} cannot change during population-based training: {why}.",
                        hint=f"Set it alike in all members (--set {name}=…), or use another strategy.",
                    )
            if self.pruner != "none":
                raise SearchError(
                    "Population-based training replaces its worst itself.", hint="--pruner none"
                )
            if self.replicate:
                raise SearchError(
                    "Population-based training finds a schedule, which a single run cannot repeat.",
                    hint="Leave --replicate out; repeat the search with another --seed.",
                )
            if self.population() < 2:
                raise SearchError("A population has at least two members.", hint="--trials 8")

    def population(self) -> int:
        """Number of members of population-based training."""
        return self.trials or DEFAULT_MEMBERS

    def fresh_seeds(self) -> int:
        """Number of fresh seeds on which the best and the default are run again."""
        if self.strategy == "pbt" or len(self.objectives) > 1:
            return 0
        return DEFAULT_REPLICATES if self.replicate is None else self.replicate

    def planned_replicates(self, configurations: int) -> int:
        """The most replicates that come of so many configurations beside the default."""
        if configurations < 1:
            return 0
        return self.fresh_seeds() * (min(self.replicate_top, configurations) + 1)

    def build_space(self) -> Space:
        """The space, with what is known here of the fields that are not searched."""
        return build_space(self.space, self.constraints).with_context({**self.overrides, **self.in_force})

    def build_objectives(self) -> list[Objective]:
        """The objectives, the first being the one that trials are ranked by."""
        return [Objective.parse(text) for text in self.objectives]

    def planned_trials(self) -> int:
        """Number of configurations that the strategy draws, refinement included.

        An upper bound where the space is too large to count, or before the values in force are known.
        """
        if self.strategy == "pbt":
            return self.population() * self.segments
        trials = self.trials or DEFAULT_TRIALS
        space = self.build_space()
        if space.finite() and (self._is_grid() or self.strategy != "wandb"):
            wanted = (self.trials or space.size()) if self._is_grid() else trials
            trials = space.count(wanted) if space.countable() else min(wanted, space.size())
        return trials + self.refine * self.refine_rounds


def define_search(fields: Mapping[str, Any]) -> SearchDefinition:
    """A definition from plain values, the preset's first.

    Args:
        fields: as in a TOML file: the names of :class:`SearchDefinition`, ``preset``, ``set`` for
            ``overrides`` and ``objective`` for one of the ``objectives``.

    Raises:
        SearchError: an unknown name, or a value that is not allowed.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    preset = given.pop("preset", None)
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise SearchError(f"There is no preset {preset!r}.", allowed=list(PRESETS))
    for short, long in (("set", "overrides"), ("objective", "objectives")):
        if short in given:
            value = given.pop(short)
            given[long] = [value] if short == "objective" and isinstance(value, str) else value
    known = [*SearchDefinition.model_fields, "preset", "set", "objective"]
    known.remove("in_force")
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise SearchError(
                f"A search has no {name!r}.",
                allowed=sorted(known),
                hint=f"Did you mean {close[0]!r}?" if close else None,
            )
    merged = {**(PRESETS[preset] if preset else {}), **given}
    if "space" not in merged:
        raise SearchError(
            "The search has no space.",
            hint="Give --preset article-grid, --space name=values or a file with [space].",
        )
    return checked_definition(merged)


def checked_definition(fields: Mapping[str, Any]) -> SearchDefinition:
    """A definition from the fields of :class:`SearchDefinition` by their own names.

    Raises:
        SearchError: a value that is not allowed.
    """
    try:
        definition = SearchDefinition.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SearchError(f"{where}: {first['msg']} (given: {first['input']!r}).") from error
    # Not the model's own check: it must still read searches of versions that ignored such a wish.
    if definition.replicate and len(definition.objectives) > 1:
        raise SearchError(
            "Replicates compare configurations by one objective, not by several.",
            hint="Leave --replicate out, or give one --objective.",
        )
    return definition


def read_definition_file(path: Path) -> dict[str, Any]:
    """The fields in a TOML file, for :func:`define_search`.

    Raises:
        SearchError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SearchError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SearchError(f"{path} is not valid TOML: {error}.") from error
