"""dualkv.attention and its peers on a GPU, for bench/attention.py.

A peer is built for a batch, off the clock. `inputs` brings q [T, H, D], k and v [T, Hk, D] of the packed
batch into the peer's layout, off the clock too; calling it with them is what is timed; `rows` brings the
result back to [T, H, D]. Query heads share the KV heads in the kernels of all peers: nothing is expanded.
"""

from __future__ import annotations

import importlib.util
from itertools import accumulate

import numpy
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dualkv

# ------------------------------------------------------------------------------------------ plain attention


class Spans:
    """Runs of rows, one after the other, and the run of keys that each of them attends to."""

    def __init__(self, queries: list[int], keys: list[int], causal: bool, device):
        self.causal = causal
        self.count = len(queries)
        self.equal = len(set(queries)) == len(set(keys)) == 1
        self.max_q, self.max_k = max(queries), max(keys)
        self.begin_q, self.begin_k = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            for lengths in (queries, keys)
        )


# Each takes q, k, v and Spans, and returns out [T, H, D] and lse [H, T].


def fa2(q, k, v, spans):
    """What scaled_dot_product_attention and varlen_attn call for the FlashAttention-2 backend."""
    operator = torch.ops.aten._flash_attention_forward
    sizes = spans.max_q, spans.max_k, 0.0, spans.causal, False
    if not spans.equal:
        return operator(q, k, v, spans.begin_q, spans.begin_k, *sizes)[:2]
    q, k, v = (x.unflatten(0, (spans.count, -1)) for x in (q, k, v))
    out, lse = operator(q, k, v, None, None, *sizes)[:2]
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def cudnn(q, k, v, spans):
    """What scaled_dot_product_attention calls for the cuDNN backend, of nested tensors if lengths differ."""
    if not spans.equal:
        operator, begins = torch.ops.aten._cudnn_attention_forward, (spans.begin_q, spans.begin_k)
        out, lse = operator(q, k, v, None, *begins, spans.max_q, spans.max_k, True, 0.0, spans.causal)[:2]
        return out, lse.reshape(q.shape[:2]).t()
    q, k, v = (x.unflatten(0, (spans.count, -1)).transpose(1, 2) for x in (q, k, v))
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = operator(q, k, v, None, True, 0.0, spans.causal)[:2]
    return out.transpose(1, 2).flatten(0, 1), lse.reshape(q.shape[:3]).transpose(0, 1).flatten(1)


def fa3(q, k, v, spans):
    from flash_attn_interface import flash_attn_varlen_func

    spans_q_k = spans.begin_q, spans.begin_k, spans.max_q, spans.max_k
    return flash_attn_varlen_func(q, k, v, *spans_q_k, causal=spans.causal, return_attn_probs=True)[:2]


def fa4(q, k, v, spans):
    from flash_attn.cute import flash_attn_varlen_func

    begins = {"cu_seqlens_q": spans.begin_q, "cu_seqlens_k": spans.begin_k}
    return flash_attn_varlen_func(q, k, v, **begins, causal=spans.causal, return_lse=True)[:2]


# ---------------------------------------------------------------------------------------------------- peers


def packed_rows(groups) -> list[tuple[range, list[range]]]:
    """The rows of each prompt and of its responses in the packed batch."""
    rows, begin = [], 0
    for prompt, responses in groups:
        ends = list(accumulate([prompt, *responses], initial=begin))
        rows.append((range(begin, ends[1]), [range(*ends[i : i + 2]) for i in range(1, len(ends) - 1)]))
        begin = ends[-1]
    return rows


class Reordered:
    """The packed rows in another order, some of them more than once."""

    def __init__(self, ranges, device):
        order = torch.cat([torch.arange(rows.start, rows.stop) for rows in ranges])
        first_places = numpy.unique(order.numpy(), return_index=True)[1]
        self.order, self.places = order.to(device), torch.from_numpy(first_places).to(device)

    def take(self, x):
        return x[self.order]

    def packed(self, x):
        """From the first copy of each row."""
        return x[self.places]


class Replicated:
    """Every response behind a copy of its prompt: what trainers do."""

    def __init__(self, batch, attend, device="cuda"):
        self.attend = attend
        sequences = [(p, r) for p, responses in packed_rows(batch.groups) for r in responses]
        self.rows_order = Reordered([rows for sequence in sequences for rows in sequence], device)
        lengths = [len(p) + len(r) for p, r in sequences]
        self.spans = Spans(lengths, lengths, True, device)

    def inputs(self, q, k, v):
        return [self.rows_order.take(x) for x in (q, k, v)]

    def __call__(self, q, k, v):
        return self.attend(q, k, v, self.spans)[0]

    def rows(self, out):
        return self.rows_order.packed(out)


def compiled(function, device, **options):
    return function if device == "cpu" else torch.compile(function, **options)


def merge(a, lse_a, b, lse_b):
    """Attention over two sets of keys from that over each: outputs [T, H, D], log-sum-exps [H, T]."""
    share_of_b = torch.sigmoid(lse_b - lse_a).t().unsqueeze(-1)
    return torch.lerp(a.float(), b.float(), share_of_b).to(a.dtype)


