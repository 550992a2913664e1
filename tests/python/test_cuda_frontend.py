"""dualkv.attention on CUDA: where plans live, streams, threads, graphs, compiled functions, refusals."""

from __future__ import annotations

import gc
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import dualkv
from cases import assert_same_bits, attend_forward
from dualkv import _abi, device_plan
from dualkv.forest import _cached_plan, tile_sizes

pytestmark = pytest.mark.usefixtures("gpu")

HEADS, KV_HEADS, DIM = 4, 2, 64
DIMENSIONS = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
FOREST = dualkv.SegmentForest.from_groups([150, 20], [[70, 0, 1], [90, 33]])
SHORTER = dualkv.SegmentForest.from_groups([40], [[9, 130]])


def tensors(forest=FOREST, seed=0, rows=None, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, dtype=torch.bfloat16):
    """Normal q, k and v."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = forest.total_tokens if rows is None else rows
    return [
        torch.randn(rows, h, dim, generator=generator, device="cuda").to(dtype)
        for h in (heads, kv_heads, kv_heads)
    ]


def busy_stream() -> torch.cuda.Event:
    """Occupies the current stream for about a second; the event tells whether it still is."""
    torch.cuda._sleep(2_000_000_000)
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.fixture
def no_plans():
    """Empties the cache of plans, and with it their images."""
    _cached_plan.cache_clear()
    gc.collect()


@pytest.fixture
def uploads(no_plans, monkeypatch):
    """The devices of the uploads of plans so far."""
    devices = []
    upload = device_plan._upload

    def counted(schedule, device):
        devices.append(device)
        return upload(schedule, device)

    monkeypatch.setattr(device_plan, "_upload", counted)
    return devices


# --------------------------------------------------------------------------------------- where plans live


def test_a_plan_is_uploaded_once_for_all_layers_and_descriptions(uploads):
    inputs = tensors()
    for _ in range(3):
        attend_forward(inputs, FOREST)
        attend_forward(inputs, dualkv.SegmentForest.from_segments(FOREST.lengths, FOREST.parents))
    assert len(uploads) == 1
    attend_forward(inputs, FOREST, window_left=5)
    attend_forward(tensors(SHORTER), SHORTER)
    assert len(uploads) == 3


def test_calls_with_the_same_tile_sizes_share_a_plan(uploads):
    dimensions = [(4, 2, 64), (8, 4, 64), (2, 1, 64), (6, 2, 128), (7, 1, 128), (32, 1, 8)]
    for heads, kv_heads, dim in dimensions:
        attend_forward(tensors(heads=heads, kv_heads=kv_heads, dim=dim), FOREST)
    assert len(uploads) == len({tile_sizes(_abi.CUDA, *sizes) for sizes in dimensions})


def test_the_cpu_has_a_plan_of_its_own(uploads):
    inputs = tensors()
    attend_forward([x.cpu() for x in inputs], FOREST)
    assert uploads == []
    attend_forward(inputs, FOREST)
    assert uploads == [inputs[0].device]


def test_an_upload_does_not_wait_for_the_current_stream(no_plans):
    inputs = tensors()
    expected = attend_forward(inputs, FOREST)  # kernels are loaded, and caches of memory are warm
    _cached_plan.cache_clear()
    torch.cuda.synchronize()
    busy = busy_stream()
    found = attend_forward(inputs, FOREST)
    assert not busy.query(), "the call has waited for the stream"
    assert_same_bits(found, expected)


def test_a_plan_that_is_dropped_while_kernels_will_read_it_stays_whole(no_plans):
    """The kernel waits on its stream while the plan is dropped and others of the same size are uploaded."""
    inputs, stream = tensors(), torch.cuda.Stream()
    expected = attend_forward(inputs, FOREST)
    others = [
        dualkv.SegmentForest.from_groups([150 - n, 20 + n], [[70, 0, 1], [90, 33]]) for n in range(1, 20)
    ]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy = busy_stream()
        found = attend_forward(inputs, FOREST)
    _cached_plan.cache_clear()
    gc.collect()
    for forest in others:
        attend_forward(inputs, forest)
    assert not busy.query(), "the kernel did not wait: the test shows nothing"
    stream.synchronize()
    assert_same_bits(found, expected)


# ------------------------------------------------------------------------------------- streams and threads


def test_work_is_ordered_on_the_current_stream():
    """q is the end of a chain of products; the result is read by the next product."""
    matrix = torch.randn(HEADS * DIM, HEADS * DIM, device="cuda", dtype=torch.bfloat16) / 16
    q, k, v = tensors()

    def chain():
        x = q.flatten(1)
        for _ in range(50):
            x = x @ matrix
        return attend_forward((x.view_as(q), k, v), FOREST)["out"].flatten(1) @ matrix

    expected = chain()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            found = chain()
        stream.synchronize()
        assert torch.equal(found, expected)
    assert torch.cuda.current_stream() != stream


def test_threads_with_streams_of_their_own(uploads):
    forests = [FOREST, SHORTER]
    inputs = [tensors(forest, seed) for seed, forest in enumerate(forests)]
    expected = [attend_forward(x, forest) for x, forest in zip(inputs, forests)]
    _cached_plan.cache_clear()
    uploads.clear()
    torch.cuda.synchronize()

    def work(worker):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [attend_forward(inputs[n % 2], forests[n % 2]) for n in range(worker, worker + 40)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for worker, results in enumerate(pool.map(work, range(4))):
            for n, found in enumerate(results, start=worker):
                assert_same_bits(found, expected[n % 2], f"worker {worker}, call {n}")
    assert len(uploads) == 2


def test_the_current_device_and_stream_stay_as_they_are():
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    attend_forward(tensors(SHORTER), SHORTER)
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before


# -------------------------------------------------------------------------------------------------- graphs


def test_a_graph_is_replayed_with_any_forest_that_fits():
    capacity = 700
    forests = [
        FOREST,
        SHORTER,
        dualkv.SegmentForest.from_groups([], []),
        dualkv.SegmentForest.from_segments([300, 100, 50, 200], [-1, 0, 1, 0]),
        dualkv.SegmentForest.from_groups([1] * 100, [[1, 2]] * 100),
        dualkv.SegmentForest.from_groups([capacity], [[]]),
    ]
    slot = dualkv.DevicePlan(SHORTER, **DIMENSIONS, max_tokens=capacity, max_bytes=1 << 16)
    static = tensors(rows=capacity)
    attend_forward(static, slot)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_forward(static, slot)
    for seed, forest in enumerate([*forests, *reversed(forests)]):
        total = forest.total_tokens
        inputs = tensors(seed=seed, rows=capacity)
        for x, values in zip(static, inputs):
            x.copy_(values)
            x[total:] = math.nan
        slot.load(forest)
        assert slot.forest == forest
        graph.replay()
        assert_same_bits(found, attend_forward(inputs, forest), f"{forest}")
        assert not found["out"][total:].any() and (found["lse"][:, total:] == -math.inf).all()


def test_a_slot_is_loaded_in_the_order_of_the_stream():
    """Loads and replays without a wait between them; the sources of the copies are freed at once."""
    slot = dualkv.DevicePlan(FOREST, **DIMENSIONS, max_bytes=1 << 16)
    inputs = tensors()
    forests = (FOREST, SHORTER)
    expected = [attend_forward(inputs, forest) for forest in forests]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_forward(inputs, slot)
    torch.cuda.synchronize()
    results = []
    torch.cuda._sleep(200_000_000)
    for n in range(20):
        slot.load(forests[n % 2])
        graph.replay()
        results.append({name: x.clone() for name, x in found.items()})
    for n, result in enumerate(results):
        assert_same_bits(result, expected[n % 2], f"replay {n}")


def test_a_slot_serves_calls_outside_of_graphs():
    slot = dualkv.DevicePlan(FOREST, **DIMENSIONS, window_left=30)
    inputs = tensors()
    options = {"window_left": 30, "scale": 0.3, "softcap": 2.0, "sinks": torch.randn(HEADS, device="cuda")}
    assert_same_bits(attend_forward(inputs, slot, **options), attend_forward(inputs, FOREST, **options))
    assert slot.max_tokens == FOREST.total_tokens and slot.image.numel() == slot.max_bytes


def test_a_slot_that_was_made_in_inference_mode_is_loaded_outside_of_it():
    with torch.inference_mode():
        slot = dualkv.DevicePlan(FOREST, **DIMENSIONS)
        attend_forward(tensors(), slot)
    slot.load(SHORTER)
    inputs = [x.requires_grad_() for x in tensors()]
    assert_same_bits(attend_forward(inputs, slot), attend_forward(inputs, SHORTER))


def test_a_capture_with_a_plain_forest_is_refused():
    inputs = tensors()
    expected = attend_forward(inputs, FOREST)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(
        RuntimeError, match="graph is being captured.*dualkv.DevicePlan in place of the forest"
    ):
        with torch.cuda.graph(graph):
            attend_forward(inputs, FOREST)
    assert_same_bits(attend_forward(inputs, FOREST), expected)


def test_a_slot_is_neither_made_nor_loaded_in_a_capture():
    slot = dualkv.DevicePlan(FOREST, **DIMENSIONS)
    for use in (lambda: slot.load(FOREST), lambda: dualkv.DevicePlan(FOREST, **DIMENSIONS)):
        with pytest.raises(RuntimeError, match="made and loaded outside of the capture"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                use()


def test_forests_that_do_not_fit_are_refused_with_both_numbers():
    slot = dualkv.DevicePlan(SHORTER, **DIMENSIONS)
    with pytest.raises(ValueError, match=f"at most max_tokens rows, got {FOREST.total_tokens} and 179"):
        slot.load(FOREST)
    many = dualkv.SegmentForest.from_groups([9], [[1] * 170])
    with pytest.raises(ValueError, match=rf"at most max_bytes, got \d+ and {slot.max_bytes}"):
        slot.load(many)
    with pytest.raises(ValueError, match="at most max_bytes, got .* and 16"):
        dualkv.DevicePlan(SHORTER, **DIMENSIONS, max_bytes=16)
    assert slot.forest == SHORTER
    inputs = tensors(SHORTER)
    assert_same_bits(attend_forward(inputs, slot), attend_forward(inputs, SHORTER))


def test_calls_that_a_slot_does_not_serve():
    slot = dualkv.DevicePlan(FOREST, **DIMENSIONS, max_tokens=400, window_left=30)
    with pytest.raises(ValueError, match="at least the max_tokens rows of the DevicePlan, got 399 and 400"):
        dualkv.attention(*tensors(rows=399), slot, window_left=30)
    for window_left in (None, 29):
        with pytest.raises(ValueError, match=f"that of the DevicePlan, got {window_left} and 30"):
            dualkv.attention(*tensors(rows=400), slot, window_left=window_left)
    with pytest.raises(
        ValueError, match="q, k, v, forest must be on the same device, got q cpu, .* forest cuda"
    ):
        dualkv.attention(*(x.cpu() for x in tensors(rows=400)), slot, window_left=30)
    own = tile_sizes(_abi.CUDA, HEADS, KV_HEADS, DIM)
    for dim in range(8, 129, 8):
        if tile_sizes(_abi.CUDA, 16, 1, dim) != own:
            with pytest.raises(
                ValueError, match=f"16 heads, 1 KV heads and head dim {dim} need a DevicePlan"
            ):
                dualkv.attention(*tensors(rows=400, heads=16, kv_heads=1, dim=dim), slot, window_left=30)


def test_the_image_of_a_slot_that_is_gone_is_refused():
    slot = dualkv.DevicePlan(FOREST, **DIMENSIONS)
    image = slot.image
    call = torch.ops.dualkv.attention_forward
    call(*tensors(), None, image, 0.1, _abi.NO_WINDOW, 0.0, 0)
    del slot
    gc.collect()
    for segments in (image, torch.zeros(64, dtype=torch.uint8, device="cuda"), FOREST.segments.cuda()):
        with pytest.raises(
            ValueError, match="image of a dualkv.DevicePlan that is still there, got torch.*keep a DevicePlan"
        ):
            call(*tensors(), None, segments, 0.1, _abi.NO_WINDOW, 0.0, 0)


# ------------------------------------------------------------------------------------------------ compiled


def test_a_compiled_function_takes_slots_and_forests_that_change():
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend_forward, fullgraph=True, backend=backend)
    slot = dualkv.DevicePlan(FOREST, **DIMENSIONS, max_bytes=1 << 16)
    inputs = tensors()
    for forest in (FOREST, SHORTER):
        expected = attend_forward(inputs, forest)
        slot.load(forest)
        assert_same_bits(compiled(inputs, slot), expected)
        assert_same_bits(compiled(inputs, forest), expected)
    assert backend.frame_count <= 3  # slots, forests, and forests of any number of segments


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode):
    """With the mode that captures graphs by itself too."""

    def block(x, weight, forest):
        q, k, v = (x @ weight).view(len(x), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return torch.relu(dualkv.attention(q, k, v, forest)).flatten(1) * 2

    x = torch.randn(FOREST.total_tokens, 96, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(96, (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=torch.bfloat16) / 10
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(4):
        try:
            found = compiled(x, weight, FOREST)
        except torch._inductor.exc.InductorError as error:
            pytest.skip(f"inductor has no compiler here: {error}")
        torch.testing.assert_close(found, block(x, weight, FOREST), rtol=2e-2, atol=2e-2)


def test_under_autocast():
    inputs = tensors(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = attend_forward(inputs, FOREST)
    assert found["out"].dtype == torch.bfloat16
    assert_same_bits(found, attend_forward([x.bfloat16() for x in inputs], FOREST))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_without_kernels_are_refused(dtype):
    with pytest.raises(NotImplementedError, match=f"must be torch.bfloat16 or torch.float16, got {dtype}"):
        dualkv.attention(*tensors(dtype=dtype), FOREST)


def test_head_dims_without_kernels_are_refused():
    with pytest.raises(NotImplementedError, match="multiple of 8 up to 128 on CUDA, got 136"):
        dualkv.attention(*tensors(dim=136), FOREST)
    with pytest.raises(NotImplementedError, match="multiple of 8 up to 128 on CUDA, got 136"):
        dualkv.DevicePlan(FOREST, num_heads=4, num_kv_heads=2, head_dim=136)


@pytest.mark.parametrize("options", [{"scale": math.nan}, {"softcap": -1.0}, {"scale": math.inf}], ids=str)
def test_values_are_checked_before_anything_is_launched(options):
    with pytest.raises(ValueError, match="must be finite"):
        dualkv.attention(*tensors(), FOREST, **options)
    torch.cuda.synchronize()
