"""dualkv.losses against the code of TRL and veRL: the same numbers in padded rows, through their own functions.

Where the two differ from each other, and what makes dualkv.losses either of them, is written at the tests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from dualkv import losses
from dualkv.losses import Counts, PolicyLoss

LENGTHS = (7, 3, 1, 9, 4, 6)
COLUMNS = 9


class Rows:
    """Padded rows [B, T] as trainers have them, and the same as flat tensors. One row is all masked."""

    def __init__(self, seed: int = 0, spread: float = 0.4):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.present = torch.arange(COLUMNS) < torch.tensor(LENGTHS)[:, None]
        self.mask = self.present & (torch.rand(self.present.shape, generator=generator) < 0.8)
        self.mask[3] = False
        self.logprobs = -normal(self.present.shape[0], COLUMNS).abs() - 0.1
        self.old, self.ref, self.rollout = (self.logprobs + spread * normal(6, COLUMNS) for _ in range(3))
        self.advantages = normal(6)
        self.counts = losses.count([LENGTHS], [self.flat(self.mask)])

    def flat(self, rows):
        return rows[self.present]

    def ours(self, loss_fn: PolicyLoss, counts: Counts, **options):
        """Loss, gradient [B, T] and metrics."""
        logprobs = self.logprobs.clone().requires_grad_()
        loss, metrics = loss_fn(
            self.flat(logprobs),
            LENGTHS,
            self.advantages,
            counts,
            old_logprobs=self.flat(self.old),
            ref_logprobs=self.flat(self.ref),
            mask=self.flat(self.mask),
            **options,
        )
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics

    def theirs(self, function):
        """Loss and gradient [B, T] of a function of log-probs [B, T]."""
        logprobs = self.logprobs.clone().requires_grad_()
        loss = function(logprobs)
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def assert_same(found, expected, tolerance=1e-13):
    for x, right in zip(found[:2], expected):
        torch.testing.assert_close(x, right, rtol=tolerance, atol=tolerance)


# ----------------------------------------------------------------------------------------------------- TRL


class Trl:
    """GRPOTrainer._compute_loss without a trainer: log-probs are given, and there is one process."""

    def __init__(self, loss_type: str, level: str = "token", **options):
        from trl import GRPOConfig, GRPOTrainer

        defaults = {
            name: GRPOConfig.__dataclass_fields__[name].default
            for name in ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg")
        }
        self.trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (self.logprobs, self.logprobs.detach(), None),
            loss_type=loss_type,
            importance_sampling_level=level,
            args=SimpleNamespace(**{**defaults, "steps_per_generation": 1, **options}),
            beta=options.get("beta", 0.0),
            epsilon_low=options.get("epsilon", 0.2),
            epsilon_high=options.get("epsilon_high", options.get("epsilon", 0.2)),
            use_vllm="importance_sampling_ratio" in options,
            vllm_importance_sampling_correction=True,
            max_completion_length=options.get("max_completion_length"),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
            ),
            _metrics={"train": defaultdict(list)},
        )
        self.weights = options.get("importance_sampling_ratio")
        self.compute = GRPOTrainer._compute_loss

    def __call__(self, rows: Rows):
        def loss(logprobs):
            self.logprobs = logprobs
            ids = torch.zeros_like(rows.mask, dtype=torch.int64)
            inputs = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1] + 1,
                "completion_ids": ids,
                "completion_mask": rows.mask.long(),
                "advantages": rows.advantages,
                "old_per_token_logps": rows.old,
                "ref_per_token_logps": rows.ref,
                "num_items_in_batch": rows.mask.sum(),
                "importance_sampling_ratio": self.weights,
            }
            return self.compute(self.trainer, None, inputs)

        return rows.theirs(loss)

    @property
    def metrics(self):
        return {name: values[-1] for name, values in self.trainer._metrics["train"].items()}


# TRL divides by all rows, also by those without a token: its "sequences" are the rows.
ALL_ROWS = Counts(tokens=sum(LENGTHS), sequences=len(LENGTHS))

TRL_LOSSES = {
    "grpo": (losses.grpo(), {}, ALL_ROWS),
    "bnpo": (losses.grpo(aggregation="token-mean"), {}, None),
    "dapo": (losses.dapo(dual_clip=None), {"epsilon_high": 0.28}, None),
    "dr_grpo": (losses.dr_grpo(40), {"max_completion_length": 40}, ALL_ROWS),
    "luspo": (losses.grpo(aggregation="seq-mean-token-sum"), {}, ALL_ROWS),
    "cispo": (losses.cispo(clip_high=0.5), {"epsilon_high": 1.5}, None),  # TRL's is the bound itself
    "sapo": (  # temperatures that are the same in TRL's float32
        losses.sapo(tau_positive=0.875, tau_negative=1.25),
        {"sapo_temperature_pos": 0.875, "sapo_temperature_neg": 1.25},
        ALL_ROWS,
    ),
}


def replaced(loss_fn: PolicyLoss, **options) -> PolicyLoss:
    return PolicyLoss(**{**vars(loss_fn), **options})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRL_LOSSES)
def test_trl_losses(loss_type, level):
    loss_fn, options, counts = TRL_LOSSES[loss_type]
    for seed in range(5):
        rows = Rows(seed)
        found = rows.ours(replaced(loss_fn, ratio=level), counts or rows.counts)
        assert_same(found, Trl(loss_type, level, **options)(rows))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weighted", [False, True])
def test_trl_kl_penalty(weighted, level):
    """k3. TRL weights it by the ratio unless told otherwise (use_bias_correction_kl), before delta caps that."""
    rows = Rows()
    loss_fn = losses.dapo(ratio=level, kl_coef=0.3, kl_ratio_weighted=weighted, dual_clip=1.3)
    trl = Trl("dapo", level, epsilon_high=0.28, beta=0.3, use_bias_correction_kl=weighted, delta=1.3)
    found = rows.ours(loss_fn, rows.counts)
    assert_same(found, trl(rows))
    if not weighted:  # TRL's metric has the weight, ours never
        torch.testing.assert_close(found[2]["kl"].item(), trl.metrics["kl"])


def test_trl_delta_is_the_dual_clip():
    """TRL caps the ratio on both sides of zero, which from 1 + epsilon_high on changes negative ones only."""
    rows = Rows(spread=2.0)
    for bound in (1.28, 1.5, 3.0):
        found = rows.ours(losses.dapo(dual_clip=bound), rows.counts)
        assert_same(found, Trl("dapo", epsilon_high=0.28, delta=bound)(rows))
        assert found[2]["dual_clip_fraction"] > 0


@pytest.mark.parametrize("correction", losses.ROLLOUT_CORRECTIONS)
def test_trl_rollout_correction(correction):
    """TRL's default is "sequence_mask" up to 3. Its weights are made amid generation, so they are made here."""
    rows = Rows()
    gap = (rows.old - rows.rollout) * rows.mask
    weights = (gap.sum(1, keepdim=True) if correction.startswith("sequence") else gap).exp()
    if correction.endswith("mask"):
        weights = weights.masked_fill((weights < 0.8) | (weights > 1.2), 0.0)
    else:
        weights = weights.clamp(0.8, 1.2)
    loss_fn = losses.dapo(kl_coef=0.1, rollout_correction=correction, rollout_min=0.8, rollout_max=1.2)
    trl = Trl(
        "dapo",
        epsilon_high=0.28,
        delta=10.0,
        beta=0.1,
        use_bias_correction_kl=False,
        importance_sampling_ratio=weights,
    )
    assert_same(rows.ours(loss_fn, rows.counts, rollout_logprobs=rows.flat(rows.rollout)), trl(rows))


