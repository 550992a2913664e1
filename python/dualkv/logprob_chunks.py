"""linear_logprob on CUDA, a chunk of logits at a time: torch multiplies, the library's kernels do the rest.

docs/linear_logprob.md says how large the chunks are, and why. Nothing here waits for the GPU.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from . import _abi
from ._library import library
from ._tensors import DTYPE_CODES, address, dense_last_dim, refuse_capture

# A chunk has as many logits as this (512 MiB) or fewer, of as many rows as fit with MIN_VOCAB entries of the
# vocabulary, a multiple of 8.
MAX_LOGITS = 1 << 27
MIN_VOCAB = 4096

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def require_products(dtype: torch.dtype) -> None:
    """Raises where torch has no products of the type with float32 results."""
    if dtype not in _DTYPES:
        supported = ", ".join(map(str, _DTYPES))
        raise NotImplementedError(f"on CUDA, hidden and weight must be one of {supported}, got {dtype}")
    if dtype != torch.float32 and "dtype_out" not in torch.ops.aten.addmm.overloads():
        raise NotImplementedError(
            f"on CUDA, linear_logprob of {dtype} needs torch 2.8 or later, got {torch.__version__}"
        )


@torch.no_grad()
def forward(hidden, weight, bias, rows, targets, temperature, softcap, logprob, entropy, lse) -> None:
    """Writes logprob, entropy and lse, float32 [M] and contiguous, of operands that have been checked."""
    for x in (logprob, entropy, lse):
        x.zero_()  # for targets that are ignored
    chunks = _Chunks(hidden, weight, bias, rows, targets, temperature, softcap, logprob, entropy, lse)
    for _ in chunks:
        library.dualkv_linear_logprob_chunk_forward(ctypes.byref(chunks.params))


@torch.no_grad()
def backward(
    dlogprob,
    dentropy,
    hidden,
    weight,
    bias,
    rows,
    targets,
    entropy,
    lse,
    temperature,
    softcap,
    dhidden,
    dweight,
    dbias,
) -> None:
    """Writes dhidden, dweight and dbias, those that are not None."""
    if dhidden is dweight is dbias is None:
        return
    chunks = _Chunks(hidden, weight, bias, rows, targets, temperature, softcap, None, entropy, lse)
    params = _abi.dualkv_linear_logprob_chunk_backward_params(
        dlogprob=address(dlogprob), dentropy=address(dentropy)
    )
    scored = chunks.scored.rows
    wide = {"dtype": torch.float32, "device": hidden.device}
    hidden_sum = None if dhidden is None else torch.empty(chunks.hidden.shape, **wide)
    bias_sum = None if dbias is None else torch.zeros(dbias.shape, **wide)
    weight_sum = None
    if dweight is not None and chunks.row_step < len(scored):
        weight_sum = torch.empty(chunks.vocab_step, weight.shape[1], **wide)

    for part, entries, logits in chunks:
        params.forward = chunks.params
        library.dualkv_linear_logprob_chunk_backward(ctypes.byref(params))
        dlogits = logits.view(hidden.dtype)[:, : logits.shape[1]]
        if dhidden is not None:
            _product(dlogits, chunks.weight[entries], hidden_sum[part], add=entries.start > 0)
        if dweight is not None:
            to = dweight[entries] if weight_sum is None else weight_sum[: logits.shape[1]]
            _product(dlogits.t(), chunks.hidden[part], to, add=part.start > 0)
            if weight_sum is not None and part.stop == len(scored):
                dweight[entries] = to
        if dbias is not None:
            bias_sum[entries] += dlogits.sum(0, dtype=torch.float32)
        del logits, dlogits  # the last of them would keep the memory of all

    if dbias is not None:
        dbias.copy_(bias_sum)
    if dhidden is not None:
        _spread(hidden_sum.to(dhidden.dtype), scored, dhidden)


def _spread(values: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out[rows[r]] = values[r] for ascending rows, 0 in all others. Written from the side of `out`: with
    torch.use_deterministic_algorithms, what writes to indices waits for the GPU."""
    if len(rows) == 0:
        out.zero_()
        return
    every = torch.arange(len(out), device=out.device)
    places = torch.searchsorted(rows, every).clamp_(max=len(rows) - 1)
    torch.index_select(values, 0, places, out=out)
    out.masked_fill_((rows.index_select(0, places) != every).unsqueeze(1), 0)


