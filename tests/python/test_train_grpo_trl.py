"""The example that trains with TRL: its reward rises, packed, and its options are checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_grpo_trl  # noqa: E402


def test_the_reward_rises(capsys, threads, cpu_or_gpu):
    threads(torch.get_num_threads())  # the example sets another number
    assert train_grpo_trl.main(["--steps", "100", "--device", cpu_or_gpu.type]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 10 and all(line.endswith("token ratio 7.2") for line in lines)


def test_an_unchanged_reward_is_exit_status_1(threads):
    threads(torch.get_num_threads())
    assert train_grpo_trl.main(["--steps", "10", "--stock"]) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_trains_in_bf16_and_a_cpu_in_fp32(monkeypatch, device):
    class Stop(Exception):
        pass

    def config(**options):
        assert options["bf16"] == (device == "cuda") and options["use_cpu"] == (device == "cpu")
        raise Stop

    monkeypatch.setattr(train_grpo_trl.trl, "GRPOConfig", config)
    options = train_grpo_trl.argument_parser().parse_args(["--device", device])
    with pytest.raises(Stop):
        train_grpo_trl.make_trainer(options, "folder")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        train_grpo_trl.main(["--device", "cuda"])
    assert "torch finds no GPU" in capsys.readouterr().err
