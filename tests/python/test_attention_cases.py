"""Small batches whose right answer is known. The names stand for kinds of failures: A empty and one-token
responses, B extreme scores, C sizes, D windows and caps, E strides, H types and recomputation, I padding.

test_cuda_cases.py runs all of them again on a GPU, with a `device` and a `dtype` of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dualkv
from cases import ThreeAndTwoAndOne, assert_same_bits, attend, draw, normal
from reference import assert_right, sequences


def test_known_answers_of_equal_scores(dtype, device):
    case = ThreeAndTwoAndOne(dtype=dtype, device=device)
    case.check(attend(case.inputs, case.forest, case.dout))


def test_A1_empty_responses_leave_the_others_bits(dtype, device):
    case = ThreeAndTwoAndOne([0, 2, 0, 1, 0], dtype, device=device)
    found = attend(case.inputs, case.forest, case.dout)
    case.check(found)
    whole = ThreeAndTwoAndOne(dtype=dtype, device=device)
    assert_same_bits(found, attend(whole.inputs, whole.forest, whole.dout))


def test_A1_empty_responses_beside_long_ones(device):
    """At head dim 256 where there are kernels for it."""
    prompt, lengths = 300, [1208, 840]
    dim = 256 if device.type == "cpu" else 128
    *inputs, dout = normal(prompt + sum(lengths), 4, 1, dim, torch.bfloat16, device=device)
    found = attend(inputs, dualkv.SegmentForest.from_groups([prompt], [[0, *lengths, 0]]), dout)
    expected = attend(inputs, dualkv.SegmentForest.from_groups([prompt], [lengths]), dout)
    assert not any(x.isnan().any() for x in expected.values())
    assert_same_bits(found, expected)


def test_A1_all_responses_empty(device):
    *inputs, dout = normal(5, 2, 1, 16, torch.bfloat16, device=device)
    found = attend(inputs, dualkv.SegmentForest.from_groups([5], [[0, 0, 0, 0]]), dout)
    assert_same_bits(found, attend(inputs, dualkv.SegmentForest.from_groups([5], [[]]), dout))


@pytest.mark.parametrize("groups", [([], []), ([0], [[0]])])
def test_A1_no_rows_at_all(groups, dtype, device):
    forest = dualkv.SegmentForest.from_groups(*groups)
    *inputs, dout = normal(5, 2, 1, 16, dtype, device=device)
    empty = attend([x[:0] for x in inputs], forest, dout[:0])
    assert empty["out"].shape == empty["dq"].shape == (0, 2, 16) and empty["lse"].shape == (2, 0)
    padding = attend(inputs, forest, dout)
    assert (padding["lse"] == -math.inf).all()
    assert not any(padding[name].any() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("groups", [([1], [[]]), ([0], [[1]])])
def test_A2_a_single_key(groups, device):
    q, k, v, _ = normal(1, 2, 2, 16, torch.float16, scale=3.0, device=device)
    found = attend((q, k, v), dualkv.SegmentForest.from_groups(*groups), torch.ones_like(q))
    assert torch.equal(found["out"], v)
    assert torch.equal(found["dv"], torch.ones_like(v))
    torch.testing.assert_close(found["lse"].t(), (q.float() * k.float()).sum(2) / 4, rtol=1e-6, atol=1e-5)
    for name in ("dq", "dk"):
        assert found[name].abs().max() <= 1e-2, name


def equal_scores(prompt, responses, heads, kv_heads, dim, q, k, dtype, device):
    """All scores equal: out is the mean of the visible values, lse = score + ln(visible)."""
    forest = dualkv.SegmentForest.from_groups([prompt], [responses])
    rows = forest.total_tokens
    _, _, v, dout = normal(rows, heads, kv_heads, dim, dtype, device=device)
    inputs = (torch.full_like(dout, q), torch.full_like(v, k), v)
    found = attend(inputs, forest, dout)
    visible = forest.position_ids() + 1
    score = q * k * dim**0.5
    lse = score + visible.double().log()
    torch.testing.assert_close(
        found["lse"].double().cpu(), lse.expand(heads, rows), rtol=2e-7, atol=1e-5 + abs(score) * 1e-7
    )
    # A gradient's probability is exp(score - lse); in float32 an lse of -100 to -200 is rounded to 4 to 8e-6.
    slack = 4.0 if dtype == torch.float32 else 1.0
    assert_right(found, inputs, forest, None, dout, None, f"P={prompt} R={responses}", slack, scale=dim**-0.5)
    return found, inputs, forest, dout


def sums_of_score_gradients(v, dout, forest):
    """[rows], float64: of a head whose scores are all equal, the sum of each row's |score gradients|."""
    sums = torch.empty(forest.total_tokens, dtype=torch.float64)
    for rows in sequences(forest):
        dweights = dout[rows, 0].double().cpu() @ v[rows, 0].double().cpu().t()
        weights = torch.ones_like(dweights).tril()
        weights /= weights.sum(1, keepdim=True)
        delta = (weights * dweights).sum(1, keepdim=True)
        sums[rows] = (weights * (dweights - delta)).abs().sum(1)
    return sums


