"""Threads and forked processes that use the library at once get the bits that one caller alone gets."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dualkv

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork"
)


def use_everything(seed: int) -> list[bytes]:
    """A batch packed, attention and log-probabilities over it, and their gradients: the bits of all results."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(0, 40, (count,), generator=generator).tolist()

    batch = dualkv.pack([tokens(70), tokens(9)], [[tokens(30), tokens(150)], [tokens(1), []]])
    rows = len(batch.input_ids)
    q, k, v = (torch.randn(rows, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
    out = dualkv.attention(q, k, v, batch.forest)
    weight = torch.randn(40, 64, generator=generator).requires_grad_()
    logprob, entropy = dualkv.linear_logprob(out.flatten(1), weight, batch.target_rows, batch.target_ids)
    gradients = torch.autograd.grad((logprob + entropy).sum(), (q, k, v, weight))
    results = [batch.input_ids, batch.position_ids, out, logprob, entropy, *gradients]
    return [result.detach().numpy().tobytes() for result in results]


def use_and_send(seed: int, connection) -> None:
    connection.send([use_everything(seed) for _ in range(3)])
    connection.close()


def start_children(seeds):
    context = multiprocessing.get_context("fork")
    children = []
    for seed in seeds:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=use_and_send, args=(seed, sender), daemon=True)
        child.start()
        sender.close()
        children.append((child, receiver))
    return children


def results_of(children) -> list[list[list[bytes]]]:
    results = []
    for child, receiver in children:
        assert receiver.poll(60), "the child hangs"
        results.append(receiver.recv())
        child.join(60)
        assert child.exitcode == 0
    return results


# Where torch sees a GPU it starts a thread for it on the first backward, and then refuses one in a forked child.
forks_with_gradients = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch with a GPU computes no gradients in a forked child"
)


def test_threads_get_the_bits_of_one_caller():
    expected = {seed: use_everything(seed) for seed in (1, 2)}
    seeds = [1, 2] * 6
    with ThreadPoolExecutor(2) as pool:
        for seed, result in zip(seeds, pool.map(use_everything, seeds)):
            assert result == expected[seed], f"seed {seed}"


@forks_with_gradients
def test_forked_children_get_the_bits_of_their_parent_while_it_works_too(threads, monkeypatch):
    threads(2)
    # torch's own threads, which filling a tensor would start in the parent, hang in the child.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    expected = {seed: use_everything(seed) for seed in (1, 2)}  # the library has run before the fork
    children = start_children([1, 2])
    assert [use_everything(seed) for seed in (1, 2, 1)] == [expected[seed] for seed in (1, 2, 1)]
    assert results_of(children) == [[expected[seed]] * 3 for seed in (1, 2)]


@forks_with_gradients
def test_a_fork_while_another_thread_is_in_the_library_leaves_the_child_whole():
    expected = use_everything(3)
    with ThreadPoolExecutor(1) as pool:
        busy = [pool.submit(use_everything, 3) for _ in range(8)]
        children = start_children([3, 3])
        assert results_of(children) == [[expected] * 3] * 2
        assert all(future.result() == expected for future in busy)


class Groups(torch.utils.data.Dataset):
    """Prompts with two responses each."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return [index, 1, 2], [[3] * (index % 4), [index, 5]]


def pack_groups(groups):
    prompts, responses = zip(*groups)
    batch = dualkv.pack(list(prompts), list(responses))
    return batch.input_ids, batch.position_ids, batch.target_rows, batch.target_ids


def test_data_loader_workers_pack_the_batches_that_the_main_process_packs():
    def load(workers):
        return torch.utils.data.DataLoader(
            Groups(),
            batch_size=5,
            collate_fn=pack_groups,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            timeout=60 if workers else 0,
        )

    own, theirs = list(load(0)), list(load(2))
    assert len(own) == len(theirs) == 3
    for one, other in zip(own, theirs):
        assert all(map(torch.equal, one, other))
