"""Cases of memory: I2 rows past the last segment, I5 the size of the log-sum-exp and of the scratch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

import dualkv
from cases import draw, normal
from dualkv import _abi
from dualkv._library import library
from dualkv.forest import plan

MIB = 2**20
CLEAR_REFS = Path("/proc/self/clear_refs")


def test_I2_the_weight_gradient_before_padding_rows_is_that_of_the_trimmed_run(dtype, device):
    """q, k, v and dout hold NaN in the padding rows; x does not, so that what the gradients hold there would
    reach the weight."""
    forest = dualkv.SegmentForest.from_groups([32], [[144, 288, 512]])
    total, heads, kv_heads, dim = forest.total_tokens, 4, 2, 16
    rows = total + 2
    x, weight, dout = (
        draw(*shape, dtype=dtype, device=device)
        for shape in ((rows, 24), (24, (heads + 2 * kv_heads) * dim), (rows, heads, dim))
    )
    weight.requires_grad_()
    dout[total:] = float("nan")

    def weight_gradient(rows):
        projected = x[:rows] @ weight
        with torch.no_grad():
            projected[total:] = float("nan")
        q, k, v = projected.view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        out = dualkv.attention(q, k, v, forest)
        assert not out[total:].any()
        return torch.autograd.grad(out, weight, dout[:rows])[0]

    # Rows of zeros at the end may change how the matrix product is blocked, and so its rounding.
    found, expected = weight_gradient(rows), weight_gradient(total)
    rtol, atol = 1e-5, 1e-3
    if dtype != torch.float32:
        rtol = 2 * torch.finfo(dtype).eps
        atol = rtol * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_I2_hidden_states_that_nothing_scores_may_hold_nan(every_dtype):
    """Padding rows, named by ignored targets and by none; the upstream gradient of an ignored target too."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*n, generator=generator).to(every_dtype) for n in ((6, 8), (7, 8), (7,))
    )
    hidden[3:5] = float("nan")
    rows, targets = torch.tensor([0, 1, 3, 5]), torch.tensor([1, 2, -100, 6])
    upstream = torch.tensor([1.0, -2.0, float("nan"), 3.0])
    kept = [0, 1, 3]

    def run(rows, targets, upstream):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        logp, entropy = dualkv.linear_logprob(*inputs[:2], rows, targets, bias=inputs[2])
        gradients = torch.autograd.grad((logp, entropy), inputs, 2 * [upstream.to(logp.dtype)])
        return logp.detach(), entropy.detach(), gradients

    logp, entropy, gradients = run(rows, targets, upstream)
    right_logp, right_entropy, right_gradients = run(rows[kept], targets[kept], upstream[kept])
    assert logp[2] == 0 and torch.equal(logp[kept], right_logp)
    assert entropy[2] == 0 and torch.equal(entropy[kept], right_entropy)
    assert not gradients[0][2:5].any()
    for gradient, right in zip(gradients, right_gradients):
        torch.testing.assert_close(gradient, right)


def workspace_bytes(forest, heads: int, kv_heads: int, dim: int, deterministic: bool) -> int:
    """Of the backward pass in bfloat16, which reads no tensor to tell."""
    schedule = plan(forest.segments, _abi.NO_WINDOW, 0)
    rows = forest.total_tokens
    params = _abi.dualkv_attention_backward_params(
        forward=_abi.dualkv_attention_params(
            device=_abi.CPU,
            dtype=_abi.BFLOAT16,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            plan=schedule.address,
            query_rows=rows,
            key_rows=rows,
            scale=1.0,
        ),
        deterministic=deterministic,
    )
    size = ctypes.c_size_t()
    library.dualkv_attention_backward_workspace(ctypes.byref(params), ctypes.byref(size))
    return size.value


RESPONSES = {1: [33_776], 8: [33_608] + [24] * 7, 64: [32_768] + [16] * 63}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("responses", RESPONSES.values(), ids=RESPONSES)
def test_I5_scratch_grows_with_the_rows_alone(responses, deterministic):
    """Neither with N * max(R) nor with T^2; on the CPU the deterministic gradients cost nothing extra."""
    prompt, heads, kv_heads, dim = 1024, 32, 8, 128
    forest = dualkv.SegmentForest.from_groups([prompt], [responses])
    total = forest.total_tokens
    assert total == 34_800
    bound = 4 * ((total + 128 * (len(responses) + 1)) * heads * dim + 2 * (prompt + 128) * kv_heads * dim)
    bound += 4 * heads * total + 16 * MIB
    assert 0 < workspace_bytes(forest, heads, kv_heads, dim, deterministic) <= bound


def peak_bytes() -> int:
    """The most memory that this process has had since it last wrote to clear_refs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="the peak is Linux's, from /proc")
@pytest.mark.parametrize("responses", RESPONSES.values(), ids=RESPONSES)
def test_I5_peak_of_a_forward_and_backward_pass(responses, threads):
    """The log-sum-exp is packed, and no term in N * max(R) or T^2; a window keeps it fast."""
    prompt, heads, kv_heads, dim = 1024, 8, 2, 16
    forest = dualkv.SegmentForest.from_groups([prompt], [responses])
    total = forest.total_tokens
    *inputs, dout = normal(total, heads, kv_heads, dim, torch.bfloat16)
    inputs = [x.requires_grad_() for x in inputs]
    threads(2)

    plan(forest.segments, 100, 0)  # which a batch has once for all layers
    ctypes.CDLL(None).malloc_trim(0)  # returns what earlier tests have freed
    CLEAR_REFS.write_text("5")  # the peak so far is forgotten
    before = peak_bytes()
    out, lse = dualkv.attention(*inputs, forest, window_left=100, return_lse=True)
    results = (out, lse, *torch.autograd.grad(out, inputs, dout))
    used = peak_bytes() - before
    assert lse.shape == (heads, total) and lse.untyped_storage().nbytes() == 4 * heads * total
    outputs = sum(x.untyped_storage().nbytes() for x in results)
    scratch = 4 * ((total + 128 * (len(responses) + 1)) * heads * dim + 2 * (prompt + 128) * kv_heads * dim)
    bound = outputs + scratch + 4 * heads * total + 16 * MIB
    assert outputs <= used <= bound, f"{used / MIB:.1f} MiB, bound {bound / MIB:.1f} MiB"