@pytest.mark.parametrize("prompt", [64, 65, 129, 191])
def test_B1_lse_below_the_smallest_exponent(prompt, dtype, device):
    found, inputs, forest, dout = equal_scores(
        prompt, [1, 33, 65], 1, 1, 64, 3.53125, -3.53125, dtype, device
    )
    assert found["lse"].min() < -94
    # Score gradients that cancel: on a GPU each is rounded to the operands' type, by half a unit in its last place.
    unit = torch.finfo(dtype).eps / 2 if device.type == "cuda" else 0.0
    rounding = unit * 3.53125 * 64**-0.5 * sums_of_score_gradients(inputs[2], dout, forest)
    assert (found["dq"].double().cpu().abs().amax((1, 2)) <= 1e-2 + rounding).all()
    share = dout.double().cpu()[:, 0] / (forest.position_ids()[:, None] + 1)
    own = (
        share[prompt + 1 : prompt + 34].flip(0).cumsum(0).flip(0)
    )  # rows of the second response at or after a key
    eps = torch.finfo(dtype).eps * (-found["lse"].min().item() if dtype == torch.float32 else 1)
    torch.testing.assert_close(
        found["dv"][prompt + 1 : prompt + 34, 0].double().cpu(),
        own,
        rtol=2 * eps,
        atol=2 * eps * own.abs().max().item(),
    )


def test_B3_all_scores_far_below_zero(dtype, device):
    found, *_ = equal_scores(130, [128], 14, 2, 64, 5.0, -5.0, dtype, device)
    for row, lse in ((130, -195.1248), (257, -194.4470)):
        assert (found["lse"][:, row] - lse).abs().max() <= 2e-4
    assert (found["out"][130:].abs().amax(dim=2) > 0).all()


def test_B4_raw_scores_below_any_finite_stand_in_for_minus_infinity(device):
    forest = dualkv.SegmentForest.from_groups([70], [[5]])
    _, _, v, dout = normal(75, 1, 1, 128, torch.bfloat16, device=device)
    found = attend((torch.full_like(dout, 44.0), torch.full_like(v, -44.0), v), forest, dout)
    visible = torch.arange(1, 76)
    mean = v.float().cpu().cumsum(0) / visible.view(75, 1, 1)
    out = found["out"].float().cpu()
    torch.testing.assert_close(out, mean, rtol=0.02, atol=0.02 * mean.abs().max().item())
    assert (out.abs().amax(dim=2) > 0).all()
    for name in ("dq", "dk", "dv"):
        assert found[name].isfinite().all(), name
    lse = -44 * 44 * math.sqrt(128) + visible.double().log()
    # float32's are 0.002 apart
    torch.testing.assert_close(found["lse"][0].double().cpu(), lse, rtol=0, atol=0.02)


def test_B5_scale_zero(dtype, device):
    case = ThreeAndTwoAndOne(dtype=dtype, device=device)
    case.inputs[0] = draw(6, 1, 8, dtype=dtype, device=device, seed=1)
    found = attend(case.inputs, case.forest, case.dout, scale=0.0)
    case.check(found)
    assert torch.equal(found["dq"], torch.zeros_like(found["dq"]))


@pytest.mark.parametrize("groups, dim", [(([3], [[2, 1]]), 8), (([200], [[99, 1]]), 64)])
def test_B5_negative_scale(groups, dim, dtype, device):
    forest = dualkv.SegmentForest.from_groups(*groups)
    q, k, v, dout = normal(forest.total_tokens, 2, 1, dim, dtype, device=device)
    found = attend((q, k, v), forest, dout, scale=-0.125)
    mirrored = attend((-q, k, v), forest, dout, scale=0.125)
    mirrored["dq"] = -mirrored["dq"]
    for name, right in mirrored.items():
        assert torch.equal(found[name], right), name


