"""Packed batches for Hugging Face Transformers models (Transformers 4.56 or later).

    model = use_packed_attention(AutoModelForCausalLM.from_pretrained(path))
    batch = dualkv.pack(prompts, responses)
    logprobs, entropies = packed_logprobs(model, batch)        # [M], [M], differentiable

    wrapper = DistributedDataParallel(PackedPolicy(model))     # the same with several ranks
    logprobs, entropies = wrapper(batch)

The forest of a batch travels with the forward call: `packed_forward` hands a `PackedPass` to the model
as a keyword argument, and Transformers passes it down to the attention function. Nothing about a batch is
kept in this module, so recomputation for gradient checkpointing, several threads and several batches in
flight work.

Experts need nothing: the router and the experts work on one row at a time. A row whose router is within
rounding of a tie may choose another expert than in a replicated batch, as it may in any other batch. Auxiliary
losses of routers are means over a batch's rows, among which a shared prompt counts once: none is computed here.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

import dualkv

ATTENTION_NAME = "dualkv"

# Architectures whose packed results are compared with Transformers' own attention in the tests. Others are
# refused: a layer that looks at tokens by a way of its own (a convolution, a recurrence, a cross attention, a
# special position encoding, experts that drop tokens beyond a capacity) would be wrong without any error.
SUPPORTED_MODEL_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)

# Modules whose result for one row depends on its neighbours in the batch, by other ways than the attention
# function. In a packed batch a neighbour may belong to another response.
_ROW_MIXING_MODULES = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.modules.batchnorm._NormBase,
)

# Rotary embeddings whose frequencies depend on the longest sequence of the call: a sequence would get other
# results when packed with a longer one.
_LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")

# What fully_shard makes of a module, beside its own class.
try:
    from torch.distributed.fsdp import FSDPModule as _FullySharded
except ImportError:  # torch before 2.6, or without distributed
    _FullySharded = ()


class PackedPass:
    """One forward pass over one packed batch: the forest for its attention layers, and which of them asked.

    Args:
        forest: `dualkv.SegmentForest` of the batch's rows.
    """

    def __init__(self, forest):
        self.forest = forest
        self._calls = Counter()  # attention module -> number of calls
        self._replaced = []  # attention implementations to return to

    def enter(self, config) -> None:
        """Switches a model's configuration to packed attention, until `leave`."""
        self._replaced.append(config._attn_implementation)
        config._attn_implementation = ATTENTION_NAME

    def leave(self, config) -> None:
        """Switches it back to what it was at the last `enter`."""
        config._attn_implementation = self._replaced.pop()

    def record(self, module: nn.Module) -> None:
        """Notes that `module` computed its attention from this pass."""
        self._calls[module] += 1

    def check_every_layer(self, model: PreTrainedModel) -> None:
        """Checks that each decoder layer came through `dualkv.attention` exactly once.

        Raises:
            RuntimeError: names the layers that did not, with their classes and numbers of calls.
        """
        decoder = _decoder(model)
        names = {module: name for name, module in model.named_modules()}
        faults = []
        for layer in decoder.layers[: decoder.config.num_hidden_layers]:
            calls = sum(self._calls[module] for module in layer.modules())
            if calls != 1:
                attention = getattr(layer, "self_attn", layer)
                faults.append(f"{names[attention]} ({type(attention).__name__}): {calls} calls")
        if faults:
            raise RuntimeError(
                "each decoder layer must compute its attention through dualkv.attention exactly once in a "
                "pass, but these did not: " + "; ".join(faults)
            )


