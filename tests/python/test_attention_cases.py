"""Small batches whose right answer is known. The names stand for kinds of failures: A empty and one-token
responses, B extreme scores, C sizes, D windows and caps, E strides, H types and recomputation, I padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dualkv
from cases import WIDE_AND_HALF, ThreeAndTwoAndOne, attend, normal
from reference import assert_right


@pytest.mark.parametrize("dtype", WIDE_AND_HALF)
def test_known_answers_of_equal_scores(dtype):
    case = ThreeAndTwoAndOne(dtype=dtype)
    case.check(attend(case.inputs, case.forest, case.dout))


def test_A1_empty_responses_leave_the_others_bits():
    case = ThreeAndTwoAndOne([0, 2, 0, 1, 0])
    found = attend(case.inputs, case.forest, case.dout)
    case.check(found)
    whole = ThreeAndTwoAndOne()
    expected = attend(whole.inputs, whole.forest, whole.dout)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_A1_empty_responses_at_head_dim_256():
    prompt, lengths = 300, [1208, 840]
    *inputs, dout = normal(prompt + sum(lengths), 4, 1, 256, torch.bfloat16)
    found = attend(inputs, dualkv.SegmentForest.from_groups([prompt], [[0, *lengths, 0]]), dout)
    expected = attend(inputs, dualkv.SegmentForest.from_groups([prompt], [lengths]), dout)
    for name in expected:
        assert not expected[name].isnan().any(), name
        assert torch.equal(found[name], expected[name]), name


def test_A1_all_responses_empty():
    *inputs, dout = normal(5, 2, 1, 16, torch.bfloat16)
    found = attend(inputs, dualkv.SegmentForest.from_groups([5], [[0, 0, 0, 0]]), dout)
    expected = attend(inputs, dualkv.SegmentForest.from_groups([5], [[]]), dout)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("groups", [([1], [[]]), ([0], [[1]])])
def test_A2_a_single_key(groups):
    q, k, v, _ = normal(1, 2, 2, 16, torch.float16, scale=3.0)
    found = attend((q, k, v), dualkv.SegmentForest.from_groups(*groups), torch.ones_like(q))
    assert torch.equal(found["out"], v)
    assert torch.equal(found["dv"], torch.ones_like(v))
    torch.testing.assert_close(found["lse"].t(), (q.float() * k.float()).sum(2) / 4, rtol=1e-6, atol=1e-5)
    for name in ("dq", "dk"):
        assert found[name].abs().max() <= 1e-2, name


def equal_scores(prompt, responses, heads, kv_heads, dim, q, k, dtype):
    """All scores equal: out is the mean of the visible values, lse = score + ln(visible)."""
    forest = dualkv.SegmentForest.from_groups([prompt], [responses])
    rows = forest.total_tokens
    _, _, v, dout = normal(rows, heads, kv_heads, dim, dtype)
    inputs = (torch.full_like(dout, q), torch.full_like(v, k), v)
    found = attend(inputs, forest, dout)
    visible = forest.position_ids() + 1
    score = q * k * dim**0.5
    lse = score + visible.double().log()
    torch.testing.assert_close(
        found["lse"].double(), lse.expand(heads, rows), rtol=2e-7, atol=1e-5 + abs(score) * 1e-7
    )
    # A gradient's probability is exp(score - lse); in float32 an lse of -100 to -200 is rounded to 4 to 8e-6.
    slack = 4.0 if dtype == torch.float32 else 1.0
    assert_right(found, inputs, forest, None, dout, None, f"P={prompt} R={responses}", slack, scale=dim**-0.5)
    return found, forest, dout


@pytest.mark.parametrize("dtype", WIDE_AND_HALF)
@pytest.mark.parametrize("prompt", [64, 65, 129, 191])
def test_B1_lse_below_the_smallest_exponent(prompt, dtype):
    found, forest, dout = equal_scores(prompt, [1, 33, 65], 1, 1, 64, 3.53125, -3.53125, dtype)
    assert found["lse"].min() < -94
    assert found["dq"].abs().max() <= 1e-2
    share = dout.double()[:, 0] / (forest.position_ids()[:, None] + 1)
    own = (
        share[prompt + 1 : prompt + 34].flip(0).cumsum(0).flip(0)
    )  # rows of the second response at or after a key
    eps = torch.finfo(dtype).eps * (-found["lse"].min().item() if dtype == torch.float32 else 1)
    torch.testing.assert_close(
        found["dv"][prompt + 1 : prompt + 34, 0].double(),
        own,
        rtol=2 * eps,
        atol=2 * eps * own.abs().max().item(),
    )


@pytest.mark.parametrize("dtype", WIDE_AND_HALF)
def test_B3_all_scores_far_below_zero(dtype):
    found, _, _ = equal_scores(130, [128], 14, 2, 64, 5.0, -5.0, dtype)
    torch.testing.assert_close(found["lse"][:, 130], torch.full((14,), -195.1248), rtol=0, atol=2e-4)
    torch.testing.assert_close(found["lse"][:, 257], torch.full((14,), -194.4470), rtol=0, atol=2e-4)
    assert (found["out"][130:].abs().amax(dim=2) > 0).all()


def test_B4_raw_scores_below_any_finite_stand_in_for_minus_infinity():
    forest = dualkv.SegmentForest.from_groups([70], [[5]])
    _, _, v, dout = normal(75, 1, 1, 128, torch.bfloat16)
    found = attend((torch.full_like(dout, 44.0), torch.full_like(v, -44.0), v), forest, dout)
    mean = v.float().cumsum(0) / torch.arange(1, 76).view(75, 1, 1)
    torch.testing.assert_close(found["out"].float(), mean, rtol=0.02, atol=0.02 * mean.abs().max().item())
    assert (found["out"].abs().amax(dim=2) > 0).all()
    for name in ("dq", "dk", "dv"):
        assert found[name].isfinite().all(), name
    lse = -44 * 44 * math.sqrt(128) + torch.arange(1, 76).double().log()
    torch.testing.assert_close(found["lse"][0].double(), lse, rtol=0, atol=0.02)  # float32's are 0.002 apart


def test_B5_scale_zero():
    case = ThreeAndTwoAndOne()
    case.inputs[0] = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(1))
    found = attend(case.inputs, case.forest, case.dout, scale=0.0)
    case.check(found)
    assert torch.equal(found["dq"], torch.zeros_like(found["dq"]))


def test_B5_negative_scale():
    q, k, v, dout = normal(6, 2, 1, 8, torch.float32)
    forest = ThreeAndTwoAndOne().forest
    found = attend((q, k, v), forest, dout, scale=-0.125)
    mirrored = attend((-q, k, v), forest, dout, scale=0.125)
    for name in ("out", "lse", "dk", "dv"):
        assert torch.equal(found[name], mirrored[name]), name
    assert torch.equal(found["dq"], -mirrored["dq"])


@pytest.mark.parametrize("dtype", WIDE_AND_HALF)
def test_B6_rows_whose_window_has_left_the_prompt(dtype):
    forest = dualkv.SegmentForest.from_groups([4], [[6]])
    v = torch.arange(1.0, 11).view(10, 1, 1).expand(10, 1, 8).to(dtype)
    zeros = torch.zeros(10, 1, 8, dtype=dtype)
    found = attend((zeros, zeros, v), forest, torch.ones_like(zeros), window_left=1)
    assert found["out"][:, 0, 0].tolist() == [1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]
    assert found["dv"][:, 0, 0].tolist() == [1.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]
    assert not found["dq"].any() and not found["dk"].any()
    torch.testing.assert_close(found["lse"][0], torch.tensor([0.0] + 9 * [math.log(2)]), rtol=0, atol=1e-6)


def test_B7_lse_is_a_natural_logarithm():
    case = ThreeAndTwoAndOne()
    _, lse = dualkv.attention(*case.inputs, case.forest, return_lse=True)
    torch.testing.assert_close(lse[0, 3:5], torch.tensor([1.386294, 1.609438]), rtol=0, atol=1e-5)


def test_B8_very_large_inputs():
    forest = dualkv.SegmentForest.from_groups([1], [[1]])
    inputs = [torch.full((2, 1, 64), 133120.0, dtype=torch.bfloat16) for _ in range(3)]
    found = attend(inputs, forest, torch.ones(2, 1, 64, dtype=torch.bfloat16))
    assert torch.equal(found["out"], inputs[2])
    for name in ("dq", "dk", "dv"):
        assert found[name].isfinite().all(), name
    assert (found["dv"] >= 0).all() and (found["dv"] <= 2).all()


def test_C3_more_responses_than_a_launch_grid_is_wide():
    count = 70_000
    forest = dualkv.SegmentForest.from_groups([16], [[1] * count])
    few = normal(17, 1, 1, 64, torch.float32)
    q, k, v, dout = (torch.cat([x[:16], x[16:].expand(count, 1, 64)]) for x in few)
    found = attend((q, k, v), forest, dout)
    single = dualkv.SegmentForest.from_groups([16], [[1]])
    one = attend(few[:3], single, few[3])
    assert_right(one, few[:3], single, None, few[3], None, "one response", scale=64**-0.5)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(found[name][16:], one[name][16:].expand(count, 1, 64)), name
    assert torch.equal(found["lse"][:, 16:], one["lse"][:, 16:].expand(1, count))


def test_D1_a_window_counts_earlier_positions():
    forest = dualkv.SegmentForest.from_groups([4], [[3]])
    v = torch.arange(1.0, 8).view(7, 1, 1).expand(7, 1, 8)
    zeros = torch.zeros(7, 1, 8)
    found = attend((zeros, zeros, v), forest, torch.ones(7, 1, 8), window_left=2)
    assert found["out"][:, 0, 0].tolist() == [1, 1.5, 2, 3, 4, 5, 6]
    dv = torch.tensor([1.833333, 1.166667, 1, 1, 1, 0.666667, 0.333333])
    torch.testing.assert_close(found["dv"][:, 0, 0], dv, rtol=0, atol=1e-5)
    wider = dualkv.attention(zeros, zeros, v, forest, window_left=3)
    assert wider[4:, 0, 0].tolist() == [3.5, 4.5, 5.5]


@pytest.mark.parametrize("dtype", WIDE_AND_HALF)
def test_D2_window_zero_and_windows_as_wide_as_the_sequence(dtype):
    forest = dualkv.SegmentForest.from_groups([130], [[63, 1]])
    q, k, v, dout = normal(194, 2, 1, 32, dtype)
    itself = attend((q, k, v), forest, dout, window_left=0)
    assert torch.equal(itself["out"], v.expand(194, 2, 32))
    scores = (q.float() * k.float()).sum(2) * 32**-0.5
    torch.testing.assert_close(itself["lse"].t(), scores, rtol=1e-5, atol=1e-5)
    dv = dout.float().sum(1, keepdim=True)
    torch.testing.assert_close(itself["dv"].float(), dv, rtol=torch.finfo(dtype).eps, atol=1e-6)
    causal = attend((q, k, v), forest, dout)
    for window_left in (192, 193, 10**9, 2**31 - 1):
        wide = attend((q, k, v), forest, dout, window_left=window_left)
        for name in causal:
            assert torch.equal(wide[name], causal[name]), (window_left, name)
    narrower = dualkv.attention(q, k, v, forest, window_left=191)
    assert not torch.equal(narrower, causal["out"])


def test_D4_softcap_and_its_gradient():
    def column(a, b):
        return torch.tensor([[a], [b]]).view(2, 1, 1)

    found = attend(
        (column(0.0, 1.0), column(2.0, 0.0), column(1.0, 0.0)),
        dualkv.SegmentForest.from_groups([1], [[1]]),
        column(0.0, 1.0),
        scale=1.0,
        softcap=1.0,
    )
    for name, row, value in (
        ("out", 1, 0.723927),
        ("dq", 1, 0.028240),
        ("dk", 0, 0.014120),
        ("dk", 1, -0.199856),
    ):
        assert abs(found[name][row, 0, 0] - value) < 2e-6, name
    assert abs(found["lse"][0, 1] - 1.287092) < 2e-6


def test_E1_gradients_without_strides_and_transposed():
    case = ThreeAndTwoAndOne()
    contiguous = attend(case.inputs, case.forest, case.dout)
    case.check(contiguous)
    q, k, v = (x.clone().requires_grad_() for x in case.inputs)
    dualkv.attention(q, k, v, case.forest).sum().backward()  # its gradient has strides 0, 0, 0
    found = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    for name in found:
        assert torch.equal(found[name], contiguous[name]), name
    dout = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(0))
    transposed = dout.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    found, contiguous = (attend(case.inputs, case.forest, x) for x in (transposed, dout))
    for name in contiguous:
        assert torch.equal(found[name], contiguous[name]), name


@pytest.mark.parametrize("dtype", WIDE_AND_HALF)
def test_E2_tensors_of_different_layouts(dtype):
    rows = 65 + 33 + 1
    forest = dualkv.SegmentForest.from_groups([65], [[33, 1]])
    q, k, v, dout = normal(rows, 4, 2, 64, dtype)
    expected = attend((q, k, v), forest, dout)
    fused = torch.randn(rows, 3 * 2 * 64).to(dtype)
    fused[:, 256:] = v.flatten(1)
    every_second = torch.randn(rows, 4, 64).to(dtype)
    every_second[:, ::2] = k
    laid_out = (
        q.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        every_second[:, ::2],
        fused[:, 256:].view(rows, 2, 64),
    )
    assert [x.is_contiguous() for x in laid_out] == [False] * 3
    found = attend(laid_out, forest, dout.transpose(0, 1).contiguous().transpose(0, 1))
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("heads", [8, 1])
@pytest.mark.parametrize("stride", [1, 7, 2**40])
def test_E5_any_stride_of_a_single_head(stride, heads):
    forest = dualkv.SegmentForest.from_groups([64], [[16]])
    *inputs, dout = normal(80, heads, 1, 128, torch.bfloat16)
    odd = [x.as_strided(x.shape, (128, stride, 1)) if x.shape[1] == 1 else x for x in inputs]
    expected, found = attend(inputs, forest, dout), attend(odd, forest, dout)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", (*WIDE_AND_HALF, torch.float64))
def test_I2_padding_rows_take_no_part(dtype):
    """Rows past the forest hold NaN; the weight's gradient of a projection before attention stays clean."""
    forest = dualkv.SegmentForest.from_groups([32], [[144, 288, 500]])
    rows, total = forest.total_tokens + 2, forest.total_tokens
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 16).to(dtype), torch.randn(3 * 32, 16).to(dtype)
    x[total:] = float("nan")
    projected = (x @ weight.t()).view(rows, 3, 2, 16).requires_grad_()
    dout = torch.randn(rows, 2, 16).to(dtype)
    dout[total:] = float("nan")
    out, lse = dualkv.attention(*projected.unbind(1), forest, return_lse=True)
    out.backward(dout)
    assert torch.equal(out[total:], torch.zeros_like(out[total:]))
    assert torch.equal(lse[:, total:], torch.full_like(lse[:, total:], float("-inf")))
    assert torch.equal(projected.grad[total:], torch.zeros_like(projected.grad[total:]))
    trimmed = projected.detach()[:total].requires_grad_()
    dualkv.attention(*trimmed.unbind(1), forest).backward(dout[:total])
    assert torch.equal(projected.grad[:total], trimmed.grad)