class Cascade:
    """Three calls of plain attention: of prompts, of all responses to their prompt, of responses alone.

    All prompts lie before all responses, and their results stay two tensors: no call has to gather rows.
    """

    def __init__(self, batch, attend, device="cuda"):
        self.attend = attend
        self.merge = compiled(merge, device, dynamic=True)
        rows = packed_rows(batch.groups)
        self.rows_order = Reordered([p for p, _ in rows] + [r for _, rs in rows for r in rs], device)
        prompts = [prompt for prompt, _ in batch.groups]
        responses = [response for _, responses in batch.groups for response in responses]
        self.sizes = sum(prompts), sum(responses)
        self.prompts = Spans(prompts, prompts, True, device)
        self.context = Spans([sum(responses) for _, responses in batch.groups], prompts, False, device)
        self.responses = Spans(responses, responses, True, device)

    def inputs(self, q, k, v):
        return [part for x in (q, k, v) for part in self.rows_order.take(x).split(self.sizes)]

    def __call__(self, q_prompts, q, k_prompts, k, v_prompts, v):
        prompts, _ = self.attend(q_prompts, k_prompts, v_prompts, self.prompts)
        context = self.attend(q, k_prompts, v_prompts, self.context)
        return prompts, self.merge(*context, *self.attend(q, k, v, self.responses))

    def rows(self, out):
        return self.rows_order.packed(torch.cat(out))


class Flex:
    """FlexAttention on the packed batch, compiled for its shape."""

    def __init__(self, batch, device="cuda"):
        ends = []
        for p, responses in packed_rows(batch.groups):
            ends += [(len(p), max([p.stop, *(r.stop for r in responses)]))] + [
                (len(r), r.stop) for r in responses
            ]
        lengths, tree_ends = torch.tensor(ends).t()
        tree_end = tree_ends.repeat_interleave(lengths).to(device)

        def visible(_batch, _head, row, key):
            return (key <= row) & (row < tree_end[key])

        self.block_mask = create_block_mask(visible, None, None, batch.tokens, batch.tokens, device=device)
        self.attend = compiled(flex_attention, device, dynamic=False)

    def inputs(self, q, k, v):
        return [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]

    def __call__(self, q, k, v):
        return self.attend(q, k, v, block_mask=self.block_mask, enable_gqa=True)

    def rows(self, out):
        return out[0].transpose(0, 1)


class Packed:
    """A peer on the packed rows as they are."""

    def inputs(self, q, k, v):
        return [q, k, v]

    def rows(self, out):
        return out


class Dualkv(Packed):
    def __init__(self, batch):
        prompts, responses = zip(*batch.groups)
        self.forest = dualkv.SegmentForest.from_groups(prompts, responses)

    def __call__(self, q, k, v):
        return dualkv.attention(q, k, v, self.forest)


class DualkvPlanned(Dualkv):
    """With its plan in device memory of its own, as CUDA graphs need it."""

    def __init__(self, batch):
        super().__init__(batch)
        sizes = {"num_heads": batch.heads, "num_kv_heads": batch.kv_heads, "head_dim": batch.head_dim}
        self.forest = dualkv.DevicePlan(self.forest, **sizes)


class Magi(Packed):
    """MagiAttention's ranges of rows, each with the range of keys that it sees in full or causally."""

    def __init__(self, batch):
        triples = []
        for p, responses in packed_rows(batch.groups):
            causal = [(rows, rows, 1) for rows in (p, *responses)]
            triples += [*causal, (range(p.stop, responses[-1].stop), p, 0)]
        queries, keys, kinds = zip(*triples)
        self.masks = [
            torch.tensor(x, dtype=torch.int32, device="cuda")
            for x in ([(r.start, r.stop) for r in queries], [(r.start, r.stop) for r in keys], kinds)
        ]

    def __call__(self, q, k, v):
        from magi_attention.api import flex_flash_attn_func

        return flex_flash_attn_func(q, k, v, *self.masks)[0]


class Graph:
    """Another peer, captured in a CUDA graph for each set of inputs."""

    def __init__(self, peer):
        self.peer = peer
        self.rows = peer.rows

    def inputs(self, q, k, v):
        inputs = self.peer.inputs(q, k, v)
        self.peer(*inputs)  # compiles and caches what a capture cannot
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.peer(*inputs)
        return graph, out, *inputs

    def __call__(self, graph, out, *inputs):
        graph.replay()
        return out


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _calls_of(name: str, attend) -> dict:
    return {
        f"{name}-replicated": lambda batch: Replicated(batch, attend),
        f"{name}-cascade": lambda batch: Cascade(batch, attend),
        f"{name}-cascade-graph": lambda batch: Graph(Cascade(batch, attend)),
    }


PEERS = {
    "dualkv": Dualkv,
    "dualkv-graph": lambda batch: Graph(DualkvPlanned(batch)),
    "flex": Flex,
    **_calls_of("cudnn", cudnn),
    **_calls_of("fa2", fa2),
}
if _importable("flash_attn_interface"):
    PEERS |= _calls_of("fa3", fa3)
if _importable("flash_attn.cute"):
    PEERS |= _calls_of("fa4", fa4)
if _importable("magi_attention"):
    PEERS["magi"] = Magi
