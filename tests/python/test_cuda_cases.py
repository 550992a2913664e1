"""The cases of test_attention_cases.py, test_cases_layout.py and test_cases_memory.py on CUDA tensors, and
those that only a GPU can show: C2 more than 2^31 elements, H1 two GPUs, H3 CUDA graphs. The forward pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cases
import dualkv
from cases import ThreeAndTwoAndOne, assert_same_bits, attend_forward
from reference import HALF, assert_outputs_right

pytestmark = pytest.mark.usefixtures("gpu")

each_half = pytest.mark.parametrize("dtype", HALF)
groups = dualkv.SegmentForest.from_groups


def normal(*arguments, **options):
    """Normal q, k and v."""
    return [x.to(device="cuda") for x in cases.normal(*arguments, **options)[:3]]


def on_gpu(case: ThreeAndTwoAndOne) -> ThreeAndTwoAndOne:
    case.inputs = [x.to(device="cuda") for x in case.inputs]
    return case


def check_known(case: ThreeAndTwoAndOne, **options) -> dict:
    found = attend_forward(case.inputs, case.forest, **options)
    case.check_forward(found)
    return found


@each_half
def test_A1_empty_responses_leave_the_others_bits(dtype):
    found = check_known(on_gpu(ThreeAndTwoAndOne([0, 2, 0, 1, 0], dtype)))
    assert_same_bits(found, check_known(on_gpu(ThreeAndTwoAndOne(dtype=dtype))))


def test_A1_empty_responses_beside_long_ones():
    prompt, lengths = 300, [1208, 840]
    inputs = normal(prompt + sum(lengths), 4, 1, 128, torch.bfloat16)
    found = attend_forward(inputs, groups([prompt], [[0, *lengths, 0]]))
    assert_same_bits(found, attend_forward(inputs, groups([prompt], [lengths])))
    assert not found["out"].isnan().any()


def test_A1_all_responses_empty_and_no_rows_at_all():
    inputs = normal(5, 2, 1, 16, torch.bfloat16)
    found = attend_forward(inputs, groups([5], [[0, 0, 0, 0]]))
    assert_same_bits(found, attend_forward(inputs, groups([5], [[]])))
    for forest in (groups([], []), groups([0], [[0]])):
        empty = attend_forward([x[:0] for x in inputs], forest)
        assert empty["out"].shape == (0, 2, 16) and empty["lse"].shape == (2, 0)
        padding = attend_forward(inputs, forest)
        assert not padding["out"].any() and (padding["lse"] == -math.inf).all()


@pytest.mark.parametrize("forest", [groups([1], [[]]), groups([0], [[1]])])
def test_A2_a_single_key(forest):
    q, k, v = normal(1, 2, 2, 16, torch.float16, scale=3.0)
    found = attend_forward((q, k, v), forest)
    assert torch.equal(found["out"], v)
    torch.testing.assert_close(found["lse"].t(), (q.float() * k.float()).sum(2) / 4, rtol=1e-6, atol=1e-5)


def equal_scores(prompt, responses, heads, kv_heads, dim, q, k, dtype):
    """All scores equal: out is the mean of the visible values, lse = score + ln(visible)."""
    forest = groups([prompt], [responses])
    rows = forest.total_tokens
    queries, _, v = normal(rows, heads, kv_heads, dim, dtype)
    inputs = (torch.full_like(queries, q), torch.full_like(v, k), v)
    found = attend_forward(inputs, forest)
    score = q * k * dim**0.5
    lse = score + (forest.position_ids() + 1).double().log()
    torch.testing.assert_close(
        found["lse"].double().cpu(), lse.expand(heads, rows), rtol=2e-7, atol=1e-5 + abs(score) * 1e-7
    )
    assert_outputs_right(found, inputs, forest, None, f"P={prompt} R={responses}", scale=dim**-0.5)
    return found


@each_half
@pytest.mark.parametrize("prompt", [64, 65, 129, 191])
def test_B1_lse_below_the_smallest_exponent(prompt, dtype):
    found = equal_scores(prompt, [1, 33, 65], 1, 1, 64, 3.53125, -3.53125, dtype)
    assert found["lse"].min() < -94


@each_half
def test_B3_all_scores_far_below_zero(dtype):
    found = equal_scores(130, [128], 14, 2, 64, 5.0, -5.0, dtype)
    for row, lse in ((130, -195.1248), (257, -194.4470)):
        assert (found["lse"][:, row] - lse).abs().max() <= 2e-4
    assert (found["out"][130:].abs().amax(dim=2) > 0).all()


def test_B4_raw_scores_below_any_finite_stand_in_for_minus_infinity():
    forest = groups([70], [[5]])
    q, _, v = normal(75, 1, 1, 128, torch.bfloat16)
    found = attend_forward((torch.full_like(q, 44.0), torch.full_like(v, -44.0), v), forest)
    visible = torch.arange(1, 76)
    mean = v.float().cpu().cumsum(0) / visible.view(75, 1, 1)
    out = found["out"].float().cpu()
    torch.testing.assert_close(out, mean, rtol=0.02, atol=0.02 * mean.abs().max().item())
    assert (out.abs().amax(dim=2) > 0).all()
    lse = -44 * 44 * math.sqrt(128) + visible.double().log()
    torch.testing.assert_close(found["lse"][0].double().cpu(), lse, rtol=0, atol=0.02)


@each_half
def test_B5_scale_zero_and_negative(dtype):
    case = on_gpu(ThreeAndTwoAndOne(dtype=dtype))
    case.inputs[0] = torch.randn_like(case.inputs[0])
    check_known(case, scale=0.0)
    q, k, v = normal(300, 2, 1, 64, dtype)
    forest = groups([200], [[99, 1]])
    negative = attend_forward((q, k, v), forest, scale=-0.125)
    assert_same_bits(negative, attend_forward((-q, k, v), forest, scale=0.125))


@each_half
def test_B6_rows_whose_window_has_left_the_prompt(dtype):
    v = torch.arange(1.0, 11).view(10, 1, 1).expand(10, 1, 8).to(device="cuda", dtype=dtype)
    zeros = torch.zeros_like(v)
    found = attend_forward((zeros, zeros, v), groups([4], [[6]]), window_left=1)
    assert found["out"][:, 0, 0].tolist() == [1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]
    assert (found["lse"][0].cpu() - torch.tensor([0.0] + 9 * [math.log(2)])).abs().max() <= 1e-6


def test_B6_responses_far_past_a_window_that_spans_whole_tiles():
    """The prompt's tiles, and the first of a response, are hidden from the later rows."""
    forest = groups([500], [[900, 1, 130]])
    inputs = normal(forest.total_tokens, 2, 1, 64, torch.bfloat16)
    found = attend_forward(inputs, forest, window_left=60)
    options = {"scale": 64**-0.5, "window_left": 60}
    assert_outputs_right(found, inputs, forest, None, "window 60, seed 0", **options)


