"""Hyperparameter search: a trial is a run.

Space, strategy, early stopping, replication, statistics and report; the algorithms are Optuna's.
"""