def test_trl_metrics():
    rows = Rows(spread=1.0)
    trl = Trl("dapo", epsilon_high=0.28)
    trl(rows)
    _, _, metrics = rows.ours(losses.dapo(), rows.counts)
    for name in ("low", "high"):
        expected = trl.metrics[f"clip_ratio/{name}_mean"]
        assert expected > 0
        torch.testing.assert_close(metrics[f"clip_fraction_{name}"].item(), expected, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------- veRL


@pytest.fixture(scope="module")
def verl():
    """Not among what development needs: veRL asks for Ray and for an older Transformers."""
    return pytest.importorskip(
        "verl.trainer.ppo.core_algos", reason="needs veRL (and Ray)", exc_type=ImportError
    )


VERL_AGGREGATIONS = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-sum-norm": {"length_norm": 40},
}


def verl_loss(verl, name: str, rows: Rows, aggregation: str, weights=None, **options):
    """Loss and gradient of a policy loss by its name in veRL, and its metrics."""
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **options)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=rows.counts.tokens,
        global_batch_size=rows.counts.sequences,
        loss_scale_factor=40,
    )
    metrics = {}

    def loss(logprobs):
        value, own = verl.get_policy_loss_fn(name)(
            old_log_prob=rows.old,
            log_prob=logprobs,
            advantages=rows.advantages[:, None].expand_as(logprobs),
            response_mask=rows.mask.double(),
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=weights,
        )
        metrics.update(own)
        return value

    return *rows.theirs(loss), metrics


