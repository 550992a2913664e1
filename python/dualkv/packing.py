"""dualkv.pack and dualkv.pack_padded: token ids become a batch in which each prompt stands once."""

from __future__ import annotations

import ctypes
import itertools
import math
import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from . import _abi
from ._library import Handle, library
from ._tensors import (
    INTEGER_DTYPES,
    address,
    copy_int64,
    int64_vector,
    number,
    refuse_bools,
    require_dimensions,
    require_list,
    require_mask,
    require_tensors,
)
from .forest import SegmentForest, segments_of


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A packed batch of G groups: T rows (tokens), of which M response tokens are to be scored.

    Rows are in the order of the groups: a prompt, then its responses. Targets are in the order of groups,
    responses and tokens.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], position of each row in its own sequence, for rotary embeddings.
        forest: the segments, for `dualkv.attention`.
        target_rows: int64 [M], row whose hidden state predicts a target. The prompt's last row appears once
            for each response.
        target_ids: int64 [M], the token that it predicts.
        source_rows: int64 [S], the row of each of the S responses in the padded batch that `pack_padded` was
            given: `per_row[batch.source_rows]` brings one value for each row (a reward, an advantage) into
            the order of the batch. None from `pack`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    forest: SegmentForest
    target_rows: torch.Tensor
    target_ids: torch.Tensor
    source_rows: torch.Tensor | None
    _response_counts: list[int] = field(repr=False)  # [G]
    _target_counts: list[int] = field(repr=False)  # targets of each response
    # Shape of the response mask that pack_padded was given, and the flat place of each target in it, [M].
    _padded_shape: tuple[int, int] | None = field(repr=False)
    _source_positions: torch.Tensor | None = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Rows, T: each prompt once, and all responses."""
        return self.input_ids.shape[0]

    @property
    def replicated_tokens(self) -> int:
        """Rows of the same batch with each response after a copy of its prompt."""
        return self.forest.replicated_tokens

    @property
    def token_ratio(self) -> float:
        """replicated_tokens / num_tokens: how many times fewer rows a model has to compute."""
        return self.replicated_tokens / self.num_tokens if self.num_tokens > 0 else 1.0

    def to(self, device) -> PackedBatch:
        """The batch with its tensors on a device. The forest stays on the host, where plans are made.

        Raises:
            TypeError: `device` is no device, as where it is a dtype: ids stay integers.
        """
        if not isinstance(device, (str, int, torch.device)):
            raise TypeError(f"device must be a torch.device or its name, got {device!r}")

        def moved(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        return replace(
            self,
            input_ids=moved(self.input_ids),
            position_ids=moved(self.position_ids),
            target_rows=moved(self.target_rows),
            target_ids=moved(self.target_ids),
            source_rows=moved(self.source_rows),
            _source_positions=moved(self._source_positions),
        )

    def unpack(self, values: torch.Tensor) -> list[list[torch.Tensor]]:
        """Splits one value for each target into responses.

        Args:
            values: [M], or [M, ...].

        Returns:
            values[g][n], for response n of group g: a view [targets of the response, ...].

        Raises:
            ValueError: `values` has another number of rows than the batch has targets.
            TypeError: `values` is no tensor.
        """
        self._require_values(values)
        responses = iter(torch.split(values, self._target_counts))
        return [list(itertools.islice(responses, count)) for count in self._response_counts]

    def unpack_padded(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Puts one value for each target where pack_padded's response mask had its token.

        Args:
            values: [M].
            fill: value of all other places, in the type of `values`.

        Returns:
            A new tensor of the response mask's shape, rows in the caller's order; differentiable.

        Raises:
            ValueError: `values` has another number of rows than the batch has targets, its type cannot hold
                `fill`, or the batch was not made by pack_padded.
            TypeError: `values` is no tensor, or `fill` no number.
        """
        if self._padded_shape is None:
            raise ValueError(
                "unpack_padded needs a batch made by pack_padded; use unpack for one made by pack"
            )
        self._require_values(values)
        require_dimensions(values, "values", "[M]")
        fill = fill if isinstance(fill, bool) else number(fill, "fill")
        _require_held(fill, values.dtype)
        rows, columns = self._padded_shape
        padded = values.new_full((rows * columns,), fill)
        positions = self._source_positions.to(values.device)
        return padded.scatter(0, positions, values).view(rows, columns)

    def _require_values(self, values) -> None:
        require_tensors(values=values)
        targets = self.target_ids.shape[0]
        if values.dim() == 0 or values.shape[0] != targets:
            raise ValueError(
                f"values must have a row for each of the {targets} targets, got shape {list(values.shape)}"
            )


