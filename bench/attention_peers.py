"""dualkv.attention and its peers on a GPU, for bench/attention.py.

A peer is built for a batch, off the clock. `inputs` brings q [T, H, D], k and v [T, Hk, D] of the packed
batch into the peer's layout, and `upstream` the gradient of the output, off the clock too. Calling it with the
inputs is what is timed, and so is the gradient of that by autograd; `rows` brings the output back to [T, H, D],
and `gradients` those of the inputs to those of q, k and v. Query heads share the KV heads in the kernels of all
peers: nothing is expanded.
"""

from __future__ import annotations

import importlib.util
from itertools import accumulate

import numpy
import torch
import torch._functorch.config
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


# Each takes q, k, v and Spans, and returns out [T, H, D] and lse [H, T]. Its backward takes dout, q, k, v, out,
# lse and Spans, and returns dq, dk and dv; out and lse may be those of a softmax over more keys than these.


def fa2(q, k, v, spans):
    """What scaled_dot_product_attention and varlen_attn call for the FlashAttention-2 backend."""
    operator = torch.ops.aten._flash_attention_forward
    sizes = spans.max_q, spans.max_k, 0.0, spans.causal, False
    if not spans.equal:
        return operator(q, k, v, spans.begin_q, spans.begin_k, *sizes)[:2]
    q, k, v = (x.unflatten(0, (spans.count, -1)) for x in (q, k, v))
    out, lse = operator(q, k, v, None, None, *sizes)[:2]
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def fa2_backward(dout, q, k, v, out, lse, spans):
    operator = torch.ops.aten._flash_attention_backward
    no_random = [torch.zeros(2, dtype=torch.uint64, device=q.device)] * 2
    options = spans.max_q, spans.max_k, 0.0, spans.causal, *no_random
    if not spans.equal:
        return operator(dout, q, k, v, out, lse.contiguous(), spans.begin_q, spans.begin_k, *options)
    dout, q, k, v, out = (x.unflatten(0, (spans.count, -1)) for x in (dout, q, k, v, out))
    lse = lse.unflatten(1, (spans.count, -1)).transpose(0, 1).contiguous()
    return [x.flatten(0, 1) for x in operator(dout, q, k, v, out, lse, None, None, *options)]


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


def cudnn_backward(dout, q, k, v, out, lse, spans):
    no_random = [torch.zeros((), dtype=torch.int64, device=q.device)] * 2
    options = spans.max_q, spans.max_k, 0.0, spans.causal
    if not spans.equal:
        operator, begins = torch.ops.aten._cudnn_attention_backward, (spans.begin_q, spans.begin_k)
        lse = lse.t().contiguous().unsqueeze(-1)
        return operator(dout, q, k, v, out, lse, *no_random, None, *begins, *options)
    dout, q, k, v, out = (x.unflatten(0, (spans.count, -1)).transpose(1, 2) for x in (dout, q, k, v, out))
    lse = lse.unflatten(1, (spans.count, -1)).transpose(0, 1).contiguous().unsqueeze(-1)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    gradients = operator(dout, q, k, v, out, lse, *no_random, None, None, None, *options)
    return [x.transpose(1, 2).flatten(0, 1) for x in gradients]


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
        first_places, copies = numpy.unique(order.numpy(), return_index=True, return_counts=True)[1:]
        self.order, self.places, self.copies = (
            x.to(device) for x in (order, torch.from_numpy(first_places), torch.from_numpy(copies))
        )

    def take(self, x):
        return x[self.order]

    def packed(self, x):
        """From the first copy of each row."""
        return x[self.places]

    def summed(self, x):
        """All copies of each row added up, in float32."""
        sums = torch.zeros(len(self.places), *x.shape[1:], device=x.device)
        for order, rows in zip(self.order.split(1 << 16), x.split(1 << 16)):
            sums.index_add_(0, order, rows.float())
        return sums


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

    def upstream(self, dout):
        """Shared by the copies, as by trainers."""
        return [self.rows_order.take(dout / self.rows_order.copies[:, None, None])]

    def __call__(self, q, k, v):
        return self.attend(q, k, v, self.spans)[0]

    def rows(self, out):
        return self.rows_order.packed(out)

    def gradients(self, gradients):
        return [self.rows_order.summed(x) for x in gradients]


def compiled(function, device, **options):
    return function if device == "cpu" else torch.compile(function, **options)


def merge(a, lse_a, b, lse_b):
    """Attention over two sets of keys from that over each: outputs [T, H, D], log-sum-exps [H, T]."""
    share_of_b = torch.sigmoid(lse_b - lse_a).t().unsqueeze(-1)
    return torch.lerp(a.float(), b.float(), share_of_b).to(a.dtype), torch.logaddexp(lse_a, lse_b)


