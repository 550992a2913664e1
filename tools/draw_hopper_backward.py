#!/usr/bin/env python3
"""Draws the pictures of docs/hopper_backward.md. Always the same files.

    PYTHONPATH=python python tools/draw_hopper_backward.py [FOLDER]

The time line is that of a model: the warpgroups of a block, and the tensor cores as a queue. Durations are in
cycles; those of products follow from their size, the others are from a profile: see DURATION.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from draw_hopper_forward import COLOURS, MULTIPROCESSORS, TILE_END, Block, TimeLine, steps_of
from draw_plans import INK, LINE, SOFT_INK, Svg, write_pictures

import dualkv

# ------------------------------------------------------------------------------------------------- real plans


def backward_steps(forest: dualkv.SegmentForest, query_tile: int, key_tile: int, parts: int = 0) -> list[int]:
    """Query tiles that each key tile, or part of one, visits, in schedule order."""
    return steps_of(forest, query_tile, key_tile, "backward", parts)


def imbalance(steps: list[int], kv_heads: int, item_end: int = 2) -> float:
    """By how much the last block's end exceeds the mean, if blocks fetch items from a counter and an item costs
    `item_end` steps besides its own."""
    loads = [0] * MULTIPROCESSORS
    for work in (count + item_end for count in steps for _ in range(kv_heads)):
        heapq.heapreplace(loads, loads[0] + work)
    return max(loads) / (sum(loads) / MULTIPROCESSORS) - 1


# -------------------------------------------------------------------------------------------------- the model

CONSUMERS, REDUCER = 2, 2  # workers are consumers 0 and 1, and the reducer
DSCORES_BUFFERS = 2
PRODUCTS = ("scores", "dweights", "dV", "dK", "dQ")
DURATION = {
    # Of a consumer, 64 x 64 x 128, and of half the columns of dQ, 64 x 64 x 128.
    **dict.fromkeys(PRODUCTS, 256),
    # By a profile of 8, 8192, 1024: a warp's samples between these points of its loop, as shares of a step of
    # 3,340 cycles, rounded. The kernel handed dscores over before it issued products then.
    "exponentials": 890,
    "packing": 200,
    "dscores": 530,
    "issue": 110,  # until operands of products are made up
    "handover": 340,  # until dscores are there for the reducer's product
    "adds": 760,  # of half the columns, two at a time
}


@dataclass(frozen=True)
class Span:
    kind: str  # a product, on the tensor cores; or another duration, in a worker
    worker: int
    step: int  # from 1
    begin: int
    end: int


@dataclass
class Signal:
    """Has come when `arrivals` workers have arrived."""

    arrivals: int
    waiting: list[Iterator] = field(default_factory=list)


class Machine:
    """Runs workers. A worker is a generator: it yields the time, or the signal, that it waits for, and is sent
    the time at which it goes on."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.free = 0  # when the tensor cores are done with what has been issued
        self.queue: list[tuple[int, int, Iterator]] = []
        self.waits = 0

    def run(self, workers: list[Iterator]) -> None:
        for worker in workers:
            self.wait(worker, next(worker), 0)
        while self.queue:
            now, _, worker = heapq.heappop(self.queue)
            try:
                self.wait(worker, worker.send(now), now)
            except StopIteration:
                continue

    def wait(self, worker: Iterator, wanted: int | Signal, now: int) -> None:
        if isinstance(wanted, Signal) and wanted.arrivals > 0:
            wanted.waiting.append(worker)
            return
        time = now if isinstance(wanted, Signal) else max(now, wanted)
        heapq.heappush(self.queue, (time, self.waits, worker))
        self.waits += 1

    def arrive(self, signal: Signal, now: int) -> None:
        signal.arrivals -= 1
        if signal.arrivals == 0:
            for worker in signal.waiting:
                self.wait(worker, now, now)

    def work(self, kind: str, worker: int, step: int, now: int, duration: int | None = None) -> int:
        """Returns when it will be done."""
        end = now + (DURATION[kind] if duration is None else duration)
        self.spans.append(Span(kind, worker, step + 1, now, end))
        return end

    def issue(self, kind: str, worker: int, step: int, now: int) -> int:
        """The same for a product: after all that have been issued before."""
        self.free = self.work(kind, worker, step, max(now, self.free))
        return self.free


def simulate(steps: int = 9, adds: int = DURATION["adds"]) -> list[Span]:
    """Consumers and reducer walk an item as consumer.cuh and reducer.cuh do. Copies are always there in time."""
    machine = Machine()
    full = [Signal(CONSUMERS) for _ in range(steps)]  # dscores of a step are written
    empty = [Signal(1) for _ in range(steps)]  # and have been read

    def consumer(index: int) -> Iterator:
        scored, summed = machine.issue("scores", index, 0, 0), 0
        for step in range(steps):
            now = yield scored
            now = yield machine.work("exponentials", index, step, now)
            now = yield summed  # dK of the step before
            now = yield machine.work("packing", index, step, now)
            machine.issue("dweights", index, step, now)
            now = yield machine.issue("dV", index, step, now)
            if step >= DSCORES_BUFFERS:
                now = yield empty[step - DSCORES_BUFFERS]
            now = yield machine.work("dscores", index, step, now)
            now = yield machine.work("issue", index, step, now)
            if step + 1 < steps:
                scored = machine.issue("scores", index, step + 1, now)
            summed = machine.issue("dK", index, step, now)
            now = yield machine.work("handover", index, step, now)
            machine.arrive(full[step], now)

    def reducer() -> Iterator:
        for step in range(steps):
            now = yield full[step]
            now = yield machine.issue("dQ", REDUCER, step, now)
            now = yield machine.work("adds", REDUCER, step, now, adds)
            now = yield machine.issue("dQ", REDUCER, step, now)
            machine.arrive(empty[step], now)
            now = yield machine.work("adds", REDUCER, step, now, adds)

    machine.run([*map(consumer, range(CONSUMERS)), reducer()])
    return machine.spans


