"""A GRPO policy update of Qwen3-8B on one GPU, replicated and packed, and one layer: time, memory, MFU.

    PYTHONPATH=python python bench/policy_update.py --budget-s 280 --limit-s 3
        [--output bench/results/h200/policy_update.json]
    PYTHONPATH=python python bench/policy_update.py --parts policy largest [--micro-batches 4 8 --layers 36]
    PYTHONPATH=python python bench/policy_update.py --parts layer --limit-s 5
    PYTHONPATH=python python bench/policy_update.py --tiny --device cpu

The parts:

policy   A micro-batch of N responses to one prompt: the old log-probs (without gradients), then the update
         (forward, GRPO loss and backward, layers checkpointed). *packed* is dualkv; *replicated* is stock
         Transformers on N sequences of equal length, without padding or masks, with the faster of PyTorch's
         attention backends. Both have dualkv.linear_logprob for a head. No optimizer. Log-probs and some
         gradients are compared.
largest  The largest micro-batch that either fits: tried until it is out of memory.
layer    One decoder layer on the 54 batches of the paper's table: see single_layer.py.

Weights are random. Each micro-batch runs through WARMUP_LAYERS layers before it is timed.
docs/policy_update.md says how MFU is counted and has what was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
from checkout import checked_out_commit
from largest_micro_batch import next_micro_batch
from meter import Meter, relative_difference, seconds_of_backends
from mfu import PASSES, utilization
from single_layer import IMPLS, measure_single_layer
from torch.nn.attention import SDPBackend, sdpa_kernel

import dualkv
from dualkv.integrations.transformers import packed_logprobs, use_packed_attention

QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LENGTHS = {"micro_batches": [4, 8, 16], "prompt": 8192, "response": 2048}
TINY_LENGTHS = {"micro_batches": [2, 4], "prompt": 24, "response": 8}

WARMUP_LAYERS = 2
COMPARED = ("layers.0.self_attn.k_proj", "layers.0.mlp.down_proj", "norm")  # their weights' gradients
LARGEST_TRIES = 10


# -------------------------------------------------------------------------------------------------------- sides


class Problem:
    """N responses [R] to one prompt [P], of random tokens, with random rewards."""

    def __init__(self, sizes: dict, prompt: int, response: int, count: int):
        generator = torch.Generator().manual_seed(count)

        def tokens(*shape):
            return torch.randint(sizes["vocab_size"], shape, generator=generator)

        self.prompt, self.responses = tokens(prompt), tokens(count, response)
        rewards = torch.rand(count, generator=generator)
        self.lengths = [response] * count
        self.counts = dualkv.losses.count([self.lengths])
        self.advantages = dualkv.losses.group_advantages(rewards, [0] * count)


class Packed:
    """dualkv."""

    name, attention = "packed", "dualkv"

    def __init__(self, problem: Problem):
        self.batch = dualkv.pack([problem.prompt], [list(problem.responses)])
        self.tokens = self.batch.num_tokens

    def prepare(self, model) -> None:
        use_packed_attention(model)

    def attend(self):
        return nullcontext()

    def logprobs(self, model) -> torch.Tensor:
        """[M], of all responses, one after the other."""
        return packed_logprobs(model, self.batch)[0]


class Replicated:
    """Stock Transformers. It passes no mask, and tells PyTorch that query heads share keys (`enable_gqa`):
    neither cuDNN nor FlashAttention copies them."""

    name = "replicated"

    def __init__(self, problem: Problem, backend: str):
        self.attention = backend.lower()
        self.backend = getattr(SDPBackend, backend)
        count, response = problem.responses.shape
        self.input_ids = torch.cat([problem.prompt.expand(count, -1), problem.responses], dim=1)
        self.tokens = self.input_ids.numel()
        before = torch.arange(response) + len(problem.prompt) - 1
        self.rows = (torch.arange(count)[:, None] * self.input_ids.shape[1] + before).flatten()
        self.targets = problem.responses.flatten()

    def prepare(self, model) -> None:
        model.set_attn_implementation("sdpa")

    def attend(self):
        return sdpa_kernel([self.backend])

    def logprobs(self, model) -> torch.Tensor:
        """[M], of all responses, one after the other."""
        input_ids = self.input_ids.to(model.device)
        hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        return dualkv.linear_logprob(hidden.flatten(0, 1), model.lm_head.weight, self.rows, self.targets)[0]


def make_model(sizes: dict, meter: Meter):
    """Random weights, N(0, 0.02), made where they stay."""
    torch.manual_seed(0)
    with torch.device(meter.device):
        config = transformers.Qwen3Config(**sizes, tie_word_embeddings=False)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=meter.dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@contextmanager
def first_layers(model, count: int):
    """The model ends after so many layers."""
    config = model.get_decoder().config
    before = config.num_hidden_layers
    config.num_hidden_layers = min(count, before)
    try:
        yield
    finally:
        config.num_hidden_layers = before


def old_logprobs(model, side) -> torch.Tensor:
    with torch.no_grad():
        return side.logprobs(model)


def update(model, side, problem: Problem, old: torch.Tensor | None) -> torch.Tensor:
    """Leaves gradients, and returns the log-probs [M]. Without old ones, those of now."""
    logprobs = side.logprobs(model)
    advantages = problem.advantages.to(logprobs.device)
    loss, _ = dualkv.losses.grpo()(logprobs, problem.lengths, advantages, problem.counts, old_logprobs=old)
    loss.backward()
    return logprobs.detach()


# --------------------------------------------------------------------------------------------------------- bench


class Bench:
    """What is measured, where, and until when. `add` keeps a record and writes all of them."""

    def __init__(self, args, meter: Meter, sizes: dict, run: dict, begin: float):
        self.args, self.meter, self.sizes, self.run = args, meter, sizes, run
        self.deadline = begin + args.budget_s
        self.records = self.other_parts()
        self.sdpa_seconds = seconds_of_backends(meter, sizes, args.prompt + args.response)
        # Backends of scaled_dot_product_attention that run, fastest first.
        runs = [name for name, seconds in self.sdpa_seconds.items() if not isinstance(seconds, str)]
        if not runs:
            raise RuntimeError(f"no backend of scaled_dot_product_attention runs here: {self.sdpa_seconds}")
        self.backends = sorted(runs, key=self.sdpa_seconds.get)

    def other_parts(self) -> list[dict]:
        """What the file has of parts, of micro-batches and of the layer's prompts that are not measured now."""
        if not (self.args.output and self.args.output.exists()):
            return []
        records = json.loads(self.args.output.read_text())

        def measured(record: dict) -> bool:
            if record["part"] in ("policy", "comparison"):
                return "policy" in self.args.parts and record.get("micro_batch") in (
                    *self.args.micro_batches,
                    None,
                )
            if record["part"] == "layer" and self.args.layer_prompts:
                return "layer" in self.args.parts and record.get("prompt") in (*self.args.layer_prompts, None)
            return record["part"] in self.args.parts

        return [record for record in records if not measured(record)]

    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, record: dict) -> dict:
        self.records.append({**record, **self.run})
        if self.args.output:
            self.args.output.parent.mkdir(parents=True, exist_ok=True)
            self.args.output.write_text(json.dumps(self.records, indent=1) + "\n")
        print(line(record), flush=True)
        return record


