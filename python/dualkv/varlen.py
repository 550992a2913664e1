"""dualkv.flash_attn_dualkv_varlen_func: attention over one group with the prompt's keys and values apart."""

from __future__ import annotations

import torch

from ._tensors import (
    cast_for_autocast,
    int64_vector,
    integer,
    number,
    require_dimensions,
    require_same_device,
    require_same_dtype,
    require_tensors,
)
from .attention import attend
from .forest import SegmentForest


def flash_attn_dualkv_varlen_func(
    q: torch.Tensor,
    k_context: torch.Tensor,
    v_context: torch.Tensor,
    k_decoded: torch.Tensor,
    v_decoded: torch.Tensor,
    cu_seqlens_q,
    cu_seqlens_k_decoded,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Attention of N responses to one prompt, with the keys and values of the prompt and of the responses in
    tensors of their own.

    Each sequence's keys are the prompt's and its own; its queries are aligned to the end of its keys. Two
    geometries are served:

    - q holds the rows of the responses: cu_seqlens_q equals cu_seqlens_k_decoded.
    - q holds the rows of the prompt, then those of the responses: the first sequence's queries are the
      prompt's and its own, cu_seqlens_q is [0, P + R0, P + R0 + R1, ...].

    torch.compile takes it with fullgraph=True; before torch 2.11 that needs
    torch._dynamo.config.capture_dynamic_output_shape_ops = True, as what it does depends on the offsets.

    Gradients have the same bits in every run if torch.use_deterministic_algorithms(True) is set when the backward
    is called.

    New code should use `dualkv.attention`, which takes any number of groups at once and copies no keys.

    Args:
        q: queries [Tq, H, D]; rows past the last sequence get output and gradient 0.
        k_context: keys of the prompt [P, Hk, D].
        v_context: values of the prompt [P, Hk, D].
        k_decoded: keys of the responses [Tk, Hk, D]; rows past the last sequence take no part.
        v_decoded: values of the responses [Tk, Hk, D].
        cu_seqlens_q: [N + 1], offsets of the sequences' rows in q, from 0 on: a tensor of any integer type
            (read on the host, so one on a GPU is waited for), an array or a list.
        cu_seqlens_k_decoded: [N + 1], offsets of the responses' rows in k_decoded and v_decoded.
        max_seqlen_q: no less than the longest sequence of q.
        context_seqlen: P.
        max_seqlen_k_decoded: no less than the longest response.
        softmax_scale: scores are softmax_scale * q.k, D ** -0.5 if None. Not 0: flash_attn's functions have
            dropout_p in its place.
        causal: must be True.

    Returns:
        out [Tq, H, D], differentiable with respect to all five tensors.

    Raises:
        ValueError: any other geometry, or lengths that contradict each other or the tensors; the message
            names the argument and the values.
        TypeError: tensors of different or unsupported types, offsets no integers.
        NotImplementedError: as `dualkv.attention`.
        RuntimeError: a CUDA graph is being captured: `dualkv.attention` with a `dualkv.DevicePlan` can be.
    """
    if not causal:
        raise ValueError("causal must be True: attention over shared prefixes is causal, got False")
    if softmax_scale is not None and number(softmax_scale, "softmax_scale") == 0:
        raise ValueError(f"softmax_scale must not be 0, got {softmax_scale}: there is no dropout_p before it")
    names = ("q", "k_context", "v_context", "k_decoded", "v_decoded")
    tensors = (q, k_context, v_context, k_decoded, v_decoded)
    require_tensors(**dict(zip(names, tensors)))
    tensors = q, k_context, v_context, k_decoded, v_decoded = cast_for_autocast(*tensors)
    require_same_dtype(**dict(zip(names, tensors)))
    require_same_device(**dict(zip(names, tensors)))
    _require_shapes(*tensors, integer(context_seqlen, "context_seqlen"))
    segments, query_row_begin = torch.ops.dualkv.varlen_segments(
        int64_vector(cu_seqlens_q, "cu_seqlens_q"),
        int64_vector(cu_seqlens_k_decoded, "cu_seqlens_k_decoded"),
        q.shape[0],
        k_decoded.shape[0],
        integer(max_seqlen_q, "max_seqlen_q"),
        k_context.shape[0],
        integer(max_seqlen_k_decoded, "max_seqlen_k_decoded"),
    )
    out, _ = attend(
        q,
        torch.cat([k_context, k_decoded]),
        torch.cat([v_context, v_decoded]),
        segments,
        scale=softmax_scale,
        window_left=None,
        softcap=0.0,
        sinks=None,
        query_row_begin=query_row_begin,
        deterministic=False,
    )
    return out


# An operator, as torch.compile cannot look at offsets.
torch.library.define(
    "dualkv::varlen_segments",
    "(Tensor cu_seqlens_q, Tensor cu_seqlens_k_decoded, SymInt q_rows, SymInt k_rows, SymInt max_seqlen_q, "
    "SymInt context_seqlen, SymInt max_seqlen_k_decoded) -> (Tensor segments, SymInt query_row_begin)",
    tags=[torch.Tag.pt2_compliant_tag],
)


@torch.library.impl("dualkv::varlen_segments", "cpu")
def _varlen_segments(
    cu_seqlens_q, cu_seqlens_k_decoded, q_rows, k_rows, max_seqlen_q, context_seqlen, max_seqlen_k_decoded
) -> tuple[torch.Tensor, int]:
    """Segments [1 + N, 2] of the forest [prompt, responses], and the row of it that is the first row of q."""
    queries = _lengths(cu_seqlens_q, "cu_seqlens_q", q_rows, "q", max_seqlen_q, "max_seqlen_q")
    keys = _lengths(
        cu_seqlens_k_decoded,
        "cu_seqlens_k_decoded",
        k_rows,
        "k_decoded",
        max_seqlen_k_decoded,
        "max_seqlen_k_decoded",
    )
    segments = SegmentForest.from_groups([context_seqlen], [keys]).segments
    if queries == keys:
        return segments, context_seqlen
    if keys and queries == [context_seqlen + keys[0], *keys[1:]]:
        return segments, 0
    raise ValueError(
        "cu_seqlens_q and cu_seqlens_k_decoded must describe sequences of the same lengths (q holds the "
        "responses' rows), or the first sequence of q must be longer by context_seqlen (q holds the prompt's "
        f"rows too); got lengths {queries} and {keys} with context_seqlen {context_seqlen}"
    )


@torch.library.register_fake("dualkv::varlen_segments")
def _unknown_segments(cu_seqlens_q, cu_seqlens_k_decoded, *_):
    query_row_begin = torch.library.get_ctx().new_dynamic_size()
    return cu_seqlens_k_decoded.new_empty((cu_seqlens_k_decoded.shape[0], 2)), query_row_begin


def _require_shapes(q, k_context, v_context, k_decoded, v_decoded, context_seqlen) -> None:
    require_dimensions(q, "q", "[Tq, H, D]")
    for name, x in (("k_context", k_context), ("v_context", v_context)):
        require_dimensions(x, name, "[P, Hk, D]")
        if x.shape[0] != context_seqlen:
            raise ValueError(
                f"context_seqlen must be the rows of {name}, got {context_seqlen} and {x.shape[0]}"
            )
    for name, x in (("k_decoded", k_decoded), ("v_decoded", v_decoded)):
        require_dimensions(x, name, "[Tk, Hk, D]")
        if x.shape[1:] != k_context.shape[1:]:
            raise ValueError(
                f"k_context and {name} must have the same heads and head dim, "
                f"got {list(k_context.shape[1:])} and {list(x.shape[1:])}"
            )
    for k, v, name in ((k_context, v_context, "context"), (k_decoded, v_decoded, "decoded")):
        if k.shape != v.shape:
            raise ValueError(
                f"k_{name} and v_{name} must have the same shape, got {list(k.shape)} and {list(v.shape)}"
            )


def _lengths(
    offsets: torch.Tensor, name: str, rows: int, rows_name: str, max_seqlen: int, max_name: str
) -> list[int]:
    """Lengths of the sequences between consecutive offsets."""
    if len(offsets) == 0 or offsets[0] != 0:
        raise ValueError(f"{name} must start with 0, got {offsets.tolist()}")
    lengths = offsets.diff().tolist()
    if min(lengths, default=0) < 0:
        raise ValueError(f"{name} must not decrease, got {offsets.tolist()}")
    if offsets[-1] > rows:
        raise ValueError(f"{name} must end within the rows of {rows_name}, got {offsets[-1]} and {rows}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"{max_name} must be at least the longest sequence of {name}, got {max_seqlen} and {max(lengths)}"
        )
    return lengths
