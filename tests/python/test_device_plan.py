"""What of the front end for CUDA needs no GPU: tile sizes and images of plans, alignment, refusals."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

import dualkv
from dualkv import _abi
from dualkv._library import library
from dualkv._tensors import aligned_heads
from dualkv.forest import _cached_plan, plan, tile_sizes

FOREST = dualkv.SegmentForest.from_groups([150, 20], [[70, 0, 1], [90, 33]])
TILES = (128, 64, 64, 128, 5)


def has_cuda_kernels() -> bool:
    try:
        tile_sizes(_abi.CUDA, 1, 1, 64)
    except NotImplementedError:
        return False
    return True


# -------------------------------------------------------------------------------------------------- tiles


def test_tile_sizes_of_the_cpu_are_those_that_a_plan_has_without_any():
    tiles = tile_sizes(_abi.CPU, 4, 2, 64)
    default, chosen = (view_of(plan(FOREST.segments, _abi.NO_WINDOW, 0, t)) for t in ((), tiles))
    for schedule in (default.forward, default.backward, chosen.forward, chosen.backward):
        assert (schedule.query_tile, schedule.key_tile) == tiles[:2] == tiles[2:4]
    assert tiles[4] == 0, "key tiles stay whole"


def test_tile_sizes_of_cuda_are_those_of_its_kernels_or_say_that_there_are_none():
    if has_cuda_kernels():
        # Query rows of a tile: of heads that share keys, as many lie side by side as fill 15 of its 16ths.
        for heads, kv_heads, dim, tiles in (
            (1, 1, 8, (256, 64, 128, 128, 264)),
            (14, 2, 64, (36, 64, 18, 128, 132)),
            (32, 8, 128, (48, 64, 16, 128, 33)),
            (28, 4, 128, (27, 64, 9, 128, 66)),
            (40, 8, 128, (38, 64, 12, 128, 33)),
            (56, 4, 128, (13, 64, 9, 128, 66)),
            (22, 2, 128, (17, 64, 64, 128, 132)),
            (32, 1, 128, (12, 64, 4, 128, 264)),
        ):
            assert tile_sizes(_abi.CUDA, heads, kv_heads, dim) == tiles
    else:
        with pytest.raises(NotImplementedError, match="this build has no CUDA kernels: .*nvcc.* or move"):
            tile_sizes(_abi.CUDA, 1, 1, 64)


def test_dimensions_without_tiles_are_refused():
    for dim in (7, 100, 136, 512):
        with pytest.raises(NotImplementedError, match=f"multiple of 8 up to 128 on CUDA, got {dim}"):
            tile_sizes(_abi.CUDA, 1, 1, dim)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 3 and 2"):
        tile_sizes(_abi.CUDA, 3, 2, 64)
    with pytest.raises(ValueError, match="num_kv_heads must be >= 1, got 0"):
        tile_sizes(_abi.CPU, 3, 0, 64)
    with pytest.raises(ValueError, match="head_dim must be 1 to 512, got 513"):
        tile_sizes(_abi.CPU, 1, 1, 513)
    with pytest.raises(ValueError, match="device must be .* got 7"):
        tile_sizes(7, 1, 1, 64)
    with pytest.raises(ValueError, match="params"):
        library.dualkv_plan_set_tiles(None, _abi.CPU, 1, 1, 64)


def test_set_tiles_changes_nothing_else():
    params = _abi.dualkv_plan_params(forest=1234, window_left=5, keys_only=99)
    library.dualkv_plan_set_tiles(ctypes.byref(params), _abi.CPU, 4, 2, 64)
    assert (params.forest, params.window_left, params.keys_only) == (1234, 5, 99)


def test_plans_are_told_apart_by_their_tiles():
    arguments = (FOREST.segments, _abi.NO_WINDOW, 0)
    assert plan(*arguments, TILES) is plan(FOREST.segments.clone(), *arguments[1:], TILES)
    assert plan(*arguments, TILES) is not plan(*arguments)
    assert plan(*arguments, TILES) is not plan(*arguments, (64, 128, 64, 128, 0))
    assert plan(*arguments, TILES) is not plan(*arguments, (*TILES[:4], 0))


# ------------------------------------------------------------------------------------------------- images


def view_of(schedule) -> _abi.dualkv_plan_view:
    view = _abi.dualkv_plan_view()
    library.dualkv_plan_get_view(schedule, ctypes.byref(view))
    return view


def image_bytes(schedule) -> int:
    size = ctypes.c_size_t()
    library.dualkv_plan_image_bytes(schedule, ctypes.byref(size))
    return size.value


def image_of(schedule) -> bytes:
    image = torch.empty(image_bytes(schedule), dtype=torch.uint8)
    library.dualkv_plan_write_image(schedule, image.data_ptr(), image.numel())
    return image.numpy().tobytes()


class Image:
    """The parts of an image, as src/core/plan_image.h lays them out."""

    def __init__(self, data: bytes):
        offsets = struct.unpack_from("<7Q", data)
        num_tiles, num_key_tiles, num_split, num_cleared, *rest = struct.unpack_from("<6i", data, 56)
        self.total_tokens, self.window_left = rest
        assert all(offset % 16 == 0 for offset in (*offsets, len(data)))

        def part(place: int, count: int, words: int, stride: int) -> list[tuple[int, ...]]:
            return [struct.unpack_from(f"<{words}i", data, offsets[place] + stride * n) for n in range(count)]

        self.tiles = part(0, num_tiles, 4, 16)
        self.runs = part(1, max((tile[3] for tile in self.tiles), default=0), 8, 32)
        self.key_tiles = part(2, num_key_tiles, 10, 48)
        self.query_runs = part(3, max((tile[3] for tile in self.key_tiles), default=0), 4, 16)
        self.split_tiles = part(4, num_split, 4, 16)
        self.cleared = part(5, num_cleared, 2, 8)
        self.positions = [n for (n,) in part(6, (len(data) - offsets[6]) // 4, 1, 4)]


def array(address, kind, count: int):
    return (kind * count).from_address(address) if count else []


def fields(struct_) -> tuple[int, ...]:
    return tuple(getattr(struct_, name) for name, _ in struct_._fields_)


@pytest.mark.parametrize("window_left", [_abi.NO_WINDOW, 0, 40])
@pytest.mark.parametrize(
    "forest",
    [
        FOREST,
        dualkv.SegmentForest.from_groups([], []),
        dualkv.SegmentForest.from_groups([0], [[0, 0]]),
        dualkv.SegmentForest.from_segments([300, 100, 50, 200], [-1, 0, 1, 0]),
    ],
    ids=["groups", "empty", "no rows", "tree"],
)
def test_an_image_holds_both_schedules(forest, window_left):
    schedule = plan(forest.segments, window_left, 0, TILES)
    view, image = view_of(schedule), Image(image_of(schedule))
    assert (image.total_tokens, image.window_left) == (forest.total_tokens, window_left)
    tiles = array(view.forward.tiles, _abi.dualkv_tile, view.forward.num_tiles)
    assert image.tiles == [fields(tile) for tile in tiles]
    segments = array(view.segments, _abi.dualkv_segment, view.num_segments)
    runs = array(view.forward.runs, _abi.dualkv_run, view.forward.num_runs)
    assert image.runs == [(r.begin, r.end, r.masked, *fields(segments[r.segment])) for r in runs]
    parts = array(view.partial, ctypes.c_int32, view.backward.num_tiles)
    tiles = array(view.backward.tiles, _abi.dualkv_tile, view.backward.num_tiles)
    assert [(*tile[:4], tile[9]) for tile in image.key_tiles] == [
        (*fields(tile), part) for tile, part in zip(tiles, parts)
    ]
    for begin, end, _, _, *segment, _ in image.key_tiles:
        assert tuple(segment) in map(fields, segments) and segment[0] <= begin < end <= segment[1]
    turns = array(view.turn, ctypes.c_int32, view.backward.num_runs)
    runs = array(view.backward.runs, _abi.dualkv_run, view.backward.num_runs)
    assert image.query_runs == [(r.begin, r.end, r.masked, turn) for r, turn in zip(runs, turns)]
    rows_of_parts = sorted((part, tile.begin, tile.end) for tile, part in zip(tiles, parts) if part >= 0)
    assert rows_of_parts == [
        (part, begin, end) for begin, end, *parts in image.split_tiles for part in range(*parts)
    ]
    assert image.cleared == []
    if window_left != _abi.NO_WINDOW:
        assert image.positions[: forest.total_tokens] == forest.position_ids().tolist()


def test_an_image_names_the_rows_that_are_no_queries():
    assert Image(image_of(plan(FOREST.segments, _abi.NO_WINDOW, 150, TILES))).cleared == [(0, 150)]


def test_images_of_equal_plans_are_equal_to_the_byte():
    """Whatever lies between the parts."""
    arguments = (FOREST.segments, 3, 0)
    first = image_of(plan(*arguments, TILES))
    _cached_plan.cache_clear()
    assert image_of(plan(*arguments, TILES)) == first


def test_memory_that_is_too_small_or_misaligned_is_refused():
    schedule = plan(FOREST.segments, _abi.NO_WINDOW, 0)
    size = image_bytes(schedule)
    memory = torch.empty(size + 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"image_bytes must be at least {size}, got {size - 1}"):
        library.dualkv_plan_write_image(schedule, memory.data_ptr(), size - 1)
    with pytest.raises(ValueError, match="image must be aligned to 16 bytes"):
        library.dualkv_plan_write_image(schedule, memory.data_ptr() + 8, size)
    with pytest.raises(ValueError, match="image must not be NULL|image"):
        library.dualkv_plan_write_image(schedule, None, size)
    with pytest.raises(ValueError, match="bytes"):
        library.dualkv_plan_image_bytes(schedule, None)


# ---------------------------------------------------------------------------------------------- alignment


def sixteen_byte(*shape) -> torch.Tensor:
    x = torch.randn(*shape).bfloat16()
    assert x.data_ptr() % 16 == 0
    return x


@pytest.mark.parametrize(
    "x",
    [
        sixteen_byte(5, 2, 64),
        sixteen_byte(2, 5, 64).transpose(0, 1),
        sixteen_byte(7, 4, 80)[1:6, ::2, 8:72],
        sixteen_byte(5, 1, 64).as_strided((5, 1, 64), (64, 2**40, 1)),
        sixteen_byte(1, 3, 64).as_strided((1, 3, 64), (7, 64, 1)),
        sixteen_byte(0, 2, 64),
    ],
)
def test_tensors_that_the_kernels_read_where_they_lie(x):
    assert aligned_heads(x) is x


@pytest.mark.parametrize(
    "x",
    [
        sixteen_byte(5 * 2 * 64 + 1)[1:].view(5, 2, 64),
        sixteen_byte(5, 2, 68)[:, :, :64],
        sixteen_byte(5, 129)[:, :128].view(5, 2, 64),
        sixteen_byte(5, 2, 64)[:, :, ::2],
        sixteen_byte(64, 2, 5).permute(2, 1, 0),
        sixteen_byte(1, 2, 64).expand(5, 2, 64),
        sixteen_byte(5, 1, 64).expand(5, 2, 64),
    ],
)
def test_all_others_are_copied(x):
    copy = aligned_heads(x)
    assert copy.is_contiguous() and copy.data_ptr() % 16 == 0
    assert copy.data_ptr() != x.data_ptr() and torch.equal(copy, x)


# ----------------------------------------------------------------------------------------------- refusals


def test_a_device_plan_is_for_cuda():
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        dualkv.DevicePlan(FOREST, num_heads=1, num_kv_heads=1, head_dim=64, device="cpu")


def test_a_device_plan_is_made_of_a_forest():
    with pytest.raises(TypeError, match="forest must be a dualkv.SegmentForest, got list"):
        dualkv.DevicePlan([3, 2], num_heads=1, num_kv_heads=1, head_dim=64)


@pytest.mark.skipif(has_cuda_kernels(), reason="this build has CUDA kernels")
def test_a_device_plan_needs_a_build_with_kernels():
    with pytest.raises(NotImplementedError, match="this build has no CUDA kernels"):
        dualkv.DevicePlan(FOREST, num_heads=1, num_kv_heads=1, head_dim=64)


def test_segments_stay_on_the_cpu():
    with pytest.raises(ValueError, match="segments must be on the CPU, where plans are made, got meta"):
        dualkv.SegmentForest(FOREST.segments.to("meta"))
