"""What packed Transformers models refuse, and that the error says where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dualkv
from dualkv.integrations.transformers import (
    SUPPORTED_MODEL_TYPES,
    packed_forward,
    packed_logprobs,
    use_packed_attention,
)
from transformers_models import VOCAB, eager_logprobs, make_groups, make_model, transformers


def test_J8_empty_batch_is_one_clear_error():
    with pytest.raises(ValueError, match="packed batch has no tokens"):
        packed_logprobs(use_packed_attention(make_model("qwen3")), dualkv.pack([], []))


def test_unsupported_model_type_is_refused_with_the_list():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2)
    supported = ", ".join(SUPPORTED_MODEL_TYPES)
    with pytest.raises(
        ValueError, match=rf"'gpt2' \(GPT2LMHeadModel\) is not supported; supported are {supported}$"
    ):
        use_packed_attention(transformers.GPT2LMHeadModel(config))


# Configuration class of each architecture with state space, convolution or recurrent layers.
HYBRIDS = (
    "MambaConfig",
    "Mamba2Config",
    "FalconMambaConfig",
    "JambaConfig",
    "BambaConfig",
    "Zamba2Config",
    "FalconH1Config",
    "RecurrentGemmaConfig",
    "Lfm2Config",
    "Qwen3NextConfig",
)


@pytest.mark.parametrize("config_class", HYBRIDS)
def test_J3_hybrid_architectures_are_refused(config_class):
    if not hasattr(transformers, config_class):
        pytest.skip(f"this version of Transformers has no {config_class}")
    config = getattr(transformers, config_class)()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"model type '{config.model_type}' .* is not supported"):
        use_packed_attention(model)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(32, 32, kernel_size=4, padding=3, groups=32),
        nn.Conv2d(1, 1, 3),
        nn.ConvTranspose1d(1, 1, 3),
        nn.LSTM(32, 32),
        nn.GRUCell(32, 32),
        nn.MultiheadAttention(32, 4),
        nn.BatchNorm1d(32),
    ],
    ids=lambda module: type(module).__name__,
)
def test_J3_module_that_mixes_rows_is_named(module):
    model = use_packed_attention(make_model("llama"))
    model.model.layers[1].mlp.extra = module
    message = rf"model\.layers\.1\.mlp\.extra \({type(module).__name__}\) mixes the rows"
    with pytest.raises(ValueError, match=message):
        packed_forward(model, dualkv.pack(*make_groups()))
    with pytest.raises(ValueError, match=message):
        use_packed_attention(model)


def test_bidirectional_gemma_is_refused():
    if not hasattr(transformers.Gemma3TextConfig(), "use_bidirectional_attention"):
        pytest.skip("this version of Transformers has no bidirectional Gemma 3")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn \(Gemma3Attention\) is not causal"):
        use_packed_attention(make_model("gemma3", use_bidirectional_attention=True))


def test_layer_that_is_not_causal_is_named():
    model = use_packed_attention(make_model("mistral"))
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn \(MistralAttention\) is not causal"):
        packed_forward(model, dualkv.pack(*make_groups()))


def test_configuration_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="configuration of LlamaForCausalLM is not causal"):
        use_packed_attention(make_model("llama", is_causal=False))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rope_that_depends_on_the_longest_sequence_is_refused(name):
    rope = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        use_packed_attention(make_model(name, rope_scaling=rope))


class OtherAttention(nn.Module):
    """Takes part in the layer but computes no attention through the interface."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states, None


def test_layer_with_another_attention_is_named():
    model = use_packed_attention(make_model("qwen3"))
    model.model.layers[1].self_attn = OtherAttention()
    with pytest.raises(
        RuntimeError, match=r"model\.layers\.1\.self_attn \(OtherAttention\): 0 calls"
    ) as error:
        packed_forward(model, dualkv.pack(*make_groups()))
    assert "layers.0" not in str(error.value)


def test_layer_that_attends_twice_is_named():
    model = use_packed_attention(make_model("llama"))
    layer = model.model.layers[0]
    original = layer.self_attn.forward

    def twice(*args, **kwargs):
        original(*args, **kwargs)
        return original(*args, **kwargs)

    layer.self_attn.forward = twice
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.self_attn \(LlamaAttention\): 2 calls"):
        packed_forward(model, dualkv.pack(*make_groups()))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda arguments: {"is_causal": False}, "is not causal: packed attention is"),
        (lambda arguments: {"attention_mask": torch.zeros(1, 1, 1, 1)}, "got an attention mask"),
        (
            lambda arguments: {"hidden_states": arguments["hidden_states"].repeat(2, 1, 1)},
            r"got queries \[2, 4, 49, 8\] and keys \[2, 2, 49, 8\] for a batch of 49 rows",
        ),
    ],
)
def test_layer_that_asks_for_something_else_is_named(change, message):
    model = use_packed_attention(make_model("qwen2"))
    layer = model.model.layers[1].self_attn
    original = layer.forward
    layer.forward = lambda **arguments: original(**{**arguments, **change(arguments)})
    with pytest.raises(ValueError, match="Qwen2Attention of layer 1 " + message):
        packed_forward(model, dualkv.pack(*make_groups()))


