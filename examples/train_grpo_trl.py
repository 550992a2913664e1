#!/usr/bin/env python3
"""GRPO from scratch with TRL and packed passes: a tiny model learns to count, from rewards alone.

A prompt is a sheet of examples, such as `after 3 4 ;`, and then a question: `after 7`. The reward is 1 for the right
number and 0 for anything else; guessing gets less than 0.1. The model has random weights, so nothing is downloaded.

    python examples/train_grpo_trl.py                 # about a minute on a CPU
    python examples/train_grpo_trl.py --stock         # the same with TRL's own trainer
    python examples/train_grpo_trl.py --device cuda   # in bf16, on an H100 or H200

On other GPUs the prompts are replicated, as with --stock, and a warning says so.

Exit status: 0 if the reward has risen, 1 if it has not, 2 for bad options.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from dualkv.integrations.trl import GRPOTrainer

NUMBERS = [str(number) for number in range(10)]
WORDS = ["<pad>", "<eos>", "<unk>", "after", ";", *NUMBERS]
SHEET_LINES = 16


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    torch.set_num_threads(1)  # the model is so small that threads would wait for each other
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder)
        trainer.add_callback(PrintRewards())
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    return 0 if rewards[-1] > rewards[0] + 0.2 else 1


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=5, help="prompts of a step")
    parser.add_argument("--responses", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: in bf16")
    parser.add_argument("--stock", action="store_true", help="TRL's own trainer, prompts replicated")
    return parser


def make_trainer(options, folder: str) -> trl.GRPOTrainer:
    config = trl.GRPOConfig(
        output_dir=folder,
        max_steps=options.steps,
        # A micro-batch of whole groups: its prompts are computed once each.
        per_device_train_batch_size=options.prompts * options.responses,
        num_generations=options.responses,
        steps_per_generation=1,
        max_completion_length=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=options.device == "cuda",  # the CUDA kernels take no fp32
        use_cpu=options.device == "cpu",
        seed=options.seed,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(options.seed)
    return (trl.GRPOTrainer if options.stock else GRPOTrainer)(
        model=make_model(),
        reward_funcs=right_answer,
        args=config,
        train_dataset=make_questions(options.seed),
        processing_class=make_tokenizer(),
    )


def make_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            bos_token_id=None,
            eos_token_id=WORDS.index("<eos>"),
            pad_token_id=WORDS.index("<pad>"),
        )
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_questions(seed: int) -> Dataset:
    """What comes after each number (0 after 9), behind the same sheet of examples."""
    drawn = torch.randint(10, (SHEET_LINES,), generator=torch.Generator().manual_seed(seed)).tolist()
    sheet = " ; ".join(f"after {number} {(number + 1) % 10}" for number in drawn)
    return Dataset.from_list(
        [{"prompt": f"{sheet} ; after {number}", "answer": str((number + 1) % 10)} for number in range(10)]
    )


def right_answer(completions, answer, **columns) -> list[float]:
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


class PrintRewards(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:
            ratio = logs.get("dualkv/token_ratio", 1.0)
            print(
                f"step {state.global_step:4}  reward {logs['reward']:.2f}  token ratio {ratio:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    raise SystemExit(main())
