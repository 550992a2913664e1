"""The loop over chunks of logits, which linear_logprob takes on CUDA, on the CPU: the kernels are replaced by
what they mean, in PyTorch. tests/python/test_cuda_logprob.py has the kernels."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from dualkv import logprob_chunks
from reference import assert_within_budget
from test_logprob import Case, unfused


def tensor_at(address: int, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address, as a tensor."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


class Row:
    """A row of a chunk, for the kernels' stand-ins."""

    def __init__(self, params, r: int, dtype: torch.dtype):
        self.memory = tensor_at(params.logits, (params.num_rows, params.logits_row_stride), torch.float32)[r]
        ranges = tensor_at(params.target_ranges, (params.num_rows, 2), torch.int64)
        begin, end = ranges[r].tolist()
        self.targets, self.index = (
            tensor_at(x, (end,), torch.int64)[begin:] for x in (params.targets, params.target_index)
        )
        assert self.targets.equal(self.targets.sort().values)
        first, count = params.vocab_begin, params.vocab_count
        x = self.memory[:count].double()
        if params.bias is not None:
            x += tensor_at(params.bias, (params.vocab_size,), dtype)[first : first + count].double()
        self.slope = torch.full_like(x, 1 / params.temperature)
        if params.softcap > 0:
            tanh = torch.tanh(x / params.softcap)
            x, self.slope = params.softcap * tanh, self.slope * (1 - tanh * tanh)
        self.logits = x / params.temperature
        self.chosen = (self.targets >= first) & (self.targets < first + count)
        self.places = self.targets[self.chosen] - first

    def results(self, address: int) -> torch.Tensor:
        """The array [M] at an address, as far as this row needs it."""
        return tensor_at(address, (int(self.index.max()) + 1,), torch.float32)


