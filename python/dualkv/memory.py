"""MemoryModel: the memory of a step, fitted to a few measured ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from ._tensors import number


def _require_nonnegative(**values) -> None:
    for name, value in values.items():
        if not 0 <= number(value, name) < math.inf:
            raise ValueError(f"{name} must be a finite number >= 0, got {value}")


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a micro-batch, in the unit of what was measured: `base + prompt * P + response * N * R`
    for N responses of R tokens to one prompt of P tokens.

    Attributes:
        base: what does not depend on the micro-batch: weights, gradients, optimizer state.
        prompt: of a prompt token.
        response: of a response token, its logits included.
        error: of a fit, the largest relative error at a measured step of a fit to all other steps. 0 for
            coefficients that were not fitted.

    Raises:
        ValueError: one of them is not a finite number >= 0.
    """

    base: float
    prompt: float
    response: float
    error: float = 0.0

    def __post_init__(self) -> None:
        _require_nonnegative(base=self.base, prompt=self.prompt, response=self.response, error=self.error)

    @classmethod
    def fit(cls, prompt_tokens, response_tokens, memory) -> MemoryModel:
        """The nonnegative coefficients with the least sum of squared errors.

        Three steps are as a rule fitted exactly, which says nothing of the error. So at least four are needed,
        and each is predicted from the others, which gives `error`.

        Args:
            prompt_tokens: P of each measured step, [n]; the sum where a micro-batch has several prompts.
            response_tokens: N * R of each, the tokens of all responses, [n].
            memory: peak memory of each, [n], > 0.

        Raises:
            ValueError: the lists differ in length, have fewer than 4 entries, hold something that is no finite
                number >= 0, or do not tell the three coefficients apart, with any one of the steps left out:
                as steps that all have the same prompt, or all but one.
            TypeError: one of them is no list of numbers.
        """
        columns = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "memory": memory}
        columns = {name: _numbers(values, name) for name, values in columns.items()}
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
        if len(measured) < 4:
            raise ValueError(
                "prompt_tokens, response_tokens and memory must have at least 4 entries, so that each measured "
                f"step is checked by 3 others, got {len(measured)}"
            )
        terms = np.stack([np.ones_like(prompts), prompts, responses], axis=1)
        error = 0.0
        for i in range(len(measured)):
            others = np.arange(len(measured)) != i
            if not _tells_apart(terms[others]):
                raise ValueError(
                    "the measured steps must vary prompt_tokens and response_tokens independently, with any one "
                    f"of them left out; got {prompts.tolist()} and {responses.tolist()}, and left out {i}"
                )
            predicted = terms[i] @ _least_squares(terms[others], measured[others])
            error = max(error, abs(predicted / measured[i] - 1))
        return cls(*map(float, _least_squares(terms, measured)), error=float(error))

    def predict(self, prompt_tokens: float, response_tokens: float) -> float:
        """Peak memory of a micro-batch with these numbers of prompt and response tokens.

        Raises:
            ValueError: a number is not finite, or negative.
        """
        _require_nonnegative(prompt_tokens=prompt_tokens, response_tokens=response_tokens)
        return self.base + self.prompt * prompt_tokens + self.response * response_tokens

    def max_responses(self, limit: float, prompt_length: int, response_length: int) -> int:
        """Most responses of a length that one micro-batch can hold behind their prompt within the limit, to be
        chosen below the memory there is by at least `error`. 0 if not one fits.

        Raises:
            ValueError: a number is not finite, or negative, or responses cost nothing by the model, so that
                there is no limit.
        """
        _require_nonnegative(limit=limit, prompt_length=prompt_length, response_length=response_length)
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
            ValueError: the limit is not finite, or negative, or rows cost nothing by the model.
        """
        _require_nonnegative(limit=limit)
        each = max(self.prompt, self.response)
        if each <= 0:
            raise ValueError("a token must cost memory for a limit on their number, got 0 and 0")
        return max(0, int((limit - self.base) / each))


def _numbers(values, name: str) -> np.ndarray:
    if values is None:  # which numpy makes a NaN
        raise TypeError(f"{name} must be a list of numbers, got None")
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a list of numbers: {error}") from error


def _scale(terms: np.ndarray) -> np.ndarray:
    """Makes columns about the same size, for the rank and for the solution."""
    return np.maximum(terms.max(axis=0), 1)


def _tells_apart(terms: np.ndarray) -> bool:
    return np.linalg.matrix_rank(terms / _scale(terms)) == terms.shape[1]


def _least_squares(terms: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Nonnegative coefficients. There are three: every set of those that are not 0 is tried."""
    scale, solutions = _scale(terms), []
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        kept = list(kept)
        solution = np.zeros(3)
        solution[kept] = np.linalg.lstsq(terms[:, kept] / scale[kept], measured, rcond=None)[0] / scale[kept]
        if (solution >= 0).all():
            solutions.append(solution)
    return min(solutions, key=lambda solution: np.square(terms @ solution - measured).sum())