class _Cascade(torch.autograd.Function):
    """Three calls forward and three backward, which get the merged output and log-sum-exp: their gradients add
    up."""

    @staticmethod
    def forward(ctx, cascade, q_prompts, q, k_prompts, k, v_prompts, v):
        attend = cascade.attend
        prompts, lse_prompts = attend(q_prompts, k_prompts, v_prompts, cascade.prompts)
        context = attend(q, k_prompts, v_prompts, cascade.context)
        out, lse = cascade.merge(*context, *attend(q, k, v, cascade.responses))
        ctx.cascade = cascade
        ctx.save_for_backward(q_prompts, q, k_prompts, k, v_prompts, v, prompts, lse_prompts, out, lse)
        return prompts, out

    @staticmethod
    def backward(ctx, dprompts, dout):
        q_prompts, q, k_prompts, k, v_prompts, v, prompts, lse_prompts, out, lse = ctx.saved_tensors
        cascade, backward = ctx.cascade, ctx.cascade.attend_backward
        if backward is None:
            raise NotImplementedError("there is no backward of these calls after their merge")
        dq_prompts, dk_prompts, dv_prompts = backward(
            dprompts, q_prompts, k_prompts, v_prompts, prompts, lse_prompts, cascade.prompts
        )
        dq, dk_context, dv_context = backward(dout, q, k_prompts, v_prompts, out, lse, cascade.context)
        dq_responses, dk, dv = backward(dout, q, k, v, out, lse, cascade.responses)
        for x, other in (dq, dq_responses), (dk_prompts, dk_context), (dv_prompts, dv_context):
            x += other
        return None, dq_prompts, dq, dk_prompts, dk, dv_prompts, dv


class Cascade:
    """Three calls of plain attention: of prompts, of all responses to their prompt, of responses alone.

    All prompts lie before all responses, and their results stay two tensors: no call has to gather rows.
    """

    def __init__(self, batch, attend, attend_backward=None, device="cuda"):
        self.attend, self.attend_backward = attend, attend_backward
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
        return [part for x in (q, k, v) for part in self.upstream(x)]

    def upstream(self, dout):
        return self.rows_order.take(dout).split(self.sizes)

    def __call__(self, *inputs):
        return _Cascade.apply(self, *inputs)

    def rows(self, out):
        return self.rows_order.packed(torch.cat(out))

    def gradients(self, gradients):
        return [self.rows(gradients[i : i + 2]) for i in (0, 2, 4)]


def flex_visible(tree_end):
    """FlexAttention's rule for packed rows: a row sees a key iff key <= row < tree_end[key]."""

    def visible(_batch, _head, row, key):
        return (key <= row) & (row < tree_end[key])

    return visible


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
        visible = flex_visible(tree_end)
        self.block_mask = create_block_mask(visible, None, None, batch.tokens, batch.tokens, device=device)
        torch._functorch.config.donated_buffer = False  # what a graph that is retained cannot have
        self.attend = compiled(flex_attention, device, dynamic=False)

    def inputs(self, q, k, v):
        return [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]

    def upstream(self, dout):
        return self.inputs(dout, dout, dout)[:1]

    def __call__(self, q, k, v):
        return self.attend(q, k, v, block_mask=self.block_mask, enable_gqa=True)

    def rows(self, out):
        return out[0].transpose(0, 1)

    def gradients(self, gradients):
        return [self.rows(x) for x in gradients]


class Packed:
    """A peer on the packed rows as they are."""

    def inputs(self, q, k, v):
        return [q, k, v]

    def upstream(self, dout):
        return [dout]

    def rows(self, out):
        return out

    def gradients(self, gradients):
        return gradients


class Dualkv(Packed):
    options = {}

    def __init__(self, batch):
        prompts, responses = zip(*batch.groups)
        self.forest = dualkv.SegmentForest.from_groups(prompts, responses)

    def __call__(self, q, k, v):
        return dualkv.attention(q, k, v, self.forest, **self.options)


class DualkvDeterministic(Dualkv):
    options = {"deterministic": True}


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


# ---------------------------------------------------------------------------------------------------- calls


class Call:
    """A peer on a set of inputs; without dout there is no backward."""

    def __init__(self, peer, q, k, v, dout=None):
        self.peer = peer
        self.inputs = [x.detach().requires_grad_(dout is not None) for x in peer.inputs(q, k, v)]
        self.upstream = None if dout is None else peer.upstream(dout)
        self.out = None

    def forward(self):
        self.out = None
        self.out = self.peer(*self.inputs)
        return self.out

    def backward(self):
        """Of the last forward, which can be differentiated again."""
        outputs = [self.out] if isinstance(self.out, torch.Tensor) else self.out
        return torch.autograd.grad(outputs, self.inputs, self.upstream, retain_graph=True)


class CapturedCall(Call):
    """Captured in CUDA graphs, the forward in one and the backward in another."""

    def __init__(self, peer, q, k, v, dout=None):
        super().__init__(peer, q, k, v, dout)
        super().forward()  # compiles and caches what a capture cannot
        if dout is not None:
            super().backward()
        self.out = None
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph):
            super().forward()
        if dout is not None:
            with torch.cuda.graph(self.backward_graph, pool=self.forward_graph.pool()):
                self.results = super().backward()

    def forward(self):
        self.forward_graph.replay()
        return self.out

    def backward(self):
        self.backward_graph.replay()
        return self.results


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _calls_of(name: str, attend, attend_backward=None) -> dict:
    def cascade(batch):
        return Cascade(batch, attend, attend_backward)

    return {
        f"{name}-replicated": lambda batch: Replicated(batch, attend),
        f"{name}-cascade": cascade,
        f"{name}-cascade-graph": cascade,
    }


# Names that end in -graph are those of captured calls.
PEERS = {
    "dualkv": Dualkv,
    "dualkv-deterministic": DualkvDeterministic,
    "dualkv-graph": DualkvPlanned,
    "flex": Flex,
    **_calls_of("cudnn", cudnn, cudnn_backward),
    **_calls_of("fa2", fa2, fa2_backward),
}
if _importable("flash_attn_interface"):
    PEERS |= _calls_of("fa3", fa3)
if _importable("flash_attn.cute"):
    PEERS |= _calls_of("fa4", fa4)
if _importable("magi_attention"):
    PEERS["magi"] = Magi
