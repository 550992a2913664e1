"""The library's plans and forests, read through the C interface, for pictures and models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import dualkv
from dualkv import _abi
from dualkv._library import Handle, library


@dataclass(frozen=True)
class Visit:
    """One pair of a query tile and a key tile, as a schedule makes it."""

    tile: int  # place in the schedule of the tile that visits, from 1
    step: int  # place of this visit among those of that tile, from 1
    queries: range  # rows
    keys: range  # rows
    segment: int  # of the keys
    masked: bool
    turn: int | None  # backward: order in which the query tile's dQ is added to, from 0


@dataclass(frozen=True)
class Plan:
    forward: list[Visit]
    backward: list[Visit]


def c_forest(forest: dualkv.SegmentForest) -> Handle:
    lengths, parents = forest.segments.t().contiguous()
    return Handle(
        library.dualkv_forest_create,
        library.dualkv_forest_destroy,
        forest.num_segments,
        lengths.data_ptr(),
        parents.data_ptr(),
    )


def view_plan(
    forest: dualkv.SegmentForest,
    query_tile: int,
    key_tile: int,
    window_left: int | None = None,
    backward_parts: int = 0,
) -> _abi.dualkv_plan_view:
    """The library's plan, forward and backward with the same tiles."""
    handle = c_forest(forest)
    params = _abi.dualkv_plan_params(
        forest=handle.address,
        window_left=_abi.NO_WINDOW if window_left is None else window_left,
        forward_query_tile=query_tile,
        forward_key_tile=key_tile,
        backward_query_tile=query_tile,
        backward_key_tile=key_tile,
        backward_parts=backward_parts,
    )
    plan = Handle(library.dualkv_plan_create, library.dualkv_plan_destroy, ctypes.byref(params))
    view = _abi.dualkv_plan_view()
    library.dualkv_plan_get_view(plan, ctypes.byref(view))
    view.plan = plan  # its addresses are good as long as the plan
    return view


def read_plan(
    forest: dualkv.SegmentForest, tile_size: int, window_left: int | None = None, backward_parts: int = 0
) -> Plan:
    """The library's plan with square tiles, every run cut into its tiles."""
    view = view_plan(forest, tile_size, tile_size, window_left, backward_parts)
    return Plan(_forward_visits(view.forward), _backward_visits(view))


def array(kind, count: int, address: int | None) -> list:
    """The elements of an array of the C interface."""
    return list((kind * count).from_address(address)) if count > 0 else []


def tiles_and_runs(schedule):
    """For each tile, in schedule order: the tile and its runs with their indices."""
    runs = array(_abi.dualkv_run, schedule.num_runs, schedule.runs)
    for tile in array(_abi.dualkv_tile, schedule.num_tiles, schedule.tiles):
        yield tile, [(r, runs[r]) for r in range(tile.run_begin, tile.run_end)]


def pieces(run, width: int) -> list[range]:
    """The tiles of a run."""
    return [range(begin, min(begin + width, run.end)) for begin in range(run.begin, run.end, width)]


def _forward_visits(schedule) -> list[Visit]:
    visits = []
    for number, (tile, runs) in enumerate(tiles_and_runs(schedule), start=1):
        queries = range(tile.begin, tile.end)
        visited = [(keys, run) for _, run in runs for keys in pieces(run, schedule.key_tile)]
        for step, (keys, run) in enumerate(visited, start=1):
            visits.append(Visit(number, step, queries, keys, run.segment, bool(run.masked), None))
    return visits


def _backward_visits(view) -> list[Visit]:
    schedule, visits = view.backward, []
    turns = array(ctypes.c_int32, schedule.num_runs, view.turn)
    for number, (tile, runs) in enumerate(tiles_and_runs(schedule), start=1):
        keys, step = range(tile.begin, tile.end), 0
        for r, run in runs:
            for queries in pieces(run, schedule.query_tile):
                step += 1
                visits.append(Visit(number, step, queries, keys, run.segment, bool(run.masked), turns[r]))
    return visits
