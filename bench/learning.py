"""GRPO and DAPO on the task of examples/train_grpo_trl.py, packed and with TRL's own trainer: rewards as they rise.

    PYTHONPATH=python python bench/learning.py [--steps 300 --seeds 0 1 2]
        [--output bench/results/cpu/learning.json]

A completion has at most two tokens here, and each generated batch serves two optimizer steps. With one token and
one step, as in the example, both algorithms would have the same loss: DAPO weighs tokens alike where GRPO weighs
completions alike, and clips ratios at 1.28 where GRPO clips them at 1.2.

A record's reward and token ratio are means over the steps since the record before it; its seconds are those of the
forward and backward passes of all steps so far, without the optimizer, generation and what goes with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from checkout import checked_out_commit
from transformers import PrinterCallback

from dualkv.integrations.trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_grpo_trl as task  # noqa: E402

ALGORITHMS = {
    "GRPO": {"loss_type": "grpo"},
    "DAPO": {"loss_type": "dapo", "epsilon_high": 0.28},
}
PROMPTS = 5  # of a step
RESPONSES = 8  # to each prompt
LOGGING_STEPS = 10
COLUMNS = ("reward", "token_ratio", "seconds")  # of a record, in the table


class Timed:
    """Counts the seconds of a trainer's forward and backward passes."""

    update_seconds = 0.0

    def training_step(self, *args, **kwargs):
        begin = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        self.update_seconds += time.perf_counter() - begin
        return loss

    def _prepare_inputs(self, *args, **kwargs):
        """Generation, rewards and the sampling policy's log-probs, which a training step may begin with."""
        begin = time.perf_counter()
        inputs = super()._prepare_inputs(*args, **kwargs)
        self.update_seconds -= time.perf_counter() - begin
        return inputs

    def log(self, logs, *args, **kwargs):
        super().log({**logs, "update_seconds": self.update_seconds}, *args, **kwargs)


class Packed(Timed, GRPOTrainer):
    pass


class Replicated(Timed, trl.GRPOTrainer):
    pass


TRAINERS = {"packed": Packed, "replicated": Replicated}


def make_trainer(algorithm: str, trainer: str, seed: int, steps: int, folder: str) -> trl.GRPOTrainer:
    config = trl.GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * RESPONSES,
        num_generations=RESPONSES,
        steps_per_generation=1,
        num_iterations=2,
        max_completion_length=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
        logging_steps=LOGGING_STEPS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **ALGORITHMS[algorithm],
    )
    torch.manual_seed(seed)
    made = TRAINERS[trainer](
        model=task.make_model(),
        reward_funcs=task.right_answer,
        args=config,
        train_dataset=task.make_questions(seed),
        processing_class=task.make_tokenizer(),
    )
    made.remove_callback(PrinterCallback)
    return made


def train(algorithm: str, trainer: str, seed: int, steps: int, commit: str | None = None) -> list[dict]:
    """The records of one training from scratch."""
    with tempfile.TemporaryDirectory() as folder:
        trained = make_trainer(algorithm, trainer, seed, steps, folder)
        trained.train()
    return [
        {
            "algorithm": algorithm,
            "trainer": trainer,
            "seed": seed,
            "step": entry["step"],
            "reward": entry["reward"],
            "token_ratio": entry.get("dualkv/token_ratio", 1.0),
            "seconds": entry["update_seconds"],
            "commit": commit,
        }
        for entry in trained.state.log_history
        if "reward" in entry
    ]


def summary(records: list[dict]) -> list[str]:
    """A line for each algorithm and trainer: means over the seeds, at the last step, and the spread of rewards."""
    last = max(record["step"] for record in records)
    lines = [f"{'':18}{'last reward':>22}{'token ratio':>14}{'seconds':>10}"]
    for algorithm in ALGORITHMS:
        for trainer in TRAINERS:
            runs = [
                record
                for record in records
                if (record["algorithm"], record["trainer"], record["step"]) == (algorithm, trainer, last)
            ]
            rewards, ratio, seconds = ([run[name] for run in runs] for name in COLUMNS)
            spread = f"{statistics.mean(rewards):.2f} ({min(rewards):.2f} to {max(rewards):.2f})"
            lines.append(
                f"{algorithm}, {trainer:12}{spread:>22}{statistics.mean(ratio):>14.2f}"
                f"{statistics.mean(seconds):>10.2f}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="a JSON file of records")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is so small that threads would wait for each other
    commit = checked_out_commit()
    records = []
    for seed in args.seeds:
        for algorithm in ALGORITHMS:
            for trainer in TRAINERS:  # side by side in time, so that what else the machine does meets both
                records += train(algorithm, trainer, seed, args.steps, commit)
                print(f"{algorithm}, {trainer}, seed {seed}: {records[-1]['reward']:.2f} at last", flush=True)
    print(*summary(records), sep="\n")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(record) for record in records)
        args.output.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
