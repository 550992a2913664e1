#!/usr/bin/env python3
"""Draws the pictures of docs/ from real batches, forests and plans. Always the same files.

    PYTHONPATH=python python tools/draw_plans.py [FOLDER]

Masks are what `dualkv.attention` computes; tiles, runs and turns are what `dualkv_plan_get_view` returns.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import torch
from plans import Visit, array, c_forest, read_plan

import dualkv
from dualkv import _abi
from dualkv._library import library

DOCS = Path(__file__).resolve().parents[1] / "docs"


def visible(forest: dualkv.SegmentForest, window_left: int | None = None) -> list[list[bool]]:
    """visible[i][j]: does row i see row j? Read off attention with equal scores and one-hot values."""
    rows = forest.total_tokens
    zeros = torch.zeros(rows, 1, rows)
    one_hot = torch.eye(rows)[:, None, :]
    out = dualkv.attention(zeros, zeros, one_hot, forest, window_left=window_left)
    return (out[:, 0, :] > 0).tolist()


# ------------------------------------------------------------------------------------------------------- SVG

INK, SOFT_INK, LINE, PAPER = "#1f2933", "#5b6875", "#c6ced6", "#ffffff"
HIDDEN = "#f1f4f7"
UNMASKED, MASKED, MASKED_HIDDEN = "#3f83bf", "#e38b3c", "#f9dfc4"
SEGMENT_COLOURS = ("#4a7fb0", "#dc8a45", "#57a06c", "#9a6fb3", "#c7636b", "#8f8a3c")


def _number(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


class Svg:
    """A picture on paper of its own, so that it reads the same on a light and on a dark page."""

    def __init__(self, width: float, height: float, title: str):
        size = f'width="{_number(width)}" height="{_number(height)}"'
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(width)} {_number(height)}" {size} '
            "font-family=\"'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\">",
            f"<title>{escape(title)}</title>",
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, PAPER, stroke=LINE, rx=8)

    def _add(self, name: str, content: str | None = None, **attributes) -> None:
        text = "".join(
            f' {key.replace("_", "-")}="{_number(value) if isinstance(value, (int, float)) else value}"'
            for key, value in attributes.items()
        )
        self.lines.append(
            f"<{name}{text}/>" if content is None else f"<{name}{text}>{escape(content)}</{name}>"
        )

    def rect(self, x, y, width, height, fill, **attributes) -> None:
        self._add("rect", x=x, y=y, width=width, height=height, fill=fill, **attributes)

    def line(self, x1, y1, x2, y2, stroke=INK, **attributes) -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **attributes)

    def path(self, d: str, stroke=INK, **attributes) -> None:
        self._add("path", d=d, fill="none", stroke=stroke, **attributes)

    def text(self, x, y, content, fill=INK, anchor="middle", **attributes) -> None:
        """Text with its middle at height y."""
        self._add("text", str(content), x=x, y=y + 4, fill=fill, text_anchor=anchor, **attributes)

    def upward_text(self, x, y, content, fill=INK, **attributes) -> None:
        """Text turned to read upwards, centred at (x, y)."""
        place = f"translate({_number(x + 4)} {_number(y)}) rotate(-90)"
        self._add("text", content, transform=place, fill=fill, text_anchor="middle", **attributes)

    def legend(self, x, y, entries) -> None:
        """Squares of (fill, meaning) pairs in a row."""
        for fill, meaning in entries:
            self.rect(x, y - 7, 14, 14, fill, stroke=LINE)
            self.text(x + 21, y, meaning, anchor="start")
            x += 46 + 6.4 * len(meaning)

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


@dataclass(frozen=True)
class Segment:
    name: str
    colour: str
    rows: range
    tree_end: int
    position: int  # of the first row
    parent: int


def name_segments(forest: dualkv.SegmentForest, names: str, colours=SEGMENT_COLOURS) -> list[Segment]:
    """The segments of the library's view of a forest."""
    handle = c_forest(forest)
    view = _abi.dualkv_forest_view()
    library.dualkv_forest_get_view(handle, ctypes.byref(view))
    segments = array(_abi.dualkv_segment, view.num_segments, view.segments)
    return [
        Segment(name, colour, range(s.begin, s.end), s.tree_end, s.position, s.parent)
        for name, colour, s in zip(names.split(), colours, segments)
    ]


