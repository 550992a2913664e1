"""Checks of tensor arguments, and tensors as the C library takes them."""

from __future__ import annotations

import ctypes
import math
import operator
import sys

import numpy as np
import torch

from . import _abi

DTYPE_CODES = {
    torch.float64: _abi.FLOAT64,
    torch.float32: _abi.FLOAT32,
    torch.bfloat16: _abi.BFLOAT16,
    torch.float16: _abi.FLOAT16,
}

# All values of these are int64 values too; not so of uint64.
INTEGER_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of sums and statistics (log-sum-exp, log-probs) for inputs of a type: float64 or float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_for_autocast(*tensors):
    """The tensors (or None) as an operation under torch.autocast takes them: as torch's own matrix products,
    in the autocast type, and float64 as it is."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x if x is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)
        for x in tensors
    )


def number(x, name: str) -> float:
    """x as a float. Tensors are refused: they would seem to get a gradient; and booleans, which stand for nothing
    but a mistake in the order of arguments."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return x
    if isinstance(x, (torch.Tensor, str, bytes, bool)) or not hasattr(x, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    return float(x)


def integer(x, name: str, least: int | None = None) -> int:
    """x as an integer that the C library can take, and no less than `least`."""
    try:
        value = x if isinstance(x, int) else operator.index(x)  # which would fix a length for torch.compile
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(x).__name__}") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be an integer of 64 bits, got {value}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return value


def require_bool(x, name: str) -> None:
    """A string or a number is refused: "false" would be true."""
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be a bool, got {type(x).__name__}")


def require_tensors(**tensors) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def require_list(values, name: str, item: str) -> None:
    """Anything with a length. A generator is refused: the caller's next loop would find it empty."""
    if not hasattr(values, "__len__"):
        raise TypeError(f"{name} must be a list with an entry for each {item}, got {type(values).__name__}")


def require_dimensions(x: torch.Tensor, name: str, dimensions: str) -> None:
    """dimensions, e.g. "[T, H, D]": what the tensor has to have as many of."""
    expected = dimensions.count(",") + 1
    if x.dim() != expected:
        raise ValueError(f"{name} must be {dimensions}, {expected}-dimensional, got shape {list(x.shape)}")


def require_mask(mask: torch.Tensor, name: str) -> None:
    """0 and 1 (or booleans), so that no labels, weights or NaN count as kept. Checks values on the CPU alone:
    those on a GPU would have to be waited for."""
    if mask.dtype == torch.bool or mask.device.type != "cpu":
        return
    wrong = ((mask != 0) & (mask != 1)).nonzero()
    if len(wrong) > 0:
        place = wrong[0].tolist()
        where = "".join(f"[{index}]" for index in place)
        raise ValueError(
            f"{name}{where} must be 0 or 1, got {mask[tuple(place)].item():g}; "
            "labels are no mask, labels != -100 is one"
        )


# The checks that follow run in every call: their messages are put together only where one fails.


def require_same_dtype(**tensors) -> None:
    """All of one of the supported floating point types."""
    first, same = _compare([x.dtype for x in tensors.values() if x is not None])
    if same and first in DTYPE_CODES:
        return
    names, listing = _listing(tensors, lambda x: x.dtype)
    if not same:
        raise TypeError(f"{names} must have the same dtype, got {listing}")
    supported = ", ".join(str(dtype) for dtype in DTYPE_CODES)
    raise TypeError(f"{names} must be one of {supported}, got {listing}")


def require_same_shape(**tensors) -> None:
    _, same = _compare([x.shape for x in tensors.values() if x is not None])
    if not same:
        names, listing = _listing(tensors, lambda x: list(x.shape))
        raise ValueError(f"{names} must have the same shape, got {listing}")


def require_same_device(**tensors) -> None:
    _, same = _compare([x.device for x in tensors.values() if x is not None])
    if not same:
        names, listing = _listing(tensors, lambda x: x.device)
        raise ValueError(f"{names} must be on the same device, got {listing}")


def _compare(values: list) -> tuple:
    """The first value, and whether all are equal to it."""
    first = values[0]
    return first, all(value == first for value in values)


def _listing(tensors: dict, describe) -> tuple[str, str]:
    """ "q, k" and "q torch.float32, k torch.float16"."""
    present = {name: describe(x) for name, x in tensors.items() if x is not None}
    return ", ".join(present), ", ".join(f"{name} {value}" for name, value in present.items())


