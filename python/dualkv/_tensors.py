"""Checks of tensor arguments, and tensors as the C library takes them."""

from __future__ import annotations

import ctypes
import operator

import torch

from . import _abi

DTYPE_CODES = {
    torch.float64: _abi.FLOAT64,
    torch.float32: _abi.FLOAT32,
    torch.bfloat16: _abi.BFLOAT16,
    torch.float16: _abi.FLOAT16,
}

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    """x as a float. Tensors are refused: they would seem to get a gradient."""
    if isinstance(x, (int, float)):
        return x
    if isinstance(x, (torch.Tensor, str, bytes)) or not hasattr(x, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    return float(x)


def require_tensors(**tensors) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def require_dimensions(x: torch.Tensor, name: str, dimensions: str) -> None:
    """dimensions, e.g. "[T, H, D]": what the tensor has to have as many of."""
    expected = dimensions.count(",") + 1
    if x.dim() != expected:
        raise ValueError(f"{name} must be {dimensions}, {expected}-dimensional, got shape {list(x.shape)}")


def require_same_dtype(**tensors) -> None:
    """All of one of the supported floating point types."""
    dtypes = {name: x.dtype for name, x in tensors.items() if x is not None}
    listing = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    first = next(iter(dtypes.values()))
    for dtype in dtypes.values():
        if dtype != first:
            raise TypeError(f"{', '.join(dtypes)} must have the same dtype, got {listing}")
    if first not in DTYPE_CODES:
        supported = ", ".join(str(dtype) for dtype in DTYPE_CODES)
        raise TypeError(f"{', '.join(dtypes)} must be one of {supported}, got {listing}")


def require_same_shape(**tensors) -> None:
    shapes = {name: list(x.shape) for name, x in tensors.items() if x is not None}
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()):
        listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{', '.join(shapes)} must have the same shape, got {listing}")


def require_same_device(**tensors) -> None:
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    first = next(iter(devices.values()))
    for device in devices.values():
        if device != first:
            listing = ", ".join(f"{name} {device}" for name, device in devices.items())
            raise ValueError(f"{', '.join(devices)} must be on the same device, got {listing}")


def dense_last_dim(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its last dimension has a stride other than 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def aligned_heads(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim], copied only if CUDA kernels, which read 16 bytes at a time, cannot read it
    where it lies."""
    taken = [stride for stride, extent in zip(x.stride()[:2], x.shape) if extent > 1]
    aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in taken)
    if aligned and x.stride(2) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def rows_of_heads(x: torch.Tensor) -> _abi.dualkv_tensor:
    """x [rows, heads, head_dim] for the C library; the caller keeps x alive."""
    return _abi.dualkv_tensor(x.data_ptr(), x.stride(0), x.stride(1))


def address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def int64_vector(values, name: str) -> torch.Tensor:
    """A list, tensor or array of integers as an int64 CPU tensor [n]."""
    if hasattr(values, "tolist"):
        values = torch.as_tensor(values)
        if values.dim() == 1 and values.numel() == 0:  # without entries a tensor's type says nothing
            return torch.empty(0, dtype=torch.int64, device="cpu")
        if values.dtype not in INTEGER_DTYPES or values.dim() != 1:
            raise TypeError(
                f"{name} must be a vector of integers, got {values.dtype} of shape {list(values.shape)}"
            )
        return values.to("cpu", torch.int64)
    try:
        return torch.tensor([operator.index(value) for value in values], dtype=torch.int64, device="cpu")
    except TypeError as error:
        raise TypeError(f"{name} must be a list of integers: {error}") from error


def copy_int64(source: int | bytes | None, count: int) -> torch.Tensor:
    """An int64 tensor [count] with a copy of the values in bytes or at an address."""
    values = torch.empty(count, dtype=torch.int64, device="cpu")
    if count > 0:
        ctypes.memmove(values.data_ptr(), source, 8 * count)
    return values


def no_cuda_kernels(operation: str, advice: str):
    """An operator's implementation for CUDA where there is none."""

    def refuse(*arguments, **options):
        raise NotImplementedError(f"{operation} has no CUDA kernels yet: {advice}")

    return refuse
