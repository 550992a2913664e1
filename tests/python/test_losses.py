"""dualkv.losses against their formulas, one token after the other; cuts, masks, and cases J and K of a loss.

test_losses_peers.py compares with the code of TRL and veRL.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import dualkv
from dualkv import losses
from dualkv.losses import Counts, PolicyLoss
from tiny_policy import TinyPolicy, assert_close, random_groups

LENGTHS = [5, 1, 4, 0, 3, 2]


class Problem:
    """Random numbers for responses of `lengths`, in float64; some tokens are masked, one response wholly."""

    def __init__(self, lengths=LENGTHS, seed: int = 0, spread: float = 0.4):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, size = list(lengths), sum(lengths)

        def normal(n):
            return torch.randn(n, generator=generator, dtype=torch.float64)

        self.logprobs = (-normal(size).abs() - 0.1).requires_grad_()
        self.advantages = normal(len(lengths))
        near = [self.logprobs.detach() + spread * normal(size) for _ in range(3)]
        self.inputs = dict(zip(("old_logprobs", "ref_logprobs", "rollout_logprobs"), near))
        self.mask = torch.rand(size, generator=generator) < 0.8
        if len(lengths) > 4:
            self.mask[sum(lengths[:4]) : sum(lengths[:5])] = False
        self.counts = losses.count([self.lengths], [self.mask])

    def __call__(self, loss_fn: PolicyLoss, logprobs=None):
        logprobs = self.logprobs if logprobs is None else logprobs
        return loss_fn(logprobs, self.lengths, self.advantages, self.counts, mask=self.mask, **self.inputs)


def loss_of_tokens(loss_fn: PolicyLoss, problem: Problem) -> float:
    """The formulas of PolicyLoss, in numbers of Python."""
    total, begin = 0.0, 0
    for response, length in enumerate(problem.lengths):
        tokens = [t for t in range(begin, begin + length) if problem.mask[t]]
        begin += length
        advantage = problem.advantages[response].item()
        logp, old, ref, rollout = (
            {t: x[t].item() for t in tokens} for x in (problem.logprobs, *problem.inputs.values())
        )
        if not tokens:
            continue
        mean_log_ratio = math.fsum(logp[t] - old[t] for t in tokens) / len(tokens)
        rollout_sum = math.fsum(old[t] - rollout[t] for t in tokens)
        for t in tokens:
            r = math.exp(logp[t] - old[t] if loss_fn.ratio == "token" else mean_log_ratio)
            clipped = min(max(r, 1 - loss_fn.clip_low), 1 + loss_fn.clip_high)
            if loss_fn.objective == "clip":
                value = min(r * advantage, clipped * advantage)
                if loss_fn.dual_clip is not None and advantage < 0:
                    value = max(value, loss_fn.dual_clip * advantage)
            elif loss_fn.objective == "cispo":
                value = clipped * advantage * logp[t]
            else:
                tau = loss_fn.tau_positive if advantage > 0 else loss_fn.tau_negative
                value = 4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage
            if loss_fn.rollout_correction is not None:
                level, mode = loss_fn.rollout_correction.split("-")
                w = math.exp(old[t] - rollout[t] if level == "token" else rollout_sum)
                low, high = loss_fn.rollout_min, loss_fn.rollout_max
                value *= min(max(w, low), high) if mode == "truncate" else w * (low <= w <= high)
            gap = logp[t] - ref[t]
            kl = {"k1": gap, "k2": gap**2 / 2, "k3": math.exp(-gap) + gap - 1}[loss_fn.kl_estimator]
            loss = -value + loss_fn.kl_coef * kl * (r if loss_fn.kl_ratio_weighted else 1)
            if loss_fn.aggregation == "token-mean":
                loss /= problem.counts.tokens
            elif loss_fn.aggregation != "token-sum":
                loss /= problem.counts.sequences
            if loss_fn.aggregation == "seq-mean-token-mean":
                loss /= len(tokens)
            total += loss / (loss_fn.length_norm or 1)
    return total


def every_loss():
    """Objectives, ratios and aggregations in all combinations, the other choices in turn."""
    rng = random.Random(0)
    choices = itertools.product(losses.OBJECTIVES, losses.RATIOS, losses.AGGREGATIONS, range(4))
    for objective, ratio, aggregation, _ in choices:
        yield PolicyLoss(
            objective=objective,
            ratio=ratio,
            aggregation=aggregation,
            clip_low=rng.choice([0.1, 0.2, 1.0]),
            clip_high=rng.choice([0.1, 0.28]),
            dual_clip=rng.choice([None, 1.28, 1.5]) if objective == "clip" else None,
            length_norm=7.0 if aggregation == "seq-mean-token-sum-norm" else None,
            kl_coef=rng.choice([0.0, 0.3]),
            kl_estimator=rng.choice(losses.KL_ESTIMATORS),
            kl_ratio_weighted=rng.random() < 0.5,
            rollout_correction=rng.choice([None, *losses.ROLLOUT_CORRECTIONS]),
            rollout_min=0.7,
            rollout_max=1.4,
        )


def test_losses_are_their_formulas():
    for seed, loss_fn in enumerate(every_loss()):
        problem = Problem(seed=seed)
        loss, _ = problem(loss_fn)
        expected = loss_of_tokens(loss_fn, problem)
        assert math.isclose(loss.item(), expected, rel_tol=1e-13, abs_tol=1e-14), loss_fn


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("objective", ["clip", "sapo"])
def test_gradients_are_the_derivatives(objective, ratio):
    """Of the losses that hold no factor constant."""
    for seed, aggregation in enumerate(losses.AGGREGATIONS):
        problem = Problem(seed=seed)
        loss_fn = PolicyLoss(
            objective=objective,
            ratio=ratio,
            aggregation=aggregation,
            length_norm=7 if aggregation == "seq-mean-token-sum-norm" else None,
            dual_clip=1.5 if objective == "clip" else None,
            kl_coef=0.3,
            kl_ratio_weighted=seed % 2 == 0,
            rollout_correction="token-truncate",
        )
        assert torch.autograd.gradcheck(lambda x: problem(loss_fn, x)[0], problem.logprobs)


def test_cispo_gradient_is_a_clipped_weight():
    problem = Problem([4, 3], spread=1.0)
    problem.mask[:] = True
    loss, metrics = problem(losses.cispo(clip_high=0.5, aggregation="token-sum"))
    ratio = (problem.logprobs - problem.inputs["old_logprobs"]).exp().detach()
    advantages = problem.advantages[[0, 0, 0, 0, 1, 1, 1]]
    (gradient,) = torch.autograd.grad(loss, problem.logprobs)
    assert_close(gradient, -ratio.clamp(max=1.5) * advantages)
    assert 0 < metrics["clip_fraction_high"] < 1 and metrics["clip_fraction_low"] == 0


def test_gspo_token_has_the_gradient_of_gspo():
    """As long as a response has one advantage. With one for each token every token's gradient has its own."""
    problem = Problem(spread=0.01)
    gradients = [
        torch.autograd.grad(problem(losses.gspo(ratio=ratio))[0], problem.logprobs)[0]
        for ratio in ("sequence", "sequence-token")
    ]
    assert gradients[0].any()
    assert_close(*gradients)
    problem.advantages = torch.zeros(sum(LENGTHS))
    problem.advantages[1] = 1.0
    problem.mask[:] = True
    problem.counts = losses.count([LENGTHS])
    for ratio, reached in (("sequence", 5), ("sequence-token", 1)):
        options = {"clip_low": 1.0, "clip_high": math.inf, "advantage_level": "token"}
        loss, _ = problem(losses.gspo(ratio=ratio, **options))
        (gradient,) = torch.autograd.grad(loss, problem.logprobs)
        assert gradient.count_nonzero() == reached


