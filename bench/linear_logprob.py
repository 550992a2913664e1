"""linear_logprob against its bare matrix products, hidden @ weight.T and the two of its backward, in PyTorch.

    PYTHONPATH=python python bench/linear_logprob.py [--targets 4096 --vocab 32000 ...]
    PYTHONPATH=python python bench/linear_logprob.py --device cuda [--output bench/results/h200/linear_logprob.json]

The products alone hold all M x V logits and compute no softmax; the backward's count the logits once more, since
they are not kept. Timings alternate and are medians of one run. On a GPU, in bf16, there are peers beside it:
PyTorch with logits in full, and Liger's fused linear cross entropy. Neither computes entropies.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch

import dualkv

PASSES = {"forward": False, "forward + backward": True}
LARGEST_DIFFERENCE = 0.2  # of a log-probability; the peers' logits are bf16


class Problem:
    def __init__(self, args, device: str, dtype: torch.dtype):
        torch.manual_seed(0)
        self.hidden = torch.randn(args.targets, args.hidden_dim, device=device, dtype=dtype)
        self.weight = torch.randn(args.vocab, args.hidden_dim, device=device, dtype=dtype)
        self.weight /= args.hidden_dim**0.5
        self.rows = torch.arange(args.targets)
        self.targets = torch.randint(args.vocab, (args.targets,))
        self.upstream = torch.randn(2, args.targets, device=device)
        self.inputs = (self.hidden.requires_grad_(), self.weight.requires_grad_())


class Products:
    def __init__(self, problem: Problem):
        self.h, self.w = (x.detach() for x in problem.inputs)
        self.dlogits = self.h.new_empty(len(self.h), len(self.w)).normal_()

    def __call__(self, backward: bool) -> list:
        self.h @ self.w.t()
        if not backward:
            return []
        self.h @ self.w.t()
        return [self.dlogits @ self.w, self.dlogits.t() @ self.h]


class Dualkv:
    """place: where rows and targets are."""

    def __init__(self, problem: Problem, place: str):
        self.problem = problem
        self.indices = problem.rows.to(place), problem.targets.to(place)

    def logprobs(self) -> torch.Tensor:
        with torch.no_grad():
            return dualkv.linear_logprob(*self.problem.inputs, *self.indices)[0]

    def __call__(self, backward: bool) -> list:
        if not backward:
            return [self.logprobs()]
        outputs = dualkv.linear_logprob(*self.problem.inputs, *self.indices)
        return [*outputs, *torch.autograd.grad(outputs, self.problem.inputs, list(self.problem.upstream))]


class CrossEntropy:
    """A peer that returns the loss of each target, its log-probability negated."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.targets = problem.targets.cuda()

    def losses(self) -> torch.Tensor:
        raise NotImplementedError

    def logprobs(self) -> torch.Tensor:
        with torch.no_grad():
            return -self.losses()

    def __call__(self, backward: bool) -> list:
        if not backward:
            return [self.logprobs()]
        losses = self.losses()
        return [
            losses,
            *torch.autograd.grad(losses, self.problem.inputs, self.problem.upstream[0].to(losses.dtype)),
        ]


class FullLogits(CrossEntropy):
    def losses(self) -> torch.Tensor:
        hidden, weight = self.problem.inputs
        logits = (hidden @ weight.t()).float()
        return torch.nn.functional.cross_entropy(logits, self.targets, reduction="none")


class Liger(CrossEntropy):
    """The mean of the losses: with one upstream gradient for each, its gradients are not right (it multiplies
    by the first), and its time would be the same."""

    def __init__(self, problem: Problem):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        super().__init__(problem)
        self.loss = LigerFusedLinearCrossEntropyLoss(reduction="mean")
        self.separate = LigerFusedLinearCrossEntropyLoss(reduction="none")

    def logprobs(self) -> torch.Tensor:
        hidden, weight = self.problem.inputs
        with torch.no_grad():
            return -self.separate(weight, hidden, self.targets)

    def __call__(self, backward: bool) -> list:
        hidden, weight = self.problem.inputs
        if not backward:
            with torch.no_grad():
                return [self.loss(weight, hidden, self.targets)]
        loss = self.loss(weight, hidden, self.targets)
        return [loss, *torch.autograd.grad(loss, self.problem.inputs)]


GPU_IMPLS = {
    "dualkv": lambda problem: Dualkv(problem, "cpu"),
    "dualkv, indices on cuda": lambda problem: Dualkv(problem, "cuda"),
    "pytorch": FullLogits,
    "liger": Liger,
}