def test_B6_rows_whose_window_has_left_the_prompt(dtype, device):
    forest = dualkv.SegmentForest.from_groups([4], [[6]])
    v = torch.arange(1.0, 11).view(10, 1, 1).expand(10, 1, 8).to(device, dtype)
    zeros = torch.zeros_like(v)
    found = attend((zeros, zeros, v), forest, torch.ones_like(zeros), window_left=1)
    assert found["out"][:, 0, 0].tolist() == [1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]
    assert found["dv"][:, 0, 0].tolist() == [1.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]
    assert not found["dq"].any() and not found["dk"].any()
    assert (found["lse"][0].cpu() - torch.tensor([0.0] + 9 * [math.log(2)])).abs().max() <= 1e-6


def test_B6_responses_far_past_a_window_that_spans_whole_tiles(dtype, device):
    """The prompt's tiles, and the first of a response, are hidden from the later rows."""
    forest = dualkv.SegmentForest.from_groups([500], [[900, 1, 130]])
    *inputs, dout = normal(forest.total_tokens, 2, 1, 64, dtype, device=device)
    found = attend(inputs, forest, dout, window_left=60)
    options = {"scale": 64**-0.5, "window_left": 60}
    assert_right(found, inputs, forest, None, dout, None, "window 60, seed 0", **options)


def test_B7_lse_is_a_natural_logarithm(dtype, device):
    case = ThreeAndTwoAndOne(dtype=dtype, device=device)
    _, lse = dualkv.attention(*case.inputs, case.forest, return_lse=True)
    assert (lse[0, 3:5].cpu() - torch.tensor([1.386294, 1.609438])).abs().max() <= 1e-5


def test_B8_very_large_inputs(device):
    forest = dualkv.SegmentForest.from_groups([1], [[1]])
    inputs = [torch.full((2, 1, 64), 133120.0, dtype=torch.bfloat16, device=device) for _ in range(3)]
    found = attend(inputs, forest, torch.ones_like(inputs[0]))
    assert torch.equal(found["out"], inputs[2])
    for name in ("lse", "dq", "dk", "dv"):
        assert found[name].isfinite().all(), name
    assert (found["dv"] >= 0).all() and (found["dv"] <= 2).all()


def test_C3_more_responses_than_a_launch_grid_is_wide(device):
    count = 70_000
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    forest = dualkv.SegmentForest.from_groups([16], [[1] * count])
    few = normal(17, 1, 1, 64, dtype, device=device)
    q, k, v, dout = (torch.cat([x[:16], x[16:].expand(count, 1, 64)]) for x in few)
    found = attend((q, k, v), forest, dout)
    single = dualkv.SegmentForest.from_groups([16], [[1]])
    one = attend(few[:3], single, few[3])
    assert_right(one, few[:3], single, None, few[3], None, "one response", scale=64**-0.5)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(found[name][16:], one[name][16:].expand(count, 1, 64)), name
    assert torch.equal(found["lse"][:, 16:], one["lse"][:, 16:].expand(1, count))


def test_D1_a_window_counts_earlier_positions(dtype, device):
    forest = dualkv.SegmentForest.from_groups([4], [[3]])
    v = torch.arange(1.0, 8).view(7, 1, 1).expand(7, 1, 8).to(device, dtype)
    zeros = torch.zeros_like(v)
    found = attend((zeros, zeros, v), forest, torch.ones_like(v), window_left=2)
    assert found["out"][:, 0, 0].tolist() == [1, 1.5, 2, 3, 4, 5, 6]
    dv = torch.tensor([1.833333, 1.166667, 1, 1, 1, 0.666667, 0.333333])
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(found["dv"][:, 0, 0].float().cpu(), dv, rtol=rounding, atol=1e-5)
    wider = dualkv.attention(zeros, zeros, v, forest, window_left=3)
    assert wider[4:, 0, 0].tolist() == [3.5, 4.5, 5.5]