class Matrix:
    """A square of query rows by keys at (x, y) of a picture, with its segments along both sides."""

    def __init__(self, svg: Svg, x: float, y: float, cell: float, segments: list[Segment], heading: str):
        self.svg, self.x, self.y, self.cell, self.segments = svg, x, y, cell, segments
        self.rows = segments[-1].rows.stop
        self.side = cell * self.rows
        svg.text(x, y - 78, heading, anchor="start", font_weight="bold", font_size=13)
        svg.text(x + self.side / 2, y - 52, "columns: keys, the rows that are seen", SOFT_INK)
        svg.upward_text(x - 54, y + self.side / 2, "rows: queries, the rows that see", SOFT_INK)
        for segment in segments:
            at, length = cell * segment.rows.start, cell * len(segment.rows)
            svg.rect(x + at + 1, y - 22, length - 2, 16, segment.colour, rx=3)
            svg.text(x + at + length / 2, y - 14, segment.name, PAPER, font_weight="bold", font_size=11)
            svg.rect(x - 22, y + at + 1, 16, length - 2, segment.colour, rx=3)
            svg.upward_text(
                x - 14, y + at + length / 2, segment.name, PAPER, font_weight="bold", font_size=11
            )
        for row in sorted({segment.rows.start for segment in segments} | {self.rows}):
            svg.text(x + cell * row, y - 32, row, SOFT_INK, font_size=10)
            svg.text(x - 27, y + cell * row, row, SOFT_INK, anchor="end", font_size=10)
        svg.rect(x, y, self.side, self.side, HIDDEN)

    def area(self, queries: range, keys: range, fill: str, **attributes) -> None:
        x, y, c = self.x, self.y, self.cell
        place = x + c * keys.start, y + c * queries.start, c * len(keys), c * len(queries)
        self.svg.rect(*place, fill, **attributes)

    def visible_pairs(self, mask, colour_of, queries: range, keys: range) -> None:
        """Fills the visible pairs within a rectangle, colour_of(key) each."""
        for i in queries:
            colours = ((j, colour_of(j) if mask[i][j] else None) for j in keys)
            for colour, pairs in groupby(colours, key=lambda pair: pair[1]):
                if colour is not None:
                    columns = [j for j, _ in pairs]
                    self.area(range(i, i + 1), range(columns[0], columns[-1] + 1), colour)

    def grid(self) -> None:
        """Thin lines between rows, dark ones between segments."""
        starts = {segment.rows.start for segment in self.segments} - {0}
        for row in [*(r for r in range(1, self.rows) if r not in starts), *sorted(starts)]:
            at = self.cell * row
            style = {"stroke": INK, "stroke_dasharray": "2 3"} if row in starts else {"stroke": PAPER}
            self.svg.line(self.x + at, self.y, self.x + at, self.y + self.side, **style)
            self.svg.line(self.x, self.y + at, self.x + self.side, self.y + at, **style)
        self.svg.rect(self.x, self.y, self.side, self.side, "none", stroke=INK)

    def label(self, queries: range, keys: range, content: str) -> None:
        x = self.x + self.cell * (keys.start + keys.stop) / 2
        y = self.y + self.cell * (queries.start + queries.stop) / 2
        room = self.cell * len(keys) - 2
        width = min(8 + 6.5 * len(content), room)
        self.svg.rect(x - width / 2, y - 7, width, 14, PAPER, rx=4, fill_opacity=0.92)
        self.svg.text(x, y, content, font_size=11 if room > 19 else 8.5, font_weight="bold")

    def brackets_right(self, tiles: dict[range, str], meaning: str) -> None:
        """Names beside ranges of rows."""
        x, c = self.x + self.side + 8, self.cell
        for rows, name in tiles.items():
            top, bottom = self.y + c * rows.start + 2, self.y + c * rows.stop - 2
            self.svg.path(f"M{_number(x)} {_number(top)}h5V{_number(bottom)}h-5", stroke=SOFT_INK)
            self.svg.text(x + 11, (top + bottom) / 2, name, SOFT_INK, anchor="start", font_size=11)
        self.svg.upward_text(x + 36, self.y + self.side / 2, meaning, SOFT_INK)

    def brackets_below(self, tiles: dict[range, str], meaning: str) -> None:
        """Names below ranges of keys."""
        y, c = self.y + self.side + 8, self.cell
        for keys, name in tiles.items():
            left, right = self.x + c * keys.start + 2, self.x + c * keys.stop - 2
            self.svg.path(f"M{_number(left)} {_number(y)}v5H{_number(right)}v-5", stroke=SOFT_INK)
            self.svg.text((left + right) / 2, y + 15, name, SOFT_INK, font_size=11)
        self.svg.text(self.x + self.side / 2, y + 34, meaning, SOFT_INK)

    def tiles(self, visits: list[Visit], mask, content) -> None:
        """The tiles of a schedule over the mask, with content(visit) written into each."""
        for visit in visits:
            self.area(visit.queries, visit.keys, MASKED_HIDDEN if visit.masked else UNMASKED)
            if visit.masked:
                self.visible_pairs(mask, lambda _: MASKED, visit.queries, visit.keys)
        self.grid()
        for visit in visits:
            self.area(visit.queries, visit.keys, "none", stroke=INK, stroke_width=1.6)
            self.label(visit.queries, visit.keys, content(visit))


