"""Cases of whole updates, with a small policy against each sequence by itself: J packing of groups, K masks,
temperatures and repeated scoring."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dualkv
from cases import attend, normal
from tiny_policy import VOCAB, TinyPolicy, assert_close, random_groups


def weighted_loss(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss in which each token has a weight of its own."""
    return (logprobs * torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)).sum()


def padded(rows, left, right, columns, pad_id):
    """input_ids, attention_mask and response_mask of (prompt, response) rows, each with its left padding before
    the prompt and its right padding between the prompt and the response's first column and behind it."""
    prompt_columns = max(pad + len(prompt) for pad, (prompt, _) in zip(left, rows)) + max(right)
    input_ids = torch.full((len(rows), prompt_columns + columns), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, response) in enumerate(rows):
        begin = prompt_columns + right[row]
        places = [*range(left[row], left[row] + len(prompt)), *range(begin, begin + len(response))]
        input_ids[row, places] = torch.tensor([*prompt, *response])
        attention_mask[row, places] = 1
    return input_ids, attention_mask, attention_mask[:, prompt_columns:]


def assert_same_batch(found, expected, message="") -> None:
    for name in ("input_ids", "position_ids", "target_rows", "target_ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), f"{name}; {message}"
    assert found.forest == expected.forest, message


@pytest.fixture
def policy():
    return TinyPolicy()


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def narrow_policy(request):
    return TinyPolicy(request.param)


def test_J2_positions_may_have_an_offset():
    """Positions are what the caller says: nothing is guessed from where they start anew."""
    prompts, responses = random_groups([(3, (2, 2))])
    batch, policy = dualkv.pack(prompts, responses), TinyPolicy()
    shifted = dataclasses.replace(batch, position_ids=batch.position_ids + 5)
    sequences = [prompts[0] + response for response in responses[0]]
    found = shifted.unpack(policy.logprobs(shifted))[0]
    for ids, logprobs in zip(sequences, found):
        alone = dualkv.pack([ids[:3]], [[ids[3:]]])
        alone = dataclasses.replace(alone, position_ids=torch.arange(5, 10))
        assert_close(logprobs, policy.logprobs(alone))
    assert not torch.allclose(policy.logprobs(shifted), policy.logprobs(batch))


def test_J3_a_changed_token_changes_no_other_response(policy):
    prompts, responses = random_groups([(4, (3, 3))])
    before = dualkv.pack(prompts, responses)
    responses[0][0] = [(token + 1) % VOCAB for token in responses[0][0]]
    after = dualkv.pack(prompts, responses)
    old, new = (batch.unpack(policy.logprobs(batch))[0] for batch in (before, after))
    assert torch.equal(new[1], old[1])
    assert (new[0] != old[0]).all()


def test_J4_split_group_has_the_gradient_of_the_one_pack():
    """Packs [0, 1, 2] and [3], each with the prompt."""
    policy = TinyPolicy(torch.float32)
    prompts, responses = random_groups([(9, (4, 1, 6, 3))])
    whole = dualkv.pack(prompts, responses)
    weights = torch.linspace(-1, 2, len(whole.target_ids))
    expected = policy.gradients((policy.logprobs(whole) * weights).sum())
    assert_close(
        expected, policy.gradients((policy.replicated_logprobs(prompts, responses) * weights).sum()), 1e-6
    )
    sums, begin = [torch.zeros_like(x) for x in policy.weights], 0
    for part in (responses[0][:3], responses[0][3:]):
        batch = dualkv.pack(prompts, [part])
        own = weights[begin : begin + len(batch.target_ids)]
        begin += len(own)
        sums = [x + y for x, y in zip(sums, policy.gradients((policy.logprobs(batch) * own).sum()))]
    assert begin == len(weights)  # the prompt's own tokens are scored by no part
    assert_close(sums, expected, 1e-6)


def test_J5_interleaved_groups_return_in_the_callers_order():
    (prompt_a, prompt_b), _ = random_groups([(3, ()), (7, ())])
    _, ((*answers,),) = random_groups([(0, range(1, 9))], seed=1)
    rows = [(prompt_a if n % 2 == 0 else prompt_b, answer) for n, answer in enumerate(answers)]
    ids, mask, scored = padded(rows, [7 - len(prompt) for prompt, _ in rows], [0] * 8, 8, pad_id=0)
    batch = dualkv.pack_padded(ids, mask, scored, ["a", "b"] * 4)
    assert batch.forest == dualkv.SegmentForest.from_groups([3, 7], [[1, 3, 5, 7], [2, 4, 6, 8]])
    policy = TinyPolicy()
    found = batch.unpack_padded(policy.logprobs(batch), fill=-9.0)
    for row, (prompt, answer) in enumerate(rows):
        alone = policy.replicated_logprobs([prompt], [[answer]])
        assert_close(found[row, : len(answer)], alone, message=f"row {row}")
        assert (found[row, len(answer) :] == -9).all()


def test_J6_groups_of_three_two_and_one():
    prompts, responses = random_groups([(5, (4, 1, 6)), (1, (2, 3)), (9, (5,))])
    policy, batch = TinyPolicy(), dualkv.pack(prompts, responses)
    logprobs = policy.logprobs(batch)
    right = policy.replicated_logprobs(prompts, responses)
    assert_close(logprobs, right)
    assert_close(policy.gradients(weighted_loss(logprobs)), policy.gradients(weighted_loss(right)))
    for g, group in enumerate(batch.unpack(policy.logprobs(batch))):
        alone = policy.replicated_logprobs([prompts[g]], [responses[g]])
        assert_close(torch.cat(group), alone, message=f"group {g}")


def no_rows():
    ids = torch.zeros(0, 12, dtype=torch.int64)
    return dualkv.pack_padded(ids, ids, ids[:, :4], [])


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
    loss = logprobs.sum()
    assert loss.item() == 0.0
    for gradient in policy.gradients(loss):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert [x for group in batch.unpack(logprobs) for x in group if x.numel() > 0] == []


def test_J8_dropped_groups_leave_the_kept_one_alone():
    prompts, responses = random_groups([(4, (3, 2)), (6, (5, 1, 2)), (2, (4,))])
    policy = TinyPolicy()
    alone = policy.logprobs(dualkv.pack(prompts[1:2], responses[1:2]))
    expected = policy.gradients(weighted_loss(alone))
    batch = dualkv.pack(prompts, [[], responses[1], []])
    logprobs = policy.logprobs(batch)
    assert_close(logprobs, alone)
    assert_close(policy.gradients(weighted_loss(logprobs)), expected)
    assert [len(group) for group in batch.unpack(logprobs)] == [0, 3, 0]


@pytest.mark.parametrize("pad_id", [0, 7, -100])
def test_J9_padding_changes_nothing(policy, pad_id):
    """Pad ids that are tokens too, no end token, padding between prompt and response."""
    prompts, responses = random_groups([(4, (3,)), (11, (5,)), (2, (2,))])
    responses[1][0][-1] = prompts[2][0] = 7  # a response that ends and a prompt that begins with the pad id
    rows = [(prompt, group[0]) for prompt, group in zip(prompts, responses)]
    expected = dualkv.pack(prompts, responses)
    logprobs = policy.logprobs(expected)
    assert len(logprobs) == 3 + 5 + 2
    for left in ([0, 30, 67], [67, 0, 30], [0, 0, 0]):
        for right in ([0, 5, 9], [9, 0, 5], [0, 0, 0]):
            message = f"left {left}, right {right}, pad id {pad_id}"
            ids, mask, scored = padded(rows, left, right, 20, pad_id)
            batch = dualkv.pack_padded(ids, mask, scored, [0, 1, 2])
            assert_same_batch(batch, expected, message)
            found = policy.logprobs(batch)
            assert torch.equal(found, logprobs), message
            assert torch.equal(batch.unpack_padded(found)[scored == 1], logprobs), message


def test_J11_responses_with_the_same_first_tokens_keep_terms_of_their_own():
    prompts, responses = [[1, 2, 3]], [[[7, 8, 9], [7, 8, 5]]]
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64).repeat_interleave(3)
    policy, batch = TinyPolicy(), dualkv.pack(prompts, responses)
    assert batch.num_tokens == 9
    loss, right = (
        (logprobs * advantages).sum()
        for logprobs in (policy.logprobs(batch), policy.replicated_logprobs(prompts, responses))
    )
    assert_close(loss, right)
    assert_close(policy.gradients(loss), policy.gradients(right))


