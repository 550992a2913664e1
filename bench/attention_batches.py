"""The batches that attention is measured on, their useful work, and what is aimed at on an NVIDIA H200."""

from __future__ import annotations

import random
from dataclasses import dataclass

BACKWARD_WORK = 2.5  # that of the forward is 1: five products instead of two


@dataclass(frozen=True)
class Batch:
    name: str
    groups: list[tuple[int, list[int]]]  # a prompt's length and those of its responses
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    graphs: bool = False  # small enough for a CUDA graph to matter

    @property
    def tokens(self) -> int:
        return sum(prompt + sum(responses) for prompt, responses in self.groups)

    @property
    def pairs(self) -> float:
        """Pairs of a row and a key that it sees; a causal triangle of n rows counts n * n / 2."""
        return sum(
            prompt * prompt / 2 + sum(prompt * response + response * response / 2 for response in responses)
            for prompt, responses in self.groups
        )

    def useful_tflops(self, forward_ms: float, backward_ms: float | None = None) -> float:
        """The rate of the work that is left when no prompt is computed twice, whoever computes."""
        forward = 4 * self.head_dim * self.heads * self.pairs
        if backward_ms is None:
            return forward / forward_ms / 1e9
        return (1 + BACKWARD_WORK) * forward / (forward_ms + backward_ms) / 1e9


def _uniform(responses: int, prompt: int, response: int, **options) -> Batch:
    return Batch(f"{responses}, {prompt}, {response}", [(prompt, [response] * responses)], **options)


_RESPONSES = [
    *(1483, 1106, 1185, 1193, 457, 1940, 1655, 941, 1503, 1944, 1503, 731, 753, 1311, 1448, 1925),
    *(1432, 1866, 504, 379, 1588, 411, 152, 218, 918, 416, 1770, 1826, 1456, 378, 1575, 297),
]


def _random_groups(
    rng: random.Random, groups: int, prompt: tuple[int, int], responses: int, response: tuple[int, int]
) -> list[tuple[int, list[int]]]:
    return [(rng.randint(*prompt), [rng.randint(*response) for _ in range(responses)]) for _ in range(groups)]


_rng = random.Random(7)
_HEAD_DIM_64 = {"head_dim": 64, "heads": 64}

BATCHES = [
    _uniform(28, 4096, 2048),
    _uniform(28, 16384, 2048),
    _uniform(16, 32768, 2048),
    _uniform(8, 8192, 1024),
    _uniform(8, 1024, 256, graphs=True),
    _uniform(64, 512, 512, graphs=True),
    Batch("ragged A", [(8192, _RESPONSES[:16])]),
    Batch("ragged B", [(5059, _RESPONSES)]),
    Batch("8 groups C", _random_groups(_rng, 8, (300, 3000), 8, (20, 900))),
    Batch("16 groups D", _random_groups(_rng, 16, (100, 400), 16, (10, 200)), graphs=True),
    _uniform(16, 16384, 2048, **_HEAD_DIM_64),
    _uniform(8, 4096, 1024, **_HEAD_DIM_64),
]


# Table 1 of the paper (arXiv 2605.15422).
TABLE_1 = [*BATCHES[:3], _uniform(16, 65536, 2048)]
TABLE_1_SPEEDUPS = dict(zip([batch.name for batch in TABLE_1], ["1.65", "3.88", "5.48", "FA2 out of memory"]))

# Those of its comparison with prefix grouping, in one decoder layer: a prompt, and so many responses to it.
SINGLE_LAYER_PROMPTS = (5059, *(1024 << shift for shift in range(3, 11)))
SINGLE_LAYER_RESPONSES = (1, 2, 4, 8, 16, 32)
SINGLE_LAYER = [
    Batch(f"{prompt}, {count}", [(prompt, _RESPONSES[:count])])
    for prompt in SINGLE_LAYER_PROMPTS
    for count in SINGLE_LAYER_RESPONSES
]


@dataclass(frozen=True)
class Goal:
    """Useful TFLOP/s on a card on which the matrix product runs at GOAL_MATMUL_TFLOPS."""

    dualkv: float
    fa3_cascade: float  # quoted: FlashAttention-3 calls merged by log-sum-exp, measured on another day
    fa3_cascade_graph: float | None = None  # the same in a CUDA graph

    def reached(self, useful_tflops: float, matmul_tflops: float) -> float:
        """The share of the goal, on a card on which the matrix product runs at matmul_tflops."""
        return useful_tflops / (self.dualkv * matmul_tflops / GOAL_MATMUL_TFLOPS)


GOAL_MATMUL_TFLOPS = 752
FORWARD_GOALS = {
    "28, 4096, 2048": Goal(660, 595),
    "28, 16384, 2048": Goal(690, 651),
    "16, 32768, 2048": Goal(690, 643),
    "8, 8192, 1024": Goal(670, 616),
    "8, 1024, 256": Goal(380, 228, 286),
    "64, 512, 512": Goal(540, 243),
    "ragged A": Goal(690, 672),
    "ragged B": Goal(650, 583),
    "8 groups C": Goal(500, 358),
    "16 groups D": Goal(240, 111),
    "16, 16384, 2048": Goal(540, 500),
    "8, 4096, 1024": Goal(500, 404),
}
GOALS = {  # of forward and backward together
    "28, 4096, 2048": Goal(620, 553),
    "28, 16384, 2048": Goal(660, 605),
    "16, 32768, 2048": Goal(665, 616),
    "8, 8192, 1024": Goal(630, 574),
    "8, 1024, 256": Goal(350, 239, 281),
    "64, 512, 512": Goal(450, 266),
    "ragged A": Goal(650, 616),
    "ragged B": Goal(610, 544),
    "8 groups C": Goal(480, 361),
    "16 groups D": Goal(220, 109),
    "16, 16384, 2048": Goal(540, 515),
    "8, 4096, 1024": Goal(490, 441),
}


def have_backward(records: list[dict]) -> bool:
    """Whether what bench/attention.py has written is of forward and backward together."""
    return any("backward_ms" in record for record in records)


def goals_of(records: list[dict]) -> dict[str, Goal]:
    return GOALS if have_backward(records) else FORWARD_GOALS
