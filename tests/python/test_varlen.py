"""flash_attn_dualkv_varlen_func: its two geometries are dualkv.attention, and all others are refused."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import dualkv


def call(q, kv, cu_q, cu_k, prompt, max_q=10**6, max_k=10**6, **options):
    return dualkv.flash_attn_dualkv_varlen_func(q, *kv, cu_q, cu_k, max_q, prompt, max_k, **options)


def split(k, v, prompt):
    """k_context, v_context, k_decoded, v_decoded."""
    return k[:prompt], v[:prompt], k[prompt:], v[prompt:]


def normal(rows, heads=4, kv_heads=2, dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads, heads)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "prompt, responses, with_prompt_rows",
    [
        (5, [3, 4, 1], False),
        (5, [3, 4, 1], True),
        (70, [0, 65, 0, 130], False),
        (70, [0, 65, 0, 130], True),
        (0, [4, 2], False),
        (3, [], False),
    ],
)
def test_both_geometries_are_attention(prompt, responses, with_prompt_rows, dtype):
    """The prompt's rows, if left out of q, have no output and add nothing to the gradients."""
    forest = dualkv.SegmentForest.from_groups([prompt], [responses])
    cu_k = [0, *torch.tensor(responses, dtype=torch.int64).cumsum(0).tolist()]
    first = prompt if not with_prompt_rows else 0
    cu_q = [0, *(offset + prompt - first for offset in cu_k[1:])]
    q, k, v, dout = normal(forest.total_tokens, dtype=dtype)
    inputs = [q[first:], *split(k, v, prompt)]
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = call(inputs[0], inputs[1:], cu_q, cu_k, prompt, softmax_scale=0.3)
    gradients = torch.autograd.grad(out, inputs, dout[first:])

    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dualkv.attention(*whole, forest, scale=0.3)
    dout[:first] = 0
    dq, dk, dv = torch.autograd.grad(expected, whole, dout)
    assert torch.equal(out, expected[first:])
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for found, right in zip(gradients, (dq[first:], *split(dk, dv, prompt))):
        torch.testing.assert_close(found, right, **tolerance)


class KnownAnswers:
    """A prompt of 3 rows and responses of 2 and 1, all scores equal; values 1, 2, 3 | 4, 5 | 10."""

    def __init__(self):
        values = torch.tensor([1.0, 2, 3, 4, 5, 10]).view(6, 1, 1).expand(6, 1, 8)
        self.q, k = torch.zeros(3, 1, 8), torch.ones(6, 1, 8)
        self.kv = split(k, values, 3)

    def check(self, cu_q, cu_k=None):
        out = call(self.q, self.kv, cu_q, cu_q if cu_k is None else cu_k, 3, 2, 2)
        assert out[:, 0, 0].tolist() == [2.5, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: torch.tensor(x).numpy(),
    ],
)
def test_I1_offsets_of_any_integer_type(make):
    KnownAnswers().check(make([0, 2, 3]))


def test_I1_offsets_of_two_types():
    KnownAnswers().check(torch.tensor([0, 2, 3], dtype=torch.int32), [0, 2, 3])


@pytest.mark.parametrize("offsets", [torch.tensor([0.0, 2, 3]), [0, 2.0, 3], torch.tensor([[0, 2, 3]])])
def test_I1_offsets_that_are_no_integers_are_refused(offsets):
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        KnownAnswers().check(offsets, [0, 2, 3])


def test_I2_rows_past_the_last_offset_take_no_part():
    prompt, cu, rows = 32, [0, 144, 432, 944], 946
    q, k, v, dout = normal(prompt + rows, 2, 1)
    q, dout = q[prompt:], dout[prompt:]
    kv = [x.clone() for x in split(k, v, prompt)]
    for x in (q, *kv[2:], dout):
        x[944:] = float("nan")
    inputs = [x.clone().requires_grad_() for x in (q, *kv)]
    out = call(inputs[0], inputs[1:], cu, cu, prompt)
    gradients = torch.autograd.grad(out, inputs, dout)
    trimmed = [x.detach()[:944].clone().requires_grad_() for x in inputs]
    expected = call(trimmed[0], trimmed[1:], cu, cu, prompt)
    right = torch.autograd.grad(expected, trimmed, dout[:944])
    assert torch.equal(out[:944], expected) and not out[944:].any()
    for gradient, value in zip(gradients, right):
        assert torch.equal(gradient[:944], value) and not gradient[944:].any()