def dense_last_dim(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its last dimension has a stride other than 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def aligned_heads(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim], copied only if CUDA kernels, which read 16 bytes at a time, cannot read it
    where it lies."""
    row, head, dim = x.stride()
    if x.data_ptr() % 16 == 0 and dim == 1:
        unit = 16 // x.element_size()
        rows_fit = (row > 0 and row % unit == 0) or x.shape[0] <= 1
        if rows_fit and ((head > 0 and head % unit == 0) or x.shape[1] <= 1):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def rows_of_heads(x: torch.Tensor) -> _abi.dualkv_tensor:
    """x [rows, heads, head_dim] for the C library; the caller keeps x alive."""
    return _abi.dualkv_tensor(x.data_ptr(), x.stride(0), x.stride(1))


def address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def require_choice(name: str, value, choices: tuple) -> None:
    if value not in choices:
        listing = ", ".join("None" if choice is None else f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be one of {listing}, got {value!r}")


def require_range(name: str, value, low: float, high: float = sys.float_info.max) -> None:
    if not low <= number(value, name) <= high:
        bounds = {math.inf: f"at least {low:g}", sys.float_info.max: f"at least {low:g} and finite"}
        raise ValueError(f"{name} must be {bounds.get(high, f'{low:g} to {high:g}')}, got {value:g}")


def savable(x: torch.Tensor) -> torch.Tensor:
    """x, copied if it was made in inference mode: autograd cannot save such a tensor."""
    if torch.compiler.is_compiling() or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def array_tensor(values, name: str) -> torch.Tensor:
    """A tensor as it is; an array of numbers, of any strides and byte order, as a CPU tensor of its own."""
    if isinstance(values, torch.Tensor):
        return values
    array = np.asarray(values)
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    except TypeError as error:
        raise TypeError(
            f"{name} must be an array of numbers, got {array.dtype} of shape {list(array.shape)}"
        ) from error


def int64_vector(values, name: str) -> torch.Tensor:
    """A list, tensor or array of integers as an int64 CPU tensor [n]."""
    if isinstance(values, torch.Tensor) or hasattr(values, "tolist"):
        values = array_tensor(values, name)
        if values.dim() == 1 and values.numel() == 0:  # without entries a tensor's type says nothing
            return torch.empty(0, dtype=torch.int64, device="cpu")
        if values.dtype not in INTEGER_DTYPES or values.dim() != 1:
            raise TypeError(
                f"{name} must be a vector of integers, got {values.dtype} of shape {list(values.shape)}"
            )
        return values.to("cpu", torch.int64)
    try:
        values = list(values)
        refuse_bools(values)
        return torch.tensor(list(map(operator.index, values)), dtype=torch.int64, device="cpu")
    except TypeError as error:
        raise TypeError(f"{name} must be a list of integers: {error}") from error
    except (OverflowError, RuntimeError, ValueError) as error:  # depends on the version of torch
        raise ValueError(f"{name} must be a list of integers of 64 bits: {error}") from error


def refuse_bools(values: list) -> None:
    """Python takes them for integers; in a list of ids or lengths they are a mask by mistake."""
    if bool in map(type, values):
        raise TypeError("it has an entry of type bool")


def length_vector(values, name: str) -> torch.Tensor:
    """A list, tensor or array of integers >= 0 as an int64 CPU tensor [n]."""
    lengths = int64_vector(values, name)
    if len(lengths) > 0 and lengths.min() < 0:
        place = int(lengths.argmin())
        raise ValueError(f"{name}[{place}] must be >= 0, got {int(lengths[place])}")
    return lengths


def group_lengths(prompt_lengths, response_lengths) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lengths of groups as the C library takes them: of prompts [G], numbers of responses [G], and lengths of
    all responses, group by group."""
    prompts = length_vector(prompt_lengths, "prompt_lengths")
    responses = [int64_vector(group, f"response_lengths[{g}]") for g, group in enumerate(response_lengths)]
    if len(prompts) != len(responses):
        raise ValueError(
            "prompt_lengths and response_lengths must have as many groups, "
            f"got {len(prompts)} and {len(responses)}"
        )
    counts = int64_vector([len(group) for group in responses], "response_counts")
    lengths = torch.cat(responses) if responses else counts
    if len(lengths) > 0 and lengths.min() < 0:
        for g, group in enumerate(responses):
            length_vector(group, f"response_lengths[{g}]")  # raises
    return prompts, counts, lengths


def copy_int64(source: int | bytes | None, count: int) -> torch.Tensor:
    """An int64 tensor [count] with a copy of the values in bytes or at an address."""
    values = torch.empty(count, dtype=torch.int64, device="cpu")
    if count > 0:
        ctypes.memmove(values.data_ptr(), source, 8 * count)
    return values


def refuse_capture(advice: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a CUDA graph is being captured: {advice}")
