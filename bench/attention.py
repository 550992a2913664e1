"""dualkv.attention and its peers on a GPU, forward, bf16: time, useful TFLOP/s and memory, all in one run.

    PYTHONPATH=python python bench/attention.py [--batches "8, 1024, 256" ... --impls dualkv flex ...]
        [--output bench/results/h200/attention_forward.json]

Every result is compared with that of the first, dualkv, before it is timed. Peers take turns: in each round
all of them run for some milliseconds, a matrix product of 8192^3 too, whose rate is the card's own; times are
medians of the rounds. bench/attention_cpu.py is the comparison on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import subprocess
from pathlib import Path

import torch
from attention_batches import BATCHES, GOALS, Batch
from attention_peers import PEERS

BLOCK_MS = 20  # a peer's turn in a round
BATCH_MS = 2000  # all rounds of a batch
ROUNDS = range(5, 12)  # as many as fit in BATCH_MS
LARGEST_DIFFERENCE = 0.03  # of the norm of a row's head; bf16 has 8 bits
MATMUL_SIZE = 8192
LEAD_CYCLES = 2_000_000  # about 1 ms in which the host gets ahead of the GPU


def block_ms(function, calls: int) -> float:
    """The time of a call, of several one after the other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LEAD_CYCLES)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def take_turns(functions: dict) -> dict[str, float]:
    """Medians in ms."""
    first_ms = {name: block_ms(function, 1) for name, function in functions.items()}
    calls = {name: max(1, round(BLOCK_MS / ms)) for name, ms in first_ms.items()}
    round_ms = sum(calls[name] * ms for name, ms in first_ms.items())
    rounds = min(max(int(BATCH_MS / round_ms), ROUNDS.start), ROUNDS.stop - 1)
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(block_ms(function, calls[name]))
    return {name: statistics.median(ms) for name, ms in times.items()}


def matmul():
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: a @ b


