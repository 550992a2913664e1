"""Shared-prompt attention for RL post-training: each prompt of a batch is computed once.

A batch of groups, each a prompt with its responses, is packed into one sequence of rows [prompt, response 0,
response 1, ...] whose forest of segments says which rows see which. Results and gradients are those of the
batch with the prompt before every response.

    batch = dualkv.pack(prompts, responses)
    ...                                               # the model's layers, with batch.position_ids, and
    out = dualkv.attention(q, k, v, batch.forest)     # this for attention
    logp, entropy = dualkv.linear_logprob(hidden, lm_head.weight, batch.target_rows, batch.target_ids)
    batch.unpack(logp)                                # log-probs of each group's responses
    loss, metrics = dualkv.losses.dapo()(logp, batch, advantages, counts)
"""

from . import losses
from ._library import library as _c
from .attention import attention
from .device_plan import DevicePlan
from .forest import SegmentForest
from .logprob import linear_logprob
from .memory import MemoryModel
from .packing import PackedBatch, pack, pack_padded
from .scheduling import CostModel, MicroBatch, Schedule, schedule
from .varlen import flash_attn_dualkv_varlen_func

__version__ = _c.dualkv_version().decode()

__all__ = [
    "CostModel",
    "DevicePlan",
    "MemoryModel",
    "MicroBatch",
    "PackedBatch",
    "Schedule",
    "SegmentForest",
    "attention",
    "flash_attn_dualkv_varlen_func",
    "linear_logprob",
    "losses",
    "pack",
    "pack_padded",
    "schedule",
]
