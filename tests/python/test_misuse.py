"""What users do by accident gets a right answer or a clear error."""

from __future__ import annotations

import sys

import numpy
import pytest
import torch

import dualkv


def group(dtype=torch.float32):
    """One prompt with two responses, and q, k, v for it."""
    torch.manual_seed(0)
    forest = dualkv.SegmentForest.from_groups([5], [[2, 3]])
    return forest, [torch.randn(10, 2, 8).to(dtype).requires_grad_() for _ in range(3)]


def test_host_tensors_are_made_on_the_cpu_whatever_the_default_device():
    forest, inputs = group()
    with torch.device("meta"):
        batch = dualkv.pack([[5, 6, 7]], [[[11, 12], [21]]])
        same = dualkv.SegmentForest.from_groups([5], [[2, 3]])
        positions = same.position_ids()
        out = dualkv.attention(*inputs, same)
        out.sum().backward()
    assert batch.target_rows.tolist() == [2, 3, 2] and batch.input_ids.device.type == "cpu"
    assert same == forest and positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert torch.equal(out, dualkv.attention(*inputs, forest))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_attention_refuses_tensors_for_numbers(name):
    forest, inputs = group()
    with pytest.raises(TypeError, match=f"{name} must be a number, got Parameter"):
        dualkv.attention(*inputs, forest, **{name: torch.nn.Parameter(torch.tensor(0.5))})
    with pytest.raises(TypeError, match=f"{name} must be a number, got str"):
        dualkv.attention(*inputs, forest, **{name: "0.5"})
    half = dualkv.attention(*inputs, forest, **{name: numpy.float32(0.5)})
    assert torch.equal(half, dualkv.attention(*inputs, forest, **{name: 0.5}))


@pytest.mark.parametrize("name", ["temperature", "softcap"])
def test_linear_logprob_refuses_tensors_for_numbers(name):
    with pytest.raises(TypeError, match=f"{name} must be a number, got Tensor"):
        dualkv.linear_logprob(
            torch.randn(2, 3),
            torch.randn(4, 3),
            torch.tensor([0]),
            torch.tensor([1]),
            **{name: torch.tensor(1.0)},
        )


def test_window_of_any_integer_type():
    forest, inputs = group()
    with pytest.raises(TypeError, match="window_left must be an integer or None, got str"):
        dualkv.attention(*inputs, forest, window_left="3")
    three = dualkv.attention(*inputs, forest, window_left=numpy.int32(3))
    assert torch.equal(three, dualkv.attention(*inputs, forest, window_left=3))
    whole = dualkv.attention(*inputs, forest)
    for wide in (sys.maxsize, 2**64):
        assert torch.equal(dualkv.attention(*inputs, forest, window_left=wide), whole)
        assert forest.visible_pairs(wide) == forest.visible_pairs()


