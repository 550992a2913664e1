"""The CUDA kernels on random batches: against the oracle, against the CPU, and the bits that are promised to
be the same."""

from __future__ import annotations

import random

import pytest
import torch

import dualkv
from cases import assert_same_bits, sums_in_any_order
from random_batches import CUDA, Case, paths
from reference import HALF, assert_right, assert_within_budget, blocks

pytestmark = pytest.mark.usefixtures("gpu")


def check(case: Case) -> None:
    """Against the oracle, and a second run. By default only dq may have other bits."""
    found = case.run()
    assert_same_bits(case.run(), found, case.message)
    with sums_in_any_order():
        by_default = case.run()
    assert_same_bits({**by_default, "dq": found["dq"]}, found, case.message)
    arguments = (case.inputs, case.forest, case.sinks, case.dout, case.dlse)
    assert_right(found, *arguments, case.message, **case.options)
    assert_right(by_default, *arguments, f"by default, {case.message}", **case.options)


def normal_case(seed: int, forest, heads: int, kv_heads: int, dim: int, dtype, **options) -> Case:
    """A case of chosen dimensions with dense tensors."""
    case = Case(seed, CUDA)
    case.forest, case.sinks = forest, options.pop("sinks", None)
    *case.inputs, case.dout = (
        torch.randn(forest.total_tokens, h, dim, device="cuda").to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    case.dlse = torch.randn(heads, forest.total_tokens, device="cuda") if seed % 3 == 0 else None
    case.options = {"scale": dim**-0.5, "window_left": None, "softcap": 0.0, **options}
    case.message = (
        f"seed {seed}: {forest.lengths} {forest.parents} {dtype} H={heads},{kv_heads} D={dim} {options}"
    )
    return case


@pytest.mark.parametrize("seed", range(200))
def test_random_batch(seed):
    case = Case(seed, CUDA)
    if seed % 3 == 0:
        case.poison_padding()
    check(case)


@pytest.mark.parametrize("seed", range(500, 540))
def test_outputs_are_like_the_cpus(seed):
    """Gradients are compared in tests/cuda. The CPU backend in float64 is the oracle, and in the inputs' type what the budget is taken from."""
    case = Case(seed, CUDA)
    found = {name: x.cpu() for name, x in case.outputs().items()}
    inputs = [x.cpu() for x in case.inputs]
    sinks = None if case.sinks is None else case.sinks.cpu()

    def on_cpu(dtype):
        tensors = [x.to(dtype) for x in inputs]
        return dualkv.attention(*tensors, case.forest, sinks=sinks, return_lse=True, **case.options)

    (out, lse), (plain_out, _), (_, wide_lse) = map(on_cpu, (torch.float64, case.dtype, torch.float32))
    rows = blocks(case.forest, case.rows)
    assert_within_budget("out", found["out"], out, plain_out, rows, case.message)
    scores = out.shape[2] ** 0.5 * lse.nan_to_num(neginf=0.0).abs().max() if rows else 0.0
    assert_within_budget("lse", found["lse"].t(), lse.t(), wide_lse.t(), rows, case.message, scores)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", CUDA.dims)
def test_every_head_dim(dim, dtype):
    """Over several tiles of keys, the last of which is part filled."""
    forest = dualkv.SegmentForest.from_groups([300], [[177, 1, 0, 40]])
    check(normal_case(dim, forest, 4, 2, dim, dtype))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("heads, kv_heads", CUDA.heads)
def test_every_number_of_query_heads_for_a_kv_head(heads, kv_heads, dtype):
    forest = dualkv.SegmentForest.from_groups([140, 3], [[1, 129, 17], [70, 70]])
    for dim in (64, 128):
        check(normal_case(heads, forest, heads, kv_heads, dim, dtype))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_left": 0},
        {"window_left": 127},
        {"window_left": 128},
        {"window_left": 1000},
        {"softcap": 5.0},
        {"scale": -0.2},
        {"window_left": 300, "softcap": 30.0, "scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_long_sequences(options, with_sinks):
    sinks = torch.linspace(-3, 3, 4, device="cuda") if with_sinks else None
    forest = dualkv.SegmentForest.from_groups([1500], [[700, 64, 129]])
    check(normal_case(0, forest, 4, 1, 128, torch.bfloat16, sinks=sinks, **options))


@pytest.mark.parametrize("window_left", [None, 100])
@pytest.mark.parametrize("seed", range(600, 606))
def test_deep_trees(seed, window_left):
    """A path of 24 segments, with a leaf beside each."""
    rng = random.Random(seed)
    lengths, parents, path = [], [], -1
    for _ in range(24):
        node = len(lengths)
        lengths += [rng.choice((1, rng.randint(0, 90))), rng.choice((0, 1, rng.randint(0, 90)))]
        parents += [path, node]
        path = node
    forest = dualkv.SegmentForest.from_segments(lengths, parents)
    check(normal_case(seed, forest, 6, 2, 64, torch.float16, window_left=window_left))


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(seed):
    """Each root-to-leaf path alone against the whole batch, with other sequences before and after it."""
    case = Case(seed, CUDA)
    whole = case.outputs()
    for alone, rows in paths(case.forest):
        found = case.outputs(alone, rows)
        expected = {"out": whole["out"][rows], "lse": whole["lse"][:, rows]}
        assert_same_bits(found, expected, f"path {alone.lengths}; {case.message}")


@pytest.mark.parametrize("seed", range(3000, 3030))
def test_permuted_responses_permute_the_output(seed):
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, rng.randint(0, 300))) for _ in range(rng.randint(2, 9))]
    prompt = rng.randint(1, 500)
    order = rng.sample(range(len(lengths)), len(lengths))
    options = {"window_left": rng.choice((None, 0, 200)), "softcap": rng.choice((0.0, 4.0))}
    forest = dualkv.SegmentForest.from_groups([prompt], [lengths])
    heads, kv_heads = rng.choice(CUDA.heads)
    case = normal_case(seed, forest, heads, kv_heads, rng.choice(CUDA.dims), rng.choice(HALF), **options)
    parts = torch.arange(prompt, forest.total_tokens).split(lengths)
    rows = torch.cat([torch.arange(prompt), *(parts[n] for n in order)])
    whole = case.outputs()
    found = case.outputs(dualkv.SegmentForest.from_groups([prompt], [[lengths[n] for n in order]]), rows)
    expected = {"out": whole["out"][rows], "lse": whole["lse"][:, rows]}
    assert_same_bits(found, expected, f"order {order}; {case.message}")


