"""GRPO with TRL in two processes: packed is stock, and gradients are exchanged."""

from __future__ import annotations

import multiprocessing
import os
import socket

import pytest
import torch

pytest.importorskip("trl")

from accelerate.utils import DistributedType  # noqa: E402

from trl_runs import (  # noqa: E402
    PackedTrainer,
    StockTrainer,
    assert_same_training,
    make_trainer,
    save_model,
    weights_of,
)

PROCESSES = 2


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_in_rank(rank: int, port: int, model: str, folder, connection) -> None:
    """Trains packed and stock as one of two ranks, and sends what went wrong, or None."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(PROCESSES),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        compare(model, folder)
        connection.send(None)
    except BaseException as error:  # handed to the parent, where it fails the test
        connection.send(repr(error))


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
        copies = [torch.empty_like(value) for _ in range(PROCESSES)]
        torch.distributed.all_gather(copies, value.contiguous())
        assert torch.equal(copies[0], copies[1]), name
    # Each rank has a group of 4 of its own, of another prompt length: the ratio is that of both together.
    ratio = packed.state.log_history[0]["dualkv/token_ratio"]
    ratios = [None] * PROCESSES
    torch.distributed.all_gather_object(ratios, ratio)
    assert ratios[0] == ratios[1] > 1.5


def test_two_processes(tmp_path):
    model = save_model(tmp_path / "model")
    # Not forked: a child would inherit the locks of the threads that earlier tests have started, not the threads.
    context = multiprocessing.get_context("spawn")
    port = free_port()
    children = []
    for rank in range(PROCESSES):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (rank, port, model, tmp_path / str(rank), sender)
        child = context.Process(target=train_in_rank, args=arguments, daemon=True)
        child.start()
        sender.close()
        children.append((child, receiver))
    try:
        for child, receiver in children:
            assert receiver.poll(120), "a rank hangs"
            assert receiver.recv() is None
    finally:
        for child, _ in children:
            child.kill()
            child.join()