# -------------------------------------------------------------------------------------------------- pictures

GROUP = dualkv.SegmentForest.from_groups([10], [[5, 3, 6]])
GROUP_NAMES = "P R1 R2 R3"
TREE = dualkv.SegmentForest.from_segments([6, 4, 3, 2, 3, 4], [-1, 0, 1, 1, 0, 4])
TREE_NAMES = "P A A1 A2 B B1"
PROMPTS, RESPONSES = [[5, 6, 7], [8, 9]], [[[11, 12], [21]], [[31, 32, 33]]]
TILE_LEGEND = (
    (UNMASKED, "unmasked tile: every pair is visible"),
    (MASKED, "masked tile: visible pair"),
    (MASKED_HIDDEN, "masked tile: hidden pair"),
    (HIDDEN, "not visited"),
)


def draw_mask(svg: Svg, x, y, cell, forest, names, heading, window_left=None) -> Matrix:
    """A mask in the colours of the keys' segments."""
    segments = name_segments(forest, names)
    colours = [segment.colour for segment in segments for _ in segment.rows]
    matrix = Matrix(svg, x, y, cell, segments, heading)
    everything = range(matrix.rows)
    matrix.visible_pairs(visible(forest, window_left), colours.__getitem__, everything, everything)
    matrix.grid()
    return matrix


def draw_group_masks() -> Svg:
    svg = Svg(940, 500, "Masks of a group and of the same group with a sliding window")
    draw_mask(svg, 84, 98, 15, GROUP, GROUP_NAMES, "A prompt and three responses")
    draw_mask(svg, 556, 98, 15, GROUP, GROUP_NAMES, "The same with window_left = 6", window_left=6)
    svg.text(84, 480, "Coloured: the pair is visible, in the colour of the key's segment.", SOFT_INK, "start")
    return svg


def draw_tree() -> Svg:
    svg = Svg(1020, 502, "A rollout of several turns: its segments and its mask")
    segments = name_segments(TREE, TREE_NAMES)
    x, y, unit, step = 24, 76, 25, 58
    heading = "Segments at the positions of their rows"
    svg.text(x, 20, heading, anchor="start", font_weight="bold", font_size=13)
    for s, segment in enumerate(segments):
        left, top, width = x + unit * segment.position, y + step * s, unit * len(segment.rows)
        if segment.parent >= 0:
            svg.path(
                f"M{_number(left)} {_number(y + step * segment.parent + 26)}V{_number(top + 26)}", SOFT_INK
            )
        svg.rect(left, top, width, 26, segment.colour, rx=3)
        svg.text(left + width / 2, top + 13, segment.name, PAPER, font_weight="bold")
        place = f"rows {segment.rows.start} to {segment.rows.stop - 1}, tree_end {segment.tree_end}"
        svg.text(left + width + 8, top + 13, place, SOFT_INK, anchor="start", font_size=11)
    bottom, last = y + step * len(segments) - 8, max(TREE.position_ids().tolist())
    svg.line(x, bottom, x + unit * (last + 1), bottom, SOFT_INK)
    for position in range(last + 1):
        svg.line(x + unit * position, bottom, x + unit * position, bottom + 5, SOFT_INK)
        svg.text(x + unit * (position + 0.5), bottom + 13, position, SOFT_INK, font_size=10)
    svg.text(x + unit * (last + 1) / 2, bottom + 34, "position", SOFT_INK)
    draw_mask(svg, 606, 98, 17, TREE, TREE_NAMES, "The mask")
    return svg


