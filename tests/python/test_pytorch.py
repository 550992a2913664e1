"""The operators inside PyTorch: opcheck, gradcheck, torch.compile, meta tensors, threads and fork."""

from __future__ import annotations

import importlib
import os
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import dualkv

FOREST = dualkv.SegmentForest.from_groups([3, 1], [[2, 0, 1], [4]])
ROWS = FOREST.total_tokens + 2


def attention_inputs(dtype=torch.float64, rows=ROWS, heads=4, kv_heads=2, dim=3, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, h, dim, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for h in (heads, kv_heads, kv_heads)
    ]


def logprob_inputs(dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
        for shape in ((5, 4), (7, 4), (7,))
    )
    return hidden, weight, bias, torch.tensor([2, 0, 2, 4, 1]), torch.tensor([6, 0, 3, -100, 3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_opcheck_attention(dtype, with_sinks):
    q, k, v = attention_inputs(dtype, requires_grad=False)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sinks = torch.randn(4, dtype=wide) if with_sinks else None
    options = (0.7, 2, 1.5, 0)
    inputs = (q, k, v, sinks, FOREST.segments, *options)
    out, lse = torch.ops.dualkv.attention_forward(*inputs)
    torch.library.opcheck(torch.ops.dualkv.attention_forward.default, inputs)
    for dlse in (None, torch.randn_like(lse)):
        backward = (
            torch.randn_like(q),
            dlse,
            q,
            k,
            v,
            sinks,
            FOREST.segments,
            out,
            lse.nan_to_num(neginf=0),
            *options,
            False,
        )
        torch.library.opcheck(torch.ops.dualkv.attention_backward.default, backward)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("needed", [(True, True, True), (False, True, False)])
def test_opcheck_linear_logprob(dtype, needed):
    hidden, weight, bias, rows, targets = logprob_inputs(dtype, requires_grad=False)
    inputs = (hidden, weight, bias, rows, targets, 0.7, 1.5)
    torch.library.opcheck(torch.ops.dualkv.linear_logprob_forward.default, inputs)
    logprob, entropy, lse = torch.ops.dualkv.linear_logprob_forward(*inputs)
    for dentropy in (None, torch.randn_like(entropy)):
        backward = (torch.randn_like(logprob), dentropy, *inputs[:5], entropy, lse, 0.7, 1.5, *needed)
        torch.library.opcheck(torch.ops.dualkv.linear_logprob_backward.default, backward)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": -0.4},
        {"window_left": 1},
        {"softcap": 1.2},
        {"softcap": 0.8, "window_left": 2, "scale": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradcheck_attention(options, with_sinks):
    inputs = attention_inputs()
    sinks = (
        torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True) if with_sinks else None
    )

    def attend(q, k, v, sinks):
        out, lse = dualkv.attention(q, k, v, FOREST, sinks=sinks, return_lse=True, **options)
        return out, lse[:, : FOREST.total_tokens]  # the rest is -inf

    torch.autograd.gradcheck(attend, (*inputs, sinks))


@pytest.mark.parametrize("prompt_rows", [0, 3])
def test_gradcheck_flash_attn_dualkv_varlen_func(prompt_rows):
    q, k, v = attention_inputs(rows=7)
    context, decoded = (
        (x.detach()[:3].clone().requires_grad_() for x in (k, v)),
        (x.detach()[3:] for x in (k, v)),
    )
    decoded = [x.clone().requires_grad_() for x in decoded]
    q = q.detach()[3 - prompt_rows :].clone().requires_grad_()
    cu_q = [0, 2 + prompt_rows, 2 + prompt_rows, 3 + prompt_rows]

    def attend(q, *kv):
        return dualkv.flash_attn_dualkv_varlen_func(q, *kv, cu_q, [0, 2, 2, 3], 2 + prompt_rows, 3, 2)

    torch.autograd.gradcheck(attend, (q, *context, *decoded))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"softcap": 1.1}, {"temperature": 1.7, "softcap": 0.9}]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradcheck_linear_logprob(options, with_bias):
    hidden, weight, bias, rows, targets = logprob_inputs()

    def score(hidden, weight, bias):
        return dualkv.linear_logprob(hidden, weight, rows, targets, bias=bias, **options)

    torch.autograd.gradcheck(score, (hidden, weight, bias if with_bias else None))


def test_second_derivatives_are_refused():
    q, k, v = attention_inputs()
    loss = dualkv.attention(q, k, v, FOREST).square().sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="dualkv.attention can be differentiated once"):
        gradient.sum().backward()


