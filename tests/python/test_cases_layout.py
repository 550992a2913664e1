"""Cases of memory layout, sizes and repetition: C offsets past 2^31, E strides and alignment, F head counts and
head sizes, G the same bits in every run. The same names stand in test_attention_cases.py.

test_cuda_cases.py runs some of them again on a GPU, with a `device` and a `dtype` of its own."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

import dualkv
from cases import assert_same_bits, attend, normal
from reference import assert_right


def untouched(rows: int, columns: int, dtype) -> torch.Tensor:
    """A tensor of zeros [rows, columns] that takes memory only where it is written, in small pages."""
    memory = mmap.mmap(-1, rows * columns * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


@pytest.mark.parametrize("wide", [("dout",), ("q", "k", "v", "dout")])
def test_C1_offsets_past_2_31(wide):
    """The second response's rows are more than 2^31 elements behind the first row. A window keeps it fast."""
    rows, heads, dim = 16_432, 2, 64
    forest = dualkv.SegmentForest.from_groups([16], [[16_400, 16]])
    tensors = dict(zip(("q", "k", "v", "dout"), normal(rows, heads, heads, dim, torch.bfloat16)))
    expected = attend([tensors[x] for x in "qkv"], forest, tensors["dout"], window_left=40)
    buffer = untouched(rows, 131_072, torch.bfloat16)
    for i, name in enumerate(wide):
        columns = buffer[:, i * heads * dim : (i + 1) * heads * dim]
        tensors[name] = columns.copy_(tensors[name].flatten(1)).view(rows, heads, dim)
        assert tensors[name].stride(0) * 16_416 > 2**31
    found = attend([tensors[x] for x in "qkv"], forest, tensors["dout"], window_left=40)
    assert_same_bits(found, expected)


def logprob_gradients(hidden, weight, rows, targets) -> dict:
    inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
    logp, entropy = dualkv.linear_logprob(*inputs, rows, targets)
    gradients = torch.autograd.grad(logp.sum() + entropy.sum(), inputs)
    return {"logp": logp, "entropy": entropy, "dhidden": gradients[0], "dweight": gradients[1]}


def test_C1_offsets_past_2_31_in_hidden_states():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 48, generator=generator).bfloat16() for n in (16_432, 40))
    rows = torch.tensor([0, 16_383, 16_384, 16_400, 16_431])
    targets = torch.tensor([0, 39, 7, 7, 20])
    expected = logprob_gradients(hidden, weight, rows, targets)
    columns = untouched(16_432, 131_072, torch.bfloat16)[:, 64:112].copy_(hidden)
    assert_same_bits(logprob_gradients(columns, weight, rows, targets), expected)


def test_D2_a_negative_window_is_refused(dtype, device):
    q, k, v, _ = normal(6, 1, 1, 8, dtype, device=device)
    forest = dualkv.SegmentForest.from_groups([3], [[2, 1]])
    for window_left in (-1, -(2**31), -(2**63)):
        with pytest.raises(ValueError, match=f"window_left must be >= 0, .* got {window_left}"):
            dualkv.attention(q, k, v, forest, window_left=window_left)


def test_E2_keys_and_values_of_prompt_and_responses_each_of_a_layout_of_their_own(dtype, device):
    prompt, cu, heads, kv_heads, dim = 65, [0, 33, 34], 4, 2, 64
    q, k, v, dout = normal(prompt + 34, heads, kv_heads, dim, dtype, device=device)
    inputs = [q[prompt:], k[:prompt], v[:prompt], k[prompt:], v[prompt:]]
    dout = dout[prompt:]
    fused = torch.full((prompt, 3 * kv_heads * dim), float("nan"), dtype=dtype, device=device)
    value_columns = fused[:, 2 * kv_heads * dim :].view(prompt, kv_heads, dim)
    every_second = torch.full((34, 2 * kv_heads, dim), float("nan"), dtype=dtype, device=device)[:, ::2]
    laid_out = [
        inputs[0].permute(2, 1, 0).contiguous().permute(2, 1, 0),
        inputs[1],
        value_columns.copy_(inputs[2]),
        every_second.copy_(inputs[3]),
        inputs[4],
    ]

    def run(tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = dualkv.flash_attn_dualkv_varlen_func(*tensors, cu, cu, 33, prompt, 33)
        return out, *torch.autograd.grad(out, tensors, dout)

    for found, right in zip(run(laid_out), run(inputs)):
        assert torch.equal(found, right)


@pytest.mark.parametrize("row_padding", [0, 1, 8])
@pytest.mark.parametrize("offset", [1, 8])
def test_E3_any_storage_offset_and_row_stride(offset, row_padding, every_dtype, device):
    """Rows of H * D elements or some more from any element of a flat buffer on, dout included."""
    forest = dualkv.SegmentForest.from_groups([65], [[33, 1]])
    rows, dim = forest.total_tokens, 64
    tensors = normal(rows, 4, 2, dim, every_dtype, device=device)
    laid_out = []
    for x in tensors:
        heads = x.shape[1]
        row_stride = heads * dim + row_padding
        flat = torch.full((offset + rows * row_stride,), float("nan"), dtype=every_dtype, device=device)
        laid_out.append(flat.as_strided(x.shape, (row_stride, dim, 1), offset).copy_(x))
    expected = attend(tensors[:3], forest, tensors[3])
    assert_same_bits(attend(laid_out[:3], forest, laid_out[3]), expected)


def test_E3_hidden_states_and_weight_at_a_storage_offset_of_one_element(every_dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 48, generator=generator).to(every_dtype) for n in (33, 40)]
    rows, targets = torch.tensor([32, 0, 5]), torch.tensor([39, 0, 17])
    misaligned = []
    for x in tensors:
        flat = torch.full((1 + len(x) * 49,), float("nan"), dtype=every_dtype)
        misaligned.append(flat.as_strided(x.shape, (49, 1), 1).copy_(x))
    expected = logprob_gradients(*tensors, rows, targets)
    assert_same_bits(logprob_gradients(*misaligned, rows, targets), expected)


