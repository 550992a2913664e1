"""Attention over a packed group against PyTorch's scaled_dot_product_attention over its replicated sequences.

    PYTHONPATH=python python bench/attention_cpu.py [--prompt 2048 --responses 8 --response 256 ...]

Prints, for each number of threads, the speed-up of forward and of forward + backward, beside the ratio of
visible pairs, which is what not computing the copies can bring. Timings alternate and are medians of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import dualkv


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Packed:
    """dualkv.attention on [P R1 ... RN]."""

    def __init__(self, args):
        self.forest = dualkv.SegmentForest.from_groups([args.prompt], [[args.response] * args.responses])
        self.pairs = self.forest.visible_pairs()
        rows = self.forest.total_tokens
        shapes = [(rows, heads, args.head_dim) for heads in (args.heads, args.kv_heads, args.kv_heads)]
        self.inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        self.dout = torch.randn(shapes[0])

    def attention(self):
        return dualkv.attention(*self.inputs, self.forest)


class Replicated:
    """PyTorch on N sequences [P Ri] of equal length; K and V are given to every query head, off the clock."""

    def __init__(self, args):
        length = args.prompt + args.response
        self.pairs = args.responses * length * (length + 1) // 2
        shape = (args.responses, args.heads, length, args.head_dim)
        self.inputs = [torch.randn(shape).requires_grad_() for _ in range(3)]
        self.dout = torch.randn(shape)

    def attention(self):
        return scaled_dot_product_attention(*self.inputs, is_causal=True)


def forward(side):
    with torch.no_grad():
        side.attention()


def forward_backward(side):
    torch.autograd.grad(side.attention(), side.inputs, side.dout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [
        ("prompt", 2048),
        ("responses", 8),
        ("response", 256),
        ("heads", 8),
        ("kv-heads", 2),
        ("head-dim", 64),
        ("repeats", 5),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()

    torch.manual_seed(0)
    packed, replicated = Packed(args), Replicated(args)
    ratio = replicated.pairs / packed.pairs
    print(
        f"P {args.prompt}, N {args.responses}, R {args.response}, H {args.heads}/{args.kv_heads}, D {args.head_dim}, fp32"
    )
    print(f"ratio of visible pairs: {ratio:.2f}")
    print(f"{'threads':>7} {'pass':>18} {'sdpa ms':>9} {'dualkv ms':>9} {'speed-up':>8} {'/ ratio':>7}")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name, run in (("forward", forward), ("forward + backward", forward_backward)):
            run(packed), run(replicated)  # warm-up
            times = [
                (seconds(lambda: run(replicated)), seconds(lambda: run(packed))) for _ in range(args.repeats)
            ]
            theirs, ours = (statistics.median(column) for column in zip(*times))
            speedup = theirs / ours
            print(
                f"{threads:>7} {name:>18} {1e3 * theirs:>9.1f} {1e3 * ours:>9.1f} {speedup:>8.2f}"
                f" {speedup / ratio:>7.2f}"
            )


if __name__ == "__main__":
    main()
