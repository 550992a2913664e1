"""dualkv.linear_logprob: log-probabilities of target tokens from hidden states, without holding the logits.

`linear_logprob` checks its arguments and calls the autograd function around the operators
dualkv::linear_logprob_forward and dualkv::linear_logprob_backward, which call the C functions of the same
names.
"""

from __future__ import annotations

import ctypes

import torch

from . import _abi, logprob_chunks
from ._gradients import gradients_of
from ._library import library
from ._tensors import (
    DTYPE_CODES,
    INTEGER_DTYPES,
    accumulation_dtype,
    address,
    cast_for_autocast,
    dense_last_dim,
    number,
    require_dimensions,
    require_same_device,
    require_same_dtype,
    require_same_shape,
    require_tensors,
    savable,
)


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the targets, and entropies of the distributions that they are drawn from.

    The logits of target m are hidden[rows[m]] @ weight.T + bias, softcapped, divided by the temperature. The
    M x V logits are never held.

    Args:
        hidden: hidden states [T, C].
        weight: weight of the language model's head [V, C]. hidden, weight and bias are float64, float32,
            bfloat16 or float16, all the same; under torch.autocast they are cast to its type first.
        rows: integers [M], row of `hidden` that predicts each target, 0 to T - 1. Rows may repeat: the
            prompt's last row predicts the first token of each response.
        targets: integers [M], 0 to V - 1, or -100: ignored, log-probability and entropy 0. With `hidden` on
            CUDA, rows and targets may stay on the CPU, which is faster: each row with a target is then
            multiplied once, and values out of range raise. On CUDA they are not waited for: min(M, T) rows
            are multiplied, and values out of range fail an assertion of the device.
        temperature: > 0. The sampling temperature; log-probability and entropy are of the tempered
            distribution.
        softcap: c > 0 makes the logits c * tanh(logit / c), before the temperature; 0 does not.
        bias: [V], or None.

    Returns:
        logp [M] and entropy [M], in nats; float32, and float64 for float64 inputs. Both are differentiable,
        once, with respect to hidden, weight and bias. Only the gradients that are needed are computed.

    Raises:
        ValueError: shapes, devices or values that do not fit; the message names the argument and the values.
        TypeError: hidden, weight and bias of different or unsupported types, rows or targets no integers.
        NotImplementedError: there are no kernels for these tensors. On CUDA there are, in a build that has
            found nvcc, for GPUs of compute capability 9.0, in float32, and in bfloat16 and float16 with
            torch 2.8 or later.
        RuntimeError: a CUDA graph is being captured and rows and targets are on the CPU.
    """
    require_tensors(hidden=hidden, weight=weight, rows=rows, targets=targets)
    if bias is not None:
        require_tensors(bias=bias)
    hidden, weight, bias = cast_for_autocast(hidden, weight, bias)
    require_same_dtype(hidden=hidden, weight=weight, bias=bias)
    _require_devices(hidden, weight, bias, rows, targets)
    _require_shapes(hidden, weight, bias, rows, targets)
    rows, targets = rows.to(torch.int64), targets.to(torch.int64)
    temperature, softcap = number(temperature, "temperature"), number(softcap, "softcap")
    return _LinearLogprob.apply(hidden, weight, bias, savable(rows), savable(targets), temperature, softcap)


def _require_devices(hidden, weight, bias, rows, targets) -> None:
    on_host = hidden.is_cuda and rows.device.type == targets.device.type == "cpu"
    indices = {} if on_host else {"rows": rows, "targets": targets}
    require_same_device(hidden=hidden, weight=weight, bias=bias, **indices)


def _require_shapes(hidden, weight, bias, rows, targets) -> None:
    require_dimensions(hidden, "hidden", "[T, C]")
    require_dimensions(weight, "weight", "[V, C]")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden and weight must have as many columns, got {hidden.shape[1]} and {weight.shape[1]}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V], [{weight.shape[0]}], got shape {list(bias.shape)}")
    for name, x in (("rows", rows), ("targets", targets)):
        require_dimensions(x, name, "[M]")
        if x.dtype not in INTEGER_DTYPES:
            raise TypeError(f"{name} must be integers, got {x.dtype}")
    if rows.shape != targets.shape:
        raise ValueError(
            f"rows and targets must have as many entries, got {rows.shape[0]} and {targets.shape[0]}"
        )


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, targets, temperature, softcap):
        logprob, entropy, lse = torch.ops.dualkv.linear_logprob_forward(
            hidden, weight, bias, rows, targets, temperature, softcap
        )
        ctx.save_for_backward(hidden, weight, bias, rows, targets, entropy, lse)
        ctx.options = (temperature, softcap)
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx, dlogprob, dentropy):
        needed = ctx.needs_input_grad[:3]
        gradients = gradients_of(
            "linear_logprob", dlogprob, dentropy, *ctx.saved_tensors, *ctx.options, *needed
        )
        gradients = [gradient if need else None for gradient, need in zip(gradients, needed)]
        return (*gradients, None, None, None, None)


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor rows, Tensor targets"
torch.library.define(
    "dualkv::linear_logprob_forward",
    f"({_INPUTS}, float temperature, float softcap) -> (Tensor logprob, Tensor entropy, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "dualkv::linear_logprob_backward",
    f"(Tensor? dlogprob, Tensor? dentropy, {_INPUTS}, Tensor entropy, Tensor lse, float temperature, "
    "float softcap, bool need_dhidden, bool need_dweight, bool need_dbias) "
    "-> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.register_fake("dualkv::linear_logprob_forward")
def _new_results(hidden, weight, bias, rows, targets, temperature, softcap):
    """logprob, entropy and lse, each [M], not yet written."""
    dtype = accumulation_dtype(hidden.dtype)
    return tuple(hidden.new_empty(rows.shape, dtype=dtype) for _ in range(3))


@torch.library.register_fake("dualkv::linear_logprob_backward")
def _new_gradients(
    dlogprob, dentropy, hidden, weight, bias, rows, targets, entropy, lse, temperature, softcap, *needed
):
    """Unwritten dhidden, dweight and dbias; [0] if not needed, since an operator's results are never None."""
    inputs = (hidden, weight, bias)
    return tuple(hidden.new_empty(x.shape if need else 0) for x, need in zip(inputs, needed))


