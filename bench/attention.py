"""dualkv.attention and its peers on a GPU, bf16: time, useful TFLOP/s and memory, all in one run.

    PYTHONPATH=python python bench/attention.py [--batches "8, 1024, 256" ... --impls dualkv flex ...]
        [--output bench/results/h200/attention.json]
    PYTHONPATH=python python bench/attention.py --passes forward [--output bench/results/h200/attention_forward.json]
    PYTHONPATH=python python bench/attention.py --table-1 [--output bench/results/h200/attention_table1.json]

The first measures forward and backward, the second the forward alone, without gradients, and the third what Table 1
of the paper measures. Every result, gradients too, is compared with that of the first, dualkv, before it is timed.

Peers take turns: in each round all of them run for some milliseconds, a matrix product of 8192^3 too, whose rate is
the card's own; times are medians of the rounds. Each round has an order of its own, as the card's clock depends on
what ran before. A peer that takes longer than SLOW_MS is timed once, after one call to warm up.
bench/attention_cpu.py is the comparison on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import random
import statistics
import time
from pathlib import Path

import torch
from attention_batches import BATCHES, TABLE_1, TABLE_1_SPEEDUPS, Batch, goals_of, have_backward
from attention_peers import PEERS, Call, CapturedCall
from checkout import checked_out_commit

BLOCK_MS = 20  # a peer's turn in a round, for each pass
BATCH_MS = 2000  # all rounds of a batch
ROUNDS = range(5, 12)  # as many as fit in BATCH_MS
SLOW_MS = 300
LARGEST_DIFFERENCE = 0.03  # of the norm; bf16 has 8 bits
GRADIENT_ROWS = 16  # whose norm is taken together: a single row's gradient may be 0
MATMUL_SIZE = 8192
LEAD_CYCLES = 2_000_000  # about 1 ms in which the host gets ahead of the GPU
TABLE_1_IMPLS = ["dualkv", "flex", "cudnn-replicated", "fa2-replicated"]
COMPILE_SECONDS = 60


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


def take_turns(functions: dict, first_ms: dict | None = None) -> dict:
    """Medians in ms. first_ms: times of single calls, where they are known."""
    first_ms = {name: block_ms(function, 1) for name, function in functions.items()} | (first_ms or {})
    calls = {name: max(1, round(BLOCK_MS / first_ms[name])) for name in functions}
    round_ms = sum(calls[name] * first_ms[name] for name in functions)
    rounds = min(max(int(BATCH_MS / round_ms), ROUNDS.start), ROUNDS.stop - 1)
    times = {name: [] for name in functions}
    order, shuffled = list(functions), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            times[name].append(block_ms(functions[name], calls[name]))
    return {name: statistics.median(ms) for name, ms in times.items()}


def matmul():
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: a @ b


def copy_tbs() -> float:
    """Terabytes that a copy of 2 GiB reads and writes in a second."""
    source = torch.ones(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = statistics.median(block_ms(lambda: target.copy_(source), 20) for _ in range(ROUNDS.stop))
    return 2 * source.numel() / ms / 1e9


def random_inputs(batch: Batch, backward: bool, device="cuda") -> list[list[torch.Tensor]]:
    """q, k, v and, for a backward, dout; several sets of them where one would stay in the cache."""
    heads = [batch.heads, batch.kv_heads, batch.kv_heads, *[batch.heads] * backward]
    sets = 1
    if device == "cuda":
        size = 2 * batch.tokens * sum(heads[:3]) * batch.head_dim
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        sets = 1 if size > cache else math.ceil(3 * cache / size)
    return [
        [torch.randn(batch.tokens, h, batch.head_dim, dtype=torch.bfloat16, device=device) for h in heads]
        for _ in range(sets)
    ]


def largest_difference(result: torch.Tensor, wanted: torch.Tensor, rows: int) -> float:
    """Of so many neighbouring rows of a head, as a share of their norm."""
    wanted = wanted.float()

    def squares(x):
        x = x.square().sum(-1)
        return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % rows)).unflatten(0, (-1, rows)).sum(1)

    share = squares(result.float() - wanted) / squares(wanted)
    return math.sqrt(share.max().item())


class Contender:
    """A peer with its inputs. Each call of a pass uses the next set of them."""

    def __init__(self, name: str, batch: Batch, input_sets):
        self.peer = PEERS[name](batch)
        self.captured = name.endswith("-graph")
        kind = CapturedCall if self.captured else Call
        self.calls = [kind(self.peer, *inputs) for inputs in input_sets]
        self.functions = {"forward": self._each(Call.forward.__name__)}
        if self.calls[0].upstream is not None:
            self.functions["backward"] = self._each(Call.backward.__name__)

    def _each(self, name: str):
        functions = itertools.cycle([getattr(call, name) for call in self.calls])
        return lambda: next(functions)()

    def compare(self, expected: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """The first set's output and gradients; raises if they are not what is expected."""
        for call in self.calls[1:]:
            call.forward()
        call = self.calls[0]
        results = [self.peer.rows(call.forward())]
        if "backward" in self.functions:
            results += self.peer.gradients(call.backward())
        self.max_abs_diff = self.gradient_difference = 0.0
        if expected is not None:
            self.max_abs_diff = (results[0].float() - expected[0].float()).abs().max().item()
            for name, result, wanted in zip(("out", "dq", "dk", "dv"), results, expected):
                rows = 1 if name == "out" else GRADIENT_ROWS
                largest = largest_difference(result.detach(), wanted, rows)
                if name != "out":
                    self.gradient_difference = max(self.gradient_difference, largest)
                if not largest <= LARGEST_DIFFERENCE:
                    raise ArithmeticError(f"{name}: {rows} rows are off by {largest:.2g} of their norm")
        return [result.detach().clone() for result in results]

    def first_ms(self) -> dict[str, float]:
        """Times of single calls; peak_bytes is what they allocate at most, results included. Graphs have allocated
        it before."""
        if not self.captured:
            self.calls[0].out = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = {name: block_ms(function, 1) for name, function in self.functions.items()}
        self.peak_bytes = None if self.captured else torch.cuda.max_memory_allocated() - before
        return times


