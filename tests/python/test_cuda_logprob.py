"""linear_logprob on CUDA: against logits that are held in full, its bits, its memory, streams and graphs."""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import dualkv
from cases import assert_same_bits
from dualkv import logprob_chunks
from reference import HALF, assert_within_budget
from test_logprob import fused, results, unfused

pytestmark = pytest.mark.usefixtures("gpu")

DTYPES = (*HALF, torch.float32)
each_place = pytest.mark.parametrize("place", ["cpu", "cuda"])  # of rows and targets


def normal(*shapes, dtype=torch.bfloat16, scale=1.0):
    return [(scale * torch.randn(*shape, device="cuda")).to(dtype) for shape in shapes]


@contextlib.contextmanager
def plain_pytorch():
    """For references, some of whose gradients have no deterministic implementation on CUDA."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


class Case:
    """Random inputs: rows repeat, some targets are ignored, tensors have strides. What is not read is NaN."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = rng.choice(DTYPES)
        rows, columns = rng.choice((1, 17, 65, 300)), rng.choice((1, 8, 33, 128))
        vocab, targets = rng.choice((2, 7, 130, 1000, 4099, 9001)), rng.choice((0, 1, 30, 500))
        self.rows, self.targets = torch.randint(rows, (targets,)), torch.randint(vocab, (targets,))
        self.targets[torch.rand(targets) < rng.choice((0.0, 0.3, 1.0))] = -100
        hidden = torch.full((rows, columns + 5), math.nan)
        scored = self.rows[self.targets != -100]
        hidden[scored, :columns] = 0.7 * torch.randn(len(scored), columns)
        weight = 0.7 * torch.randn(vocab, columns + 3)
        bias = torch.randn(vocab + 1) if rng.random() < 0.5 else None
        hidden, weight = (x.to("cuda", self.dtype)[:, :columns] for x in (hidden, weight))
        if rng.random() < 0.3:
            weight = weight.t().contiguous().t()
        bias = None if bias is None else bias.to("cuda", self.dtype)[1:]  # not aligned
        self.inputs = [hidden, weight, bias]
        self.dlogp, self.dentropy = torch.randn(2, targets, device="cuda")
        self.place = rng.choice(("cpu", "cuda"))
        self.options = {"temperature": rng.choice((1.0, 0.6, 3.0)), "softcap": rng.choice((0.0, 0.0, 2.0))}
        self.message = (
            f"seed {seed}: {self.dtype} T={rows} C={columns} V={vocab} M={targets} bias={bias is not None} "
            f"ignored {(self.targets == -100).sum()} indices on {self.place} {self.options}"
        )

    def run(self):
        indices = self.rows.to(self.place), self.targets.to(self.place)
        return results(fused, self.inputs, *indices, self.dlogp, self.dentropy, **self.options)


def check(found, inputs, rows, targets, dlogp, dentropy, message, **options) -> None:
    """Against float64, with the error of plain PyTorch in the inputs' type as the budget. `found` has the
    names of test_logprob.results."""
    rows, targets = rows.cuda(), targets.cuda()
    inputs = [None if x is None else x.nan_to_num() for x in inputs]
    dtype = inputs[0].dtype

    def run(dtype):
        tensors = [x if x is None else x.to(dtype) for x in inputs]
        with plain_pytorch():
            return results(unfused, tensors, rows, targets, dlogp, dentropy, **options)

    oracle, plain = run(torch.float64), run(dtype)
    floors = terms(inputs, rows, targets, dlogp, dentropy, **options) if dtype == torch.float32 else {}
    for name, right in oracle.items():
        assert found[name].shape == right.shape, f"{name}; {message}"
        assert found[name].dtype == (torch.float32 if name in ("logp", "entropy") else dtype), name
        if right.numel() > 0:
            whole, floor = [slice(0, len(right))], floors.get(name, 0.1)
            assert_within_budget(name, found[name], right, plain[name], whole, message, floor)


