"""TRL's optimizer step, packed and with TRL's own trainer: seconds of all but generation, and memory.

    PYTHONPATH=python python bench/trl_step.py [--prompt 4096 --response 512 --prompts 2 --generations 8]
        [--output bench/results/h200/trl_step.json]

A Qwen3 of the dimensions of Qwen3-0.6B with random weights, fp32 weights and bf16 autocast, gradient checkpointing,
GRPO with a reference model (--beta 0 for none). Completions are random tokens that nobody samples. Each trainer has a
process of its own, so that neither finds the other's memory. A step is from TRL's own callbacks, from an idle GPU to an
idle GPU: tokenization, rewards, log-probs of the reference, the update and the optimizer; the first is not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers
import trl
from checkout import checked_out_commit
from datasets import Dataset

from dualkv.integrations.trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_grpo_trl import NUMBERS, WORDS, make_tokenizer  # noqa: E402

QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
TINY = {
    **QWEN3_06B,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


class NobodySamples:
    """Completions of random tokens, all of the same length."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        drawn = random.Random(self._step)
        length = self.args.max_completion_length
        numbers = [WORDS.index(number) for number in NUMBERS]
        return [drawn.choices(numbers, k=length) for _ in prompt_ids], None


class Packed(NobodySamples, GRPOTrainer):
    pass


class Stock(NobodySamples, trl.GRPOTrainer):
    pass


TRAINERS = {"packed": Packed, "stock": Stock}


class Clock(transformers.TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.begin = self._now()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(self._now() - self.begin)

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def make_trainer(kind: str, options, folder: str) -> trl.GRPOTrainer:
    config = trl.GRPOConfig(
        output_dir=folder,
        max_steps=1 + options.steps,
        per_device_train_batch_size=options.prompts * options.generations,
        num_generations=options.generations,
        steps_per_generation=1,
        max_completion_length=options.response,
        beta=options.beta,
        bf16=not options.tiny,
        use_cpu=options.tiny,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    sizes = transformers.Qwen3Config(
        **(TINY if options.tiny else QWEN3_06B), bos_token_id=None, eos_token_id=1, pad_token_id=0
    )
    drawn = random.Random(0)
    prompts = [" ".join(drawn.choices(NUMBERS, k=options.prompt)) for _ in range(16 * options.prompts)]
    # Saved and loaded, since TRL loads the reference model from where the policy came from.
    transformers.Qwen3ForCausalLM(sizes).save_pretrained(f"{folder}/model")
    return TRAINERS[kind](
        model=f"{folder}/model",
        reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
    )


def measure(kind: str, options) -> dict:
    """The record of a trainer."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(kind, options, folder)
        trainer.add_callback(clock)
        trainer.train()
    on_gpu = torch.cuda.is_available() and not options.tiny
    ratios = [x["dualkv/token_ratio"] for x in trainer.state.log_history if "dualkv/token_ratio" in x]
    return {
        "trainer": kind,
        "step_s": statistics.median(clock.seconds[1:]),
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "token_ratio": ratios[-1] if ratios else 1.0,
        **{name: getattr(options, name) for name in ("prompt", "response", "prompts", "generations", "beta")},
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "commit": options.commit,
    }


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--prompts", type=int, default=2, help="of a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument(
        "--beta", type=float, default=0.04, help="of the KL divergence; 0: no reference model"
    )
    parser.add_argument("--steps", type=int, default=4, help="that are counted")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a CPU, to try that everything runs"
    )
    parser.add_argument("--output", type=Path, help="a JSON file of records")
    parser.add_argument("--commit", help="what is measured, where this is not a git checkout")
    options = parser.parse_args(arguments)
    options.commit = options.commit or checked_out_commit()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --tiny tries the program on a CPU")
    records = []
    for kind in TRAINERS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            records.append(pool.submit(measure, kind, options).result())
        print(summary(records[-1]), flush=True)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(records, indent=1) + "\n")
    return records


def summary(record: dict) -> str:
    memory = record["allocated_bytes"]
    gib = "" if memory is None else f", {memory / 2**30:.1f} GiB"
    return (
        f"{record['trainer']}: {record['step_s']:.3f} s a step{gib}, token ratio {record['token_ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