def test_prompt_gradients_are_sums_over_the_responses():
    """Of each response's own pack of prompt and response, given that the prompt's rows have no gradient."""
    prompt, lengths = 40, [30, 7, 65]
    q, k, v, dout = normal(prompt + sum(lengths), 4, 2, 32, torch.float64)
    dout[:prompt] = 0
    together = attend((q, k, v), dualkv.SegmentForest.from_groups([prompt], [lengths]), dout)
    sums = {"dk": 0, "dv": 0}
    for own in torch.arange(prompt, len(q)).split(lengths):
        rows = torch.cat([torch.arange(prompt), own])
        forest = dualkv.SegmentForest.from_groups([prompt], [[len(own)]])
        alone = attend((q[rows], k[rows], v[rows]), forest, dout[rows])
        sums = {name: sums[name] + alone[name][:prompt] for name in sums}
    for name, value in sums.items():
        torch.testing.assert_close(together[name][:prompt], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_H5_checkpointed_layers_with_the_forest_as_an_argument(use_reentrant):
    """A second batch between forward and backward must not change what is recomputed."""
    forests = [dualkv.SegmentForest.from_groups([9], [lengths]) for lengths in ([4, 1, 6], [2, 9])]
    torch.manual_seed(0)
    weights = [torch.randn(8, 24, requires_grad=True) for _ in range(2)]

    def layer(x, weight, forest):
        q, k, v = (x @ weight).view(len(x), 3, 2, 4).unbind(1)
        return x + dualkv.attention(q, k, v, forest).flatten(1)

    def loss(run, forest):
        x = torch.randn(20, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        for weight in weights:
            x = run(layer, x, weight, forest)
        return x.square().mean()

    plain = torch.autograd.grad(loss(lambda f, *arguments: f(*arguments), forests[0]), weights)
    first = loss(lambda f, *arguments: checkpoint(f, *arguments, use_reentrant=use_reentrant), forests[0])
    loss(lambda f, *arguments: checkpoint(f, *arguments, use_reentrant=use_reentrant), forests[1])
    first.backward()
    for weight, expected in zip(weights, plain):
        assert torch.equal(weight.grad, expected)


def test_H6_mixed_types_are_refused_by_name():
    forest = ThreeAndTwoAndOne().forest
    q, k, v, _ = normal(6, 2, 1, 8, torch.float32)
    with pytest.raises(TypeError, match="q torch.float32, k torch.float32, v torch.bfloat16"):
        dualkv.attention(q, k, v.bfloat16(), forest)
    with pytest.raises(TypeError, match=r"must be one of .*float64.*got q torch.int64"):
        dualkv.attention(q.long(), k.long(), v.long(), forest)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_H6_autocast_casts_and_gradients_return_in_each_inputs_type(cast):
    forest = ThreeAndTwoAndOne().forest
    q, k, v, dout = normal(6, 2, 1, 8, torch.float32)
    inputs = [x.requires_grad_() for x in (q, k.to(torch.bfloat16).detach(), v)]
    with torch.autocast("cpu", cast):
        out = dualkv.attention(*inputs, forest)
        float64 = dualkv.attention(*(x.double() for x in inputs), forest)
    assert out.dtype == cast and float64.dtype == torch.float64
    found = torch.autograd.grad(out, inputs, dout.to(cast))
    expected = attend([x.detach().to(cast) for x in inputs], forest, dout.to(cast))
    assert torch.equal(out, expected["out"])
    for gradient, x, name in zip(found, inputs, ("dq", "dk", "dv")):
        assert gradient.dtype == x.dtype
        assert torch.equal(gradient, expected[name].to(x.dtype)), name


def test_H6_a_wide_gradient_of_a_narrow_output():
    forest = ThreeAndTwoAndOne().forest
    *inputs, dout = normal(6, 2, 1, 8, torch.bfloat16)
    expected = attend(inputs, forest, dout)
    options = (8**-0.5, -1, 0.0, 0)
    out, lse = torch.ops.dualkv.attention_forward(*inputs, None, forest.segments, *options)
    gradients = torch.ops.dualkv.attention_backward(
        dout.float(), None, *inputs, None, forest.segments, out, lse, *options, False
    )
    for gradient, name in zip(gradients, ("dq", "dk", "dv")):
        assert gradient.dtype == torch.bfloat16 and torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("sinks_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", (*WIDE_AND_HALF, torch.float64))
def test_sinks_of_any_type_get_a_gradient_of_theirs(dtype, sinks_dtype):
    forest = ThreeAndTwoAndOne().forest
    *inputs, dout = normal(6, 2, 1, 8, dtype)
    sinks = torch.tensor([0.5, -1.25], dtype=sinks_dtype)
    found = attend(inputs, forest, dout, sinks=sinks)
    assert found["dsinks"].dtype == sinks_dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = attend(inputs, forest, dout, sinks=sinks.to(wide))
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["dsinks"], expected["dsinks"].to(sinks_dtype))
    without = attend(inputs, forest, dout)
    assert not torch.equal(found["out"], without["out"])


def test_only_the_log_sum_exp_may_be_differentiated():
    forest = ThreeAndTwoAndOne().forest
    q, k, v, _ = normal(6, 2, 1, 8, torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    _, lse = dualkv.attention(*inputs, forest, return_lse=True)
    lse.sum().backward()
    # d lse[i] / d q[i] is the mean of the visible keys weighted by the probabilities: attention with v = k
    means = dualkv.attention(q.detach(), k.detach(), k.detach(), forest) * 8**-0.5
    torch.testing.assert_close(q.grad, means, rtol=1e-12, atol=1e-14)
    assert torch.equal(v.grad, torch.zeros_like(v))
