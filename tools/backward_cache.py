"""A model of what blocks of the backward find in the L2, for docs/hopper_backward.md.

A step reads queries and adds to dQ of a query tile and KV head, or finds them in a cache that keeps what was
used last. Steps take the same time, but for a few per cent at random.
"""

from __future__ import annotations

import ctypes
import heapq
import random
from collections import OrderedDict

from draw_hopper_forward import MULTIPROCESSORS, c_forest

import dualkv
from dualkv import _abi
from dualkv._library import Handle, library

QUERY_TILE, KEY_TILE = 16, 128  # of four query heads to a KV head, at D 128
CACHED_STEPS = 240  # 64 KB each: 15 MB. The model's traffic is then 0.6 to 1.6 times what was measured
ITEM_END = 2  # steps that an item takes besides its own


def read_items(forest: dualkv.SegmentForest, kv_heads: int) -> list[tuple[list[int], int, int]]:
    """Items in the order in which they are taken: first rows of the query tiles, KV head, and place in the band."""
    handle = c_forest(forest)
    params = _abi.dualkv_plan_params(
        forest=handle.address,
        window_left=_abi.NO_WINDOW,
        forward_query_tile=QUERY_TILE,
        forward_key_tile=KEY_TILE,
        backward_query_tile=QUERY_TILE,
        backward_key_tile=KEY_TILE,
        backward_parts=-(-2 * MULTIPROCESSORS // kv_heads),
    )
    plan = Handle(library.dualkv_plan_create, library.dualkv_plan_destroy, ctypes.byref(params))
    view = _abi.dualkv_plan_view()
    library.dualkv_plan_get_view(plan, ctypes.byref(view))
    backward = view.backward
    runs = (_abi.dualkv_run * backward.num_runs).from_address(backward.runs)
    tiles = (_abi.dualkv_tile * backward.num_tiles).from_address(backward.tiles)
    bands = (ctypes.c_int32 * backward.num_tiles).from_address(view.band)
    items = []
    for t, tile in enumerate(tiles):
        of_tile = runs[tile.run_begin : tile.run_end]
        rows = [row for run in of_tile for row in range(run.begin, run.end, QUERY_TILE)]
        items += [(rows, head, (t - bands[t]) * kv_heads + head) for head in range(kv_heads)]
    return items


def steps_per_miss(
    forest: dualkv.SegmentForest, kv_heads: int, waves_turn: bool, taken_ahead: int | None
) -> float:
    """Steps for each that does not find its rows in the cache.

    waves_turn: every other wave of a band goes up, otherwise all come down. taken_ahead: an item is taken so many
    steps before the end of the one before; None: at its beginning.
    """
    items = read_items(forest, kv_heads)
    jitter = random.Random(0)
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    steps = misses = taken = 0
    # Of each block: time, number, the rows that its item has left (the next one last), head, the item taken.
    blocks = [(number * 1e-3, number, [], 0, None) for number in range(MULTIPROCESSORS)]
    while blocks:
        time, number, rows, head, item = blocks[0]
        if item is None and (taken_ahead is None or len(rows) <= taken_ahead):
            item, taken = taken, taken + 1
        if not rows:
            if item >= len(items):
                heapq.heappop(blocks)
                continue
            rows, head, place = items[item]
            goes_up = waves_turn and place // MULTIPROCESSORS % 2
            rows = rows[::-1] if goes_up else list(rows)
            heapq.heapreplace(blocks, (time + ITEM_END, number, rows, head, None))
            continue
        place = rows.pop(), head
        steps += 1
        misses += place not in cache
        cache[place] = None
        cache.move_to_end(place)
        if len(cache) > CACHED_STEPS:
            cache.popitem(last=False)
        heapq.heapreplace(blocks, (time + jitter.uniform(0.97, 1.03), number, rows, head, item))
    return steps / misses
