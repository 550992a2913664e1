"""Packed Transformers models against the same weights run with eager attention, one sequence at a time."""

from __future__ import annotations

import copy
import dataclasses
import threading

import pytest
import torch

import dualkv

transformers = pytest.importorskip("transformers")

from dualkv.integrations.transformers import (  # noqa: E402
    packed_forward,
    packed_logprobs,
    use_packed_attention,
)

VOCAB = 61


def make_model(kind: str, seed: int = 0, layers: int = 2, **options) -> transformers.PreTrainedModel:
    """A tiny random fp32 model with eager attention, H = 4 and Hk = 2."""
    config_class = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[kind]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
        **{"tie_word_embeddings": False, **options},
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


VARIANTS = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    # Layer 0 sees all, layers 1 and 2 a window that ends inside prompts and responses.
    "qwen3-window": (
        "qwen3",
        {"layers": 3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_entropies_and_gradients_equal_replicated_eager(variant):
    kind, options = VARIANTS[variant]
    model = make_model(kind, **options)
    packed = use_packed_attention(copy.deepcopy(model))
    assert_packed_equals_eager(model, packed, *make_groups())


def test_window_model_has_both_kinds_of_layer():
    model = make_model("qwen3", **VARIANTS["qwen3-window"][1])
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert windows == [None, 4, 4]


def test_temperature_divides_logits():
    model = make_model("qwen3")
    prompts, responses = make_groups()
    hot = copy.deepcopy(model)
    with torch.no_grad():
        hot.lm_head.weight /= 0.7
        expected = eager_logprobs(hot, prompts, responses)
        actual = packed_logprobs(
            use_packed_attention(model), dualkv.pack(prompts, responses), temperature=0.7
        )
    torch.testing.assert_close(actual[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)


def test_head_bias_and_final_softcap():
    model = make_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
    model.config.final_logit_softcapping = 2.0
    prompts, responses = make_groups()
    batch = dualkv.pack(prompts, responses)
    use_packed_attention(model)
    logprobs, _ = packed_logprobs(model, batch)
    logits = model.lm_head(packed_forward(model, batch))[batch.target_rows]
    expected = (2.0 * torch.tanh(logits / 2.0)).log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_J12_five_sgd_steps_keep_the_weights_together(kind):
    model = make_model(kind)
    packed = use_packed_attention(copy.deepcopy(model))
    prompts, responses = make_groups(sizes=((9, (4, 1, 6)),))
    batch = dualkv.pack(prompts, responses)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, packed)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        objective(*eager_logprobs(model, prompts, responses)).backward()
        objective(*packed_logprobs(packed, batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for (name, expected), actual in zip(model.named_parameters(), packed.parameters()):
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error <= 1e-5, f"step {step}, {name}: relative error {error:.2e}"


def test_J2_positions_follow_the_path_to_the_root():
    prompts, responses = [[3, 1, 4]], [[[1, 5], [9, 2]]]
    batch = dualkv.pack(prompts, responses)
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
    model = make_model("llama")
    expected, _ = eager_logprobs(model, prompts, responses)
    use_packed_attention(model)
    with torch.no_grad():
        actual, _ = packed_logprobs(model, batch)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        # Rotary embeddings are relative: all positions moved by the same offset change nothing.
        moved_batch = dataclasses.replace(batch, position_ids=batch.position_ids + 100)
        moved, _ = packed_logprobs(model, moved_batch)
        torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)


def test_order_of_responses_does_not_change_a_response():
    model = use_packed_attention(make_model("qwen3"))
    prompts, responses = make_groups(sizes=((7, (3, 5, 2)),))
    with torch.no_grad():
        forward = dualkv.pack(prompts, responses)
        backward = dualkv.pack(prompts, [responses[0][::-1]])
        ahead = forward.unpack(packed_logprobs(model, forward)[0])[0]
        behind = backward.unpack(packed_logprobs(model, backward)[0])[0]
    for a, b in zip(ahead, behind[::-1]):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    model = make_model("qwen3", **VARIANTS["qwen3-window"][1])
    packed = use_packed_attention(copy.deepcopy(model)).train()
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    prompts, responses = make_groups()
    objective(*eager_logprobs(model, prompts, responses)).backward()
    loss = objective(*packed_logprobs(packed, dualkv.pack(prompts, responses)))
    # Another batch runs before the first one is recomputed: its forest must not be taken for the first's.
    with torch.no_grad():
        packed_logprobs(packed, dualkv.pack(*make_groups(seed=1, sizes=((2, (1, 1)), (8, (2,))))))
    loss.backward()
    assert_gradients_agree(gradients(packed), gradients(model))


def test_two_threads_with_different_batches():
    model = use_packed_attention(make_model("qwen3"))
    batches = [dualkv.pack(*make_groups(0)), dualkv.pack(*make_groups(1, sizes=((3, (2, 5)), (4, (1, 1)))))]
    with torch.no_grad():
        expected = [packed_logprobs(model, batch)[0] for batch in batches]
    faults = []

    def work(batch, reference):
        try:
            for _ in range(20):
                with torch.no_grad():
                    torch.testing.assert_close(packed_logprobs(model, batch)[0], reference)
        except Exception as error:  # handed to the main thread, where it fails the test
            faults.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults


def test_J8_empty_batch_is_one_clear_error():
    with pytest.raises(ValueError, match="packed batch has no tokens"):
        packed_logprobs(use_packed_attention(make_model("qwen3")), dualkv.pack([], []))


class OtherAttention(torch.nn.Module):
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


def test_unsupported_model_type_is_refused_with_the_list():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(
        ValueError, match=r"'gpt2' \(GPT2LMHeadModel\) is not supported; supported are llama, qwen3"
    ):
        use_packed_attention(transformers.GPT2LMHeadModel(config))


def test_rope_that_depends_on_the_longest_sequence_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    key = "rope_parameters" if hasattr(transformers.LlamaConfig(), "rope_parameters") else "rope_scaling"
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        use_packed_attention(make_model("llama", **{key: rope}))


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
    model.set_output_embeddings(torch.nn.Sequential(model.lm_head))
    with pytest.raises(ValueError, match="Sequential"):
        packed_logprobs(model, dualkv.pack(*make_groups()))


def test_model_without_head_gives_the_same_hidden_states():
    model = use_packed_attention(make_model("qwen3"))
    batch = dualkv.pack(*make_groups())
    hidden = packed_forward(model.model, batch)
    assert hidden.shape == (batch.input_ids.numel(), 32)
    torch.testing.assert_close(hidden, packed_forward(model, batch))
