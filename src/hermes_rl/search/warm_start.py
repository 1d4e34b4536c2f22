"""Beginning with an earlier search: which one, whether its results mean the same here, and which count."""

from __future__ import annotations

from typing import Any

from hermes_rl.config import FIELDS, Workspace, find_profile
from hermes_rl.errors import SearchError
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.runner import TrialRunner
from hermes_rl.search.space import format_value, same_value
from hermes_rl.search.store import SearchStore
from hermes_rl.search.trial import TrialRecord

LEARNING_STRATEGIES = ("tpe", "gp")
"""Those that can make something of results they did not ask for."""
_CHANGES_NO_RESULT = frozenset(
    {
        "save_checkpoint_interval",
        "keep_checkpoints",
        "use_wandb",
        "wandb_name",
        "wandb_project",
        "wandb_group",
        "num_max_requests_at_once",
        "timeout",
        "worker_timeout",
        "max_eval_workers",
        "min_free_disk_mb",
        "max_seconds_without_batch",
        "max_seconds_without_answer",
        "base_url",
        "device",
    }
)
"""Fields that may be set otherwise than in the earlier search: where and how it ran, and what it kept."""


def resolve_warm_start(
    workspace: Workspace, definition: SearchDefinition, runner: TrialRunner
) -> SearchDefinition:
    """Look up the earlier search of a new one, which does not exist yet, and compare the two.

    Returns:
        the definition with the earlier search's whole id.

    Raises:
        SearchError: the strategy learns nothing from earlier results, there is no such search, its values
            mean something else, or none of its trials lies in this space.
    """
    if definition.warm_start is None:
        return definition
    if definition.strategy not in LEARNING_STRATEGIES:
        raise SearchError(
            f"The strategy {definition.strategy} has no warm start: it learns nothing from earlier results.",
            hint=f"Use --strategy {' or '.join(LEARNING_STRATEGIES)}, or leave --warm-start out.",
        )
    earlier = SearchStore.open(workspace, definition.warm_start)
    different = _differences(earlier.load().definition, definition, runner)
    if different:
        raise SearchError(
            f"The results of {earlier.search_id} mean something else here: {'; '.join(different)}.",
            hint="Set these as they were there, or leave --warm-start out.",
        )
    definition = definition.model_copy(update={"warm_start": earlier.search_id})
    if not warm_records(workspace, definition, runner):
        ended = sum(record.state == "completed" for record in earlier.records())
        raise SearchError(
            f"None of the {ended} completed trials of the search {earlier.search_id} lies in this space.",
            hint="Search the same fields over ranges that hold its values, or leave --warm-start out.",
        )
    return definition


def warm_records(
    workspace: Workspace, definition: SearchDefinition, runner: TrialRunner
) -> list[TrialRecord]:
    """The completed trials of the earlier search whose configurations are the new one's too.

    A field that only the earlier search tried must have had the value that is in force now.

    Raises:
        SearchError: the earlier search is gone.
    """
    assert definition.warm_start is not None
    earlier = SearchStore.open(workspace, definition.warm_start)
    fixed_here = [name for name in earlier.load().definition.space if name not in definition.space]
    in_force = runner.defaults(fixed_here)
    space, objectives = definition.build_space(), len(definition.objectives)
    return [
        record
        for record in earlier.records()
        if record.stage in ("search", "refine")
        and record.state == "completed"
        and len(record.values or ()) == objectives
        and all(
            same_value(record.params[name], in_force[name]) for name in fixed_here if name in record.params
        )
        and space.contains(space.snap(record.params))
    ]


def _differences(earlier: SearchDefinition, new: SearchDefinition, runner: TrialRunner) -> list[str]:
    """What makes the earlier search's values mean something else, each in words."""
    different: list[str] = []
    for name in ("environment", "profile"):
        there, here = getattr(earlier, name), getattr(new, name)
        if there != here:
            different.append(f"its {name} is {there}, not {here}")
    if earlier.objectives != new.objectives:
        different.append(f"its objective is {', '.join(earlier.objectives)}, not {', '.join(new.objectives)}")
    if different:
        return different
    names = set(earlier.overrides) | set(new.overrides)
    names -= {*earlier.space, *new.space, *_CHANGES_NO_RESULT}
    if all(objective.reduction == "last" for objective in new.build_objectives()):
        names.discard("steps_per_eval")
    here = runner.defaults(sorted(names))
    for name in sorted(names):
        there = earlier.overrides[name] if name in earlier.overrides else _usual(name, new.profile)
        if not same_value(there, here[name]):
            was = "not set" if there is None else format_value(there)
            different.append(f"its {name} was {was}, here it is {format_value(here[name])}")
    return different


def _usual(name: str, profile: str) -> Any:
    """The value of a field that nobody set; None for one of the environment's own."""
    field = FIELDS.get(name)
    return None if field is None else find_profile(profile).values.get(name, field.default)
