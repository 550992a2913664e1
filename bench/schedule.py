"""dualkv.schedule on random batches, beside single samples spread over ranks and whole groups in order.

    PYTHONPATH=python python bench/schedule.py [--batches 1000] [--output bench/results/cpu/schedule.json]

Batches are of 64 to 512 groups of 8 to 32 responses on 8 to 64 ranks, with log-normal prompt and response
lengths, costs those of an update of a model of Qwen3-8B's dimensions, and micro-batches of at most 16, 32 or 64
thousand tokens. The table has means over all batches, largest values in parentheses:

    slowest / mean     cost of the slowest rank over the mean of all ranks
    tokens / unsplit   tokens over those of unsplit groups; "forced" is what no schedule can avoid, since a
                       group has to be cut where it exceeds a micro-batch
    step / ideal       cost of the slowest rank over an even share of the unsplit groups' cost

The other two know no micro-batches, and are charged for a prompt only once on each rank that needs it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from checkout import checked_out_commit

import dualkv

QWEN3_8B = dualkv.CostModel.from_dimensions(
    hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151_936
)


@dataclass
class Batch:
    prompts: list[int]
    responses: list[list[int]]
    num_ranks: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        """Of unsplit groups."""
        return sum(self.prompts) + sum(map(sum, self.responses))

    @property
    def cost(self) -> float:
        """Of unsplit groups."""
        return sum(map(QWEN3_8B.cost, self.prompts, self.responses))


def random_batch(seed: int) -> Batch:
    """Lengths within a group are alike: its median is drawn first."""
    random = np.random.default_rng(seed)
    groups = random.integers(64, 513)
    prompts = np.clip(random.lognormal(np.log(1024), 0.6, groups), 32, 4096).astype(int)
    medians = random.lognormal(np.log(1024), 0.5, groups)
    responses = [
        np.clip(random.lognormal(np.log(median), 0.5, random.integers(8, 33)), 1, 8192).astype(int).tolist()
        for median in medians
    ]
    return Batch(
        prompts.tolist(), responses, int(random.integers(8, 65)), int(random.choice([16384, 32768, 65536]))
    )


@dataclass
class Result:
    rank_costs: list[float]
    tokens: int


def scheduled(batch: Batch, equal_samples: bool) -> Result:
    schedule = dualkv.schedule(
        batch.prompts,
        batch.responses,
        num_ranks=batch.num_ranks,
        max_tokens=batch.max_tokens,
        cost_model=QWEN3_8B,
        equal_samples=equal_samples,
    )
    return Result(schedule.rank_costs, schedule.num_tokens)


def result_of(batch: Batch, samples) -> Result:
    """samples[r]: (group, response) of each sample of rank r. Each rank has a prompt once."""
    costs, tokens = [], 0
    for rank in samples:
        lengths = defaultdict(list)
        for g, n in rank:
            lengths[g].append(batch.responses[g][n])
        costs.append(sum(QWEN3_8B.cost(batch.prompts[g], lengths[g]) for g in lengths))
        tokens += sum(batch.prompts[g] + sum(lengths[g]) for g in lengths)
    return Result(costs, tokens)


def single_samples(batch: Batch) -> Result:
    """Karmarkar and Karp's differencing on the lengths of sequences, which does not know groups."""
    samples = [(g, n) for g, lengths in enumerate(batch.responses) for n in range(len(lengths))]
    count, ranks = len(samples), batch.num_ranks
    # A set of samples is a number: of a sample, of a union, which `unions` has as a pair, or -1 for none.
    unions = {}
    heap = []  # (minus the spread, what breaks ties, sums of the ranks, largest first, their sets)
    for i, (g, n) in enumerate(samples):
        sums, sets = np.zeros(ranks), np.full(ranks, -1)
        sums[0], sets[0] = batch.prompts[g] + batch.responses[g][n], i
        heap.append((-sums[0], i, sums, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, a_sums, a_sets = heapq.heappop(heap)
        _, _, b_sums, b_sets = heapq.heappop(heap)
        sums = a_sums + b_sums[::-1]
        sets = np.maximum(a_sets, b_sets[::-1])
        for r in np.flatnonzero(np.minimum(a_sets, b_sets[::-1]) >= 0):
            unions[count + len(unions)] = (int(a_sets[r]), int(b_sets[ranks - 1 - r]))
            sets[r] = count + len(unions) - 1
        order = np.argsort(-sums, kind="stable")
        sums, sets = sums[order], sets[order]
        heapq.heappush(heap, (sums[-1] - sums[0], tie, sums, sets))

    def members(root: int):
        stack = [root]
        while stack:
            node = stack.pop()
            if node in unions:
                stack += unions[node]
            elif node >= 0:
                yield samples[node]

    return result_of(batch, map(members, heap[0][3].tolist()))


def groups_in_order(batch: Batch) -> Result:
    """Each rank has the next G / W groups."""
    bounds = [len(batch.prompts) * r // batch.num_ranks for r in range(batch.num_ranks + 1)]
    return result_of(
        batch,
        [
            [(g, n) for g in range(begin, end) for n in range(len(batch.responses[g]))]
            for begin, end in zip(bounds, bounds[1:])
        ],
    )


METHODS = {
    "dualkv.schedule": lambda batch: scheduled(batch, False),
    "dualkv.schedule, equal samples": lambda batch: scheduled(batch, True),
    "single samples, Karmarkar-Karp": single_samples,
    "whole groups in order": groups_in_order,
}


def ratios(batch: Batch, result: Result) -> tuple[float, float, float]:
    """Slowest rank over mean, tokens over unsplit, slowest rank over an even share of unsplit groups."""
    slowest, ranks = max(result.rank_costs), batch.num_ranks
    return (
        slowest * ranks / sum(result.rank_costs),
        result.tokens / batch.tokens,
        slowest * ranks / batch.cost,
    )


def forced(batch: Batch) -> float:
    """Least tokens over unsplit: each group in as few micro-batches as its tokens need."""
    repeated = sum(
        prompt * (math.ceil(sum(lengths) / (batch.max_tokens - prompt)) - 1)
        for prompt, lengths in zip(batch.prompts, batch.responses)
    )
    return 1 + repeated / batch.tokens


def milliseconds(num_ranks: int, equal_samples: bool) -> float:
    """Median of 15 schedules of 512 groups of 16, on one core."""
    random = np.random.default_rng(0)
    batch = Batch(
        random.lognormal(np.log(1024), 0.6, 512).clip(32, 4096).astype(int).tolist(),
        random.lognormal(np.log(1024), 0.7, (512, 16)).clip(1, 8192).astype(int).tolist(),
        num_ranks,
        32768,
    )
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        scheduled(batch, equal_samples)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


COLUMNS = ("slowest_over_mean", "tokens_over_unsplit", "step_over_ideal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="a JSON file of records: means and largest values")
    args = parser.parse_args()
    records = []
    batches = [random_batch(seed) for seed in range(args.batches)]
    print(f"{'':32}{'slowest / mean':>18}{'tokens / unsplit':>18}{'step / ideal':>18}")
    for name, method in METHODS.items():
        found = np.array([ratios(batch, method(batch)) for batch in batches])
        means, largest = found.mean(axis=0).tolist(), found.max(axis=0).tolist()
        columns = [f"{mean:.3f} ({most:.3f})" for mean, most in zip(means, largest)]
        values = dict(zip(COLUMNS, ({"mean": x, "largest": y} for x, y in zip(means, largest))))
        records.append({"method": name, **values})
        print(f"{name:32}" + "".join(f"{column:>18}" for column in columns), flush=True)
    least = [forced(batch) for batch in batches]
    print(f"{'forced':32}{'':18}{f'{statistics.mean(least):.3f} ({max(least):.3f})':>18}")
    records.append({"method": "forced", COLUMNS[1]: {"mean": statistics.mean(least), "largest": max(least)}})
    for equal_samples in (False, True):
        times = {ranks: milliseconds(ranks, equal_samples) for ranks in (8, 64)}
        name = "equal samples" if equal_samples else "as costs have it"
        listed = " and ".join(f"{ms:.1f}" for ms in times.values())
        print(f"512 groups of 16 on 8 and 64 ranks, {name}: {listed} ms")
        records += [
            {"method": f"512 groups of 16, {name}", "ranks": ranks, "ms": ms} for ranks, ms in times.items()
        ]
    if args.output:
        run = {"batches": args.batches, "commit": checked_out_commit()}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps([{**record, **run} for record in records], indent=1) + "\n")


if __name__ == "__main__":
    main()
