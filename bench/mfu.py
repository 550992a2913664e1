"""Model FLOPs utilization of a policy update: the work of its matrix products over time and a peak rate.

Only what the mathematics asks for is counted: a backward is two forwards, and neither layers that are
computed again (gradient checkpointing) nor scores and logits that the kernels compute again count. A causal
triangle of n rows has n * n / 2 pairs.
"""

from __future__ import annotations

from attention_batches import Batch

PASSES = {"old": 1, "update": 3}  # work in forwards

# Dense bf16 products by the data sheet, TFLOP/s: the peak that utilization is usually a share of.
NOMINAL_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}


def forward_flops(sizes: dict, tokens: int, scored: int, pairs: float) -> float:
    """FLOPs of the matrix products of a forward: `tokens` rows through the layers, `scored` rows through the
    head of the vocabulary, and `pairs` of a row and a key that it sees, in each layer and attention head."""
    heads, kv_heads, head_dim = (
        sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
    weights = hidden * (2 * heads + 2 * kv_heads) * head_dim + 3 * hidden * intermediate
    of_layer = 2 * weights * tokens + 4 * head_dim * heads * pairs
    return sizes["num_hidden_layers"] * of_layer + 2 * hidden * sizes["vocab_size"] * scored


def batch_flops(sizes: dict, prompt: int, response: int, count: int, replicated: bool) -> float:
    """FLOPs of a forward of `count` responses to one prompt; lengths are in tokens."""
    groups = [(prompt, [response])] * count if replicated else [(prompt, [response] * count)]
    batch = Batch("", groups)
    # A prompt's last row predicts the first token of each response, and is multiplied once for each copy.
    scored = count * response if replicated else count * (response - 1) + 1
    return forward_flops(sizes, batch.tokens, scored, batch.pairs)


def utilization(
    sizes: dict, micro_batch: dict, seconds: dict[str, float], replicated: bool, peaks: dict
) -> dict:
    """Model FLOPs utilization of each pass: effective, of the replicated batch's work, and physical, of the
    work that this side does.

    micro_batch: prompt, response and count of batch_flops; seconds: by pass; replicated: whether this side
    is; peaks: TFLOP/s, by suffix of the names of the shares of it. A peak of None gives None."""
    record = {}
    for of, flops in (
        ("effective", batch_flops(sizes, **micro_batch, replicated=True)),
        ("physical", batch_flops(sizes, **micro_batch, replicated=replicated)),
    ):
        for name, work in PASSES.items():
            tflops = work * flops / seconds[name] / 1e12
            for suffix, peak in peaks.items():
                record[f"{name}_{of}_mfu{suffix}"] = None if peak is None else tflops / peak
    return record
