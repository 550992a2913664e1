"""pack and pack_padded: token ids, positions, targets, and the way back to the caller's order."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

import dualkv


def test_J1_targets_are_next_tokens_within_a_response():
    batch = dualkv.pack([[5, 6, 7]], [[[11, 12], [21]]])
    assert batch.input_ids.tolist() == [5, 6, 7, 11, 12, 21]
    assert list(zip(batch.target_rows.tolist(), batch.target_ids.tolist())) == [(2, 11), (3, 12), (2, 21)]
    values = batch.unpack(torch.tensor([0.1, 0.2, 0.3]))
    assert [[x.tolist() for x in group] for group in values] == [
        [torch.tensor([0.1, 0.2]).tolist(), torch.tensor([0.3]).tolist()]
    ]


def test_J2_positions_restart_behind_the_prompt():
    batch = dualkv.pack([[1, 2, 3]], [[[4, 5], [6, 7]]])
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert batch.forest == dualkv.SegmentForest.from_groups([3], [[2, 2]])


KINDS = {
    "lists": lambda x: x,
    "tuples": tuple,
    "tensors": torch.tensor,
    "int32 tensors": lambda x: torch.tensor(x, dtype=torch.int32),
    "arrays": np.array,
    "lists of arrays' values": lambda x: [np.int64(t) for t in x],
    "strided tensors": lambda x: torch.tensor([x, x]).t()[:, 0],
    "uint16 arrays": lambda x: np.array(x, dtype=np.uint16),
    "uint32 tensors": lambda x: torch.tensor(x, dtype=torch.uint32),
    "arrays backwards": lambda x: np.array(x[::-1])[::-1],
    "arrays of another byte order": lambda x: np.array(x).astype(">i8"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_all_sizes_from_any_kind_of_sequence(kind):
    make = KINDS[kind]
    prompts = [make([5, 6, 7]), make([8]), make([9, 9])]
    responses = [[make([11, 12]), make([21])], [], [make([1, 2, 3])]]
    batch = dualkv.pack(prompts, responses)
    assert batch.input_ids.tolist() == [5, 6, 7, 11, 12, 21, 8, 9, 9, 1, 2, 3]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 0, 1, 2, 3, 4]
    assert batch.target_rows.tolist() == [2, 3, 2, 8, 9, 10]
    assert batch.target_ids.tolist() == [11, 12, 21, 1, 2, 3]
    for x in (batch.input_ids, batch.position_ids, batch.target_rows, batch.target_ids):
        assert x.dtype == torch.int64
    assert batch.forest == dualkv.SegmentForest.from_groups([3, 1, 2], [[2, 1], [], [3]])
    assert (batch.num_tokens, batch.replicated_tokens) == (12, 5 + 4 + 1 + 5)
    assert batch.token_ratio == 15 / 12


def test_empty_responses_groups_and_batches():
    batch = dualkv.pack([[5, 6], [], [7]], [[[], [1], []], [[], []], []])
    assert batch.input_ids.tolist() == [5, 6, 1, 7]
    assert [[len(x) for x in group] for group in batch.unpack(torch.zeros(1))] == [[0, 1, 0], [0, 0], []]
    nothing = dualkv.pack([], [])
    assert nothing.num_tokens == 0 and nothing.unpack(torch.zeros(0)) == [] and nothing.token_ratio == 1.0
    assert nothing.input_ids.dtype == torch.int64


def test_unpack_gives_differentiable_views():
    batch = dualkv.pack([[5, 6, 7], [8]], [[[11, 12], [21]], [[31]]])
    values = torch.arange(4.0, requires_grad=True)
    groups = batch.unpack(values)
    assert groups[1][0].data_ptr() == values[3:].data_ptr()
    (groups[0][0].sum() * 2 + groups[1][0].sum() * 5).backward()
    assert values.grad.tolist() == [2, 2, 0, 5]
    assert batch.unpack(torch.zeros(4, 3))[0][0].shape == (2, 3)


def test_to_moves_every_tensor_and_keeps_the_forest():
    ids = torch.tensor([[5, 6, 1, 2]])
    batch = dualkv.pack_padded(ids, torch.ones(1, 4), torch.ones(1, 2), ["a"]).to("meta")
    for x in (batch.input_ids, batch.position_ids, batch.target_rows, batch.target_ids):
        assert x.device.type == "meta"
    with pytest.raises(TypeError, match="device must be a torch.device or its name, got torch.float16"):
        batch.to(torch.float16)
    assert batch.forest.segments.device.type == "cpu"
    assert batch.unpack_padded(torch.zeros(2, device="meta")).device.type == "meta"


def test_unpack_padded_of_a_batch_that_stayed_on_the_host(gpu):
    ids = torch.tensor([[5, 6, 1, 2]])
    batch = dualkv.pack_padded(ids, torch.ones(1, 4), torch.ones(1, 2), ["a"])
    assert batch.unpack_padded(torch.tensor([3.0, 4.0], device=gpu)).tolist() == [[3, 4]]


def test_200_000_tokens_in_1_000_lists_take_less_than_20_ms():
    generator = torch.Generator().manual_seed(0)
    responses = [
        torch.randint(150_000, (8, 221), generator=generator).tolist() for _ in range(111)
    ]  # 888 lists, 196,248 tokens
    prompts = torch.randint(150_000, (111, 40), generator=generator).tolist()
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()  # of this process alone: tests run beside each other
        batch = dualkv.pack(prompts, responses)
        best = min(best, time.process_time() - begin)
    assert batch.num_tokens == 111 * (40 + 8 * 221) > 200_000
    assert len(prompts) + sum(map(len, responses)) == 999
    assert best < 0.020, f"{1000 * best:.1f} ms"


def padded_example():
    """Rows of two groups, interleaved; left and right padding whose ids look like tokens."""
    input_ids = torch.tensor(
        [
            [0, 5, 6, 7, 11, 12, 0],
            [8, 0, 9, 9, 31, 0, 0],
            [5, 6, 0, 7, 21, 0, 0],
            [0, 0, 8, 9, 0, 0, 0],
        ]
    )
    attention_mask = torch.tensor(
        [
            [0, 1, 1, 1, 1, 1, 0],
            [1, 0, 1, 0, 1, 0, 0],
            [1, 1, 0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0, 0, 0],
        ]
    )
    return input_ids, attention_mask


@pytest.mark.parametrize(
    "group_ids",
    [
        ["x", "y", "x", "y"],
        [4, -7, 4, -7],
        torch.tensor([1, 0, 1, 0]),
        np.array(["u", "v", "u", "v"], dtype=object),
    ],
)
@pytest.mark.parametrize("whole_mask", [False, True])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_padded_rows_become_groups_and_return_in_order(group_ids, whole_mask, mask_dtype):
    input_ids, attention_mask = padded_example()
    response_mask = attention_mask[:, 4:]
    if whole_mask:
        response_mask = torch.cat([torch.zeros(4, 4, dtype=torch.int64), response_mask], dim=1)
    batch = dualkv.pack_padded(
        input_ids, attention_mask.to(mask_dtype), response_mask.to(mask_dtype), group_ids
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 11, 12, 21, 8, 9, 31]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert batch.target_rows.tolist() == [2, 3, 2, 7]
    assert batch.target_ids.tolist() == [11, 12, 21, 31]
    assert batch.forest == dualkv.SegmentForest.from_groups([3, 2], [[2, 1], [1, 0]])
    assert batch.source_rows.tolist() == [0, 2, 1, 3]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    padded = batch.unpack_padded(values, fill=-9.0)
    expected = torch.tensor([[1.0, 2, -9], [4, -9, -9], [3, -9, -9], [-9, -9, -9]])
    if whole_mask:
        expected = torch.cat([torch.full((4, 4), -9.0), expected], dim=1)
    assert torch.equal(padded, expected)
    (padded * torch.arange(padded.numel()).view(padded.shape)).sum().backward()
    places = torch.arange(padded.numel()).view(padded.shape)[expected != -9]
    assert values.grad.tolist() == [places[0], places[1], places[3], places[2]]
    assert [[x.tolist() for x in group] for group in batch.unpack(values)] == [[[1, 2], [3]], [[4], []]]


def test_unscored_response_tokens_are_seen_but_no_targets():
    """A tool's answer between two turns of a model."""
    batch = dualkv.pack_padded(
        torch.tensor([[5, 6, 11, 90, 91, 12]]), torch.ones(1, 6), torch.tensor([[1, 0, 0, 1]]), [0]
    )
    assert batch.input_ids.tolist() == [5, 6, 11, 90, 91, 12]
    assert list(zip(batch.target_rows.tolist(), batch.target_ids.tolist())) == [(1, 11), (4, 12)]
    assert batch.unpack_padded(torch.tensor([1.0, 2.0])).tolist() == [[1, 0, 0, 2]]


