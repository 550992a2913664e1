"""Packed Transformers models: temperature, head, positions, checkpointing, threads."""

from __future__ import annotations

import copy
import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

import dualkv
from dualkv.integrations.transformers import (
    allow_packed_passes,
    packed_forward,
    packed_logprobs,
    use_packed_attention,
)
from transformers_models import (
    VOCAB,
    assert_gradients_agree,
    eager_logprobs,
    gradients,
    make_groups,
    make_model,
    objective,
)


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


def test_targets_on_the_host_stay_there_for_a_gpu(monkeypatch):
    """Hidden states that claim to be on a GPU, and the rows and targets that linear_logprob gets for them."""
    model, batch = use_packed_attention(make_model("llama")), dualkv.pack(*make_groups())
    hidden = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    given = []
    monkeypatch.setattr("dualkv.integrations.transformers.packed_forward", lambda *_: hidden)
    monkeypatch.setattr(dualkv, "linear_logprob", lambda hidden, weight, *indices, **_: given.extend(indices))
    packed_logprobs(model, batch)
    assert given[0] is batch.target_rows and given[1] is batch.target_ids


def test_token_ids_that_the_model_does_not_have_raise_before_they_are_moved():
    """Of a prompt, and of a response: its target. On a GPU an embedding fails an assertion of the device."""
    for prompts, responses, row in (([[1, VOCAB]], [[[2]]], 1), ([[1]], [[[2, VOCAB]]], 2)):
        batch = dualkv.pack(prompts, responses)
        with pytest.raises(ValueError, match=rf"input_ids\[{row}\] must be 0 to {VOCAB - 1}, got {VOCAB}"):
            packed_logprobs(use_packed_attention(make_model("llama")), batch)
    model, batch = use_packed_attention(make_model("llama")), dualkv.pack([[1]], [[[2]]])
    with pytest.raises(ValueError, match=rf"targets\[0\] .* got {VOCAB}"):
        packed_logprobs(model, dataclasses.replace(batch, target_ids=batch.target_ids * 0 + VOCAB))


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
@pytest.mark.parametrize("name", ["qwen3-window", "gpt-oss"])
def test_gradient_checkpointing(name, use_reentrant):
    model = make_model(name)
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


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("name", ["qwen3-window", "gpt-oss"])
def test_packed_passes_beside_ordinary_calls(name, use_reentrant):
    """Checkpointed layers are recomputed as they were computed, whatever ran in between."""
    model = make_model(name)
    both = allow_packed_passes(allow_packed_passes(copy.deepcopy(model))).train()
    if use_reentrant is not None:
        both.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    prompts, responses = make_groups()
    ids = torch.tensor([prompts[0] + responses[0][0]])
    ordinary = model(ids, use_cache=False).logits
    objective(*eager_logprobs(model, prompts, responses)).backward()

    loss = objective(*packed_logprobs(both, dualkv.pack(prompts, responses)))
    assert both.config._attn_implementation == "eager"
    assert torch.equal(both(ids, use_cache=False).logits, ordinary)
    loss.backward()
    assert both.config._attn_implementation == "eager"
    assert torch.equal(both(ids, use_cache=False).logits, ordinary)
    assert_gradients_agree(gradients(both), gradients(model))


def test_an_error_in_a_packed_pass_leaves_the_model_as_it_was():
    model = allow_packed_passes(make_model("llama", attention_dropout=0.5)).train()
    with pytest.raises(ValueError, match="asks for attention dropout 0.5"):
        packed_logprobs(model, dualkv.pack(*make_groups()))
    assert model.config._attn_implementation == "eager"


def test_head_in_another_type():
    model = use_packed_attention(make_model("qwen3"))
    batch = dualkv.pack(*make_groups())
    expected, _ = packed_logprobs(model, batch)
    assert packed_logprobs(model, batch, head_dtype=torch.float64)[0].dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        hidden = packed_forward(model, batch)
        logprobs, _ = packed_logprobs(model, batch, head_dtype=torch.float32)
    head = model.lm_head.weight
    logits = (hidden.float() @ head.t())[batch.target_rows]
    exact = logits.log_softmax(1).gather(1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs, exact, atol=1e-5, rtol=1e-5)
    assert not torch.equal(logprobs, expected)


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


def test_model_without_head_gives_the_same_hidden_states():
    model = use_packed_attention(make_model("qwen3"))
    batch = dualkv.pack(*make_groups())
    hidden = packed_forward(model.model, batch)
    assert hidden.shape == (batch.input_ids.numel(), 32)
    torch.testing.assert_close(hidden, packed_forward(model, batch))
