"""One decoder layer of Qwen3-8B on the batches of the paper's table, both passes, for policy_update.py.

Four ways through the layer, which is that of Transformers; only the rows and the attention differ:

dualkv           packed rows and dualkv.attention
replicated       each response behind a copy of its prompt, rows without padding; in attention, and there
                 only, sequences are padded on the right, where causal attention needs no mask, for the faster
                 of PyTorch's backends
prefix-grouping  packed rows; in attention the prompt by itself with that backend, then the responses with
                 FlashAttention-2, each against a copy of the prompt's keys and values and its own
flex             packed rows and FlexAttention, compiled once for all shapes

The first call of a batch warms up and the next are timed; where smaller batches say that a call takes SLOW_S
or more, the first one is. The rows, the gradient of the layer's input and that of one of its weights are
compared with those of the first implementation, dualkv, where a batch has at most COMPARED_ROWS.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import cache

import torch
import transformers
from attention_batches import BACKWARD_WORK, SINGLE_LAYER, Batch
from attention_peers import Reordered, Spans, compiled, fa2, flex_visible, packed_rows
from meter import Meter, relative_difference
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import AttentionInterface

import dualkv

SLOW_S = 3.0
COMPILE_S = 60  # about what FlexAttention takes, and the most that any may take beside its calls
ERRORS = 2  # after so many an implementation is not tried again
COMPARED_ROWS = 50_000
SAMPLED_ROWS = 1024
LARGEST_DIFFERENCE = 0.03  # of the norm; bf16 has 8 bits
ATTENTION_NAME = "single_layer"
FLEX_BLOCK = 128

# Batches for a CPU: the first prompts and numbers of responses of the table, shorter.
TINY_BATCHES = [
    Batch(batch.name, [(batch.groups[0][0] // 128, [length // 128 for length in batch.groups[0][1]])])
    for batch in SINGLE_LAYER
    if batch.groups[0][0] <= 8192 and len(batch.groups[0][1]) <= 4
]


def _attend(module, query, key, value, attention_mask, attend, **_):
    """Transformers' attention function: query [1, H, T, D], key and value [1, Hk, T, D] -> [1, T, H, D].
    `attend` computes it: q [T, H, D], k and v [T, Hk, D] -> [T, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v)[None], None


AttentionInterface.register(ATTENTION_NAME, _attend)


class Layer:
    """A decoder layer with random weights, and its rotary embedding."""

    def __init__(self, sizes: dict, meter: Meter):
        torch.manual_seed(0)
        sizes = {**sizes, "num_hidden_layers": 1, "vocab_size": 8}
        with torch.device(meter.device):
            model = transformers.AutoModel.from_config(
                transformers.Qwen3Config(**sizes), dtype=meter.dtype, attn_implementation=ATTENTION_NAME
            )
        self.layer, self.rotary = model.layers[0], model.rotary_emb
        self.parameters = dict(self.layer.named_parameters())

    def __call__(self, hidden, positions, attend):
        """hidden [T, C], positions [T] -> [T, C], with an implementation's `attend`."""
        rotation = self.rotary(hidden[None], positions[None])
        out = self.layer(hidden[None], attention_mask=None, position_embeddings=rotation, attend=attend)
        return (out if isinstance(out, torch.Tensor) else out[0])[0]

    def work(self, rows: int, batch: Batch) -> float:
        """FLOPs of a forward and a backward on so many rows, with the attention of a batch, whose backward
        has BACKWARD_WORK: the scores again, which MFU (mfu.py) does not count."""
        weights = sum(x.numel() for x in self.parameters.values())
        attention = 4 * batch.head_dim * batch.heads * batch.pairs
        return 3 * 2 * weights * rows + (1 + BACKWARD_WORK) * attention

    def estimate(self, impl: str, batch: Batch, rate: float | None) -> float | None:
        """Seconds of a call at so many FLOP/s; None without a rate."""
        if rate is None:
            return None
        if impl == "replicated":
            [(prompt, responses)] = batch.groups
            batch = Batch(batch.name, [(prompt, [response]) for response in responses])
        return self.work(batch.tokens, batch) / rate