def test_H4_compiled_attention_equals_eager_and_recompiles_at_most_once():
    def step(q, k, v, sinks, forest):
        out = dualkv.attention(q, k, v, forest, window_left=50, softcap=2.0, sinks=sinks)
        return out.mean()

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (128, 196, 256, 257):
        forest = dualkv.SegmentForest.from_groups([rows - 60], [[20, 40]])
        q, k, v = attention_inputs(torch.float32, rows, dim=16)
        q = q.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()
        wanted = [q, k, v, torch.randn(4).requires_grad_()]
        expected_loss = step(*wanted, forest)
        expected = torch.autograd.grad(expected_loss, wanted)
        loss = compiled(*wanted, forest)
        assert torch.equal(loss, expected_loss), rows
        for gradient, right in zip(torch.autograd.grad(loss, wanted), expected):
            assert torch.equal(gradient, right), rows
    assert backend.frame_count <= 2


def test_H4_a_changed_forest_needs_no_recompile():
    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(dualkv.attention, fullgraph=True, backend=backend)
    q, k, v = attention_inputs(torch.float32, requires_grad=False)
    for forest in (FOREST, dualkv.SegmentForest.from_groups([2, 4], [[0, 3, 1], [1]])):
        assert torch.equal(compiled(q, k, v, forest), dualkv.attention(q, k, v, forest))
    assert backend.frame_count == 1


def test_inductor_compiles_attention_between_other_operations():
    def block(x, weight, forest):
        q, k, v = (x @ weight).view(-1, 3, 2, 8).unbind(1)
        return torch.relu(dualkv.attention(q, k, v, forest) * 2).sum()

    forest = dualkv.SegmentForest.from_groups([9], [[5, 2]])
    x, weight = torch.randn(16, 12, requires_grad=True), torch.randn(12, 48, requires_grad=True)
    expected = torch.autograd.grad(block(x, weight, forest), (x, weight))
    try:
        loss = torch.compile(block, fullgraph=True)(x, weight, forest)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"inductor has no compiler here: {error}")
    for gradient, right in zip(torch.autograd.grad(loss, (x, weight)), expected):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)


def test_compiled_linear_logprob_equals_eager():
    def step(hidden, weight, bias, rows, targets):
        logp, entropy = dualkv.linear_logprob(hidden, weight, rows, targets, bias=bias, temperature=0.7)
        return logp.sum() + 0.1 * entropy.sum()

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for count in (5, 9, 17):
        hidden, weight, bias, rows, targets = logprob_inputs(torch.float32)
        rows, targets = rows.repeat(4)[:count], targets.repeat(4)[:count]
        wanted = (hidden, weight, bias)
        expected_loss = step(*wanted, rows, targets)
        expected = torch.autograd.grad(expected_loss, wanted)
        loss = compiled(*wanted, rows, targets)
        assert torch.equal(loss, expected_loss)
        for gradient, right in zip(torch.autograd.grad(loss, wanted), expected):
            assert torch.equal(gradient, right)
    assert backend.frame_count <= 2