def measure(batch: Batch, impls: list[str], backward: bool, deadline: float = math.inf) -> list[dict]:
    """After the deadline nothing but dualkv is measured."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    input_sets = random_inputs(batch, backward)
    contenders, errors, expected = {}, {}, None
    functions, first_ms, times = {"matmul": matmul()}, {}, {}
    for name in impls:
        if time.monotonic() > deadline and not name.startswith("dualkv"):
            errors[name] = "skipped: the run's time is spent"
            continue
        try:
            contender = Contender(name, batch, input_sets)
            results = contender.compare(expected)
            expected = results if expected is None else expected
            first = {(name, of): ms for of, ms in contender.first_ms().items()}
        except Exception as error:  # a peer that cannot do this batch is a result
            errors[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            contender = results = None
            free()
            continue
        contenders[name] = contender
        if sum(first.values()) > SLOW_MS:
            times |= first
            contender.calls = contender.functions = contender.peer = None
        else:
            first_ms |= first
            functions |= {(name, of): function for of, function in contender.functions.items()}
        contender = results = None
        free()
    times |= take_turns(functions, first_ms)
    shape = {
        "batch": batch.name,
        "head_dim": batch.head_dim,
        "heads": batch.heads,
        "kv_heads": batch.kv_heads,
        "matmul_tflops": 2 * MATMUL_SIZE**3 / times["matmul"] / 1e9,
    }
    measured = []
    for name, contender in contenders.items():
        ms = {f"{of}_ms": times[name, of] for of in ("forward", "backward") if (name, of) in times}
        record = {**shape, "impl": name, **ms, "useful_tflops": batch.useful_tflops(**ms)}
        record |= {"peak_bytes": contender.peak_bytes, "max_abs_diff": contender.max_abs_diff}
        if backward:
            record["max_gradient_difference"] = contender.gradient_difference
        measured.append(record)
    return measured + [{**shape, "impl": name, "error": error} for name, error in errors.items()]


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def compile_flex(batch: Batch, backward: bool) -> None:
    """Leaves what is compiled for the batch in the cache on disk."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    call = Call(PEERS["flex"](batch), *random_inputs(batch, backward)[0])
    call.forward()
    if backward:
        call.backward()
    torch.cuda.synchronize()
    del call
    free()


def compile_ahead(batches: list[Batch], backward: bool) -> None:
    """FlexAttention takes ten seconds or more for each batch: in several processes at a time."""
    processes = min(len(batches), multiprocessing.cpu_count() - 2)
    if processes > 1:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:  # terminates them at its end
            tasks = [(batch, backward) for batch in batches]
            pool.starmap_async(compile_flex, tasks, 1, error_callback=print).wait(COMPILE_SECONDS)


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
        goal = goals_of(records)[name]
        rates = [both(lambda record: f"{record['useful_tflops']:.0f}", name, impl) for impl in impls]
        reached = both(
            lambda record: f"{goal.reached(record['useful_tflops'], record['matmul_tflops']):.2f}",
            name,
            "dualkv",
        )
        graph = "" if goal.fa3_cascade_graph is None else f" ({goal.fa3_cascade_graph:.0f})"
        rows.append([name, *rates, f"{goal.fa3_cascade:.0f}{graph}", reached])
    return ["batch", *impls, "FA3 cascade (quoted)", "dualkv / goal"], rows, notes_of(records)