# ---------------------------------------------------------------------------------------------- implementations


class PackedRows:
    """An implementation on the packed rows as they are: T of them, as in the batch.

    One on other rows, R of them, has the same methods. `take` and `upstream` make of hidden [T, C] and of the
    gradient of the layer's output [T, C] what its rows get [R, C]. `packed` and `summed` bring its output and
    the gradient of its input [R, C] back to [T, C], off the clock.
    """

    def __init__(self, batch: Batch, meter: Meter):
        self.device = meter.device
        [(self.prompt, self.responses)] = batch.groups
        self.forest = dualkv.SegmentForest.from_groups([self.prompt], [self.responses])
        self.rows, self.batch = batch.tokens, batch
        self.positions = self.forest.position_ids().to(meter.device)

    def take(self, hidden):
        return hidden

    def upstream(self, dout):
        return dout

    def packed(self, out):
        return out

    def summed(self, dhidden):
        return dhidden


class Dualkv(PackedRows):
    def attend(self, q, k, v):
        return dualkv.attention(q, k, v, self.forest)


class PrefixGrouping(PackedRows):
    def __init__(self, batch: Batch, meter: Meter):
        super().__init__(batch, meter)
        keys = [self.prompt + response for response in self.responses]
        self.spans = Spans(self.responses, keys, True, meter.device)

    def attend(self, q, k, v):
        prompt = causal(*(x[None, : self.prompt] for x in (q, k, v)))
        copies = (self.replicate(x) for x in (k, v))
        return torch.cat([prompt[0], self.attend_responses(q[self.prompt :], *copies)])

    def replicate(self, x):
        """Keys or values [T, Hk, D]: for each response the prompt's, and its own behind them."""
        own = x[self.prompt :].split(self.responses)
        return torch.cat([part for response in own for part in (x[: self.prompt], response)])

    def attend_responses(self, q, k, v):
        if self.device == "cuda":
            return fa2(q, k, v, self.spans)[0]
        keys = [self.prompt + response for response in self.responses]
        outs = []
        for one in zip(q.split(self.responses), k.split(keys), v.split(keys)):
            seen = torch.ones(len(one[0]), len(one[1]), dtype=torch.bool).tril(self.prompt)
            one = (x.transpose(0, 1)[None] for x in one)
            outs.append(
                scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
            )
        return torch.cat(outs)


class Replicated:
    """On the rows of all sequences [prompt, response], one after the other."""

    def __init__(self, batch: Batch, meter: Meter):
        [(prompt, responses)] = packed_rows(batch.groups)
        self.order = Reordered([rows for response in responses for rows in (prompt, response)], meter.device)
        self.lengths = [len(prompt) + len(response) for response in responses]
        self.rows = sum(self.lengths)
        self.batch = Batch(batch.name, [(len(prompt), [len(response)]) for response in responses])
        self.positions = torch.cat([torch.arange(length) for length in self.lengths]).to(meter.device)
        self.take, self.packed, self.summed = self.order.take, self.order.packed, self.order.summed

    def upstream(self, dout):
        """Shared by the copies, whose gradients then add up to those of the packed rows."""
        return self.order.take(dout / self.order.copies[:, None])

    def attend(self, q, k, v):
        padded = (pad_sequence(x.split(self.lengths), batch_first=True) for x in (q, k, v))
        out = causal(*padded)
        return torch.cat([sequence[:length] for sequence, length in zip(out, self.lengths)])


