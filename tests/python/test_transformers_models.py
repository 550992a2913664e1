"""Each supported architecture against the same weights run with eager attention, one sequence at a time."""

from __future__ import annotations

import copy

import pytest
import torch

import dualkv
from dualkv.integrations.transformers import (
    SUPPORTED_MODEL_TYPES,
    packed_forward,
    packed_logprobs,
    use_packed_attention,
)
from transformers_models import (
    ARCHITECTURES,
    WINDOW,
    assert_packed_equals_eager,
    eager_logprobs,
    make_groups,
    make_model,
    objective,
    transformers,
)


def test_every_supported_model_type_is_compared():
    compared = {make_model(name).config.model_type for name in ARCHITECTURES}
    assert compared == set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_entropies_and_gradients_equal_replicated_eager(name):
    model = make_model(name)
    packed = use_packed_attention(copy.deepcopy(model))
    assert_packed_equals_eager(model, packed, *make_groups())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_J12_five_sgd_steps_keep_the_weights_together(name):
    model = make_model(name)
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
        for (label, expected), actual in zip(model.named_parameters(), packed.parameters()):
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error <= 1e-5, f"step {step}, {label}: relative error {error:.2e}"


@pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "set_experts_implementation"),
    reason="this version of Transformers has one implementation of experts",
)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_that_work_on_the_whole_batch_give_the_same_results(name, implementation):
    model = make_model(name)
    packed = use_packed_attention(copy.deepcopy(model))
    packed.set_experts_implementation(implementation)
    assert_packed_equals_eager(model, packed, *make_groups())


# Architecture -> the window of each layer. All others have none.
WINDOWS = {
    "qwen3-window": [None, WINDOW, WINDOW],
    "mistral-window": [WINDOW, WINDOW],
    "qwen2-window": [None, None, WINDOW],
    "qwen3-moe-window": [WINDOW, WINDOW],
    "gemma2": [WINDOW, None, WINDOW, None],
    "gemma3": [WINDOW, None, WINDOW, None],
    "gpt-oss": [WINDOW, None, WINDOW, None],
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_ask_for_their_kind_of_attention(name, monkeypatch):
    """The comparison with eager attention says nothing about a feature that both models left out."""
    model = use_packed_attention(make_model(name))
    attention, asked = dualkv.attention, []

    def spy(q, k, v, forest, **options):
        asked.append(options)
        return attention(q, k, v, forest, **options)

    monkeypatch.setattr(dualkv, "attention", spy)
    packed_forward(model, dualkv.pack(*make_groups()))
    layers = model.model.layers
    windows = WINDOWS.get(name, [None] * len(layers))
    assert [options["window_left"] for options in asked] == [w and w - 1 for w in windows]
    scale = 20**-0.5 if name in ("gemma2", "gemma3") else 8**-0.5
    assert [options["scale"] for options in asked] == [scale] * len(layers)
    assert [options["softcap"] for options in asked] == [1.5 if name == "gemma2" else 0.0] * len(layers)
    for layer, options in zip(layers, asked):
        assert options["sinks"] is (layer.self_attn.sinks if name == "gpt-oss" else None)