def test_J11_identical_responses_count_twice():
    policy = TinyPolicy()
    once, twice = (policy.logprobs(dualkv.pack([[1, 2, 3]], [n * [[7, 8, 9]]])) for n in (1, 2))
    assert_close(twice, torch.cat([once, once]))
    assert_close(policy.gradients(twice.sum()), [2 * x for x in policy.gradients(once.sum())])
    # The prompt's gradients from within attention, without the prompt's own rows
    q, k, v, dout = normal(6, 4, 2, 8, torch.float64)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 3, 4, 5])
    dout[:3] = 0
    one = attend((q, k, v), dualkv.SegmentForest.from_groups([3], [[3]]), dout)
    two = attend([x[rows] for x in (q, k, v)], dualkv.SegmentForest.from_groups([3], [[3, 3]]), dout[rows])
    for name in ("dk", "dv"):
        assert_close(two[name][:3], 2 * one[name][:3], message=name)
        assert torch.equal(two[name][3:6], two[name][6:]), name


def masked_batch(kept):
    """Three responses of 10, 15 and 5 tokens to one prompt, of which those in `kept` are scored."""
    (prompt,), (responses,) = random_groups([(4, (10, 15, 5))])
    ids, mask, scored = padded([(prompt, response) for response in responses], [0] * 3, [0] * 3, 15, 0)
    scored = scored * torch.tensor([[float(n in kept)] for n in range(3)])
    return dualkv.pack_padded(ids, mask, scored, [0, 0, 0]), prompt, responses