def gradients_of(model) -> dict[str, torch.Tensor]:
    """Some of the gradients, on the CPU."""
    decoder = model.get_decoder()
    return {name: decoder.get_submodule(name).weight.grad.cpu() for name in COMPARED}


def measure_side(bench: Bench, model, side, problem: Problem, results: dict) -> dict:
    """The record of both passes of a micro-batch: medians of seconds, peaks in bytes, MFU. Log-probs [M] and
    gradients go to `results`, for a comparison."""
    meter, args = bench.meter, bench.args
    count, response = problem.responses.shape
    matmul_tflops = meter.matmul_tflops()
    meter.free()
    side.prepare(model)
    times, peaks = {name: [] for name in PASSES}, {}
    with side.attend():
        with first_layers(model, WARMUP_LAYERS):
            update(model, side, problem, old_logprobs(model, side))
        for _ in range(args.repeats):
            model.zero_grad(set_to_none=True)
            seconds, old, peaks["old"] = meter.timed(lambda: old_logprobs(model, side))
            times["old"].append(seconds)
            seconds, logprobs, peaks["update"] = meter.timed(lambda: update(model, side, problem, old))
            times["update"].append(seconds)
    results["logprobs"], results["gradients"] = logprobs.cpu(), gradients_of(model)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    micro_batch = {"prompt": len(problem.prompt), "response": response, "count": count}
    rates = {"": meter.nominal_tflops, "_of_matmul": matmul_tflops}  # by suffix of what is a share of it
    return {
        "tokens": side.tokens,
        **{f"{name}_s": value for name, value in seconds.items()},
        **{f"{name}_{of}": value for name in PASSES for of, value in peaks[name].items()},
        **utilization(bench.sizes, micro_batch, seconds, side.name == Replicated.name, rates),
        "matmul_tflops": matmul_tflops,
        "nominal_tflops": meter.nominal_tflops,
    }


def compare(packed: dict, replicated: dict) -> dict:
    """Largest and mean difference of log-probs, and differences of gradients as shares of their norms."""
    logprobs, wanted = packed["logprobs"], replicated["logprobs"]
    return {
        "logprob_difference": (logprobs - wanted).abs().max().item(),
        "logprob_mean_difference": (logprobs - wanted).abs().mean().item(),
        "gradient_differences": {
            name: relative_difference(packed["gradients"][name], gradient)
            for name, gradient in replicated["gradients"].items()
        },
    }