def on_cpu(args) -> None:
    torch.set_num_threads(args.threads)
    problem = Problem(args, "cpu", torch.float32)
    functions = {"products": Products(problem), "dualkv": Dualkv(problem, "cpu")}

    def seconds(function, backward: bool) -> float:
        start = time.perf_counter()
        function(backward)
        return time.perf_counter() - start

    print(f"M {args.targets}, V {args.vocab}, C {args.hidden_dim}, fp32, {args.threads} threads")
    print(f"{'pass':>18} {'products ms':>12} {'linear_logprob ms':>18} {'ratio':>6}")
    for name, backward in PASSES.items():
        for function in functions.values():
            function(backward)  # warm-up
        rounds = [[seconds(f, backward) for f in functions.values()] for _ in range(args.repeats)]
        bare, ours = (statistics.median(column) for column in zip(*rounds))
        print(f"{name:>18} {1e3 * bare:>12.0f} {1e3 * ours:>18.0f} {ours / bare:>6.2f}")


def peak_bytes(function, backward: bool) -> tuple[int, int]:
    """What a call allocates at most, and that less its results."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = function(backward)
    peak = torch.cuda.max_memory_allocated() - before
    return peak, peak - sum(x.numel() * x.element_size() for x in results)


def on_gpu(args) -> list[dict]:
    from attention import MATMUL_SIZE, copy_tbs, free, matmul, take_turns

    problem = Problem(args, "cuda", torch.bfloat16)
    shape = {"targets": args.targets, "vocab": args.vocab, "hidden_dim": args.hidden_dim, "dtype": "bfloat16"}
    functions, measured, errors, expected = {}, {}, {}, None
    for name, make in GPU_IMPLS.items():
        try:
            function = make(problem)
            found = function.logprobs().float()
            expected = found if expected is None else expected
            difference = (found - expected).abs().max().item()
            if not difference <= LARGEST_DIFFERENCE:
                raise ArithmeticError(f"a log-probability is off by {difference:.2g}")
            for backward in PASSES.values():
                function(backward)  # warm-up; libraries and kernels take their own memory now
                measured[name, backward] = (*peak_bytes(function, backward), difference)
            functions[name] = function
        except Exception as error:  # a peer that cannot do this is a result
            errors[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        free()
    contenders = {"products": Products(problem), **functions}
    records = []
    for which, backward in PASSES.items():
        turns = {name: lambda f=f: f(backward) for name, f in contenders.items()}
        times = take_turns({"matmul": matmul(), **turns})
        rate = 2 * MATMUL_SIZE**3 / times.pop("matmul") / 1e9
        for name, ms in times.items():
            peak, beyond, difference = measured.get((name, backward), (None, None, None))
            records.append(
                {
                    **shape,
                    "pass": which,
                    "impl": name,
                    "ms": ms,
                    "ratio": ms / times["products"],
                    "peak_bytes": peak,
                    "peak_bytes_beyond_results": beyond,
                    "max_abs_diff": difference,
                    "matmul_tflops": rate,
                }
            )
    records += [{**shape, "impl": name, "error": error} for name, error in errors.items()]
    run = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tbs": copy_tbs(),
        "commit": args.commit,
    }
    return [{**record, **run} for record in records]


def show(records: list[dict]) -> None:
    first = records[0]
    print(f"{first['device']}, PyTorch {first['torch']}, copy {first['copy_tbs']:.2f} TB/s")
    print(f"M {first['targets']}, V {first['vocab']}, C {first['hidden_dim']}, {first['dtype']}")
    print(f"{'pass':>18} {'':>24} {'ms':>8} {'ratio':>6} {'peak GiB':>9} {'less results':>13}")
    for record in records:
        if "error" in record:
            print(f"{record['impl']}: {record['error']}")
            continue
        memory = [record["peak_bytes"], record["peak_bytes_beyond_results"]]
        gibs = ["-" if x is None else f"{x / 2**30:.2f}" for x in memory]
        print(
            f"{record['pass']:>18} {record['impl']:>24} {record['ms']:>8.1f} {record['ratio']:>6.2f} "
            f"{gibs[0]:>9} {gibs[1]:>13}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name in ("targets", "vocab", "hidden-dim"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--repeats", type=int, default=3, help="on a CPU")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--output", type=Path, help="a JSON file of records, on a GPU")
    parser.add_argument("--commit", help="what is measured, where this is not a git checkout")
    args = parser.parse_args()
    defaults = {"cpu": (4096, 32000, 1024), "cuda": (32768, 151_936, 4096)}[args.device]
    for name, default in zip(("targets", "vocab", "hidden_dim"), defaults):
        setattr(args, name, getattr(args, name) or default)
    if args.device == "cpu":
        on_cpu(args)
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    from checkout import checked_out_commit

    args.commit = args.commit or checked_out_commit()
    if args.output and args.commit is None:
        parser.error("this is not a git checkout: --commit says what is measured")
    records = on_gpu(args)
    show(records)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