@pytest.mark.parametrize("window_left", [None, 100])
@pytest.mark.parametrize("heads, kv_heads, dim", [(8, 2, 128), (14, 2, 64), (32, 1, 96)])
def test_K6_a_response_has_the_same_bits_alone_and_first_or_last_of_eight(heads, kv_heads, dim, window_left):
    prompt, length, others = 333, 150, [1, 77, 0, 128, 129, 300, 31]
    alone = dualkv.SegmentForest.from_groups([prompt], [[length]])
    case = normal_case(0, alone, heads, kv_heads, dim, torch.bfloat16, window_left=window_left)
    expected = case.outputs()
    shared, own = ([x[rows] for x in case.inputs] for rows in (slice(prompt), slice(prompt, None)))
    rest = [torch.randn(sum(others), *x.shape[1:], device="cuda").to(x.dtype) for x in own]
    for place, lengths in (("first", [length, *others]), ("last", [*others, length])):
        pieces = (shared, own, rest) if place == "first" else (shared, rest, own)
        begin = prompt if place == "first" else prompt + sum(others)
        case.inputs = [torch.cat(parts) for parts in zip(*pieces)]
        found = case.outputs(dualkv.SegmentForest.from_groups([prompt], [lengths]))
        rows = torch.cat([torch.arange(prompt), torch.arange(begin, begin + length)])
        picked = {"out": found["out"][rows], "lse": found["lse"][:, rows]}
        assert_same_bits(picked, expected, place)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 133120.0), (torch.float16, 1500.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_scores_weigh_the_same_in_every_tile_however_large(dtype, size, sign):
    """Scaled scores of 1.4e11 and 2.5e7: the spacing of float32 there is more than any shift's slack."""
    rows, dim = 300, 128
    forest = dualkv.SegmentForest.from_groups([rows], [[]])
    q = torch.full((rows, 1, dim), sign * size, device="cuda").to(dtype)
    k = torch.full((rows, 1, dim), size, device="cuda").to(dtype)
    v = torch.randn(rows, 1, dim, device="cuda").to(dtype)
    with torch.no_grad():
        out = dualkv.attention(q, k, v, forest)
    counts = torch.arange(1, rows + 1, device="cuda").double()[:, None, None]
    expected = v.double().cumsum(0) / counts
    assert (out.double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * v.abs().max()


def test_a_scale_of_zero_averages_over_products_of_any_size():
    forest = dualkv.SegmentForest.from_groups([130], [[3]])
    q, k, v = (torch.randn(133, 1, 64, device="cuda") for _ in range(3))
    q, k, v = (x.to(torch.bfloat16) for x in (1e18 * q, 1e18 * k, v))
    with torch.no_grad():
        out = dualkv.attention(q, k, v, forest, scale=0.0)
    assert (out[129, 0].double() - v[:130, 0].double().mean(0)).abs().max() <= torch.finfo(out.dtype).eps


@pytest.mark.parametrize("softcap", [1e3, 1e5, 1e30])
@pytest.mark.parametrize("dtype", HALF)
def test_a_large_softcap_changes_little(dtype, softcap):
    """So little that the oracle goes without one of 1e5 or more, which overflows in plain float16."""
    forest = dualkv.SegmentForest.from_groups([200], [[70, 30]])
    case = normal_case(0, forest, 4, 2, 128, dtype, softcap=softcap)
    found = case.run()
    if softcap >= 1e5:
        case.options["softcap"] = 0.0
    assert_right(found, case.inputs, forest, None, case.dout, case.dlse, case.message, **case.options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("dtype", HALF)
def test_bits_do_not_depend_on_rows_that_share_the_warp(dtype, size, dim):
    """Neighbours that see other keys first, whose scores are huge, or that are NaN padding; scores that grow by
    more than the slack from tile to tile."""
    lengths = [300, 10, 40]
    forest = dualkv.SegmentForest.from_groups([0], [lengths])
    case = normal_case(1, forest, 4, 1, dim, dtype, scale=1.0)
    q, k, v = case.inputs
    q[300:], k[300:] = size * q[300:], size * k[300:]
    padding = torch.full((7, *q.shape[1:]), float("nan"), device="cuda", dtype=dtype)
    case.inputs = [torch.cat([x, padding[:, : x.shape[1]]]) for x in case.inputs]
    together = case.outputs()
    case.inputs = [x[:300] for x in case.inputs]
    alone = case.outputs(dualkv.SegmentForest.from_groups([0], [[300]]))
    picked = {"out": together["out"][:300], "lse": together["lse"][:, :300]}
    assert_same_bits(picked, alone, case.message)