def test_stock_attention_is_refused_by_name():
    with pytest.raises(ValueError, match="attention implementation 'eager', not 'dualkv'"):
        packed_forward(make_model("qwen3"), dualkv.pack(*make_groups()))


def test_packed_model_refuses_plain_calls_until_switched_back():
    model = make_model("qwen3")
    inputs = torch.tensor([[1, 2, 3]])
    expected = model(input_ids=inputs).logits
    use_packed_attention(model)
    with pytest.raises(ValueError, match="called without a packed batch"):
        model(input_ids=inputs)
    with pytest.raises(ValueError, match="called without a packed batch"):
        model(input_ids=inputs, attention_mask=torch.tensor([[0, 1, 1]]))
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(input_ids=inputs).logits, expected)


def test_attention_dropout_is_refused_in_training_only():
    model = use_packed_attention(make_model("llama", attention_dropout=0.1))
    batch = dualkv.pack(*make_groups())
    packed_forward(model.eval(), batch)
    with pytest.raises(ValueError, match="dropout 0.1"):
        packed_forward(model.train(), batch)


def test_head_that_is_not_linear_is_refused():
    model = use_packed_attention(make_model("llama"))
    model.set_output_embeddings(nn.Sequential(model.lm_head))
    with pytest.raises(ValueError, match="Sequential"):
        packed_logprobs(model, dualkv.pack(*make_groups()))


# ------------------------------------------------------------------------------- models, batches and heads


@pytest.mark.parametrize(
    "call", [use_packed_attention, lambda model: packed_logprobs(model, dualkv.pack(*make_groups()))]
)
def test_models_of_another_kind_are_named(call):
    for other in (nn.Linear(2, 2), dualkv.pack(*make_groups()), None):
        with pytest.raises(
            TypeError, match=f"model must be a Transformers model, got {type(other).__name__}$"
        ):
            call(other)
    wrapped = nn.Sequential(use_packed_attention(make_model("qwen3")))
    with pytest.raises(TypeError, match=r"got Sequential: DDP, FSDP .* around PackedPolicy\(model\)"):
        call(wrapped)


@pytest.mark.parametrize("call", [packed_forward, packed_logprobs])
@pytest.mark.parametrize("batch", [[[1, 2]], None, torch.tensor([[1, 2]])])
def test_batches_of_another_kind_are_named(call, batch):
    message = f"batch must be a dualkv.PackedBatch, got {type(batch).__name__}"
    with pytest.raises(TypeError, match=message):
        call(use_packed_attention(make_model("qwen3")), batch)


def test_head_dtype_of_another_kind_is_named():
    model, batch = use_packed_attention(make_model("qwen3")), dualkv.pack(*make_groups())
    for wrong in ("float32", torch.int64):
        message = f"head_dtype must be a floating-point torch.dtype or None, got {wrong!r}"
        with pytest.raises(TypeError, match=message):
            packed_logprobs(model, batch, head_dtype=wrong)


def test_head_that_does_more_than_its_weight_says_is_named():
    batch = dualkv.pack(*make_groups())
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model = use_packed_attention(make_model("llama"))
        hook = getattr(model.lm_head, register)(lambda *arguments: None)
        with pytest.raises(ValueError, match=r"head of LlamaForCausalLM \(lm_head\) has forward hooks"):
            packed_logprobs(model, batch)
        hook.remove()
        packed_logprobs(model, batch)
    model.lm_head.forward = lambda hidden: 2 * nn.functional.linear(hidden, model.lm_head.weight)
    with pytest.raises(ValueError, match=r"head of LlamaForCausalLM \(lm_head\) has a forward of its own"):
        packed_logprobs(model, batch)
    base = use_packed_attention(make_model("llama")).model
    with pytest.raises(ValueError, match=r"head of LlamaModel \(none\) is builtins.NoneType"):
        packed_logprobs(base, batch)


def test_adapters_that_packing_would_leave_out_are_refused():
    peft = pytest.importorskip("peft")
    batch = dualkv.pack(*make_groups())
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig):
        model = peft.get_peft_model(make_model("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
        with pytest.raises(
            ValueError, match=f"peft adapters of {kind.__name__} are not supported, only plain"
        ):
            use_packed_attention(model)
        with pytest.raises(ValueError, match=f"peft adapters of {kind.__name__}"):
            packed_logprobs(model, batch)


def test_lora_is_packed_but_not_on_the_head():
    peft = pytest.importorskip("peft")
    prompts, responses = make_groups()
    batch = dualkv.pack(prompts, responses)

    def adapted(*modules):
        lora = peft.LoraConfig(r=2, target_modules=list(modules), init_lora_weights=False)
        return peft.get_peft_model(make_model("llama"), lora)

    model = adapted("q_proj", "v_proj")
    with torch.no_grad():
        expected, _ = eager_logprobs(model, prompts, responses)
        found, _ = packed_logprobs(use_packed_attention(model), batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    message = r"head of PeftModel \(base_model.model.lm_head\) is peft.tuners.lora.layer.Linear"
    with pytest.raises(ValueError, match=message):
        packed_logprobs(use_packed_attention(adapted("lm_head")), batch)