def draw_roots() -> Svg:
    svg = Svg(600, 332, "Mask of a plain batch of sequences")
    forest = dualkv.SegmentForest.from_segments([5, 3, 6], [-1, -1, -1])
    draw_mask(svg, 84, 98, 15, forest, "S1 S2 S3", "Three sequences: three roots")
    for line, text in enumerate(("No prefix is shared, so each row", "sees its own sequence up to itself.")):
        svg.text(340, 190 + 20 * line, text, SOFT_INK, anchor="start")
    return svg


def draw_packed_batch() -> Svg:
    svg = Svg(790, 372, "A packed batch and the sequences that it replaces")
    batch = dualkv.pack(PROMPTS, RESPONSES)
    segments = name_segments(batch.forest, "P0 R00 R01 P1 R10")
    cell, x = 56, 150

    def draw_segment(left, top, segment, fill_opacity=1):
        for row in segment.rows:
            at = left + cell * (row - segment.rows.start)
            svg.rect(at + 1, top, cell - 2, 26, segment.colour, rx=3, fill_opacity=fill_opacity)
            ink = PAPER if fill_opacity == 1 else INK
            svg.text(at + cell / 2, top + 13, batch.input_ids[row].item(), ink, font_weight="bold")

    svg.text(
        20, 26, "Replicated: a sequence for each response", anchor="start", font_weight="bold", font_size=13
    )
    done = set()
    for n, response in enumerate(segment for segment in segments if segment.parent >= 0):
        prompt, top = segments[response.parent], 46 + 34 * n
        svg.text(x - 14, top + 13, f"{prompt.name} {response.name}", SOFT_INK, anchor="end")
        draw_segment(x, top, prompt, 0.25 if prompt in done else 1)
        draw_segment(x + cell * len(prompt.rows), top, response)
        if prompt in done:
            end = x + cell * (len(prompt.rows) + len(response.rows))
            svg.text(end + 12, top + 13, "pale: computed a second time", SOFT_INK, anchor="start")
        done.add(prompt)

    svg.text(20, 182, "Packed: each prompt once", anchor="start", font_weight="bold", font_size=13)
    predicted = [[] for _ in batch.input_ids]
    for row, target in zip(batch.target_rows.tolist(), batch.target_ids.tolist()):
        predicted[row].append(target)
    lines = {"row": 230, "input_ids": 259, "position_ids": 290, "predicts (targets)": 326}
    for name, y in lines.items():
        svg.text(x - 14, y, name, SOFT_INK, anchor="end")
    for segment in segments:
        left = x + cell * segment.rows.start
        svg.text(left + cell * len(segment.rows) / 2, 208, segment.name, segment.colour, font_weight="bold")
        draw_segment(left, 246, segment)
    for row, targets in enumerate(predicted):
        centre = x + cell * row + cell / 2
        svg.text(centre, lines["row"], row, SOFT_INK, font_size=11)
        svg.text(centre, lines["position_ids"], batch.position_ids[row].item())
        if targets:
            svg.path(f"M{_number(centre)} 302v8m-3 -4l3 4l3 -4", SOFT_INK)
            svg.text(centre, lines["predicts (targets)"], ", ".join(map(str, targets)), font_weight="bold")
    remark = "The prompt's last row predicts the first token of each of its responses."
    svg.text(x, 352, remark, SOFT_INK, anchor="start")
    return svg


def tile_names(visits: list[Visit], side: str) -> dict[range, str]:
    """Places in the schedule of the tiles that visit, by their rows."""
    return {getattr(visit, side): str(visit.tile) for visit in visits}


def draw_forward() -> Svg:
    svg = Svg(672, 704, "Tiles of the forward")
    matrix = Matrix(svg, 84, 98, 21, name_segments(GROUP, GROUP_NAMES), "Forward, tiles of 4 × 4")
    visits = read_plan(GROUP, 4).forward
    matrix.tiles(visits, visible(GROUP), lambda visit: f"{visit.tile}.{visit.step}")
    matrix.brackets_right(tile_names(visits, "queries"), "query tiles in schedule order")
    draw_legend(svg, 84, 632, "3.2: the third query tile of the schedule, its second key tile")
    return svg


