"""When a poor trial is stopped: Optuna's pruners on the objective's curve.

``asha`` is asynchronous successive halving (Li et al., 2020, "A System for Massively Parallel
Hyperparameter Tuning"): at each rung a trial goes on only while it is in the best 1/eta of those that
reached the rung so far. ``hyperband`` runs several of those with different first rungs (Li et al., 2018).
``median`` stops a trial below the median of the others at the same step (Golovin et al., 2017, "Google
Vizier"). A trial that goes on is the same run going on: it never starts over.
"""

from __future__ import annotations

import optuna

from hermes_rl.search.definition import SearchDefinition


def first_rung(definition: SearchDefinition, total_steps: int, steps_per_eval: int) -> int:
    """The first step at which a trial can be stopped: an evaluated step near an eighth of the trial."""
    if definition.rungs is not None:
        return definition.rungs
    evaluations = max(1, round(total_steps / 8 / max(1, steps_per_eval)))
    return min(total_steps, evaluations * steps_per_eval)


def make_pruner(
    definition: SearchDefinition, total_steps: int, steps_per_eval: int
) -> optuna.pruners.BasePruner:
    """Optuna's pruner for a definition.

    Args:
        definition: the search.
        total_steps: optimizer steps of a whole trial.
        steps_per_eval: optimizer steps between two values of the objective.
    """
    rung = first_rung(definition, total_steps, steps_per_eval)
    if definition.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=rung - 1, n_min_trials=3)
    if definition.pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=rung, reduction_factor=definition.reduction_factor, min_early_stopping_rate=0
        )
    if definition.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(
            min_resource=rung, max_resource=total_steps, reduction_factor=definition.reduction_factor
        )
    return optuna.pruners.NopPruner()
