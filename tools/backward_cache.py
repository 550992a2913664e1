"""A model of what blocks of the backward find in the L2, for docs/hopper_backward.md.

A step reads queries and adds to dQ of a query tile and KV head, or finds them in a cache that keeps what was
used last. Steps take the same time, but for a few per cent at random.
"""

from __future__ import annotations

import ctypes
import heapq
import random
from collections import OrderedDict

from draw_hopper_forward import MULTIPROCESSORS
from plans import array, pieces, tiles_and_runs, view_plan

import dualkv

QUERY_TILE, KEY_TILE = 16, 128  # of four query heads to a KV head, at D 128
CACHED_STEPS = 240  # 64 KB each: 15 MB. The model's traffic is then 0.6 to 1.6 times what was measured
ITEM_END = 2  # steps that an item takes besides its own


def read_tiles(forest: dualkv.SegmentForest, kv_heads: int) -> list[tuple[int, int, list[int]]]:
    """Tiles in the order of the schedule: index of the band's first, first key, and first rows of the query tiles."""
    view = view_plan(forest, QUERY_TILE, KEY_TILE, backward_parts=-(-2 * MULTIPROCESSORS // kv_heads))
    bands = array(ctypes.c_int32, view.backward.num_tiles, view.band)
    return [
        (band, tile.begin, [piece.start for _, run in runs for piece in pieces(run, QUERY_TILE)])
        for band, (tile, runs) in zip(bands, tiles_and_runs(view.backward))
    ]


def read_items(forest: dualkv.SegmentForest, kv_heads: int) -> list[tuple[list[int], int, int]]:
    """Items in the order in which they are taken: first rows of the query tiles, KV head, and place in the band."""
    return [
        (rows, head, (t - band) * kv_heads + head)
        for t, (band, _, rows) in enumerate(read_tiles(forest, kv_heads))
        for head in range(kv_heads)
    ]


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
