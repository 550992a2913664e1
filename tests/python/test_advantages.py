"""dualkv.losses.group_advantages: its formulas, rewards of any size and kind, and what it refuses."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from dualkv import losses
from dualkv.advantages import SCALES
from tiny_policy import assert_close


def test_group_advantages():
    rewards = [1.0, 0.0, 0.5, 1.0, 7.0, math.nan, 2.0, 2.0, math.nan]
    groups = ["a", "b", "a", "b", "c", "a", "d", "d", "e"]
    std = {"a": 0.125**0.5, "b": 0.5**0.5}  # of samples: 2 x 0.25^2 / 1, 2 x 0.5^2 / 1
    centered = [0.25, -0.5, -0.25, 0.5, 0, 0, 0, 0, 0]
    found = losses.group_advantages(torch.tensor(rewards, dtype=torch.float64), groups)
    expected = [x / (std.get(group, 1.0) + 1e-4) for x, group in zip(centered, groups)]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert losses.group_advantages(rewards, groups, scale="none").tolist() == centered
    of_batch = torch.tensor([x for x in rewards if not math.isnan(x)], dtype=torch.float64).std() + 0.5
    found = losses.group_advantages(
        torch.tensor(rewards, dtype=torch.float64), groups, scale="batch", eps=0.5
    )
    assert_close(found, torch.tensor(centered, dtype=torch.float64) / of_batch)
    assert losses.group_advantages([1, 0], torch.tensor([5, 5])).dtype == torch.float32
    assert losses.group_advantages([], []).shape == (0,)


@pytest.mark.parametrize("scale", SCALES)
def test_infinite_rewards_are_refused(scale):
    with pytest.raises(ValueError, match=r"rewards must be finite, .*, got rewards\[4\] -inf"):
        losses.group_advantages([1, 0, 1, 0, -math.inf, 0], [0, 0, 1, 1, 2, 2], scale=scale)
    with pytest.raises(ValueError, match=r"rewards\[1\] inf"):
        losses.group_advantages(torch.tensor([math.nan, math.inf]), [0, 0], scale=scale)


def test_rewards_of_any_size_and_array():
    for large in (1.0, 1e300, sys.float_info.max):
        for scale, expected in (("group", 0.5**0.5), ("batch", 0.5**0.5), ("none", large)):
            rewards = torch.tensor([large, -large], dtype=torch.float64)
            found = losses.group_advantages(rewards, [0, 0], scale=scale, eps=1e-12)
            torch.testing.assert_close(found, torch.tensor([expected, -expected], dtype=torch.float64))
    backwards = np.array([0.0, 1.0])[::-1].astype(">f4")
    expected = losses.group_advantages(torch.tensor([1.0, 0.0]), [0, 0])
    assert torch.equal(losses.group_advantages(backwards, [0, 0]), expected)


@pytest.mark.parametrize("rewards", [[1, None], ["a", "b"], [[1, 0], [0]], np.array(["a", "b"])])
def test_rewards_that_are_no_numbers_are_refused(rewards):
    with pytest.raises(TypeError, match="rewards must be a list of numbers"):
        losses.group_advantages(rewards, [0, 0])


def test_complex_rewards_are_refused():
    with pytest.raises(TypeError, match="rewards must be real numbers, got torch.complex64"):
        losses.group_advantages(torch.tensor([1j, 2]), [0, 0])


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_group_ids_that_are_not_equal_to_themselves_are_refused(kind):
    with pytest.raises(ValueError, match=r"group_ids\[1\] must be equal to itself, got nan"):
        losses.group_advantages([1.0, 0.0], kind([1.0, math.nan]))
