"""bench/attention.py: its arithmetic, its peers, its table and its chart; bench/linear_logprob.py on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import dualkv

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "bench"), str(ROOT / "tools")]
import attention  # noqa: E402
import attention_peers  # noqa: E402
import draw_attention_bench  # noqa: E402
import linear_logprob  # noqa: E402
from attention_batches import BATCHES, FORWARD_GOALS, GOALS, TABLE_1, TABLE_1_SPEEDUPS, Batch, Goal  # noqa: E402

from pictures import draw_twice  # noqa: E402

# ----------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_pairs_are_those_of_the_forest_with_half_a_diagonal(batch):
    forest = dualkv.SegmentForest.from_groups(*zip(*batch.groups))
    assert batch.tokens == forest.total_tokens
    assert batch.pairs == forest.visible_pairs() - forest.total_tokens / 2


def test_the_ragged_batches_are_those_of_the_quoted_figures():
    tokens = {batch.name: batch.tokens for batch in BATCHES}
    assert tokens["ragged A"] == 8192 + 21078
    assert tokens["ragged B"] == 5059 + 36264
    assert tokens["8 groups C"] == 37780
    assert tokens["16 groups D"] == 31066


def test_useful_tflops():
    """FlashAttention-3 in three calls took 107.4 ms for 3.5 forward passes of work: 605 TFLOP/s."""
    batch = next(batch for batch in BATCHES if batch.name == "28, 16384, 2048")
    assert batch.useful_tflops(107.4 / 3.5) == pytest.approx(604.7, abs=0.1)
    assert batch.useful_tflops(28.5, 78.9) == pytest.approx(604.7, abs=0.1)


def test_every_batch_has_a_goal_that_scales_with_the_card():
    assert list(GOALS) == list(FORWARD_GOALS) == [batch.name for batch in BATCHES]
    assert list(TABLE_1_SPEEDUPS) == [batch.name for batch in TABLE_1]
    assert Goal(600, 500).reached(600, 752) == 1
    assert Goal(600, 500).reached(600, 376) == 2


# ---------------------------------------------------------------------------------------------------- peers

GROUPS = {
    "one group": [(5, [3, 3, 3])],
    "ragged": [(7, [2, 5, 1])],
    "several groups": [(4, [1, 6]), (1, [3]), (6, [2, 2, 2])],
    "no prompt in common": [(2, [3]), (3, [2])],
}


def plain_spans(q, k, v, spans):
    """Of each span: scores [H, Q, K], and its q, k and v, with a k and v for each head; all in float32."""
    lengths = [begins.diff().tolist() for begins in (spans.begin_q, spans.begin_k)]
    assert spans.equal == all(len(set(column)) == 1 for column in lengths)
    assert (spans.max_q, spans.max_k) == tuple(map(max, lengths)) and spans.count == len(lengths[0])
    q, k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (q, k, v))
    for q_span, k_span, v_span in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1])):
        scores = torch.einsum("qhd,khd->hqk", q_span, k_span) * q.shape[2] ** -0.5
        if spans.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        yield scores, q_span, k_span, v_span


def plain_attention(q, k, v, spans):
    """As the backends of attention_peers, span by span."""
    found = list(plain_spans(q, k, v, spans))
    outs = [torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_span) for scores, _, _, v_span in found]
    return torch.cat(outs).to(q.dtype), torch.cat([scores.logsumexp(-1) for scores, *_ in found], 1)


def plain_backward(dout, q, k, v, out, lse, spans):
    dout, out = dout.float(), out.float()
    gradients, begin, ratio = [], 0, q.shape[1] // k.shape[1]
    for scores, q_span, k_span, v_span in plain_spans(q, k, v, spans):
        rows = slice(begin, begin + len(q_span))
        begin = rows.stop
        weights = (scores - lse[:, rows, None]).exp()
        dweights = torch.einsum("qhd,khd->hqk", dout[rows], v_span)
        delta = (dout[rows] * out[rows]).sum(-1).t().unsqueeze(-1)
        dscores = weights * (dweights - delta) * q.shape[2] ** -0.5
        dk, dv = (
            torch.einsum("hqk,qhd->khd", x, y).unflatten(1, (-1, ratio)).sum(2)
            for x, y in ((dscores, q_span), (weights, dout[rows]))
        )
        gradients.append((torch.einsum("hqk,khd->qhd", dscores, k_span), dk, dv))
    return [torch.cat(parts).to(q.dtype) for parts in zip(*gradients)]


KINDS = {
    "dualkv-deterministic": attention_peers.DualkvDeterministic,
    "replicated": lambda batch: attention_peers.Replicated(batch, plain_attention, "cpu"),
    "cascade": lambda batch: attention_peers.Cascade(batch, plain_attention, plain_backward, "cpu"),
    "flex": lambda batch: attention_peers.Flex(batch, "cpu"),
}


def test_records_of_other_batches_are_kept(tmp_path):
    output = tmp_path / "out.json"
    names = [batch.name for batch in BATCHES]

    def of(name: str, impl: str) -> dict:
        return {"batch": name, "impl": impl}

    first = [of(names[2], "dualkv"), of(names[2], "flex")]
    assert attention.with_other_batches(first, output, BATCHES) == first
    output.write_text(json.dumps([of(names[0], "dualkv"), *first]))
    measured = [of(names[2], "cudnn-cascade"), of(names[1], "dualkv")]
    wanted = [of(names[0], "dualkv"), of(names[1], "dualkv"), of(names[2], "cudnn-cascade")]
    assert attention.with_other_batches(measured, output, BATCHES) == wanted


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_peers_agree_with_dualkv(kind, groups):
    torch.manual_seed(0)
    batch = Batch("small", groups, head_dim=8, heads=4, kv_heads=2)
    q, k, v, dout = (torch.randn(batch.tokens, heads, 8) for heads in (4, 2, 2, 4))
    backward = kind is not KINDS["flex"]  # which has none on a CPU
    peer, ours = kind(batch), attention_peers.Dualkv(batch)
    results = []
    for x in (peer, ours):
        call = attention_peers.Call(x, q, k, v, dout if backward else None)
        results.append([x.rows(call.forward()), *(x.gradients(call.backward()) if backward else [])])
        again = call.backward() if backward else []  # of the graph that was retained
        torch.testing.assert_close(x.gradients(again) if again else [], results[-1][1:])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_results_are_compared(monkeypatch):
    class Wrong(attention_peers.Dualkv):
        def gradients(self, gradients):
            dq, dk, dv = gradients
            return dq, dk, torch.cat([dv[:-8], 2 * dv[-8:]])

    batch = Batch("small", [(70, [60, 20])], head_dim=16, heads=4, kv_heads=2)
    for name, peer in {**KINDS, "wrong": Wrong}.items():
        monkeypatch.setitem(attention_peers.PEERS, name, peer)
    torch.manual_seed(0)
    inputs = attention.random_inputs(batch, backward=True, device="cpu")
    expected = attention.Contender("dualkv", batch, inputs).compare(None)
    for name in ("replicated", "cascade"):
        contender = attention.Contender(name, batch, inputs)
        contender.compare(expected)
        assert 0 < contender.gradient_difference < 0.03
    with pytest.raises(ArithmeticError, match="dv: 16 rows are off"):
        attention.Contender("wrong", batch, inputs).compare(expected)


def test_passes_of_a_contender(monkeypatch):
    """Each call of a pass uses the next set of inputs."""
    batch = Batch("small", [(5, [3])], head_dim=8, heads=2, kv_heads=1)
    sets = [attention.random_inputs(batch, backward, device="cpu")[0] for backward in (True, True, False)]
    contender = attention.Contender("dualkv", batch, sets[:2])
    contender.compare(None)
    outs = [contender.functions["forward"]() for _ in range(3)]
    gradients = [contender.functions["backward"]() for _ in range(3)]
    for results in (outs, gradients):
        torch.testing.assert_close(results[0], results[2])
        assert not torch.equal(results[0][0], results[1][0])
    contender = attention.Contender("dualkv", batch, sets[2:])
    assert list(contender.functions) == ["forward"] and not contender.compare(None)[0].requires_grad


@pytest.mark.parametrize(
    "attend, queries, keys",
    [
        (attention_peers.fa2, [4, 4], [4, 4]),
        (attention_peers.fa2, [12], [7]),
        (attention_peers.fa2, [6, 2], [3, 4]),
        (attention_peers.cudnn, [4, 4], [4, 4]),
        (attention_peers.cudnn, [12], [7]),
    ],
)
def test_torch_operators_are_called_as_they_are_declared(attend, queries, keys):
    spans = attention_peers.Spans(queries, keys, queries == keys, "meta")
    q, k = (torch.empty(sum(x), h, 64, device="meta") for x, h in ((queries, 8), (keys, 2)))
    out, lse = attend(q, k, k, spans)
    assert out.shape == q.shape and lse.shape == q.shape[1::-1]
    backward = getattr(attention_peers, attend.__name__ + "_backward")
    assert [x.shape for x in backward(out, q, k, k, out, lse, spans)] == [q.shape, k.shape, k.shape]


def test_merging_is_safe_where_one_side_has_all_the_weight():
    a, b = torch.randn(2, 3, 2, 4)
    lse = torch.zeros(2, 3)
    for lse_a, lse_b, expected in [(lse, lse - 1e4, a), (lse - 1e4, lse, b), (lse, lse, (a + b) / 2)]:
        merged, merged_lse = attention_peers.merge(a, lse_a, b, lse_b)
        torch.testing.assert_close(merged, expected)
        torch.testing.assert_close(merged_lse, torch.stack([lse_a, lse_b]).logsumexp(0))


# ------------------------------------------------------------------------------------------ table and chart


def record(batch: str, impl: str, rate: float, head_dim: int = 128) -> dict:
    return {
        "batch": batch,
        "impl": impl,
        "head_dim": head_dim,
        "useful_tflops": rate,
        "matmul_tflops": 752.0,
        "device": "a card",
    }


RECORDS = [
    record("8, 1024, 256", "dualkv", 361.0),
    record("8, 1024, 256", "dualkv-graph", 380.0),
    record("8, 1024, 256", "cudnn-cascade", 200.0),
    record("8, 4096, 1024", "dualkv", 500.0, head_dim=64),
    {
        "batch": "8, 4096, 1024",
        "impl": "flex",
        "head_dim": 64,
        "error": "OutOfMemoryError: no",
        "device": "a card",
    },
]


def test_table():
    header, rows, notes = attention.table(RECORDS)
    assert header == ["batch", "dualkv", "cudnn-cascade", "flex", "FA3 cascade (quoted)", "dualkv / goal"]
    assert rows == [
        ["8, 1024, 256", "361 (380)", "200", "-", "228 (286)", "0.95 (1.00)"],
        ["8, 4096, 1024", "500", "-", "-", "404", "1.00"],
    ]
    assert notes == ["8, 4096, 1024, flex: OutOfMemoryError: no"]


def with_backward(records: list[dict]) -> list[dict]:
    times = {"forward_ms": 1.0, "backward_ms": 2.5, "peak_bytes": 3 << 30}
    return [{**record, **({} if "error" in record else times)} for record in records]


def test_table_of_both_passes():
    rows = attention.table(with_backward(RECORDS))[1]
    assert [row[-2:] for row in rows] == [["239 (281)", "1.03 (1.09)"], ["441", "1.02"]]


def test_table_1():
    out_of_memory = {"batch": "16, 65536, 2048", "error": "OutOfMemoryError: CUDA out of memory."}
    records = [
        *with_backward([record("28, 4096, 2048", impl, 500.0) for impl in ("dualkv", "fa2-replicated")]),
        *with_backward([record("16, 65536, 2048", "dualkv", 500.0)]),
        {**out_of_memory, "impl": "fa2-replicated"},
    ]
    records[1]["backward_ms"] = 6.0
    header, rows, notes = attention.table_1(records)
    assert header == ["batch", "dualkv", "fa2-replicated", "FA2 / dualkv", "in the paper"]
    assert rows == [
        ["28, 4096, 2048", "1.0 + 2.5 = 3.5, 3.0", "1.0 + 6.0 = 7.0, 3.0", "2.00", "1.65"],
        ["16, 65536, 2048", "1.0 + 2.5 = 3.5, 3.0", "OOM", "-", "FA2 out of memory"],
    ]
    assert notes == ["16, 65536, 2048, fa2-replicated: OutOfMemoryError: CUDA out of memory."]


def test_chart(tmp_path, monkeypatch):
    drawn = draw_twice(draw_attention_bench, RECORDS, tmp_path, monkeypatch)
    for text in (
        "Attention forward, bf16",
        "8 · 1024 · 256",
        "8 · 4096 · 1024",
        "head dim 64",
        "dualkv",
        "cuDNN cascade",
        "quoted",
        "a card",
    ):
        assert text in drawn
    assert draw_attention_bench.read_rates(RECORDS) == {
        128: {"8, 1024, 256": {"dualkv": 361.0, "dualkv-graph": 380.0, "cudnn-cascade": 200.0}},
        64: {"8, 4096, 1024": {"dualkv": 500.0}},
    }


def test_chart_of_both_passes(tmp_path, monkeypatch):
    records = with_backward([*RECORDS, record("8, 1024, 256", "dualkv-deterministic", 300.0)])
    drawn = draw_twice(draw_attention_bench, records, tmp_path, monkeypatch)
    assert "Attention forward + backward, bf16" in drawn and "dualkv, deterministic" in drawn

    forward = draw_attention_bench.forward_of(records)
    assert [x["impl"] for x in forward] == [x["impl"] for x in RECORDS if "error" not in x]
    batch = next(batch for batch in BATCHES if batch.name == "8, 1024, 256")
    assert forward[0]["useful_tflops"] == batch.useful_tflops(records[0]["forward_ms"])
    assert "Attention forward, bf16" in draw_twice(draw_attention_bench, forward, tmp_path, monkeypatch)


# ----------------------------------------------------------------------------------------------- log-probs


def test_linear_logprob_beside_its_products(monkeypatch, capsys, threads):
    arguments = ["--targets", "8", "--vocab", "16", "--hidden-dim", "4", "--repeats", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["linear_logprob.py", *arguments])
    linear_logprob.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "M 8, V 16, C 4, fp32, 1 threads"
    assert [line.split()[0] for line in lines[1:]] == ["pass", "forward", "forward"]


def test_table_of_linear_logprob(capsys):
    run = {"device": "a card", "torch": "2.11", "copy_tbs": 4.2, "targets": 8, "vocab": 16, "hidden_dim": 4}
    run["dtype"] = "bfloat16"
    records = [
        {"pass": "forward", "impl": "products", "ms": 50.0, "ratio": 1.0, "peak_bytes": None},
        {"pass": "forward", "impl": "dualkv", "ms": 60.0, "ratio": 1.2, "peak_bytes": 3 << 29},
        {"impl": "liger", "error": "ModuleNotFoundError: No module named 'liger_kernel'"},
    ]
    records = [{"peak_bytes_beyond_results": 1 << 29, **record, **run} for record in records]
    linear_logprob.show(records)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3:5] == [
        ["forward", "products", "50.0", "1.00", "-", "0.50"],
        ["forward", "dualkv", "60.0", "1.20", "1.50", "0.50"],
    ]
    assert lines[5][:2] == ["liger:", "ModuleNotFoundError:"]
