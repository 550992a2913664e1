"""The search for the largest micro-batch that fits, for bench/policy_update.py."""

from __future__ import annotations

import math

WITHIN = 0.04  # as a share, between the largest that fits and the smallest that does not


def next_micro_batch(peaks: dict[int, int], fails: int | None, capacity: int) -> int | None:
    """The micro-batch to try next: where a line through the peaks of the two largest that fit meets the
    capacity; a step before what fails, if that is less; or in the middle, if the line is wrong by more than a step.
    It is a step above what fits, if there is room. None: what fits and what fails are close enough.

    peaks: bytes, by micro-batch that fits; fails: the smallest that does not; capacity: bytes."""
    fits = max(peaks)
    if fails is not None and fails - fits <= max(1, WITHIN * fits):
        return None
    smaller = max((count for count in peaks if count < fits), default=0)
    slope = (peaks[fits] - peaks.get(smaller, 0)) / (fits - smaller)
    guess = fits + int((capacity - peaks[fits]) / slope) if slope > 0 else 2 * fits
    step = math.ceil(WITHIN * (fails or fits))
    if fails is None:
        return max(guess, fits + step)
    middle = (fits + fails) // 2
    if guess >= fails + step:
        return middle
    return max(min(guess, fails - step), min(fits + step, middle))
