"""A model of how blocks of the backward wait for their turns, for docs/hopper_backward.md.

Blocks take items as the kernel does. A step takes a consumer the same time, but for a few per cent at random, and the
reducer 0.6 of it; it may be two steps behind. If visits take turns, the reducer waits until the visit before has ended:
one step after it was added, and not before the next step's product.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter

from backward_cache import ITEM_END, read_tiles
from draw_hopper_forward import MULTIPROCESSORS

import dualkv

TWO_WAVES = 256  # items that a band should have
TAKE_AHEAD = 8  # steps before an item's end in which the next is taken
ADDING, TURN_ENDS = 0.6, 1.0  # steps


def read_items(forest: dualkv.SegmentForest, kv_heads: int, heavy_first: bool) -> list[tuple[list, int]]:
    """Items in the order in which they are taken: the KV head, and the rows of each step with their turns.

    heavy_first: the bands with the heaviest tiles come first, and waves go up and down by turns; else as it is."""
    tiles = read_tiles(forest, kv_heads)
    if heavy_first:
        heaviest, first = {}, {}
        for band, begin, rows in tiles:
            heaviest[band] = max(heaviest.get(band, 0), len(rows))
            first.setdefault(band, (begin, -min(rows, default=0)))
        tiles.sort(key=lambda tile: (-heaviest[tile[0]], first[tile[0]], tile[1]))
    sizes, places, visits = Counter(band for band, _, _ in tiles), Counter(), Counter()
    most = max(kv_heads * max(sizes.values()) // TWO_WAVES, 1)
    abreast = kv_heads // max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= most)
    walks = []  # of each tile: its steps, and for each of the heads abreast whether it goes up
    for band, _, rows in tiles:
        steps = []
        for row in rows:
            steps.append((row, visits[row]))
            visits[row] += 1
        last_wave = (sizes[band] * abreast - 1) // MULTIPROCESSORS
        waves = [(places[band] * abreast + head) // MULTIPROCESSORS for head in range(abreast)]
        places[band] += 1
        walks.append(
            (steps, [wave % 2 == 1 or (0 < wave == last_wave and not heavy_first) for wave in waves])
        )
    return [
        (steps[::-1] if goes_up else steps, section + head)
        for section in range(0, kv_heads, abreast)
        for steps, ups in walks
        for head, goes_up in enumerate(ups)
    ]


def end_of(items: list[tuple[list, int]], turns: bool) -> float:
    """When the last block ends, in steps, if visits take turns or not."""
    jitter = random.Random(0)
    ended, waiting = (
        {},
        {},
    )  # by row, head and turn: when a visit's turn ends, and the block that waits for it
    taken = last_end = 0
    steps, head, item = [[] for _ in range(MULTIPROCESSORS)], [0] * MULTIPROCESSORS, [None] * MULTIPROCESSORS
    consumed = [block * 1e-3 for block in range(MULTIPROCESSORS)]
    added = [(time, time) for time in consumed]  # of the last two steps
    queue = [(time, block) for block, time in enumerate(consumed)]
    while queue:
        time, block = heapq.heappop(queue)
        if item[block] is None and len(steps[block]) <= TAKE_AHEAD:
            item[block], taken = taken, taken + 1
        if not steps[block]:
            if item[block] >= len(items):
                last_end = max(last_end, added[block][1])
                continue
            rows, head[block] = items[item[block]]
            steps[block], item[block] = list(rows), None
            consumed[block] += ITEM_END
            heapq.heappush(queue, (consumed[block], block))
            continue
        row, turn = steps[block][-1]
        before = row, head[block], turn - 1
        if turns and turn > 0 and before not in ended:
            waiting[before] = block
            continue
        steps[block].pop()
        consumed[block] = max(consumed[block], added[block][0]) + jitter.uniform(0.97, 1.03)
        begin = max(consumed[block], added[block][1])
        if turns and turn > 0:
            begin = max(begin, ended.pop(before))
        added[block] = added[block][1], begin + ADDING
        if turns:
            next_product = max(consumed[block], added[block][0]) + 1 if steps[block] else 0
            visit = row, head[block], turn
            ended[visit] = max(begin + ADDING, next_product) + TURN_ENDS
            if visit in waiting:
                heapq.heappush(queue, (max(ended[visit], consumed[block]), waiting.pop(visit)))
        heapq.heappush(queue, (consumed[block], block))
    return last_end


def time_of_turns(forest: dualkv.SegmentForest, kv_heads: int, heavy_first: bool) -> float:
    """The time with turns over that without."""
    items = read_items(forest, kv_heads, heavy_first)
    return end_of(items, turns=True) / end_of(items, turns=False)