def copy_tbs() -> float:
    """Terabytes that a copy of 2 GiB reads and writes in a second."""
    source = torch.ones(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = take_turns({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * source.numel() / ms / 1e9


def random_inputs(batch: Batch) -> list[list[torch.Tensor]]:
    """q, k and v; several sets of them where one would stay in the cache."""
    heads = (batch.heads, batch.kv_heads, batch.kv_heads)
    size = 2 * batch.tokens * sum(heads) * batch.head_dim
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    sets = 1 if size > cache else math.ceil(3 * cache / size)
    return [
        [torch.randn(batch.tokens, h, batch.head_dim, dtype=torch.bfloat16, device="cuda") for h in heads]
        for _ in range(sets)
    ]


class Contender:
    """A peer with its inputs; a call uses the next set of them."""

    def __init__(self, name: str, batch: Batch, input_sets):
        self.peer = PEERS[name](batch)
        self.input_sets = [self.peer.inputs(*inputs) for inputs in input_sets]
        self.next_inputs = itertools.cycle(self.input_sets)

    def __call__(self):
        return self.peer(*next(self.next_inputs))

    def compare(self, expected: torch.Tensor | None) -> torch.Tensor:
        """The first set's result; raises if it is not what is expected."""
        rows = self.peer.rows(self.peer(*self.input_sets[0])).clone()
        self.max_abs_diff = 0.0
        if expected is not None:
            wanted = expected.float()
            difference = rows.float() - wanted
            self.max_abs_diff = difference.abs().max().item()
            largest = (difference.norm(dim=-1) / wanted.norm(dim=-1)).max().item()
            if not largest <= LARGEST_DIFFERENCE:
                raise ArithmeticError(f"a row of the result is off by {largest:.2g} of its norm")
        return rows

    def peak_bytes(self) -> int:
        """What a call allocates at most, its result included. A graph has allocated it before."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        return torch.cuda.max_memory_allocated() - before


def measure(batch: Batch, impls: list[str]) -> list[dict]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    input_sets = random_inputs(batch)
    contenders, errors, expected = {}, {}, None
    for name in impls:
        try:
            contender = Contender(name, batch, input_sets)
            rows = contender.compare(expected)
            contenders[name] = contender
            expected = rows if expected is None else expected
        except Exception as error:  # a peer that cannot do this batch is a result
            errors[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    peaks = {
        name: None if name.endswith("-graph") else contender.peak_bytes()
        for name, contender in contenders.items()
    }
    times = take_turns({"matmul": matmul(), **contenders})
    shape = {
        "batch": batch.name,
        "head_dim": batch.head_dim,
        "heads": batch.heads,
        "kv_heads": batch.kv_heads,
        "matmul_tflops": 2 * MATMUL_SIZE**3 / times["matmul"] / 1e9,
    }
    measured = [
        {
            **shape,
            "impl": name,
            "forward_ms": times[name],
            "useful_tflops": batch.useful_tflops(times[name]),
            "peak_bytes": peaks[name],
            "max_abs_diff": contender.max_abs_diff,
        }
        for name, contender in contenders.items()
    ]
    return measured + [{**shape, "impl": name, "error": error} for name, error in errors.items()]


def table(records: list[dict]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes: useful TFLOP/s, in a CUDA graph in brackets."""
    found = {(record["batch"], record["impl"]): record for record in records}
    impls = list(dict.fromkeys(record["impl"].removesuffix("-graph") for record in records))

    def both(of, name: str, impl: str) -> str:
        values = [found.get((name, impl + suffix)) for suffix in ("", "-graph")]
        plain, graph = ("-" if record is None or "error" in record else of(record) for record in values)
        return plain if graph == "-" else f"{plain} ({graph})"

    rows = []
    for name in dict.fromkeys(record["batch"] for record in records):
        goal = GOALS[name]
        rates = [both(lambda record: f"{record['useful_tflops']:.0f}", name, impl) for impl in impls]
        reached = both(
            lambda record: f"{goal.reached(record['useful_tflops'], record['matmul_tflops']):.2f}",
            name,
            "dualkv",
        )
        graph = "" if goal.fa3_cascade_graph is None else f" ({goal.fa3_cascade_graph:.0f})"
        rows.append([name, *rates, f"{goal.fa3_cascade:.0f}{graph}", reached])
    notes = [
        f"{record['batch']}, {record['impl']}: {record['error']}" for record in records if "error" in record
    ]
    return ["batch", *impls, "FA3 cascade (quoted)", "dualkv / goal"], rows, notes


def show(records: list[dict]) -> None:
    header, rows, notes = table(records)
    print("\n".join(notes))
    title = "Useful TFLOP/s, forward; in a CUDA graph in brackets"
    try:
        import rich.console
        import rich.table
    except ImportError:
        print(title, *(" | ".join(row) for row in (header, *rows)), sep="\n")
        return
    drawn = rich.table.Table(title=title)
    for column in header:
        drawn.add_column(column, justify="left" if column == "batch" else "right")
    for row in rows:
        drawn.add_row(*row)
    rich.console.Console(width=150).print(drawn)


def checked_out_commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


@torch.no_grad()
def main() -> None:
    names = [batch.name for batch in BATCHES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="+", choices=names, default=names, metavar="N, P, R")
    parser.add_argument(
        "--impls", nargs="+", choices=PEERS, default=list(PEERS), metavar="IMPL", help=", ".join(PEERS)
    )
    parser.add_argument("--output", type=Path, help="a JSON file of records")
    parser.add_argument("--commit", help="what is measured, where this is not a git checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; bench/attention_cpu.py measures on a CPU")
    commit = args.commit or checked_out_commit()
    if args.output and commit is None:
        parser.error("this is not a git checkout: --commit says what is measured")

    run = {
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tbs": copy_tbs(),
    }
    print(f"{run['device']}, PyTorch {run['torch']}, copy {run['copy_tbs']:.2f} TB/s")
    records = []
    for batch in BATCHES:
        if batch.name not in args.batches:
            continue
        impls = [name for name in args.impls if batch.graphs or not name.endswith("-graph")]
        records += [{**record, **run} for record in measure(batch, impls)]
        print(f"{batch.name}: matmul {records[-1]['matmul_tflops']:.0f} TFLOP/s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(records, indent=1) + "\n")
    show(records)


if __name__ == "__main__":
    main()
