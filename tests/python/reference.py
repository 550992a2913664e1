"""Attention by replication, the meaning of what the library computes, and the error that it is allowed.

Everything here is written without the library: dense attention over each root-to-leaf sequence on its own.
"""

from __future__ import annotations

import torch

HALF = (torch.bfloat16, torch.float16)


def sequences(forest) -> list[torch.Tensor]:
    """For each leaf of the forest the rows from its root on, in order."""
    rows, leaves, begin = [], set(range(forest.num_segments)), 0
    for length, parent in zip(forest.lengths, forest.parents):
        own = torch.arange(begin, begin + length)
        rows.append(torch.cat([rows[parent], own]) if parent >= 0 else own)
        leaves.discard(parent)
        begin += length
    return [rows[leaf] for leaf in sorted(leaves)]


def dense_attention(q, k, v, *, scale, window_left=None, softcap=0.0, sinks=None):
    """Causal attention over one sequence, in the inputs' type: q [n, H, D], k and v [n, Hk, D], sinks [H] ->
    out [n, H, D], lse [H, n]."""
    n, heads = q.shape[:2]
    k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(n, device=q.device)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0
    if window_left is not None:
        hidden = hidden | (distance > window_left)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(heads, n, 1)], dim=2)
    probabilities = torch.softmax(scores, dim=2)[:, :, :n]
    return torch.einsum("hij,jhd->ihd", probabilities, v), torch.logsumexp(scores, dim=2)


def replicated_attention(q, k, v, forest, **options):
    """Attention over a packed batch by replicated sequences: q [T, H, D] -> out [T, H, D], lse [H, T].

    A row that several sequences share gets its result from the first of them, so that its gradient flows in
    once; gradients of shared keys and values add up over all copies. Rows past the forest get 0 and -inf.
    """
    total = q.shape[0]
    taken = torch.zeros(total, dtype=torch.bool, device=q.device)
    pieces, order = [(q[:0], q[:0, :, 0].t())], []  # keeps the result differentiable if there are no rows
    for rows in sequences(forest):
        rows = rows.to(q.device)
        out, lse = dense_attention(q[rows], k[rows], v[rows], **options)
        new = ~taken[rows]
        pieces.append((out[new], lse[:, new]))
        order.append(rows[new])
        taken[rows] = True
    rest = torch.nonzero(~taken)[:, 0]
    pieces.append((q.new_zeros(len(rest), *q.shape[1:]), q.new_full((q.shape[1], len(rest)), float("-inf"))))
    order = torch.argsort(torch.cat([*order, rest]))
    return torch.cat([out for out, _ in pieces])[order], torch.cat([lse for _, lse in pieces], dim=1)[
        :, order
    ]


def blocks(forest, total: int) -> list[slice]:
    """Rows of each segment, and the rows past the last."""
    edges = [0, *torch.tensor(forest.lengths, dtype=torch.int64).cumsum(0).tolist(), total]
    return [slice(begin, end) for begin, end in zip(edges, edges[1:]) if end > begin]