def test_D2_window_zero_and_windows_as_wide_as_the_sequence(dtype, device):
    forest = dualkv.SegmentForest.from_groups([130], [[63, 1]])
    q, k, v, dout = normal(194, 2, 1, 32, dtype, device=device)
    itself = attend((q, k, v), forest, dout, window_left=0)
    assert torch.equal(itself["out"], v.expand(194, 2, 32))
    scores = (q.float() * k.float()).sum(2) * 32**-0.5
    torch.testing.assert_close(itself["lse"].t(), scores, rtol=1e-5, atol=1e-5)
    dv = dout.float().sum(1, keepdim=True)
    torch.testing.assert_close(itself["dv"].float(), dv, rtol=torch.finfo(dtype).eps, atol=1e-6)
    causal = attend((q, k, v), forest, dout)
    for window_left in (192, 193, 10**9, 2**31 - 1):
        wide = attend((q, k, v), forest, dout, window_left=window_left)
        assert_same_bits(wide, causal, f"window_left {window_left}")
    narrower = dualkv.attention(q, k, v, forest, window_left=191)
    assert not torch.equal(narrower, causal["out"])


def test_D4_softcap_and_its_gradient(dtype, device):
    """One live column."""

    def column(a, b):
        x = torch.zeros(2, 1, 8, dtype=dtype, device=device)
        x[:, 0, 0] = torch.tensor([a, b])
        return x

    found = attend(
        (column(0.0, 1.0), column(2.0, 0.0), column(1.0, 0.0)),
        dualkv.SegmentForest.from_groups([1], [[1]]),
        column(0.0, 1.0),
        scale=1.0,
        softcap=1.0,
    )
    roundings = 0 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    for name, row, value in (
        ("out", 1, 0.723927),
        ("dq", 1, 0.028240),
        ("dk", 0, 0.014120),
        ("dk", 1, -0.199856),
    ):
        assert abs(found[name][row, 0, 0] - value) < 2e-6 + roundings * abs(value), name
    assert abs(found["lse"][0, 1] - 1.287092) < (5e-6 if device.type == "cuda" else 2e-6)


def test_E1_gradients_without_strides_and_transposed(dtype, device):
    case = ThreeAndTwoAndOne(dtype=dtype, device=device)
    contiguous = attend(case.inputs, case.forest, case.dout)
    case.check(contiguous)
    q, k, v = (x.clone().requires_grad_() for x in case.inputs)
    dualkv.attention(q, k, v, case.forest).sum().backward()  # its gradient has strides 0, 0, 0
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        assert torch.equal(x.grad, contiguous[name]), name
    dout = draw(6, 1, 8, dtype=dtype, device=device)
    transposed = dout.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    found, contiguous = (attend(case.inputs, case.forest, x) for x in (transposed, dout))
    assert_same_bits(found, contiguous)


def test_E2_tensors_of_different_layouts(dtype, device):
    """q with the head dim outermost, every second head of a tensor, columns of a fused projection."""
    forest = dualkv.SegmentForest.from_groups([65], [[33, 1]])
    rows = forest.total_tokens
    q, k, v, dout = normal(rows, 4, 2, 64, dtype, device=device)
    fused = torch.full((rows, 3 * 2 * 64), math.nan, dtype=dtype, device=device)
    every_second = torch.full((rows, 4, 64), math.nan, dtype=dtype, device=device)[:, ::2]
    laid_out = (
        q.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        every_second.copy_(k),
        fused[:, 256:].view(rows, 2, 64).copy_(v),
    )
    assert [x.is_contiguous() for x in laid_out] == [False] * 3
    found = attend(laid_out, forest, dout.transpose(0, 1).contiguous().transpose(0, 1))
    assert_same_bits(found, attend((q, k, v), forest, dout))


@pytest.mark.parametrize("heads", [8, 1])
@pytest.mark.parametrize("stride", [1, 7, 2**40])
def test_E5_any_stride_of_a_single_head_or_row(stride, heads, device):
    tensors = normal(80, heads, 1, 128, torch.bfloat16, device=device)
    odd = [x.as_strided(x.shape, (128, stride, 1)) if x.shape[1] == 1 else x for x in tensors]
    row = [x[:1] for x in tensors]
    odd_row = [x.as_strided(x.shape, (stride, 128, 1)) for x in row]
    for strange, usual, forest in (
        (odd, tensors, dualkv.SegmentForest.from_groups([64], [[16]])),
        (odd_row, row, dualkv.SegmentForest.from_groups([1], [[]])),
    ):
        assert_same_bits(attend(strange[:3], forest, strange[3]), attend(usual[:3], forest, usual[3]))


