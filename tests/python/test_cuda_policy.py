"""Cases J and K in bf16, on a CPU and on a GPU, with a small policy. What is exact is so there too, by the tests of
test_cases_policy.py; what is not is compared with float64, and may be off by three times as much as the replicated
batch in bf16 is."""

from __future__ import annotations

import pytest
import torch

import dualkv
from test_cases_policy import (  # noqa: F401
    test_J3_a_changed_token_changes_no_other_response,
    test_J8_nothing_to_score_has_loss_zero_and_a_backward_pass,
    test_J9_padding_changes_nothing,
    test_K5_all_targets_masked_give_loss_and_gradients_of_exactly_zero,
    test_K6_ratio_is_one_for_equal_packs_and_near_it_for_others,
    weighted_loss,
)
from tiny_policy import TinyPolicy, random_groups


@pytest.fixture
def policy(cpu_or_gpu):
    return TinyPolicy(torch.bfloat16, device=cpu_or_gpu)


narrow_policy = policy


def loss_of(logprobs: torch.Tensor) -> torch.Tensor:
    return weighted_loss(logprobs.cpu())


def assert_within_noise(found, replicated, right) -> None:
    """Lists of tensors: that of `right` is exact."""
    for i, (x, noisy, exact) in enumerate(zip(found, replicated, right, strict=True)):
        noise, size = ((y.double().cpu() - exact).abs().max().item() for y in (noisy, torch.zeros(())))
        error = (x.double().cpu() - exact).abs().max().item()
        assert noise <= 0.1 * size, f"tensor {i}: the noise {noise} shows nothing, of {size}"
        assert error <= 3 * noise, f"tensor {i}: error {error}, noise {noise}, of {size}"


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


def test_J11_identical_responses_have_identical_terms(policy):
    logprobs = policy.logprobs(dualkv.pack([[1, 2, 3]], [2 * [[7, 8, 9]]]))
    assert torch.equal(logprobs[:3], logprobs[3:])
