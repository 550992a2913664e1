"""linear_logprob against logits that are held in full."""

from __future__ import annotations

import math
import random

import pytest
import torch

import dualkv
from reference import assert_within_budget

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def unfused(hidden, weight, bias, rows, targets, temperature=1.0, softcap=0.0):
    """The definition, in the inputs' type: logp [M], entropy [M]."""
    logits = hidden[rows.long()] @ weight.t()
    if bias is not None:
        logits = logits + bias
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, dim=1)
    kept = (targets != -100).unsqueeze(1)
    chosen = logp.gather(1, targets.long().clamp(min=0).unsqueeze(1))
    entropy = -(logp.exp() * logp).sum(1, keepdim=True)
    return torch.where(kept, chosen, 0.0).squeeze(1), torch.where(kept, entropy, 0.0).squeeze(1)


def fused(hidden, weight, bias, rows, targets, **options):
    return dualkv.linear_logprob(hidden, weight, rows, targets, bias=bias, **options)


def results(function, inputs, rows, targets, dlogp, dentropy, **options):
    """Outputs and gradients of hidden, weight and bias (if given), by name."""
    inputs = [x if x is None else x.detach().requires_grad_() for x in inputs]
    logp, entropy = function(*inputs, rows, targets, **options)
    wanted = [x for x in inputs if x is not None]
    gradients = torch.autograd.grad(
        [logp, entropy], wanted, [dlogp.to(logp.dtype), dentropy.to(entropy.dtype)], materialize_grads=True
    )
    found = {"logp": logp.detach(), "entropy": entropy.detach()}
    return {**found, **dict(zip(("dhidden", "dweight", "dbias"), gradients))}