def test_I2_padding_rows_take_no_part(every_dtype, device):
    """Rows past the forest hold NaN; the weight's gradient of a projection before attention stays clean."""
    forest = dualkv.SegmentForest.from_groups([32], [[144, 288, 500]])
    rows, total = forest.total_tokens + 2, forest.total_tokens
    x, weight, dout = (
        draw(*shape, dtype=every_dtype, device=device) for shape in ((rows, 16), (3 * 32, 16), (rows, 2, 16))
    )
    x[total:] = float("nan")
    projected = (x @ weight.t()).view(rows, 3, 2, 16).requires_grad_()
    dout[total:] = float("nan")
    out, lse = dualkv.attention(*projected.unbind(1), forest, return_lse=True)
    out.backward(dout)
    assert torch.equal(out[total:], torch.zeros_like(out[total:]))
    assert torch.equal(lse[:, total:], torch.full_like(lse[:, total:], float("-inf")))
    assert torch.equal(projected.grad[total:], torch.zeros_like(projected.grad[total:]))
    trimmed = projected.detach()[:total].requires_grad_()
    dualkv.attention(*trimmed.unbind(1), forest).backward(dout[:total])
    assert torch.equal(projected.grad[:total], trimmed.grad)


def test_prompt_gradients_are_sums_over_the_responses(every_dtype, device):
    """Of each response's own pack of prompt and response, given that the prompt's rows have no gradient."""
    prompt, lengths = 40, [30, 7, 65]
    q, k, v, dout = normal(prompt + sum(lengths), 4, 2, 32, every_dtype, device=device)
    dout[:prompt] = 0
    together = attend((q, k, v), dualkv.SegmentForest.from_groups([prompt], [lengths]), dout)
    sums = {"dk": 0, "dv": 0}
    for own in torch.arange(prompt, len(q)).split(lengths):
        rows = torch.cat([torch.arange(prompt), own])
        forest = dualkv.SegmentForest.from_groups([prompt], [[len(own)]])
        alone = attend((q[rows], k[rows], v[rows]), forest, dout[rows])
        sums = {name: sums[name] + alone[name][:prompt].double() for name in sums}
    for name, value in sums.items():
        error = (together[name][:prompt].double() - value).abs().max()
        assert error <= 8 * torch.finfo(every_dtype).eps * value.abs().max(), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_H5_checkpointed_layers_with_the_forest_as_an_argument(use_reentrant, dtype, device):
    """A second batch between forward and backward must not change what is recomputed."""
    forests = [dualkv.SegmentForest.from_groups([9], [lengths]) for lengths in ([4, 1, 6], [2, 9])]
    weights = [draw(16, 48, dtype=dtype, device=device, seed=n).requires_grad_() for n in range(2)]

    def layer(x, weight, forest):
        q, k, v = (x @ weight).view(len(x), 3, 2, 8).unbind(1)
        return x + dualkv.attention(q, k, v, forest).flatten(1)

    def loss(run, forest):
        x = draw(20, 16, dtype=dtype, device=device, seed=2).requires_grad_()
        for weight in weights:
            x = run(layer, x, weight, forest)
        return x.square().mean()

    plain = torch.autograd.grad(loss(lambda f, *arguments: f(*arguments), forests[0]), weights)
    first = loss(lambda f, *arguments: checkpoint(f, *arguments, use_reentrant=use_reentrant), forests[0])
    loss(lambda f, *arguments: checkpoint(f, *arguments, use_reentrant=use_reentrant), forests[1])
    first.backward()
    for weight, expected in zip(weights, plain):
        assert torch.equal(weight.grad, expected)