def terms(inputs, rows, targets, dlogp, dentropy, temperature=1.0, softcap=0.0) -> dict:
    """The largest sum of absolute terms of an element of each gradient, as in linear_logprob_problem.h. The
    rounding errors of sums of many terms, which cancel, scale with it."""
    hidden, weight, bias = (None if x is None else x.double() for x in inputs)
    kept = targets != -100
    rows, targets = rows[kept], targets[kept]
    dlogp, dentropy = (x[kept].double().abs() for x in (dlogp, dentropy))
    logits = hidden[rows] @ weight.t()
    logits = logits if bias is None else logits + bias
    logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
    logp = torch.log_softmax(logits / temperature, dim=1)
    p = logp.exp()
    entropy = -(p * logp).sum(1, keepdim=True)
    sizes = (dlogp[:, None] * p + dentropy[:, None] * p * (entropy - logp)) / temperature
    with plain_pytorch():
        sizes.scatter_add_(1, targets[:, None], dlogp[:, None] / temperature)
        sizes = sizes.new_zeros(len(hidden), len(weight)).index_add_(0, rows, sizes)
    sums = {"dhidden": sizes @ weight.abs(), "dweight": sizes.t() @ hidden.abs(), "dbias": sizes.sum(0)}
    return {name: x.max() for name, x in sums.items()}


@pytest.fixture(params=[None, 20_000, 600], ids=["one chunk", "20000 logits", "600 logits"])
def chunks(request, monkeypatch):
    """The vocabulary in one slice, and rows and vocabulary cut."""
    if request.param is not None:
        monkeypatch.setattr(logprob_chunks, "MAX_LOGITS", request.param)
        monkeypatch.setattr(logprob_chunks, "MIN_VOCAB", 104)


@pytest.mark.parametrize("seed", range(80))
def test_random_inputs(seed, chunks):
    case = Case(seed)
    found = case.run()
    check(
        found,
        case.inputs,
        case.rows,
        case.targets,
        case.dlogp,
        case.dentropy,
        case.message,
        **case.options,
    )
    assert_same_bits(case.run(), found, case.message)


@each_place
def test_wide_log_probs_of_half_inputs(place):
    """Logits are never rounded to the inputs' type: log-probs are those of float32 logits."""
    torch.manual_seed(0)
    hidden, weight = normal((200, 256), (5000, 256), scale=0.5)
    rows, targets = torch.arange(200, device=place), torch.randint(5000, (200,), device=place)
    found = dualkv.linear_logprob(hidden, weight, rows, targets)
    right = unfused(hidden.double(), weight.double(), None, rows.cuda(), targets.cuda())
    for x, exact in zip(found, right):
        assert (x - exact).abs().max() < 1e-4


@each_place
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_targets_of_one_row(place, dtype, chunks):
    torch.manual_seed(0)
    inputs = normal((3, 64), (1003, 64), (1003,), dtype=dtype, scale=0.3)
    rows, targets = torch.full((3000,), 1), torch.randint(1003, (3000,))
    rows[::7], targets[:900] = 2, 999  # one token again and again
    dlogp, dentropy = torch.randn(2, 3000, device="cuda")
    indices = rows.to(place), targets.to(place)
    found = results(fused, inputs, *indices, dlogp, dentropy)
    check(found, inputs, rows, targets, dlogp, dentropy, f"{place} {dtype}")
    assert_same_bits(results(fused, inputs, *indices, dlogp, dentropy), found)
    assert not found["dhidden"][0].any()


@pytest.mark.parametrize("vocab", [262_144, 262_145, 151_936])
@pytest.mark.parametrize("dtype", HALF)
@each_place
def test_large_vocabularies(vocab, dtype, place):
    torch.manual_seed(0)
    inputs = normal((20, 128), (vocab, 128), dtype=dtype, scale=0.2)
    rows, targets = torch.randint(20, (40,)), torch.randint(vocab, (40,))
    targets[0], targets[1] = 0, vocab - 1
    dlogp, dentropy = torch.randn(2, 40, device="cuda")
    found = results(fused, [*inputs, None], rows.to(place), targets.to(place), dlogp, dentropy)
    check(found, [*inputs, None], rows, targets, dlogp, dentropy, f"V={vocab} {dtype} {place}")