def use_packed_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switches `model` to packed attention, in place, and returns it.

    From then on the model runs packed batches only (`packed_forward`, `packed_logprobs`); any other call
    of it raises. `model.set_attn_implementation("sdpa")` switches back.

    Raises:
        ValueError: the model's type, its kind of rotary embedding or its peft adapters are not supported, its
            attention is not causal, or one of its modules mixes rows by another way than attention.
        TypeError: `model` is no model of Transformers, as where it is one in a wrapper (see `PackedPolicy`).
    """
    _check_supported(model)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def allow_packed_passes(model: PreTrainedModel) -> PreTrainedModel:
    """Lets `model` run packed batches beside its ordinary calls, in place, and returns it.

    The model keeps its attention implementation, and `generate` and every other call use it. Packed attention
    is for `packed_forward` and `packed_logprobs` alone, and for what gradient checkpointing recomputes of them
    later. During a packed pass the model's configuration says `"dualkv"`: one thread at a time may run it.

    Raises:
        ValueError, TypeError: as `use_packed_attention`.
    """
    _check_supported(model)
    for layer in _decoder(model).layers:
        attention = layer.self_attn
        if _enter_packed_pass not in attention._forward_pre_hooks.values():
            attention.register_forward_pre_hook(_enter_packed_pass, with_kwargs=True)
            attention.register_forward_hook(_leave_packed_pass, with_kwargs=True, always_call=True)
    return model


def packed_forward(model: PreTrainedModel, batch) -> torch.Tensor:
    """Last hidden states of a packed batch.

    Args:
        model: a model after `use_packed_attention` or `allow_packed_passes`, with or without its
            language-model head.
        batch: result of `dualkv.pack` or `dualkv.pack_padded` with T rows.

    Returns:
        hidden states [T, C], after the final norm.

    Raises:
        ValueError: the model is not in packed attention or asks for attention dropout, or the batch is
            empty, or on the CPU and with a token id that the model does not have.
        TypeError: `model` is no model of Transformers, or `batch` no `dualkv.PackedBatch`.
        RuntimeError: a decoder layer computed its attention by another way.
    """
    _check_supported(model)
    if not isinstance(batch, dualkv.PackedBatch):
        raise TypeError(f"batch must be a dualkv.PackedBatch, got {type(batch).__name__}")
    if not _runs_packed_batches(model):
        raise ValueError(
            f"{type(model).__name__} uses the attention implementation {model.config._attn_implementation!r}, "
            f"not {ATTENTION_NAME!r}: call use_packed_attention(model) first"
        )
    decoder = _decoder(model)
    if batch.forest.total_tokens == 0:
        raise ValueError("the packed batch has no tokens: a model needs at least one")
    _require_token_ids(batch.input_ids, decoder.get_input_embeddings())
    device = decoder.get_input_embeddings().weight.device
    packed_pass = PackedPass(batch.forest)
    with _packed_attention_of(decoder, packed_pass):
        output = decoder(
            input_ids=batch.input_ids.to(device)[None],
            position_ids=batch.position_ids.to(device)[None],
            use_cache=False,
            return_dict=True,
            dualkv_pass=packed_pass,
        )
    packed_pass.check_every_layer(model)
    return output.last_hidden_state[0]


def packed_logprobs(
    model: PreTrainedModel, batch, temperature: float = 1.0, head_dtype: torch.dtype | None = None
):
    """Log-probabilities of a packed batch's targets, and the entropies of their distributions.

    Args:
        model: a causal language model after `use_packed_attention` or `allow_packed_passes`.
        batch: result of `dualkv.pack` or `dualkv.pack_padded` with M targets. For a model on a GPU, leave it
            on the CPU: then only rows with a target are multiplied with the head, and a token id that the
            model does not have raises. After `batch.to(device)` it fails an assertion of the device.
        temperature: divides the logits, > 0.
        head_dtype: floating-point type that the head computes in, under `torch.autocast` too; its weight is
            copied into it in each call. None: as the model has it.

    Returns:
        log-probabilities [M] and entropies [M], fp32 (fp64 for fp64 models), both differentiable, in the
        order of `batch.target_ids`; `batch.unpack` sorts them by group and response.

    Raises:
        ValueError: as `packed_forward`; the head is not a plain linear layer, has hooks or a forward of its
            own, or has no such target.
        TypeError: as `packed_forward`; `head_dtype` is no floating-point type.
        RuntimeError: a decoder layer computed its attention by another way.
    """
    _check_model(model)
    head = plain_head(model)
    if head_dtype is not None and not (isinstance(head_dtype, torch.dtype) and head_dtype.is_floating_point):
        raise TypeError(f"head_dtype must be a floating-point torch.dtype or None, got {head_dtype!r}")
    hidden, weight, bias = packed_forward(model, batch), head.weight, head.bias
    rows, targets = batch.target_rows, batch.target_ids
    # linear_logprob takes them from the CPU for a GPU: it checks them there and moves what is left.
    if not (hidden.is_cuda and rows.device.type == targets.device.type == "cpu"):
        rows, targets = rows.to(hidden.device), targets.to(hidden.device)
    precision = nullcontext()
    if head_dtype is not None:
        hidden, weight = hidden.to(head_dtype), weight.to(head_dtype)
        bias = None if bias is None else bias.to(head_dtype)
        precision = torch.autocast(hidden.device.type, enabled=False)
    with precision:
        return dualkv.linear_logprob(
            hidden,
            weight,
            rows,
            targets,
            temperature=temperature,
            softcap=getattr(model.config, "final_logit_softcapping", None) or 0.0,
            bias=bias,
        )


class PackedPolicy(nn.Module):
    """A causal language model as a module whose forward is `packed_logprobs`.

    DDP and FSDP gather weights and exchange gradients in calls of the module that they wrap. So they go around
    this module, and its wrapper is called: `DistributedDataParallel(PackedPolicy(model))(batch)`.
    `packed_logprobs` of the model inside of a wrapper would leave them out, without an error.

    Args:
        model: as for `use_packed_attention`, which is called unless the model runs packed batches already.

    Attributes:
        model: the same model, for `save_pretrained` and the like.

    Raises:
        ValueError, TypeError: as `use_packed_attention`.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        _check_supported(model)
        self.model = model if _runs_packed_batches(model) else use_packed_attention(model)

    def forward(self, batch, **options):
        """`packed_logprobs(model, batch, **options)`."""
        return packed_logprobs(self.model, batch, **options)


