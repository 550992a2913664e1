"""SegmentForest against the definition of a forest, by brute force."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkv


@st.composite
def forests(draw):
    """lengths and parents of a forest in preorder."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=7))
    parents, path = [], []
    for segment in range(len(lengths)):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return lengths, parents


def row_paths(lengths, parents):
    """For every row the segments from its root to itself, and its place in the last."""
    return [
        (ancestors(parents, segment), place)
        for segment, length in enumerate(lengths)
        for place in range(length)
    ]


def ancestors(parents, segment):
    return [] if segment < 0 else [*ancestors(parents, parents[segment]), segment]


@given(forests(), st.one_of(st.none(), st.integers(0, 12)))
@settings(max_examples=150, deadline=None)
def test_positions_and_visible_pairs_by_brute_force(forest, window_left):
    lengths, parents = forest
    rows = row_paths(lengths, parents)
    positions = [sum(lengths[s] for s in path[:-1]) + place for path, place in rows]
    sees = sum(
        other_path == path[: len(other_path)]  # of an ancestor or the same segment
        and positions[j] <= positions[i]
        and (window_left is None or positions[i] - positions[j] <= window_left)
        for i, (path, _) in enumerate(rows)
        for j, (other_path, _) in enumerate(rows)
    )
    built = dualkv.SegmentForest.from_segments(lengths, parents)
    assert built.position_ids().tolist() == positions
    assert built.visible_pairs(window_left) == sees
    assert built.total_tokens == len(rows)
    leaves = set(range(len(lengths))) - set(parents)
    assert built.replicated_tokens == sum(
        sum(lengths[s] for s in ancestors(parents, leaf)) for leaf in leaves
    )
    assert (built.lengths, built.parents, built.num_segments) == (lengths, parents, len(lengths))


def test_groups_are_roots_with_leaves():
    groups = dualkv.SegmentForest.from_groups([3, 0, 2], [[2, 1], [], [0, 4, 1]])
    assert groups.lengths == [3, 2, 1, 0, 2, 0, 4, 1]
    assert groups.parents == [-1, 0, 0, -1, -1, 4, 4, 4]
    assert groups == dualkv.SegmentForest.from_segments(groups.lengths, groups.parents)
    assert groups.segments.dtype == torch.int64 and groups.segments.shape == (8, 2)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array, lambda x: np.array(x, dtype=np.int32)])
def test_lengths_as_lists_tensors_and_arrays(kind):
    groups = dualkv.SegmentForest.from_groups(kind([3, 1]), [kind([2, 1]), kind([4])])
    assert groups == dualkv.SegmentForest.from_groups([3, 1], [[2, 1], [4]])
    assert dualkv.SegmentForest.from_segments(kind([3, 1]), kind([-1, 0])).parents == [-1, 0]


def test_the_forest_does_not_share_the_callers_memory():
    lengths = torch.tensor([3, 1])
    forest = dualkv.SegmentForest.from_segments(lengths, [-1, 0])
    lengths[0] = 7
    assert forest.total_tokens == 4


def test_equality_hash_repr_copies():
    forest = dualkv.SegmentForest.from_groups([3], [[2, 1]])
    other = dualkv.SegmentForest.from_groups([3], [[1, 2]])
    assert forest != other and forest != "forest"
    for copied in (copy.deepcopy(forest), pickle.loads(pickle.dumps(forest))):
        assert copied == forest and hash(copied) == hash(forest)
    assert repr(forest) == "SegmentForest(segments=3, trees=1, total_tokens=6)"


def test_no_segments():
    forest = dualkv.SegmentForest.from_groups([], [])
    assert (forest.total_tokens, forest.num_segments, forest.visible_pairs()) == (0, 0, 0)
    assert forest.position_ids().shape == (0,)
    assert forest == dualkv.SegmentForest.from_segments([], [])


def test_J2_positions_of_branches():
    assert dualkv.SegmentForest.from_groups([3], [[2, 2]]).position_ids().tolist() == [0, 1, 2, 3, 4, 3, 4]


def test_errors_name_the_argument_and_the_values():
    from_groups, from_segments = dualkv.SegmentForest.from_groups, dualkv.SegmentForest.from_segments
    with pytest.raises(ValueError, match=r"prompt_lengths and response_lengths .* got 2 and 1"):
        from_groups([1, 2], [[3]])
    with pytest.raises(ValueError, match=r"prompt_lengths\[1\] must be >= 0, got -2"):
        from_groups([1, -2], [[3], []])
    with pytest.raises(ValueError, match=r"response_lengths\[1\]\[0\] must be >= 0, got -4"):
        from_groups([1, 2], [[3], [-4]])
    with pytest.raises(TypeError, match=r"response_lengths\[1\] .*float"):
        from_groups([1, 2], [[3], [1.5]])
    with pytest.raises(TypeError, match=r"prompt_lengths .*torch.float32 of shape \[2\]"):
        from_groups(torch.tensor([1.0, 2.0]), [[3], []])
    with pytest.raises(TypeError, match=r"response_lengths\[0\] must be a list of integers: .* type bool"):
        from_groups([1], [[True]])
    with pytest.raises(ValueError, match=r"prompt_lengths must be a list of integers of 64 bits"):
        from_groups([2**70], [[1]])
    with pytest.raises(ValueError, match=r"lengths\[1\] must be >= 0, got -3"):
        dualkv.SegmentForest(torch.tensor([[1, -1], [-3, -1]]))
    with pytest.raises(TypeError, match=r"segments must be a torch.Tensor, got list"):
        dualkv.SegmentForest([[1, -1]])
    with pytest.raises(ValueError, match=r"lengths and parents .* got 2 and 1"):
        from_segments([1, 2], [-1])
    with pytest.raises(ValueError, match=r"parents\[1\] .* got 1"):
        from_segments([1, 2], [-1, 1])
    with pytest.raises(ValueError, match=r"preorder: parents\[2\] is 0"):
        from_segments([1, 2, 3], [-1, -1, 0])
    with pytest.raises(ValueError, match=r"1073741824 rows, got 1073741824 \+ 1"):
        from_segments([2**30, 1], [-1, 0])
    with pytest.raises(ValueError, match=r"window_left must be >= 0, or None for no window, got -1"):
        from_groups([1], [[3]]).visible_pairs(-1)
