"""Tiny random models of each supported architecture, and their replicated reference."""

from __future__ import annotations

import pytest
import torch

import dualkv

transformers = pytest.importorskip("transformers")

from dualkv.integrations.transformers import packed_logprobs  # noqa: E402

VOCAB = 61
WINDOW = 4  # tokens, the row itself included: ends inside the prompts and the responses of `make_groups`

_ALTERNATING = {
    "layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_SOFTCAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}

# Name -> configuration class, options. Every feature is set so that leaving it out would change the results.
ARCHITECTURES = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3-tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-window": (
        "Qwen3Config",
        {"layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    # Layer 1 has a dense MLP, layers 0 and 2 have experts. The router's logits that the model also returns here
    # are for an auxiliary loss, which takes no part.
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "output_router_logits": True,
        },
    ),
    "qwen3-moe-window": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
    # A scale that differs from that of head dim 8.
    "gemma2": (
        "Gemma2Config",
        {**_ALTERNATING, **_SOFTCAPS, "query_pre_attn_scalar": 20, "tie_word_embeddings": True},
    ),
    # Two rotary bases, far enough apart to matter over the few positions here.
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_ALTERNATING,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 4.0,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 10.0,
        },
    ),
    "gpt-oss": ("GptOssConfig", {**_ALTERNATING, "num_local_experts": 6, "num_experts_per_tok": 2}),
}


def make_model(name: str, seed: int = 0, **overrides) -> transformers.PreTrainedModel:
    """A tiny random fp32 model with eager attention and eager experts, H = 4, Hk = 2, D = 8."""
    config_class, options = ARCHITECTURES[name]
    options = {"layers": 2, "tie_word_embeddings": False, **options, **overrides}
    config = getattr(transformers, config_class)(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=options.pop("layers"),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
        experts_implementation="eager",
        **options,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # The default initialisation is so small that attention is almost uniform and hides mistakes.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.25)
    return model


def make_groups(seed: int = 0, sizes=((9, (4, 1, 6)), (1, (3, 2)), (5, (0, 7)), (6, (5,)))):
    """Token ids of groups: ragged, a one-token prompt, an empty response, a group of one."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    return [tokens(p) for p, _ in sizes], [[tokens(r) for r in lengths] for _, lengths in sizes]


def eager_logprobs(model, prompts, responses):
    """Log-probs and entropies [M] from every replicated sequence [P + R] run by itself."""
    logprobs, entropies = [], []
    for prompt, group in zip(prompts, responses):
        for response in group:
            if not response:
                continue
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
            distribution = logits[len(prompt) - 1 : -1].log_softmax(-1)
            logprobs.append(distribution.gather(1, torch.tensor(response)[:, None])[:, 0])
            entropies.append(-(distribution.exp() * distribution).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def objective(logprobs, entropies):
    """A loss that weights every target differently."""
    weights = torch.linspace(-1.0, 1.5, logprobs.numel(), dtype=logprobs.dtype)
    return (weights * logprobs).sum() + 0.1 * (weights.flip(0) * entropies).sum()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients_agree(actual, expected, tolerance=1e-4):
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        error = (actual[name] - reference).abs().max() / reference.abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def assert_packed_equals_eager(model, packed, prompts, responses):
    expected = eager_logprobs(model, prompts, responses)
    objective(*expected).backward()
    actual = packed_logprobs(packed, dualkv.pack(prompts, responses))
    objective(*actual).backward()
    torch.testing.assert_close(actual[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)
    assert_gradients_agree(gradients(packed), gradients(model))