@each_place
def test_K1_temperature_of_log_probability_entropy_and_gradient(place):
    weight = torch.tensor([[1.0], [0.0]], device="cuda")  # logits 2, 0
    rows, targets = torch.tensor([0, 0], device=place), torch.tensor([0, 1], device=place)
    for dtype in DTYPES:
        for temperature, logp, entropy in (
            (1.0, [-0.126928, -2.126928], 0.365334),
            (0.5, [-0.0181499, -4.0181499], 0.0900948),
        ):
            hidden = torch.tensor([[2.0]], device="cuda", dtype=dtype, requires_grad=True)
            found = dualkv.linear_logprob(hidden, weight.to(dtype), rows, targets, temperature=temperature)
            torch.testing.assert_close(found[0].cpu(), torch.tensor(logp), rtol=0, atol=1e-6)
            torch.testing.assert_close(found[1].cpu(), torch.full((2,), entropy), rtol=0, atol=1e-6)
            (gradient,) = torch.autograd.grad(found[0][0], hidden)
            right = (1 - math.exp(logp[0])) / temperature
            assert abs(gradient.item() - right) < 1e-6 + right * torch.finfo(dtype).eps
    for empty in (rows, rows[:0]):
        with pytest.raises(ValueError, match="temperature must be .*got 0"):
            dualkv.linear_logprob(hidden, weight.to(dtype), empty, empty, temperature=0.0)
        with pytest.raises(ValueError, match="softcap must be .*got -2"):
            dualkv.linear_logprob(hidden, weight.to(dtype), empty, empty, softcap=-2.0)


@each_place
def test_M1_every_target_has_an_upstream_gradient_of_its_own(place):
    rows = targets = torch.tensor([0, 1], device=place)
    for upstream, expected in (
        ([1.0, 3.0], [[0.268941, -0.806824], [-0.268941, 0.806824]]),
        ([0.0, 1.0], [[0.0, -0.268941], [0.0, 0.268941]]),
    ):
        hidden, weight = (torch.eye(2, device="cuda").requires_grad_() for _ in range(2))
        logp, _ = dualkv.linear_logprob(hidden, weight, rows, targets)
        logp.backward(torch.tensor(upstream, device="cuda"))
        torch.testing.assert_close(weight.grad.cpu(), torch.tensor(expected), rtol=0, atol=1e-6)
        torch.testing.assert_close(hidden.grad.cpu(), torch.tensor(expected).t(), rtol=0, atol=1e-6)


@each_place
def test_M3_ignored_targets_and_a_vocabulary_that_is_no_multiple_of_anything(place):
    torch.manual_seed(0)
    hidden, weight = (x.requires_grad_() for x in normal((4, 8), (7, 8), dtype=torch.float32))
    rows, kept = torch.arange(4, device=place), [0, 2, 3]
    targets = torch.tensor([3, -100, 6, 0], device=place)
    logp, entropy = dualkv.linear_logprob(hidden, weight, rows, targets)
    without = dualkv.linear_logprob(hidden, weight, rows[kept], targets[kept])
    assert logp[1] == 0 and entropy[1] == 0
    for x, right in zip((logp, entropy), without):
        torch.testing.assert_close(x[kept], right)
    found = torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight))
    assert not found[0][1].any()
    for gradient, right in zip(found, torch.autograd.grad(sum(x.sum() for x in without), (hidden, weight))):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-6)
    if place == "cpu":
        with pytest.raises(ValueError, match=r"targets\[3\] .*0 to 6.*got 7"):
            dualkv.linear_logprob(hidden, weight, rows, torch.tensor([3, -100, 6, 7]))


