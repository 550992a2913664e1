"""The cases of test_attention_cases.py, test_cases_layout.py and test_cases_memory.py on CUDA tensors, and
those that only a GPU can show: C2 more than 2^31 elements, G3 kernels that start too early, H1 two GPUs, H3 CUDA
graphs."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cases
import dualkv
from cases import ThreeAndTwoAndOne, assert_same_bits, attend, sums_in_any_order
from reference import HALF
from test_attention_cases import *  # noqa: F403
from test_cases_layout import (  # noqa: F401
    test_D2_a_negative_window_is_refused,
    test_E2_keys_and_values_of_prompt_and_responses_each_of_a_layout_of_their_own,
    test_E3_any_storage_offset_and_row_stride,
    test_F1_any_number_of_query_heads_for_a_kv_head,
    test_F1_heads_that_are_no_multiple_are_refused,
    test_G4_many_short_responses,
)
from test_cases_memory import (  # noqa: F401
    test_I2_the_weight_gradient_before_padding_rows_is_that_of_the_trimmed_run,
)

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def device(gpu):
    return gpu


@pytest.fixture(params=HALF, ids=str)
def dtype(request):
    return request.param


every_dtype = dtype

each_half = pytest.mark.parametrize("dtype", HALF)
groups = dualkv.SegmentForest.from_groups
GRADIENTS = ("dq", "dk", "dv")


def normal(*arguments, **options):
    """Normal q, k, v and dout."""
    return cases.normal(*arguments, device="cuda", **options)


def on_gpu(**options) -> ThreeAndTwoAndOne:
    return ThreeAndTwoAndOne(dtype=torch.bfloat16, device="cuda", **options)


@pytest.mark.parametrize("wide", [("dout",), ("q", "k", "v", "dout")])
def test_C1_offsets_past_2_31(wide):
    """The second response's rows are more than 2^31 elements behind the first row."""
    rows, dim = 16_432, 64
    forest = groups([16], [[16_400, 16]])
    tensors = dict(zip(("q", "k", "v", "dout"), normal(rows, 2, 2, dim, torch.bfloat16)))
    expected = attend([tensors[x] for x in "qkv"], forest, tensors["dout"])
    buffer = torch.empty(rows, 131_072, dtype=torch.bfloat16, device="cuda")
    for i, name in enumerate(wide):
        columns = buffer[:, i * 2 * dim : (i + 1) * 2 * dim]
        tensors[name] = columns.copy_(tensors[name].flatten(1)).view(rows, 2, dim)
        assert tensors[name].stride(0) * 16_416 > 2**31
    assert_same_bits(attend([tensors[x] for x in "qkv"], forest, tensors["dout"]), expected)


def test_C2_more_than_2_31_elements():
    """The last of 34 responses against the same response alone, with the prompt's rows before it."""
    prompt, length, count, heads, kv_heads, dim = 4096, 4096, 34, 128, 8, 128
    forest = groups([prompt], [[length] * count])
    *inputs, dout = (
        torch.randn(forest.total_tokens, h, dim, dtype=torch.bfloat16, device="cuda")
        for h in (heads, kv_heads, kv_heads, heads)
    )
    assert inputs[0].numel() > 2**31
    found = attend(inputs, forest, dout)
    last = [torch.cat([x[:prompt], x[-length:]]) for x in (*inputs, dout)]
    alone = attend(last[:3], groups([prompt], [[length]]), last[3])
    assert torch.equal(found["lse"][:, -length:], alone["lse"][:, -length:])
    assert torch.equal(found["out"][-length:], alone["out"][-length:])
    rounding = torch.finfo(torch.bfloat16).eps
    for name in GRADIENTS:
        right = alone[name][-length:]
        atol = 1e-3 * right.abs().max().item()  # sums of the same numbers, in another order
        torch.testing.assert_close(found[name][-length:], right, rtol=rounding, atol=atol, msg=name)
    first = prompt, heads // kv_heads
    part = [x[:prompt, : first[1] if x.shape[1] == heads else 1] for x in inputs]
    assert torch.equal(found["out"][:prompt, : first[1]], dualkv.attention(*part, groups([prompt], [[]])))