def step_cycles(spans: list[Span]) -> float:
    """Mean length of a step, without those at the beginning."""
    ends = [span.end for span in spans if (span.kind, span.worker) == ("dV", 0)]
    skipped = 4
    return (ends[-1] - ends[skipped]) / (len(ends) - 1 - skipped)


# --------------------------------------------------------------------------------------------------- pictures

WORKER_COLOURS = (COLOURS[0], COLOURS[1], TILE_END)
PALE = 0.45
SHORT = {"scores": "S", "dweights": "dP", "exponentials": "exp"}


def draw_schedule() -> Svg:
    svg = Svg(1010, 330, "Time line of two consumers, the reducer and the tensor cores")
    spans = simulate()
    first = next(span for span in spans if (span.kind, span.step) == ("scores", 6))
    names = {"tensor cores": INK}
    names |= dict(zip(("consumer 0", "consumer 1", "reducer"), WORKER_COLOURS))
    line = TimeLine(svg, "Three steps in the midst of an item", names, first.begin, 9100)
    for span in spans:
        row = 0 if span.kind in PRODUCTS else 1 + span.worker
        short = SHORT.get(span.kind, span.kind)
        labels = ((70, f"{short} {span.step}"), (34, short)) if row else ((16, short),)
        opacity = 1 if span.step % 2 == 0 else PALE
        line.span(row, span.begin, span.end, WORKER_COLOURS[span.worker], opacity, labels)
    entries = (
        (COLOURS[0], 1, "dark: even steps"),
        (COLOURS[0], PALE, "pale: odd steps"),
        (TILE_END, 1, "the reducer's products and additions, half of the columns each"),
    )
    remark = "S: scores. dP: dweights. exp: exponentials, with packing behind. The colours are the warpgroups'; grey is waiting."
    line.legend(line.axis() + 40, entries, remark)
    return svg


def draw_block() -> Svg:
    svg = Svg(1010, 450, "Roles and shared memory of a block")
    block = Block(svg)
    heading = "A block, with the numbers of head dim 128 and four query heads for a KV head"
    svg.text(20, 24, heading, anchor="start", font_weight="bold", font_size=13)
    top, height = 44, 350
    block.frame(20, top, 106, height, "memory")
    block.frame(160, top, 220, 176, "producer, 24 registers")
    block.frame(160, top + 190, 220, height - 190, "reducer, 72 registers")
    block.frame(434, top, 226, height, "shared memory")
    block.frame(714, top, 276, height, "consumers, 208 registers")
    grey = SOFT_INK
    for y, tall, lines in (
        (72, 56, ("k, v", "plan, counter")),
        (136, 72, ("q, dout", "lse, delta, plan")),
        (262, 56, ("dq", "in fp32")),
        (328, 56, ("dk, dv", "or partial sums")),
    ):
        block.box(30, y, 86, tall, LINE, lines)
    block.box(172, 72, 196, 56, grey, ("warp 1", "takes items, copies keys, values"))
    block.box(
        172, 136, 196, 72, grey, ("warps 0, 2 and 3", "walk the plan; copy queries, dout;", "copy lse, delta")
    )
    block.box(172, 262, 196, 56, TILE_END, ("all four warps", "dQ = dscores keys, added to dq"))
    for y, tall, lines in (
        (72, 56, ("keys, values: 2 × 32 KB", "128 rows of each; the item")),
        (136, 72, ("queries, dout: 4 × 32 KB", "16 rows × 4 heads = 64 rows", "+ lse, delta, visible keys")),
        (262, 56, ("dscores: 2 × 16 KB", "128 keys × 64 rows")),
        (328, 56, ("barriers", "full and empty, of each buffer")),
    ):
        block.box(446, y, 202, tall, TILE_END, lines)
    for consumer, colour in enumerate(COLOURS[:CONSUMERS]):
        keys = f"keys {64 * consumer} to {64 * consumer + 63} of the tile"
        lines = (f"consumer {consumer}", keys, "a thread: 64 sums of dK, 64 of dV,", "32 scores, 16 packed")
        block.box(726, 72 + 130 * consumer, 252, 116, colour, lines)
    for y in (100, 172):
        block.arrow(116, y, 172, y)
        for left, right in ((368, 446), (648, 726)):
            block.arrow(left, y - 6, right, y - 6)
            block.arrow(right, y + 8, left, y + 8, grey, stroke_dasharray="3 3")
    block.arrow(172, 290, 116, 290)
    for left, right in ((368, 446), (648, 726)):
        block.arrow(right, 284, left, 284)
        block.arrow(left, 298, right, 298, grey, stroke_dasharray="3 3")
    block.legend(418, "data", "Consumers write dk and dv, or partial sums, at an item's end.")
    return svg


PICTURES = {"hopper_backward_schedule.svg": draw_schedule, "hopper_backward_block.svg": draw_block}


def main() -> None:
    write_pictures(PICTURES)


if __name__ == "__main__":
    main()
