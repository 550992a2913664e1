"""MemoryModel: the memory of a step, fitted to a few measured ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a micro-batch, in the unit of what was measured: `base + prompt * P + response * N * R`
    for N responses of R tokens to one prompt of P tokens.

    Attributes:
        base: what does not depend on the micro-batch: weights, gradients, optimizer state.
        prompt: of a prompt token.
        response: of a response token, its logits included.
        error: largest relative error of the fit at the steps that it was made from.
    """

    base: float
    prompt: float
    response: float
    error: float = 0.0

    @classmethod
    def fit(cls, prompt_tokens, response_tokens, memory) -> MemoryModel:
        """The nonnegative coefficients with the least sum of squared errors.

        Args:
            prompt_tokens: P of each measured step, [n]; the sum where a micro-batch has several prompts.
            response_tokens: N * R of each, the tokens of all responses, [n].
            memory: peak memory of each, [n], > 0.

        Raises:
            ValueError: the lists differ in length, hold something that is no finite number >= 0, or do not
                tell the three coefficients apart, as fewer than three steps do, or steps that all have the
                same prompt.
        """
        columns = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "memory": memory}
        columns = {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}
        for name, values in columns.items():
            if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(f"{name} must be a list of finite numbers >= 0, got {values.tolist()}")
        prompts, responses, measured = columns.values()
        if not len(prompts) == len(responses) == len(measured):
            raise ValueError(
                "prompt_tokens, response_tokens and memory must have as many entries, "
                f"got {len(prompts)}, {len(responses)} and {len(measured)}"
            )
        if (measured == 0).any():
            raise ValueError(f"memory must be > 0, got {measured.tolist()}")
        terms = np.stack([np.ones_like(prompts), prompts, responses], axis=1)
        # Columns of about the same size, for the rank and for the solution.
        scale = np.maximum(terms.max(axis=0, initial=0), 1)
        if np.linalg.matrix_rank(terms / scale) < 3:
            raise ValueError(
                "the measured steps must vary prompt_tokens and response_tokens independently, in at least 3 "
                f"steps; got {prompts.tolist()} and {responses.tolist()}"
            )
        # Three coefficients: every set of those that are not 0 is tried.
        solutions = []
        for kept in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
            kept = list(kept)
            solution = np.zeros(3)
            solution[kept] = (
                np.linalg.lstsq(terms[:, kept] / scale[kept], measured, rcond=None)[0] / scale[kept]
            )
            if (solution >= 0).all():
                solutions.append(solution)
        best = min(solutions, key=lambda solution: np.square(terms @ solution - measured).sum())
        error = np.abs(terms @ best / measured - 1).max()
        return cls(*map(float, best), error=float(error))

    def predict(self, prompt_tokens: float, response_tokens: float) -> float:
        """Peak memory of a micro-batch with these numbers of prompt and response tokens."""
        return self.base + self.prompt * prompt_tokens + self.response * response_tokens

    def max_responses(self, limit: float, prompt_length: int, response_length: int) -> int:
        """Most responses of a length that one micro-batch can hold behind their prompt within the limit, to be
        chosen below the memory there is by at least `error`. 0 if not one fits.

        Raises:
            ValueError: responses cost nothing by the model, so that there is no limit.
        """
        each = self.response * response_length
        if each <= 0:
            raise ValueError(
                "a response must cost memory for a limit on their number, got "
                f"{self.response} for a token and {response_length} tokens"
            )
        return max(0, int((limit - self.predict(prompt_length, 0)) / each))

    def max_tokens(self, limit: float) -> int:
        """`max_tokens` for `dualkv.schedule`: as many rows fit within the limit, whether they are of prompts or
        of responses. 0 if not one fits.

        Raises:
            ValueError: rows cost nothing by the model.
        """
        each = max(self.prompt, self.response)
        if each <= 0:
            raise ValueError("a token must cost memory for a limit on their number, got 0 and 0")
        return max(0, int((limit - self.base) / each))