def assert_within_budget(
    name, actual, oracle, plain, rows: list[slice], message, floor=0.0, slack=1.0
) -> None:
    """In each block of rows: error <= 2 x (error of plain attention in the same type + eps x max |oracle|).

    actual, oracle (float64) and plain are [rows, ...]; eps is that of plain's type, and 64 times as much
    for float64, whose oracle has the errors of the same type. `floor`, a number or [rows], takes the place of max |oracle| where
    it is greater; the budget is `slack` times that.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {list(actual.shape)}; {message}"
    assert not actual.isnan().any(), f"{name} has NaN; {message}"
    eps = torch.finfo(plain.dtype).eps * (64 if plain.dtype == torch.float64 else 1)
    finite = oracle.isfinite()
    assert torch.equal(actual[~finite].double(), oracle[~finite]), f"{name}: infinite values; {message}"
    actual, oracle, plain = (torch.where(finite, x.double(), 0.0) for x in (actual, oracle, plain))
    floor = torch.as_tensor(floor, device=oracle.device).expand(len(oracle))
    for block in rows:
        error = (actual[block] - oracle[block]).abs().max().item()
        size = max(oracle.abs().max().item(), floor[block].max().item())
        budget = slack * 2 * ((plain[block] - oracle[block]).abs().max().item() + eps * size)
        assert error <= budget, (
            f"{name}: error {error} > {budget} in rows {block.start}:{block.stop}; {message}"
        )


def results(attend, inputs, sinks, dout, dlse):
    """Outputs and gradients of attend(q, k, v, sinks) -> (out, lse), by name."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    out, lse = attend(*inputs, sinks)
    wanted = [*inputs] if sinks is None else [*inputs, sinks]
    outputs, gradients = [out], [dout.to(out.dtype)]
    if dlse is not None:
        outputs.append(lse)
        gradients.append(dlse.to(lse.dtype))
    found = torch.autograd.grad(outputs, wanted, gradients, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv", "dsinks"), found))}


def _without_padding(inputs, forest, dtype) -> list[torch.Tensor]:
    """Copies of the tensors in a type, with zeros in the rows that take no part."""
    tensors = [x.detach().to(dtype, copy=True) for x in inputs]
    for x in tensors:
        x[forest.total_tokens :] = 0
    return tensors


def assert_right(actual: dict, inputs, forest, sinks, dout, dlse, message, slack=1.0, **options) -> None:
    """Compares the library's `results` with the oracle."""

    def run(dtype):
        return results(
            lambda q, k, v, sinks: replicated_attention(q, k, v, forest, sinks=sinks, **options),
            _without_padding(inputs, forest, dtype),
            None if sinks is None else sinks.to(dtype),
            dout,
            dlse,
        )

    dtype = inputs[0].dtype
    oracle, plain = run(torch.float64), run(dtype)
    wide = run(torch.float32) if dtype in HALF else plain  # lse and dsinks are wide
    rows = blocks(forest, inputs[0].shape[0])
    dim = inputs[0].shape[2]
    dim_root = dim**0.5
    size_q, size_k = (
        x[: forest.total_tokens].double().abs().amax() if forest.total_tokens else 0 for x in inputs[:2]
    )
    scores = dim_root * oracle["lse"].nan_to_num(neginf=0.0).abs().max() if rows else 0.0  # sums of D terms
    if inputs[0].is_cuda:
        # A tensor core adds up to 16 products at the exponent of the largest, and cuts off what lies below.
        scores = max(scores, min(dim, 16) * abs(options["scale"]) * size_q * size_k)
    assert_within_budget("out", actual["out"], oracle["out"], plain["out"], rows, message, slack=slack)
    assert_within_budget("lse", actual["lse"].t(), oracle["lse"].t(), wide["lse"].t(), rows, message, scores)
    # The gradient of a score is p x (dout.v - dout.out). Where one key has all of the weight that is a
    # difference of equal numbers: 0 in the oracle and often in plain attention, but the rounding of `out`
    # and, in wide types, of the sums over D terms remains in ours.
    terms = (oracle["out"] * dout.double()).nan_to_num().norm(dim=2).amax(dim=1)
    cancelled = terms * abs(options["scale"]) * (max(1.0, dim_root / 4) if wide is plain else 1.0)
    floors = {
        "dq": cancelled * size_k,
        "dk": cancelled.max() * size_q if len(cancelled) else 0.0,
        "dv": 0.0,
    }
    for name, floor in floors.items():
        assert_within_budget(name, actual[name], oracle[name], plain[name], rows, message, floor, slack)
    if sinks is not None:
        one = [slice(0, sinks.shape[0])]
        # A sum over rows of terms of both signs, whose rounding errors scale with the terms. out, which enters
        # the gradient, is rounded to the inputs' type.
        delta = (oracle["out"] * dout.double()).nan_to_num().sum(2).t()
        delta = delta if dlse is None else delta - dlse.double().nan_to_num()
        weight = (sinks.double()[:, None] - oracle["lse"]).exp().nan_to_num(posinf=0.0)
        terms = (weight * delta.abs()).sum(1)
        assert_within_budget(
            "dsinks", actual["dsinks"], oracle["dsinks"], plain["dsinks"], one, message, terms
        )