def test_ids_of_token_files():
    input_ids, attention_mask = padded_example()
    arguments = attention_mask, attention_mask[:, 4:], [0, 1, 0, 1]
    expected = dualkv.pack_padded(input_ids, *arguments)
    for dtype in (torch.uint16, torch.uint32):
        batch = dualkv.pack_padded(input_ids.to(dtype), *arguments)
        assert torch.equal(batch.input_ids, expected.input_ids)


@pytest.mark.parametrize("wrong", [-100, 2, math.nan, math.inf])
def test_masks_are_0_and_1(wrong):
    ids, mask = padded_example()
    labels = torch.where(mask[:, 4:] == 1, ids[:, 4:], -100)
    groups = [0, 1, 0, 1]
    message = rf" must be 0 or 1, got {wrong}; labels are no mask, labels != -100 is one"
    for name, masks in (
        ("attention_mask", [mask.float(), mask[:, 4:]]),
        ("response_mask", [mask, mask[:, 4:].float()]),
    ):
        next(x for x in masks if x.is_floating_point())[1, 2] = wrong
        with pytest.raises(ValueError, match=name + r"\[1\]\[2\]" + message):
            dualkv.pack_padded(ids, *masks, groups)
    with pytest.raises(ValueError, match=r"response_mask\[0\]\[0\] must be 0 or 1, got 11"):
        dualkv.pack_padded(ids, mask, labels, groups)
    batch = dualkv.pack_padded(ids, mask, labels != -100, groups)
    assert batch.target_ids.tolist() == [11, 12, 21, 31]


