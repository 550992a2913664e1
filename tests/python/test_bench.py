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
from attention_batches import BATCHES, GOALS, Batch, Goal  # noqa: E402

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


def test_every_batch_has_a_goal_that_scales_with_the_card():
    assert list(GOALS) == [batch.name for batch in BATCHES]
    assert Goal(600, 500).reached(600, 752) == 1
    assert Goal(600, 500).reached(600, 376) == 2


# ---------------------------------------------------------------------------------------------------- peers

GROUPS = {
    "one group": [(5, [3, 3, 3])],
    "ragged": [(7, [2, 5, 1])],
    "several groups": [(4, [1, 6]), (1, [3]), (6, [2, 2, 2])],
    "no prompt in common": [(2, [3]), (3, [2])],
}


def plain_attention(q, k, v, spans):
    """As the backends of attention_peers, span by span."""
    outs, lses = [], []
    lengths = [begins.diff().tolist() for begins in (spans.begin_q, spans.begin_k)]
    assert spans.equal == all(len(set(column)) == 1 for column in lengths)
    assert (spans.max_q, spans.max_k) == tuple(map(max, lengths)) and spans.count == len(lengths[0])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for q_span, k_span, v_span in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1])):
        scores = torch.einsum("qhd,khd->hqk", q_span, k_span) * q.shape[2] ** -0.5
        if spans.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_span))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


KINDS = {
    "replicated": lambda batch: attention_peers.Replicated(batch, plain_attention, "cpu"),
    "cascade": lambda batch: attention_peers.Cascade(batch, plain_attention, "cpu"),
    "flex": lambda batch: attention_peers.Flex(batch, "cpu"),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_peers_agree_with_dualkv(kind, groups):
    torch.manual_seed(0)
    batch = Batch("small", groups, head_dim=8, heads=4, kv_heads=2)
    q, k, v = (torch.randn(batch.tokens, heads, 8) for heads in (4, 2, 2))
    peer = kind(batch)
    rows = peer.rows(peer(*peer.inputs(q, k, v)))
    torch.testing.assert_close(rows, attention_peers.Dualkv(batch)(q, k, v), atol=1e-5, rtol=1e-5)


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


def test_merging_is_safe_where_one_side_has_all_the_weight():
    a, b = torch.randn(2, 3, 2, 4)
    lse = torch.zeros(2, 3)
    for lse_a, lse_b, expected in [(lse, lse - 1e4, a), (lse - 1e4, lse, b), (lse, lse, (a + b) / 2)]:
        torch.testing.assert_close(attention_peers.merge(a, lse_a, b, lse_b), expected)


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


def test_chart(tmp_path, monkeypatch):
    source = tmp_path / "records.json"
    source.write_text(json.dumps(RECORDS))
    pictures = [tmp_path / "images" / name for name in ("one.svg", "two.svg")]
    for picture in pictures:
        monkeypatch.setattr(sys, "argv", ["draw_attention_bench.py", str(source), str(picture)])
        draw_attention_bench.main()
    drawn = [picture.read_text() for picture in pictures]
    assert drawn[0] == drawn[1]
    for text in (
        "8 · 1024 · 256",
        "8 · 4096 · 1024",
        "head dim 64",
        "dualkv",
        "cuDNN cascade",
        "quoted",
        "a card",
    ):
        assert text in drawn[0]
    assert draw_attention_bench.read_rates(RECORDS) == {
        128: {"8, 1024, 256": {"dualkv": 361.0, "dualkv-graph": 380.0, "cudnn-cascade": 200.0}},
        64: {"8, 4096, 1024": {"dualkv": 500.0}},
    }


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
