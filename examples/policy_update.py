#!/usr/bin/env python3
"""One GRPO or DAPO policy update, computed twice: with the prompt replicated and with the prompt shared.

Reads rollouts, builds advantages, and runs old log-probs, forward, backward and an optimizer step of a small
Qwen3, once as trainers do today (each response after its own copy of the prompt) and once packed by dualkv
(each prompt once). Each run has a process of its own, so that its time and peak memory are its own. The
gradients of the two are compared; the exit status is 1 if they disagree, 2 for bad options or files, and 3 if a
run fails.

    python examples/policy_update.py
    python examples/policy_update.py --algorithm dapo --rollouts my_rollouts.jsonl --model path/to/checkpoint
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import policy_report
import torch
from policy_step import ALGORITHMS, Job, Result, run_child
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig

import dualkv
from dualkv.integrations.transformers import SUPPORTED_MODEL_TYPES
from dualkv.rollouts import (
    Rollout,
    load_tokenizer,
    prepend_examples,
    read_examples,
    read_rollouts,
    tokenize,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASELINES = {"sdpa": "padded", "dualkv": "roots"}  # option -> layout of policy_step


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser()
    options = parser.parse_args(arguments)
    console = Console()
    try:
        rollouts = prepare_rollouts(options)
        job = make_job(options, rollouts)
        options.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")

    try:
        with tempfile.TemporaryDirectory() as folder, progress_bars(console) as progress:
            baseline = BASELINES[options.baseline]
            replicated = run_apart(baseline, job, Path(folder), progress, "replicated")
            packed = run_apart("packed", job, Path(folder), progress, "packed")
            exact = None
            if job.dtype != torch.float32:
                exact = run_apart(
                    "padded", replace(job, dtype=torch.float32), Path(folder), progress, "float32"
                )
    except RuntimeError as error:
        parser.exit(3, f"{parser.prog}: {error}\n")

    report = {
        "algorithm": options.algorithm,
        "baseline": options.baseline,
        "rollouts": str(options.rollouts),
        "groups": len(job.prompts),
        "dropped_groups": len(rollouts) - len(job.prompts),
        "responses": len(job.samples),
        "micro_batch_size": job.micro_batch_size,
        "parameters": sum(gradient.numel() for gradient in packed.gradients.values()),
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if job.device == "cuda" else "CPU",
        "threads": job.threads,
        "seed": job.seed,
        **policy_report.figures(replicated, packed, exact),
    }
    title = (
        f"{options.algorithm.upper()} update, {report['groups']} groups, {report['responses']} responses, "
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['dtype']}, {report['device']}"
    )
    policy_report.print_table(console, title, report)
    (options.output / "result.json").write_text(json.dumps(report, indent=2) + "\n")
    policy_report.draw_chart(options.output / "policy_update.png", title, report)
    console.print(
        f"Written: {options.output}/result.json, {options.output}/policy_update.png", highlight=False
    )
    return 0 if report["agreement"]["agrees"] else 1


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="One policy update with replicated and with shared prompts: time, memory, gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = parser.add_argument_group("data")
    default_rollouts = Path(__file__).parent / "data" / "rollouts.jsonl"
    data.add_argument("--rollouts", type=Path, default=default_rollouts, help="rollout file, JSON lines")
    data.add_argument(
        "--groups", type=positive, help="take the first so many groups of the file (default: all)"
    )
    data.add_argument("--group-size", type=positive, help="and so many responses of each (default: all)")
    data.add_argument("--few-shot", type=Path, help="worked examples to make prompts longer, JSON lines")
    data.add_argument(
        "--prefix-bytes", type=positive, help="prepend examples until a prompt has so many bytes"
    )
    data.add_argument("--tokenizer", type=Path, help="a local Hugging Face tokenizer (default: bytes)")
    step = parser.add_argument_group("update")
    step.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    step.add_argument("--micro-batch-size", type=positive, default=8, help="responses in a micro-batch")
    step.add_argument(
        "--baseline",
        choices=BASELINES,
        default="sdpa",
        help="the replicated run: stock attention with padding, or dualkv.attention without either",
    )
    model = parser.add_argument_group("model (Qwen3 with random weights, or a checkpoint)")
    model.add_argument(
        "--model", type=Path, help="a local checkpoint instead; the sizes below are ignored then"
    )
    model.add_argument("--hidden-size", type=positive, default=128)
    model.add_argument("--intermediate-size", type=positive, default=384)
    model.add_argument("--layers", type=positive, default=3)
    model.add_argument("--heads", type=positive, default=4)
    model.add_argument("--kv-heads", type=positive, default=2)
    model.add_argument("--head-dim", type=positive, default=32)
    model.add_argument(
        "--dtype", choices=DTYPES, help="of the computation (default: float32, on a GPU bfloat16)"
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--device", choices=("cpu", "cuda"), help="(default: the GPU, if dualkv has kernels for it)"
    )
    run.add_argument("--threads", type=positive, default=os.cpu_count(), help="CPU threads")
    run.add_argument("--seed", type=seed, default=0, help="of random weights, 0 to 2^63 - 1")
    run.add_argument(
        "--output", type=Path, default=Path("out/policy_update"), help="folder for JSON and chart"
    )
    return parser


def default_device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    row = torch.zeros(1, 1, 8, dtype=torch.bfloat16, device="cuda")
    try:
        dualkv.attention(row, row, row, dualkv.SegmentForest.from_groups([1], [[]]))
    except NotImplementedError:
        return "cpu"
    return "cuda"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be 0 to 2^63 - 1, got {value}")
    return value


def prepare_rollouts(options: argparse.Namespace) -> list[Rollout]:
    """The groups to learn from, as text or token ids.

    Raises:
        ValueError: a file is faulty or has too little.
    """
    rollouts = read_rollouts(options.rollouts)
    if options.groups is not None:
        if options.groups > len(rollouts):
            raise ValueError(
                f"--groups asks for {options.groups}, but {options.rollouts} has {len(rollouts)}"
            )
        rollouts = rollouts[: options.groups]
    if options.group_size is not None:
        smallest = min(len(rollout.responses) for rollout in rollouts)
        if options.group_size > smallest:
            raise ValueError(
                f"--group-size asks for {options.group_size}, but a group has only {smallest} responses"
            )
        size = options.group_size
        rollouts = [replace(r, responses=r.responses[:size], rewards=r.rewards[:size]) for r in rollouts]
    if (options.few_shot is None) != (options.prefix_bytes is None):
        raise ValueError("--few-shot and --prefix-bytes are used together")
    if options.few_shot is not None:
        rollouts = prepend_examples(rollouts, read_examples(options.few_shot), options.prefix_bytes)
    return rollouts


def make_job(options: argparse.Namespace, rollouts: list[Rollout]) -> Job:
    """Tokens, advantages and a model that fits them.

    Raises:
        ValueError: the tokenizer, the model or the type on a GPU cannot be used, or no group is left to learn
            from.
    """
    device = options.device or default_device()
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    if (device, dtype) == ("cuda", "float32"):
        raise ValueError(
            "--dtype must be bfloat16 on a GPU, got float32: packed attention has no kernels for it"
        )
    algorithm = ALGORITHMS[options.algorithm]
    tokenizer = load_tokenizer(options.tokenizer)
    kept = [r for r in rollouts if len(set(r.rewards)) > 1 or not algorithm.drops_equal_groups]
    if not kept:
        raise ValueError(
            f"{options.algorithm} drops groups whose rewards are all equal, and so are those of all "
            f"{len(rollouts)} groups: nothing is left to learn from"
        )
    groups = tokenize(kept, tokenizer)
    vocab_size = 1 + max(max(tokens, default=0) for g in groups for tokens in (g.prompt, *g.responses))
    if not any(response for group in groups for response in group.responses):
        raise ValueError(f"all responses of {options.rollouts} are empty: there is no token to score")
    return Job(
        prompts=[group.prompt for group in groups],
        responses=[group.responses for group in groups],
        advantages=[
            dualkv.losses.group_advantages(group.rewards, [0] * len(group.rewards)).tolist()
            for group in groups
        ],
        algorithm=algorithm,
        micro_batch_size=options.micro_batch_size,
        model=choose_model(options, vocab_size, len(tokenizer)),
        dtype=DTYPES[dtype],
        device=device,
        seed=options.seed,
        threads=options.threads,
    )


def choose_model(options: argparse.Namespace, used_tokens: int, tokenizer_size: int) -> Path | dict:
    """The checkpoint, or the arguments of a Qwen3Config.

    used_tokens: token ids of the rollouts are below it.

    Raises:
        ValueError: the checkpoint cannot be read, is of another architecture or has too small a vocabulary,
            or the sizes do not fit together.
    """
    if options.model is None:
        if options.heads % options.kv_heads != 0:
            raise ValueError(f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}")
        if options.head_dim % 2 != 0 or options.head_dim > 512:
            raise ValueError(f"--head-dim must be even and at most 512, got {options.head_dim}")
        return {
            "vocab_size": max(used_tokens, tokenizer_size),
            "hidden_size": options.hidden_size,
            "intermediate_size": options.intermediate_size,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads,
            "head_dim": options.head_dim,
        }
    if not options.model.is_dir():
        raise ValueError(f"--model must be a folder with a checkpoint, got {options.model}")
    try:
        config = AutoConfig.from_pretrained(options.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no model could be read from {options.model}: {error}") from error
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ValueError(f"{options.model} is a {config.model_type} model; supported are {supported}")
    if used_tokens > config.vocab_size:
        raise ValueError(
            f"{options.model} has {config.vocab_size} tokens, but the rollouts use {used_tokens - 1}: is the "
            "tokenizer the model's own?"
        )
    return options.model


def progress_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def run_apart(layout: str, job: Job, folder: Path, progress: Progress, name: str) -> Result:
    """Runs an update in a fresh process and shows how far it is.

    Raises:
        RuntimeError: the process failed; with its message.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    path = folder / f"{name}.pt"
    process = context.Process(target=run_child, args=(layout, job, path, sender), daemon=True)
    process.start()
    sender.close()  # so that the end of the child is the end of the messages
    bars = {}
    failure = f"the {name} run ended without a result"
    try:
        while True:
            kind, *details = receiver.recv()
            if kind == "progress":
                phase, done, total = details
                if phase not in bars:
                    bars[phase] = progress.add_task(f"{name}: {phase}", total=total)
                progress.update(bars[phase], completed=done)
            elif kind == "failed":
                failure = f"the {name} run failed: {details[0]}"
    except EOFError:
        process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{failure} (exit status {process.exitcode})")
    return Result(**torch.load(path))


if __name__ == "__main__":
    sys.exit(main())