def plain_head(model: PreTrainedModel) -> nn.Linear:
    """A model's language-model head.

    Raises:
        ValueError: it is something else than its weight and bias, which is all that `packed_logprobs` reads:
            another module, as an adapter of peft, or one with hooks or a forward of its own.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        fault = f"is {type(head).__module__}.{type(head).__qualname__}"
    elif head._forward_hooks or head._forward_pre_hooks:
        fault = "has forward hooks"
    elif getattr(head.forward, "__func__", None) is not nn.Linear.forward:
        fault = "has a forward of its own"
    else:
        return head
    name = next((name for name, module in model.named_modules() if module is head), "none")
    raise ValueError(
        f"the head of {type(model).__name__} ({name}) {fault}, but must be a torch.nn.Linear as it is: its "
        "weight is used without a call of it"
    )


@contextmanager
def _packed_attention_of(decoder: PreTrainedModel, packed_pass: PackedPass):
    """Packed attention for a whole forward: the decoder then builds no masks."""
    packed_pass.enter(decoder.config)
    try:
        yield
    finally:
        packed_pass.leave(decoder.config)


# The same for one attention layer, by hooks: gradient checkpointing calls layers again during the backward, when
# the forward's context is gone. The pass is among the arguments then as before.


def _enter_packed_pass(attention: nn.Module, args: tuple, kwargs: dict) -> None:
    packed_pass = kwargs.get("dualkv_pass")
    if packed_pass is not None:
        packed_pass.enter(attention.config)


def _leave_packed_pass(attention: nn.Module, args: tuple, kwargs: dict, output) -> None:
    packed_pass = kwargs.get("dualkv_pass")
    if packed_pass is not None:
        packed_pass.leave(attention.config)


def _runs_packed_batches(model: PreTrainedModel) -> bool:
    """Whether use_packed_attention or allow_packed_passes has been called."""
    if model.config._attn_implementation == ATTENTION_NAME:
        return True
    hooks = _decoder(model).layers[0].self_attn._forward_pre_hooks
    return _enter_packed_pass in hooks.values()


def _decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head. A base model of Transformers 4 has no `get_decoder`."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _require_token_ids(input_ids: torch.Tensor, embeddings: nn.Module) -> None:
    """Checks ids on the CPU before a GPU gets them, which could not raise. Others are not waited for."""
    size = getattr(embeddings, "num_embeddings", None)
    if size is None or input_ids.device.type != "cpu":
        return
    wrong = ((input_ids < 0) | (input_ids >= size)).nonzero()
    if len(wrong) > 0:
        row = int(wrong[0, 0])
        raise ValueError(f"input_ids[{row}] must be 0 to {size - 1}, got {int(input_ids[row])}")


def _check_model(model) -> None:
    """Requires a model of Transformers, with or without peft's LoRA around it."""
    peft = sys.modules.get("peft")
    accepted = PreTrainedModel if peft is None else (PreTrainedModel, peft.PeftModel)
    # fully_shard gathers weights, as those of a head, in calls of its module. Of a model's, only the decoder is called.
    if not isinstance(model, accepted) or (isinstance(model, _FullySharded) and _decoder(model) is not model):
        advice = ""
        if isinstance(model, nn.Module) and any(isinstance(x, PreTrainedModel) for x in model.modules()):
            advice = (
                ": DDP, FSDP or another wrapper has to go around PackedPolicy(model), and be called with the "
                "batch; the model inside of a wrapper, by itself, exchanges no gradients"
            )
        raise TypeError(f"model must be a Transformers model, got {type(model).__name__}{advice}")
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.peft_type != "LORA" or getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(f"peft adapters of {type(adapter).__name__} are not supported, only plain LoRA")


