"""Packed Transformers models over two processes: gradients are those of one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dualkv
from dualkv import losses

if not torch.distributed.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402

from dualkv.integrations.transformers import (  # noqa: E402
    PackedPolicy,
    allow_packed_passes,
    packed_logprobs,
    use_packed_attention,
)
from ranks import RANKS, gloo, run_ranks  # noqa: E402
from transformers_models import (  # noqa: E402
    assert_gradients_agree,
    gradients,
    make_groups,
    make_model,
)

# Groups of each rank: the last of all has no responses, so that the second rank's batch is smaller.
SIZES = ((9, (4, 1, 6)), (1, (3, 2)), (5, (2, 7)), (6, ()))


def rank_batches():
    prompts, responses = make_groups(sizes=SIZES)
    return [dualkv.pack(prompts[part], responses[part]) for part in (slice(0, 2), slice(2, 4))]


def loss_of(logprobs, batch, counts):
    """Depends on no cut: each response's advantage comes from its length."""
    lengths = [len(response) for group in batch.unpack(logprobs) for response in group]
    advantages = torch.tensor([float(length % 3 - 1) for length in lengths])
    return losses.dapo()(logprobs, batch, advantages, counts)[0]


def whole_gradients():
    model = use_packed_attention(make_model("qwen3"))
    batch = dualkv.pack(*make_groups(sizes=SIZES))
    loss_of(packed_logprobs(model, batch)[0], batch, losses.count([batch])).backward()
    return gradients(model)


def ddp(model):
    return nn.parallel.DistributedDataParallel(PackedPolicy(model))


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(PackedPolicy(model), mesh=mesh)


def fsdp1(model):
    return FullyShardedDataParallel(PackedPolicy(model), device_id=torch.device("cpu"), use_orig_params=True)


def own_gradients(wrapper, model) -> dict:
    """Whole gradients of a rank's model, by their names in it."""
    if isinstance(wrapper, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapper, with_grads=True):
            return {name: gradient.clone() for name, gradient in gradients(model).items()}
    return {
        name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, gradient in gradients(model).items()
    }


def check(wrap, rank: int, checkpointing: bool = False) -> None:
    model = make_model("qwen3")
    if checkpointing:  # layers are computed again in the backward, where FSDP gathers their weights again
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapper, batches = wrap(model), rank_batches()
    logprobs, entropies = wrapper(batches[rank])
    assert entropies.shape == logprobs.shape == batches[rank].target_ids.shape
    (loss_of(logprobs, batches[rank], losses.count(batches)) * RANKS).backward()
    assert_gradients_agree(own_gradients(wrapper, model), whole_gradients())


def check_refusals(wrap) -> None:
    wrapper = wrap(make_model("qwen3"))
    for call in (use_packed_attention, lambda model: packed_logprobs(model, rank_batches()[0])):
        with pytest.raises(
            TypeError, match=r"model must be a Transformers model, got .* around PackedPolicy"
        ):
            call(wrapper)


def check_model_that_is_sharded_itself() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(use_packed_attention(make_model("qwen3")), mesh=init_device_mesh("cpu", (RANKS,)))
    with pytest.raises(TypeError, match=r"got FSDPQwen3ForCausalLM: .* around PackedPolicy\(model\)"):
        packed_logprobs(model, rank_batches()[0])


def check_rank(rank: int, store_path: str) -> None:
    with gloo(rank, store_path):
        for wrap in (ddp, fsdp1):
            check(wrap, rank)
            check_refusals(wrap)
        if hasattr(torch.distributed.fsdp, "fully_shard"):  # since torch 2.6
            check(fully_sharded, rank)
            check(fully_sharded, rank, checkpointing=True)
            check_model_that_is_sharded_itself()


def test_a_wrapped_policy_has_the_gradients_of_one_process(tmp_path):
    run_ranks(check_rank, str(tmp_path / "store"))


def test_a_policy_is_its_model():
    batch = rank_batches()[0]
    model = make_model("qwen3")
    policy = PackedPolicy(model)
    assert policy.model is model and model.config._attn_implementation == "dualkv"
    expected = packed_logprobs(model, batch, temperature=0.7)
    assert all(map(torch.equal, policy(batch, temperature=0.7), expected))
    both = PackedPolicy(allow_packed_passes(make_model("qwen3")))
    assert both.model.config._attn_implementation == "eager"
    assert all(map(torch.equal, both(batch, temperature=0.7), expected))
    with pytest.raises(TypeError, match="model must be a Transformers model, got Linear"):
        PackedPolicy(nn.Linear(2, 2))
