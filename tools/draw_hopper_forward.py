#!/usr/bin/env python3
"""Draws the pictures of docs/hopper_forward.md. Always the same files.

    PYTHONPATH=python python tools/draw_hopper_forward.py [FOLDER]

The time line is that of a model: consumers, and the tensor cores as a queue. Durations are in cycles; those of
products follow from their size, the others are rounded from measurements, except for a tile's end, which is a
guess.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from draw_plans import INK, LINE, PAPER, SEGMENT_COLOURS, SOFT_INK, Svg, write_pictures
from plans import tiles_and_runs, view_plan

import dualkv

MULTIPROCESSORS = 132  # of an H200

# ------------------------------------------------------------------------------------------------- real plans


def steps_of(
    forest: dualkv.SegmentForest, query_tile: int, key_tile: int, schedule: str, parts: int = 0
) -> list[int]:
    """Tiles of the other side that each tile visits, in the order of the schedule, "forward" or "backward"."""
    view = view_plan(forest, query_tile, key_tile, backward_parts=parts)
    width = {"forward": key_tile, "backward": query_tile}[schedule]
    return [
        sum(-(-(run.end - run.begin) // width) for _, run in runs)
        for _, runs in tiles_and_runs(getattr(view, schedule))
    ]


def forward_steps(forest: dualkv.SegmentForest, query_tile: int, key_tile: int) -> list[int]:
    """Key tiles that each query tile visits, in schedule order."""
    return steps_of(forest, query_tile, key_tile, "forward")


def imbalance(steps: list[int], packs: int, to_and_fro: bool = True, tile_end: int = 1) -> float:
    """By how much the busiest block's work exceeds the mean, if a tile's end costs `tile_end` steps."""
    loads = [0] * MULTIPROCESSORS
    for item, work in enumerate(count + tile_end for count in steps for _ in range(packs)):
        round_, block = divmod(item, MULTIPROCESSORS)
        loads[-1 - block if to_and_fro and round_ % 2 else block] += work
    return max(loads) / (sum(loads) / MULTIPROCESSORS) - 1


# -------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Span:
    kind: str  # scores, values (on the tensor cores); softmax, packing, tile end (in a consumer)
    consumer: int
    tile: int  # from 1
    step: int  # of the tile, from 1
    begin: int
    end: int


DURATION = {"scores": 256, "values": 256, "softmax": 800, "packing": 120, "tile end": 400}


def simulate(consumers: int = 3, tiles: int = 4, steps: int = 6) -> list[Span]:
    """Each consumer walks `tiles` tiles of `steps` steps as consumer.cuh does; the tensor cores do what they
    are given in the order in which it was issued."""
    spans, free = [], 0  # free: when the tensor cores are done with what has been issued
    issues = [(0, consumer, 0) for consumer in range(consumers)]  # time, consumer, step to score

    def add(kind: str, consumer: int, number: int, earliest: int) -> int:
        tile, step = divmod(number, steps)
        end = earliest + DURATION[kind]
        spans.append(Span(kind, consumer, tile + 1, step + 1, earliest, end))
        return end

    while issues:
        now, consumer, number = heapq.heappop(issues)
        is_step, ends_tile = number < tiles * steps, number > 0 and number % steps == 0
        scored = summed = now
        if is_step:
            free = scored = add("scores", consumer, number, max(now, free))
        if number > 0:
            free = summed = add("values", consumer, number - 1, max(now, free))
        if ends_tile:
            scored = summed = add("tile end", consumer, number - 1, max(scored, summed))
        if is_step:
            weighted = add("softmax", consumer, number, scored)
            packed = add("packing", consumer, number, max(weighted, summed))
            heapq.heappush(issues, (packed, consumer, number + 1))
    return spans


def busy(spans: list, begin: int, end: int, products: tuple[str, ...] = ("scores", "values")) -> float:
    """Share of the time from begin to end in which the tensor cores work."""
    shares = (max(0, min(span.end, end) - max(span.begin, begin)) for span in spans if span.kind in products)
    return sum(shares) / (end - begin)


# --------------------------------------------------------------------------------------------------- pictures

COLOURS = (SEGMENT_COLOURS[0], SEGMENT_COLOURS[2], SEGMENT_COLOURS[3])
TILE_END = SEGMENT_COLOURS[1]
OPACITY = {"scores": 1, "values": 0.45, "softmax": 1, "packing": 0.45, "tile end": 1}


class TimeLine:
    """Rows of spans over an axis of cycles, the first row that of the tensor cores."""

    X, Y, WIDTH, HEIGHT, PITCH = 116, 58, 880, 30, 46

    def __init__(self, svg: Svg, heading: str, names: dict[str, str], begin: int, length: int):
        """names: colour of each."""
        self.svg, self.rows, self.begin, self.length = svg, len(names), begin, length
        self.unit = self.WIDTH / length
        svg.text(20, 24, heading, anchor="start", font_weight="bold", font_size=13)
        for line, (name, colour) in enumerate(names.items()):
            top = self.top(line)
            svg.text(self.X - 12, top + self.HEIGHT / 2, name, colour, "end", font_weight="bold")
            svg.rect(self.X, top, self.WIDTH, self.HEIGHT, "#f1f4f7")

    def top(self, line: int) -> float:
        return self.Y + self.PITCH * line + (8 if line else 0)

    def span(self, line: int, begin: int, end: int, colour: str, opacity: float, labels=()) -> None:
        """labels: of (least width, text), the first that fits is shown."""
        left, right = max(begin, self.begin), min(end, self.begin + self.length)
        if left >= right:
            return
        at, width, top = self.X + self.unit * (left - self.begin), self.unit * (right - left), self.top(line)
        style = {"fill_opacity": opacity, "stroke": PAPER, "stroke_width": 0.8}
        self.svg.rect(at, top, width, self.HEIGHT, colour, rx=2, **style)
        label = next((text for least, text in labels if width >= least), None)
        if label is not None:
            ink = PAPER if opacity == 1 else INK
            self.svg.text(at + width / 2, top + self.HEIGHT / 2, label, ink, font_size=10)

    def axis(self) -> float:
        """Draws it, and returns its height."""
        svg, bottom = self.svg, self.Y + self.rows * self.PITCH + 4
        svg.line(self.X, bottom, self.X + self.WIDTH, bottom, SOFT_INK)
        for cycles in range(0, self.length + 1, 1000):
            at = self.X + self.unit * cycles
            svg.line(at, bottom, at, bottom + 5, SOFT_INK)
            svg.text(at, bottom + 14, f"{cycles:,}", SOFT_INK, font_size=10)
        svg.text(self.X - 12, bottom + 14, "cycles", SOFT_INK, "end", font_size=10)
        return bottom

    def legend(self, y: float, entries, remark: str) -> None:
        """Squares of (colour, opacity, meaning) in a row, and a line below."""
        at = self.X
        for colour, opacity, meaning in entries:
            self.svg.rect(at, y - 7, 14, 14, colour, fill_opacity=opacity)
            self.svg.text(at + 21, y, meaning, anchor="start")
            at += 42 + 6.2 * len(meaning)
        self.svg.text(self.X, y + 24, remark, SOFT_INK, "start")


def draw_schedule() -> Svg:
    svg = Svg(1010, 330, "Time line of three consumers and the tensor cores")
    spans = simulate()
    first = next(span for span in spans if (span.consumer, span.tile, span.step) == (0, 2, 4))
    names = {"tensor cores": INK, **{f"consumer {c}": colour for c, colour in enumerate(COLOURS)}}
    line = TimeLine(svg, "The end of tile 2 and the start of tile 3", names, first.begin, 9100)
    for span in spans:
        colour = TILE_END if span.kind == "tile end" else COLOURS[span.consumer]
        number = f"{span.tile}.{span.step}"
        labels = [] if span.kind == "packing" else [(20, number)]
        if span.kind == "softmax":
            labels.insert(0, (70, f"softmax {number}"))
        row = 0 if span.kind in ("scores", "values") else 1 + span.consumer
        line.span(row, span.begin, span.end, colour, OPACITY[span.kind], labels)
    entries = (
        (COLOURS[0], 1, "dark: scores (above), softmax (below)"),
        (COLOURS[0], 0.45, "pale: values' product (above), packing (below)"),
        (TILE_END, 1, "a tile's result is written"),
    )
    remark = "2.5: step 5 of tile 2. The colours are the consumers'; grey is waiting."
    line.legend(line.axis() + 40, entries, remark)
    return svg


class Block:
    """Boxes and arrows."""

    def __init__(self, svg: Svg):
        self.svg = svg

    def frame(self, x, y, width, height, title) -> None:
        self.svg.rect(x, y, width, height, "#f1f4f7", stroke=LINE, rx=6)
        self.svg.text(x + 12, y + 16, title, anchor="start", font_weight="bold")

    def box(self, x, y, width, height, colour, lines) -> None:
        self.svg.rect(x, y, width, height, PAPER, stroke=colour, stroke_width=1.5, rx=4)
        top = y + height / 2 - 8 * (len(lines) - 1)
        for line, text in enumerate(lines):
            style = {"font_size": 11} if line else {"font_weight": "bold"}
            self.svg.text(x + width / 2, top + 16 * line, text, SOFT_INK if line else INK, **style)

    def arrow(self, x1, y1, x2, y2, colour=INK, **style) -> None:
        self.svg.line(x1, y1, x2, y2, colour, stroke_width=1.4, **style)
        tip = 5 if x2 > x1 else -5
        self.svg.path(f"M{x2 - tip} {y2 - 4}L{x2} {y2}L{x2 - tip} {y2 + 4}", colour, stroke_width=1.4)

    def legend(self, y, full: str, note: str) -> None:
        """Of the arrows: `full` is what comes with those that say that a buffer is full."""
        self.arrow(20, y, 60, y)
        self.svg.text(70, y, f"{full}; a buffer is full", anchor="start")
        self.arrow(280, y, 240, y, SOFT_INK, stroke_dasharray="3 3")
        self.svg.text(290, y, "a buffer is empty", anchor="start")
        self.svg.text(990, y, note, SOFT_INK, "end")


def draw_block() -> Svg:
    svg = Svg(1010, 376, "Roles and shared memory of a block")
    block = Block(svg)
    heading = "A block, with the numbers of head dim 128 and four query heads for a KV head"
    svg.text(20, 24, heading, anchor="start", font_weight="bold", font_size=13)
    top, height = 44, 276
    block.frame(20, top, 96, height, "memory")
    block.frame(150, top, 220, height, "producer, 32 registers")
    block.frame(424, top, 226, height, "shared memory")
    block.frame(704, top, 286, height, "consumers, 160 registers")
    grey, orange = SOFT_INK, TILE_END
    copied = ("queries and keys,", "writes the steps")
    for y, tall, name in ((72, 140, "plan, q, k"), (220, 42, "plan, v"), (270, 42, "out, lse")):
        block.box(30, y, 76, tall, LINE, (name,))
    block.box(162, 72, 196, 140, grey, ("warp 0: one thread", "walks the plan, copies", *copied))
    block.box(162, 220, 196, 42, grey, ("warp 1: one thread", "walks it again for values"))
    block.box(162, 270, 196, 42, grey, ("warps 2 and 3", "clear rows that are no queries"))
    rings = (
        (72, 66, ("queries: 2 × 48 KB", "48 rows × 4 heads = 192 rows", "+ which rows, which heads")),
        (146, 66, ("keys: 2 × 16 KB", "64 keys", "+ the step: flags, segment")),
        (220, 42, ("values: 2 × 16 KB", "64 keys")),
        (270, 42, ("barriers", "full and empty, of each buffer")),
    )
    for y, tall, lines in rings:
        block.box(436, y, 202, tall, orange, lines)
    for consumer, colour in enumerate(COLOURS):
        rows = f"rows {64 * consumer} to {64 * consumer + 63} of the products"
        registers = "a thread: 64 sums, 32 scores, 16 weights"
        block.box(716, 72 + 82 * consumer, 262, 76, colour, (f"consumer {consumer}", rows, registers))
    for y in (142, 241):
        block.arrow(106, y, 162, y)
    block.arrow(162, 291, 106, 291)
    for y in (105, 179, 241):
        for left, right in ((358, 436), (638, 704)):
            block.arrow(left, y - 6, right, y - 6)
            block.arrow(right, y + 8, left, y + 8, grey, stroke_dasharray="3 3")
    block.legend(346, "copies", "Each consumer takes every step, and writes its rows of out and lse.")
    return svg


PICTURES = {"hopper_forward_schedule.svg": draw_schedule, "hopper_forward_block.svg": draw_block}


def main() -> None:
    write_pictures(PICTURES)


if __name__ == "__main__":
    main()