def test_gradients_of_the_penalties_on_average():
    """Over a distribution: which estimators have the gradient of KL(policy || reference), as PolicyLoss says."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    reference = reference.log_softmax(0)

    def gradient_on_average(**options):
        """All advantages are 0; each token counts by its probability."""
        logprobs = logits.log_softmax(0)
        total = 0
        for token, probability in enumerate(logprobs.detach().exp()):
            loss_fn = PolicyLoss(kl_coef=1.0, **options)
            one = logprobs[token : token + 1]
            loss, _ = loss_fn(
                one, [1], torch.zeros(1), Counts(1, 1), ref_logprobs=reference[token : token + 1]
            )
            total = total + probability * loss
        return torch.autograd.grad(total, logits)[0]

    logprobs = logits.log_softmax(0)
    reverse = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)[0]
    forward = torch.autograd.grad((reference.exp() * (reference - logits.log_softmax(0))).sum(), logits)[0]
    assert_close(gradient_on_average(kl_estimator="k2"), reverse)
    assert_close(gradient_on_average(kl_estimator="k1", kl_ratio_weighted=True), reverse)
    assert_close(gradient_on_average(kl_estimator="k3", kl_ratio_weighted=True), reverse)
    assert_close(gradient_on_average(kl_estimator="k3"), forward)
    assert gradient_on_average(kl_estimator="k1").abs().max() < 1e-15


def test_micro_batches_add_up_to_the_batch():
    """Losses, gradients and metrics, however the responses are cut into micro-batches, some without a token."""
    for seed, loss_fn in enumerate(every_loss()):
        rng = random.Random(seed)
        problem = Problem([rng.choice((0, 1, 2, 5)) for _ in range(9)], seed)
        whole, metrics = problem(loss_fn)
        cuts = sorted(rng.choices(range(10), k=rng.randint(0, 4)))
        parts, sums, counts = 0.0, dict.fromkeys(metrics, 0.0), Counts(0, 0)
        for begin, end in itertools.pairwise([0, *cuts, 9]):
            first, last = sum(problem.lengths[:begin]), sum(problem.lengths[:end])
            lengths = problem.lengths[begin:end]
            loss, own = loss_fn(
                problem.logprobs[first:last],
                lengths,
                problem.advantages[begin:end],
                problem.counts,
                mask=problem.mask[first:last],
                **{name: x[first:last] for name, x in problem.inputs.items()},
            )
            parts = parts + loss
            sums = {name: value + own[name] for name, value in sums.items()}
            counts += losses.count([lengths], [problem.mask[first:last]])
        assert counts == problem.counts
        assert_close(parts, whole, message=loss_fn)
        gradients = [torch.autograd.grad(loss, problem.logprobs)[0] for loss in (parts, whole)]
        assert_close(*gradients, message=loss_fn)
        for name, value in metrics.items():
            assert math.isclose(sums[name], value, rel_tol=1e-12, abs_tol=1e-15), (name, loss_fn)


def test_K3_token_mean_of_any_cut():
    """One token with loss 4 and three with loss 0: 1, where a mean of means gives 2."""
    loss_fn = losses.dapo(advantage_level="token")
    for cut in ([[1, 3]], [[1], [3]], [[1], [2, 1]], [[1, 1], [1, 1]]):
        counts, logprobs = losses.count(cut), torch.zeros(4, requires_grad=True)
        pieces = zip(cut, logprobs.split([sum(part) for part in cut]))
        advantages = torch.tensor([-4.0, 0, 0, 0]).split([sum(part) for part in cut])
        loss = sum(loss_fn(x, part, own, counts)[0] for (part, x), own in zip(pieces, advantages))
        assert loss == 1.0
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert gradient.tolist() == [1, 0, 0, 0]


def test_K2_masked_tokens_are_in_no_denominator():
    """30 tokens of loss 1, of which a response of 5 is masked; and a filler row."""
    lengths, mask = [10, 15, 5], torch.ones(30)
    mask[25:] = 0
    for filler in ([], [8]):
        kept = torch.cat([mask, torch.zeros(sum(filler))])
        counts = losses.count([lengths + filler], [kept])
        assert counts == Counts(tokens=25, sequences=2)
        for aggregation, expected in (("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("token-sum", 25.0)):
            loss_fn = PolicyLoss(aggregation=aggregation)
            advantages = -torch.ones(len(lengths + filler))
            loss, metrics = loss_fn(torch.zeros(len(kept)), lengths + filler, advantages, counts, mask=kept)
            assert abs(loss.item() - expected) < 1e-6
            assert metrics["tokens"] == 25


@pytest.mark.parametrize("preset", [losses.grpo, losses.dapo, losses.gspo, losses.cispo, losses.sapo])
def test_K5_nothing_to_learn_from_is_zero_with_a_backward_pass(preset):
    """All masked, with NaN everywhere; no tokens; no responses. The metric "tokens" tells."""
    loss_fn = preset(kl_coef=0.1, rollout_correction="sequence-mask")
    for lengths in ([2, 3], [0, 0], []):
        size = sum(lengths)
        logprobs = torch.full((size,), math.nan, requires_grad=True)
        others = {f"{name}_logprobs": torch.full((size,), math.nan) for name in ("old", "ref", "rollout")}
        mask = torch.zeros(size, dtype=torch.bool)
        counts = losses.count([lengths], [mask])
        assert counts == Counts(0, 0)
        advantages = torch.full((len(lengths),), math.nan)
        for own in (counts, Counts(100, 10)):  # by itself, and as a filler step of a batch
            loss, metrics = loss_fn(logprobs, lengths, advantages, own, mask=mask, **others)
            (gradient,) = torch.autograd.grad(loss, logprobs)
            assert loss.item() == 0.0 and gradient.tolist() == [0.0] * size
            assert all(value.item() == 0 for value in metrics.values()), metrics


def test_K5_masked_tokens_are_as_if_they_were_not_there():
    """Whatever stands in their places: NaN, infinity."""
    for seed, loss_fn in enumerate(every_loss()):
        problem = Problem(seed=seed)
        for x in (problem.logprobs.detach(), *problem.inputs.values()):
            x[~problem.mask] = math.nan if seed % 2 else -math.inf
        loss, metrics = problem(loss_fn)
        (gradient,) = torch.autograd.grad(loss, problem.logprobs)
        assert not gradient[~problem.mask].any()
        alone = Problem()
        alone.lengths = [int(own.sum()) for own in problem.mask.split(problem.lengths)]
        kept = problem.mask
        alone.logprobs, alone.mask = problem.logprobs[kept], kept[kept]
        alone.inputs = {name: x[kept] for name, x in problem.inputs.items()}
        alone.advantages, alone.counts = problem.advantages, problem.counts
        right, expected = alone(loss_fn)
        assert_close(loss, right)
        assert_close(gradient, torch.autograd.grad(right, problem.logprobs)[0])
        for name, value in expected.items():
            assert math.isclose(metrics[name], value, rel_tol=1e-12, abs_tol=1e-15), name


def test_J4_split_group_has_the_gradient_of_the_whole():
    """Packs of responses [0, 1, 2] and [3]: advantages and denominators are of the whole group."""
    policy = TinyPolicy()
    prompts, (responses,) = random_groups([(9, (4, 1, 6, 3))])
    advantages = losses.group_advantages([1.0, 0.0, 0.0, 1.0], [0] * 4).tolist()
    packs = [dualkv.pack(prompts, [part]) for part in (responses[:3], responses[3:])]
    counts = losses.count(packs)
    assert counts == losses.count([dualkv.pack(prompts, [responses])]) == Counts(14, 4)
    for loss_fn in (losses.grpo(), losses.dapo(), losses.dr_grpo(6), losses.gspo(), losses.cispo()):
        batch = dualkv.pack(prompts, [responses])
        old = policy.logprobs(batch).detach() + 0.1
        logprobs = policy.logprobs(batch)
        loss, _ = loss_fn(logprobs, batch, torch.tensor(advantages), counts, old_logprobs=old)
        expected = policy.gradients(loss)
        sums = [torch.zeros_like(x) for x in policy.weights]
        for pack, own, before in zip(packs, (advantages[:3], advantages[3:]), old.split([11, 3])):
            loss, _ = loss_fn(policy.logprobs(pack), pack, torch.tensor(own), counts, old_logprobs=before)
            sums = [x + y for x, y in zip(sums, policy.gradients(loss))]
        assert_close(sums, expected)


def test_J11_responses_with_the_same_first_tokens_keep_terms_of_their_own():
    policy = TinyPolicy()
    for responses, advantages in (([[7, 8, 9], [7, 8, 5]], [1.0, -2.0]), ([[7, 8, 9]] * 2, [1.0, 1.0])):
        batch = dualkv.pack([[1, 2, 3]], [responses])
        counts = losses.count([batch])
        assert counts == Counts(6, 2)
        gradients = []
        for logprobs in (policy.logprobs(batch), policy.replicated_logprobs([[1, 2, 3]], [responses])):
            loss, _ = losses.dapo()(logprobs, batch, torch.tensor(advantages), counts)
            gradients.append(policy.gradients(loss))
        assert_close(*gradients)


def test_without_old_log_probs_the_ratio_is_one():
    problem = Problem()
    del problem.inputs["old_logprobs"]
    loss, metrics = problem(losses.dapo(aggregation="token-sum"))
    (gradient,) = torch.autograd.grad(loss, problem.logprobs)
    advantages = problem.advantages.repeat_interleave(torch.tensor(LENGTHS))
    assert_close(gradient, -advantages * problem.mask)
    assert metrics["ratio_mean"] == 1 and metrics["ppo_kl"] == metrics["approx_kl"] == 0
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


def test_metrics_are_means_over_the_kept_tokens():
    problem = Problem(spread=1.0)
    loss_fn = losses.dapo(dual_clip=1.5, kl_coef=0.1, rollout_correction="token-truncate")
    loss, metrics = problem(loss_fn)
    logp, old, ref, rollout = (x.detach()[problem.mask] for x in (problem.logprobs, *problem.inputs.values()))
    advantages = problem.advantages.repeat_interleave(torch.tensor(LENGTHS))[problem.mask]
    ratio, weight = (logp - old).exp(), (old - rollout).exp()
    gap = ref - logp
    expected = {
        "policy_loss": loss - 0.1 * (gap.exp() - gap - 1).mean(),
        "tokens": torch.tensor(float(len(logp))),
        "ratio_mean": ratio.mean(),
        "ppo_kl": (old - logp).mean(),
        "approx_kl": (ratio - 1 - (logp - old)).mean(),
        "clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).double().mean(),
        "clip_fraction_high": ((ratio > 1.28) & (advantages > 0)).double().mean(),
        "dual_clip_fraction": ((ratio > 1.5) & (advantages < 0)).double().mean(),
        "kl": (gap.exp() - gap - 1).mean(),
        "rollout_kl": (rollout - old).mean(),
        "rollout_weight_mean": weight.clamp(max=2).mean(),
        "rollout_clip_fraction": (weight > 2).double().mean(),
    }
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert not value.requires_grad
        torch.testing.assert_close(value.double(), expected[name].double().detach(), rtol=1e-12, atol=1e-15)


def test_rollout_log_probs_that_are_missing_have_weight_one():
    rollout = torch.tensor([-1.0, math.nan, -3.0])
    loss_fn = losses.dapo(rollout_correction="token-truncate", aggregation="token-sum")
    logprobs = torch.full((3,), -2.0, requires_grad=True)
    loss, _ = loss_fn(logprobs, [3], torch.ones(1), Counts(3, 1), rollout_logprobs=rollout)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -torch.tensor([math.exp(-1), 1.0, 2.0]))


def test_rollout_log_probs_of_minus_infinity_invent_no_numbers():
    rollout = torch.tensor([-1.0, -math.inf, -3.0])
    for correction, expected in (("token-truncate", [math.exp(-1), 2.0, 2.0]), ("sequence-mask", [0.0] * 3)):
        loss_fn = losses.dapo(rollout_correction=correction, aggregation="token-sum")
        logprobs = torch.full((3,), -2.0, requires_grad=True)
        loss, metrics = loss_fn(logprobs, [3], torch.ones(1), Counts(3, 1), rollout_logprobs=rollout)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        torch.testing.assert_close(gradient, -torch.tensor(expected))
        assert metrics["rollout_kl"] == -math.inf
        assert all(value.isfinite() for name, value in metrics.items() if name != "rollout_kl")


def test_batches_that_keep_more_than_was_counted_are_refused():
    loss_fn, x, advantages = losses.dapo(), torch.zeros(3), torch.ones(2)
    kept = torch.tensor([True, False, True])
    loss_fn(x, [2, 1], advantages, Counts(2, 2), mask=kept)
    for counts, options, message in (
        (Counts(0, 0), {}, "counts.tokens is 0, but this part of it alone has 3"),
        (Counts(1, 1), {}, "counts.tokens is 1, .* has 3"),
        (Counts(3, 1), {}, "counts.sequences is 1, .* has 2"),
        (Counts(1, 1), {"mask": kept}, "counts.tokens is 1, .* has 2"),
        (Counts(2, 1), {"mask": kept}, "counts.sequences is 1, .* has 2"),
        # Counted with the mask, called without it.
        (losses.count([[2, 1]], [kept]), {}, "with the same masks: counts.tokens is 2, .* has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_fn(x, [2, 1], advantages, counts, **options)


def test_masks_that_were_not_counted_show_in_the_metric():
    """The loss cannot tell: what it sees may be a part of the batch."""
    kept = torch.tensor([True, False, True])
    counts = losses.count([[2, 1]])
    _, metrics = losses.dapo()(torch.zeros(3), [2, 1], torch.ones(2), counts, mask=kept)
    assert metrics["tokens"] == 2 != counts.tokens


@pytest.mark.parametrize("wrong", [-100, 2, 0.5, math.nan])
def test_masks_are_0_and_1(wrong):
    """Labels are none, nor are weights."""
    mask, labels = torch.tensor([1, 0, wrong]), torch.tensor([7, -100, 9])
    message = rf"\[2\] must be 0 or 1, got {wrong}; labels are no mask, labels != -100 is one"
    with pytest.raises(ValueError, match=r"masks\[1\]" + message):
        losses.count([[1], [2, 1]], [None, mask])
    with pytest.raises(ValueError, match="mask" + message):
        losses.dapo()(torch.zeros(3), [2, 1], torch.ones(2), Counts(3, 2), mask=mask)
    assert losses.count([[2, 1]], [labels != -100]) == Counts(2, 2)


def test_counts_add_up_and_are_integers():
    assert sum([Counts(3, 2), Counts(4, 1)]) == Counts(3, 2) + Counts(4, 1) == Counts(7, 3)
    assert Counts(torch.tensor(3), torch.tensor(2)) == Counts(3, 2)
    for add in (lambda: Counts(3, 2) + 1, lambda: 1 + Counts(3, 2)):
        with pytest.raises(TypeError, match="unsupported operand"):
            add()
    with pytest.raises(TypeError, match="tokens must be an integer, got float"):
        Counts(3.0, 2)
    with pytest.raises(ValueError, match="tokens must be >= 0, got -1"):
        Counts(-1, 0)
    with pytest.raises(ValueError, match="sequences must be at most tokens, .* got sequences 5 and tokens 2"):
        Counts(2, 5)


def test_no_mask_is_read_from_another_device():
    """Without a mask the lengths say what is kept; a mask on a device is left there. "meta" has no values."""
    x, advantages = torch.zeros(3, device="meta"), torch.zeros(2, device="meta")
    losses.dapo()(x, [2, 1], advantages, Counts(1, 1), mask=x)
    with pytest.raises(ValueError, match="counts.tokens is 1, .* has 3"):
        losses.dapo()(x, [2, 1], advantages, Counts(1, 1))


def test_a_gpu_gives_what_the_cpu_gives(gpu):
    for seed, loss_fn in enumerate(every_loss()):
        problem = Problem(seed=seed)
        loss, _ = problem(loss_fn)
        expected = [loss, *torch.autograd.grad(loss, problem.logprobs)]
        problem.advantages, problem.mask = problem.advantages.to(gpu), problem.mask.to(gpu)
        problem.inputs = {name: x.to(gpu) for name, x in problem.inputs.items()}
        logprobs = problem.logprobs.detach().to(gpu).requires_grad_()
        loss, _ = problem(loss_fn, logprobs)
        found = [loss, *torch.autograd.grad(loss, logprobs)]
        assert_close([x.cpu() for x in found], expected, message=loss_fn)


def test_only_log_probs_get_gradients_and_two_byte_floats_are_summed_in_float32():
    problem = Problem()
    for x in (problem.advantages, *problem.inputs.values()):
        x.requires_grad_()
    loss, _ = problem(losses.grpo(kl_coef=0.1, rollout_correction="token-mask"))
    loss.backward()
    assert all(x.grad is None for x in (problem.advantages, *problem.inputs.values()))
    loss, metrics = problem(losses.grpo(), problem.logprobs.bfloat16())
    assert loss.dtype == metrics["kl"].dtype == torch.float32


def test_far_log_probs_give_finite_losses_and_gradients():
    logprobs = torch.tensor([-0.0, -1000.0], requires_grad=True)
    others = torch.tensor([-1000.0, -0.0])
    for preset in (losses.grpo, losses.dapo, losses.cispo, losses.sapo, losses.gspo):
        loss_fn = preset(kl_coef=0.1, kl_ratio_weighted=True, rollout_correction="sequence-truncate")
        for advantages in (torch.ones(1), -torch.ones(1)):
            options = {f"{name}_logprobs": others for name in ("old", "ref", "rollout")}
            loss, metrics = loss_fn(logprobs, [2], advantages, Counts(2, 1), **options)
            (gradient,) = torch.autograd.grad(loss, logprobs)
            assert loss.isfinite() and gradient.isfinite().all()
            assert all(value.isfinite() for value in metrics.values())


def test_presets():
    assert losses.grpo() == PolicyLoss(aggregation="seq-mean-token-mean")
    assert losses.dapo() == PolicyLoss(clip_high=0.28, dual_clip=10.0)
    assert losses.dr_grpo(512) == PolicyLoss(aggregation="seq-mean-token-sum-norm", length_norm=512)
    assert losses.gspo(clip_low=0.1).clip_low == 0.1 and losses.gspo().ratio == "sequence"
    assert losses.cispo() == PolicyLoss(objective="cispo", clip_low=1.0, clip_high=4.0)
    assert losses.sapo().objective == "sapo"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"objective": "ppo"}, 'objective must be one of "clip", "cispo", "sapo", got \'ppo\''),
        ({"ratio": "seq"}, 'ratio must be one of "token", "sequence", "sequence-token", got \'seq\''),
        ({"aggregation": "mean"}, "aggregation must be one of \"token-mean\", .*, got 'mean'"),
        ({"advantage_level": "M"}, 'advantage_level must be one of "response", "token", got \'M\''),
        ({"kl_estimator": "k4"}, 'kl_estimator must be one of "k1", "k2", "k3", got \'k4\''),
        ({"rollout_correction": "tis"}, "rollout_correction must be one of .*, None, got 'tis'"),
        ({"clip_low": 1.5}, "clip_low must be 0 to 1, got 1.5"),
        ({"clip_high": -0.1}, "clip_high must be at least 0, got -0.1"),
        ({"kl_coef": math.inf}, "kl_coef must be at least 0 and finite, got inf"),
        ({"tau_negative": 0.0}, "tau_negative must be at least 1e-06 and finite, got 0"),
        ({"rollout_min": 3.0}, "rollout_max must be at least 3, got 2"),
        ({"rollout_max": math.nan}, "rollout_max must be at least 0, got nan"),
        ({"dual_clip": 1.1}, r"dual_clip must be finite and at least 1 \+ clip_high, 1.2, .* got 1.1"),
        ({"dual_clip": 10.0, "clip_high": math.inf}, "1 .* clip_high, inf, or None for no dual clip, got 10"),
        ({"dual_clip": 3.0, "objective": "sapo"}, 'dual_clip needs objective "clip", got objective "sapo"'),
        ({"length_norm": 9}, 'length_norm is needed by .* got length_norm 9 and aggregation "token-mean"'),
        ({"aggregation": "seq-mean-token-sum-norm"}, "length_norm is needed by .* got length_norm None"),
        (
            {"aggregation": "seq-mean-token-sum-norm", "length_norm": 0.5},
            "length_norm must be at least 1 .* 0.5",
        ),
    ],
)
def test_choices_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**options)


def test_refusals():
    loss_fn, counts, x, advantages = losses.dapo(), Counts(3, 2), torch.zeros(3), torch.zeros(2)
    with pytest.raises(TypeError, match="counts must be dualkv.losses.Counts, got int"):
        loss_fn(x, [2, 1], advantages, 3)
    with pytest.raises(ValueError, match=r"logprobs must be \[M\], \[3\], got shape \[4\]"):
        loss_fn(torch.zeros(4), [2, 1], advantages, counts)
    with pytest.raises(ValueError, match=r"mask must be \[M\], \[3\], got shape \[1, 3\]"):
        loss_fn(x, [2, 1], advantages, counts, mask=x[None])
    with pytest.raises(
        ValueError, match=r"advantages must be \[S\], \[2\], got shape \[3\]; one for each token"
    ):
        loss_fn(x, [2, 1], x, counts)
    with pytest.raises(ValueError, match=r"advantages must be \[M\], \[3\], got shape \[2\]"):
        losses.dapo(advantage_level="token")(x, [2, 1], advantages, counts)
    with pytest.raises(TypeError, match="old_logprobs must be a torch.Tensor, got list"):
        loss_fn(x, [2, 1], advantages, counts, old_logprobs=[0.0] * 3)
    with pytest.raises(ValueError, match="same device, got .* mask meta"):
        loss_fn(x, [2, 1], advantages, counts, mask=x.to("meta"))
    with pytest.raises(ValueError, match="kl_coef needs ref_logprobs, got kl_coef 0.1 and no ref_logprobs"):
        losses.dapo(kl_coef=0.1)(x, [2, 1], advantages, counts)
    with pytest.raises(ValueError, match='rollout_correction "token-mask" needs rollout_logprobs, got None'):
        losses.dapo(rollout_correction="token-mask")(x, [2, 1], advantages, counts)
    with pytest.raises(ValueError, match=r"batch\[1\] must be >= 0, got -1"):
        loss_fn(x, [4, -1], advantages, counts)
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"):
        options = {"logprobs": x, name: x.long()}
        with pytest.raises(TypeError, match=f"{name} must be floating point numbers, got torch.int64"):
            loss_fn(options.pop("logprobs"), [2, 1], advantages, counts, **options)
    with pytest.raises(TypeError, match="batches must be a list with an entry for each batch, got generator"):
        losses.count(lengths for lengths in [[1], [2]])
    with pytest.raises(TypeError, match="batches must be a list .*, got PackedBatch"):
        losses.count(dualkv.pack([[1]], [[[2]]]))
    with pytest.raises(TypeError, match="masks must be a list .*, got generator"):
        losses.count([[1]], (mask for mask in [None]))
    with pytest.raises(TypeError, match="mask must be a torch.Tensor, got list"):
        losses.count([[1]], [[True]])
    with pytest.raises(ValueError, match="masks must have an entry for each batch, got 1 and 2"):
        losses.count([[1], [2]], [None])
    with pytest.raises(ValueError, match=r"mask must be \[M\], \[2\], got shape \[3\]"):
        losses.count([[2]], [x])
    with pytest.raises(TypeError, match=r"batches\[0\] must be a list of integers: 'int' object"):
        losses.count([1, 2])
    with pytest.raises(TypeError, match="kl_ratio_weighted must be a bool, got str"):
        losses.grpo(kl_ratio_weighted="false")
    with pytest.raises(ValueError, match='scale must be one of "group", "batch", "none", got \'std\''):
        losses.group_advantages([1.0], [0], scale="std")
    with pytest.raises(ValueError, match="eps must be at least 1e-12 and finite, got 0"):
        losses.group_advantages([1.0], [0], eps=0.0)
    with pytest.raises(ValueError, match=r"rewards and group_ids must be \[S\], got shapes \[2\] and \[1\]"):
        losses.group_advantages([1.0, 2.0], [0])
