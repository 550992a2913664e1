"""dualkv.attention: attention over a packed batch whose sequences share prefixes.

`attention` checks its arguments and calls `attend`; that is the autograd function around the operators
dualkv::attention_forward and dualkv::attention_backward, which call the C functions of the same names.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from . import _abi
from ._gradients import gradients_of
from ._library import library
from ._tensors import (
    DTYPE_CODES,
    accumulation_dtype,
    address,
    aligned_heads,
    cast_for_autocast,
    dense_last_dim,
    number,
    require_bool,
    require_dimensions,
    require_same_device,
    require_same_dtype,
    require_same_shape,
    require_tensors,
    rows_of_heads,
    savable,
)
from .device_plan import DevicePlan, plan_on_device
from .forest import SegmentForest, plan, window_argument


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forest: SegmentForest | DevicePlan,
    *,
    scale: float | None = None,
    window_left: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
):
    """Causal attention in which a row sees its own segment up to itself and all of its segment's ancestors.

    A row's result does not depend on the rest of the batch: it has the same bits wherever its sequence is
    packed, and alone. (A NaN or an infinity, though, can reach rows that share a tile with it.)

    Args:
        q: queries [T, H, D]. T may exceed the forest's rows (padding): the rows past the last segment take no
            part, their output and their gradients are 0. D is 1 to 512.
        k: keys [T, Hk, D]; H is a multiple of Hk.
        v: values [T, Hk, D]. q, k and v are float64, float32, bfloat16 or float16, all the same; under
            torch.autocast they are cast to its type first. Any strides; a tensor that the kernels cannot read
            where it lies is copied: one whose last dimension is not dense, and on CUDA one whose rows or
            heads do not all start at multiples of 16 bytes.
        forest: the segments of the batch; or a DevicePlan, which a captured CUDA graph needs.
        scale: scores are scale * q.k, D ** -0.5 if None. May be 0 or negative.
        window_left: how many earlier positions a row sees besides itself; None for all. A model's window of w
            tokens, which counts the token itself, is window_left = w - 1.
        softcap: c > 0 makes the scores c * tanh(score / c); 0 does not.
        sinks: [H], any floating point type: one extra logit a head, which takes part in the softmax and has
            no value.
        deterministic: asks for gradients with the same bits in every run; so does
            torch.use_deterministic_algorithms(True) when the backward is called. The CPU's always have them,
            and so have those of k, v and sinks on CUDA. That of q is there a sum of float32 numbers in any
            order otherwise; in order it takes longer, and up to 4 bytes more for each row and head.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        out [T, H, D] in q's type; with return_lse, (out, lse): lse [H, T], the natural log of the sum of
        exp(score), the sink's included, -inf for padding. It is float32, and float64 for float64 inputs: the
        backward pass recovers the probabilities from it, and a float32 lse would cost float64 gradients half
        of their digits. Both are differentiable, once. On CUDA the backward rounds the probabilities to q's
        type before it uses them, for the gradients of q and k too.

    Raises:
        ValueError: shapes, devices or values that do not fit; the message names the argument and the values.
        TypeError: q, k and v of different or unsupported types.
        NotImplementedError: there are no kernels for these tensors. On CUDA there are, in a build that has
            found nvcc, for GPUs of compute capability 9.0, bfloat16 and float16, and head dims that are
            multiples of 8 up to 128.
        RuntimeError: a CUDA graph is being captured and `forest` is no DevicePlan.
    """
    require_tensors(q=q, k=k, v=v)
    if sinks is not None:
        require_tensors(sinks=sinks)
    if not isinstance(forest, (SegmentForest, DevicePlan)):
        raise TypeError(
            f"forest must be a dualkv.SegmentForest or a dualkv.DevicePlan, got {type(forest).__name__}"
        )
    require_bool(deterministic, "deterministic")
    require_dimensions(q, "q", "[T, H, D]")
    require_dimensions(k, "k", "[T, Hk, D]")
    require_dimensions(v, "v", "[T, Hk, D]")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same number of rows, got {q.shape[0]} and {k.shape[0]}")
    out, lse = attend(
        q,
        k,
        v,
        forest.image if isinstance(forest, DevicePlan) else forest.segments,
        scale=scale,
        window_left=window_left,
        softcap=softcap,
        sinks=sinks,
        query_row_begin=0,
        deterministic=deterministic,
    )
    return (out, lse) if return_lse else out


def attend(
    q, k, v, segments, *, scale, window_left, softcap, sinks, query_row_begin, deterministic
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `attention`, of the forest's rows from `query_row_begin` on: the first row of q."""
    q, k, v = cast_for_autocast(q, k, v)
    require_same_dtype(q=q, k=k, v=v)
    require_same_device(q=q, k=k, v=v, sinks=sinks)
    _require_shapes(q.shape, k.shape, v.shape)
    if sinks is not None:
        if sinks.shape != q.shape[1:2]:
            raise ValueError(f"sinks must be [H], [{q.shape[1]}], got shape {list(sinks.shape)}")
        if not sinks.dtype.is_floating_point:
            raise TypeError(f"sinks must be floating point, got {sinks.dtype}")
        sinks = sinks.to(accumulation_dtype(q.dtype))
    if scale is None:
        scale = q.shape[2] ** -0.5
    options = (
        number(scale, "scale"),
        window_argument(window_left),
        number(softcap, "softcap"),
        query_row_begin,
    )
    return _Attention.apply(q, k, v, sinks, savable(segments), options, deterministic)


