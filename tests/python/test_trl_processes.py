"""GRPO with TRL in two processes: packed is stock, and gradients are exchanged."""

from __future__ import annotations

import os
import socket

import pytest
import torch

pytest.importorskip("trl")

from accelerate.utils import DistributedType  # noqa: E402

from ranks import RANKS, run_ranks  # noqa: E402
from trl_runs import (  # noqa: E402
    PackedTrainer,
    StockTrainer,
    assert_same_training,
    make_trainer,
    save_model,
    weights_of,
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def compare_in_rank(rank: int, port: int, model: str, folder) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    compare(model, folder / str(rank))


def compare(model: str, folder) -> None:
    trainers = []
    for kind in (PackedTrainer, StockTrainer):
        trainer = make_trainer(
            kind,
            model,
            folder,
            per_device_train_batch_size=4,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            num_iterations=2,
            beta=0.1,
            ddp_backend="gloo",
        )
        assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
        trainer.train()
        trainers.append(trainer)
    packed, stock = trainers
    assert_same_training(packed, stock)
    for name, value in weights_of(packed).items():
        copies = [torch.empty_like(value) for _ in range(RANKS)]
        torch.distributed.all_gather(copies, value.contiguous())
        assert torch.equal(copies[0], copies[1]), name
    # Each rank has a group of 4 of its own, of another prompt length: the ratio is that of both together.
    ratio = packed.state.log_history[0]["dualkv/token_ratio"]
    ratios = [None] * RANKS
    torch.distributed.all_gather_object(ratios, ratio)
    assert ratios[0] == ratios[1] > 1.5


def test_two_processes(tmp_path):
    run_ranks(compare_in_rank, free_port(), save_model(tmp_path / "model"), tmp_path)