@pytest.mark.parametrize("prompt, with_prompt_rows", [(0, False), (3, False), (3, True)])
def test_I2_queries_and_keys_may_be_padded_differently(prompt, with_prompt_rows):
    q, k, v, _ = normal(prompt + 6)
    first = 0 if with_prompt_rows else prompt
    cu_q = [0, 2 + prompt - first, 5 + prompt - first]
    out = call(q[first:], split(k[:-1], v[:-1], prompt), cu_q, [0, 2, 5], prompt)
    expected = dualkv.attention(q, k, v, dualkv.SegmentForest.from_groups([prompt], [[2, 3]]))
    assert torch.equal(out, expected[first:]) and not out[-1].any()


def test_I4_lengths_that_contradict_the_tensors_or_each_other():
    case = KnownAnswers()
    q, kv = case.q, case.kv
    with pytest.raises(ValueError, match=r"cu_seqlens_q must end within the rows of q, got 5 and 3"):
        call(q, kv, [0, 2, 5], [0, 2, 5], 3)
    with pytest.raises(ValueError, match=r"cu_seqlens_k_decoded .* k_decoded, got 3 and 2"):
        call(q, (*kv[:2], kv[2][:2], kv[3][:2]), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(ValueError, match=r"k_decoded and v_decoded .* \[2, 1, 8\] and \[3, 1, 8\]"):
        call(q, (*kv[:2], kv[2][:2], kv[3]), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must start with 0, got \[1, 2, 3\]"):
        call(q, kv, [1, 2, 3], [1, 2, 3], 3)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must start with 0, got \[\]"):
        call(q, kv, [], [], 3)
    with pytest.raises(ValueError, match=r"cu_seqlens_k_decoded must not decrease, got \[0, 3, 2\]"):
        call(q, kv, [0, 2, 3], [0, 3, 2], 3)
    with pytest.raises(ValueError, match=r"context_seqlen must be the rows of k_context, got 4 and 3"):
        call(q, kv, [0, 2, 3], [0, 2, 3], 4)
    with pytest.raises(ValueError, match=r"context_seqlen must be the rows of v_context, got 3 and 2"):
        call(q, (kv[0], kv[1][:2], *kv[2:]), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(ValueError, match=r"max_seqlen_q must be at least .* got 1 and 2"):
        call(q, kv, [0, 2, 3], [0, 2, 3], 3, max_q=1)
    with pytest.raises(ValueError, match=r"max_seqlen_k_decoded must be at least .* got 1 and 2"):
        call(q, kv, [0, 2, 3], [0, 2, 3], 3, max_k=1)


def test_other_geometries_and_arguments_are_refused():
    case = KnownAnswers()
    q, kv = case.q, case.kv
    with pytest.raises(ValueError, match=r"longer by context_seqlen.*lengths \[1, 2\] and \[2, 1\] .* 3"):
        call(q, kv, [0, 1, 3], [0, 2, 3], 3)
    with pytest.raises(ValueError, match=r"lengths \[2, 1, 0\] and \[2, 1\]"):
        call(q, kv, [0, 2, 3, 3], [0, 2, 3], 3)
    last = [0, 2, 6]  # the prompt's rows with the last response
    with pytest.raises(ValueError, match=r"lengths \[2, 4\] and \[2, 1\]"):
        call(torch.zeros(6, 1, 8), kv, last, [0, 2, 3], 3)
    with pytest.raises(ValueError, match=r"lengths \[5, 1\] and \[2, 2\]"):
        call(torch.zeros(6, 1, 8), split(*2 * [torch.zeros(7, 1, 8)], 3), [0, 5, 6], [0, 2, 4], 3)
    with pytest.raises(ValueError, match="causal must be True.*False"):
        call(q, kv, [0, 2, 3], [0, 2, 3], 3, causal=False)
    with pytest.raises(ValueError, match="softmax_scale must not be 0, got 0.0: there is no dropout_p"):
        call(q, kv, [0, 2, 3], [0, 2, 3], 3, softmax_scale=0.0)
    with pytest.raises(TypeError, match="softmax_scale must be a number, got bool"):
        call(q, kv, [0, 2, 3], [0, 2, 3], 3, softmax_scale=True)
    with pytest.raises(ValueError, match=r"k_context and v_context .* \[3, 1, 8\] and \[3, 2, 8\]"):
        call(q, (kv[0], kv[1].expand(3, 2, 8), *kv[2:]), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(TypeError, match="v_context must be a torch.Tensor, got list"):
        call(q, (kv[0], [], *kv[2:]), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(TypeError, match="k_context torch.float32, .*k_decoded torch.bfloat16"):
        call(q, (*kv[:2], kv[2].bfloat16(), kv[3]), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(ValueError, match="same device.*v_decoded meta"):
        call(q, (*kv[:3], kv[3].to("meta")), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(ValueError, match=r"k_context and k_decoded .* \[1, 8\] and \[2, 8\]"):
        call(q, (*kv[:2], kv[2].expand(3, 2, 8), kv[3]), [0, 2, 3], [0, 2, 3], 3)
    with pytest.raises(ValueError, match=r"q must be \[Tq, H, D\].* got shape \[3, 8\]"):
        call(q[:, 0], kv, [0, 2, 3], [0, 2, 3], 3)


def test_H6_autocast_casts_tensors_of_any_type():
    case = KnownAnswers()
    kv = [
        x.to(dtype)
        for x, dtype in zip(case.kv, (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16))
    ]
    with torch.autocast("cpu", torch.bfloat16):
        out = call(case.q, kv, [0, 2, 3], [0, 2, 3], 3)
    assert out.dtype == torch.bfloat16 and out[:, 0, 0].tolist() == [2.5, 3, 4]


@pytest.mark.parametrize("offsets_of", [list, torch.tensor])
@pytest.mark.parametrize("with_prompt_rows", [False, True])
def test_the_whole_call_compiles_whatever_the_lengths(offsets_of, with_prompt_rows):
    torch._dynamo.reset()
    backend = CompileCounter()
    compiled = torch.compile(dualkv.flash_attn_dualkv_varlen_func, fullgraph=True, backend=backend)
    for prompt, responses in ((3, [2, 3]), (5, [1, 6]), (4, [7, 4])):
        rows = sum(responses)
        q = torch.randn(rows + prompt * with_prompt_rows, 2, 8, requires_grad=True)
        kv = [torch.randn(n, 1, 8, requires_grad=True) for n in (prompt, prompt, rows, rows)]
        cu_k = [0, responses[0], rows]
        cu_q = [0, *(offset + prompt * with_prompt_rows for offset in cu_k[1:])]
        arguments = (q, *kv, offsets_of(cu_q), offsets_of(cu_k), 20, prompt, 10)
        out, expected = compiled(*arguments), dualkv.flash_attn_dualkv_varlen_func(*arguments)
        assert torch.equal(out, expected)
        dout = torch.randn_like(out)
        for found, right in zip(
            torch.autograd.grad(out, [q, *kv], dout), torch.autograd.grad(expected, [q, *kv], dout)
        ):
            assert torch.equal(found, right)
    if offsets_of is torch.tensor:  # lists are constants to torch.compile
        assert backend.frame_count <= 2
    with pytest.raises(Exception, match="must not decrease, got"):
        compiled(q, *kv, torch.tensor([0, 8, 4]), torch.tensor([0, 8, 4]), 20, prompt, 10)


@pytest.mark.parametrize("name", ["max_q", "max_k", "prompt"])
def test_lengths_that_are_no_integers_are_refused(name):
    case = KnownAnswers()
    arguments = {"prompt": 3} | {name: "5"}
    names = {"max_q": "max_seqlen_q", "max_k": "max_seqlen_k_decoded", "prompt": "context_seqlen"}
    with pytest.raises(TypeError, match=f"{names[name]} must be an integer, got str"):
        call(case.q, case.kv, [0, 2, 3], [0, 2, 3], **arguments)
