"""dualkv.losses: policy-gradient losses from the log-probs of a packed batch.

    loss_fn = dualkv.losses.dapo()                          # or grpo, dr_grpo, gspo, cispo, sapo, PolicyLoss(...)
    advantages = dualkv.losses.group_advantages(rewards, group_ids)         # of the whole global batch
    counts = dualkv.losses.count(batches)                                   # of the whole global batch
    for batch, own, old in zip(batches, advantages_of_batches, old_logprobs):
        logprobs, _ = packed_logprobs(model, batch)
        loss, metrics = loss_fn(logprobs, batch, own, counts, old_logprobs=old)
        loss.backward()

What a loss is divided by is passed in and never taken from the micro-batch at hand. Hence losses, gradients and
metrics of micro-batches add up to those of the global batch, however it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import torch

from ._tensors import (
    accumulation_dtype,
    int64_vector,
    integer,
    length_vector,
    number,
    require_bool,
    require_choice,
    require_list,
    require_mask,
    require_range,
    require_same_device,
    require_tensors,
)
from .advantages import group_advantages
from .packing import PackedBatch

OBJECTIVES = ("clip", "cispo", "sapo")
RATIOS = ("token", "sequence", "sequence-token")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
KL_ESTIMATORS = ("k1", "k2", "k3")
ROLLOUT_CORRECTIONS = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")
ADVANTAGE_LEVELS = ("response", "token")

# Exponents are clamped to +-20, where exp is finite in every type and every sensible ratio is clipped already.
_MAX_EXPONENT = 20.0

__all__ = [
    "Counts",
    "PolicyLoss",
    "cispo",
    "count",
    "dapo",
    "dr_grpo",
    "group_advantages",
    "grpo",
    "gspo",
    "sapo",
]

Responses = Union[PackedBatch, Sequence[int]]


@dataclass(frozen=True)
class Counts:
    """What losses are divided by: of the global batch, over all of its micro-batches and ranks.

    Counts add up: `count(these) + count(those)`, `sum(counts_of_parts)`. They may be more than those of the
    batches that a loss is called with, never less.

    Attributes:
        tokens: tokens that the masks keep.
        sequences: responses with at least one such token.

    Raises:
        ValueError: one of them is negative, or there are more sequences than tokens.
        TypeError: one of them is not an integer.
    """

    tokens: int
    sequences: int

    def __post_init__(self):
        for name in ("tokens", "sequences"):
            object.__setattr__(self, name, integer(getattr(self, name), name, least=0))
        if self.sequences > self.tokens:
            raise ValueError(
                "sequences must be at most tokens, since each has one, "
                f"got sequences {self.sequences} and tokens {self.tokens}"
            )

    def __add__(self, other: Counts) -> Counts:
        if not isinstance(other, Counts):
            return NotImplemented
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences)

    def __radd__(self, other: int) -> Counts:
        """For sum(), which starts with 0."""
        return self if other == 0 else NotImplemented


def count(batches: Sequence[Responses], masks: Sequence[torch.Tensor | None] | None = None) -> Counts:
    """The denominators of a set of batches.

    Args:
        batches: packed batches, or for each the number of targets of its responses.
        masks: for each batch its mask [M] as the loss takes it, or None; None if no batch has one.

    Raises:
        ValueError: `masks` has another length than `batches`, a mask another than its batch has targets, or
            other values than 0 and 1.
        TypeError: `batches` or `masks` is no list, as where one batch was given, or a mask is no tensor.
    """
    require_list(batches, "batches", "batch")
    masks = [None] * len(batches) if masks is None else masks
    require_list(masks, "masks", "batch")
    if len(masks) != len(batches):
        raise ValueError(f"masks must have an entry for each batch, got {len(masks)} and {len(batches)}")
    tokens = sequences = 0
    for i, (batch, mask) in enumerate(zip(batches, masks)):
        lengths = _lengths(batch, f"batches[{i}]")
        if mask is not None:
            require_tensors(mask=mask)
            _require_size("mask", mask, sum(lengths))
            mask = mask.cpu()
            require_mask(mask, f"masks[{i}]")
            lengths = [int(own.count_nonzero()) for own in mask.split(lengths)]
        tokens += sum(lengths)
        sequences += sum(length > 0 for length in lengths)
    return Counts(tokens, sequences)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy-gradient loss: call it with log-probs. Its fields are the algorithm's choices.

    With logp, old, ref and rollout the log-probs of token t of response i under the policy, the policy before
    the update, the reference and the engine that sampled; A the advantage; sg[x] x without its gradient;
    means over a response taken over the |i| tokens that the mask keeps:

        ratio r         "token"           exp(logp - old)
                        "sequence"        exp(mean over i of logp - old)                         (GSPO)
                        "sequence-token"  sg[exp(mean over i of logp - old)] exp(logp - sg[logp])  (GSPO-token)

        objective J     "clip"            min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and with dual_clip c
                                          at least c A where A < 0
                        "cispo"           sg[clip(r, 1 - clip_low, 1 + clip_high)] A logp
                        "sapo"            4 / tau sigmoid(tau (r - 1)) A, tau = tau_positive if A > 0, else
                                          tau_negative

        rollout w       "token-..."       exp(old - rollout);  "sequence-..."  exp(sum over i of old - rollout)
                        "...-truncate"    w clipped to [rollout_min, rollout_max];  "...-mask"  0 outside of it
                        None              1

        kl              "k1"              logp - ref
                        "k2"              (logp - ref)^2 / 2
                        "k3"              exp(ref - logp) - (ref - logp) - 1

        token loss l    -w J + kl_coef kl, or with kl_ratio_weighted  -w J + kl_coef r kl

        aggregation     "token-mean"               sum of l / counts.tokens
                        "token-sum"                sum of l
                        "seq-mean-token-mean"      sum over i of (mean over i of l) / counts.sequences
                        "seq-mean-token-sum"       sum of l / counts.sequences
                        "seq-mean-token-sum-norm"  sum of l / (counts.sequences * length_norm)    (Dr. GRPO)

    Exponents are clamped to +-20. On-policy, k1 and k3 have the expectation KL(policy || reference), but only
    the gradients of k2, and of k1 and k3 weighted by the "token" ratio, have the expectation of its gradient:
    that of k1 is 0, and that of k3 is the gradient of KL(reference || policy).

    Attributes:
        objective, ratio, aggregation: as above.
        advantage_level: "response", one advantage for each, or "token".
        clip_low, clip_high: distances of the bounds from 1. 1 and math.inf leave none.
        dual_clip: c >= 1 + clip_high, or None.
        tau_positive, tau_negative: SAPO's temperatures.
        length_norm: a constant number of tokens, the longest response; for "seq-mean-token-sum-norm" only.
        kl_coef, kl_estimator, kl_ratio_weighted: the penalty against the reference. At 0 none.
        rollout_correction: weights against the engine's log-probs, "token-truncate", "token-mask",
            "sequence-truncate", "sequence-mask", or None.
        rollout_min, rollout_max: their bounds.

    Raises:
        ValueError: a choice or a number is none of those above; the message names it.
        TypeError: a number or a bool is something else.
    """

    objective: str = "clip"
    ratio: str = "token"
    aggregation: str = "token-mean"
    advantage_level: str = "response"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    length_norm: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_ratio_weighted: bool = False
    rollout_correction: str | None = None
    rollout_min: float = 0.0
    rollout_max: float = 2.0

    def __post_init__(self):
        require_choice("objective", self.objective, OBJECTIVES)
        require_choice("ratio", self.ratio, RATIOS)
        require_choice("aggregation", self.aggregation, AGGREGATIONS)
        require_choice("advantage_level", self.advantage_level, ADVANTAGE_LEVELS)
        require_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        require_choice("rollout_correction", self.rollout_correction, (*ROLLOUT_CORRECTIONS, None))
        require_bool(self.kl_ratio_weighted, "kl_ratio_weighted")
        require_range("clip_low", self.clip_low, 0.0, 1.0)
        require_range("clip_high", self.clip_high, 0.0, math.inf)
        require_range("kl_coef", self.kl_coef, 0.0)
        require_range("rollout_min", self.rollout_min, 0.0)
        require_range("rollout_max", self.rollout_max, self.rollout_min, math.inf)
        for name in ("tau_positive", "tau_negative"):
            require_range(name, getattr(self, name), 1e-6)  # 4 / tau stays finite
        if self.dual_clip is not None:
            if self.objective != "clip":
                raise ValueError(f'dual_clip needs objective "clip", got objective "{self.objective}"')
            if not 1.0 + self.clip_high <= number(self.dual_clip, "dual_clip") < math.inf:
                raise ValueError(
                    f"dual_clip must be finite and at least 1 + clip_high, {1.0 + self.clip_high:g}, or None for "
                    f"no dual clip, got {self.dual_clip:g}"
                )
        if (self.length_norm is not None) != (self.aggregation == "seq-mean-token-sum-norm"):
            raise ValueError(
                'length_norm is needed by aggregation "seq-mean-token-sum-norm" and by no other, '
                f'got length_norm {self.length_norm} and aggregation "{self.aggregation}"'
            )
        if self.length_norm is not None:
            require_range("length_norm", self.length_norm, 1.0)

    def __call__(
        self,
        logprobs: torch.Tensor,
        batch: Responses,
        advantages: torch.Tensor,
        counts: Counts,
        *,
        old_logprobs: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        rollout_logprobs: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The batch's part of the global batch's loss. Only `logprobs` gets a gradient.

        Args:
            logprobs: [M], log-probs of the batch's targets, as `linear_logprob` gives them.
            batch: the packed batch, or the number of targets of each of its S responses, [S].
            advantages: [S], in the order of groups and responses; [M] with advantage_level="token".
            counts: `count` of the global batch, of which this batch is a part, with the same masks. Where the
                host knows what the batch keeps (no mask, or tensors on the CPU), more than that is an error.
            old_logprobs: [M], before the update. None: those of now, and the ratio is 1.
            ref_logprobs: [M], needed by kl_coef > 0. At kl_coef 0 they only give the metric "kl".
            rollout_logprobs: [M], needed by rollout_correction; NaN where the engine has none: the weight is 1.
                Without a correction they only give the metric "rollout_kl". With -inf the metric is -inf,
                and the weight before its bounds exp(20).
            mask: [M], 1 for tokens that count, else 0, of any type; None: all. What stands in other places
                does not matter, be it NaN, and its gradient is 0.

        Returns:
            The loss, a scalar, and metrics: detached scalars that, like the loss, are to be added up over
            micro-batches and ranks. They are means over the kept tokens of the global batch:

            policy_loss             the loss without the penalty, aggregated like the loss
            tokens                  the number of kept tokens; 0 says that there was nothing to learn from, and
                                    a sum other than counts.tokens that `count` was given other masks
            ratio_mean              mean of r
            ppo_kl, approx_kl       old - logp, and exp(logp - old) - (logp - old) - 1: KL(old || policy)
            clip_fraction_low       r < 1 - clip_low where A < 0 ("clip"), anywhere ("cispo")
            clip_fraction_high      r > 1 + clip_high where A > 0 ("clip"), anywhere ("cispo")
            dual_clip_fraction      r > dual_clip where A < 0
            kl                      the penalty's kl
            rollout_kl              rollout - old: KL(rollout || old)
            rollout_weight_mean     mean of w
            rollout_clip_fraction   exp(..) outside of [rollout_min, rollout_max]

        Raises:
            ValueError: shapes or devices do not fit, a mask on the CPU has other values than 0 and 1, log-probs
                that an option needs are missing, or the batch keeps more tokens or responses than `counts` has.
            TypeError: something is no tensor, log-probs are no floats, or `counts` is no `Counts`.
        """
        given = {
            "logprobs": logprobs,
            "advantages": advantages,
            "old_logprobs": old_logprobs,
            "ref_logprobs": ref_logprobs,
            "rollout_logprobs": rollout_logprobs,
            "mask": mask,
        }
        targets = _Targets(batch, given)
        if not isinstance(counts, Counts):
            raise TypeError(f"counts must be dualkv.losses.Counts, got {type(counts).__name__}")
        targets.require_counted(counts)
        if self.kl_coef > 0 and ref_logprobs is None:
            raise ValueError(f"kl_coef needs ref_logprobs, got kl_coef {self.kl_coef} and no ref_logprobs")
        if self.rollout_correction is not None and rollout_logprobs is None:
            raise ValueError(
                f'rollout_correction "{self.rollout_correction}" needs rollout_logprobs, got None'
            )

        logprobs = targets.kept(logprobs)
        old = logprobs.detach() if old_logprobs is None else targets.kept(old_logprobs.detach())
        advantages = targets.advantages(advantages.detach(), self.advantage_level)
        weights = self._weights(targets, counts, logprobs)
        metrics = {"tokens": targets.mask.sum()}

        def mean(values):
            return torch.where(targets.mask, values.detach(), 0).sum() / max(counts.tokens, 1)

        log_ratio = logprobs - old
        ratio = _exp(self._log_ratio(targets, log_ratio, logprobs))
        metrics["ratio_mean"] = mean(ratio)
        metrics["ppo_kl"], metrics["approx_kl"] = mean(-log_ratio), mean(_k3(log_ratio))
        for name, clipped in self._clipped(ratio.detach(), advantages).items():
            metrics[name] = mean(clipped.to(ratio.dtype))

        token_loss = -self._objective(ratio, advantages, logprobs)
        if rollout_logprobs is not None:
            rollout = targets.kept(rollout_logprobs.detach())
            gap = torch.where(rollout.isnan(), 0.0, old - rollout)
            metrics["rollout_kl"] = mean(-gap)
            if self.rollout_correction is not None:
                bounded, outside = self._rollout_weights(targets, gap)
                token_loss = bounded * token_loss
                metrics["rollout_weight_mean"] = mean(bounded)
                metrics["rollout_clip_fraction"] = mean(outside.to(bounded.dtype))
        loss = (weights * token_loss).sum()
        metrics["policy_loss"] = loss.detach()

        if ref_logprobs is not None:
            kl = self._kl(logprobs, targets.kept(ref_logprobs.detach()))
            metrics["kl"] = mean(kl)
            if self.kl_coef > 0:
                penalty = kl * ratio if self.kl_ratio_weighted else kl
                loss = loss + self.kl_coef * (weights * penalty).sum()
        return loss, metrics

    def _log_ratio(self, targets, log_ratio, logprobs) -> torch.Tensor:
        if self.ratio == "token":
            return log_ratio
        of_response = targets.expand(targets.sums(log_ratio) / targets.kept_counts.clamp(min=1))
        if self.ratio == "sequence":
            return of_response
        return of_response.detach() + (logprobs - logprobs.detach())

    def _objective(self, ratio, advantages, logprobs) -> torch.Tensor:
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        if self.objective == "cispo":
            return clipped.detach() * advantages * logprobs
        if self.objective == "sapo":
            tau = torch.full_like(advantages, self.tau_negative).masked_fill(
                advantages > 0, self.tau_positive
            )
            return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
        # With c >= 1 + clip_high a ratio capped at c differs from its own only where A < 0 and r > c.
        capped = ratio if self.dual_clip is None else ratio.clamp(max=self.dual_clip)
        return torch.minimum(capped * advantages, clipped * advantages)

    def _clipped(self, ratio, advantages) -> dict[str, torch.Tensor]:
        """For each metric of clipping whether a token is clipped, bool [M]."""
        low, high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
        if self.objective == "sapo":
            return {}
        if self.objective == "cispo":
            return {"clip_fraction_low": low, "clip_fraction_high": high}
        negative, positive = advantages < 0, advantages > 0
        clipped = {"clip_fraction_low": low & negative, "clip_fraction_high": high & positive}
        if self.dual_clip is not None:
            clipped["dual_clip_fraction"] = (ratio > self.dual_clip) & negative
        return clipped

    def _rollout_weights(self, targets, gap) -> tuple[torch.Tensor, torch.Tensor]:
        """w [M] from old - rollout [M], and whether it was out of bounds, bool [M]."""
        level, mode = self.rollout_correction.split("-")
        weights = _exp(gap if level == "token" else targets.expand(targets.sums(gap)))
        outside = (weights < self.rollout_min) | (weights > self.rollout_max)
        if mode == "mask":
            return weights.masked_fill(outside, 0.0), outside
        return weights.clamp(self.rollout_min, self.rollout_max), outside

    def _kl(self, logprobs, reference) -> torch.Tensor:
        gap = logprobs - reference
        if self.kl_estimator == "k1":
            return gap
        return 0.5 * gap**2 if self.kl_estimator == "k2" else _k3(-gap)

    def _weights(self, targets, counts, logprobs) -> torch.Tensor:
        """Weight of each token's loss in the global batch's, [M]; 0 for those that the mask leaves out."""
        weights = targets.mask.to(logprobs.dtype)
        if self.aggregation == "token-sum":
            return weights
        if self.aggregation == "token-mean":
            return weights / max(counts.tokens, 1)
        if self.aggregation == "seq-mean-token-mean":
            weights = weights / targets.expand(targets.kept_counts.clamp(min=1))
        if self.aggregation == "seq-mean-token-sum-norm":
            weights = weights / self.length_norm
        return weights / max(counts.sequences, 1)


def grpo(**options) -> PolicyLoss:
    """GRPO (arXiv:2402.03300): clipped ratios, means of the responses' means. The paper has kl_coef=0.04."""
    return PolicyLoss(**{"aggregation": "seq-mean-token-mean", **options})


def dapo(**options) -> PolicyLoss:
    """DAPO (arXiv:2503.14476): a higher upper clip and the mean over all tokens, here with a dual clip of 10."""
    return PolicyLoss(**{"clip_high": 0.28, "dual_clip": 10.0, "aggregation": "token-mean", **options})


def dr_grpo(length_norm: float, **options) -> PolicyLoss:
    """Dr. GRPO (arXiv:2503.20783): divided by a constant length. Its advantages have scale="none"."""
    return PolicyLoss(length_norm=length_norm, aggregation="seq-mean-token-sum-norm", **options)


def gspo(**options) -> PolicyLoss:
    """GSPO (arXiv:2507.18071): one ratio for a response. ratio="sequence-token" lets advantages differ by token."""
    return grpo(**{"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, **options})


def cispo(**options) -> PolicyLoss:
    """CISPO (arXiv:2506.13585): clipped weights of log-probs. The bound is 5 as in ScaleRL (arXiv:2510.13786)."""
    return PolicyLoss(**{"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, **options})


def sapo(**options) -> PolicyLoss:
    """SAPO (arXiv:2511.20347): a smooth gate in place of the clip."""
    return grpo(**{"objective": "sapo", **options})


class _Targets:
    """Which response each of the M targets belongs to, and which of them count."""

    def __init__(self, batch: Responses, given: dict[str, torch.Tensor | None]):
        self._lengths = lengths = _lengths(batch, "batch")
        size, self._responses = sum(lengths), len(lengths)
        present = {name: x for name, x in given.items() if x is not None}
        require_tensors(**present)
        require_same_device(**present)
        for name, x in present.items():
            if name != "advantages":
                _require_size(name, x, size)
            if name.endswith("logprobs") and not x.is_floating_point():
                raise TypeError(f"{name} must be floating point numbers, got {x.dtype}")
        logprobs, mask = given["logprobs"], given["mask"]
        if mask is not None:
            require_mask(mask, "mask")
        self._dtype = accumulation_dtype(logprobs.dtype)
        index = torch.arange(self._responses, device="cpu").repeat_interleave(
            int64_vector(lengths, "lengths")
        )
        self._response = index.to(logprobs.device)  # of each target, [M]
        self.mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask != 0  # [M]
        self._has_mask = mask is not None
        self.kept_counts = self.sums(self.mask.to(self._dtype))  # [S]

    def require_counted(self, counts: Counts) -> None:
        """Checks that the batch can be a part of what was counted, unless a GPU had to be waited for."""
        kept = self._lengths
        if self._has_mask:
            if self.mask.device.type != "cpu":
                return
            kept = self.kept_counts.tolist()
        tokens, sequences = int(sum(kept)), sum(length > 0 for length in kept)
        for name, most, found in (
            ("tokens", counts.tokens, tokens),
            ("sequences", counts.sequences, sequences),
        ):
            if found > most:
                raise ValueError(
                    f"counts must be those of the whole batch, with the same masks: counts.{name} is {most}, "
                    f"but this part of it alone has {found}"
                )

    def kept(self, values) -> torch.Tensor:
        """values [M] in the type of sums, and 0 where the mask is 0: no NaN gets from there into a gradient."""
        return torch.where(self.mask, values.to(self._dtype), 0.0)

    def sums(self, values) -> torch.Tensor:
        """[M] -> sums over responses [S]."""
        return values.new_zeros(self._responses).index_add(0, self._response, values)

    def expand(self, values) -> torch.Tensor:
        """[S] -> [M]."""
        return values[self._response]

    def advantages(self, values, level: str) -> torch.Tensor:
        """[S] or [M] -> [M]."""
        if level == "token":
            _require_size("advantages", values, len(self.mask))
            return self.kept(values)
        if list(values.shape) != [self._responses]:
            raise ValueError(
                f"advantages must be [S], [{self._responses}], got shape {list(values.shape)}; "
                'one for each token needs advantage_level "token"'
            )
        return self.kept(self.expand(values))


def _lengths(batch: Responses, name: str) -> list[int]:
    """Number of targets of each response."""
    return batch._target_counts if isinstance(batch, PackedBatch) else length_vector(batch, name).tolist()


def _exp(exponent) -> torch.Tensor:
    return exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()


def _k3(log_ratio) -> torch.Tensor:
    """exp(x) - x - 1: not negative, and 0 at 0."""
    return _exp(log_ratio) - log_ratio - 1.0


def _require_size(name: str, x: torch.Tensor, size: int) -> None:
    if list(x.shape) != [size]:
        raise ValueError(f"{name} must be [M], [{size}], got shape {list(x.shape)}")