@torch.library.impl("dualkv::linear_logprob_forward", "cpu")
def _linear_logprob_forward(hidden, weight, bias, rows, targets, temperature, softcap):
    logprob, entropy, lse = _new_results(hidden, weight, bias, rows, targets, temperature, softcap)
    call = _Call(hidden, weight, bias, rows, targets, temperature, softcap, entropy, lse)
    call.params.logprob = address(logprob)
    library.dualkv_linear_logprob_forward(ctypes.byref(call.params))
    return logprob, entropy, lse


@torch.library.impl("dualkv::linear_logprob_backward", "cpu")
def _linear_logprob_backward(
    dlogprob, dentropy, hidden, weight, bias, rows, targets, entropy, lse, temperature, softcap, *needed
):
    gradients = _new_gradients(
        dlogprob, dentropy, hidden, weight, bias, rows, targets, entropy, lse, temperature, softcap, *needed
    )
    call = _Call(hidden, weight, bias, rows, targets, temperature, softcap, entropy, lse)
    require_same_shape(lse=lse, dlogprob=dlogprob, dentropy=dentropy)
    dlogprob, dentropy = (None if x is None else x.to(lse.dtype).contiguous() for x in (dlogprob, dentropy))
    dhidden, dweight, dbias = (address(x) if need else None for x, need in zip(gradients, needed))
    params = _abi.dualkv_linear_logprob_backward_params(
        forward=call.params,
        dlogprob=address(dlogprob),
        dentropy=address(dentropy),
        dhidden=dhidden,
        dweight=dweight,
        dbias=dbias,
    )
    library.dualkv_linear_logprob_backward(ctypes.byref(params))
    return gradients


