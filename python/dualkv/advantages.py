"""Advantages of responses relative to those of the same prompt: dualkv.losses.group_advantages."""

from __future__ import annotations

import torch

from ._tensors import array_tensor, require_choice, require_range
from .packing import _group_numbers

SCALES = ("group", "batch", "none")


def group_advantages(rewards, group_ids, *, scale: str = "group", eps: float = 1e-4) -> torch.Tensor:
    """Advantages relative to the other responses of the same prompt, A = (r - mean) / (std + eps).

    Groups have to be whole, so this comes before a batch is cut.

    Args:
        rewards: [S], finite, one for each response: a list, tensor or array of numbers. NaN: not scored; it
            counts in no mean and its advantage is 0.
        group_ids: [S], integers, strings or anything else that can be a key.
        scale: "group", std of the group; "batch", std of all rewards; "none", not divided (Dr. GRPO).
        eps: > 0, added to the standard deviation, which is that of samples (divided by n - 1).

    Returns:
        [S], in the type of floating point rewards, else float32. 0 for a group of one, and, but for rounding,
        where all rewards are equal.

    Raises:
        ValueError: an unknown `scale`, `eps` below 1e-12, not one id for each reward, or a reward that is
            infinite.
        TypeError: `rewards` are no real numbers, or a group id cannot be a key.
    """
    require_choice("scale", scale, SCALES)
    require_range("eps", eps, 1e-12)
    rewards = _rewards(rewards)
    groups = _group_numbers(group_ids).to(rewards.device)
    if rewards.shape != groups.shape:
        raise ValueError(
            f"rewards and group_ids must be [S], got shapes {list(rewards.shape)} and {list(groups.shape)}"
        )
    infinite = rewards.isinf()
    if infinite.any():
        place = int(infinite.nonzero()[0, 0])
        raise ValueError(
            f"rewards must be finite, or NaN for none, got rewards[{place}] {rewards[place].item()}"
        )
    names, group = groups.unique(return_inverse=True)

    def group_sums(values):
        return values.new_zeros(len(names)).index_add(0, group, values)[group]

    scored = ~rewards.isnan()
    values = torch.where(scored, rewards.double(), 0.0)
    # Large rewards are divided by a power of two, which is exact, so that no sum or square overflows.
    largest = torch.cat([values.abs(), values.new_ones(1)]).max()
    unit = largest / (2.0 * largest.frexp().mantissa)
    values, eps = values / unit, eps / unit
    sizes = group_sums(scored.double())
    centered = torch.where(scored, values - group_sums(values) / sizes.clamp(min=1), 0.0)
    if scale == "none":
        advantages = centered * unit
    elif scale == "group":
        advantages = centered / ((group_sums(centered**2) / (sizes - 1).clamp(min=1)).sqrt() + eps)
    else:
        std = values[scored].std() if scored.count_nonzero() > 1 else 0.0
        advantages = centered / (std + eps)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _rewards(rewards) -> torch.Tensor:
    """Rewards as a tensor of real numbers; its shape is not checked."""
    try:
        rewards = array_tensor(rewards, "rewards") if hasattr(rewards, "tolist") else torch.as_tensor(rewards)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"rewards must be a list of numbers: {error}") from error
    if rewards.is_complex():
        raise TypeError(f"rewards must be real numbers, got {rewards.dtype}")
    return rewards