def test_K2_masked_tokens_are_in_no_denominator():
    batch, _, _ = masked_batch(kept=(0, 1))
    assert (batch.num_tokens, len(batch.target_ids)) == (4 + 30, 25)
    values = torch.ones(len(batch.target_ids))
    assert values.mean() == 1.0 and batch.unpack_padded(values).sum() == 25


def test_K5_all_targets_masked_give_loss_and_gradients_of_exactly_zero(policy):
    """That nothing is scored shows in the number of targets."""
    batch, _, _ = masked_batch(kept=())
    assert batch.num_tokens == 34 and len(batch.target_ids) == 0
    everything, _, _ = masked_batch(kept=(0, 1, 2))
    ignored = dataclasses.replace(everything, target_ids=torch.full_like(everything.target_ids, -100))
    for nothing in (batch, ignored):
        logprobs = policy.logprobs(nothing)
        assert not logprobs.any()
        for gradient in policy.gradients(logprobs.sum()):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_K5_one_masked_response_of_three():
    policy, (batch, prompt, responses) = TinyPolicy(), masked_batch(kept=(0, 2))
    logprobs = policy.logprobs(batch)
    right = policy.logprobs(dualkv.pack([prompt], [[responses[0], responses[2]]]))
    assert_close(logprobs, right)
    assert_close(policy.gradients(weighted_loss(logprobs)), policy.gradients(weighted_loss(right)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_K6_attention_bits_depend_on_no_other_response_and_on_no_place(dtype):
    prompt, length = 70, 90
    own = normal(prompt + length, 4, 2, 64, dtype)
    others = normal(7 * 33, 4, 2, 64, dtype, seed=1)
    alone = attend(own[:3], dualkv.SegmentForest.from_groups([prompt], [[length]]), own[3])
    for place in (0, 3, 7):
        lengths = [33] * place + [length] + [33] * (7 - place)
        tensors = [
            torch.cat([x[:prompt], y[: 33 * place], x[prompt:], y[33 * place :]]) for x, y in zip(own, others)
        ]
        found = attend(tensors[:3], dualkv.SegmentForest.from_groups([prompt], [lengths]), tensors[3])
        rows = torch.arange(prompt + 33 * place, prompt + 33 * place + length)
        for name in ("out", "dq"):
            assert torch.equal(found[name][rows], alone[name][prompt:]), f"{name} at place {place}"
        assert torch.equal(found["lse"][:, rows], alone["lse"][:, prompt:]), f"lse at place {place}"


def test_K6_ratio_is_one_for_equal_packs_and_near_it_for_others(narrow_policy):
    (prompt,), (responses,) = random_groups([(20, (17, 1, 30, 5, 8, 12, 3, 9))])
    batches = {
        "alone": (dualkv.pack([prompt], [responses[:1]]), 0),
        "first": (dualkv.pack([prompt], [responses]), 0),
        "last": (dualkv.pack([prompt], [[*responses[1:], responses[0]]]), 7),
    }
    scored = {}
    for name, (batch, place) in batches.items():
        with torch.no_grad():
            old = narrow_policy.logprobs(batch)
        new = narrow_policy.logprobs(batch)
        assert new.requires_grad and old.dtype == torch.float32
        assert torch.equal((new - old).exp(), torch.ones_like(old)), f"forward only and training: {name}"
        scored[name] = batch.unpack(old)[0][place]
    for name in ("first", "last"):
        ratio = (scored[name] - scored["alone"]).exp()
        assert (ratio - 1).abs().max() <= 1e-2, name