@torch.library.impl("dualkv::linear_logprob_forward", "cuda")
def _linear_logprob_forward_on_cuda(hidden, weight, bias, rows, targets, temperature, softcap):
    logprob, entropy, lse = _new_results(hidden, weight, bias, rows, targets, temperature, softcap)
    _require_operands(hidden, weight, bias, rows, targets, entropy, lse)
    logprob_chunks.require_products(hidden.dtype)
    with torch.cuda.device(hidden.device):
        logprob_chunks.forward(
            hidden, weight, bias, rows, targets, temperature, softcap, logprob, entropy, lse
        )
    return logprob, entropy, lse


@torch.library.impl("dualkv::linear_logprob_backward", "cuda")
def _linear_logprob_backward_on_cuda(
    dlogprob, dentropy, hidden, weight, bias, rows, targets, entropy, lse, temperature, softcap, *needed
):
    inputs = (hidden, weight, bias, rows, targets)
    gradients = _new_gradients(dlogprob, dentropy, *inputs, entropy, lse, temperature, softcap, *needed)
    _require_operands(*inputs, entropy, lse)
    require_same_shape(lse=lse, dlogprob=dlogprob, dentropy=dentropy)
    logprob_chunks.require_products(hidden.dtype)
    upstream = (None if x is None else x.to(lse.dtype).contiguous() for x in (dlogprob, dentropy))
    wanted = (x if need else None for x, need in zip(gradients, needed))
    with torch.cuda.device(hidden.device):
        logprob_chunks.backward(
            *upstream, *inputs, entropy.contiguous(), lse.contiguous(), temperature, softcap, *wanted
        )
    return gradients


def _require_operands(hidden, weight, bias, rows, targets, entropy, lse) -> None:
    """An operator may be called without `linear_logprob`, and must not read past a tensor for it."""
    require_same_dtype(hidden=hidden, weight=weight, bias=bias)
    _require_devices(hidden, weight, bias, rows, targets)
    require_same_device(hidden=hidden, entropy=entropy, lse=lse)
    _require_shapes(hidden, weight, bias, rows, targets)
    wide = accumulation_dtype(hidden.dtype)
    for name, x, dtype in (
        ("rows", rows, torch.int64),
        ("targets", targets, torch.int64),
        ("entropy", entropy, wide),
        ("lse", lse, wide),
    ):
        if x.dtype != dtype or x.shape != rows.shape:
            raise ValueError(f"{name} must be {dtype} {list(rows.shape)}, got {x.dtype} {list(x.shape)}")


class _Call:
    """Parameters of a call to the C library, with what they point to kept alive."""

    def __init__(self, hidden, weight, bias, rows, targets, temperature, softcap, entropy, lse):
        _require_operands(hidden, weight, bias, rows, targets, entropy, lse)
        hidden, weight = dense_last_dim(hidden), dense_last_dim(weight)
        bias = None if bias is None else bias.contiguous()
        rows, targets, entropy, lse = (x.contiguous() for x in (rows, targets, entropy, lse))
        self._kept = hidden, weight, bias, rows, targets, entropy, lse
        self.params = _abi.dualkv_linear_logprob_params(
            device=_abi.CPU,
            dtype=DTYPE_CODES[hidden.dtype],
            num_threads=torch.get_num_threads(),
            hidden_rows=hidden.shape[0],
            hidden_dim=hidden.shape[1],
            vocab_size=weight.shape[0],
            num_targets=rows.shape[0],
            hidden=address(hidden),
            hidden_row_stride=hidden.stride(0),
            weight=address(weight),
            weight_row_stride=weight.stride(0),
            bias=address(bias),
            rows=address(rows),
            targets=address(targets),
            temperature=temperature,
            softcap=softcap,
            entropy=address(entropy),
            lse=address(lse),
        )
