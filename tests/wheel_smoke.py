"""Smoke test of an installed package, run by tools/check_wheel.sh: every part once, with gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import dualkv


def check_attention() -> None:
    """Against PyTorch's attention over prompt and response, for each response."""
    torch.manual_seed(0)
    prompt, responses = 37, [5, 0, 80]
    forest = dualkv.SegmentForest.from_groups([prompt], [responses])
    q = torch.randn(forest.total_tokens, 4, 16, requires_grad=True)
    k, v = (torch.randn(forest.total_tokens, 2, 16, requires_grad=True) for _ in range(2))
    out = dualkv.attention(q, k, v, forest)
    gradients = torch.autograd.grad(out[prompt:].square().sum(), (q, k, v))

    expected, begin = [], prompt
    for length in responses:
        rows = torch.cat([torch.arange(prompt), torch.arange(begin, begin + length)])
        heads = [q[rows], *(tensor[rows].repeat_interleave(2, dim=1) for tensor in (k, v))]
        one = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.transpose(0, 1) for tensor in heads), is_causal=True
        )
        expected.append(one.transpose(0, 1)[prompt:])
        begin += length
    expected = torch.cat(expected)
    torch.testing.assert_close(out[prompt:], expected, rtol=1e-4, atol=1e-4)
    expected_gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


def check_pack_and_linear_logprob() -> None:
    """Log-probabilities of packed responses against log_softmax of all logits."""
    batch = dualkv.pack([[3, 1], [4]], [[[5, 2], [6]], [[1, 0, 2]]])
    assert batch.input_ids.tolist() == [3, 1, 5, 2, 6, 4, 1, 0, 2]
    assert batch.target_ids.tolist() == [5, 2, 6, 1, 0, 2]
    hidden = torch.randn(len(batch.input_ids), 24, requires_grad=True)
    weight = torch.randn(7, 24, requires_grad=True)
    logprob, entropy = dualkv.linear_logprob(hidden, weight, batch.target_rows, batch.target_ids)

    all_logprobs = (hidden @ weight.T).log_softmax(-1)[batch.target_rows]
    expected = all_logprobs.gather(1, batch.target_ids[:, None])[:, 0]
    expected_entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    torch.testing.assert_close(logprob, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad((logprob + entropy).sum(), (hidden, weight)),
        torch.autograd.grad((expected + expected_entropy).sum(), (hidden, weight)),
        rtol=1e-4,
        atol=1e-4,
    )


if __name__ == "__main__":
    assert Path(dualkv.__file__).is_relative_to(sys.prefix), f"{dualkv.__file__} is not the installed package"
    check_attention()
    check_pack_and_linear_logprob()
    print(
        f"dualkv {dualkv.__version__} works with torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
