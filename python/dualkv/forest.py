"""SegmentForest, the description of a packed batch, and the plans made of it."""

from __future__ import annotations

import ctypes
import functools
import operator

import torch

from . import _abi
from ._library import Handle, library
from ._tensors import copy_int64, group_lengths, int64_vector, require_tensors


class SegmentForest:
    """Which rows of a packed batch are whose prefix.

    A batch is a sequence of segments, runs of consecutive rows (tokens). A segment's parent is its prefix; a
    root has none. Segments are in preorder: each follows its parent, after the subtrees of the parent's
    earlier children. A row sees its own segment up to itself and all of every ancestor, nothing else. A GRPO
    group is a root, the prompt, with a leaf for each response; a plain batch of sequences is a forest of
    roots; a rollout of several turns is a deeper tree.

    Attributes:
        segments: int64 CPU tensor [S, 2], the length and the parent (-1 for a root) of each segment. It is
            what the operators take, so treat it as read-only.

    Forests are compared by value and can be pickled.

    Raises:
        ValueError: `segments` has another shape, type or device, a length is negative, or the segments are
            not in preorder.
        TypeError: `segments` is no tensor.
    """

    segments: torch.Tensor

    def __init__(self, segments: torch.Tensor):
        require_tensors(segments=segments)
        _require_segments(segments)
        _forest(segments)
        self.segments = segments

    @classmethod
    def from_groups(cls, prompt_lengths, response_lengths) -> SegmentForest:
        """Forest of groups: for each a prompt and its responses.

        Args:
            prompt_lengths: length of each group's prompt, [P0, P1, ...]: a list, tensor or array.
            response_lengths: lengths of each group's responses, [[R00, R01, ...], [R10, ...], ...].

        Raises:
            ValueError: a length is negative, or the number of groups differs.
            TypeError: a length is not an integer.
        """
        prompts, counts, flat = group_lengths(prompt_lengths, response_lengths)
        forest = Handle(
            library.dualkv_forest_create_from_groups,
            library.dualkv_forest_destroy,
            len(counts),
            prompts.data_ptr(),
            counts.data_ptr(),
            flat.data_ptr(),
        )
        return cls(segments_of(forest))

    @classmethod
    def from_segments(cls, lengths, parents) -> SegmentForest:
        """Forest of any shape, in preorder.

        Args:
            lengths: rows of each segment, [S]: a list, tensor or array. Segments may be empty.
            parents: index of each segment's parent, or -1 for a root, [S].

        Raises:
            ValueError: a length is negative, the segments are not in preorder, or `lengths` and `parents`
                differ in length.
            TypeError: an entry is not an integer.
        """
        lengths = int64_vector(lengths, "lengths")
        parents = int64_vector(parents, "parents")
        if len(lengths) != len(parents):
            raise ValueError(
                f"lengths and parents must have as many entries, got {len(lengths)} and {len(parents)}"
            )
        return cls(torch.stack([lengths, parents], dim=1))

    @property
    def num_segments(self) -> int:
        """Segments, S: of empty ones too."""
        return self.segments.shape[0]

    @property
    def lengths(self) -> list[int]:
        """Rows of each segment, [S]."""
        return self.segments[:, 0].tolist()

    @property
    def parents(self) -> list[int]:
        """Index of each segment's parent, -1 for a root, [S]."""
        return self.segments[:, 1].tolist()

    @property
    def total_tokens(self) -> int:
        """T, the rows of all segments together."""
        return int(self.segments[:, 0].sum())

    @property
    def replicated_tokens(self) -> int:
        """Rows of the same sequences without sharing: for each leaf all rows from its root on."""
        path_lengths, leaves = [], set(range(self.num_segments))
        for length, parent in self.segments.tolist():
            path_lengths.append(length + (path_lengths[parent] if parent >= 0 else 0))
            leaves.discard(parent)
        return sum(path_lengths[leaf] for leaf in leaves)

    def position_ids(self) -> torch.Tensor:
        """Position of each row in its sequence, for rotary embeddings: a new int64 tensor [T]."""
        positions = torch.empty(self.total_tokens, dtype=torch.int64, device="cpu")
        library.dualkv_forest_position_ids(_forest(self.segments), positions.data_ptr())
        return positions

    def visible_pairs(self, window_left: int | None = None) -> int:
        """Number of (row, key) pairs that see each other: attention does 4 * D * H FLOPs for each.

        Args:
            window_left: as in `dualkv.attention`.
        """
        pairs = ctypes.c_int64()
        library.dualkv_forest_visible_pairs(
            _forest(self.segments), window_argument(window_left), ctypes.byref(pairs)
        )
        return pairs.value

    def __eq__(self, other) -> bool:
        if not isinstance(other, SegmentForest):
            return NotImplemented
        return torch.equal(self.segments, other.segments)

    def __hash__(self) -> int:
        return hash(self.segments.numpy().tobytes())

    def __repr__(self) -> str:
        trees = self.parents.count(-1)
        return f"SegmentForest(segments={self.num_segments}, trees={trees}, total_tokens={self.total_tokens})"