class Kernels:
    """The functions of the C interface on tensors of the CPU. A row's logits are kept, by the address of its
    statistics, until its last chunk."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.statistics = {}

    def dualkv_linear_logprob_chunk_forward(self, reference) -> None:
        params = reference._obj
        for r in range(params.num_rows):
            row = Row(params, r, self.dtype)
            if len(row.targets) == 0:
                continue
            key = params.statistics + 12 * r
            logits = [row.logits] if params.vocab_begin == 0 else [*self.statistics[key], row.logits]
            self.statistics[key] = logits
            logprob, entropy, lse = map(row.results, (params.logprob, params.entropy, params.lse))
            logprob[row.index[row.chosen]] = row.logits[row.places].float()
            if params.vocab_begin + params.vocab_count == params.vocab_size:
                whole = torch.cat(logits)
                assert len(whole) == params.vocab_size
                logp = whole.log_softmax(0)
                logprob[row.index] = logp[row.targets].float()
                entropy[row.index] = -(logp.exp() * logp).sum().float()
                lse[row.index] = whole.logsumexp(0).float()

    def dualkv_linear_logprob_chunk_backward(self, reference) -> None:
        params = reference._obj.forward
        for r in range(params.num_rows):
            row = Row(params, r, self.dtype)
            gradient = torch.zeros_like(row.logits)
            if len(row.targets) > 0:
                zeros = torch.zeros(len(row.index), dtype=torch.float64)
                dlogprob, dentropy = (
                    zeros if x is None else row.results(x)[row.index].double()
                    for x in (reference._obj.dlogprob, reference._obj.dentropy)
                )
                lse, entropy = (row.results(x)[row.index[0]] for x in (params.lse, params.entropy))
                logp = (row.logits.float() - lse).double()  # lse is float32
                gradient -= logp.exp() * (dlogprob.sum() + dentropy.sum() * (logp + entropy))
                gradient.index_add_(0, row.places, dlogprob[row.chosen])
            row.memory.view(self.dtype)[: params.vocab_count] = (gradient * row.slope).to(self.dtype)


def product(a, b, out, *, add=False) -> None:
    """As a GPU multiplies 2-byte types: sums are float32."""
    result = a.float() @ b.float()
    out.copy_(out.float() + result if add else result)


@pytest.fixture
def chunked(monkeypatch):
    """results(inputs, rows, targets, dlogp, dentropy, wanted, **options), as those of test_logprob.py, by chunks
    of at most max_logits."""

    def results(inputs, rows, targets, dlogp, dentropy, wanted=(True,) * 3, max_logits=1 << 27, **options):
        hidden, weight, bias = inputs
        monkeypatch.setattr(logprob_chunks, "library", Kernels(hidden.dtype))
        monkeypatch.setattr(logprob_chunks, "MAX_LOGITS", max_logits)
        monkeypatch.setattr(logprob_chunks, "MIN_VOCAB", 8)
        if hidden.dtype != torch.float32:
            monkeypatch.setattr(logprob_chunks, "_product", product)
        rows, targets = rows.long(), targets.long()
        options = (options.get("temperature", 1.0), options.get("softcap", 0.0))
        logp, entropy, lse = (torch.empty(len(rows)) for _ in range(3))
        operands = (*inputs, rows, targets)
        logprob_chunks.forward(*operands, *options, logp, entropy, lse)
        gradients = [
            x.new_empty(x.shape) if x is not None and want else None for x, want in zip(inputs, wanted)
        ]
        logprob_chunks.backward(dlogp, dentropy, *operands, entropy, lse, *options, *gradients)
        names = ("logp", "entropy", "dhidden", "dweight", "dbias")
        return {name: x for name, x in zip(names, (logp, entropy, *gradients)) if x is not None}

    return results


@pytest.mark.parametrize("max_logits", [1 << 27, 2000, 40])
@pytest.mark.parametrize("seed", range(40))
def test_random_inputs(seed, max_logits, chunked):
    case = Case(seed)
    if case.dtype == torch.float64:
        case.dtype, case.inputs = torch.float32, [x if x is None else x.float() for x in case.inputs]
    found = chunked(
        case.inputs,
        case.rows,
        case.targets,
        case.dlogp,
        case.dentropy,
        max_logits=max_logits,
        **case.options,
    )
    oracle, plain = case.run(unfused, torch.float64), case.run(unfused)
    floor = 1.0 if len(case.inputs[1]) == 1 else 0.1  # as in test_logprob.py
    assert set(found) == set(oracle)
    for name, right in oracle.items():
        assert found[name].shape == right.shape, f"{name}; {case.message}"
        if right.numel() > 0:
            whole = [slice(0, len(right))]
            assert_within_budget(name, found[name], right, plain[name], whole, case.message, floor)


@pytest.mark.parametrize("max_logits", [1 << 27, 64])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), ()])
@pytest.mark.parametrize("which", ["logp", "entropy"])
def test_M4_only_the_gradients_that_are_asked_for(wanted, which, max_logits, chunked):
    torch.manual_seed(0)
    inputs = [torch.randn(4, 8), torch.randn(19, 8), torch.randn(19)]
    rows, targets, upstream = torch.tensor([0, 3, 3]), torch.tensor([2, 16, 1]), torch.randn(3)
    both = (upstream, None) if which == "logp" else (None, upstream)
    right = chunked(inputs, rows, targets, *both, max_logits=max_logits)
    found = chunked(inputs, rows, targets, *both, [i in wanted for i in range(3)], max_logits=max_logits)
    names = [name for i, name in enumerate(("dhidden", "dweight", "dbias")) if i in wanted]
    assert [name for name in found if name.startswith("d")] == names
    assert all(torch.equal(found[name], right[name]) for name in found)


@pytest.mark.parametrize("targets", [[], [-100, -100, -100]])
def test_nothing_to_score_has_gradients_of_zero(targets, chunked):
    inputs = [torch.randn(4, 8), torch.randn(7, 8), torch.randn(7)]
    upstream = torch.full((len(targets),), math.nan)  # of no meaning
    rows = torch.zeros(len(targets), dtype=torch.int64)
    found = chunked(inputs, rows, torch.tensor(targets, dtype=torch.int64), upstream, upstream)
    assert len(found) == 5
    for name, x in found.items():
        assert torch.equal(x, torch.zeros_like(x)), name


@pytest.mark.parametrize("max_logits", [1 << 27, 64])
def test_rows_without_targets_are_neither_read_nor_multiplied(max_logits, chunked, monkeypatch):
    torch.manual_seed(0)
    hidden = torch.full((9, 8), math.nan)
    scored = torch.tensor([1, 4, 8])
    hidden[scored] = torch.randn(3, 8)
    rows = torch.tensor([8, 1, 1, 4, 1, 8, 0])
    targets = torch.tensor([3, 18, 0, 9, 18, 18, -100])
    multiplied = []
    multiply = logprob_chunks._product

    def count(a, b, out, *, add=False):
        if b.shape[0] == 8:  # hidden . weight^T
            multiplied.append(a.shape[0] * b.shape[1])
        multiply(a, b, out, add=add)

    monkeypatch.setattr(logprob_chunks, "_product", count)
    found = chunked(
        [hidden, torch.randn(19, 8), None], rows, targets, torch.randn(7), None, max_logits=max_logits
    )
    assert sum(multiplied) == 2 * 3 * 19  # in the forward and in the backward
    rest = torch.ones(9, dtype=torch.bool).scatter_(0, scored, False)
    assert not found["dhidden"][rest].any() and found["dhidden"][scored].all()
    assert not found["dweight"].isnan().any()


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_are_not_counted_are_filled_up(seed):
    """What a GPU does without telling the host how many rows have targets."""
    torch.manual_seed(seed)
    hidden_rows, vocab, count = (3, 17, 40)[seed % 3], 11, (1, 8, 60)[seed % 2 + seed % 3 // 2]
    rows, targets = torch.randint(hidden_rows, (count,)), torch.randint(vocab, (count,))
    targets[torch.rand(count) < 0.3] = -100
    exact, padded = (
        logprob_chunks.scored_rows(rows, targets, hidden_rows, vocab, counted=counted)
        for counted in (True, False)
    )
    assert torch.equal(exact.rows, rows[targets != -100].unique())
    assert exact.all == (len(exact.rows) == hidden_rows) and not exact.padded
    assert len(padded.rows) == min(hidden_rows, count) and padded.padded and not padded.all
    assert torch.equal(padded.rows, padded.rows.unique())
    with_targets = padded.ranges[:, 0] < padded.ranges[:, 1]
    assert torch.equal(padded.rows[with_targets], exact.rows)
    assert torch.equal(padded.ranges[with_targets], exact.ranges)
    for row, (begin, end) in zip(exact.rows.tolist(), exact.ranges.tolist()):
        places = torch.nonzero((rows == row) & (targets != -100))[:, 0]
        order = sorted(places.tolist(), key=lambda m: int(targets[m]))
        assert exact.index[begin:end].tolist() == order
        assert exact.targets[begin:end].tolist() == targets[order].tolist()


def test_values_out_of_range():
    def scored(rows, targets):
        rows, targets = torch.tensor(rows), torch.tensor(targets)
        return logprob_chunks.scored_rows(rows, targets, 4, 7, counted=True)

    with pytest.raises(ValueError, match=r"rows\[1\] must be 0 to 3, got 4$"):
        scored([0, 4, 5], [0, -100, 9])
    with pytest.raises(ValueError, match=r"rows\[2\] must be 0 to 3, got -1$"):
        scored([0, 1, -1], [0, 0, 0])
    with pytest.raises(ValueError, match=r"targets\[0\] must be 0 to 6, or -100 to ignore it, got 7$"):
        scored([0, 1], [7, -1])


@pytest.mark.parametrize("rows", [0, 1, 7, 128, 1000, 32767, 32768, 32769, 200_000])
@pytest.mark.parametrize("vocab", [0, 1, 7, 4096, 32000, 151936, 262144])
def test_chunks_are_of_512_MiB_at_most(rows, vocab):
    part, entries = logprob_chunks.chunk_shape(rows, vocab)
    assert 4 * part * entries <= 512 << 20
    assert entries % 8 == 0 and entries >= min(vocab, 4096)
    assert part >= min(rows, 32768)


def test_doubles_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="must be one of .*torch.float32, got torch.float64"):
        logprob_chunks.require_products(torch.float64)
