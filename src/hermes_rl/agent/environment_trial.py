"""Entry of a process that tries an environment on one model:
``python -m hermes_rl.agent.environment_trial --run-dir DIR --steps N --output FILE``.

Calls the environment's own methods in the order of Atropos's ``process`` command: ``setup``, then for each
group ``get_next_item``, ``collect_trajectories`` and ``postprocess_histories``. Talks to the model at
``$HERMES_RL_INFERENCE_URL`` with ``$HERMES_RL_INFERENCE_KEY``, and to no API server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_rl.config import RunConfig, write_private
from hermes_rl.environments.group_counts import check_group, count_group
from hermes_rl.environments.redaction import own_secrets, redact_output, redacted
from hermes_rl.errors import EnvironmentFailedError, HermesRLError
from hermes_rl.parent_watch import watch_parent

URL_VARIABLE = "HERMES_RL_INFERENCE_URL"
KEY_VARIABLE = "HERMES_RL_INFERENCE_KEY"
_NOBODY = "http://127.0.0.1:9"
_MOST_EXAMPLES = 3
_LONGEST_TEXT = 600
IGNORED = -100

logger = logging.getLogger(__name__)


async def try_environment(config: RunConfig, steps: int) -> dict[str, Any]:
    """Take a few groups from the environment.

    Returns:
        Counts, scores per group, lengths, problems and examples.

    Raises:
        EnvironmentFailedError: it cannot be built or set up.
    """
    # These import atroposlib and transformers, which takes seconds.
    from hermes_rl.environments.loading import Endpoints, build, describe
    from hermes_rl.environments.metric_capture import MetricCapture, install

    install(MetricCapture(lambda _: None))
    endpoints = Endpoints(_NOBODY, os.environ[URL_VARIABLE], os.environ.get(KEY_VARIABLE, ""))
    env = build(config, endpoints)
    env.process_mode = True
    try:
        await env.setup()
    except Exception as error:
        raise EnvironmentFailedError(f"setup raised {describe(error)}.") from error
    trial = TrialReport(env.tokenizer, config.env.group_size, config.env.max_token_length)
    for _ in range(steps):
        began = time.monotonic()
        try:
            item = await env.get_next_item()
            if item is None:
                trial.problems.append("get_next_item has no more items.")
                break
            collected, _backlog = await env.collect_trajectories(item)
            groups = await env.postprocess_histories(collected) if collected else None
        except Exception as error:
            logger.exception("A group failed.")
            trial.problems.append(f"A group failed: {describe(error)}.")
            continue
        for group in groups if isinstance(groups, list) else [groups]:
            trial.add(group, time.monotonic() - began)
    return trial.as_dict()


class TrialReport:
    """What the groups of a trial say about prompts, parsing and scoring.

    Args:
        tokenizer: the environment's.
        group_size: completions that a group should have.
        max_length: longest sequence, in tokens.
    """

    def __init__(self, tokenizer: Any, group_size: int, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._group_size = group_size
        self._max_length = max_length
        self.problems: list[str] = []
        self._counts: dict[str, float] = {}
        self._scores: list[list[float]] = []
        self._seconds: list[float] = []
        self._prompt_lengths: list[int] = []
        self._completion_lengths: list[int] = []
        self._truncated = 0
        self._examples: list[dict[str, Any]] = []

    def add(self, group: Any, seconds: float) -> None:
        """Take one group."""
        wrong = check_group(group, self._group_size) if group else "the environment gave no group"
        if wrong is not None:
            self.problems.append(wrong[:1].upper() + wrong[1:] + ".")
            return
        for name, value in count_group(group, self._max_length).items():
            self._counts[name] = self._counts.get(name, 0) + value
        self._scores.append([float(score) for score in group["scores"]])
        self._seconds.append(seconds)
        completions = []
        for tokens, mask, score in zip(group["tokens"], group["masks"], group["scores"], strict=True):
            trained = [token for token, value in zip(tokens, mask, strict=True) if value != IGNORED]
            first = next((place for place, value in enumerate(mask) if value != IGNORED), len(mask))
            self._prompt_lengths.append(first)
            self._completion_lengths.append(len(trained))
            cut = bool(trained) and trained[-1] != self._tokenizer.eos_token_id
            self._truncated += cut
            completions.append({"text": self._text(trained), "score": float(score), "truncated": cut})
        if len(self._examples) < _MOST_EXAMPLES:
            ranked = sorted(completions, key=lambda completion: completion["score"], reverse=True)
            shown = ranked if len(ranked) <= 4 else ranked[:2] + ranked[-2:]
            self._examples.append({"prompt": self._prompt(group), "completions": shown})

    def _prompt(self, group: Mapping[str, Any]) -> str:
        mask = group["masks"][0]
        first = next((place for place, value in enumerate(mask) if value != IGNORED), len(mask))
        return self._text(group["tokens"][0][:first])

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        groups = len(self._scores)
        rollouts = len(self._completion_lengths)
        answer: dict[str, Any] = {
            "groups": groups,
            "rollouts": rollouts,
            "groups_that_teach": int(self._counts.get("groups_mixed", 0)),
            "groups_all_right": int(self._counts.get("groups_all_right", 0)),
            "groups_all_wrong": int(self._counts.get("groups_all_wrong", 0)),
            "score_mean": self._counts["score_sum"] / rollouts if rollouts else None,
            "scores": self._scores,
            "truncated": self._truncated,
            "prompt_tokens_max": max(self._prompt_lengths, default=None),
            "completion_tokens_mean": sum(self._completion_lengths) / rollouts if rollouts else None,
            "completion_tokens_max": max(self._completion_lengths, default=None),
            "seconds_per_group": sum(self._seconds) / groups if groups else None,
            "problems": list(dict.fromkeys(self.problems)),
            "examples": self._examples,
        }
        return {"works": groups > 0, "verdict": verdict(answer), **answer}


def verdict(report: Mapping[str, Any]) -> str:
    """What a report means for training, in a sentence or two."""
    groups, teaching = report["groups"], report["groups_that_teach"]
    if not groups:
        return "The environment gave no usable group: see problems."
    said = [f"{teaching} of {groups} groups would teach something (their scores differ)."]
    if report["groups_all_wrong"] == groups:
        said.append(
            "Every answer scored as wrong: the task is too hard for this model, or its answers are not "
            "parsed. Compare the examples with what the environment expects."
        )
    elif report["groups_all_right"] == groups:
        said.append("Every answer scored as right: there is nothing left to learn at this difficulty.")
    elif not teaching:
        said.append("Try more groups or a larger group_size before training.")
    if report["truncated"] * 2 > report["rollouts"]:
        said.append("Most answers were cut at the length limit.")
    return " ".join(said)


def main(argv: list[str] | None = None) -> int:
    """Run the process; its exit status."""
    parser = argparse.ArgumentParser(prog="hermes_rl.agent.environment_trial")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    secrets = own_secrets()
    watch_parent()
    try:
        config = RunConfig.from_yaml(options.run_dir / "run.yaml")
        secrets = own_secrets(config)
        redact_output(secrets)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        report = asyncio.run(try_environment(config, options.steps))
    except HermesRLError as error:
        report = {"works": False, "verdict": "The environment does not work.", **error.as_dict()}
    write_private(options.output, json.dumps(redacted(report, secrets)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