@pytest.mark.parametrize("name, values", [("targets", [3, 7]), ("targets", [-1, 0]), ("rows", [0, 4])])
def test_M3_values_out_of_range_on_the_device_fail_an_assertion_of_the_device(name, values):
    """In a process of its own, which cannot use the GPU any more."""
    script = (
        "import torch, dualkv\n"
        "hidden, weight = torch.randn(4, 8, device='cuda'), torch.randn(7, 8, device='cuda')\n"
        "indices = {'rows': torch.tensor([0, 1]).cuda(), 'targets': torch.tensor([3, 6]).cuda()}\n"
        f"indices['{name}'] = torch.tensor({values}).cuda()\n"
        "print(dualkv.linear_logprob(hidden, weight, indices['rows'], indices['targets'])[0])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(dualkv.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode != 0 and "assert" in run.stderr and run.stdout == "", run.stderr


@pytest.mark.parametrize("targets", [[], [-100, -100, -100]])
@each_place
def test_nothing_to_score_has_gradients_of_zero(targets, place):
    hidden, weight, bias = (x.requires_grad_() for x in normal((4, 8), (7, 8), (7,)))
    with torch.no_grad():
        hidden.fill_(math.nan)
    rows = torch.zeros(len(targets), dtype=torch.int32, device=place)
    indices = rows, torch.tensor(targets, dtype=torch.int64, device=place)
    logp, entropy = dualkv.linear_logprob(hidden, weight, *indices, bias=bias)
    assert logp.is_cuda and logp.shape == entropy.shape == (len(targets),)
    assert not logp.any() and not entropy.any()
    (logp.sum() + entropy.sum()).backward()
    for x in (hidden, weight, bias):
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("which", ["logp", "entropy"])
def test_M4_only_the_gradients_that_are_asked_for(wanted, which, chunks):
    torch.manual_seed(0)
    inputs = normal((4, 8), (203, 8), (203,))
    rows, targets = torch.tensor([0, 3, 3]), torch.tensor([2, 106, 1])
    upstream, zeros = torch.tensor([1.0, -2.0, 0.5], device="cuda"), torch.zeros(3, device="cuda")
    both = (upstream, zeros) if which == "logp" else (zeros, upstream)
    right = results(fused, inputs, rows, targets, *both)
    for i in wanted:
        inputs[i].requires_grad_()
    logp, entropy = fused(*inputs, rows, targets)
    (logp if which == "logp" else entropy).backward(upstream)
    for i, name in enumerate(("dhidden", "dweight", "dbias")):
        if i in wanted:
            assert torch.equal(inputs[i].grad, right[name]), name
        else:
            assert inputs[i].grad is None
    with torch.no_grad():
        assert torch.equal(fused(*inputs, rows, targets)[0], right["logp"])


def test_M5_a_weight_shared_with_the_embedding_gets_both_gradients():
    torch.manual_seed(0)
    weight = torch.randn(11, 4, device="cuda").requires_grad_()
    batch = dualkv.pack([[1, 2, 3]], [[[4, 5]]])
    ids = batch.input_ids.cuda()

    def loss(function, rows, targets):
        return function(torch.tanh(weight[ids]), weight, None, rows, targets)[0].sum()

    on_cpu = batch.target_rows, batch.target_ids
    on_gpu = tuple(x.cuda() for x in on_cpu)
    for _ in range(2):  # the second time with other values: nothing of the first may be left
        with plain_pytorch():
            (expected,) = torch.autograd.grad(loss(unfused, *on_gpu), weight)
        for indices in (on_cpu, on_gpu):
            (found,) = torch.autograd.grad(loss(fused, *indices), weight)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            weight -= 0.5 * expected


def test_autocast_casts_and_gradients_return_in_each_inputs_type():
    torch.manual_seed(0)
    hidden, weight, bias = normal((4, 8), (7, 8), (7,), dtype=torch.float32)
    inputs = [x.requires_grad_() for x in (hidden, weight.bfloat16(), bias)]
    rows, targets = torch.tensor([0, 3, 3]), torch.tensor([2, 6, 1])
    ones, zeros = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        logp, _ = fused(*inputs, rows, targets)
        found = torch.autograd.grad(logp.sum(), inputs)
    expected = results(fused, [x.detach().bfloat16() for x in inputs], rows, targets, ones, zeros)
    assert logp.dtype == torch.float32 and torch.equal(logp, expected["logp"])
    for gradient, x, name in zip(found, inputs, ("dhidden", "dweight", "dbias")):
        assert gradient.dtype == x.dtype and torch.equal(gradient, expected[name].to(x.dtype)), name


@each_place
def test_nothing_waits_for_the_gpu(place):
    hidden, weight = (x.requires_grad_() for x in normal((300, 64), (1000, 64)))
    rows, targets = torch.arange(300, device=place), torch.randint(1000, (300,), device=place)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logp, entropy = dualkv.linear_logprob(hidden, weight, rows, targets)
        torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_place
def test_a_stream_that_is_not_the_default_one(place):
    case = Case(3)
    case.place = place
    expected = case.run()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(100_000_000)  # the default stream is busy, and not waited for
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # work on another stream would find inputs that are not there yet
        case.inputs = [None if x is None else x.clone() for x in case.inputs]
        found = case.run()
    stream.synchronize()
    assert_same_bits(found, expected, case.message)


def test_a_captured_graph_reads_rows_and_targets_anew():
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in normal((70, 32), (1000, 32))]
    rows, targets = torch.randint(70, (90,), device="cuda"), torch.randint(1000, (90,), device="cuda")
    upstream = torch.randn(2, 90, device="cuda")

    def run():
        outputs = dualkv.linear_logprob(*inputs, rows, targets)
        return [*outputs, *torch.autograd.grad(outputs, inputs, list(upstream))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(2):
        rows.random_(70)
        targets.random_(1000)
        targets[::5] = -100
        graph.replay()
        for x, right in zip(found, run()):
            torch.testing.assert_close(x, right)
    on_cpu = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="is being captured: .* rows and targets on CUDA"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dualkv.linear_logprob(*inputs, on_cpu, on_cpu)


@each_place
def test_compiled_in_one_graph(place):
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in normal((9, 16), (50, 16), (50,))]
    rows, targets = torch.randint(9, (12,), device=place), torch.randint(50, (12,), device=place)

    def loss(hidden, weight, bias):
        logp, entropy = dualkv.linear_logprob(hidden * 2, weight, rows, targets, bias=bias)
        return logp.sum() - 0.1 * entropy.sum()

    counter = CompileCounterWithBackend("aot_eager")
    found = torch.compile(loss, backend=counter, fullgraph=True)(*inputs)
    expected = loss(*inputs)
    assert torch.equal(found, expected) and counter.frame_count == 1
    for x, right in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)):
        assert torch.equal(x, right)