def table_1(records: list[dict]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes: ms forward + backward and GiB, and how much faster than FlashAttention-2."""
    found = {(record["batch"], record["impl"]): record for record in records}
    impls = list(dict.fromkeys(record["impl"] for record in records))

    def cell(record: dict | None) -> str:
        if record is None or "error" in record:
            return "OOM" if record and "OutOfMemory" in record["error"] else "-"
        forward, backward = record["forward_ms"], record["backward_ms"]
        peak = record["peak_bytes"] / 2**30
        return f"{forward:.1f} + {backward:.1f} = {forward + backward:.1f}, {peak:.1f}"

    rows = []
    for name in dict.fromkeys(record["batch"] for record in records):
        pair = [found.get((name, impl), {"error": ""}) for impl in ("fa2-replicated", "dualkv")]
        speedup = "-"
        if not any("error" in record for record in pair):
            fa2, ours = (record["forward_ms"] + record["backward_ms"] for record in pair)
            speedup = f"{fa2 / ours:.2f}"
        cells = [cell(found.get((name, impl))) for impl in impls]
        rows.append([name, *cells, speedup, TABLE_1_SPEEDUPS[name]])
    return ["batch", *impls, "FA2 / dualkv", "in the paper"], rows, notes_of(records)


def notes_of(records: list[dict]) -> list[str]:
    return [
        f"{record['batch']}, {record['impl']}: {record['error']}" for record in records if "error" in record
    ]


def show(records: list[dict], as_table_1: bool = False) -> None:
    header, rows, notes = table_1(records) if as_table_1 else table(records)
    print("\n".join(notes))
    passes = "forward + backward" if have_backward(records) else "forward"
    title = f"Useful TFLOP/s, {passes}; in a CUDA graph in brackets"
    if as_table_1:
        title = "Table 1 of the paper: ms forward + backward, peak GiB"
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
    rich.console.Console(width=180).print(drawn)


def with_other_batches(records: list[dict], output: Path, batches: list[Batch]) -> list[dict]:
    """The records, and what the file has of the other `batches`, in their order."""
    measured = {record["batch"] for record in records}
    in_file = json.loads(output.read_text()) if output.exists() else []
    order = [batch.name for batch in batches]
    kept = [record for record in in_file if record["batch"] in order and record["batch"] not in measured]
    return sorted(records + kept, key=lambda record: order.index(record["batch"]))


def main() -> None:
    start = time.monotonic()
    names = [batch.name for batch in BATCHES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", choices=["forward", "both"], default="both")
    parser.add_argument("--table-1", action="store_true", help="the batches of the paper's Table 1")
    parser.add_argument("--batches", nargs="+", choices=names, metavar="N, P, R", help="; ".join(names))
    parser.add_argument("--impls", nargs="+", choices=PEERS, metavar="IMPL", help=", ".join(PEERS))
    parser.add_argument("--budget-s", type=float, default=math.inf, help="after it, nothing but dualkv")
    parser.add_argument("--output", type=Path, help="a JSON file of records; keeps those of other batches")
    parser.add_argument("--commit", help="what is measured, where this is not a git checkout")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; bench/attention_cpu.py measures on a CPU")
    commit = args.commit or checked_out_commit()
    if args.output and commit is None:
        parser.error("this is not a git checkout: --commit says what is measured")
    backward = args.passes == "both"
    if args.table_1 and (args.batches or not backward):
        parser.error("--table-1 has its own batches and both passes")
    batches = (
        TABLE_1 if args.table_1 else [batch for batch in BATCHES if batch.name in (args.batches or names)]
    )
    chosen = args.impls or (TABLE_1_IMPLS if args.table_1 else list(PEERS))
    if not backward:
        chosen = [name for name in chosen if name != "dualkv-deterministic"]  # the same forward

    if "flex" in chosen:
        compile_ahead(batches, backward)
        print(f"FlexAttention compiled after {time.monotonic() - start:.0f} s", flush=True)
    run = {
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tbs": copy_tbs(),
    }
    print(f"{run['device']}, PyTorch {run['torch']}, copy {run['copy_tbs']:.2f} TB/s")
    records = []
    for batch in batches:
        impls = [name for name in chosen if batch.graphs or not name.endswith("-graph")]
        with torch.set_grad_enabled(backward):
            records += [
                {**record, **run} for record in measure(batch, impls, backward, start + args.budget_s)
            ]
        seconds = time.monotonic() - start
        print(
            f"{batch.name}: matmul {records[-1]['matmul_tflops']:.0f} TFLOP/s, after {seconds:.0f} s",
            flush=True,
        )
        free()
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            everything = with_other_batches(records, args.output, TABLE_1 if args.table_1 else BATCHES)
            args.output.write_text(json.dumps(everything, indent=1) + "\n")
    show(records, args.table_1)


if __name__ == "__main__":
    main()
