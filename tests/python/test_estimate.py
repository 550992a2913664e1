"""The program `dualkv estimate`: its figures and the files it takes agree with the Python package."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

import dualkv
from dualkv import _library
from dualkv.rollouts import ByteTokenizer, read_rollouts, tokenize
from test_rollouts import GROUP, SAMPLE, TOKEN_GROUP, WRONG_LINES

ROOT = Path(__file__).parents[2]
ROLLOUTS = ROOT / "examples/data/rollouts.jsonl"
PROGRAM = _library.find().with_name("dualkv")

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason=f"{PROGRAM} was not built")


def run(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [PROGRAM, *map(str, arguments)], capture_output=True, timeout=60, encoding="utf-8", **options
    )


def estimate(*arguments, **options) -> dict:
    result = run("estimate", "--json", *arguments, **options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def pack(rollouts) -> dualkv.PackedBatch:
    return dualkv.pack([rollout.prompt for rollout in rollouts], [rollout.responses for rollout in rollouts])


def test_hand_computed_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    responses = [{"text": "2", "reward": 1.0}, {"text": "33", "reward": 0}]
    path.write_text(json.dumps({"prompt": "1+1=", "responses": responses}))
    figures = {
        "groups": 1,
        "responses": 2,
        "bytes_per_token": 1.0,
        "window_left": None,
        "replicated_tokens": 11,
        "packed_tokens": 7,
        "token_ratio": 11 / 7,
        "replicated_pairs": 15 + 21,
        "packed_pairs": 10 + 5 + 5 + 6,
        "attention_ratio": 36 / 26,
        "histogram": [{"begin": 4, "end": 5, "groups": 1}],
        "micro_batches": None,
    }
    assert estimate(path) == figures
    assert list(estimate(path)) == list(figures)
    assert estimate(path, "--window-left", 0)["packed_pairs"] == 7
    assert estimate(path, "--bytes-per-token", 2.0)["packed_tokens"] == 2 + 1 + 1
    assert estimate(path, "--micro-batch-size", 1)["micro_batches"] == {
        "size": 1,
        "count": 2,
        "replicated_tokens": 11,
        "packed_tokens": 11,
        "token_ratio": 1.0,
        "replicated_pairs": 36,
        "packed_pairs": 36,
        "attention_ratio": 1.0,
    }


def test_figures_are_those_of_packed_batches():
    figures = estimate(ROLLOUTS, "--window-left", 700)
    tokenizer = ByteTokenizer()
    rollouts = read_rollouts(ROLLOUTS)
    encoded = [
        dualkv.rollouts.Rollout(
            tokenizer.encode(rollout.prompt), list(map(tokenizer.encode, rollout.responses)), rollout.rewards
        )
        for rollout in rollouts
    ]
    batch = pack(encoded)
    assert figures["packed_tokens"] == batch.num_tokens
    assert figures["replicated_tokens"] == batch.replicated_tokens
    assert figures["token_ratio"] == batch.token_ratio
    assert figures["packed_pairs"] == batch.forest.visible_pairs(700)
    roots = [len(rollout.prompt) + len(response) for rollout in encoded for response in rollout.responses]
    replicated = dualkv.SegmentForest.from_segments(roots, [-1] * len(roots))
    assert figures["replicated_pairs"] == replicated.visible_pairs(700)
    # The demo's tokenizer puts a token in front of each prompt and one behind each response.
    framed = pack(tokenize(rollouts, tokenizer))
    assert framed.num_tokens == figures["packed_tokens"] + figures["groups"] + figures["responses"]
    assert framed.replicated_tokens == figures["replicated_tokens"] + 2 * figures["responses"]


def test_micro_batches_are_those_of_the_packed_layout(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples")
    from policy_step import Job, PackedLayout

    rollouts = read_rollouts(ROLLOUTS)
    prompts = [list(rollout.prompt.encode()) for rollout in rollouts]
    responses = [[list(text.encode()) for text in rollout.responses] for rollout in rollouts]
    for size in (1, 3, 8, 20, 1000):
        layout = PackedLayout(Job(prompts, responses, [], None, size, {}))
        forests = [layout.pack(samples).forest for samples in layout.micro_batches()]
        figures = estimate(ROLLOUTS, "--micro-batch-size", size)["micro_batches"]
        assert figures["count"] == len(forests)
        assert figures["packed_tokens"] == sum(forest.total_tokens for forest in forests)
        assert figures["packed_pairs"] == sum(forest.visible_pairs() for forest in forests)


def test_token_ids_and_standard_input():
    figures = estimate("-", "--bytes-per-token", 4, input=json.dumps(TOKEN_GROUP))
    assert (figures["packed_tokens"], figures["bytes_per_token"]) == (3, None)
    result = run("estimate", "-", input="\n{}")
    assert result.returncode == 2
    assert result.stderr.startswith("<stdin>:2: a rollout has the key 'prompt'")


def test_text_output():
    result = run("estimate", ROLLOUTS, "--micro-batch-size", 8)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[:2] == [
        "8 groups, 64 responses",
        "bytes per token: 1 (--bytes-per-token); special tokens are not counted",
    ]
    assert [line.split() for line in lines[3:6]] == [
        ["replicated", "packed", "ratio"],
        ["tokens", "75,477", "22,382", "3.37x"],
        ["attention", "pairs", "45,029,870", "19,832,460", "2.27x"],
    ]
    assert lines[7] == "in 8 micro-batches of at most 8 responses"
    assert lines[-1].split() == ["950", "to", "999", "2", "#" * 14]


def test_the_readme_shows_this_output():
    readme = (ROOT / "README.md").read_text()
    command = "build/dualkv estimate examples/data/rollouts.jsonl"
    assert command in readme
    assert run("estimate", ROLLOUTS).stdout in readme


@pytest.mark.parametrize("name", WRONG_LINES)
def test_wrong_line_is_named(tmp_path, name):
    path = tmp_path / "rollouts.jsonl"
    line = WRONG_LINES[name][0]
    line = json.dumps(line) if isinstance(line, (dict, list)) else line
    path.write_bytes(
        json.dumps(GROUP).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode())
    )
    result = run("estimate", path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{path}:2: ")
    assert result.stderr.count("\n") == 1


def test_files_that_cannot_be_read(tmp_path):
    for path, reason in {"none": "No such file or directory", ".": "Is a directory"}.items():
        result = run("estimate", path, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (2, f"{path}: cannot be read: {reason}\n")
    (tmp_path / "empty").touch()
    result = run("estimate", "empty", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "empty: is empty: expected one JSON object a line\n")


@pytest.mark.parametrize("seed", range(150))
def test_takes_the_files_that_python_takes(tmp_path, seed):
    """Lines with one or two of their words exchanged: wrong, or right in an unusual way."""
    rng = random.Random(seed)
    words = [
        b"NaN",
        b"-Infinity",
        b"null",
        b"1e3",
        b"-0",
        b"[]",
        b"{}",
        b'""',
        b'"',
        b"\\",
        b"\xff",
        b" ",
        b",",
        b"\n",
    ]
    line = json.dumps({**rng.choice([GROUP, TOKEN_GROUP, SAMPLE]), "uid": 1, "not read": {"a": 2, "b": 3}})
    exchanged = re.findall(rb'"[^"]*"|[\d.]+|\S|\n', f"{line}\n{line}".encode())
    for _ in range(rng.randint(1, 2)):
        exchanged[rng.randrange(len(exchanged))] = rng.choice(words)
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(exchanged))
    result = run("estimate", path, "--json")
    try:
        rollouts = read_rollouts(path)
    except ValueError as error:
        assert (result.returncode, result.stdout) == (2, ""), error
    else:
        assert result.returncode == 0, result.stderr
        responses = sum(len(rollout.responses) for rollout in rollouts)
        figures = json.loads(result.stdout)
        assert (figures["groups"], figures["responses"]) == (len(rollouts), responses)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "A subcommand is required"),
        (["estimate"], "FILE is required"),
        (["estimate", ROLLOUTS, "--micro-batch-size", 0], "--micro-batch-size: Value 0 not in range 1 to"),
        (["estimate", ROLLOUTS, "--window-left", -1], "--window-left: Value -1 not in range 0 to"),
        (
            ["estimate", ROLLOUTS, "--bytes-per-token", "0.5"],
            "--bytes-per-token: must be a number from 1 to 1000",
        ),
        (
            ["estimate", ROLLOUTS, "--bytes-per-token", "nan"],
            "--bytes-per-token: must be a number from 1 to 1000",
        ),
        (["estimate", ROLLOUTS, "--bytes-per-token", "x"], "Could not convert: --bytes-per-token = x"),
        (["estimate", ROLLOUTS, "--color"], "The following argument was not expected: --color"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message)


def test_help_and_version():
    assert run("--version").stdout == f"dualkv {dualkv.__version__}\n"
    assert "estimate" in run("--help").stdout
    text = run("estimate", "--help")
    assert text.returncode == 0
    for option in ("FILE", "--json", "--bytes-per-token X", "--window-left N", "--micro-batch-size N"):
        assert option in text.stdout


def test_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [PROGRAM, "estimate", ROLLOUTS], stdout=full, stderr=subprocess.PIPE, encoding="utf-8"
        )
    assert (result.returncode, result.stderr) == (2, "dualkv: standard output cannot be written\n")
