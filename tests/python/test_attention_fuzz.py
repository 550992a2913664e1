"""Random batches against the oracle, and the bits that are promised to be the same."""

from __future__ import annotations

import random

import pytest
import torch

import dualkv
from reference import assert_right, results, sequences

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS = ((1, 1), (4, 2), (6, 2), (14, 2), (7, 1), (3, 3))
DIMS = (1, 3, 8, 16, 40, 64, 80, 128, 256, 512)


def random_forest(rng: random.Random) -> dualkv.SegmentForest:
    longest = rng.choice((3, 20, 70, 150))
    kind = rng.choice(("groups", "tree", "roots"))
    if kind == "groups":
        prompts = [rng.choice((1, rng.randint(0, longest))) for _ in range(rng.randint(1, 3))]
        responses = [
            [rng.choice((0, 1, rng.randint(0, longest))) for _ in range(rng.randint(0, 4))] for _ in prompts
        ]
        return dualkv.SegmentForest.from_groups(prompts, responses)
    count = rng.randint(0, 6)
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


def random_tensor(rng: random.Random, rows: int, heads: int, dim: int, dtype) -> torch.Tensor:
    """[rows, heads, dim] of normal values, in a random memory layout."""
    layout = rng.choice(
        ("dense", "heads first", "sliced", "dim first", "one head for all", "one row for all")
    )
    if layout == "heads first":
        return torch.randn(heads, rows, dim).to(dtype).transpose(0, 1)
    if layout == "sliced":
        return torch.randn(rows + 2, 2 * heads, dim + 3).to(dtype)[1 : rows + 1, ::2, 2 : dim + 2]
    if layout == "dim first":
        return torch.randn(dim, heads, rows).to(dtype).permute(2, 1, 0)
    if layout == "one head for all":
        return torch.randn(rows, 1, dim).to(dtype).expand(rows, heads, dim)
    if layout == "one row for all":
        return torch.randn(1, heads, dim).to(dtype).expand(rows, heads, dim)
    return torch.randn(rows, heads, dim).to(dtype)


class Case:
    """A random call of dualkv.attention with upstream gradients."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.forest = random_forest(rng)
        self.dtype = rng.choice(DTYPES)
        heads, kv_heads = rng.choice(HEADS)
        dim = rng.choice(DIMS)
        self.rows = self.forest.total_tokens + rng.choice((0, 0, 5))
        shapes = ((self.rows, heads, dim), (self.rows, kv_heads, dim), (self.rows, kv_heads, dim))
        self.inputs = [random_tensor(rng, *shape, self.dtype) for shape in shapes]
        self.dout = random_tensor(rng, self.rows, heads, dim, self.dtype)
        self.dlse = torch.randn(heads, self.rows) if rng.random() < 0.5 else None
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.sinks = torch.randn(heads, dtype=wide) * 2 if rng.random() < 0.3 else None
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
        self.inputs = [x.contiguous() for x in self.inputs]
        for x in (*self.inputs, self.dout.contiguous()):
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


def assert_same_bits(actual: dict, expected: dict, message: str) -> None:
    for name, bits in expected.items():
        assert torch.equal(actual[name], bits), f"{name} has other bits; {message}"


@pytest.mark.parametrize("seed", range(120))
def test_random_batch(seed):
    case = Case(seed)
    if seed % 3 == 0:
        case.poison_padding()
    assert_right(
        case.run(), case.inputs, case.forest, case.sinks, case.dout, case.dlse, case.message, **case.options
    )


@pytest.mark.parametrize("seed", range(1000, 1025))
def test_same_bits_in_every_run_and_with_any_number_of_threads(seed, threads):
    case = Case(seed)
    threads(1)
    expected = case.run()
    assert_same_bits(case.run(), expected, case.message)
    for count in (2, 3):
        threads(count)
        assert_same_bits(case.run(), expected, f"{count} threads; {case.message}")


@pytest.mark.parametrize("seed", range(2000, 2025))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(seed):
    """Each root-to-leaf path alone against the whole batch, with other sequences before and after it."""
    case = Case(seed)
    whole = case.run()
    lengths, parents = case.forest.lengths, case.forest.parents
    leaves = sorted(set(range(len(lengths))) - set(parents))
    for leaf, rows in zip(leaves, sequences(case.forest)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = dualkv.SegmentForest.from_segments([lengths[s] for s in path], [*range(-1, len(path) - 1)])
        found = case.run(alone, rows)
        message = f"leaf {leaf}; {case.message}"
        assert torch.equal(found["out"], whole["out"][rows]), message
        assert torch.equal(found["lse"], whole["lse"][:, rows]), message


@pytest.mark.parametrize("seed", range(3000, 3020))
def test_permuted_responses_permute_the_output(seed):
    rng = random.Random(seed)
    case = Case(seed)
    lengths = [rng.randint(0, 90) for _ in range(rng.randint(2, 6))]
    prompt = rng.randint(1, 150)
    order = rng.sample(range(len(lengths)), len(lengths))
    case.forest = dualkv.SegmentForest.from_groups([prompt], [lengths])
    case.rows = case.forest.total_tokens
    heads, kv_heads, dim = case.inputs[0].shape[1], case.inputs[1].shape[1], case.inputs[0].shape[2]
    case.inputs = [torch.randn(case.rows, h, dim).to(case.dtype) for h in (heads, kv_heads, kv_heads)]
    case.dout = torch.randn(case.rows, heads, dim).to(case.dtype)
    case.dlse = None
    parts = torch.arange(prompt, case.rows).split(lengths)
    rows = torch.cat([torch.arange(prompt), *(parts[n] for n in order)])
    permuted = dualkv.SegmentForest.from_groups([prompt], [[lengths[n] for n in order]])
    whole, found = case.run(), case.run(permuted, rows)
    message = f"P={prompt} R={lengths} order {order} {case.options} {case.dtype} seed {seed}"
    assert torch.equal(found["out"], whole["out"][rows]), message
    assert torch.equal(found["lse"], whole["lse"][:, rows]), message