def test_H6_mixed_types_are_refused_by_name(device):
    forest = ThreeAndTwoAndOne().forest
    q, k, v, _ = normal(6, 2, 1, 8, torch.float32, device=device)
    with pytest.raises(TypeError, match="q torch.float32, k torch.float32, v torch.bfloat16"):
        dualkv.attention(q, k, v.bfloat16(), forest)
    with pytest.raises(TypeError, match=r"must be one of .*float64.*got q torch.int64"):
        dualkv.attention(q.long(), k.long(), v.long(), forest)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_H6_autocast_casts_and_gradients_return_in_each_inputs_type(cast, device):
    forest = ThreeAndTwoAndOne().forest
    q, k, v, dout = normal(6, 2, 1, 8, torch.float32, device=device)
    inputs = [x.requires_grad_() for x in (q, k.to(torch.bfloat16).detach(), v)]
    with torch.autocast(device.type, cast):
        out = dualkv.attention(*inputs, forest)
        if device.type == "cpu":
            assert dualkv.attention(*(x.double() for x in inputs), forest).dtype == torch.float64
    assert out.dtype == cast
    found = torch.autograd.grad(out, inputs, dout.to(cast))
    expected = attend([x.detach().to(cast) for x in inputs], forest, dout.to(cast))
    assert torch.equal(out, expected["out"])
    for gradient, x, name in zip(found, inputs, ("dq", "dk", "dv")):
        assert gradient.dtype == x.dtype
        assert torch.equal(gradient, expected[name].to(x.dtype)), name


def test_H6_a_wide_gradient_of_a_narrow_output(device):
    forest = ThreeAndTwoAndOne().forest
    *inputs, dout = normal(6, 2, 1, 8, torch.bfloat16, device=device)
    expected = attend(inputs, forest, dout)
    options = (8**-0.5, -1, 0.0, 0)
    out, lse = torch.ops.dualkv.attention_forward(*inputs, None, forest.segments, *options)
    gradients = torch.ops.dualkv.attention_backward(
        dout.float(), None, *inputs, None, forest.segments, out, lse, *options, False
    )
    for gradient, name in zip(gradients, ("dq", "dk", "dv")):
        assert gradient.dtype == torch.bfloat16 and torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("sinks_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sinks_of_any_type_get_a_gradient_of_theirs(every_dtype, sinks_dtype, device):
    forest = ThreeAndTwoAndOne().forest
    *inputs, dout = normal(6, 2, 1, 8, every_dtype, device=device)
    sinks = torch.tensor([0.5, -1.25], dtype=sinks_dtype, device=device)
    found = attend(inputs, forest, dout, sinks=sinks)
    assert found["dsinks"].dtype == sinks_dtype
    wide = torch.float64 if every_dtype == torch.float64 else torch.float32
    expected = attend(inputs, forest, dout, sinks=sinks.to(wide))
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["dsinks"], expected["dsinks"].to(sinks_dtype))
    without = attend(inputs, forest, dout)
    assert not torch.equal(found["out"], without["out"])


def test_only_the_log_sum_exp_may_be_differentiated(every_dtype, device):
    forest = ThreeAndTwoAndOne().forest
    q, k, v, _ = normal(6, 2, 1, 8, every_dtype, device=device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    _, lse = dualkv.attention(*inputs, forest, return_lse=True)
    lse.sum().backward()
    # d lse[i] / d q[i] is the mean of the visible keys weighted by the probabilities: attention with v = k
    means = dualkv.attention(q.detach(), k.detach(), k.detach(), forest) * 8**-0.5
    error = (q.grad.double() - means.double()).abs().max()
    assert error <= 8 * torch.finfo(every_dtype).eps * means.abs().max()
    assert torch.equal(v.grad, torch.zeros_like(v))


def test_a_gradient_that_nothing_asks_for_changes_no_other(dtype, device):
    forest = dualkv.SegmentForest.from_groups([65], [[33, 1]])
    *inputs, dout = normal(forest.total_tokens, 4, 2, 64, dtype, device=device)
    sinks = torch.tensor([0.5, -1.25, 0.0, 3.0], device=device)
    expected = attend(inputs, forest, dout, sinks=sinks)
    for names in (("dq",), ("dk",), ("dv", "dsinks"), ("dsinks",)):
        tensors = dict(zip(("dq", "dk", "dv", "dsinks"), (x.detach().clone() for x in (*inputs, sinks))))
        for name in names:
            tensors[name].requires_grad_()
        q, k, v, own_sinks = tensors.values()
        dualkv.attention(q, k, v, forest, sinks=own_sinks).backward(dout)
        assert_same_bits({name: x.grad for name, x in tensors.items()}, {n: expected[n] for n in names})
        assert all(x.grad is None for name, x in tensors.items() if name not in names)
