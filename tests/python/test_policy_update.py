"""examples/policy_update.py: an update that no layout changes, a run end to end, its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dualkv

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import policy_step  # noqa: E402
from policy_step import ALGORITHMS, LAYOUTS, Job  # noqa: E402

TINY = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
}
TINY_OPTIONS = (
    "--hidden-size 16 --intermediate-size 16 --layers 1 --heads 2 --kv-heads 1 --head-dim 8 --threads 1"
)


def make_job(
    algorithm: str = "grpo", micro_batch_size: int = 8, sizes=((5, (4, 1, 6, 2)), (3, (2, 0, 3)))
) -> Job:
    """Random groups: for each a prompt length and the lengths of its responses."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length):
        return torch.randint(TINY["vocab_size"], (length,), generator=generator).tolist()

    return Job(
        prompts=[tokens(prompt) for prompt, _ in sizes],
        responses=[[tokens(length) for length in lengths] for _, lengths in sizes],
        advantages=[torch.randn(len(lengths), generator=generator).tolist() for _, lengths in sizes],
        algorithm=ALGORITHMS[algorithm],
        micro_batch_size=micro_batch_size,
        model=TINY,
    )


def run(layout_name: str, job: Job) -> policy_step.Result:
    layout = LAYOUTS[layout_name](job)
    model = policy_step.load_model(job)
    layout.prepare_model(model)
    return policy_step.run_update(model, layout, job, lambda *event: None)