def test_a_second_derivative_is_refused():
    hidden, weight = (x.requires_grad_() for x in normal((4, 8), (7, 8)))
    logp, _ = fused(hidden, weight, None, torch.tensor([1]), torch.tensor([2]))
    (gradient,) = torch.autograd.grad(logp.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once, not twice"):
        gradient.sum().backward()


def test_refusals():
    hidden, weight = normal((4, 8), (7, 8))
    rows, targets = torch.tensor([0, 3]), torch.tensor([2, 6])
    with pytest.raises(NotImplementedError, match="must be one of .*got torch.float64"):
        dualkv.linear_logprob(hidden.double(), weight.double(), rows, targets)
    with pytest.raises(ValueError, match="same device.* weight cpu"):
        dualkv.linear_logprob(hidden, weight.cpu(), rows, targets)
    with pytest.raises(ValueError, match="same device.* rows cuda:0, targets cpu"):
        dualkv.linear_logprob(hidden, weight, rows.cuda(), targets)
    with pytest.raises(ValueError, match="same device.* rows cuda:0, targets cuda:0"):
        dualkv.linear_logprob(hidden.cpu(), weight.cpu(), rows.cuda(), targets.cuda())
    with pytest.raises(ValueError, match=r"rows\[1\] .*0 to 3.*got 4"):
        dualkv.linear_logprob(hidden, weight, rows + 1, targets)


@each_place
def test_memory_beyond_inputs_and_outputs(place):
    """At the size of a large model's step, where bf16 logits would take 9.3 GiB. Rows are picked, so that
    their hidden states are copied."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    targets, dim, vocab = 32768, 4096, 151_936
    hidden, weight = (x.requires_grad_() for x in normal((targets + 64, dim), (vocab, dim), scale=0.02))
    rows = torch.arange(64, targets + 64, device=place)
    ids = torch.randint(vocab, (targets,), device=place)
    upstream = torch.randn(2, targets, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = dualkv.linear_logprob(hidden, weight, rows, ids)
    forward = torch.cuda.max_memory_allocated() - before
    gradients = torch.autograd.grad(outputs, (hidden, weight), list(upstream))
    kept = sum(x.numel() * x.element_size() for x in (*outputs, *gradients))
    backward = torch.cuda.max_memory_allocated() - before - kept
    assert forward < 0.9 * 2**30
    assert backward < 1.5 * 2**30
    assert all(x.isfinite().all() for x in (*outputs, *gradients))