def speedups(packed: dict, replicated: dict) -> dict:
    """Of both passes, and as shares of the token ratio."""
    ratio = replicated["tokens"] / packed["tokens"]
    record = {"token_ratio": ratio}
    for name in PASSES:
        record[f"{name}_speedup"] = replicated[f"{name}_s"] / packed[f"{name}_s"]
        record[f"{name}_speedup_of_ratio"] = record[f"{name}_speedup"] / ratio
    return record


class Sides:
    """Measures sides on one model, and keeps what they have shown."""

    def __init__(self, bench: Bench):
        self.bench, self.model = bench, make_model(bench.sizes, bench.meter)
        self.shape = {
            "prompt": bench.args.prompt,
            "response": bench.args.response,
            "layers": bench.sizes["num_hidden_layers"],
            "weights_bytes": sum(x.numel() * x.element_size() for x in self.model.parameters()),
            "sdpa_seconds": bench.sdpa_seconds,
        }
        self.measured = {Packed.name: {}, Replicated.name: {}}  # by side and micro-batch: its record
        self.token_s = {}  # by side: seconds that a token takes with all there is to it

    def measure(self, side, problem: Problem) -> tuple[dict, dict]:
        """The record of a side, and its results: log-probs and gradients, or none if it was not measured."""
        bench, count = self.bench, len(problem.lengths)
        record = {
            "part": "policy",
            "side": side.name,
            "attention": side.attention,
            "micro_batch": count,
            **self.shape,
        }
        estimate = self.token_s.get(side.name, self.token_s.get(Packed.name, 0)) * side.tokens
        if estimate > bench.remaining_s():
            error = "it would take longer than what is left of the budget"
            return bench.add({**record, "status": "skipped", "error": error, "estimate_s": estimate}), {}
        begin, results = time.monotonic(), {}
        record |= bench.meter.attempt(lambda: measure_side(bench, self.model, side, problem, results))
        self.model.zero_grad(set_to_none=True)
        bench.meter.free()
        if record["status"] == "ok":  # of two backends the faster one comes first, and counts
            self.token_s.setdefault(side.name, (time.monotonic() - begin) / side.tokens)
            self.measured[side.name].setdefault(count, record)
        return bench.add(record), results


def measure_micro_batch(bench: Bench, sides: Sides, count: int, backends: list[str]) -> None:
    """Packed, then replicated with each of these backends of PyTorch's attention, and their comparison."""
    problem = Problem(bench.sizes, bench.args.prompt, bench.args.response, count)
    packed, ours = sides.measure(Packed(problem), problem)
    replicated = [sides.measure(Replicated(problem, backend), problem) for backend in backends]
    replicated = [(record, results) for record, results in replicated if record["status"] == "ok"]
    if packed["status"] != "ok" or not replicated:
        return
    (record, theirs), *others = replicated
    comparison = {"part": "comparison", "micro_batch": count, **speedups(packed, record)}
    comparison |= compare(ours, theirs)
    if others:  # what rounding alone makes of it
        comparison["between_backends"] = compare(others[0][1], theirs)
    bench.add(comparison)


def measure_policy(bench: Bench) -> None:
    """The parts "policy" and "largest"."""
    sides = Sides(bench)
    for i, count in enumerate(bench.args.micro_batches):
        measure_micro_batch(bench, sides, count, bench.backends[: 2 if i == 0 else 1])
    if "largest" in bench.args.parts:
        for name, make in (
            (Packed.name, Packed),
            (Replicated.name, lambda problem: Replicated(problem, bench.backends[0])),
        ):
            found = largest(bench, sides.model, make, sides.measured[name])
            bench.add({"part": "largest", "side": name, **sides.shape, **found})


def largest(bench: Bench, model, make, measured: dict[int, dict]) -> dict:
    """The record of the largest micro-batch that fits, by updates of growing ones until one is out of memory.
    make: from a problem its side; measured: records of micro-batches that fit."""
    meter, args = bench.meter, bench.args
    capacity = meter.capacity()
    if not measured or capacity is None:
        reason = f"memory is not measured with --device {meter.device}"
        if capacity is not None:
            reason = f"none of the micro-batches {args.micro_batches} was measured"
        return {"status": "error", "error": f"nothing to start from: {reason}"}
    peaks = {count: record["update_allocated_bytes"] for count, record in measured.items()}
    seconds = max(record["update_s"] / count for count, record in measured.items())
    fails, tries, status = None, [], "ok"
    while (count := next_micro_batch(peaks, fails, capacity)) is not None:
        if len(tries) == LARGEST_TRIES or count * seconds > bench.remaining_s():
            status = "skipped"
            break
        problem = Problem(bench.sizes, args.prompt, args.response, count)
        side = make(problem)
        side.prepare(model)

        def call(side=side, problem=problem) -> dict:
            with side.attend():
                return meter.timed(lambda: update(model, side, problem, None))[2]

        tried = meter.attempt(call)
        model.zero_grad(set_to_none=True)
        meter.free()
        tries.append({"micro_batch": count, **tried})
        if tried["status"] == "ok":
            peaks[count] = tried["allocated_bytes"]
        elif tried["status"] == "oom":
            fails = count
        else:
            status = "error"
            break
    return {"status": status, "fits": max(peaks), "out_of_memory": fails, "tries": tries}


