"""The backward on CUDA: order of sums, graphs, streams, threads, long contexts. test_cuda_attention.py compares
its gradients of random batches with the oracle, test_cuda_cases.py those with known answers."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dualkv
from cases import assert_same_bits, attend, sums_in_any_order
from reference import HALF, assert_right

pytestmark = pytest.mark.usefixtures("gpu")

groups = dualkv.SegmentForest.from_groups
GRADIENTS = ("dq", "dk", "dv")
FOREST = groups([700, 20], [[170, 0, 1, 300], [90, 33]])


def tensors(forest=FOREST, seed=0, rows=None, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16):
    """Normal q, k, v and dout."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = forest.total_tokens if rows is None else rows
    return [
        torch.randn(rows, h, dim, generator=generator, device="cuda").to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


# ------------------------------------------------------------------------------------------- order of sums


@pytest.mark.parametrize("seed", range(3000, 3020))
def test_permuted_responses_permute_the_gradients(seed):
    """Within the budget: tiles of query rows are cut elsewhere, and sums run in another order."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, rng.randint(0, 300))) for _ in range(rng.randint(2, 9))]
    prompt = rng.randint(1, 500)
    order = rng.sample(range(len(lengths)), len(lengths))
    window_left, dtype = rng.choice((None, 0, 200)), rng.choice(HALF)
    heads, kv_heads = rng.choice(((8, 2), (7, 1), (3, 3)))
    forest, permuted = groups([prompt], [lengths]), groups([prompt], [[lengths[n] for n in order]])
    parts = torch.arange(prompt, forest.total_tokens).split(lengths)
    rows = torch.cat([torch.arange(prompt), *(parts[n] for n in order)])
    *inputs, dout = tensors(forest, seed, heads=heads, kv_heads=kv_heads, dim=64, dtype=dtype)
    found = attend([x[rows] for x in inputs], permuted, dout[rows], window_left=window_left)
    back = torch.argsort(rows)
    found = {name: x[:, back] if name == "lse" else x[back] for name, x in found.items()}
    options = {"window_left": window_left, "scale": 64**-0.5}
    message = f"seed {seed}: P={prompt} R={lengths} order {order} {window_left} {dtype} H={heads},{kv_heads}"
    assert_right(found, inputs, forest, None, dout, None, message, **options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", HALF)
def test_bits_of_twenty_runs_beside_other_work(dtype, dim):
    forest = groups([900], [[100, 1, 37] * 8])
    *inputs, dout = tensors(forest, dim=dim, dtype=dtype)
    sinks = torch.linspace(-2, 2, 8, device="cuda")
    expected = attend(inputs, forest, dout, sinks=sinks, deterministic=True)
    noise, other = torch.randn(3000, 3000, device="cuda"), torch.cuda.Stream()
    with sums_in_any_order():
        for run in range(20):
            with torch.cuda.stream(other):
                noise @ noise
            by_default = attend(inputs, forest, dout, sinks=sinks)
            assert_same_bits({**by_default, "dq": expected["dq"]}, expected, f"run {run}")
            found = attend(inputs, forest, dout, sinks=sinks, deterministic=True)
            assert_same_bits(found, expected, f"run {run}")


# ------------------------------------------------------------------------------------------------- autograd


def test_second_derivatives_are_refused():
    q, k, v, _ = (x.requires_grad_() for x in tensors())
    (gradient,) = torch.autograd.grad(dualkv.attention(q, k, v, FOREST).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="dualkv.attention can be differentiated once"):
        gradient.sum().backward()


def test_the_function_of_the_paper_has_the_gradients_of_attention():
    """flash_attn_dualkv_varlen_func; the prompt's rows, which have no gradient here, are no queries there."""
    prompt, lengths = 300, [170, 1, 90]
    forest = groups([prompt], [lengths])
    *inputs, dout = tensors(forest)
    dout[:prompt] = 0
    expected = attend(inputs, forest, dout)
    q, k, v = inputs
    parts = [x.clone().requires_grad_() for x in (q[prompt:], k[:prompt], v[:prompt], k[prompt:], v[prompt:])]
    cu = [0, 170, 171, 261]
    out = dualkv.flash_attn_dualkv_varlen_func(*parts, cu, cu, 170, prompt, 170)
    assert torch.equal(out, expected["out"][prompt:])
    dq, *dkv = torch.autograd.grad(out, parts, dout[prompt:])
    found = {"dq": dq, "dk": torch.cat(dkv[::2]), "dv": torch.cat(dkv[1::2])}
    expected["dq"] = expected["dq"][prompt:]
    for name in GRADIENTS:
        right = expected[name]
        atol = 1e-3 * right.abs().max().item()
        torch.testing.assert_close(found[name], right, rtol=2**-7, atol=atol, msg=name)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_over_several_tiles(use_reentrant):
    """Under autocast, with fp32 weights."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [
        (torch.randn(64, 3 * 64, generator=generator, device="cuda") / 8).requires_grad_() for _ in range(3)
    ]

    def layer(x, weight):
        q, k, v = (x @ weight).view(len(x), 3, 2, 32).unbind(1)
        return x + dualkv.attention(q, k, v, FOREST).flatten(1)

    def gradients(run):
        x = torch.randn(FOREST.total_tokens, 64, generator=generator.manual_seed(1), device="cuda")
        x.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            for weight in weights:
                x = run(layer, x, weight)
        for weight in weights:
            weight.grad = None
        x.square().mean().backward()
        return [weight.grad for weight in weights]

    plain = gradients(lambda f, *arguments: f(*arguments))
    again = gradients(lambda f, *arguments: checkpoint(f, *arguments, use_reentrant=use_reentrant))
    assert all(torch.equal(x, y) for x, y in zip(again, plain))


# ----------------------------------------------------------------------------------------- graphs and streams


@pytest.mark.parametrize("ordered", [True, False])
def test_a_graph_is_replayed_with_any_forest_that_fits(ordered):
    """One whose key tiles are cut into parts too, though that of the capture has none."""
    if not ordered:
        with sums_in_any_order():
            replay_with_any_forest(ordered)
    else:
        replay_with_any_forest(ordered)


def replay_with_any_forest(ordered: bool) -> None:
    capacity, sizes = 2000, {"heads": 4, "kv_heads": 1, "dim": 128}
    forests = [
        groups([40], [[9, 130]]),
        groups([], []),
        groups([100], [[10] * 190]),
        dualkv.SegmentForest.from_segments([300, 100, 50, 200], [-1, 0, 1, 0]),
        groups([1] * 100, [[1, 2]] * 100),
        groups([capacity], [[]]),
    ]
    slot = dualkv.DevicePlan(
        forests[0], num_heads=4, num_kv_heads=1, head_dim=128, max_tokens=capacity, max_bytes=1 << 18
    )
    static = tensors(rows=capacity, **sizes)
    attend(static[:3], slot, static[3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(static[:3], slot, static[3])
    for seed, forest in enumerate([*forests, *reversed(forests)]):
        total = forest.total_tokens
        *inputs, dout = tensors(seed=seed, rows=capacity, **sizes)
        for x, values in zip(static, (*inputs, dout)):
            x.copy_(values)
            x[total:] = math.nan
        slot.load(forest)
        graph.replay()
        expected = attend(inputs, forest, dout)
        if not ordered:
            size = expected["dq"].abs().max() if total else 0.0
            atol = torch.finfo(torch.bfloat16).eps * float(size)
            torch.testing.assert_close(found["dq"], expected["dq"], rtol=0, atol=atol, msg=f"{forest}")
            expected["dq"] = found["dq"]
        assert_same_bits(found, expected, f"{forest}")
        assert not any(found[name][total:].any() for name in ("out", *GRADIENTS))


@pytest.mark.parametrize("long_first", [True, False])
def test_a_graph_has_the_kv_heads_abreast_of_its_capture(long_first):
    """Half of them for the long prompt, all for the short one. A tile's rows may come in another order then, but not
    the turns of dq."""
    forests = [groups([8448], [[100] * 3]), groups([40], [[9, 130]])]
    capacity, sizes = forests[0].total_tokens, {"heads": 8, "kv_heads": 8, "dim": 64}
    captured, replayed = forests if long_first else forests[::-1]
    slot = dualkv.DevicePlan(
        captured, num_heads=8, num_kv_heads=8, head_dim=64, max_tokens=capacity, max_bytes=1 << 20
    )
    *inputs, dout = tensors(rows=capacity, **sizes)
    attend(inputs, slot, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(inputs, slot, dout)
    slot.load(replayed)
    graph.replay()
    expected = attend(inputs, replayed, dout)
    for name in ("dk", "dv"):
        atol = 2 * torch.finfo(torch.bfloat16).eps * float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol)
        expected[name] = found[name]
    assert_same_bits(found, expected, f"captured {captured}, replayed {replayed}")


def test_a_plan_that_is_replaced_between_forward_and_backward_is_refused():
    slot = dualkv.DevicePlan(FOREST, num_heads=8, num_kv_heads=2, head_dim=128)
    q, k, v, dout = (x.requires_grad_() for x in tensors())
    out = dualkv.attention(q, k, v, slot)
    slot.load(FOREST)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def test_threads_with_streams_of_their_own():
    forests = [FOREST, groups([40], [[9, 130]])]
    inputs = [tensors(forest, seed) for seed, forest in enumerate(forests)]
    expected = [attend(x[:3], forest, x[3]) for x, forest in zip(inputs, forests)]
    torch.cuda.synchronize()

    def work(worker):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = []
            for n in range(worker, worker + 20):
                *x, dout = inputs[n % 2]
                results.append(attend(x, forests[n % 2], dout))
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(2) as pool:
        for worker, results in enumerate(pool.map(work, range(2))):
            for n, found in enumerate(results, start=worker):
                assert_same_bits(found, expected[n % 2], f"worker {worker}, call {n}")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode):
    """With the mode that captures graphs by itself too."""

    def block(x, weight, forest):
        q, k, v = (x @ weight).view(len(x), -1, 64).split([4, 2, 2], dim=1)
        return (torch.relu(dualkv.attention(q, k, v, forest)).flatten(1) * 2).mean()

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(FOREST.total_tokens, 96, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(96, 512, generator=generator, device="cuda") / 10).bfloat16().requires_grad_()
    (expected,) = torch.autograd.grad(block(x, weight, FOREST), weight)
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(4):
        try:
            loss = compiled(x, weight, FOREST)
        except torch._inductor.exc.InductorError as error:
            pytest.skip(f"inductor has no compiler here: {error}")
        (found,) = torch.autograd.grad(loss, weight)
        atol = 2e-2 * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=atol)


# --------------------------------------------------------------------------------------------- long contexts


def test_a_prompt_of_64k_with_16_responses_of_2k():
    """Each row of dq and of dk, dv is a sum over a row or a column of the scores: some of both are compared with
    dense float64 attention, for one KV head and its queries."""
    prompt, length, count, heads, kv_heads, dim = 65_536, 2048, 16, 8, 2, 128
    forest = groups([prompt], [[length] * count])
    *inputs, dout = tensors(forest, heads=heads, kv_heads=kv_heads, dim=dim)
    dout[:prompt] = 0  # so that a key of the prompt is seen by the responses alone
    with sums_in_any_order():
        found = attend(inputs, forest, dout)
    kv_head, scale = 1, dim**-0.5
    own_heads = slice(kv_head * heads // kv_heads, (kv_head + 1) * heads // kv_heads)
    keys = torch.tensor([0, 1, 127, 128, 40_000, prompt - 1], device="cuda")
    dk, dv = torch.zeros(2, len(keys), dim, dtype=torch.float64, device="cuda")
    errors = {name: 0.0 for name in ("out", "dq")}
    q, k, v, dout = (
        x.double()
        for x in (inputs[0][:, own_heads], *(x[:, kv_head] for x in inputs[1:]), dout[:, own_heads])
    )
    for n in range(count):
        begin = prompt + n * length
        visible = torch.cat([torch.arange(prompt), torch.arange(begin, begin + length)]).cuda()
        own_k, own_v = k[visible], v[visible]
        for first in range(0, length, 256):
            rows = torch.arange(begin + first, begin + first + 256, device="cuda")
            hidden = torch.arange(prompt + length, device="cuda") > (rows - begin + prompt)[:, None]
            for head in range(q.shape[1]):
                scores = (scale * q[rows, head] @ own_k.t()).masked_fill(hidden, -math.inf)
                weights = scores.softmax(1)
                out = weights @ own_v
                dp = dout[rows, head] @ own_v.t()
                ds = weights * (dp - (out * dout[rows, head]).sum(1, keepdim=True))
                dv += weights[:, keys].t() @ dout[rows, head]
                dk += scale * ds[:, keys].t() @ q[rows, head]
                for name, right in (("out", out), ("dq", scale * ds @ own_k)):
                    x = found[name][rows, own_heads.start + head].double()
                    errors[name] = max(errors[name], ((x - right).abs().max() / right.abs().max()).item())
    # Roundings of probabilities, of scores' gradients and of results to bfloat16, against the largest value.
    assert max(errors.values()) <= 2 * torch.finfo(torch.bfloat16).eps, errors
    for name, right in (("dk", dk), ("dv", dv)):
        error = (found[name][keys, kv_head].double() - right).abs().max() / right.abs().max()
        assert error <= 2 * torch.finfo(torch.bfloat16).eps, (name, error.item())
