"""bench/learning.py: the records of a short training, their table and their chart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "bench"), str(ROOT / "tools")]
import draw_learning  # noqa: E402
import learning  # noqa: E402

from pictures import draw_twice  # noqa: E402


@pytest.fixture
def records(monkeypatch, threads) -> list[dict]:
    """Two steps of DAPO with either trainer."""
    threads(1)
    monkeypatch.setattr(learning, "LOGGING_STEPS", 2)
    monkeypatch.setattr(learning, "ALGORITHMS", {"DAPO": learning.ALGORITHMS["DAPO"]})
    return [record for name in learning.TRAINERS for record in learning.train("DAPO", name, 0, 2, "a commit")]


def test_records_table_and_chart(records, tmp_path, monkeypatch):
    for record, trainer in zip(records, ("packed", "replicated"), strict=True):
        assert (record["algorithm"], record["trainer"], record["seed"]) == ("DAPO", trainer, 0)
        assert record["step"] == 2 and record["commit"] == "a commit"
        assert 0 <= record["reward"] <= 1 and record["seconds"] > 0
    packed, replicated = records
    assert packed["reward"] == replicated["reward"]  # both draw the same samples
    assert 6 < packed["token_ratio"] < 8 and replicated["token_ratio"] == 1

    lines = learning.summary(records)
    assert [line.split("  ")[0] for line in lines[1:]] == ["DAPO, packed", "DAPO, replicated"]

    drawn = draw_twice(draw_learning, records, tmp_path, monkeypatch)
    for text in ("DAPO", "packed", "replicated", "mean reward", "optimizer step"):
        assert text in drawn