def line(record: dict) -> str:
    """A record in a line of the table on stdout."""
    if record["part"] == "comparison":
        return comparison_line(record)
    words, figures = record["part"], ""
    if "impl" in record:
        words = f"layer {record['batch']:>12} {record['impl']:>16}"
        if record["status"] == "ok":
            figures = f" {1e3 * record['seconds']:9.1f} ms, {gib(record['allocated_bytes'])} GiB"
    elif "micro_batch" in record:
        words = f"policy {record['micro_batch']:>3} {record['side']:>10} {record['attention']:>16}"
        if record["status"] == "ok":
            figures = policy_figures(record)
    elif "side" in record:
        words = f"largest {record['side']:>10}"
        if "fits" in record:
            figures = f": {record['fits']} fits, {record['out_of_memory']} does not"
    if record["status"] != "ok":
        figures += f": {record['status']} {record.get('error', '')}".rstrip()
    return words + figures


def policy_figures(record: dict) -> str:
    mfu = record["update_effective_mfu"]
    return (
        f" old {record['old_s']:8.3f} s, update {record['update_s']:8.3f} s, "
        f"{gib(record['update_allocated_bytes'])} GiB, effective MFU {'-' if mfu is None else f'{mfu:.2f}'}"
    )


def comparison_line(record: dict) -> str:
    shares = ", ".join(
        f"{name} {record[f'{name}_speedup']:.2f}x = {record[f'{name}_speedup_of_ratio']:.2f} of the ratio"
        for name in PASSES
    )
    gradients = max(record["gradient_differences"].values())
    return (
        f"micro-batch {record['micro_batch']}: tokens {record['token_ratio']:.2f}x, {shares}; "
        f"log-probs within {record['logprob_difference']:.2g}, gradients {gradients:.2g}"
    )


def gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try that everything runs")
    parser.add_argument(
        "--parts", nargs="+", choices=("policy", "largest", "layer"), default=["policy", "layer"]
    )
    parser.add_argument("--layers", type=positive, help="of the model; 36")
    parser.add_argument("--micro-batches", type=positive, nargs="+", help="responses to a prompt; 4 8 16")
    parser.add_argument("--prompt", type=positive, help="tokens of the prompt; 8192")
    parser.add_argument("--response", type=positive, help="tokens of a response; 2048")
    parser.add_argument("--repeats", type=positive, default=1, help="timed calls, after one to warm up")
    parser.add_argument("--impls", nargs="+", choices=IMPLS, metavar="IMPL", help=", ".join(IMPLS))
    parser.add_argument("--layer-prompts", type=positive, nargs="+", help="of the layer's batches; all")
    parser.add_argument("--limit-s", type=float, default=5, help="seconds; no longer call of the layer")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds; nothing that ends later")
    parser.add_argument(
        "--output",
        type=Path,
        help="a JSON file of records; keeps those of other parts, micro-batches and layer prompts",
    )
    parser.add_argument("--commit", help="what is measured, where this is not a git checkout")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --tiny tries the program on a CPU")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu is for --tiny only")
    if "largest" in args.parts and "policy" not in args.parts:
        parser.error("--parts largest starts from what --parts policy has measured")
    commit = args.commit or checked_out_commit()
    if args.output and commit is None:
        parser.error("this is not a git checkout: --commit says what is measured")
    for name, value in (TINY_LENGTHS if args.tiny else LENGTHS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    sizes = dict(TINY if args.tiny else QWEN3_8B)
    sizes["num_hidden_layers"] = args.layers or sizes["num_hidden_layers"]

    meter = Meter(args.device)
    run = {
        "commit": commit,
        "device": meter.name,
        "dtype": str(meter.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }
    print(", ".join(f"{name} {value}" for name, value in run.items() if value is not None))
    bench = Bench(args, meter, sizes, run, begin)
    for part, measure in (("policy", measure_policy), ("layer", measure_single_layer)):
        if part in args.parts:
            record = meter.attempt(lambda measure=measure: measure(bench) or {})
            if record["status"] != "ok":  # outside of what is measured, which has records of its own
                bench.add({"part": part, **record})


if __name__ == "__main__":
    main()
