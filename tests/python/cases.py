"""Calls of dualkv.attention with known answers, shared by the tests of cases."""

from __future__ import annotations

from contextlib import contextmanager

import torch

import dualkv
from reference import results


def attend(inputs, forest, dout, dlse=None, sinks=None, **options):
    return results(
        lambda q, k, v, sinks: dualkv.attention(q, k, v, forest, sinks=sinks, return_lse=True, **options),
        inputs,
        sinks,
        dout,
        dlse,
    )


def attend_forward(inputs, forest, **options) -> dict:
    out, lse = dualkv.attention(*inputs, forest, return_lse=True, **options)
    return {"out": out, "lse": lse}


def assert_same_bits(found: dict, expected: dict, message="") -> None:
    for name, bits in expected.items():  # as bytes: +0 and -0 differ, a NaN equals itself
        same = [x.contiguous().view(torch.uint8) for x in (found[name], bits)]
        assert torch.equal(*same), f"{name}; {message}"


def normal(rows, q_heads, kv_heads, dim, dtype, seed=0, scale=1.0, device="cpu"):
    """Normal q, k, v and dout, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, heads, dim, generator=generator) * scale).to(device, dtype)
        for heads in (q_heads, kv_heads, kv_heads, q_heads)
    ]


def draw(*shape, dtype, device, seed=0) -> torch.Tensor:
    """Normal values, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@contextmanager
def sums_in_any_order():
    """PyTorch's default mode, in which dq on CUDA is summed in any order. Tests run in the other one, which also
    fills new memory with NaN; here memory that has been freed holds it."""
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_available():
        freed = [torch.full((n,), float("nan"), device="cuda") for n in (*64 * [2**16], *16 * [2**20])]
        del freed
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


class ThreeAndTwoAndOne:
    """A prompt of 3 rows and responses of 2 and 1, all scores equal; values 1, 2, 3 | 4, 5 | 10."""

    out = torch.tensor([1, 1.5, 2, 2.5, 3, 4])
    lse = torch.tensor([0, 0.693147, 1.098612, 1.386294, 1.609438, 1.386294])
    dv = torch.tensor([2.533333, 1.533333, 1.033333, 0.45, 0.2, 0.25])

    def __init__(self, responses=(2, 1), dtype=torch.float32, dim=8, device="cpu"):
        self.forest = dualkv.SegmentForest.from_groups([3], [list(responses)])
        values = torch.tensor([1.0, 2, 3, 4, 5, 10])
        self.inputs = [
            torch.zeros(6, 1, dim, dtype=dtype, device=device),
            draw(6, 1, dim, dtype=dtype, device=device),
            values.view(6, 1, 1).expand(6, 1, dim).contiguous().to(device, dtype),
        ]
        self.dout = torch.ones(6, 1, dim, dtype=dtype, device=device)

    def check_forward(self, found):
        assert torch.equal(found["out"].float().cpu(), self.out.view(6, 1, 1).expand(found["out"].shape))
        torch.testing.assert_close(found["lse"].cpu(), self.lse.view(1, 6), rtol=0, atol=1e-5)

    def check(self, found):
        self.check_forward(found)
        dtype = found["out"].dtype
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
        dv = self.dv.view(6, 1, 1).expand(found["dv"].shape)
        torch.testing.assert_close(found["dv"].float().cpu(), dv, rtol=1e-6 + rounding, atol=1e-6)
        assert torch.equal(found["dk"], torch.zeros_like(found["dk"]))
