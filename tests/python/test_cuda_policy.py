"""Cases J and K in bf16, on a CPU and on a GPU, with a small policy. What is exact is so there too; what is not is
compared with float64, and may be off by three times as much as the replicated batch in bf16 is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dualkv
from test_cases_policy import assert_same_batch, masked_batch, no_rows, padded, weighted_loss
from tiny_policy import VOCAB, TinyPolicy, random_groups


@pytest.fixture(params=["cpu", "cuda"])
def policy(request):
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return TinyPolicy(torch.bfloat16, device=request.param)


def loss_of(logprobs: torch.Tensor) -> torch.Tensor:
    return weighted_loss(logprobs.cpu())


def assert_within_noise(found, replicated, right) -> None:
    """Lists of tensors: that of `right` is exact."""
    for i, (x, noisy, exact) in enumerate(zip(found, replicated, right, strict=True)):
        noise, size = ((y.double().cpu() - exact).abs().max().item() for y in (noisy, torch.zeros(())))
        error = (x.double().cpu() - exact).abs().max().item()
        assert noise <= 0.1 * size, f"tensor {i}: the noise {noise} shows nothing, of {size}"
        assert error <= 3 * noise, f"tensor {i}: error {error}, noise {noise}, of {size}"


def test_J3_a_changed_token_changes_no_other_response(policy):
    prompts, responses = random_groups([(4, (3, 3))])
    before = dualkv.pack(prompts, responses)
    responses[0][0] = [(token + 1) % VOCAB for token in responses[0][0]]
    after = dualkv.pack(prompts, responses)
    old, new = (batch.unpack(policy.logprobs(batch))[0] for batch in (before, after))
    assert torch.equal(new[1], old[1])
    assert (new[0] != old[0]).all()


@pytest.mark.parametrize(
    "sizes",
    [[(5, (4, 1, 6)), (1, (2, 3)), (9, (5,))], [(70, (40, 3, 65))], [(3, (2, 2)), (130, (20, 30))]],
    ids=["three, two and one", "several tiles", "two groups"],
)
def test_J6_groups_are_like_each_sequence_by_itself(policy, sizes):
    prompts, responses = random_groups(sizes)
    exact = policy.to(torch.float64)
    right = exact.replicated_logprobs(prompts, responses)
    logprobs = policy.logprobs(dualkv.pack(prompts, responses))
    replicated = policy.replicated_logprobs(prompts, responses)
    assert_within_noise([logprobs], [replicated], [right])
    assert_within_noise(
        policy.gradients(loss_of(logprobs)),
        policy.gradients(loss_of(replicated)),
        exact.gradients(loss_of(right)),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: dualkv.pack([], []),
        lambda: dualkv.pack([[1, 2], [3], [4, 5, 6]], [[], [], []]),
        lambda: dualkv.pack([[1, 2], [3]], [[[], []], [[]]]),
        no_rows,
    ],
    ids=["no groups", "groups without responses", "empty responses", "no rows"],
)
def test_J8_nothing_to_score_has_loss_zero_and_a_backward_pass(policy, make):
    batch = make()
    logprobs = policy.logprobs(batch)
    assert logprobs.shape == batch.target_ids.shape == (0,)
    assert logprobs.sum().item() == 0.0
    assert not any(gradient.any() for gradient in policy.gradients(logprobs.sum()))


def test_J9_padding_changes_nothing(policy):
    prompts, responses = random_groups([(4, (3,)), (11, (5,)), (2, (2,))])
    rows = [(prompt, group[0]) for prompt, group in zip(prompts, responses)]
    expected = dualkv.pack(prompts, responses)
    logprobs = policy.logprobs(expected)
    for left, right in (([0, 30, 67], [9, 0, 5]), ([0, 0, 0], [0, 5, 9])):
        ids, mask, scored = padded(rows, left, right, 20, pad_id=7)
        batch = dualkv.pack_padded(ids, mask, scored, [0, 1, 2])
        assert_same_batch(batch, expected)
        found = policy.logprobs(batch)
        assert torch.equal(found, logprobs)
        assert torch.equal(batch.unpack_padded(found).cpu()[scored == 1], logprobs.cpu())


def test_J11_identical_responses_have_identical_terms(policy):
    logprobs = policy.logprobs(dualkv.pack([[1, 2, 3]], [2 * [[7, 8, 9]]]))
    assert torch.equal(logprobs[:3], logprobs[3:])


def test_K5_all_targets_masked_give_loss_and_gradients_of_exactly_zero(policy):
    batch, _, _ = masked_batch(kept=())
    everything, _, _ = masked_batch(kept=(0, 1, 2))
    ignored = dataclasses.replace(everything, target_ids=torch.full_like(everything.target_ids, -100))
    for nothing in (batch, ignored):
        logprobs = policy.logprobs(nothing)
        assert not logprobs.any()
        assert not any(gradient.any() for gradient in policy.gradients(logprobs.sum()))


def test_K6_ratio_is_one_for_equal_packs_and_near_it_for_others(policy):
    (prompt,), (responses,) = random_groups([(20, (17, 1, 30, 5, 8, 12, 3, 9))])
    batches = {
        "alone": (dualkv.pack([prompt], [responses[:1]]), 0),
        "first": (dualkv.pack([prompt], [responses]), 0),
        "last": (dualkv.pack([prompt], [[*responses[1:], responses[0]]]), 7),
    }
    scored = {}
    for name, (batch, place) in batches.items():
        with torch.no_grad():
            old = policy.logprobs(batch)
        new = policy.logprobs(batch)
        assert new.requires_grad and old.dtype == torch.float32
        assert torch.equal((new - old).exp(), torch.ones_like(old)), f"forward only and training: {name}"
        scored[name] = batch.unpack(old)[0][place]
    for name in ("first", "last"):
        assert ((scored[name] - scored["alone"]).exp() - 1).abs().max() <= 1e-2, name