def pack(prompts, responses) -> PackedBatch:
    """Packs groups of a prompt and its responses; every response token is a target.

    Args:
        prompts: token ids of each group's prompt: a list of lists, tensors or arrays.
        responses: responses[g][n], token ids of response n to prompt g. Groups and responses may be empty.

    Returns:
        The batch, on the CPU.

    Raises:
        ValueError: numbers of prompts and groups differ, a token id is negative, or a prompt without tokens
            has a response with some, whose first token nothing predicts.
        TypeError: something is not a sequence of integers.
    """
    require_list(prompts, "prompts", "group")
    require_list(responses, "responses", "group")
    if len(prompts) != len(responses):
        raise ValueError(
            f"prompts and responses must have as many groups, got {len(prompts)} and {len(responses)}"
        )
    prompt_tokens, prompt_lengths = array("q"), array("q")
    response_tokens, response_lengths = array("q"), array("q")
    for g, (prompt, group) in enumerate(zip(prompts, responses)):
        prompt_lengths.append(_append_tokens(prompt_tokens, prompt, "prompts", g))
        require_list(group, f"responses[{g}]", "response")
        for n, response in enumerate(group):
            response_lengths.append(_append_tokens(response_tokens, response, "responses", g, n))
    response_counts = array("q", map(len, responses))
    params = _abi.dualkv_pack_params(
        num_groups=len(prompts),
        prompt_lengths=_array_address(prompt_lengths),
        response_counts=_array_address(response_counts),
        response_lengths=_array_address(response_lengths),
        prompt_tokens=_array_address(prompt_tokens),
        response_tokens=_array_address(response_tokens),
    )
    return _packed_batch(Handle(library.dualkv_pack, library.dualkv_batch_destroy, ctypes.byref(params)))


def pack_padded(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor, group_ids
) -> PackedBatch:
    """Packs a padded batch as trainers hold it, each row a prompt and its response.

    Padding is what `attention_mask` says, wherever it stands. Groups follow each other in the order in which
    their ids first appear, the responses of a group in the order of their rows.

    Args:
        input_ids: integers [B, S].
        attention_mask: [B, S], 1 for tokens, 0 for padding, of any type.
        response_mask: [B, S], or [B, R] for the last R columns: 1 for tokens that are targets, else 0, of any
            type. With R < S the response starts at the first of the last R columns, else at the row's first
            1; a row without is all prompt. Tokens of a response with 0 are seen, but are no targets.
        group_ids: [B], integers, strings or anything else that can be a key: rows with the same id share
            their prompt.

    Returns:
        The batch, on the CPU.

    Raises:
        ValueError: shapes do not fit, a mask has other values than 0 and 1, two prompts of a group differ, a
            target is padding, a token id is negative, or a response follows a prompt without tokens.
        TypeError: an argument is of the wrong type.

    Warns:
        UserWarning: `response_mask` has one column fewer than `input_ids` and its first column no target, as a
            mask for shifted log-probs. The prompts are then taken for one column wide, and nothing is shared.
    """
    require_tensors(input_ids=input_ids, attention_mask=attention_mask, response_mask=response_mask)
    require_dimensions(input_ids, "input_ids", "[B, S]")
    require_dimensions(attention_mask, "attention_mask", "[B, S]")
    require_dimensions(response_mask, "response_mask", "[B, R]")
    if input_ids.dtype not in INTEGER_DTYPES:
        raise TypeError(f"input_ids must be integers, got {input_ids.dtype}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            "attention_mask must have the shape of input_ids, "
            f"got {list(attention_mask.shape)} and {list(input_ids.shape)}"
        )
    num_rows, num_columns = input_ids.shape
    columns = response_mask.shape[1]
    if response_mask.shape[0] != num_rows or not min(num_rows, 1) <= columns <= num_columns:
        raise ValueError(
            "response_mask must have the rows of input_ids, and at least one and at most all of its columns, "
            f"got {list(response_mask.shape)} and {list(input_ids.shape)}"
        )
    groups = _group_numbers(group_ids)
    if len(groups) != num_rows:
        raise ValueError(f"group_ids must have an id for each row, got {len(groups)} and {num_rows}")

    ids = input_ids.to("cpu", torch.int64).contiguous()
    present = _mask_bytes(attention_mask, "attention_mask")
    scored = _mask_bytes(response_mask, "response_mask")
    if (
        columns == num_columns - 1
        and not scored[:, 0].any()
        and scored.any()
        and len(groups.unique()) < num_rows
    ):
        warnings.warn(
            f"response_mask has {columns} of the {num_columns} columns of input_ids, so responses start in the "
            "second column, and all that rows share is the first. For a mask of shifted log-probs pass the mask "
            "before the shift, or its last columns from where the responses start.",
            stacklevel=2,
        )
    params = _abi.dualkv_pack_padded_params(
        num_rows=num_rows,
        num_columns=num_columns,
        response_columns=columns,
        input_ids=address(ids),
        attention_mask=address(present),
        response_mask=address(scored),
        group_ids=address(groups),
    )
    batch = Handle(library.dualkv_pack_padded, library.dualkv_batch_destroy, ctypes.byref(params))
    return _packed_batch(batch, padded_shape=tuple(response_mask.shape))


