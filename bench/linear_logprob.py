"""linear_logprob against its bare matrix products, hidden @ weight.T and the two of its backward, in PyTorch.

    PYTHONPATH=python python bench/linear_logprob.py [--targets 4096 --vocab 32000 ...]

The products alone hold all M x V logits and compute no softmax. Timings alternate and are medians of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import dualkv


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [("targets", 4096), ("vocab", 32000), ("hidden-dim", 1024), ("repeats", 3)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    hidden = torch.randn(args.targets, args.hidden_dim).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden_dim) / args.hidden_dim**0.5).requires_grad_()
    rows = torch.arange(args.targets)
    targets = torch.randint(args.vocab, (args.targets,))
    h, w = hidden.detach(), weight.detach()
    dlogits = torch.empty(args.targets, args.vocab).normal_()

    def fused(backward: bool):
        if not backward:
            with torch.no_grad():
                dualkv.linear_logprob(hidden, weight, rows, targets)
        else:
            logprob, entropy = dualkv.linear_logprob(hidden, weight, rows, targets)
            torch.autograd.grad(logprob.sum() + entropy.sum(), (hidden, weight))

    def products(backward: bool):
        h @ w.t()
        if backward:  # the logits are recomputed, since they were not kept
            h @ w.t()
            dlogits @ w
            dlogits.t() @ h

    print(f"M {args.targets}, V {args.vocab}, C {args.hidden_dim}, fp32, {args.threads} threads")
    print(f"{'pass':>18} {'products ms':>12} {'linear_logprob ms':>18} {'ratio':>6}")
    for name, backward in (("forward", False), ("forward + backward", True)):
        fused(backward), products(backward)  # warm-up
        times = [
            (seconds(lambda: products(backward)), seconds(lambda: fused(backward)))
            for _ in range(args.repeats)
        ]
        bare, ours = (statistics.median(column) for column in zip(*times))
        print(f"{name:>18} {1e3 * bare:>12.0f} {1e3 * ours:>18.0f} {ours / bare:>6.2f}")


if __name__ == "__main__":
    main()
