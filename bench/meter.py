"""Time, memory and failures of calls on a device, for bench/policy_update.py and bench/single_layer.py."""

from __future__ import annotations

import statistics
import time

import torch
from attention import MATMUL_SIZE, free
from mfu import NOMINAL_TFLOPS
from torch.nn.attention import SDPBackend, sdpa_kernel

CPU_MATMUL_SIZE = 256
BACKENDS = {"cuda": ["CUDNN_ATTENTION", "FLASH_ATTENTION"], "cpu": ["FLASH_ATTENTION", "MATH"]}
TRIAL_CALLS = 3


class Meter:
    """Measures on "cuda", in bf16, or "cpu", in fp32. A CPU's memory is not measured: its peaks are None."""

    def __init__(self, device: str):
        self.device = device
        self.on_gpu = device == "cuda"
        self.name = torch.cuda.get_device_name() if self.on_gpu else "CPU"
        self.nominal_tflops = NOMINAL_TFLOPS.get(self.name)
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, function) -> tuple[float, object, dict]:
        """Seconds of a call from an idle device to an idle device, its result, and peaks in bytes: of all
        tensors, those from before the call too, and of what PyTorch has reserved for them."""
        self.synchronize()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = function()
        self.synchronize()
        seconds = time.perf_counter() - begin
        peaks = {
            "allocated_bytes": torch.cuda.max_memory_allocated() if self.on_gpu else None,
            "reserved_bytes": torch.cuda.max_memory_reserved() if self.on_gpu else None,
        }
        return seconds, result, peaks

    def matmul_tflops(self, calls: int = 20) -> float:
        """TFLOP/s of a large matrix product: what this card does now."""
        size = MATMUL_SIZE if self.on_gpu else CPU_MATMUL_SIZE
        a, b = (torch.randn(size, size, dtype=self.dtype, device=self.device) for _ in range(2))
        out = a @ b
        seconds = self.timed(lambda: [torch.mm(a, b, out=out) for _ in range(calls)])[0] / calls
        return 2 * size**3 / seconds / 1e12

    def capacity(self) -> int | None:
        """Bytes that tensors could have, if they fitted without gaps. None: not measured."""
        if not self.on_gpu:
            return None
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    def free(self) -> None:
        if self.on_gpu:
            free()

    def attempt(self, function) -> dict:
        """The record that a call returns, with status "ok", or that of its failure: "oom" or "error"."""
        try:
            record = {"status": "ok", **function()}
        except Exception as error:  # what cannot be measured is a result; the rest goes on
            first_line = str(error).strip().partition("\n")[0]
            status = "oom" if is_out_of_memory(error) else "error"
            record = {"status": status, "error": f"{type(error).__name__}: {first_line}"}
        self.free()  # after the exception, whose traceback holds tensors
        return record


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch's own error, or that of a library that asks for memory itself."""
    texts = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def relative_difference(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """||x - wanted|| / ||wanted||, in float32."""
    wanted = wanted.float()
    return ((x.float() - wanted).norm() / wanted.norm()).item()


def seconds_of_backends(meter: Meter, sizes: dict, length: int) -> dict[str, float | str]:
    """Seconds of causal attention, forward and backward, on two sequences of so many tokens, by the backends
    of scaled_dot_product_attention; for one that cannot run its error."""
    heads = (sizes["num_attention_heads"], *[sizes["num_key_value_heads"]] * 2)
    q, k, v = (
        torch.randn(2, length, h, sizes["head_dim"], dtype=meter.dtype, device=meter.device)
        .transpose(1, 2)
        .requires_grad_()
        for h in heads
    )
    upstream = torch.randn_like(q)

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), upstream)

    def seconds() -> dict:
        call()
        return {"seconds": statistics.median(meter.timed(call)[0] for _ in range(TRIAL_CALLS))}

    found = {}
    for name in BACKENDS[meter.device]:
        with sdpa_kernel([getattr(SDPBackend, name)]):
            record = meter.attempt(seconds)
        found[name] = record["seconds"] if record["status"] == "ok" else record["error"]
    return found