class Case:
    """Random inputs: rows repeat, some targets are ignored, tensors have strides."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = rng.choice(DTYPES)
        rows, columns, vocab, targets = (
            rng.choice((1, 17, 65)),
            rng.choice((1, 8, 33, 96)),
            rng.choice((1, 7, 130, 1000)),
            rng.choice((0, 1, 30, 150)),
        )
        hidden = torch.randn(rows, 2 * columns)[:, ::2] if rng.random() < 0.3 else torch.randn(rows, columns)
        weight = torch.randn(columns, vocab).t() if rng.random() < 0.3 else torch.randn(vocab, columns)
        bias = torch.randn(vocab) if rng.random() < 0.5 else None
        self.inputs = [x if x is None else (x * 0.7).to(self.dtype) for x in (hidden, weight, bias)]
        if rng.random() < 0.3:  # rows that are part of something wider
            wider = torch.full((rows, columns + 5), float("nan"), dtype=self.dtype)
            wider[:, :columns] = self.inputs[0]
            self.inputs[0] = wider[:, :columns]
        self.rows = torch.randint(rows, (targets,), dtype=rng.choice((torch.int64, torch.int32)))
        self.targets = torch.randint(vocab, (targets,))
        self.targets[torch.rand(targets) < rng.choice((0.0, 0.3, 1.0))] = -100
        self.dlogp, self.dentropy = torch.randn(targets), torch.randn(targets)
        self.options = {
            "temperature": rng.choice((1.0, 0.6, 3.0)),
            "softcap": rng.choice((0.0, 0.0, 2.0)),
        }
        self.message = (
            f"seed {seed}: {self.dtype} T={rows} C={columns} V={vocab} M={targets} bias={bias is not None} "
            f"ignored {(self.targets == -100).sum()} {self.options}"
        )

    def run(self, function=fused, dtype=None):
        inputs = self.inputs if dtype is None else [x if x is None else x.to(dtype) for x in self.inputs]
        return results(function, inputs, self.rows, self.targets, self.dlogp, self.dentropy, **self.options)


@pytest.mark.parametrize("seed", range(60))
def test_random_inputs(seed):
    case = Case(seed)
    found = case.run()
    oracle, plain = case.run(unfused, torch.float64), case.run(unfused)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    # A vocabulary of one has gradients of 0, differences of equal numbers.
    floor = 1.0 if len(case.inputs[1]) == 1 else 0.1
    for name, right in oracle.items():
        assert found[name].dtype == (wide if name in ("logp", "entropy") else case.dtype), name
        if right.numel() > 0:
            whole = [slice(0, len(right))]
            assert_within_budget(name, found[name], right, plain[name], whole, case.message, floor)
        assert found[name].shape == right.shape, f"{name}; {case.message}"


@pytest.mark.parametrize("seed", range(1000, 1015))
def test_same_bits_in_every_run_and_with_any_number_of_threads(seed, threads):
    case = Case(seed)
    threads(1)
    expected = case.run()
    for count in (1, 2, 3):
        threads(count)
        found = case.run()
        for name, bits in expected.items():
            assert torch.equal(found[name], bits), f"{name} with {count} threads; {case.message}"


def test_K1_temperature_of_log_probability_entropy_and_gradient():
    weight = torch.tensor([[1.0], [0.0]])  # logits 2, 0
    rows, targets = torch.tensor([0, 0]), torch.tensor([0, 1])
    for temperature, logp, entropy in (
        (1.0, [-0.126928, -2.126928], 0.365334),
        (0.5, [-0.0181499, -4.0181499], 0.0900948),
    ):
        hidden = torch.tensor([[2.0]], requires_grad=True)
        found = dualkv.linear_logprob(hidden, weight, rows, targets, temperature=temperature)
        torch.testing.assert_close(found[0], torch.tensor(logp), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[1], torch.full((2,), entropy), rtol=0, atol=1e-6)
        # d logp[0] / d logit[0] is (1 - p) / temperature, and logit[0] is the hidden state
        (gradient,) = torch.autograd.grad(found[0][0], hidden)
        assert abs(gradient.item() - (1 - math.exp(logp[0])) / temperature) < 1e-6
    with pytest.raises(ValueError, match="temperature must be .*got 0"):
        dualkv.linear_logprob(hidden, weight, rows, targets, temperature=0.0)


def test_M1_every_target_has_an_upstream_gradient_of_its_own():
    rows, targets = torch.tensor([0, 1]), torch.tensor([0, 1])
    for upstream, expected in (
        ([1.0, 3.0], [[0.268941, -0.806824], [-0.268941, 0.806824]]),
        ([0.0, 1.0], [[0.0, -0.268941], [0.0, 0.268941]]),
    ):
        hidden, weight = torch.eye(2, requires_grad=True), torch.eye(2, requires_grad=True)
        logp, _ = dualkv.linear_logprob(hidden, weight, rows, targets)
        logp.backward(torch.tensor(upstream))
        torch.testing.assert_close(weight.grad, torch.tensor(expected), rtol=0, atol=1e-6)
        torch.testing.assert_close(hidden.grad, torch.tensor(expected).t(), rtol=0, atol=1e-6)


def test_M3_ignored_targets_and_a_vocabulary_that_is_no_multiple_of_anything():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(7, 8, requires_grad=True)
    rows, kept = torch.arange(4), [0, 2, 3]
    logp, entropy = dualkv.linear_logprob(hidden, weight, rows, torch.tensor([3, -100, 6, 0]))
    without = dualkv.linear_logprob(hidden, weight, rows[kept], torch.tensor([3, 6, 0]))
    assert logp[1] == 0 and entropy[1] == 0
    assert torch.equal(logp[kept], without[0]) and torch.equal(entropy[kept], without[1])
    found = torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight))
    assert not found[0][1].any()
    for gradient, right in zip(found, torch.autograd.grad(sum(x.sum() for x in without), (hidden, weight))):
        torch.testing.assert_close(gradient, right, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"targets\[3\] .*0 to 6.*got 7"):
        dualkv.linear_logprob(hidden, weight, rows, torch.tensor([3, -100, 6, 7]))


@pytest.mark.parametrize("targets", [[], [-100, -100, -100]])
def test_nothing_to_score_has_gradients_of_zero(targets):
    hidden, weight, bias = (torch.randn(*s, requires_grad=True) for s in ((4, 8), (7, 8), (7,)))
    rows = torch.zeros(len(targets), dtype=torch.int64)
    logp, entropy = dualkv.linear_logprob(
        hidden, weight, rows, torch.tensor(targets, dtype=torch.int64), bias=bias
    )
    assert logp.shape == entropy.shape == (len(targets),) and not logp.any() and not entropy.any()
    (logp.sum() + entropy.sum()).backward()
    for x in (hidden, weight, bias):
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("which", ["logp", "entropy"])
def test_M4_only_the_gradients_that_are_asked_for(wanted, which):
    torch.manual_seed(0)
    inputs = [torch.randn(4, 8), torch.randn(7, 8), torch.randn(7)]
    rows, targets = torch.tensor([0, 3, 3]), torch.tensor([2, 6, 1])
    upstream = torch.tensor([1.0, -2.0, 0.5])
    zeros = torch.zeros(3)
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


def test_M4_bias_without_gradients():
    torch.manual_seed(0)
    inputs = [torch.randn(4, 8), torch.randn(7, 8, requires_grad=True), torch.randn(7, requires_grad=True)]
    rows, targets = torch.tensor([0, 3]), torch.tensor([2, 6])
    with torch.no_grad():
        logp, entropy = fused(*inputs, rows, targets)
    assert not logp.requires_grad
    expected = unfused(*inputs, rows, targets)
    torch.testing.assert_close(logp, expected[0].detach())
    torch.testing.assert_close(entropy, expected[1].detach())


def test_M5_a_weight_shared_with_the_embedding_gets_both_gradients():
    torch.manual_seed(0)
    weight = torch.randn(11, 4, requires_grad=True)
    batch = dualkv.pack([[1, 2, 3]], [[[4, 5]]])

    def loss(function):
        hidden = torch.tanh(weight[batch.input_ids])
        return function(hidden, weight, None, batch.target_rows, batch.target_ids)[0].sum()

    for _ in range(2):  # the second time with other values: nothing of the first may be left
        (found,) = torch.autograd.grad(loss(fused), weight)
        (expected,) = torch.autograd.grad(loss(unfused), weight)
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            weight -= 0.5 * expected


def test_M5_a_float32_head_leaves_a_bfloat16_embedding_as_it_is():
    torch.manual_seed(0)
    weight = torch.randn(11, 4).bfloat16().requires_grad_()
    before = weight.detach().clone()
    batch = dualkv.pack([[1, 2, 3]], [[[4, 5]]])

    def loss(function):
        hidden = torch.tanh(weight[batch.input_ids].float())
        return function(hidden, weight.float(), None, batch.target_rows, batch.target_ids)[0].sum()

    (found,) = torch.autograd.grad(loss(fused), weight)
    (expected,) = torch.autograd.grad(loss(unfused), weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, before)


def test_autocast_casts_and_gradients_return_in_each_inputs_type():
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(4, 8), torch.randn(7, 8).bfloat16(), torch.randn(7)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    rows, targets = torch.tensor([0, 3, 3]), torch.tensor([2, 6, 1])
    with torch.autocast("cpu", torch.bfloat16):
        logp, entropy = fused(*inputs, rows, targets)
    found = torch.autograd.grad(logp.sum(), inputs)
    cast = [x.detach().bfloat16() for x in inputs]
    expected = results(fused, cast, rows, targets, torch.ones(3), torch.zeros(3))
    assert logp.dtype == torch.float32 and torch.equal(logp, expected["logp"])
    for gradient, x, name in zip(found, inputs, ("dhidden", "dweight", "dbias")):
        assert gradient.dtype == x.dtype and torch.equal(gradient, expected[name].to(x.dtype)), name


def test_gradients_without_strides():
    torch.manual_seed(0)
    hidden = torch.randn(4, 8, requires_grad=True)
    weight, rows, targets = torch.randn(7, 8), torch.tensor([0, 3, 3]), torch.tensor([2, 6, 1])
    (expanded,) = torch.autograd.grad(dualkv.linear_logprob(hidden, weight, rows, targets)[0].sum(), hidden)
    logp, _ = dualkv.linear_logprob(hidden, weight, rows, targets)
    (contiguous,) = torch.autograd.grad(logp, hidden, torch.ones(3))
    assert torch.equal(expanded, contiguous)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.uint32])
def test_rows_and_targets_of_any_integers(dtype):
    torch.manual_seed(0)
    hidden, weight, rows, targets = (
        torch.randn(4, 8),
        torch.randn(7, 8),
        torch.tensor([0, 3]),
        torch.tensor([2, 6]),
    )
    expected = dualkv.linear_logprob(hidden, weight, rows, targets)
    found = dualkv.linear_logprob(hidden, weight, rows.to(dtype), targets.to(dtype))
    assert all(map(torch.equal, found, expected))


def test_errors_name_the_argument_and_the_values():
    hidden, weight, bias = torch.randn(4, 8), torch.randn(7, 8), torch.randn(7)
    rows, targets = torch.tensor([0, 3]), torch.tensor([2, 6])
    score = dualkv.linear_logprob
    with pytest.raises(TypeError, match="targets must be a torch.Tensor, got list"):
        score(hidden, weight, rows, [2, 6])
    with pytest.raises(TypeError, match="bias must be a torch.Tensor, got list"):
        score(hidden, weight, rows, targets, bias=bias.tolist())
    with pytest.raises(TypeError, match="hidden torch.float32, weight torch.bfloat16"):
        score(hidden, weight.bfloat16(), rows, targets)
    with pytest.raises(TypeError, match="bias torch.float64"):
        score(hidden, weight, rows, targets, bias=bias.double())
    with pytest.raises(TypeError, match=r"must be one of .*got hidden torch.int32"):
        score(hidden.int(), weight.int(), rows, targets)
    with pytest.raises(TypeError, match="rows must be integers, got torch.float32"):
        score(hidden, weight, rows.float(), targets)
    with pytest.raises(ValueError, match=r"hidden must be \[T, C\].* got shape \[1, 4, 8\]"):
        score(hidden[None], weight, rows, targets)
    with pytest.raises(ValueError, match=r"weight must be \[V, C\].* got shape \[56\]"):
        score(hidden, weight.flatten(), rows, targets)
    with pytest.raises(ValueError, match="hidden and weight .* got 8 and 7"):
        score(hidden, weight[:, 1:], rows, targets)
    with pytest.raises(ValueError, match=r"bias must be \[V\], \[7\], got shape \[6\]"):
        score(hidden, weight, rows, targets, bias=bias[1:])
    with pytest.raises(ValueError, match=r"rows must be \[M\].* got shape \[2, 1\]"):
        score(hidden, weight, rows[:, None], targets)
    with pytest.raises(ValueError, match="rows and targets .* got 1 and 2"):
        score(hidden, weight, rows[1:], targets)
    with pytest.raises(ValueError, match="same device.* weight meta"):
        score(hidden, weight.to("meta"), rows, targets)
    with pytest.raises(ValueError, match=r"rows\[1\] .*0 to 3.*got 4"):
        score(hidden, weight, rows + 1, targets)
    with pytest.raises(ValueError, match=r"rows\[0\] .*0 to 3.*got -1"):
        score(hidden, weight, rows - 1, targets)
    with pytest.raises(ValueError, match=r"targets\[0\] .*got -98"):
        score(hidden, weight, rows, targets - 100)
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"temperature must be .*got {temperature:g}"):
            score(hidden, weight, rows, targets, temperature=temperature)
    with pytest.raises(ValueError, match="softcap must be .*got -2"):
        score(hidden, weight, rows, targets, softcap=-2.0)