def test_B7_lse_is_a_natural_logarithm():
    lse = attend_forward(on_gpu(ThreeAndTwoAndOne(dtype=torch.bfloat16)).inputs, ThreeAndTwoAndOne().forest)[
        "lse"
    ]
    assert (lse[0, 3:5].cpu() - torch.tensor([1.386294, 1.609438])).abs().max() <= 1e-5


def test_B8_very_large_inputs():
    x = torch.full((2, 1, 64), 133120.0, dtype=torch.bfloat16, device="cuda")
    found = attend_forward((x, x, x), groups([1], [[1]]))
    assert torch.equal(found["out"], x)
    assert found["lse"].isfinite().all()


def test_C1_offsets_past_2_31():
    """The second response's rows are more than 2^31 elements behind the first row."""
    rows, dim = 16_432, 64
    forest = groups([16], [[16_400, 16]])
    inputs = normal(rows, 2, 2, dim, torch.bfloat16)
    expected = attend_forward(inputs, forest)
    buffer = torch.empty(rows, 131_072, dtype=torch.bfloat16, device="cuda")
    laid_out = []
    for i, x in enumerate(inputs):
        columns = buffer[:, i * 2 * dim : (i + 1) * 2 * dim]
        laid_out.append(columns.copy_(x.flatten(1)).view(x.shape))
        assert laid_out[-1].stride(0) * 16_416 > 2**31
    assert_same_bits(attend_forward(laid_out, forest), expected)


