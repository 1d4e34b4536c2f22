"""The ``rl_*`` functions for a Python prompt: synchronous, plain dicts in and out, never an exception.

>>> from hermes_rl.agent.functions import rl_list_environments
>>> rl_list_environments()["count"]
3

They share one default session, which holds what was selected and edited. Whoever needs several makes an
:class:`~hermes_rl.agent.session.AgentSession` each and uses :func:`hermes_rl.agent.toolset.call`.
"""

from __future__ import annotations

from typing import Any

from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import call

_default_session = AgentSession()


def _call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return call(_default_session, name, arguments)


def rl_list_environments() -> dict[str, Any]:
    """The environments that can be trained on: ``{"environments": [{"name", …}, …], "count"}``.

    Their files are read, not run; one that is broken is listed with its ``error``.
    """
    return _call("rl_list_environments")


def rl_select_environment(name: str, profile: str | None = None) -> dict[str, Any]:
    """Choose the environment of the next run and begin again from the defaults.

    Args:
        name: as :func:`rl_list_environments` shows it.
        profile: model profile, where the operator allows several.
    """
    return _call("rl_select_environment", name=name, profile=profile)


def rl_get_current_config() -> dict[str, Any]:
    """The configuration of the next run: ``{"environment", "profile", "tunable", "locked"}``.

    Each tunable field comes with its value, default, source (default, profile, policy or edit) and bounds.
    """
    return _call("rl_get_current_config")


def rl_edit_config(field: str, value: Any) -> dict[str, Any]:
    """Change a tunable field of the next run.

    Args:
        field: its name, for example ``"learning_rate"``.
        value: the new value; text such as ``"6e-5"`` is understood where it can mean only one thing.
    """
    return _call("rl_edit_config", field=field, value=value)


def rl_test_inference(
    models: list[str] | None = None,
    num_steps: int = 3,
    group_size: int | None = None,
    test_id: str | None = None,
    wait_seconds: float | None = None,
) -> dict[str, Any]:
    """Try the selected environment: do prompts, parsing and scoring work, and would groups teach something?

    Args:
        models: ``"base"`` (the default) or names that the operator has configured.
        num_steps: prompts (groups) per model.
        group_size: completions per prompt; None is the configuration's.
        test_id: a test that was started earlier, to ask for its result.
        wait_seconds: longest time to wait; None waits until the result is there.
    """
    return _call(
        "rl_test_inference",
        models=models,
        num_steps=num_steps,
        group_size=group_size,
        test_id=test_id,
        wait_seconds=wait_seconds,
    )


def rl_start_training() -> dict[str, Any]:
    """Start a run with the current configuration; ``{"run_id", …}`` at once. The run goes on by itself."""
    return _call("rl_start_training")


def rl_check_status(run_id: str | None = None) -> dict[str, Any]:
    """How a run stands: step of total steps, metrics, processes with CPU and memory, log files.

    Args:
        run_id: the run, or the beginning of its id; None is the latest.
    """
    return _call("rl_check_status", run_id=run_id)


def rl_stop_training(run_id: str, wait_seconds: float | None = None) -> dict[str, Any]:
    """Stop a run.

    Args:
        run_id: the run, or the beginning of its id.
        wait_seconds: longest time to wait until its processes have ended; None waits until they have, 0
            returns at once with the status ``stopping``.
    """
    return _call("rl_stop_training", run_id=run_id, wait_seconds=wait_seconds)


def rl_get_results(run_id: str | None = None, max_points: int = 40) -> dict[str, Any]:
    """What came of a run: evaluations, curves of at most ``max_points`` points, checkpoints, files."""
    return _call("rl_get_results", run_id=run_id, max_points=max_points)


def rl_list_runs(limit: int = 20) -> dict[str, Any]:
    """The last ``limit`` runs of the workspace, the newest first."""
    return _call("rl_list_runs", limit=limit)


def rl_start_search(
    preset: str | None = None,
    space: dict[str, Any] | None = None,
    strategy: str | None = None,
    trials: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Start a search around the current configuration; ``{"search_id", …}`` at once.

    Args:
        preset: ``article-grid`` (the default), ``article-random`` or ``article-bayes``.
        space: field → values, in place of the preset's.
        strategy: ``grid``, ``random``, ``tpe`` or ``gp``.
        trials: number of configurations.
        options: ``parallel``, ``refine``, ``replicate``, ``pruner``, ``objective``, ``constraints``,
            ``max_minutes``, ``max_steps``.
    """
    return _call("rl_start_search", preset=preset, space=space, strategy=strategy, trials=trials, **options)


def rl_check_search(search_id: str | None = None) -> dict[str, Any]:
    """How a search stands: trials done and running, the best so far."""
    return _call("rl_check_search", search_id=search_id)


def rl_stop_search(search_id: str, wait_seconds: float | None = None) -> dict[str, Any]:
    """Stop a search and its running trials.

    Args:
        search_id: the search, or the beginning of its id.
        wait_seconds: longest time to wait until they have ended; None waits until they have, 0 returns at
            once with the state ``stopping``.
    """
    return _call("rl_stop_search", search_id=search_id, wait_seconds=wait_seconds)


def rl_get_search_results(search_id: str | None = None, limit: int = 20) -> dict[str, Any]:
    """The ranked trials of a search, its best configuration, and its report."""
    return _call("rl_get_search_results", search_id=search_id, limit=limit)