@pytest.mark.parametrize("dim", [7, 100, 136, 192, 256, 512])
def test_F2_other_head_sizes_are_refused(dim):
    with pytest.raises(NotImplementedError, match=f"head_dim must be a multiple of 8 up to 128 .* got {dim}"):
        dualkv.attention(*normal(99, 2, 1, dim, torch.bfloat16)[:3], groups([65], [[33, 1]]))


@each_half
@pytest.mark.parametrize("dim", [8, 40, 72, 120])
def test_F2_the_columns_behind_a_head_are_never_read(dim, dtype):
    """NaN between the heads, where a kernel that rounds the head size up would look."""
    forest = groups([65], [[33, 1]])
    tensors = normal(forest.total_tokens, 2, 1, dim, dtype)
    among_nan = [torch.nn.functional.pad(x, (0, 8), value=math.nan)[:, :, :dim] for x in tensors]
    expected = attend(tensors[:3], forest, tensors[3])
    assert_same_bits(attend(among_nan[:3], forest, among_nan[3]), expected)


def test_G1_a_hundred_backward_runs_have_one_set_of_bits():
    """dq by default too, but for the order of its sums."""
    forest = groups([1024], [[256] * 16])
    *inputs, dout = normal(forest.total_tokens, 8, 2, 128, torch.bfloat16)
    expected = attend(inputs, forest, dout, deterministic=True)
    size = expected["dq"].abs().max()
    other, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with sums_in_any_order():
        for run in range(120):
            if run >= 100:
                with torch.cuda.stream(other):  # busy beside it
                    for _ in range(3):
                        matrix @ matrix
            assert_same_bits(attend(inputs, forest, dout, deterministic=True), expected, f"run {run}")
        for run in range(20):
            found = attend(inputs, forest, dout)
            spread = (found["dq"].float() - expected["dq"].float()).abs().max() / size
            assert spread <= torch.finfo(torch.bfloat16).eps, f"run {run}: {spread}"
            assert_same_bits({**found, "dq": expected["dq"]}, expected, f"run {run}")