def chunk_shape(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """Rows of a chunk, and entries of the vocabulary: a multiple of 8."""
    entries = min(max(MIN_VOCAB, MAX_LOGITS // max(num_rows, 1) // 8 * 8), -(-vocab_size // 8) * 8)
    return max(min(MAX_LOGITS // max(entries, 1), num_rows), 1), max(entries, 8)


class _Scored(NamedTuple):
    """The rows of hidden states that predict something, each once, and their targets in order."""

    rows: torch.Tensor  # int64 [R], ascending
    ranges: torch.Tensor  # int64 [R, 2]: the targets of a row, from the first to before the last
    targets: torch.Tensor  # int64 [M], by row, token and place; those that are ignored are in no range
    index: torch.Tensor  # int64 [M], the place of each

    all: bool  # rows are all there are, in order
    padded: bool  # some of the rows may have no target


def scored_rows(rows, targets, hidden_rows: int, vocab_size: int, *, counted: bool) -> _Scored:
    """rows and targets: int64 [M], on any device. Not counted, so that a GPU need not be waited for: rows
    without a target fill up those with one to min(M, T)."""
    kept = _require_in_range(rows, targets, hidden_rows, vocab_size)
    order = torch.where(kept, rows * vocab_size + targets, hidden_rows * vocab_size)
    order, index = torch.sort(order, stable=True)
    by_row = torch.div(order, max(vocab_size, 1), rounding_mode="floor")
    if counted:
        scored, counts = torch.unique_consecutive(by_row[: int(kept.sum())], return_counts=True)
        end = counts.cumsum(0)
        begin = end - counts
    else:
        every = torch.arange(hidden_rows, device=rows.device)
        begin, end = (torch.searchsorted(by_row, every, right=right) for right in (False, True))
        first = torch.sort((begin == end).to(torch.int8), stable=True).indices[: len(rows)]
        scored = torch.sort(first).values
        begin, end = begin[scored], end[scored]
    ranges = torch.stack([begin, end], dim=1)
    complete = counted and len(scored) == hidden_rows
    return _Scored(scored, ranges, targets[index], index, all=complete, padded=not counted)


def _require_in_range(rows, targets, hidden_rows: int, vocab_size: int) -> torch.Tensor:
    """Which targets count, bool [M]: those that are not ignored. On a GPU also those out of range do not, and
    an assertion of the device fails."""
    kept = targets != _abi.IGNORE_TARGET
    no_row = (rows < 0) | (rows >= hidden_rows)
    no_target = kept & ((targets < 0) | (targets >= vocab_size))
    ignoring = f", or {_abi.IGNORE_TARGET} to ignore it"
    for name, x, wrong, most, but in (
        ("rows", rows, no_row, hidden_rows - 1, ""),
        ("targets", targets, no_target, vocab_size - 1, ignoring),
    ):
        if rows.is_cuda:
            torch._assert_async(~wrong.any(), f"{name} must be 0 to {most}{but}")
        elif wrong.any():
            m = int(wrong.nonzero()[0, 0])
            raise ValueError(f"{name}[{m}] must be 0 to {most}{but}, got {int(x[m])}")
    return kept & ~(no_row | no_target)


def _on_device(scored: _Scored, device: torch.device) -> _Scored:
    """Copied from the CPU, through pinned memory that torch keeps until it has been read."""
    if scored.rows.device == device:
        return scored
    refuse_capture("it would keep addresses on the CPU; give linear_logprob rows and targets on CUDA")
    tensors = scored[:4]
    sizes = [x.numel() for x in tensors]
    pinned = torch.empty(sum(sizes), dtype=torch.int64, device="cpu", pin_memory=True)
    torch.cat([x.flatten() for x in tensors], out=pinned)
    rows, ranges, targets, index = pinned.to(device, non_blocking=True).split(sizes)
    return scored._replace(rows=rows, ranges=ranges.view(-1, 2), targets=targets, index=index)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    """out = a @ b or, with add, out += a @ b; out may be float32 where a and b are not."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


class _Chunks:
    """The logits of a call, chunk by chunk, and the parameters that the kernels take for each.

    Iterating multiplies: yields (rows of `hidden`, entries of the vocabulary, logits), slices and float32
    [R, entries], which the next chunk overwrites. All rows of some entries follow each other.
    """

    def __init__(self, hidden, weight, bias, rows, targets, temperature, softcap, logprob, entropy, lse):
        counted = not rows.is_cuda
        scored = scored_rows(rows, targets, len(hidden), len(weight), counted=counted)
        self.scored = scored = _on_device(scored, hidden.device)
        if scored.all:
            self.hidden = dense_last_dim(hidden)
        else:
            self.hidden = hidden.index_select(0, scored.rows)
        if scored.padded:  # what a row without targets holds, NaN even, adds nothing
            self.hidden.masked_fill_(scored.ranges[:, :1] == scored.ranges[:, 1:], 0)
        self.weight = dense_last_dim(weight)
        self.row_step, self.vocab_step = chunk_shape(len(scored.rows), len(weight))
        self._statistics = torch.empty(len(scored.rows), 3, dtype=torch.float32, device=hidden.device)
        bias = None if bias is None else bias.contiguous()
        self._kept = bias, logprob, entropy, lse
        self.params = _abi.dualkv_linear_logprob_chunk_params(
            device=_abi.CUDA,
            dtype=DTYPE_CODES[hidden.dtype],
            vocab_size=len(weight),
            logits_row_stride=self.vocab_step,
            bias=address(bias),
            temperature=temperature,
            softcap=softcap,
            targets=address(scored.targets),
            target_index=address(scored.index),
            logprob=address(logprob),
            entropy=address(entropy),
            lse=address(lse),
            stream=torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else None,
        )

    def __iter__(self):
        rows, vocab_size = len(self.hidden), len(self.weight)
        shape = min(self.row_step, rows), self.vocab_step
        buffer = torch.empty(shape, dtype=torch.float32, device=self.hidden.device)
        # At least one chunk: the library checks the options of a call without rows too.
        for begin in range(0, max(vocab_size, 1), self.vocab_step):
            entries = slice(begin, min(begin + self.vocab_step, vocab_size))
            for first in range(0, max(rows, 1), self.row_step):
                part = slice(first, min(first + self.row_step, rows))
                logits = buffer[: part.stop - part.start, : entries.stop - entries.start]
                _product(self.hidden[part], self.weight[entries].t(), logits)
                self._set_params(part, entries, logits)
                yield part, entries, logits

    def _set_params(self, part: slice, entries: slice, logits: torch.Tensor) -> None:
        params = self.params
        params.num_rows, params.vocab_count = logits.shape
        params.vocab_begin = entries.start
        params.logits = address(logits)
        params.target_ranges = address(self.scored.ranges[part])
        params.statistics = address(self._statistics[part])
