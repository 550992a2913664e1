"""Cases of several ranks, with processes of their own: J4 a group split over two ranks, J7 ranks that have
nothing left to do while others go on."""

from __future__ import annotations

import pytest
import torch

import dualkv
from ranks import gloo, run_ranks
from tiny_policy import TinyPolicy, assert_close, random_groups

# Nine groups; the last has four responses, for a split.
SIZES = [(2 + g, (3, 1 + g)) for g in range(8)] + [(9, (4, 1, 6, 3))]
ALL = slice(None)


def micro_batch(policy, prompts, responses, weights):
    """Loss, number of scored tokens and gradients of a step."""
    batch = dualkv.pack(prompts, responses)
    loss = (policy.logprobs(batch) * weights).sum()
    return loss.detach(), len(batch.target_ids), policy.gradients(loss)


def token_weights(responses) -> torch.Tensor:
    """For each response a weight of its own, which does not depend on where the response is packed."""
    return torch.tensor([1.0 + 0.25 * (sum(r) % 7) for group in responses for r in group for _ in r])


@pytest.mark.parametrize("sizes", [(3, 2, 2, 2), (3, 3, 3, 0)])
def test_J7_nine_groups_over_four_ranks(sizes):
    """A rank without groups, as a split into chunks of equal size leaves one, runs an empty pack: loss 0, no
    tokens, gradients of 0."""
    policy = TinyPolicy(torch.float32)
    prompts, responses = random_groups(SIZES)
    whole_loss, whole_tokens, whole_gradients = micro_batch(
        policy, prompts, responses, token_weights(responses)
    )
    loss, tokens, sums, begin = torch.zeros(()), 0, [torch.zeros_like(x) for x in policy.weights], 0
    for size in sizes:
        own = responses[begin : begin + size]
        part = micro_batch(policy, prompts[begin : begin + size], own, token_weights(own))
        if size == 0:
            assert part[0].item() == 0.0 and part[1] == 0
            assert not any(gradient.any() for gradient in part[2])
        loss, tokens, sums = loss + part[0], tokens + part[1], [x + y for x, y in zip(sums, part[2])]
        begin += size
    assert tokens == whole_tokens
    assert_close(loss, whole_loss, 1e-6)
    assert_close(sums, whole_gradients, 1e-6)


# What each of two ranks does in three steps: groups of SIZES, and which of their responses.
BY_HAND = (
    (([0, 1], ALL), ([2, 3], ALL)),
    (([8], slice(0, 3)), ([8], slice(3, 4))),  # a split group: each part carries the prompt
    (([4, 5, 6, 7], ALL), ([], ALL)),  # nothing is left for the second rank
)


def by_hand(rank: int, prompts, responses):
    for step in BY_HAND:
        groups, part = step[rank]
        yield [prompts[g] for g in groups], [responses[g][part] for g in groups]


def scheduled(rank: int, prompts, responses, **options):
    """The prompts and responses of a rank's micro-batches."""
    schedule = dualkv.schedule(
        *lengths_of(prompts, responses), **{"num_ranks": 2, "max_tokens": 20, **options}
    )
    for part in schedule.ranks[rank]:
        yield part.take_groups(prompts), part.take_responses(responses)


def lengths_of(prompts, responses):
    return [len(prompt) for prompt in prompts], [[len(x) for x in group] for group in responses]


def sums_of_rank(rank: int, store_path: str, steps) -> list:
    policy = TinyPolicy(torch.float32)
    prompts, responses = random_groups(SIZES)
    sums, counts = [torch.zeros_like(x) for x in policy.weights], torch.zeros(2)
    with gloo(rank, store_path):
        for own_prompts, own in steps(rank, prompts, responses):
            loss, tokens, gradients = micro_batch(policy, own_prompts, own, token_weights(own))
            counts += torch.tensor([loss, tokens])
            for total, gradient in zip(sums, gradients):
                torch.distributed.all_reduce(gradient)
                total += gradient
        torch.distributed.all_reduce(counts)
    return [x.tolist() for x in (counts, *sums)]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("steps", [by_hand, scheduled])
def test_J4_J7_split_groups_and_filler_steps_have_the_gradient_of_one_pack(tmp_path, steps):
    policy = TinyPolicy(torch.float32)
    prompts, responses = random_groups(SIZES)
    loss, tokens, gradients = micro_batch(policy, prompts, responses, token_weights(responses))
    for found in run_ranks(sums_of_rank, str(tmp_path / "store"), steps):
        counts, *sums = map(torch.tensor, found)
        assert counts[1] == tokens
        assert_close(counts[0], loss, 1e-6)
        assert_close(sums, gradients, 1e-6)


@pytest.mark.parametrize("equal_samples", [False, True])
@pytest.mark.parametrize("num_ranks, max_tokens", [(1, 1000), (3, 1000), (4, 20), (25, 17)])
def test_J4_J7_K3_no_schedule_changes_the_loss_of_a_step(num_ranks, max_tokens, equal_samples):
    """The token mean, of the sums over all micro-batches: also where groups are cut, and with more ranks than
    responses."""
    policy = TinyPolicy(torch.float32)
    prompts, responses = random_groups(SIZES)
    whole = micro_batch(policy, prompts, responses, token_weights(responses))
    options = dict(num_ranks=num_ranks, max_tokens=max_tokens, equal_samples=equal_samples)
    loss, tokens, sums, steps = torch.zeros(()), 0, [torch.zeros_like(x) for x in policy.weights], set()
    for rank in range(num_ranks):
        own_steps = list(scheduled(rank, prompts, responses, **options))
        steps.add(len(own_steps))
        for own_prompts, own in own_steps:
            part = micro_batch(policy, own_prompts, own, token_weights(own))
            if not any(own):
                assert part[0].item() == 0.0 and part[1] == 0
                assert not any(gradient.any() for gradient in part[2])
            loss, tokens, sums = loss + part[0], tokens + part[1], [x + y for x, y in zip(sums, part[2])]
    assert len(steps) == 1
    assert tokens == whole[1]
    assert_close(loss / tokens, whole[0] / whole[1], 1e-6)
    assert_close(sums, whole[2], 1e-6)


@pytest.mark.parametrize("equal_samples", [False, True])
def test_J7_the_scheduler_deals_nine_groups_to_four_ranks(equal_samples):
    schedule = dualkv.schedule(
        [50] * 9, [[10]] * 9, num_ranks=4, max_tokens=1000, equal_samples=equal_samples
    )
    assert sorted(len(m.parts) for (m,) in schedule.ranks) == [2, 2, 2, 3]


@pytest.mark.parametrize("name", ["qwen3", "llama-tied", "qwen3-moe"])
def test_J7_a_filler_step_of_a_transformers_model(name):
    """A prompt without responses: every weight gets a gradient, as averaging over ranks needs, and it is 0."""
    pytest.importorskip("transformers")
    from dualkv.integrations.transformers import packed_logprobs, use_packed_attention
    from transformers_models import make_model

    model = use_packed_attention(make_model(name))
    logprobs, entropies = packed_logprobs(model, dualkv.pack([[0]], [[]]))
    assert logprobs.shape == entropies.shape == (0,)
    loss = logprobs.sum() + entropies.sum()
    assert loss.item() == 0.0
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and not gradient.any(), parameter_name
