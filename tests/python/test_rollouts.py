"""Rollout files: the three kinds of line, errors that say where, tokens, advantages and longer prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dualkv.rollouts import (
    ByteTokenizer,
    Rollout,
    load_tokenizer,
    prepend_examples,
    read_examples,
    read_rollouts,
    tokenize,
)

GROUP = {"prompt": "1+1=", "responses": [{"text": "2", "reward": 1.0}, {"text": "3", "reward": 0}]}
TOKEN_GROUP = {"prompt_ids": [5, 6], "responses": [{"ids": [7], "reward": 1.0}, {"ids": [], "reward": -1}]}
SAMPLE = {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 3, "acc": True}


@pytest.fixture
def write(tmp_path):
    """write(line, ..): a file of these lines; objects become JSON, strings and bytes stay as they are."""

    def write(*lines) -> Path:
        path = tmp_path / "rollouts.jsonl"
        encoded = [json.dumps(line) if isinstance(line, (dict, list)) else line for line in lines]
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in encoded))
        return path

    return write


def test_text_groups(write):
    path = write({**GROUP, "id": 17}, "", {**GROUP, "prompt": "Grüße 🦆"}, "")
    assert read_rollouts(path) == [
        Rollout("1+1=", ["2", "3"], [1.0, 0.0]),
        Rollout("Grüße 🦆", ["2", "3"], [1.0, 0.0]),
    ]


def test_token_groups(write):
    assert read_rollouts(str(write(TOKEN_GROUP))) == [Rollout([5, 6], [[7], []], [1.0, -1.0])]


def test_verl_samples_are_grouped_by_step_and_input(write):
    samples = [
        SAMPLE,
        {**SAMPLE, "input": "2+2=", "output": "4"},
        {**SAMPLE, "output": "3", "score": 0.0},
        {**SAMPLE, "step": 4},
    ]
    assert read_rollouts(write(*samples)) == [
        Rollout("1+1=", ["2", "3"], [1.0, 0.0]),
        Rollout("2+2=", ["4"], [1.0]),
        Rollout("1+1=", ["2"], [1.0]),
    ]


def test_J5_verl_samples_are_grouped_by_uid_in_any_order(write):
    samples = [{**SAMPLE, "uid": uid, "output": str(n)} for n, uid in enumerate("abab")]
    assert [rollout.responses for rollout in read_rollouts(write(*samples))] == [["0", "2"], ["1", "3"]]


def test_verl_uid_with_two_prompts_is_refused(write):
    path = write({**SAMPLE, "uid": "a"}, {**SAMPLE, "uid": "a", "input": "2+2="})
    with pytest.raises(
        ValueError, match=r"line 2: uid 'a' has another 'input' than before: '2\+2=', not '1\+1='"
    ):
        read_rollouts(path)


def with_response(**changes):
    return {**GROUP, "responses": [GROUP["responses"][0], {**GROUP["responses"][1], **changes}]}


WRONG_LINES = {
    "cut off": (
        '{"prompt": "1+1=", "resp',
        r"line 2: not JSON, or cut off \(Unterminated string.*'{\"prompt\"",
    ),
    "not JSON": ("hello", r"line 2: not JSON, or cut off .*'hello'"),
    "nested deeply": ("[" * 100_000, r"line 2: not JSON, or cut off \(nested too deeply\)"),
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', r"line 2: not UTF-8 text"),
    "not an object": ([1, 2], r"line 2: expected a JSON object, got \[1, 2\]"),
    "no prompt": ({"responses": []}, r"line 2: 'responses' must be a list with at least one entry, got \[\]"),
    "other kind": (TOKEN_GROUP, r"line 2: no key 'prompt'; the keys are \['prompt_ids', 'responses'\]"),
    "prompt number": ({**GROUP, "prompt": 7}, r"line 2: 'prompt' must be a string, got 7"),
    "half surrogate": (
        '{"prompt": "\\ud83e", "responses": [{"text": "", "reward": 0}]}',
        r"line 2: 'prompt' holds half",
    ),
    "no responses": ({"prompt": "x"}, r"line 2: no key 'responses'; the keys are \['prompt'\]"),
    "responses object": ({**GROUP, "responses": {}}, r"line 2: 'responses' must be a list .* got {}"),
    "response string": (
        {**GROUP, "responses": ["2"]},
        r"line 2, responses\[0\]: expected a JSON object, got '2'",
    ),
    "text missing": ({**GROUP, "responses": [{"reward": 1}]}, r"line 2, responses\[0\]: no key 'text'"),
    "NaN reward": (
        with_response(reward=math.nan),
        r"line 2, responses\[1\]: 'reward' must be a finite number, got nan",
    ),
    "infinite reward": (with_response(reward=math.inf), r"'reward' must be a finite number, got inf"),
    "huge reward": (with_response(reward=10**400), r"'reward' must be a finite number, got 1000"),
    "text reward": (with_response(reward="1"), r"'reward' must be a finite number, got '1'"),
    "boolean reward": (with_response(reward=True), r"'reward' must be a finite number, got True"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_wrong_line_is_named(write, name):
    line, message = WRONG_LINES[name]
    path = write(GROUP, line)
    with pytest.raises(ValueError, match=message) as error:
        read_rollouts(path)
    assert str(error.value).startswith(str(path))
    assert type(error.value) is ValueError


@pytest.mark.parametrize("token", [-1, 1.5, "a", True, None, 2**31])
def test_wrong_token_id_is_named(write, token):
    path = write({"prompt_ids": [1, token], "responses": [{"ids": [3], "reward": 0}]})
    with pytest.raises(ValueError, match=r"line 1: 'prompt_ids' holds no token id at index 1, but "):
        read_rollouts(path)


def test_unknown_kind_of_line(write):
    with pytest.raises(
        ValueError, match=r"line 1: .*'prompt', 'prompt_ids' or \(veRL\) 'input'.*\['question'\]"
    ):
        read_rollouts(write({"question": "?"}))


def test_long_offending_values_are_shortened(write):
    with pytest.raises(ValueError) as error:
        read_rollouts(write({**GROUP, "prompt": list(range(10_000))}))
    assert len(str(error.value)) < 300


def test_missing_empty_and_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match="none.jsonl cannot be read: No such file"):
        read_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_rollouts(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="empty.jsonl is empty"):
        read_rollouts(tmp_path / "empty.jsonl")


def test_byte_tokens_frame_text_and_leave_token_ids():
    text, ids = tokenize([Rollout("é", ["ab", ""], [1, 0]), Rollout([1], [[2]], [0])], ByteTokenizer())
    assert text == Rollout([256, 0xC3, 0xA9], [[97, 98, 257], [257]], [1, 0])
    assert ids == Rollout([1], [[2]], [0])


def test_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="rollout 1 has no tokens"):
        tokenize([Rollout([1], [[2]], [0]), Rollout([], [[2]], [0])], ByteTokenizer())


def test_hugging_face_tokenizer_by_path(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "two": 2, "?": 3}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == 4
    assert tokenize([Rollout("two two", ["two"], [0])], tokenizer) == [Rollout([0, 2, 2], [[2, 1]], [0])]


def test_missing_tokenizer_is_named(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="no tokenizer could be read from .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_examples_lengthen_prompts_to_the_wanted_bytes(write):
    examples = read_examples(write({"question": "q1", "answer": "é1"}, {"question": "q2", "answer": "a2"}))
    assert examples == ["q1\né1\n\n", "q2\na2\n\n"]
    short, long = prepend_examples([Rollout("abc", ["x"], [0]), Rollout("y" * 30, ["x"], [0])], examples, 11)
    assert short.prompt == "q1\né1\n\nabc" and len(short.prompt.encode()) == 11
    assert long.prompt == "y" * 30
    assert prepend_examples([short], examples, 12)[0].prompt == examples[0] + short.prompt


def test_examples_that_do_not_suffice_are_refused():
    with pytest.raises(ValueError, match="rollout 0 has 5 bytes with all 1 examples, 6 are wanted"):
        prepend_examples([Rollout("ab", [], [])], ["xyz"], 6)
    with pytest.raises(ValueError, match="rollout 0 is token ids"):
        prepend_examples([Rollout([1], [], [])], ["xyz"], 6)


def test_examples_file_names_wrong_lines(write):
    with pytest.raises(ValueError, match="line 1: no key 'answer'"):
        read_examples(write({"question": "q"}))
