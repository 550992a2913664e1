"""The README's Python code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_has_code():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("code", BLOCKS, ids=["model", "attention"])
def test_readme_code_runs(code):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    names = {
        "model": transformers.AutoModelForCausalLM.from_config(config),
        "prompts": [[1, 2, 3], [4, 5]],
        "responses": [[[6, 7], [8]], [[9, 10, 11]]],
    }
    exec(code, names)
    if "per_response" in names:
        lengths = [[len(response) for response in group] for group in names["per_response"]]
        assert lengths == [[2, 1], [3]]
        names["logprobs"].sum().backward()
    else:
        assert names["out"].shape == names["q"].shape
        assert names["positions"].shape == names["q"].shape[:1]