@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
def test_verl_losses(verl, aggregation):
    """veRL adds 1e-8 to the length of a response, hence 1e-7 for means of means. Its SAPO has that aggregation
    always. Its GSPO is GSPO-token, TRL's is GSPO; its CISPO has a lower bound too, TRL's has none."""
    options = {"aggregation": aggregation, **VERL_AGGREGATIONS[aggregation]}
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    verl_clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    tolerance = 1e-7 if aggregation == "seq-mean-token-mean" else 1e-13
    for seed in range(3):
        rows = Rows(seed, spread=1.0)
        for name, loss_fn, verl_options in (
            ("vanilla", PolicyLoss(**clips, dual_clip=3.0, **options), verl_clips),
            ("vanilla", losses.dapo(**options), {**verl_clips, "clip_ratio_c": 10.0}),
            ("gspo", losses.gspo(ratio="sequence-token", **{**clips, **options}), verl_clips),
            ("cispo", losses.cispo(**clips, **options), verl_clips),
        ):
            expected = verl_loss(verl, name, rows, aggregation, **verl_options)
            found = rows.ours(loss_fn, rows.counts)
            assert_same(found, expected, tolerance)
            theirs, ours = expected[2], found[2]
            clipped = (ours["clip_fraction_low"] + ours["clip_fraction_high"]).item()
            assert math.isclose(theirs["actor/pg_clipfrac"], clipped, rel_tol=1e-6)
            assert math.isclose(theirs["actor/ppo_kl"], ours["ppo_kl"], rel_tol=1e-6)
            if name == "vanilla":
                lower = ours["dual_clip_fraction"].item()
                assert math.isclose(theirs["actor/pg_clipfrac_lower"], lower, rel_tol=1e-6)
    found = rows.ours(losses.sapo(), rows.counts)
    assert_same(found, verl_loss(verl, "sapo", rows, aggregation, tau_pos=1.0, tau_neg=1.05)[:2], 1e-7)


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_verl_kl_penalty(verl, estimator):
    """veRL cuts k3 off at 10, which these numbers do not reach; TRL and dualkv do not."""
    rows = Rows()
    loss_fn = losses.dapo(kl_coef=0.3, kl_estimator=estimator)

    def loss(logprobs):
        kl = verl.kl_penalty(logprobs, rows.ref, estimator)
        return 0.3 * verl.agg_loss(kl, rows.mask.double(), "token-mean")

    policy = rows.ours(losses.dapo(), rows.counts)
    penalty = rows.theirs(loss)
    assert_same(rows.ours(loss_fn, rows.counts), [x + y for x, y in zip(policy, penalty)])


@pytest.mark.parametrize("correction", losses.ROLLOUT_CORRECTIONS)
def test_verl_rollout_correction(verl, correction):
    """Truncation has no lower bound in veRL. Its weights may be divided by their mean, which is not done here:
    a mean over the micro-batch at hand would depend on the cut."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    rows = Rows()
    level, mode = correction.split("-")
    low = 0.8 if mode == "mask" else 0.0
    weights, metrics = compute_rollout_correction_weights(
        rows.old - rows.rollout,
        rows.mask.double(),
        rollout_is=level,
        rollout_is_threshold="0.8_1.2" if mode == "mask" else 1.2,
    )
    loss_fn = losses.dapo(rollout_correction=correction, rollout_min=low, rollout_max=1.2)
    found = rows.ours(loss_fn, rows.counts, rollout_logprobs=rows.flat(rows.rollout))
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}
    assert_same(found, verl_loss(verl, "vanilla", rows, "token-mean", weights, **clips)[:2])
    if level == "token":
        assert math.isclose(metrics["rollout_is_mean"], found[2]["rollout_weight_mean"], rel_tol=1e-6)


def test_verl_advantages(verl):
    """veRL adds 1e-6 to the standard deviation, TRL 1e-4. A group of one keeps its reward as advantage in veRL,
    and has 0 in TRL and here."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.25, 3.0], dtype=torch.float64)
    groups = ["a", "b", "a", "b", "a", "a", "b"]
    for scale in ("group", "none"):
        expected, _ = verl.compute_grpo_outcome_advantage(
            rewards[:, None].clone(),
            torch.ones(7, 1),
            groups,
            epsilon=1e-6,
            norm_adv_by_std_in_grpo=scale == "group",
        )
        found = losses.group_advantages(rewards, groups, scale=scale, eps=1e-6)
        torch.testing.assert_close(found, expected[:, 0], rtol=1e-13, atol=1e-13)
    alone, _ = verl.compute_grpo_outcome_advantage(torch.tensor([[2.0]]), torch.ones(1, 1), ["a"], epsilon=0)
    assert alone.item() == 2.0 and losses.group_advantages([2.0], ["a"]).item() == 0.0
