"""Random batches against the oracle, and the bits that are promised to be the same."""

from __future__ import annotations

import random

import pytest
import torch

import dualkv
from cases import assert_same_bits
from random_batches import Case, paths
from reference import assert_right


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
    for alone, rows in paths(case.forest):
        found = case.run(alone, rows)
        message = f"path {alone.lengths}; {case.message}"
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