def test_C2_more_than_2_31_elements():
    """The last of 34 responses against the same response alone."""
    prompt, length, count, heads, kv_heads, dim = 4096, 4096, 34, 128, 8, 128
    forest = groups([prompt], [[length] * count])
    inputs = [
        torch.randn(forest.total_tokens, h, dim, dtype=torch.bfloat16, device="cuda")
        for h in (heads, kv_heads, kv_heads)
    ]
    assert inputs[0].numel() > 2**31
    found = attend_forward(inputs, forest)
    alone = attend_forward(
        [torch.cat([x[:prompt], x[-length:]]) for x in inputs], groups([prompt], [[length]])
    )
    assert torch.equal(found["out"][-length:], alone["out"][-length:])
    assert torch.equal(found["lse"][:, -length:], alone["lse"][:, -length:])
    rows = slice(0, prompt)
    part = [x[rows, : heads // kv_heads] if x.shape[1] == heads else x[rows, :1] for x in inputs]
    first_heads = attend_forward(part, groups([prompt], [[]]))
    assert torch.equal(found["out"][rows, : heads // kv_heads], first_heads["out"])


def test_C3_more_responses_than_a_launch_grid_is_wide():
    count = 70_000
    few = normal(17, 1, 1, 64, torch.bfloat16)
    one = attend_forward(few, groups([16], [[1]]))
    assert_outputs_right(one, few, groups([16], [[1]]), None, "one response", scale=64**-0.5)
    found = attend_forward(
        [torch.cat([x[:16], x[16:].expand(count, 1, 64)]) for x in few], groups([16], [[1] * count])
    )
    assert torch.equal(found["out"][16:], one["out"][16:].expand(count, 1, 64))
    assert torch.equal(found["lse"][:, 16:], one["lse"][:, 16:].expand(1, count))


@each_half
def test_D1_a_window_counts_earlier_positions(dtype):
    v = torch.arange(1.0, 8).view(7, 1, 1).expand(7, 1, 8).to(device="cuda", dtype=dtype)
    zeros = torch.zeros_like(v)
    found = attend_forward((zeros, zeros, v), groups([4], [[3]]), window_left=2)
    assert found["out"][:, 0, 0].tolist() == [1, 1.5, 2, 3, 4, 5, 6]
    wider = attend_forward((zeros, zeros, v), groups([4], [[3]]), window_left=3)
    assert wider["out"][4:, 0, 0].tolist() == [3.5, 4.5, 5.5]


@each_half
def test_D2_window_zero_and_windows_as_wide_as_the_sequence(dtype):
    forest = groups([130], [[63, 1]])
    q, k, v = normal(194, 2, 1, 32, dtype)
    itself = attend_forward((q, k, v), forest, window_left=0)
    assert torch.equal(itself["out"], v.expand(194, 2, 32))
    scores = (q.float() * k.float()).sum(2) * 32**-0.5
    torch.testing.assert_close(itself["lse"].t(), scores, rtol=1e-5, atol=1e-5)
    causal = attend_forward((q, k, v), forest)
    for window_left in (192, 193, 10**9, 2**31 - 1):
        wide = attend_forward((q, k, v), forest, window_left=window_left)
        assert_same_bits(wide, causal, f"window_left {window_left}")
    assert not torch.equal(attend_forward((q, k, v), forest, window_left=191)["out"], causal["out"])


def test_D2_a_negative_window_is_refused():
    with pytest.raises(ValueError, match="window_left must be >= 0, .* got -1"):
        attend_forward(normal(6, 1, 1, 8, torch.bfloat16), groups([3], [[2, 1]]), window_left=-1)


@each_half
def test_D4_softcap(dtype):
    def column(a, b):
        x = torch.zeros(2, 1, 8, device="cuda", dtype=dtype)
        x[:, 0, 0] = torch.tensor([a, b])
        return x

    inputs = (column(0.0, 1.0), column(2.0, 0.0), column(1.0, 0.0))
    found = attend_forward(inputs, groups([1], [[1]]), scale=1.0, softcap=1.0)
    assert abs(found["out"][1, 0, 0].item() - 0.723927) <= torch.finfo(dtype).eps
    assert abs(found["lse"][0, 1].item() - 1.287092) <= 5e-6


@each_half
def test_E2_tensors_of_different_layouts(dtype):
    """q with the head dim outermost, every second head of a tensor, columns of a fused projection."""
    forest = groups([65], [[33, 1]])
    rows = forest.total_tokens
    q, k, v = normal(rows, 4, 2, 64, dtype)
    fused = torch.full((rows, 3 * 2 * 64), math.nan, device="cuda", dtype=dtype)
    every_second = torch.full((rows, 4, 64), math.nan, device="cuda", dtype=dtype)[:, ::2]
    laid_out = (
        q.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        every_second.copy_(k),
        fused[:, 256:].view(rows, 2, 64).copy_(v),
    )
    assert [x.is_contiguous() for x in laid_out] == [False] * 3
    assert_same_bits(attend_forward(laid_out, forest), attend_forward((q, k, v), forest))


@each_half
@pytest.mark.parametrize("row_padding", [0, 1, 8])
@pytest.mark.parametrize("offset", [1, 8])
def test_E3_any_storage_offset_and_row_stride(offset, row_padding, dtype):
    forest = groups([65], [[33, 1]])
    inputs = normal(forest.total_tokens, 4, 2, 64, dtype)
    laid_out = []
    for x in inputs:
        rows, heads, dim = x.shape
        stride = heads * dim + row_padding
        flat = torch.full((offset + rows * stride,), math.nan, device="cuda", dtype=dtype)
        laid_out.append(flat.as_strided(x.shape, (stride, dim, 1), offset).copy_(x))
    assert_same_bits(attend_forward(laid_out, forest), attend_forward(inputs, forest))


@pytest.mark.parametrize("heads", [8, 1])
@pytest.mark.parametrize("stride", [1, 7, 2**40])
def test_E5_any_stride_of_a_single_head_or_row(stride, heads):
    forest = groups([64], [[16]])
    inputs = normal(80, heads, 1, 128, torch.bfloat16)
    odd = [x.as_strided(x.shape, (128, stride, 1)) if x.shape[1] == 1 else x for x in inputs]
    assert_same_bits(attend_forward(odd, forest), attend_forward(inputs, forest))
    row = [x[:1] for x in inputs]
    odd = [x.as_strided(x.shape, (stride, 128, 1)) for x in row]
    assert_same_bits(attend_forward(odd, groups([1], [[]])), attend_forward(row, groups([1], [[]])))


@each_half
@pytest.mark.parametrize("heads, kv_heads", [(12, 2), (14, 2), (21, 7), (7, 1), (32, 1), (1, 1)])
def test_F1_any_number_of_query_heads_for_a_kv_head(heads, kv_heads, dtype):
    forest = groups([66], [[1, 17]])
    inputs = normal(forest.total_tokens, heads, kv_heads, 32, dtype)
    found = attend_forward(inputs, forest)
    assert_outputs_right(found, inputs, forest, None, "seed 0", scale=32**-0.5)


@pytest.mark.parametrize("heads, kv_heads", [(33, 2), (3, 2), (2, 3)])
def test_F1_heads_that_are_no_multiple_are_refused(heads, kv_heads):
    inputs = normal(84, heads, kv_heads, 32, torch.bfloat16)
    with pytest.raises(ValueError, match=f"multiple of the heads of k and v, got {heads} and {kv_heads}"):
        dualkv.attention(*inputs, groups([66], [[1, 17]]))


@pytest.mark.parametrize("dim", [7, 100, 136, 192, 256, 512])
def test_F2_other_head_sizes_are_refused(dim):
    with pytest.raises(NotImplementedError, match=f"head_dim must be a multiple of 8 up to 128 .* got {dim}"):
        dualkv.attention(*normal(99, 2, 1, dim, torch.bfloat16), groups([65], [[33, 1]]))


@each_half
@pytest.mark.parametrize("dim", [8, 40, 72, 120])
def test_F2_the_columns_behind_a_head_are_never_read(dim, dtype):
    """NaN between the heads, where a kernel that rounds the head size up would look."""
    forest = groups([65], [[33, 1]])
    inputs = normal(forest.total_tokens, 2, 1, dim, dtype)
    among_nan = [torch.nn.functional.pad(x, (0, 8), value=math.nan)[:, :, :dim] for x in inputs]
    assert_same_bits(attend_forward(among_nan, forest), attend_forward(inputs, forest))


@pytest.fixture
def second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda:1")


def test_H1_tensors_on_a_gpu_that_is_not_the_current_one(second_gpu):
    case = ThreeAndTwoAndOne(dtype=torch.bfloat16)
    with torch.cuda.device(0):
        for device in (second_gpu, torch.device("cuda:0"), second_gpu):
            case.inputs = [x.to(device) for x in case.inputs]
            found = check_known(case)
            assert found["out"].device == found["lse"].device == device
            assert torch.cuda.current_device() == 0


def test_H1_a_device_plan_on_a_gpu_that_is_not_the_current_one(second_gpu):
    case = ThreeAndTwoAndOne(dtype=torch.bfloat16)
    dimensions = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    with torch.cuda.device(0):
        slot = dualkv.DevicePlan(case.forest, **dimensions, device=second_gpu)
        here = [x.cuda() for x in case.inputs]
        case.forest, case.inputs = slot, [x.to(second_gpu) for x in case.inputs]
        check_known(case)
        assert torch.cuda.current_device() == 0
        with pytest.raises(ValueError, match="same device, got q cuda:0, .* forest cuda:1"):
            dualkv.attention(*here, slot)


def test_H1_mixed_devices_are_refused(second_gpu):
    q, k, v = on_gpu(ThreeAndTwoAndOne(dtype=torch.bfloat16)).inputs
    with pytest.raises(
        ValueError, match="q, k, v must be on the same device, got q cuda:0, k cuda:1, v cuda:0"
    ):
        dualkv.attention(q, k.to(second_gpu), v, ThreeAndTwoAndOne().forest)


def test_H1_cpu_and_gpu_are_not_mixed():
    forest = ThreeAndTwoAndOne().forest
    q, k, v = on_gpu(ThreeAndTwoAndOne(dtype=torch.bfloat16)).inputs
    with pytest.raises(ValueError, match="must be on the same device, got q cuda:0, k cpu, v cuda:0"):
        dualkv.attention(q, k.cpu(), v, forest)
    for q, k in ((q, k.cpu()), (q.cpu(), k)):
        with pytest.raises(ValueError, match="must be on the same device"):
            torch.ops.dualkv.attention_forward(q, k, v, None, forest.segments, 1.0, -1, 0.0, 0)


@pytest.mark.parametrize("window_left", [None, 2])
def test_H3_a_graph_is_replayed_with_other_lengths(window_left):
    """Captured with four responses; replayed with others, with fewer rows, and with the first again."""
    options = {"window_left": window_left}
    captured, other, shorter = (groups([6], [lengths]) for lengths in ([5, 3, 0, 0], [2, 2, 2, 2], [1]))
    rows = captured.total_tokens
    slot = dualkv.DevicePlan(
        captured, num_heads=4, num_kv_heads=2, head_dim=64, max_bytes=4096, device="cuda", **options
    )
    static = normal(rows, 4, 2, 64, torch.bfloat16)
    attend_forward(static, slot, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_forward(static, slot, **options)
    for step, forest in enumerate((captured, other, shorter, captured)):
        inputs = normal(rows, 4, 2, 64, torch.bfloat16, seed=step)
        for x, values in zip(static, inputs):
            x.copy_(values)
            x[forest.total_tokens :] = math.nan
        slot.load(forest)
        graph.replay()
        assert_same_bits(found, attend_forward(inputs, forest, **options), f"step {step}")
        assert not found["out"][forest.total_tokens :].any()
        assert (found["lse"][:, forest.total_tokens :] == -math.inf).all()


def test_H4_compiled_attention_equals_eager_and_recompiles_at_most_once():
    def step(q, k, v, sinks, forest):
        return dualkv.attention(q, k, v, forest, window_left=50, softcap=2.0, sinks=sinks).mean()

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (128, 196, 256, 257):
        forest = groups([rows - 60], [[20, 40]])
        q, k, v = normal(rows, 4, 2, 16, torch.bfloat16)
        q = q.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        arguments = (q, k, v, torch.randn(4, device="cuda"), forest)
        assert torch.equal(compiled(*arguments), step(*arguments)), rows
    assert backend.frame_count <= 2


@each_half
@pytest.mark.parametrize("with_sinks", [False, True])
def test_H4_opcheck(dtype, with_sinks):
    forest = groups([70, 1], [[20, 0, 1], [4]])
    q, k, v = normal(forest.total_tokens + 2, 4, 2, 16, dtype)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    sinks = torch.randn(4, device="cuda") if with_sinks else None
    inputs = (q, k, v, sinks, forest.segments, 0.7, 2, 1.5, 0)
    torch.library.opcheck(torch.ops.dualkv.attention_forward.default, inputs)


def test_H4_fake_results_are_like_real_ones():
    forest = groups([70], [[20, 1]])
    inputs = normal(forest.total_tokens, 4, 2, 16, torch.bfloat16)
    inputs[0] = inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    real = attend_forward(inputs, forest)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = attend_forward([mode.from_tensor(x) for x in inputs], forest)
    for name, x in real.items():
        y = fake[name]
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device), name


class Split:
    """The known answers through flash_attn_dualkv_varlen_func, with queries of the responses alone."""

    def __init__(self):
        q, k, v = on_gpu(ThreeAndTwoAndOne(dtype=torch.bfloat16)).inputs
        self.q, self.kv = q[3:], (k[:3], v[:3], k[3:], v[3:])

    def call(self, cu_q, cu_k=None, prompt=3, max_q=2, max_k=2, kv=None):
        cu_k = cu_q if cu_k is None else cu_k
        kv = self.kv if kv is None else kv
        return dualkv.flash_attn_dualkv_varlen_func(self.q, *kv, cu_q, cu_k, max_q, prompt, max_k)


@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda x: torch.tensor(x, dtype=torch.int64, device="cuda"),
        lambda x: torch.tensor(x, dtype=torch.int32, device="cuda"),
        lambda x: torch.tensor(x, dtype=torch.int32),
    ],
    ids=["list", "int64 on the GPU", "int32 on the GPU", "int32 on the CPU"],
)
def test_I1_offsets_of_any_integer_type_on_any_device(make):
    assert Split().call(make([0, 2, 3]))[:, 0, 0].tolist() == [2.5, 3, 4]


@each_half
def test_I2_padding_rows_take_no_part(dtype):
    forest = groups([32], [[144, 288, 512]])
    total = forest.total_tokens
    trimmed = normal(total, 4, 2, 64, dtype)
    inputs = [torch.cat([x, x.new_full((2, *x.shape[1:]), math.nan)]) for x in trimmed]
    found, expected = attend_forward(inputs, forest), attend_forward(trimmed, forest)
    assert torch.equal(found["out"][:total], expected["out"]) and not found["out"][total:].any()
    assert torch.equal(found["lse"][:, :total], expected["lse"])
    assert (found["lse"][:, total:] == -math.inf).all()


def test_I2_rows_past_the_last_offset_take_no_part():
    prompt, cu = 32, [0, 144, 432, 944]
    q, k, v = normal(prompt + 946, 2, 1, 64, torch.bfloat16)
    q, kv = q[prompt:].clone(), [x.clone() for x in (k[:prompt], v[:prompt], k[prompt:], v[prompt:])]
    for x in (q, *kv[2:]):
        x[944:] = math.nan
    out = dualkv.flash_attn_dualkv_varlen_func(q, *kv, cu, cu, 512, prompt, 512)
    trimmed = [q[:944], *kv[:2], *(x[:944] for x in kv[2:])]
    expected = dualkv.flash_attn_dualkv_varlen_func(*trimmed, cu, cu, 512, prompt, 512)
    assert torch.equal(out[:944], expected) and not out[944:].any()


def test_I4_lengths_that_contradict_the_tensors_or_each_other():
    case = Split()
    with pytest.raises(ValueError, match="cu_seqlens_q must end within the rows of q, got 5 and 3"):
        case.call([0, 2, 5], max_q=3, max_k=3)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must start with 0, got \[1, 2, 3\]"):
        case.call([1, 2, 3])
    with pytest.raises(ValueError, match="context_seqlen must be the rows of k_context, got 4 and 3"):
        case.call([0, 2, 3], prompt=4)
    with pytest.raises(ValueError, match="max_seqlen_q must be at least .* got 1 and 2"):
        case.call([0, 2, 3], max_q=1)
    short = (*case.kv[:2], case.kv[2][:2], case.kv[3][:2])
    with pytest.raises(ValueError, match="cu_seqlens_k_decoded .* k_decoded, got 3 and 2"):
        case.call([0, 2, 3], kv=short)
    q, k, v = normal(5, 1, 1, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="at least the 6 rows of the forest, got 5"):
        dualkv.attention(q, k, v, ThreeAndTwoAndOne().forest)


@pytest.mark.parametrize("responses", [[33_776], [33_608] + [24] * 7, [32_768] + [16] * 63], ids=len)
def test_I5_the_log_sum_exp_is_packed_and_nothing_else_is_allocated(responses):
    prompt, heads, kv_heads, dim = 1024, 32, 8, 128
    forest = groups([prompt], [responses])
    total = forest.total_tokens
    inputs = normal(total, heads, kv_heads, dim, torch.bfloat16)
    attend_forward(inputs, forest)  # with it the plan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = attend_forward(inputs, forest)
    used = torch.cuda.max_memory_allocated() - before
    assert found["lse"].untyped_storage().nbytes() == 4 * heads * total
    outputs = sum(x.untyped_storage().nbytes() for x in found.values())
    assert outputs <= used <= outputs + 4 * 2**20, (used, outputs)