def test_a_mask_of_shifted_log_probs_is_right_but_shares_nothing_and_warns():
    ids = torch.tensor([[5, 6, 7, 11, 12], [5, 6, 7, 21, 22]])
    mask = torch.tensor([[0, 0, 0, 1, 1]] * 2)
    with pytest.warns(UserWarning, match="response_mask has 4 of the 5 columns of input_ids") as warned:
        batch = dualkv.pack_padded(ids, torch.ones_like(ids), mask[:, 1:], [0, 0])
    assert len(warned) == 1 and warned[0].filename == __file__
    assert batch.num_tokens == 9 and batch.target_ids.tolist() == [11, 12, 21, 22]


def test_a_mask_of_all_columns_but_one_is_no_reason_for_a_warning_by_itself(recwarn):
    ids = torch.tensor([[5, 11, 12], [5, 21, 22]])
    ones = torch.ones_like(ids)
    dualkv.pack_padded(ids, ones, ones[:, 1:], [0, 0])  # prompts of one token
    dualkv.pack_padded(ids, ones, torch.tensor([[0, 1]] * 2), [0, 1])  # there is nothing to share
    dualkv.pack_padded(ids, ones, torch.zeros(2, 2), [0, 0])
    assert not recwarn.list


def test_a_row_without_targets_is_all_prompt_unless_the_mask_says_where_responses_start():
    ids = torch.tensor([[5, 6, 11, 12], [5, 6, 21, 22]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    message = (
        "must have the same prompt, .* Row 1 has no targets in a response_mask of all columns, and so is all"
    )
    with pytest.raises(ValueError, match=message):
        dualkv.pack_padded(ids, torch.ones_like(ids), mask, [0, 0])
    batch = dualkv.pack_padded(ids, torch.ones_like(ids), mask[:, 2:], [0, 0])
    assert batch.num_tokens == 6 and batch.target_ids.tolist() == [11, 12]


@pytest.mark.parametrize(
    "fill, dtype",
    [
        (0.5, torch.int64),
        (math.nan, torch.int64),
        (300, torch.uint8),
        (2, torch.bool),
        (1e39, torch.float32),
        (1e6, torch.float16),
    ],
)
def test_a_fill_that_the_values_cannot_hold_is_refused(fill, dtype):
    ids = torch.tensor([[5, 6, 1, 2]])
    batch = dualkv.pack_padded(ids, torch.ones(1, 4), torch.ones(1, 2), ["a"])
    with pytest.raises(ValueError, match=f"fill must be a number that values of {dtype} can hold, got "):
        batch.unpack_padded(torch.ones(2, dtype=dtype), fill=fill)
    with pytest.raises(TypeError, match="fill must be a number, got str"):
        batch.unpack_padded(torch.ones(2, dtype=dtype), fill="0")


@pytest.mark.parametrize("fill", [0.1, math.nan, -math.inf])
def test_fills_of_floating_point_values(fill):
    ids = torch.tensor([[5, 6, 1, 2]])
    batch = dualkv.pack_padded(ids, torch.ones(1, 4), torch.tensor([[1, 0]]), ["a"])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        found = batch.unpack_padded(torch.ones(1, dtype=dtype), fill=fill)
        torch.testing.assert_close(found, torch.tensor([[1.0, fill]], dtype=dtype), equal_nan=True)


def test_booleans_are_put_back_too():
    ids = torch.tensor([[5, 6, 1, 2]])
    batch = dualkv.pack_padded(ids, torch.ones(1, 4), torch.tensor([[1, 0]]), ["a"])
    assert batch.unpack_padded(torch.tensor([False]), fill=True).tolist() == [[False, True]]


def test_listed_batches_have_no_source_rows():
    batch = dualkv.pack([[1]], [[[2]]])
    assert batch.source_rows is None and batch.to("cpu").source_rows is None


def test_padded_and_listed_batches_agree():
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(50, (n,), generator=generator).tolist() for n in (3, 7, 1)]
    responses = [
        [torch.randint(50, (n,), generator=generator).tolist() for n in ns] for ns in ((2, 4), (1,), (3, 3))
    ]
    rows = [(g, prompts[g], response) for g, group in enumerate(responses) for response in group]
    ids = torch.zeros(len(rows), 7 + 4, dtype=torch.int64)
    mask = torch.zeros(len(rows), 7 + 4)
    for b, (_, prompt, response) in enumerate(rows):
        ids[b, 7 - len(prompt) : 7 + len(response)] = torch.tensor(prompt + response)
        mask[b, 7 - len(prompt) : 7 + len(response)] = 1
    listed = dualkv.pack(prompts, responses)
    padded = dualkv.pack_padded(ids, mask, mask[:, 7:], [g for g, _, _ in rows])
    for name in ("input_ids", "position_ids", "target_rows", "target_ids"):
        assert torch.equal(getattr(padded, name), getattr(listed, name)), name
    assert padded.forest == listed.forest


def test_pack_errors_name_the_argument_and_the_values():
    with pytest.raises(ValueError, match=r"prompts and responses .* got 1 and 2"):
        dualkv.pack([[1]], [[], []])
    with pytest.raises(TypeError, match=r"responses\[0\]\[1\] .* 'float'"):
        dualkv.pack([[1]], [[[2], [3.5]]])
    with pytest.raises(TypeError, match=r"prompts\[1\] .* type str"):
        dualkv.pack([[1], "text"], [[], []])
    with pytest.raises(TypeError, match=r"prompts\[0\] .* type int"):
        dualkv.pack([1], [[]])
    with pytest.raises(TypeError, match=r"responses\[0\]\[0\] .* torch.float32 of shape \[2\]"):
        dualkv.pack([[1]], [[torch.tensor([1.0, 2.0])]])
    with pytest.raises(TypeError, match=r"prompts\[0\] .*"):
        dualkv.pack([[2**63]], [[]])
    with pytest.raises(TypeError, match=r"prompts\[0\] .* entry of type bool"):
        dualkv.pack([[True, False]], [[]])
    with pytest.raises(TypeError, match=r"prompts\[0\] .* torch.uint64 of shape \[1\]"):
        dualkv.pack([torch.tensor([1], dtype=torch.uint64)], [[]])
    with pytest.raises(TypeError, match=r"prompts\[0\] .* object of shape \[2\]"):
        dualkv.pack([np.array([1, None])], [[]])
    with pytest.raises(TypeError, match=r"responses\[0\] must be a list .* for each response, got int"):
        dualkv.pack([[1]], [3])
    with pytest.raises(TypeError, match=r"responses must be a list .* for each group, got int"):
        dualkv.pack([[1]], 3)
    with pytest.raises(TypeError, match=r"prompts must be a list .* for each group, got generator"):
        dualkv.pack((prompt for prompt in [[1]]), [[]])
    with pytest.raises(ValueError, match=r"response_tokens\[1\] \(group .*\) must be >= 0, got -3"):
        dualkv.pack([[1]], [[[2, -3]]])
    with pytest.raises(ValueError, match=r"group 1 has no prompt tokens, but its response 1 has 2"):
        dualkv.pack([[1], []], [[], [[], [2, 3]]])
    batch = dualkv.pack([[1]], [[[2, 3]]])
    with pytest.raises(ValueError, match=r"each of the 2 targets, got shape \[3\]"):
        batch.unpack(torch.zeros(3))
    with pytest.raises(ValueError, match=r"each of the 2 targets, got shape \[\]"):
        batch.unpack(torch.tensor(1.0))
    with pytest.raises(TypeError, match="values must be a torch.Tensor, got list"):
        batch.unpack([1, 2])
    with pytest.raises(ValueError, match="pack_padded"):
        batch.unpack_padded(torch.zeros(2))


def test_pack_padded_errors_name_the_argument_and_the_values():
    ids, mask = padded_example()
    scored, groups = mask[:, 4:], [0, 1, 0, 1]
    with pytest.raises(TypeError, match=r"input_ids must be a torch.Tensor, got list"):
        dualkv.pack_padded(ids.tolist(), mask, scored, groups)
    with pytest.raises(TypeError, match=r"input_ids must be integers, got torch.float32"):
        dualkv.pack_padded(ids.float(), mask, scored, groups)
    with pytest.raises(ValueError, match=r"input_ids must be \[B, S\].* got shape \[28\]"):
        dualkv.pack_padded(ids.flatten(), mask, scored, groups)
    with pytest.raises(ValueError, match=r"attention_mask .* got \[4, 6\] and \[4, 7\]"):
        dualkv.pack_padded(ids, mask[:, 1:], scored, groups)
    with pytest.raises(ValueError, match=r"response_mask .* got \[3, 3\] and \[4, 7\]"):
        dualkv.pack_padded(ids, mask, scored[1:], groups)
    with pytest.raises(ValueError, match=r"response_mask .* got \[4, 8\] and \[4, 7\]"):
        dualkv.pack_padded(ids, mask, torch.zeros(4, 8), groups)
    with pytest.raises(ValueError, match=r"response_mask .* at least one .* got \[4, 0\] and \[4, 7\]"):
        dualkv.pack_padded(ids, mask, mask[:, :0], groups)
    with pytest.raises(ValueError, match=r"group_ids .* got 3 and 4"):
        dualkv.pack_padded(ids, mask, scored, groups[1:])
    with pytest.raises(ValueError, match=r"row 1 has a prompt of 2 tokens and row 0 one of 3"):
        dualkv.pack_padded(ids, mask, scored, [0, 0, 0, 0])
    other = ids.clone()
    other[2, 1] = 4
    with pytest.raises(ValueError, match=r"at position 1 row 2 has token 4 and row 0 has 6"):
        dualkv.pack_padded(other, mask, scored, groups)
    with pytest.raises(ValueError, match=r"response_mask\[1\]\[1\] must be 0 on padding, got 1"):
        dualkv.pack_padded(ids, mask, torch.ones(4, 3) * torch.tensor([1, 1, 0]), groups)
    batch = dualkv.pack_padded(ids, mask, scored, groups)
    with pytest.raises(ValueError, match=r"each of the 4 targets, got shape \[5\]"):
        batch.unpack_padded(torch.zeros(5))
    with pytest.raises(TypeError, match="values must be a torch.Tensor, got list"):
        batch.unpack_padded([0.0] * 4)
    with pytest.raises(ValueError, match=r"values must be \[M\].* got shape \[4, 2\]"):
        batch.unpack_padded(torch.zeros(4, 2))