def test_compiled_under_autocast():
    q, k, v = attention_inputs(torch.float32, requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(dualkv.attention, fullgraph=True, backend="eager")(q, k, v, FOREST)
        assert compiled.dtype == torch.bfloat16
        assert torch.equal(compiled, dualkv.attention(q, k, v, FOREST))


def test_meta_tensors_have_the_shapes_and_types_of_real_ones():
    q, k, v = attention_inputs(torch.bfloat16)
    hidden, weight, bias, rows, targets = logprob_inputs(torch.bfloat16)

    def both(q, k, v, hidden, weight, bias, rows, targets):
        results = [*dualkv.attention(q, k, v, FOREST, return_lse=True)]
        return results + [*dualkv.linear_logprob(hidden, weight, rows, targets, bias=bias)]

    inputs = (q, k, v, hidden, weight, bias, rows, targets)
    for fake, real in zip(both(*(x.to("meta") for x in inputs)), both(*inputs)):
        assert fake.is_meta
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_a_kernel_for_cuda_is_asked_for_by_name():
    """What a CUDA tensor would meet: the dispatcher picks these by the tensors' device."""
    for name in (
        "attention_forward",
        "attention_backward",
        "linear_logprob_forward",
        "linear_logprob_backward",
    ):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dualkv::{name}", "CUDA")


@pytest.mark.parametrize("argument", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_gradients_with_the_same_bits_are_asked_for_by_either_of_two_switches(argument, mode, monkeypatch):
    """PyTorch's is looked at when the backward runs. (It lets a compiled function run in one mode only.)"""
    module = importlib.import_module("dualkv.attention")
    library, asked = module.library, []

    class Recorder:
        def __getattr__(self, name):
            if name == "dualkv_attention_backward":
                return lambda params: asked.append(params._obj.deterministic)
            return getattr(library, name)

    monkeypatch.setattr(module, "library", Recorder())

    def step(q, k, v):
        return dualkv.attention(q, k, v, FOREST, deterministic=argument).sum()

    for run, before in ((step, not mode), (torch.compile(step, fullgraph=True, backend="aot_eager"), mode)):
        torch.use_deterministic_algorithms(before)
        loss = run(*attention_inputs())
        torch.use_deterministic_algorithms(mode)
        loss.backward()
    assert asked == 2 * [argument or mode]


def attention_bits(seed: int) -> bytes:
    """Bits of an output and its gradients."""
    forest = dualkv.SegmentForest.from_groups([40 + seed], [[30, 7 * seed]])
    inputs = attention_inputs(torch.float32, forest.total_tokens, dim=16, seed=seed)
    out = dualkv.attention(*inputs, forest)
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    return b"".join(x.detach().numpy().tobytes() for x in (out, *gradients))


@pytest.mark.parametrize("count", [1, 3])
def test_kernels_use_as_many_threads_as_pytorch(count, threads, monkeypatch):
    """Whatever their number, the bits are the same; so look at what is asked for."""
    asked = []

    class Recorder:
        def __getattr__(self, name):
            def call(params, *rest):
                struct = params._obj
                asked.append(getattr(struct, "forward", struct).num_threads)

            return call

    for module in ("attention", "logprob"):
        monkeypatch.setattr(importlib.import_module(f"dualkv.{module}"), "library", Recorder())
    threads(count)
    options = (0.5, -1, 0.0, 0)
    q, k, v = attention_inputs(requires_grad=False)
    out, lse = torch.ops.dualkv.attention_forward(q, k, v, None, FOREST.segments, *options)
    torch.ops.dualkv.attention_backward(out, None, q, k, v, None, FOREST.segments, out, lse, *options, False)
    inputs = logprob_inputs(requires_grad=False)
    logprob, entropy, lse = torch.ops.dualkv.linear_logprob_forward(*inputs, 1.0, 0.0)
    torch.ops.dualkv.linear_logprob_backward(logprob, None, *inputs, entropy, lse, 1.0, 0.0, True, True, True)
    assert asked == [count] * 5  # the backward of attention asks for its workspace first


def test_several_threads_at_once_get_the_bits_of_one():
    expected = [attention_bits(seed) for seed in range(4)]
    found = {}

    def work(seed):
        found[seed] = [attention_bits(seed) for _ in range(15)]

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    for seed in range(4):
        assert found[seed] == 15 * [expected[seed]], seed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_the_same_bits(threads):
    threads(2)
    expected = attention_bits(1)  # with threads of the parent
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # PyTorch's own threads do not survive a fork; ours are started anew in each call.
            forest = dualkv.SegmentForest.from_groups([41], [[30, 7]])
            inputs = attention_inputs(torch.float32, forest.total_tokens, dim=16, seed=1, requires_grad=False)
            out, lse = torch.ops.dualkv.attention_forward(*inputs, None, forest.segments, 0.25, -1, 0.0, 0)
            gradients = torch.ops.dualkv.attention_backward(
                torch.ones_like(out), None, *inputs, None, forest.segments, out, lse, 0.25, -1, 0.0, 0, False
            )
            os.write(write, b"".join(x.numpy().tobytes() for x in (out, *gradients[:3])))
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        bits = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert bits == expected


def test_a_batch_made_in_inference_mode_can_be_trained_with():
    """Old log-probs are often computed in inference mode, and their batch is used again for the update."""
    with torch.inference_mode():
        batch = dualkv.pack([[1, 2, 3]], [[[4, 5], [6]]])
    q, k, v = (torch.randn(batch.num_tokens, 2, 8, requires_grad=True) for _ in range(3))
    dualkv.attention(q, k, v, batch.forest).sum().backward()
    hidden, weight = torch.randn(batch.num_tokens, 4, requires_grad=True), torch.randn(9, 4)
    logprob, _ = dualkv.linear_logprob(hidden, weight, batch.target_rows, batch.target_ids)
    logprob.sum().backward()
    assert all(x.grad is not None for x in (q, k, v, hidden))