_MAX_ROWS = 1 << 30  # of a forest: a wider window hides nothing


def window_argument(window_left: int | None) -> int:
    """window_left as the C library takes it."""
    if window_left is None:
        return _abi.NO_WINDOW
    if not isinstance(window_left, int):
        try:
            window_left = operator.index(window_left)
        except TypeError:
            raise TypeError(
                f"window_left must be an integer or None, got {type(window_left).__name__}"
            ) from None
    if window_left < 0:
        raise ValueError(f"window_left must be >= 0, or None for no window, got {window_left}")
    return window_left if window_left < _MAX_ROWS else _abi.NO_WINDOW


def segments_of(forest) -> torch.Tensor:
    """Segments tensor [S, 2] of a forest of the C library."""
    view = _abi.dualkv_forest_view()
    library.dualkv_forest_get_view(forest, ctypes.byref(view))
    fields = len(_abi.dualkv_segment._fields_)
    table = torch.empty(view.num_segments, fields, dtype=torch.int32, device="cpu")
    if view.num_segments > 0:
        ctypes.memmove(table.data_ptr(), view.segments, table.numel() * 4)
    begin, end, _, _, parent = table.to(torch.int64).unbind(1)
    return torch.stack([end - begin, parent], dim=1)


def plan(
    segments: torch.Tensor, window_left: int, query_row_begin: int, tiles: tuple[int, ...] = ()
) -> Handle:
    """The plan of a forest, made once for all layers and steps that use the same one.

    Segments that end at or before row `query_row_begin` are keys only. `tiles` is what `tile_sizes` returns;
    if empty, those of the CPU are taken. Plans are found by the content of `segments`, so that a batch may be
    described anew in every layer or on a recompute.
    """
    _require_segments(segments)
    return _cached_plan(segments.contiguous().numpy().tobytes(), window_left, query_row_begin, tiles)


_TILES = (
    "forward_query_tile",
    "forward_key_tile",
    "backward_query_tile",
    "backward_key_tile",
    "backward_parts",
)


@functools.lru_cache(maxsize=None)
def tile_sizes(device: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """The tile sizes and backward_parts, in the order of dualkv_plan_params, of the kernels of a
    dualkv_device."""
    params = _abi.dualkv_plan_params()
    library.dualkv_plan_set_tiles(ctypes.byref(params), device, num_heads, num_kv_heads, head_dim)
    return tuple(getattr(params, name) for name in _TILES)


def _require_segments(segments: torch.Tensor) -> None:
    if segments.dtype != torch.int64 or segments.dim() != 2 or segments.shape[1] != 2:
        raise ValueError(
            f"segments must be an int64 tensor [S, 2], got {segments.dtype} of shape {list(segments.shape)}"
        )
    if segments.device.type != "cpu":
        raise ValueError(f"segments must be on the CPU, where plans are made, got {segments.device}")


# The number bounds the memory that plans of past batches hold.
@functools.lru_cache(maxsize=64)
def _cached_plan(
    segment_bytes: bytes, window_left: int, query_row_begin: int, tiles: tuple[int, ...]
) -> Handle:
    segments = copy_int64(segment_bytes, len(segment_bytes) // 8).view(-1, 2)
    keys_only = (segments[:, 0].cumsum(0) <= query_row_begin).to(torch.uint8)
    forest = _forest(segments)
    params = _abi.dualkv_plan_params(
        forest=forest.address,
        window_left=window_left,
        keys_only=keys_only.data_ptr() if query_row_begin > 0 else None,
        **dict(zip(_TILES, tiles)),
    )
    return Handle(library.dualkv_plan_create, library.dualkv_plan_destroy, ctypes.byref(params))


def _forest(segments: torch.Tensor) -> Handle:
    """The forest of the C library that a segments tensor [S, 2] describes."""
    lengths, parents = segments.t().contiguous()
    return Handle(
        library.dualkv_forest_create,
        library.dualkv_forest_destroy,
        len(lengths),
        lengths.data_ptr(),
        parents.data_ptr(),
    )
