"""A small Qwen3 trained, fp32 weights and bf16 attention, packed and replicated: on a GPU, and on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import dualkv

transformers = pytest.importorskip("transformers")

from dualkv.integrations.transformers import packed_logprobs, use_packed_attention  # noqa: E402

VOCAB, STEPS = 97, 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def groups_of_step(step: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts with responses that count on from them, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    prompts, responses = [], []
    for _ in range(3):
        first, length = torch.randint(VOCAB, (2,), generator=generator).tolist()
        prompts.append([(first + n) % VOCAB for n in range(40 + length)])
        begin = first + 40 + length
        lengths = torch.randint(1, 60, (4,), generator=generator).tolist()
        responses.append([[(begin + n) % VOCAB for n in range(count)] for count in lengths])
    return prompts, responses


def packed(model, prompts, responses) -> torch.Tensor:
    return packed_logprobs(use_packed_attention(model), dualkv.pack(prompts, responses))[0]


def replicated(model, prompts, responses) -> torch.Tensor:
    """Each response behind a prompt of its own, with the same kernel."""
    prompts = [prompt for prompt, group in zip(prompts, responses) for _ in group]
    return packed(model, prompts, [[response] for group in responses for response in group])


def padded(model, prompts, responses) -> torch.Tensor:
    """The same sequences, padded, with PyTorch's attention."""
    model.set_attn_implementation("sdpa")
    pairs = [(prompt, response) for prompt, group in zip(prompts, responses) for response in group]
    sequences = [torch.tensor(prompt + response, device=model.device) for prompt, response in pairs]
    ids = pad_sequence(sequences, batch_first=True)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state.flatten(0, 1)
    rows = [
        i * ids.shape[1] + len(prompt) - 1 + n
        for i, (prompt, response) in enumerate(pairs)
        for n in range(len(response))
    ]
    targets = [token for _, response in pairs for token in response]
    return dualkv.linear_logprob(hidden, model.lm_head.weight, torch.tensor(rows), torch.tensor(targets))[0]


def train(device: torch.device, logprobs_of) -> torch.Tensor:
    """The loss of each step, [STEPS]."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(**SIZES), dtype=torch.float32
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        with torch.autocast(device.type, torch.bfloat16):
            loss = -logprobs_of(model, *groups_of_step(step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def test_packed_training_is_within_the_noise_of_replicated_training(cpu_or_gpu):
    """The noise is the difference of two replicated trainings whose attention adds up in another order."""
    losses = {kind: train(cpu_or_gpu, kind) for kind in (packed, replicated, padded)}
    expected = losses[replicated]
    assert expected[-5:].mean() < 0.7 * expected[:5].mean(), "nothing was learned: the test shows nothing"
    noise, difference = (losses[padded] - expected).abs(), (losses[packed] - expected).abs()
    message = f"difference {difference.max()}, noise {noise.max()}, of {expected[0]} to {expected[-1]}"
    # Runs drift apart at random: compared are the means over ten steps. On a CPU they are 0.4 to 0.8 times the
    # noise, and 2.1 to 5.9 times with dq 10 % too small.
    for begin in range(0, STEPS, 10):
        steps = slice(begin, begin + 10)
        assert difference[steps].mean() <= 1.5 * noise[steps].mean(), message


@pytest.mark.usefixtures("gpu")
def test_the_example_runs_on_the_gpu(tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    example = Path(__file__).parents[2] / "examples" / "policy_update.py"
    options = "--groups 3 --group-size 4 --layers 2 --hidden-size 64 --intermediate-size 64".split()
    done = subprocess.run(
        [sys.executable, example, *options, "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(dualkv.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "result.json").read_text())
    assert (report["device"], report["dtype"]) == (torch.cuda.get_device_name(), "bfloat16")
    assert report["agreement"]["agrees"] and report["agreement"]["compared_with"] == "a float32 run"
    assert report["packed"]["peak_mib"] > 0