def assert_same_update(actual, expected, tolerance):
    assert abs(actual.loss - expected.loss) <= tolerance
    torch.testing.assert_close(actual.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
    largest = max(gradient.abs().max() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = (actual.gradients[name] - gradient).abs().max() / largest
        assert error <= tolerance, f"{name}: {error:.2e} of the largest gradient"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ["roots", "packed"])
def test_layouts_give_the_update_of_the_padded_one(layout, algorithm):
    job = make_job(algorithm, micro_batch_size=4)
    assert_same_update(run(layout, job), run("padded", job), 1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_K3_update_does_not_depend_on_how_the_batch_is_cut(algorithm):
    whole = run("packed", make_job(algorithm, micro_batch_size=100))
    assert whole.micro_batches == 1
    for size in (1, 2, 3, 4):
        assert_same_update(run("packed", make_job(algorithm, micro_batch_size=size)), whole, 1e-6)


def test_J4_split_group_has_the_gradient_of_the_whole_group():
    job = make_job(micro_batch_size=3, sizes=((6, (4, 2, 5, 3)),))
    layout = LAYOUTS["packed"](job)
    assert layout.micro_batches() == [[(0, 0), (0, 1), (0, 2)], [(0, 3)]]
    split, whole = run("packed", job), run("packed", replace(job, micro_batch_size=4))
    assert (split.tokens, whole.tokens) == (6 + 11 + 6 + 3, 6 + 14)
    assert_same_update(split, whole, 1e-6)


def test_whole_groups_share_a_micro_batch_where_they_fit():
    job = make_job(micro_batch_size=4, sizes=((2, (1, 1)), (2, (1,)), (2, (1, 1)), (2, (1,) * 5)))
    groups = [[group for group, _ in samples] for samples in LAYOUTS["packed"](job).micro_batches()]
    assert groups == [[0, 0, 1], [2, 2], [3, 3, 3, 3], [3]]


def test_token_mean_and_sequence_mean():
    """Two responses of 1 and 3 tokens, on policy, with advantages 1 and 2."""
    job = replace(make_job(sizes=((2, (1, 3)),)), advantages=[[1.0, 2.0]])
    log_probs = torch.zeros(4)
    samples = job.samples
    assert policy_step.policy_loss(job, samples, log_probs, log_probs).item() == pytest.approx(-(1 + 2) / 2)
    job = replace(job, algorithm=ALGORITHMS["dapo"])
    assert policy_step.policy_loss(job, samples, log_probs, log_probs).item() == pytest.approx(
        -(1 + 3 * 2) / 4
    )


@pytest.mark.parametrize("algorithm,upper", [("grpo", 1.2), ("dapo", 1.28)])
def test_ratio_is_clipped_on_the_side_that_the_advantage_favours(algorithm, upper):
    job = make_job(algorithm, sizes=((2, (1,)),))
    for ratio, advantage, expected in (
        (1.5, 1.0, upper),
        (0.5, 1.0, 0.5),
        (1.5, -1.0, -1.5),
        (0.5, -1.0, -0.8),
    ):
        job = replace(job, advantages=[[advantage]])
        loss = policy_step.policy_loss(job, job.samples, torch.tensor([ratio]).log(), torch.zeros(1))
        assert loss.item() == pytest.approx(-expected)


def test_ratio_is_exactly_one_on_policy():
    job = make_job(micro_batch_size=3)
    layout, model = LAYOUTS["packed"](job), policy_step.load_model(job)
    layout.prepare_model(model)
    for samples in layout.micro_batches():
        with torch.no_grad():
            old = layout.log_probs(model, samples)
        assert torch.equal(layout.log_probs(model, samples), old)


def run_example(tmp_path, *options) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        EXAMPLES / "policy_update.py",
        *TINY_OPTIONS.split(),
        "--output",
        tmp_path / "out",
    ]
    # The package as this process found it: from the source tree or installed.
    env = {**os.environ, "PYTHONPATH": str(Path(dualkv.__file__).parents[1])}
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize(
    "options",
    [
        ("--algorithm", "grpo", "--micro-batch-size", "3"),
        ("--algorithm", "dapo", "--baseline", "dualkv", "--dtype", "bfloat16", "--few-shot", "EXAMPLES"),
    ],
    ids=["grpo", "dapo"],
)
def test_run_end_to_end(tmp_path, options):
    examples = tmp_path / "examples.jsonl"
    examples.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    options = [examples if option == "EXAMPLES" else option for option in options]
    if examples in options:
        options += ["--prefix-bytes", "940"]
    done = run_example(tmp_path, "--groups", "2", "--group-size", "5", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Gradients agree" in done.stdout and "Speed-up" in done.stdout
    report = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (
        report["agreement"]["agrees"] and report["agreement"]["gradient"] <= report["agreement"]["tolerance"]
    )
    assert report["token_ratio"] == report["replicated"]["tokens"] / report["packed"]["tokens"] > 1.5
    for mode in ("replicated", "packed"):
        seconds = report[mode]["seconds"]
        assert set(seconds) == {*policy_step.PHASES, "total"} and all(value > 0 for value in seconds.values())
        assert report[mode]["loaded_mib"] > 0 and report[mode]["peak_mib"] > 0
    assert set(report["speedup"]) == {*policy_step.PHASES, "total"}
    assert (tmp_path / "out" / "policy_update.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoint_and_token_ids(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=16, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    rollouts = tmp_path / "ids.jsonl"
    responses = [{"ids": [4, 5], "reward": 1.0}, {"ids": [39], "reward": 0.0}]
    rollouts.write_text(json.dumps({"prompt_ids": [1, 2, 3], "responses": responses}) + "\n")
    done = run_example(tmp_path, "--model", tmp_path / "model", "--rollouts", rollouts)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (report["replicated"]["tokens"], report["packed"]["tokens"]) == (9, 6)

    responses[0]["ids"] = [40]
    rollouts.write_text(json.dumps({"prompt_ids": [1, 2, 3], "responses": responses}) + "\n")
    done = run_example(tmp_path, "--model", tmp_path / "model", "--rollouts", rollouts)
    assert_refused(done, "has 40 tokens, but the rollouts use 40")


def assert_refused(done: subprocess.CompletedProcess, message: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Faulty rollout files by name."""
    folder = tmp_path_factory.mktemp("faulty")
    equal = {"prompt": "x", "responses": [{"text": "a", "reward": 1.0}, {"text": "b", "reward": 1.0}]}
    empty = {"prompt_ids": [1], "responses": [{"ids": [], "reward": 1.0}, {"ids": [], "reward": 0.0}]}
    for name, text in {"equal": json.dumps(equal), "empty": json.dumps(empty), "cut": '{"prompt": "'}.items():
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize(
    "options,message",
    [
        (["--groups", "0"], "argument --groups: must be 1 or more, got 0"),
        (["--groups", "x"], "argument --groups: invalid positive value: 'x'"),
        (["--groups", "9"], "--groups asks for 9, but"),
        (["--group-size", "9"], "--group-size asks for 9, but a group has only 8 responses"),
        (["--prefix-bytes", "900"], "--few-shot and --prefix-bytes are used together"),
        (["--few-shot", "none.jsonl", "--prefix-bytes", "900"], "none.jsonl cannot be read: No such file"),
        (["--algorithm", "ppo"], "argument --algorithm: invalid choice: 'ppo'"),
        (["--heads", "3", "--kv-heads", "2"], "--heads 3 must be a multiple of --kv-heads 2"),
        (["--head-dim", "33"], "--head-dim must be even and at most 512, got 33"),
        (["--seed", "-1"], "must be 0 to 2^63 - 1, got -1"),
        (["--model", "nowhere"], "--model must be a folder with a checkpoint, got nowhere"),
        (["--tokenizer", "nowhere"], "no tokenizer could be read from 'nowhere'"),
        (["--rollouts", "none.jsonl"], "none.jsonl cannot be read: No such file"),
        (["--rollouts", "FAULTY/cut.jsonl"], "cut.jsonl, line 1: not JSON, or cut off"),
        (["--rollouts", "FAULTY/empty.jsonl"], "empty.jsonl are empty: there is no token to score"),
        # K5, J8: nothing is left after dynamic sampling.
        (["--rollouts", "FAULTY/equal.jsonl", "--algorithm", "dapo"], "nothing is left to learn from"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_and_files_are_refused(options, message, faulty, capsys, monkeypatch, tmp_path):
    import policy_update

    monkeypatch.chdir(tmp_path)
    options = [option.replace("FAULTY", str(faulty)) for option in options]
    with pytest.raises(SystemExit) as exit:
        policy_update.main(options)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_refusal_on_the_command_line_has_no_traceback(tmp_path):
    assert_refused(run_example(tmp_path, "--rollouts", tmp_path / "none.jsonl"), "none.jsonl cannot be read")


def test_K5_equal_rewards_give_zero_loss_and_gradients_with_grpo():
    job = replace(make_job(), advantages=[[0.0] * 4, [0.0] * 3])
    result = run("packed", job)
    assert result.loss == 0.0
    assert all(not gradient.any() for gradient in result.gradients.values())


def test_example_rollouts_are_what_their_script_writes(tmp_path):
    subprocess.run(
        [sys.executable, EXAMPLES.parent / "tools" / "make_rollouts.py", tmp_path / "made"], check=True
    )
    assert (tmp_path / "made").read_bytes() == (EXAMPLES / "data" / "rollouts.jsonl").read_bytes()
