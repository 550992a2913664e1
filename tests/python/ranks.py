"""Tests over several ranks, a process each."""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager
from datetime import timedelta

import torch

RANKS = 2
WATCHDOG_SECONDS = 120


def run_ranks(work, *arguments) -> list:
    """What work(rank, *arguments) returns in each rank. An error in one fails the test."""
    # Not forked: a child would inherit the locks of the threads that earlier tests have started, not the threads.
    context = multiprocessing.get_context("spawn")
    children, results = [], []
    try:
        for rank in range(RANKS):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_run, args=(work, rank, arguments, sender), daemon=True)
            child.start()
            sender.close()  # a rank that ends without a word ends the wait for it
            children.append((child, receiver))
        for _, receiver in children:
            assert receiver.poll(WATCHDOG_SECONDS), "a rank hangs"
            error, result = receiver.recv()
            assert error is None, error
            results.append(result)
    finally:
        for child, _ in children:
            child.kill()
            child.join()
    return results


def _run(work, rank: int, arguments: tuple, connection) -> None:
    torch.set_num_threads(1)
    try:
        connection.send((None, work(rank, *arguments)))
    except BaseException as error:  # handed to the parent, where it fails the test
        connection.send((repr(error), None))


@contextmanager
def gloo(rank: int, store_path: str):
    """The ranks' process group, in which they meet by a file that is not there yet."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=WATCHDOG_SECONDS),
    )
    yield
    torch.distributed.destroy_process_group()
