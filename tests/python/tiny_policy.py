"""A small policy on packed batches, and the same weights on each sequence by itself without the library."""

from __future__ import annotations

import torch

import dualkv
from reference import dense_attention

VOCAB = 23
_HEADS, _KV_HEADS, _DIM, _WIDTH = 4, 2, 8, 12


def random_tokens(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def random_groups(sizes, seed: int = 0):
    """prompts and responses of groups: for each a prompt length and the lengths of its responses."""
    generator = torch.Generator().manual_seed(seed)
    return (
        [random_tokens(prompt, generator) for prompt, _ in sizes],
        [[random_tokens(length, generator) for length in lengths] for _, lengths in sizes],
    )


class TinyPolicy:
    """Two attention layers between an embedding with positions and a head. Batches may stay on the CPU."""

    def __init__(self, dtype=torch.float64, seed: int = 0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape):
            x = torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
            return x.to(device, dtype).requires_grad_()

        self.embedding, self.head = weight(VOCAB, _WIDTH), weight(VOCAB, _WIDTH)
        self.layers = [
            (weight(_WIDTH, (_HEADS + 2 * _KV_HEADS) * _DIM), weight(_HEADS * _DIM, _WIDTH)) for _ in range(2)
        ]

    def to(self, dtype, device="cpu") -> TinyPolicy:
        """A policy with the same weights, converted."""
        policy = TinyPolicy(dtype, device=device)
        with torch.no_grad():
            for weight, own in zip(policy.weights, self.weights):
                weight.copy_(own)
        return policy

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.embedding, self.head, *(weight for layer in self.layers for weight in layer)]

    def hidden(self, input_ids, position_ids, attend) -> torch.Tensor:
        angles = position_ids[:, None] * torch.linspace(0.1, 1.0, _WIDTH, dtype=torch.float64)
        x = self.embedding[input_ids.to(self.embedding.device)] + torch.sin(angles).to(self.embedding)
        for project_in, project_out in self.layers:
            heads = (x @ project_in).view(len(x), _HEADS + 2 * _KV_HEADS, _DIM)
            q, k, v = heads.split([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
            x = x + torch.tanh(attend(q, k, v).flatten(1) @ project_out)
        return x

    def logprobs(self, batch) -> torch.Tensor:
        """Log-probs [M] of a packed batch, by the library."""
        hidden = self.hidden(
            batch.input_ids, batch.position_ids, lambda q, k, v: dualkv.attention(q, k, v, batch.forest)
        )
        return dualkv.linear_logprob(hidden, self.head, batch.target_rows, batch.target_ids)[0]

    def replicated_logprobs(self, prompts, responses) -> torch.Tensor:
        """Log-probs [M] from every sequence [prompt, response] by itself, without the library."""
        logprobs = [self.head.new_zeros(0)]
        for prompt, group in zip(prompts, responses):
            for response in group:
                ids = torch.tensor([*prompt, *response])
                hidden = self.hidden(
                    ids,
                    torch.arange(len(ids)),
                    lambda q, k, v: dense_attention(q, k, v, scale=_DIM**-0.5)[0],
                )
                wide = torch.promote_types(hidden.dtype, torch.float32)
                logits = hidden[len(prompt) - 1 : len(ids) - 1].to(wide) @ self.head.t().to(wide)
                targets = ids[len(prompt) :, None].to(logits.device)
                logprobs.append(logits.log_softmax(1).gather(1, targets)[:, 0])
        return torch.cat(logprobs)

    def gradients(self, loss) -> list[torch.Tensor]:
        return torch.autograd.grad(loss, self.weights)


def assert_close(found, expected, tolerance=1e-12, message="") -> None:
    """Error at most `tolerance` of the largest expected value; for lists of tensors, of the largest of all."""
    found, expected = ([x] if isinstance(x, torch.Tensor) else x for x in (found, expected))
    assert [x.shape for x in found] == [x.shape for x in expected], message
    size = max((x.abs().max().item() for x in expected if x.numel() > 0), default=0.0)
    for i, (x, right) in enumerate(zip(found, expected)):
        error = (x - right).abs().max().item() if x.numel() > 0 else 0.0
        assert error <= tolerance * size, f"tensor {i}: error {error} > {tolerance} x {size}; {message}"