@pytest.mark.parametrize("heads, kv_heads", [(12, 2), (14, 2), (21, 7), (7, 1), (32, 1), (1, 1)])
def test_F1_any_number_of_query_heads_for_a_kv_head(heads, kv_heads, dtype, device):
    forest = dualkv.SegmentForest.from_groups([66], [[1, 17]])
    *inputs, dout = normal(forest.total_tokens, heads, kv_heads, 32, dtype, device=device)
    found = attend(inputs, forest, dout)
    assert_right(found, inputs, forest, None, dout, None, "seed 0", scale=32**-0.5)


@pytest.mark.parametrize("heads, kv_heads", [(33, 2), (3, 2), (2, 3)])
def test_F1_heads_that_are_no_multiple_are_refused(heads, kv_heads, dtype, device):
    forest = dualkv.SegmentForest.from_groups([66], [[1, 17]])
    q, k, v, _ = normal(forest.total_tokens, heads, kv_heads, 32, dtype, device=device)
    with pytest.raises(ValueError, match=f"multiple of the heads of k and v, got {heads} and {kv_heads}"):
        dualkv.attention(q, k, v, forest)


@pytest.mark.parametrize("dim", [7, 8, 40, 72, 80, 96, 112, 136, 192, 256, 512])
def test_F2_any_head_size(dim, dtype):
    forest = dualkv.SegmentForest.from_groups([65], [[33, 1]])
    *inputs, dout = normal(forest.total_tokens, 2, 1, dim, dtype)
    found = attend(inputs, forest, dout)
    assert_right(found, inputs, forest, None, dout, None, f"D={dim}, seed 0", scale=dim**-0.5)
    assert [found[x].shape[2] for x in ("out", "dq", "dk", "dv")] == 4 * [dim]


def test_F2_the_columns_behind_a_head_are_never_read():
    """NaN between the heads, where a kernel that rounds the head size up would look."""
    forest = dualkv.SegmentForest.from_groups([65], [[33, 1]])
    tensors = normal(forest.total_tokens, 2, 1, 7, torch.float32)
    among_nan = [torch.nn.functional.pad(x, (0, 9), value=float("nan"))[:, :, :7] for x in tensors]
    expected = attend(tensors[:3], forest, tensors[3])
    assert_same_bits(attend(among_nan[:3], forest, among_nan[3]), expected)


def test_F2_a_head_size_past_the_limit_is_refused_with_it():
    q, k, v, _ = normal(99, 2, 1, 513, torch.float32)
    with pytest.raises(ValueError, match="head_dim must be 1 to 512, got 513"):
        dualkv.attention(q, k, v, dualkv.SegmentForest.from_groups([65], [[33, 1]]))


def repeats(forest, dtype, message, runs, threads, **options):
    *inputs, dout = normal(forest.total_tokens, 8, 2, 128, dtype)
    expected = attend(inputs, forest, dout, **options)
    for run in range(runs):
        threads(1 + run % 4)
        assert_same_bits(attend(inputs, forest, dout, **options), expected, f"run {run}; {message}")


@pytest.mark.parametrize("deterministic", [True, False])
def test_G1_a_hundred_backward_runs_have_one_set_of_bits(deterministic, threads):
    forest = dualkv.SegmentForest.from_groups([64], [[16] * 16])
    repeats(forest, torch.bfloat16, "alone", 100, threads, deterministic=deterministic)


def test_G1_beside_a_busy_second_thread(threads):
    done = threading.Event()

    def work():
        forest = dualkv.SegmentForest.from_groups([100], [[50] * 4])
        *inputs, dout = normal(forest.total_tokens, 4, 2, 64, torch.float32)
        while not done.is_set():
            attend(inputs, forest, dout)

    other = threading.Thread(target=work)
    other.start()
    try:
        forest = dualkv.SegmentForest.from_groups([256], [[64] * 8])
        repeats(forest, torch.bfloat16, "beside a busy thread", 20, threads, deterministic=True)
    finally:
        done.set()
        other.join()


def test_G4_many_short_responses(device):
    forest = dualkv.SegmentForest.from_groups([5], [[1 + n % 3 for n in range(200)]])
    *inputs, dout = normal(forest.total_tokens, 2, 1, 64, torch.bfloat16, device=device)
    found = attend(inputs, forest, dout)
    assert_right(found, inputs, forest, None, dout, None, "seed 0", scale=64**-0.5)