def draw_backward() -> Svg:
    svg = Svg(1040, 656, "Tiles of the backward, and the turns of their sums")
    visits, mask = read_plan(GROUP, 4).backward, visible(GROUP)
    segments = name_segments(GROUP, GROUP_NAMES)
    schedule = Matrix(svg, 84, 98, 17.5, segments, "Backward, tiles of 4 × 4: the schedule")
    schedule.tiles(visits, mask, lambda visit: f"{visit.tile}.{visit.step}")
    turns = Matrix(svg, 596, 98, 17.5, segments, "The turns in which dQ is summed")
    turns.tiles(visits, mask, lambda visit: str(visit.turn))
    for matrix in (schedule, turns):
        matrix.brackets_below(tile_names(visits, "keys"), "key tiles in schedule order")
    numbers = "Left, 3.2: the third key tile of the schedule, its second query tile. "
    numbers += "Right, 0: the first to add to dQ of these rows"
    draw_legend(svg, 84, 586, numbers)
    return svg


def draw_legend(svg: Svg, x, y, numbers: str) -> None:
    svg.legend(x, y, TILE_LEGEND[:2])
    svg.legend(x, y + 22, TILE_LEGEND[2:])
    svg.text(x, y + 44, numbers, anchor="start")


def draw_same_bits() -> Svg:
    svg = Svg(880, 548, "The key tiles that the rows of a response walk, among siblings and alone")
    segments = name_segments(GROUP, GROUP_NAMES)
    draw_walk(svg, 84, 98, GROUP, segments, "R2 among its siblings")
    alone = dualkv.SegmentForest.from_groups([10], [[3]])
    colours = (segments[0].colour, segments[2].colour)
    draw_walk(svg, 596, 98, alone, name_segments(alone, "P R2", colours), "R2 alone with its prompt")
    seen = (segments[0].colour, "seen by R2: keys of P"), (segments[2].colour, "seen by R2: its own keys")
    unseen = (MASKED_HIDDEN, "visited for other rows of the query tile, hidden from R2"), (LINE, "other rows")
    svg.legend(84, 500, seen)
    svg.legend(84, 522, unseen)
    svg.text(596, 522, "1 to 4: the key tiles that R2 sees, in order", anchor="start")
    return svg


def draw_walk(svg: Svg, x, y, forest, segments, heading) -> None:
    """The key tiles that the query tiles with rows of R2 visit, numbered where these rows see something."""
    matrix, mask = Matrix(svg, x, y, 16, segments, heading), visible(forest)
    everything = range(matrix.rows)
    matrix.visible_pairs(mask, lambda _: LINE, everything, everything)
    own = next(segment for segment in segments if segment.name == "R2")
    path = {own.parent, segments.index(own)}
    seen, query_tiles = {}, {}  # the widest visit of each key tile, by its start; query tiles without names
    for visit in read_plan(forest, 4).forward:
        rows = range(max(own.rows.start, visit.queries.start), min(own.rows.stop, visit.queries.stop))
        if len(rows) == 0:
            continue
        query_tiles[visit.queries] = ""
        if visit.segment in path:
            seen[visit.keys.start] = max(seen.get(visit.keys.start, visit.keys), visit.keys, key=len)
        else:
            matrix.area(rows, visit.keys, MASKED_HIDDEN)
    colours = [segment.colour for segment in segments for _ in segment.rows]
    matrix.visible_pairs(mask, colours.__getitem__, own.rows, everything)
    matrix.grid()
    for number, keys in enumerate(seen.values(), start=1):
        matrix.area(own.rows, keys, "none", stroke=INK, stroke_width=1.6)
        matrix.label(own.rows, keys, str(number))
    matrix.brackets_right(query_tiles, "query tiles that hold R2")


PICTURES = {
    "packed_batch.svg": draw_packed_batch,
    "forest_group.svg": draw_group_masks,
    "forest_tree.svg": draw_tree,
    "forest_roots.svg": draw_roots,
    "plan_forward.svg": draw_forward,
    "plan_backward.svg": draw_backward,
    "plan_same_bits.svg": draw_same_bits,
}


def write_pictures(pictures: dict) -> None:
    """Draws pictures by file name into the folder of the command line, docs/ without one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for name, draw in pictures.items():
        (folder / name).write_text(str(draw()), encoding="utf-8")
        print(folder / name)


def main() -> None:
    write_pictures(PICTURES)


if __name__ == "__main__":
    main()
