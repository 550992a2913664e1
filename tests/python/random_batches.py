"""Random batches and calls of dualkv.attention over them, from a seed."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

import dualkv
from reference import results, sequences


class Ranges(NamedTuple):
    """What a case is drawn from."""

    dtypes: tuple
    heads: tuple  # (H, Hk)
    dims: tuple
    longest: tuple  # segment of a batch
    segments: int
    device: str


CPU = Ranges(
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    heads=((1, 1), (4, 2), (6, 2), (14, 2), (7, 1), (3, 3)),
    dims=(1, 3, 8, 16, 40, 64, 80, 128, 256, 512),
    longest=(3, 20, 70, 150),
    segments=6,
    device="cpu",
)
CUDA = Ranges(
    dtypes=(torch.bfloat16, torch.float16),
    heads=((1, 1), (3, 3), (4, 2), (6, 2), (4, 1), (5, 1), (6, 1), (14, 2), (8, 1), (16, 1), (32, 1)),
    dims=tuple(range(8, 129, 8)),
    longest=(3, 70, 150, 700),
    segments=12,
    device="cuda",
)


def random_forest(rng: random.Random, ranges: Ranges = CPU) -> dualkv.SegmentForest:
    longest = rng.choice(ranges.longest)
    kind = rng.choice(("groups", "tree", "roots"))
    if kind == "groups":
        prompts = [rng.choice((1, rng.randint(0, longest))) for _ in range(rng.randint(1, 3))]
        responses = [
            [rng.choice((0, 1, rng.randint(0, longest))) for _ in range(rng.randint(0, 4))] for _ in prompts
        ]
        return dualkv.SegmentForest.from_groups(prompts, responses)
    count = rng.randint(0, ranges.segments)
    lengths = [rng.choice((0, 1, rng.randint(0, longest))) for _ in range(count)]
    parents, path = [], []
    for segment in range(count):
        if kind == "tree":
            path = path[: rng.randint(0, len(path))]
            parents.append(path[-1] if path else -1)
            path.append(segment)
        else:
            parents.append(-1)
    return dualkv.SegmentForest.from_segments(lengths, parents)


def random_tensor(rng: random.Random, rows: int, heads: int, dim: int, dtype, device="cpu") -> torch.Tensor:
    """[rows, heads, dim] of normal values, in a random memory layout."""

    def normal(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    layout = rng.choice(
        ("dense", "heads first", "sliced", "sliced by 8", "dim first", "one head for all", "one row for all")
    )
    if layout == "heads first":
        return normal(heads, rows, dim).transpose(0, 1)
    if layout == "sliced":
        return normal(rows + 2, 2 * heads, dim + 3)[1 : rows + 1, ::2, 2 : dim + 2]
    if layout == "sliced by 8":
        return normal(rows + 2, 2 * heads, dim + 16)[1 : rows + 1, ::2, 8 : dim + 8]
    if layout == "dim first":
        return normal(dim, heads, rows).permute(2, 1, 0)
    if layout == "one head for all":
        return normal(rows, 1, dim).expand(rows, heads, dim)
    if layout == "one row for all":
        return normal(1, heads, dim).expand(rows, heads, dim)
    return normal(rows, heads, dim)


class Case:
    """A random call of dualkv.attention with upstream gradients."""

    def __init__(self, seed: int, ranges: Ranges = CPU):
        self.seed = seed
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.forest = random_forest(rng, ranges)
        self.dtype = rng.choice(ranges.dtypes)
        heads, kv_heads = rng.choice(ranges.heads)
        dim = rng.choice(ranges.dims)
        self.rows = self.forest.total_tokens + rng.choice((0, 0, 5))
        shapes = ((self.rows, heads, dim), (self.rows, kv_heads, dim), (self.rows, kv_heads, dim))
        self.inputs = [random_tensor(rng, *shape, self.dtype, ranges.device) for shape in shapes]
        self.dout = random_tensor(rng, self.rows, heads, dim, self.dtype, ranges.device)
        self.dlse = torch.randn(heads, self.rows, device=ranges.device) if rng.random() < 0.5 else None
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.sinks = torch.randn(heads, dtype=wide, device=ranges.device) * 2 if rng.random() < 0.3 else None
        self.options = {
            "scale": rng.choice((dim**-0.5, dim**-0.5, 0.0, -0.3, 1.0)),
            "window_left": rng.choice((None, None, 0, 1, 17, 64, 2**31 - 1)),
            "softcap": rng.choice((0.0, 0.0, 1.5, 30.0)),
        }
        self.message = (
            f"seed {seed}: {self.forest.lengths} {self.forest.parents} {self.dtype} H={heads},{kv_heads} "
            f"D={dim} rows={self.rows} {[x.stride() for x in self.inputs]} sinks={self.sinks is not None} "
            f"dlse={self.dlse is not None} {self.options}"
        )

    def poison_padding(self) -> None:
        *self.inputs, self.dout = (x.contiguous() for x in (*self.inputs, self.dout))
        for x in (*self.inputs, self.dout):
            x[self.forest.total_tokens :] = float("nan")

    def run(self, forest=None, rows=None):
        """The library's results, of chosen rows only if given."""
        forest = self.forest if forest is None else forest
        pick = (lambda x: x) if rows is None else (lambda x: x[rows])
        return results(
            lambda q, k, v, sinks: dualkv.attention(
                q, k, v, forest, sinks=sinks, return_lse=True, **self.options
            ),
            [pick(x) for x in self.inputs],
            self.sinks,
            pick(self.dout),
            None if self.dlse is None else pick(self.dlse.t()).t(),
        )

    def outputs(self, forest=None, rows=slice(None)) -> dict:
        """Of the forward pass alone."""
        inputs = [x[rows] for x in self.inputs]
        out, lse = dualkv.attention(
            *inputs, forest or self.forest, sinks=self.sinks, return_lse=True, **self.options
        )
        return {"out": out, "lse": lse}


def paths(forest):
    """For each leaf the forest of its sequence alone, and the rows of that."""
    lengths, parents = forest.lengths, forest.parents
    for leaf, rows in zip(sorted(set(range(len(lengths))) - set(parents)), sequences(forest)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        yield (
            dualkv.SegmentForest.from_segments([lengths[s] for s in path], [*range(-1, len(path) - 1)]),
            rows,
        )