def test_G1_a_thousand_runs_where_memory_is_short_and_another_stream_busy():
    """Workspaces then come from wherever there is room, and hold what was there before."""
    forest = groups([300], [[100, 1, 37] * 4])
    *inputs, dout = normal(forest.total_tokens, 8, 2, 128, torch.bfloat16)
    expected = attend(inputs, forest, dout, deterministic=True)
    size = expected["dq"].abs().max()
    other, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    chance = random.Random(0)
    with sums_in_any_order():
        with torch.cuda.stream(other):
            matrix @ matrix  # has a workspace, which stays
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved() + (128 << 20)
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        try:
            for run in range(1000):
                with torch.cuda.stream(other):
                    matrix @ matrix
                others = [
                    torch.full((chance.randrange(1, 4 << 20),), 255, dtype=torch.uint8, device="cuda")
                    for _ in range(chance.randrange(4))
                ]
                found = attend(inputs, forest, dout, deterministic=True)
                assert_same_bits(found, expected, f"run {run}")
                by_default = attend(inputs, forest, dout)
                assert_same_bits({**by_default, "dq": expected["dq"]}, expected, f"run {run}")
                spread = (by_default["dq"].float() - expected["dq"].float()).abs().max() / size
                assert spread <= torch.finfo(torch.bfloat16).eps, f"run {run}: {spread}"
                del others
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_G3_the_backward_waits_for_the_kernels_that_write_its_upstream_gradient():
    forest = groups([2048], [[512] * 8])
    heads, dim = 8, 64
    *inputs, dout = normal(forest.total_tokens, heads, 2, dim, torch.bfloat16)
    matrix = torch.randn(heads * dim, heads * dim, device="cuda", dtype=torch.bfloat16) / 22
    inputs = [x.requires_grad_() for x in inputs]
    out = dualkv.attention(*inputs, forest, deterministic=True)

    def gradients(synchronize=False):
        x = dout.flatten(1)
        for _ in range(8):
            x = x @ matrix
        if synchronize:
            torch.cuda.synchronize()
        return torch.autograd.grad(out, inputs, x.view_as(dout), retain_graph=True)

    expected = gradients(synchronize=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for gradient, right in zip(gradients(), expected):
            different += (gradient != right).sum()
    assert different.item() == 0


@pytest.fixture
def second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda:1")


def test_H1_tensors_on_a_gpu_that_is_not_the_current_one(second_gpu):
    with torch.cuda.device(0):
        for device in (second_gpu, torch.device("cuda:0"), second_gpu):
            case = ThreeAndTwoAndOne(dtype=torch.bfloat16, device=device)
            found = attend(case.inputs, case.forest, case.dout)
            case.check(found)
            assert all(x.device == device for x in found.values())
            assert torch.cuda.current_device() == 0


def test_H1_a_device_plan_on_a_gpu_that_is_not_the_current_one(second_gpu):
    case = ThreeAndTwoAndOne(dtype=torch.bfloat16, device=second_gpu)
    with torch.cuda.device(0):
        slot = dualkv.DevicePlan(case.forest, num_heads=1, num_kv_heads=1, head_dim=8, device=second_gpu)
        case.check(attend(case.inputs, slot, case.dout))
        assert torch.cuda.current_device() == 0
        with pytest.raises(ValueError, match="same device, got q cuda:0, .* forest cuda:1"):
            dualkv.attention(*on_gpu().inputs, slot)


def test_H1_mixed_devices_are_refused(second_gpu):
    q, k, v = on_gpu().inputs
    with pytest.raises(
        ValueError, match="q, k, v must be on the same device, got q cuda:0, k cuda:1, v cuda:0"
    ):
        dualkv.attention(q, k.to(second_gpu), v, ThreeAndTwoAndOne().forest)


def test_H1_cpu_and_gpu_are_not_mixed():
    forest = ThreeAndTwoAndOne().forest
    q, k, v = on_gpu().inputs
    with pytest.raises(ValueError, match="must be on the same device, got q cuda:0, k cpu, v cuda:0"):
        dualkv.attention(q, k.cpu(), v, forest)
    options = (1.0, -1, 0.0, 0)
    forward, backward = torch.ops.dualkv.attention_forward, torch.ops.dualkv.attention_backward
    for mixed in ((q, k.cpu()), (q.cpu(), k)):
        with pytest.raises(ValueError, match="must be on the same device"):
            forward(*mixed, v, None, forest.segments, *options)
    out, lse = forward(q, k, v, None, forest.segments, *options)
    for dout, own_lse in ((out.cpu(), lse), (out, lse.cpu())):
        with pytest.raises(ValueError, match="must be on the same device"):
            backward(dout, None, q, k, v, None, forest.segments, out, own_lse, *options, False)


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
    attend(static[:3], slot, static[3], **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(static[:3], slot, static[3], **options)
    for step, forest in enumerate((captured, other, shorter, captured)):
        *inputs, dout = normal(rows, 4, 2, 64, torch.bfloat16, seed=step)
        for x, values in zip(static, (*inputs, dout)):
            x.copy_(values)
            x[forest.total_tokens :] = math.nan
        slot.load(forest)
        graph.replay()
        assert_same_bits(found, attend(inputs, forest, dout, **options), f"step {step}")
        assert not any(found[name][forest.total_tokens :].any() for name in ("out", *GRADIENTS))
        assert (found["lse"][:, forest.total_tokens :] == -math.inf).all()


def test_H4_compiled_attention_equals_eager_and_recompiles_at_most_once():
    def step(q, k, v, sinks, forest):
        return dualkv.attention(q, k, v, forest, window_left=50, softcap=2.0, sinks=sinks).mean()

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (128, 196, 256, 257):
        forest = groups([rows - 60], [[20, 40]])
        q, k, v, _ = normal(rows, 4, 2, 16, torch.bfloat16)
        q = q.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        wanted = [x.requires_grad_() for x in (q, k, v, torch.randn(4, device="cuda"))]
        expected_loss = step(*wanted, forest)
        expected = torch.autograd.grad(expected_loss, wanted)
        loss = compiled(*wanted, forest)
        assert torch.equal(loss, expected_loss), rows
        for gradient, right in zip(torch.autograd.grad(loss, wanted), expected):
            assert torch.equal(gradient, right), rows
    assert backend.frame_count <= 2


@each_half
@pytest.mark.parametrize("with_sinks", [False, True])
def test_H4_opcheck(dtype, with_sinks):
    forest = groups([70, 1], [[20, 0, 1], [4]])
    q, k, v, dout = normal(forest.total_tokens + 2, 4, 2, 16, dtype)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    sinks = torch.randn(4, device="cuda") if with_sinks else None
    inputs, options = (q, k, v, sinks, forest.segments), (0.7, 2, 1.5, 0)
    torch.library.opcheck(torch.ops.dualkv.attention_forward.default, (*inputs, *options))
    out, lse = torch.ops.dualkv.attention_forward(*inputs, *options)
    finite = lse.nan_to_num(neginf=0.0)
    for dlse in (None, torch.randn_like(lse)):
        backward = (dout, dlse, *inputs, out, finite, *options, True)
        torch.library.opcheck(torch.ops.dualkv.attention_backward.default, backward)


def test_H4_fake_results_are_like_real_ones():
    forest = groups([70], [[20, 1]])
    *inputs, dout = normal(forest.total_tokens, 4, 2, 16, torch.bfloat16)
    inputs[0] = inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    real = attend(inputs, forest, dout)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_inputs = [mode.from_tensor(x) for x in inputs]
        fake = attend(fake_inputs, forest, mode.from_tensor(dout))
    for name, x in real.items():
        y = fake[name]
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device), name


class Split:
    """The known answers through flash_attn_dualkv_varlen_func, with queries of the responses alone."""

    def __init__(self):
        q, k, v = on_gpu().inputs
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


def test_I2_rows_past_the_last_offset_take_no_part():
    """Nor do they get a gradient."""
    prompt, cu = 32, [0, 144, 432, 944]
    q, k, v, dout = normal(prompt + 946, 2, 1, 64, torch.bfloat16)
    q, dout = q[prompt:].clone(), dout[prompt:].clone()
    kv = [x.clone() for x in (k[:prompt], v[:prompt], k[prompt:], v[prompt:])]
    for x in (q, dout, *kv[2:]):
        x[944:] = math.nan

    def run(q, kv, dout):
        wanted = [x.detach().requires_grad_() for x in (q, *kv)]
        out = dualkv.flash_attn_dualkv_varlen_func(*wanted, cu, cu, 512, prompt, 512)
        return out.detach(), *torch.autograd.grad(out, wanted, dout)

    expected = run(q[:944], [*kv[:2], *(x[:944] for x in kv[2:])], dout[:944])
    for x, right in zip(run(q, kv, dout), expected):
        assert torch.equal(x[: len(right)], right) and not x[len(right) :].any()


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
    q, k, v, _ = normal(5, 1, 1, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="at least the 6 rows of the forest, got 5"):
        dualkv.attention(q, k, v, ThreeAndTwoAndOne().forest)


@pytest.mark.parametrize("responses", [[33_776], [33_608] + [24] * 7, [32_768] + [16] * 63], ids=len)
def test_I5_peak_of_a_forward_and_backward_pass(responses):
    """The log-sum-exp is packed; the forward takes nothing else, and the backward no term in N * max(R) or T^2."""
    prompt, heads, kv_heads, dim = 1024, 32, 8, 128
    forest = groups([prompt], [responses])
    total = forest.total_tokens
    *inputs, dout = normal(total, heads, kv_heads, dim, torch.bfloat16)
    inputs = [x.requires_grad_() for x in inputs]
    with sums_in_any_order():
        dualkv.attention(*inputs, forest)  # with it the plan
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = dualkv.attention(*inputs, forest, return_lse=True)
        forward = torch.cuda.max_memory_allocated() - before
        gradients = torch.autograd.grad(out, inputs, dout)
        used = torch.cuda.max_memory_allocated() - before

    def bytes_of(*tensors):
        return sum(x.untyped_storage().nbytes() for x in tensors)

    assert bytes_of(lse) == 4 * heads * total
    assert bytes_of(out, lse) <= forward <= bytes_of(out, lse) + 4 * 2**20
    scratch = 4 * ((total + 128 * (len(responses) + 1)) * heads * dim + 2 * (prompt + 128) * kv_heads * dim)
    bound = scratch + 4 * heads * total + 16 * 2**20
    assert used <= bytes_of(out, lse, *gradients) + bound, (used, bound)
