"""What a scored group says about the policy, whether or not it will teach anything.

``BaseEnv`` drops groups whose scores are all equal before they reach the API server, so the mean reward of
what arrives is not the mean reward of the policy. These counts are taken before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def check_group(group: Any, group_size: int) -> str | None:
    """What is wrong with a group as a training group, or None.

    Args:
        group: what ``collect_trajectories`` or ``postprocess_histories`` returned for one group.
        group_size: sequences that a group must have, unless it overrides that itself.
    """
    if not isinstance(group, Mapping):
        return f"a group must be a dict, got {type(group).__name__}"
    for name in ("tokens", "masks", "scores"):
        if not isinstance(group.get(name), Sequence) or isinstance(group.get(name), str):
            return f"a group must hold a list {name!r}"
    expected = (group.get("group_overrides") or {}).get("group_size", group_size)
    found = len(group["tokens"])
    if found != expected:
        return f"a group of {found} sequences where {expected} were expected"
    for name in ("masks", "scores"):
        if len(group[name]) != found:
            return f"a group with {found} sequences but {len(group[name])} {name}"
    return None


def count_group(group: Mapping[str, Any], max_token_len: int) -> dict[str, float]:
    """Counts of one well-formed group, to be summed over groups.

    Args:
        group: the group.
        max_token_len: sequences at least this long (in tokens) make ``BaseEnv`` drop the group; 0 or less
            means no limit.

    Returns:
        ``groups`` and exactly one of ``groups_mixed``, ``groups_all_right``, ``groups_all_wrong`` (scores
        all equal, above zero or not), ``rollouts``, ``correct`` (scores above zero), ``score_sum``,
        ``score_square_sum``, ``trained_tokens`` (mask not -100), ``tokens``, ``groups_too_long``.
    """
    scores = [float(score) for score in group["scores"]]
    correct = sum(score > 0 for score in scores)
    equal = len(set(scores)) == 1
    too_long = max_token_len > 0 and any(len(tokens) >= max_token_len for tokens in group["tokens"])
    return {
        "groups": 1,
        "groups_mixed": float(not equal),
        "groups_all_right": float(equal and correct > 0),
        "groups_all_wrong": float(equal and correct == 0),
        "groups_too_long": float(too_long),
        "rollouts": len(scores),
        "correct": correct,
        "score_sum": sum(scores),
        "score_square_sum": sum(score * score for score in scores),
        "tokens": sum(len(tokens) for tokens in group["tokens"]),
        "trained_tokens": sum(sum(value != -100 for value in mask) for mask in group["masks"]),
    }