def test_second_derivatives_of_attention_raise():
    forest, (q, k, v) = group()
    (gradient,) = torch.autograd.grad(dualkv.attention(q, k, v, forest).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(gradient.square().sum() + (q**3).sum(), q)


def test_forward_mode_derivatives_raise():
    """Of any input, though none requires a gradient."""
    forest, inputs = group()
    inputs = [x.detach() for x in inputs]
    cu = [0, 1, 3]
    for x in range(3):
        with torch.autograd.forward_ad.dual_level():
            duals = list(inputs)
            duals[x] = torch.autograd.forward_ad.make_dual(inputs[x], torch.ones_like(inputs[x]))
            with pytest.raises(NotImplementedError, match="jvp"):
                dualkv.attention(*duals, forest)
    q, k, v = inputs
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.jvp(lambda q: dualkv.attention(q, k, v, forest), (q,), (q,))
    with pytest.raises(RuntimeError, match="functorch"):
        context, decoded = (k[:2], v[:2]), (k[2:5], v[2:5])
        torch.func.jvp(
            lambda q: dualkv.flash_attn_dualkv_varlen_func(q, *context, *decoded, cu, cu, 2, 2, 2),
            (q[2:5],),
            (q[2:5],),
        )


def test_second_derivatives_of_linear_logprob_raise():
    hidden = torch.randn(2, 3, requires_grad=True)
    logprob, _ = dualkv.linear_logprob(hidden, torch.randn(4, 3), torch.tensor([0, 1]), torch.tensor([1, 2]))
    (gradient,) = torch.autograd.grad(logprob.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(gradient.square().sum() + (hidden**3).sum(), hidden)


def test_subnormal_half_values_survive_flush_to_zero():
    forest = dualkv.SegmentForest.from_groups([2], [[1]])
    q = torch.ones(3, 1, 4, dtype=torch.float16)
    v = torch.full((3, 1, 4), 3e-5, dtype=torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormal numbers to zero")
    try:
        assert torch.equal(dualkv.attention(q, q, v, forest), v)
    finally:
        torch.set_flush_denormal(False)


def test_operators_called_directly_do_not_read_past_their_tensors():
    forest, (q, k, v) = group()
    forward = torch.ops.dualkv.attention_forward
    options = (forest.segments, 1.0, -1, 0.0, 0)
    with pytest.raises(ValueError, match="k and v must have the same shape"):
        forward(q, k, v[:1], None, *options)
    with pytest.raises(TypeError, match="same dtype"):
        forward(q, k.double(), v, None, *options)
    with pytest.raises(ValueError, match=r"sinks must be torch.float32 \[2\], got torch.float16 \[1\]"):
        forward(q, k, v, torch.zeros(1, dtype=torch.float16), *options)
    out, lse = forward(q, k, v, None, *options)
    backward = torch.ops.dualkv.attention_backward
    with pytest.raises(ValueError, match="out, dout must have the same shape"):
        backward(out[:1], None, q, k, v, None, options[0], out, lse, *options[1:], False)
    with pytest.raises(ValueError, match="lse, dlse must have the same shape"):
        backward(out, lse[:1], q, k, v, None, options[0], out, lse, *options[1:], False)
    with pytest.raises(ValueError, match="rows must be torch.int64"):
        one = torch.tensor([0], dtype=torch.int32)
        torch.ops.dualkv.linear_logprob_forward(
            torch.randn(2, 3), torch.randn(4, 3), None, one, one.long(), 1.0, 0.0
        )


def test_a_forest_is_made_of_an_int64_table():
    with pytest.raises(ValueError, match=r"segments must be an int64 tensor \[S, 2\], got torch.int32"):
        dualkv.SegmentForest(torch.zeros(2, 2, dtype=torch.int32))


def test_group_ids_are_compared_by_value():
    ids = torch.tensor([[5, 6, 1, 2], [5, 6, 3, 4]])
    mask = torch.ones_like(ids)
    for group_ids in (
        [torch.tensor(7), torch.tensor(7)],
        numpy.array([7, 7]),
        ["a", "a"],
        [2**70] * 2,
        [True] * 2,
    ):
        batch = dualkv.pack_padded(ids, mask, mask[:, 2:], group_ids)
        assert batch.forest.total_tokens == 6, group_ids
    with pytest.raises(TypeError, match="group_ids must be a list of an id for each row"):
        dualkv.pack_padded(ids, mask, mask[:, 2:], None)
    with pytest.raises(TypeError, match="group_ids must be a list of an id for each row"):
        dualkv.pack_padded(ids, mask, mask[:, 2:], [[1], [1]])


@pytest.mark.parametrize("empty", [[], torch.tensor([]), numpy.array([]), ()])
def test_empty_responses_of_any_kind(empty):
    batch = dualkv.pack([[1, 2]], [[empty, [3]]])
    assert batch.target_rows.tolist() == [1] and batch.forest.lengths == [2, 0, 1]


def test_autocast_hides_no_wrong_type():
    forest, (q, k, v) = group()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="q .*int64|complex"):
        dualkv.attention(q.long(), k.long(), v.long(), forest)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="complex"):
        dualkv.attention(q.cfloat(), k.cfloat(), v.cfloat(), forest)


def test_expanded_hidden_states():
    row, weight = torch.randn(1, 8), torch.randn(6, 8)
    rows, targets = torch.arange(5), torch.arange(5)
    logprob, entropy = dualkv.linear_logprob(row.expand(5, 8), weight, rows, targets)
    expected = (row @ weight.t()).log_softmax(-1)[0]
    torch.testing.assert_close(logprob, expected[:5])
    assert (entropy == entropy[0]).all()


def test_numbers_that_the_accumulation_type_cannot_hold():
    forest, inputs = group()
    for options in ({"softcap": 1e39}, {"softcap": 1e-50}, {"scale": 1e300}):
        with pytest.raises(ValueError, match="in the accumulation type"):
            dualkv.attention(*inputs, forest, **options)
    dualkv.attention(*(x.double() for x in inputs), forest, softcap=1e-50)
