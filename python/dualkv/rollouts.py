"""Rollout files: groups of sampled responses with rewards, as JSON lines.

`read_rollouts` knows three kinds of line; a file holds one kind:

    {"prompt": "..", "responses": [{"text": "..", "reward": 1.0}, ..]}              a group, as text
    {"prompt_ids": [1, 2], "responses": [{"ids": [3, 4], "reward": 1.0}, ..]}       a group, as token ids
    {"input": "..", "output": "..", "score": 1.0, "step": 3, ..}                    one sample of veRL's
                                                                                    trainer.rollout_data_dir

veRL writes a line for each sample. Samples of the same step with the same `uid` make a group, or with the
same `input` text where the lines have no uid. Other keys are ignored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

Tokens = list[int]
TextOrTokens = Union[str, Tokens]

_SHOWN_CHARACTERS = 60  # of an offending value, in a message


@dataclass(frozen=True)
class Rollout:
    """One group: a prompt and the N responses sampled from it.

    Attributes:
        prompt: text or token ids.
        responses: [N], texts or token ids like the prompt.
        rewards: [N], finite.
    """

    prompt: TextOrTokens
    responses: list[TextOrTokens]
    rewards: list[float]


class ByteTokenizer:
    """The UTF-8 bytes of a text as token ids 0 to 255, with a beginning (256) and an end (257) token.

    Has the part of a Hugging Face tokenizer's interface that `tokenize` uses.
    """

    bos_token_id = 256
    eos_token_id = 257

    def __len__(self) -> int:
        return 258

    def encode(self, text: str, add_special_tokens: bool = False) -> Tokens:
        tokens = list(text.encode("utf-8"))
        return [self.bos_token_id, *tokens, self.eos_token_id] if add_special_tokens else tokens


def load_tokenizer(path: str | Path | None = None):
    """The Hugging Face tokenizer saved at `path`, or a `ByteTokenizer` for None.

    Raises:
        ValueError: there is no tokenizer at `path`.
    """
    if path is None:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no tokenizer could be read from {str(path)!r}: {error}") from error


def tokenize(rollouts: Sequence[Rollout], tokenizer) -> list[Rollout]:
    """The rollouts as token ids; those that are token ids already stay as they are.

    A prompt gets the tokenizer's beginning token in front, if it has one; a response gets its end token,
    since the sampled text ended there.

    Raises:
        ValueError: a prompt has no tokens; names the rollout.
    """

    def prompt_tokens(text: str) -> Tokens:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        bos = tokenizer.bos_token_id
        return tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]

    def response_tokens(text: str) -> Tokens:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        eos = tokenizer.eos_token_id
        return tokens if eos is None or tokens[-1:] == [eos] else [*tokens, eos]

    result = []
    for index, rollout in enumerate(rollouts):
        if isinstance(rollout.prompt, str):
            rollout = replace(
                rollout,
                prompt=prompt_tokens(rollout.prompt),
                responses=[response_tokens(text) for text in rollout.responses],
            )
        if not rollout.prompt:
            raise ValueError(f"the prompt of rollout {index} has no tokens: nothing predicts its responses")
        result.append(rollout)
    return result


def read_examples(path: str | Path) -> list[str]:
    """Worked examples for `prepend_examples`, from JSON lines `{"question": "..", "answer": ".."}`.

    Raises:
        ValueError: as `read_rollouts`.
    """
    return [f"{line.text('question')}\n{line.text('answer')}\n\n" for line in _read_lines(path)]


def prepend_examples(
    rollouts: Sequence[Rollout], examples: Sequence[str], prompt_bytes: int
) -> list[Rollout]:
    """Puts worked examples in front of each prompt until it has `prompt_bytes` bytes.

    Every prompt takes the examples in the same order, from the first on. A prompt that is long enough
    stays as it is.

    Raises:
        ValueError: a prompt is not text, or all examples together are too short.
    """
    result = []
    for index, rollout in enumerate(rollouts):
        if not isinstance(rollout.prompt, str):
            raise ValueError(f"the prompt of rollout {index} is token ids: examples go before text only")
        prefix, size = "", len(rollout.prompt.encode())
        for example in examples:
            if size >= prompt_bytes:
                break
            prefix += example
            size += len(example.encode())
        if size < prompt_bytes:
            raise ValueError(
                f"the prompt of rollout {index} has {size} bytes with all {len(examples)} examples, "
                f"{prompt_bytes} are wanted"
            )
        result.append(replace(rollout, prompt=prefix + rollout.prompt))
    return result


def read_rollouts(path: str | Path) -> list[Rollout]:
    """Reads a rollout file; the kinds of line are described at the top of this module.

    Raises:
        ValueError: the file is missing, empty or not readable, or a line of it is cut off, not JSON, lacks a
            key or has a value of the wrong kind; names the file, the line and the offending value.
    """
    lines = _read_lines(path)
    if "prompt" in lines[0].values:
        return [_text_group(line) for line in lines]
    if "prompt_ids" in lines[0].values:
        return [_token_group(line) for line in lines]
    if "input" in lines[0].values:
        return _verl_groups(lines)
    raise lines[0].fault(
        "a rollout has the key 'prompt', 'prompt_ids' or (veRL) 'input', but the keys are "
        + _shorten(list(lines[0].values))
    )


class _Record:
    """A JSON object and the place where it stands; reads its values, and names one that is wrong."""

    def __init__(self, place: str, values: Any):
        self.place = place
        self.values = values
        if not isinstance(values, dict):
            raise self.fault(f"expected a JSON object, got {_shorten(values)}")

    def fault(self, message: str) -> ValueError:
        return ValueError(f"{self.place}: {message}")

    def value(self, key: str) -> Any:
        if key not in self.values:
            raise self.fault(f"no key {key!r}; the keys are {_shorten(list(self.values))}")
        return self.values[key]

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self.fault(f"{key!r} must be a string, got {_shorten(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.fault(f"{key!r} holds half a surrogate pair: {_shorten(value)}") from error
        return value

    def tokens(self, key: str) -> Tokens:
        value = self.value(key)
        if not isinstance(value, list):
            raise self.fault(f"{key!r} must be a list of token ids, got {_shorten(value)}")
        for index, token in enumerate(value):
            if type(token) is not int or not 0 <= token < 2**31:
                raise self.fault(f"{key!r} holds no token id at index {index}, but {_shorten(token)}")
        return value

    def number(self, key: str) -> float:
        value = self.value(key)
        # The comparison is false for NaN, and works for integers that no float can hold.
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise self.fault(f"{key!r} must be a finite number, got {_shorten(value)}")
        return float(value)

    def records(self, key: str) -> list[_Record]:
        value = self.value(key)
        if not isinstance(value, list) or not value:
            raise self.fault(f"{key!r} must be a list with at least one entry, got {_shorten(value)}")
        return [_Record(f"{self.place}, {key}[{index}]", entry) for index, entry in enumerate(value)]


def _read_lines(path: str | Path) -> list[_Record]:
    """The JSON objects of a file, one a line; blank lines are skipped."""
    lines = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    lines.append(_Record(place, _parse(place, line)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not lines:
        raise ValueError(f"{path} is empty: expected one JSON object a line")
    return lines


def _parse(place: str, line: bytes) -> Any:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text: {_shorten(line)}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
        raise ValueError(f"{place}: not JSON, or cut off ({reason}): {_shorten(text.strip())}") from error


def _text_group(line: _Record) -> Rollout:
    responses = line.records("responses")
    return Rollout(
        line.text("prompt"), [r.text("text") for r in responses], [r.number("reward") for r in responses]
    )


def _token_group(line: _Record) -> Rollout:
    responses = line.records("responses")
    return Rollout(
        line.tokens("prompt_ids"),
        [r.tokens("ids") for r in responses],
        [r.number("reward") for r in responses],
    )


def _verl_groups(lines: Sequence[_Record]) -> list[Rollout]:
    groups: dict[str, Rollout] = {}
    for line in lines:
        prompt = line.text("input")
        uid = line.values.get("uid")
        key = repr((line.values.get("step"), prompt if uid is None else uid))
        group = groups.setdefault(key, Rollout(prompt, [], []))
        if group.prompt != prompt:
            raise line.fault(
                f"uid {uid!r} has another 'input' than before: {_shorten(prompt)}, not "
                f"{_shorten(group.prompt)}"
            )
        group.responses.append(line.text("output"))
        group.rewards.append(line.number("score"))
    return list(groups.values())


def _shorten(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 2] + ".."