class Flex(PackedRows):
    def __init__(self, batch: Batch, meter: Meter):
        super().__init__(batch, meter)
        self.block_mask = shared_prompt_mask(self.forest, meter.device)
        self.flex_attention = compiled_flex_attention(meter.device)

    def attend(self, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = self.flex_attention(q, k, v, block_mask=self.block_mask, enable_gqa=True)
        return out[0].transpose(0, 1)


@cache
def compiled_flex_attention(device: str):
    """Once for all batches."""
    torch._dynamo.config.recompile_limit = 64
    return compiled(flex_attention, device, dynamic=True)


IMPLS = {"dualkv": Dualkv, "replicated": Replicated, "prefix-grouping": PrefixGrouping, "flex": Flex}


def causal(q, k, v):
    """q [N, S, H, D], k and v [N, S, Hk, D] -> [N, S, H, D], with the backend that the caller has chosen."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def shared_prompt_mask(forest: dualkv.SegmentForest, device: str) -> BlockMask:
    """Blocks come from the ends of their keys, without a look at each pair: a prompt of a million tokens has 10^12."""
    lengths = torch.tensor(forest.lengths)
    ends = lengths.cumsum(0)
    ends[0] = forest.total_tokens
    tree_end = ends.repeat_interleave(lengths).to(device)
    rows = forest.total_tokens
    blocks = math.ceil(rows / FLEX_BLOCK)
    padded = [
        torch.nn.functional.pad(tree_end, (0, blocks * FLEX_BLOCK - rows), value=fill).view(
            blocks, FLEX_BLOCK
        )
        for fill in (0, rows)
    ]
    first_row = torch.arange(blocks, device=device)[:, None] * FLEX_BLOCK
    last_row = (first_row + FLEX_BLOCK - 1).clamp(max=rows - 1)
    before = torch.ones(blocks, blocks, dtype=torch.bool, device=device).tril(-1)
    full = before & (last_row < padded[1].amin(1))
    some = before & (first_row < padded[0].amax(1)) & ~full
    some.fill_diagonal_(True)
    return BlockMask.from_kv_blocks(
        *_block_lists(some),
        *_block_lists(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=flex_visible(tree_end),
        seq_lengths=(rows, rows),
    )


def _block_lists(blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of rows has, [1, 1, B], and which, first, [1, 1, B, B]."""
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


# ------------------------------------------------------------------------------------------------------ measures


def measure(layer: Layer, meter: Meter, make, batch: Batch, repeats: int, expected: dict) -> dict:
    """The record of an implementation: medians of seconds, peaks in bytes. repeats: timed calls after the
    first; with none, the first is timed. expected: sampled results of the first implementation, or empty and
    filled here."""
    impl = make(batch, meter)
    hidden_size = layer.layer.hidden_size
    torch.manual_seed(0)
    hidden, upstream = (
        torch.randn(batch.tokens, hidden_size, dtype=meter.dtype, device=meter.device) for _ in range(2)
    )
    hidden, upstream = impl.take(hidden).requires_grad_(), impl.upstream(upstream)
    inputs = [hidden, *layer.parameters.values()]

    def call():
        out = layer(hidden, impl.positions, impl.attend)
        return out.detach(), torch.autograd.grad(out, inputs, upstream)

    seconds, (out, gradients), peaks = meter.timed(call)
    difference = None
    if batch.tokens <= COMPARED_ROWS:
        names = list(layer.parameters)
        found = {
            "rows": sampled(impl.packed(out)),
            "dhidden": sampled(impl.summed(gradients[0])),
            "dweight": gradients[1 + names.index("self_attn.k_proj.weight")].cpu(),
        }
        difference = largest_difference(found, expected)
    del out, gradients
    times = [seconds] if repeats == 0 else []
    for _ in range(repeats):
        seconds, results, peaks = meter.timed(call)
        del results
        times.append(seconds)
    seconds = statistics.median(times)
    return {
        "rows": impl.rows,
        "seconds": seconds,
        "tflops": layer.work(impl.rows, impl.batch) / seconds / 1e12,
        "useful_tflops": layer.work(batch.tokens, batch) / seconds / 1e12,
        **peaks,
        "warm": repeats > 0,
        "difference": difference,
    }


def sampled(x: torch.Tensor) -> torch.Tensor:
    return x[:: math.ceil(len(x) / SAMPLED_ROWS)].cpu()


def largest_difference(found: dict, expected: dict) -> float:
    """As a share of the norm. Raises if it is more than rounding."""
    if not expected:
        expected |= found
    differences = {name: relative_difference(x, expected[name]) for name, x in found.items()}
    for name, difference in differences.items():
        if not difference <= LARGEST_DIFFERENCE:
            limit = LARGEST_DIFFERENCE
            raise ArithmeticError(f"{name}: off by {difference:.2g} of the norm, more than {limit}")
    return max(differences.values())


class Trials:
    """What an implementation has shown so far."""

    def __init__(self):
        self.rate = None  # FLOP/s of the last batch
        self.overhead_s = 0.0  # all but the calls
        self.errors = []
        self.too_large = {}  # by prompt, the batch that was out of memory

    def note(self, name: str, prompt: int, record: dict, wall_s: float, calls: int) -> None:
        if record["status"] == "ok":
            self.rate = 1e12 * record["tflops"]
            self.overhead_s += wall_s - calls * record["seconds"]
        elif record["status"] == "oom":
            self.too_large[prompt] = name
        else:
            self.errors.append(record["error"])

    def left_out(self, prompt: int) -> dict | None:
        """What a record says without another trial."""
        if prompt in self.too_large:
            return {"status": "oom", "error": f"smaller {self.too_large[prompt]} was out of memory"}
        if len(self.errors) >= ERRORS:
            return {"status": "error", "error": self.errors[-1]}
        if self.overhead_s > COMPILE_S:
            return {"status": "skipped", "error": f"it has taken {self.overhead_s:.0f} s beside its calls"}
        return None


def skipped(estimate: float | None, calls: int, limit: float, remaining: float) -> dict | None:
    """What a record says if its calls would take too long. estimate: of one of so many calls, if smaller
    batches tell; all in seconds."""
    if remaining <= 0:
        return {"status": "skipped", "error": "the budget is spent"}
    if estimate is None:
        return None
    if estimate > limit:
        return {"status": "skipped", "error": f"a call would take longer than the limit, {limit:g} s"}
    if calls * estimate > remaining:
        return {"status": "skipped", "error": "its calls would take longer than what is left of the budget"}
    return None


def measure_or_skip(bench, layer: Layer, name: str, batch: Batch, trial: Trials, expected: dict) -> dict:
    """The record of an implementation on a batch, which `trial` notes, or why it was left out."""
    args, meter = bench.args, bench.meter
    prompt, _ = batch.groups[0]
    estimate = layer.estimate(name, batch, trial.rate)
    repeats = 0 if estimate is not None and estimate >= SLOW_S else args.repeats
    compile_s = COMPILE_S if name == "flex" and trial.rate is None and meter.on_gpu else 0
    remaining = bench.remaining_s() - compile_s
    left_out = trial.left_out(prompt) or skipped(estimate, 1 + repeats, args.limit_s, remaining)
    if left_out:
        return {**left_out, "estimate_s": estimate}
    begin = time.monotonic()
    with sdpa_kernel([getattr(SDPBackend, bench.backends[0])]):
        found = meter.attempt(lambda: measure(layer, meter, IMPLS[name], batch, repeats, expected))
    trial.note(batch.name, prompt, found, time.monotonic() - begin, 1 + repeats)
    return found


def measure_single_layer(bench) -> None:
    """Small prompts first, and of each batch dualkv first. bench: a policy_update.Bench."""
    args, meter = bench.args, bench.meter
    layer = Layer(bench.sizes, meter)
    trials = {name: Trials() for name in args.impls or IMPLS}
    for batch in TINY_BATCHES if args.tiny else SINGLE_LAYER:
        prompt, responses = batch.groups[0]
        if args.layer_prompts and prompt not in args.layer_prompts:
            continue
        shape = {
            "responses": len(responses),
            "tokens": batch.tokens,
            "weights_bytes": sum(x.numel() * x.element_size() for x in layer.parameters.values()),
            "sdpa_backend": bench.backends[0],
            "matmul_tflops": meter.matmul_tflops(),
        }
        meter.free()
        expected = {}
        for name, trial in trials.items():
            record = {"part": "layer", "batch": batch.name, "impl": name, "prompt": prompt, **shape}
            bench.add({**record, **measure_or_skip(bench, layer, name, batch, trial, expected)})
