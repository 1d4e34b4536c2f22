"""Random numbers that depend on a seed, a sample's index and a position only.

A counter-based generator (SplitMix64, Steele et al. 2014): no state is kept, so a sequence gets the same
numbers whichever other sequences are sampled beside it.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def stream_keys(seed: int, count: int) -> np.ndarray:
    """Keys of ``count`` independent streams of one seed, ``[count]`` uint64."""
    base = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GAMMA)
    return _mix(base ^ _mix((np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GAMMA))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) a stream, at a position of it.

    Args:
        keys: ``[streams]`` uint64 from :func:`stream_keys`.
        positions: ``[streams]`` integers.

    Returns:
        ``[streams]`` float64.
    """
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