def _check_supported(model: PreTrainedModel) -> None:
    _check_model(model)
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model type {config.model_type!r} ({type(model).__name__}) is not supported; supported are "
            + ", ".join(SUPPORTED_MODEL_TYPES)
        )
    for rope_type in _rope_types(config):
        if rope_type in _LENGTH_DEPENDENT_ROPE_TYPES:
            raise ValueError(
                f"rope type {rope_type!r} is not supported: it depends on the longest sequence of the batch"
            )
    if getattr(config, "is_causal", True) is False:
        raise ValueError(f"the configuration of {type(model).__name__} is not causal: packed attention is")
    names = {module: name for name, module in model.named_modules()}
    for module in _decoder(model).modules():
        if isinstance(module, _ROW_MIXING_MODULES):
            raise ValueError(
                f"{names[module]} ({type(module).__name__}) mixes the rows of a batch: in a packed batch a row's "
                "neighbours may belong to other responses"
            )
        if getattr(module, "is_causal", True) is False:
            raise ValueError(f"{names[module]} ({type(module).__name__}) is not causal: packed attention is")


def _rope_types(config) -> list[str | None]:
    """The kinds of rotary embedding that a model uses: one, or one for each kind of layer."""
    # `rope_parameters` since Transformers 5, `rope_scaling` before; very old checkpoints say `type`.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return [kind.get("rope_type", kind.get("type")) for kind in kinds]


def _packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    dualkv_pass: PackedPass | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls in each layer.

    query [1, H, T, D], key and value [1, Hk, T, D] -> output [1, T, H, D], and None for the weights.
    """
    layer = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    if dualkv_pass is None:
        raise ValueError(
            f"{layer} is in packed attention but was called without a packed batch: use packed_forward or "
            'packed_logprobs, or switch back with model.set_attn_implementation("sdpa")'
        )
    if attention_mask is not None:
        raise ValueError(f"{layer} got an attention mask: in a packed batch the forest says what a row sees")
    if dropout > 0.0:
        raise ValueError(f"{layer} asks for attention dropout {dropout}: packed attention has none")
    if is_causal is False:
        raise ValueError(f"{layer} is not causal: packed attention is")
    rows = dualkv_pass.forest.total_tokens
    if query.shape[0] != 1 or query.shape[2] != rows or key.shape[2] != rows:
        raise ValueError(
            f"{layer} got queries {list(query.shape)} and keys {list(key.shape)} for a batch of {rows} rows"
        )
    dualkv_pass.record(module)
    output = dualkv.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        dualkv_pass.forest,
        scale=scaling,
        # A model's window of w tokens counts the token itself.
        window_left=None if sliding_window is None else sliding_window - 1,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return output[None], None


# No mask function is registered beside it: for an attention without one Transformers builds no mask at all,
# and does not inspect the positions, which would cost a host synchronisation on a GPU.
AttentionInterface.register(ATTENTION_NAME, _packed_attention)
