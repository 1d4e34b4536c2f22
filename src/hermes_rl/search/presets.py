"""Searches that are ready to run."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "article-grid": {
        "strategy": "grid",
        "space": {
            "learning_rate": [0.00002, 0.00004, 0.00006],
            "batch_size": [16, 32, 64],
            "lora_rank": [16, 32, 64],
        },
    },
    "article-random": {
        "strategy": "random",
        "trials": 24,
        "refine": 4,
        "space": {
            "learning_rate": "log:1e-5..2e-4",
            "batch_size": [16, 32, 64],
            "lora_rank": [8, 16, 32, 64],
            "max_batches_offpolicy": "int:1..4",
        },
    },
    "article-bayes": {
        "strategy": "tpe",
        "trials": 24,
        "space": {
            "learning_rate": "log:1e-5..2e-4",
            "batch_size": [16, 32, 64],
            "lora_rank": [8, 16, 32, 64],
            "max_batches_offpolicy": "int:1..4",
        },
    },
}
"""Name → the fields of a search definition that the preset sets.

``article-grid`` is the article's grid, 27 configurations; ``article-random`` and ``article-bayes`` are its
second and third method over ranges around the same defaults.
"""
