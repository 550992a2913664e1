"""bench/trl_step.py with a tiny model on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
import trl_step  # noqa: E402


def test_both_trainers_have_a_record(tmp_path):
    output = tmp_path / "trl_step.json"
    sizes = ["--prompt", "24", "--response", "4", "--generations", "4", "--steps", "2"]
    records = trl_step.main(["--tiny", *sizes, "--commit", "a commit", "--output", str(output)])
    assert json.loads(output.read_text()) == records
    packed, stock = records
    assert (packed["trainer"], stock["trainer"]) == ("packed", "stock")
    assert packed["token_ratio"] == pytest.approx(4 * 28 / (24 + 4 * 4)) and stock["token_ratio"] == 1
    for record in records:
        assert record["step_s"] > 0 and record["commit"] == "a commit" and record["device"] == "CPU"
        assert (record["prompt"], record["response"], record["prompts"], record["generations"]) == (
            24,
            4,
            2,
            4,
        )