def _mask_bytes(mask: torch.Tensor, name: str) -> torch.Tensor:
    """A mask as the C library takes it: uint8, 0 or 1, on the CPU."""
    mask = mask.cpu()
    require_mask(mask, name)
    return mask.to(torch.uint8).contiguous()


def _require_held(fill: float, dtype: torch.dtype) -> None:
    """Requires that a type holds a number: integers exactly, floating point numbers but for rounding."""
    try:
        held = torch.tensor(fill, dtype=dtype, device="cpu").item()
    except (OverflowError, RuntimeError, ValueError):  # depends on the type
        held = None
    if dtype.is_floating_point and held is not None:
        holds = math.isfinite(held) or not math.isfinite(fill)
    else:
        holds = held == fill
    if not holds:
        raise ValueError(f"fill must be a number that values of {dtype} can hold, got {fill}")


def _append_tokens(tokens: array, sequence, name: str, *indices: int) -> int:
    """Appends a sequence of token ids to `tokens`. Returns its length."""
    before = len(tokens)
    try:
        if isinstance(sequence, list):
            refuse_bools(sequence)
            tokens.fromlist(sequence)
        elif hasattr(sequence, "tolist"):
            tokens.frombytes(int64_vector(sequence, "the sequence").numpy().tobytes())
        elif isinstance(sequence, Sequence) and not isinstance(sequence, (str, bytes)):
            tokens.extend(sequence)
        else:
            raise TypeError(f"it is of type {type(sequence).__name__}")
    except (TypeError, OverflowError) as error:
        place = name + "".join(f"[{index}]" for index in indices)
        raise TypeError(f"{place} must be a sequence of token ids: {error}") from error
    return len(tokens) - before


def _array_address(values: array) -> int:
    return values.buffer_info()[0]


def _group_numbers(group_ids) -> torch.Tensor:
    """int64 [B]: integers as they are; other ids are numbered in the order in which they appear."""
    try:
        ids = group_ids.tolist() if hasattr(group_ids, "tolist") else list(group_ids)
        ids = [group_id.item() if hasattr(group_id, "item") else group_id for group_id in ids]
        for place, group_id in enumerate(ids):
            if group_id != group_id:
                raise ValueError(f"group_ids[{place}] must be equal to itself, got {group_id}")
        if not all(type(group_id) is int and -(2**63) <= group_id < 2**63 for group_id in ids):
            numbers = {}
            ids = [numbers.setdefault(group_id, len(numbers)) for group_id in ids]
    except TypeError as error:
        raise TypeError(f"group_ids must be a list of an id for each row: {error}") from error
    return int64_vector(ids, "group_ids")


def _packed_batch(batch: Handle, padded_shape: tuple[int, int] | None = None) -> PackedBatch:
    """Copies a batch of the C library into tensors."""
    view = _abi.dualkv_batch_view()
    library.dualkv_batch_get_view(batch, ctypes.byref(view))
    source_rows = source_positions = None
    if padded_shape is not None:
        source_rows = copy_int64(view.source_rows, view.num_responses)
        source_positions = copy_int64(view.source_positions, view.num_targets)
    return PackedBatch(
        input_ids=copy_int64(view.input_ids, view.num_tokens),
        position_ids=copy_int64(view.position_ids, view.num_tokens),
        forest=SegmentForest(segments_of(view.forest)),
        target_rows=copy_int64(view.target_rows, view.num_targets),
        target_ids=copy_int64(view.target_ids, view.num_targets),
        source_rows=source_rows,
        _response_counts=copy_int64(view.response_counts, view.num_groups).tolist(),
        _target_counts=copy_int64(view.target_begin, view.num_responses + 1).diff().tolist(),
        _padded_shape=padded_shape,
        _source_positions=source_positions,
    )