def _require_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    if k != v:
        raise ValueError(f"k and v must have the same shape, got {list(k)} and {list(v)}")
    if q[2] != k[2]:
        raise ValueError(f"q and k must have the same head dim, got {q[2]} and {k[2]}")
    if q[2] == 0:
        raise ValueError("the head dim of q must be at least 1, got 0")
    if q[1] == 0 or k[1] == 0 or q[1] % k[1] != 0:
        raise ValueError(f"the heads of q must be a multiple of the heads of k and v, got {q[1]} and {k[1]}")


class _Attention(torch.autograd.Function):
    """options: (scale, window_left, softcap, query_row_begin), as the operators take them."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, segments, options, deterministic):
        out, lse = torch.ops.dualkv.attention_forward(q, k, v, sinks, segments, *options)
        ctx.save_for_backward(q, k, v, sinks, segments, out, lse)
        ctx.options = options
        ctx.deterministic = deterministic
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, sinks, segments, out, lse = ctx.saved_tensors
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        dq, dk, dv, dsinks = gradients_of(
            "attention", dout, dlse, q, k, v, sinks, segments, out, lse, *ctx.options, ctx.deterministic
        )
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None


_OPTIONS = "float scale, SymInt window_left, float softcap, SymInt query_row_begin"
# Graphs that torch.compile captures by itself leave the operators out: they would keep the address of a plan
# that its cache may free. torch has this tag from 2.8 on.
_TAGS = [torch.Tag.pt2_compliant_tag]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _TAGS.append(torch.Tag.cudagraph_unsafe)
torch.library.define(
    "dualkv::attention_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor segments, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    "dualkv::attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor segments, Tensor out, "
    f"Tensor lse, {_OPTIONS}, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=_TAGS,
)


@torch.library.register_fake("dualkv::attention_forward")
def _new_results(q, k, v, sinks, segments, *options):
    """out [T, H, D] and lse [H, T], not yet written."""
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))


@torch.library.register_fake("dualkv::attention_backward")
def _new_gradients(dout, dlse, q, k, v, sinks, segments, out, lse, *options):
    """Unwritten dq, dk, dv and dsinks; [0] without sinks, since an operator's results are never None."""
    dsinks = lse.new_empty(0 if sinks is None else sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _attention_forward(q, k, v, sinks, segments, *options):
    out, lse = _new_results(q, k, v, sinks, segments)
    call = _Call(q, k, v, sinks, segments, out, lse, *options)
    library.dualkv_attention_forward(ctypes.byref(call.params))
    return out, lse


def _attention_backward(dout, dlse, q, k, v, sinks, segments, out, lse, *options_and_deterministic):
    *options, deterministic = options_and_deterministic
    dq, dk, dv, dsinks = _new_gradients(dout, dlse, q, k, v, sinks, segments, out, lse)
    require_same_shape(out=out, dout=dout)
    require_same_shape(lse=lse, dlse=dlse)
    dout = _readable(dout.to(q.dtype))
    dlse = None if dlse is None else dlse.to(lse.dtype).contiguous()
    call = _Call(q, k, v, sinks, segments, out, lse, *options)
    params = _abi.dualkv_attention_backward_params(
        forward=call.params,
        dout=rows_of_heads(dout),
        dlse=address(dlse),
        dq=rows_of_heads(dq),
        dk=rows_of_heads(dk),
        dv=rows_of_heads(dv),
        dsinks=None if sinks is None else address(dsinks),
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        any_plan=segments.is_cuda,  # a DevicePlan: a graph that captures the call keeps the workspace too
    )
    workspace_bytes = ctypes.c_size_t()
    library.dualkv_attention_backward_workspace(ctypes.byref(params), ctypes.byref(workspace_bytes))
    # torch aligns every allocation to at least the 64 bytes that the library asks for.
    workspace = torch.empty(workspace_bytes.value, dtype=torch.uint8, device=q.device)
    params.workspace, params.workspace_bytes = address(workspace), workspace.numel()
    library.dualkv_attention_backward(ctypes.byref(params))
    return dq, dk, dv, dsinks


# Not as decorators: before torch 2.12 those return nothing, and the functions are called below too.
torch.library.impl("dualkv::attention_forward", "cpu", _attention_forward)
torch.library.impl("dualkv::attention_backward", "cpu", _attention_backward)


@torch.library.impl("dualkv::attention_forward", "cuda")
def _attention_forward_on_cuda(q, k, v, sinks, segments, *options):
    with _cuda_device(segments, q=q, k=k, v=v, sinks=sinks):
        return _attention_forward(q, k, v, sinks, segments, *options)


@torch.library.impl("dualkv::attention_backward", "cuda")
def _attention_backward_on_cuda(dout, dlse, q, k, v, sinks, segments, out, lse, *options):
    with _cuda_device(segments, q=q, k=k, v=v, sinks=sinks, out=out, lse=lse, dout=dout, dlse=dlse):
        return _attention_backward(dout, dlse, q, k, v, sinks, segments, out, lse, *options)


_CUDA_DTYPES = (torch.bfloat16, torch.float16)


def _cuda_device(segments, q, **others) -> torch.cuda.device:
    """Makes the tensors' device the current one, on which the C library launches."""
    require_same_device(q=q, **others, forest=segments if segments.is_cuda else None)
    if q.dtype not in _CUDA_DTYPES:
        supported = " or ".join(map(str, _CUDA_DTYPES))
        raise NotImplementedError(f"on CUDA, q, k and v must be {supported}, got {q.dtype}")
    return torch.cuda.device(q.device)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x where the kernels of its device can read it."""
    return aligned_heads(x) if x.is_cuda else dense_last_dim(x)


class _Call:
    """Parameters of a call to the C library, with what they point to kept alive."""

    def __init__(self, q, k, v, sinks, segments, out, lse, scale, window_left, softcap, query_row_begin):
        q, k, v, out = _readable(q), _readable(k), _readable(v), _readable(out)
        sinks = None if sinks is None else sinks.contiguous()
        lse = lse.contiguous()
        if q.is_cuda:
            stream = torch.cuda.current_stream(q.device)
            schedule, image = plan_on_device(segments, window_left, query_row_begin, q, k, stream)
        else:
            schedule, image = plan(segments, window_left, query_row_begin), None
        layout = [None if x is None else (x.dtype, x.shape, x.stride()) for x in (q, k, v, sinks, out, lse)]
        params = _abi.dualkv_attention_params.from_buffer_copy(
            _params_of_layout(*layout, q.is_cuda, scale, softcap, query_row_begin)
        )
        params.num_threads = torch.get_num_threads()
        params.plan = schedule.address
        params.q.data, params.k.data, params.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        params.out.data, params.lse, params.sinks = out.data_ptr(), lse.data_ptr(), address(sinks)
        if image is not None:
            params.device_plan, params.device_plan_bytes = image.data_ptr(), image.numel()
            params.stream = stream.cuda_stream
        self.params = params
        self._kept = q, k, v, out, sinks, lse, schedule, image


@functools.lru_cache(maxsize=256)
def _params_of_layout(q, k, v, sinks, out, lse, is_cuda, scale, softcap, query_row_begin):
    """What the parameters of a call are but for addresses, made and checked once for all calls whose tensors
    have the same (dtype, shape, strides). An operator may be called without `attention`, and must not read
    past a tensor for it."""
    types, shapes, strides = zip(*(q, k, v, out))
    if any(dtype != q[0] for dtype in types) or q[0] not in DTYPE_CODES:
        raise TypeError(f"q, k, v and out must have the same dtype, got {', '.join(map(str, types))}")
    _require_shapes(*shapes[:3])
    (rows, heads, head_dim), wide = shapes[0], accumulation_dtype(q[0])
    if shapes[3] != shapes[0]:
        raise ValueError(f"q and out must have the same shape, got {list(shapes[0])} and {list(shapes[3])}")
    for name, x, shape in (("sinks", sinks, [heads]), ("lse", lse, [heads, rows])):
        if x is not None and (x[0] != wide or list(x[1]) != shape):
            raise ValueError(f"{name} must be {wide} {shape}, got {x[0]} {list(x[1])}")
    tensors = [_abi.dualkv_tensor(None, *stride[:2]) for stride in strides]
    return _abi.dualkv_attention_params(
        device=_abi.CUDA if is_cuda else _abi.CPU,
        dtype=DTYPE_CODES[q[0]],
        num_heads=heads,
        num_kv_heads=shapes[1][1],
        head_dim=head_dim,
        query_rows=rows,
        query_row_begin=query_row_begin,
        key_rows=shapes[1][0],
        scale=scale,
        softcap=softcap,
        q=tensors[0],
        k=tensors[1],
        v=tensors[2],
        out=tensors[3],
    )
