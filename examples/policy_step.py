"""One policy update, with replicated or packed prompts: what a child process of policy_update.py runs.

A layout says how samples become rows of the model: which samples share a micro-batch, and how their log-probs
are computed. Everything else, the losses included, is the same code for every layout.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import transformers

import dualkv
from dualkv.integrations.transformers import packed_logprobs, use_packed_attention

Sample = tuple[int, int]  # (group, response)
PHASES = ("old log-probs", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Algorithm:
    """drops_equal_groups: groups whose rewards are all equal are left out (dynamic sampling)."""

    loss: dualkv.losses.PolicyLoss
    drops_equal_groups: bool


ALGORITHMS = {
    "grpo": Algorithm(dualkv.losses.grpo(), drops_equal_groups=False),
    "dapo": Algorithm(dualkv.losses.dapo(), drops_equal_groups=True),
}


@dataclass(frozen=True)
class Job:
    """All that an update needs, small enough to be sent to a process.

    Attributes:
        prompts: [G], token ids.
        responses: [G][N], token ids.
        advantages: [G][N].
        model: a local checkpoint, or the arguments of a Qwen3Config for random weights.
        dtype: of the computation. Weights and their gradients are fp32, as in mixed precision training.
        device: "cpu" or "cuda". On a GPU, packed attention computes in bfloat16 only.
    """

    prompts: list[list[int]]
    responses: list[list[list[int]]]
    advantages: list[list[float]]
    algorithm: Algorithm
    micro_batch_size: int
    model: Path | dict
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    threads: int = 1
    learning_rate: float = 1e-6

    @property
    def samples(self) -> list[Sample]:
        return [(g, n) for g, group in enumerate(self.responses) for n in range(len(group))]

    @cached_property
    def counts(self) -> dualkv.losses.Counts:
        """What losses are divided by."""
        return dualkv.losses.count([self.lengths(self.samples)])

    def response(self, sample: Sample) -> list[int]:
        group, index = sample
        return self.responses[group][index]

    def lengths(self, samples: list[Sample]) -> list[int]:
        """Of the responses."""
        return [len(self.response(sample)) for sample in samples]

    def sequence(self, sample: Sample) -> list[int]:
        return self.prompts[sample[0]] + self.response(sample)


@dataclass
class Result:
    """What an update took and gave. log_probs [M] are in the order of Job.samples."""

    tokens: int  # rows of the model with a token on them
    rows: int  # rows of the model with the padding
    micro_batches: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    loaded_bytes: int = 0  # memory of the process, on a GPU of its tensors, when the model is loaded
    peak_bytes: int = 0  # and at most how much more it took from there on
    loss: float = 0.0
    log_probs: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------- layouts


class PaddedLayout:
    """Stock Transformers: each sequence with its own copy of the prompt, padded on the right.

    Micro-batches are cut from the samples sorted by length, which keeps padding low.
    """

    def __init__(self, job: Job):
        self.job = job

    def prepare_model(self, model):
        model.set_attn_implementation("sdpa")

    def micro_batches(self) -> list[list[Sample]]:
        return _by_length(self.job)

    def size(self, samples: list[Sample]) -> tuple[int, int]:
        """Tokens and rows of a micro-batch."""
        lengths = [len(self.job.sequence(sample)) for sample in samples]
        return sum(lengths), len(lengths) * max(lengths)

    def log_probs(self, model, samples: list[Sample]) -> torch.Tensor:
        """[M], in the order of the samples and their tokens."""
        sequences = [torch.tensor(self.job.sequence(sample)) for sample in samples]
        input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        attention_mask = torch.zeros_like(input_ids)
        predicts = torch.zeros_like(input_ids, dtype=torch.bool)  # rows whose next token is of the response
        for row, sample in enumerate(samples):
            length = len(sequences[row])
            attention_mask[row, :length] = 1
            predicts[row, length - len(self.job.response(sample)) - 1 : length - 1] = True
        input_ids, attention_mask, predicts = (
            x.to(model.device) for x in (input_ids, attention_mask, predicts)
        )
        hidden = model.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        logits = model.lm_head(hidden.last_hidden_state[predicts])
        targets = input_ids.roll(-1, dims=1)[predicts]
        return logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


class RootsLayout:
    """Packed attention without sharing: each sequence is a tree of its own. Isolates what sharing gives."""

    def __init__(self, job: Job):
        self.job = job

    def prepare_model(self, model):
        use_packed_attention(model)

    def micro_batches(self) -> list[list[Sample]]:
        return _by_length(self.job)

    def size(self, samples: list[Sample]) -> tuple[int, int]:
        """Tokens and rows of a micro-batch."""
        tokens = self.pack(samples).forest.total_tokens
        return tokens, tokens

    def pack(self, samples: list[Sample]):
        prompts = [self.job.prompts[group] for group, _ in samples]
        return dualkv.pack(prompts, [[self.job.response(sample)] for sample in samples])

    def log_probs(self, model, samples: list[Sample]) -> torch.Tensor:
        """[M], in the order of the samples and their tokens."""
        return packed_logprobs(model, self.pack(samples))[0]


class PackedLayout(RootsLayout):
    """Shared prompts: a micro-batch holds each of its prompts once."""

    def micro_batches(self) -> list[list[Sample]]:
        """Whole groups, as many as fit. A larger group is split, and each part has the prompt."""
        limit = self.job.micro_batch_size
        batches = []
        for group, responses in enumerate(self.job.responses):
            samples = [(group, index) for index in range(len(responses))]
            for part in _chunks(samples, limit):
                if not batches or len(batches[-1]) + len(part) > limit:
                    batches.append([])
                batches[-1] += part
        return batches

    def pack(self, samples: list[Sample]):
        groups = {}
        for group, index in samples:
            groups.setdefault(group, []).append(self.job.responses[group][index])
        return dualkv.pack([self.job.prompts[group] for group in groups], list(groups.values()))


LAYOUTS = {"padded": PaddedLayout, "roots": RootsLayout, "packed": PackedLayout}


def _chunks(items: list, size: int) -> list[list]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def _by_length(job: Job) -> list[list[Sample]]:
    ordered = sorted(job.samples, key=lambda sample: len(job.sequence(sample)), reverse=True)
    return _chunks(ordered, job.micro_batch_size)


# ------------------------------------------------------------------------------------------------- update


def load_model(job: Job):
    """The policy; random weights are the same for the same seed."""
    torch.manual_seed(job.seed)
    if isinstance(job.model, dict):
        config = transformers.Qwen3Config(**job.model)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job.model, dtype=torch.float32, local_files_only=True
        )
    return model.to(job.device)


def policy_loss(job: Job, samples: list[Sample], log_probs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """A micro-batch's part of the batch's loss.

    log_probs and old [M], in the order of the samples and their tokens -> scalar. The parts add up to the
    batch's loss however it is cut, since they are divided by counts of the whole batch.
    """
    advantages = torch.tensor(
        [job.advantages[group][index] for group, index in samples], device=log_probs.device
    )
    loss, _ = job.algorithm.loss(log_probs, job.lengths(samples), advantages, job.counts, old_logprobs=old)
    return loss


def _autocast(job: Job) -> torch.autocast:
    return torch.autocast(job.device, torch.bfloat16, enabled=job.dtype == torch.bfloat16)


def run_update(model, layout, job: Job, report: Callable[[str, int, int], None]) -> Result:
    """Old log-probs, then forward and backward of each micro-batch, then one optimizer step.

    report(phase, done, total) is called after each micro-batch of the phases "old log-probs" and "update".
    """
    batches = layout.micro_batches()
    tokens, rows = (sum(counts) for counts in zip(*map(layout.size, batches)))
    result = Result(tokens=tokens, rows=rows, micro_batches=len(batches))
    autocast = _autocast(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if job.device == "cuda":
            torch.cuda.synchronize()
        result.seconds[phase] += time.perf_counter() - begin

    old = []
    for done, samples in enumerate(batches, start=1):
        with timed("old log-probs"), autocast, torch.no_grad():
            old.append(layout.log_probs(model, samples))
        report("old log-probs", done, len(batches))
    for done, (samples, reference) in enumerate(zip(batches, old), start=1):
        with timed("forward"), autocast:
            loss = policy_loss(job, samples, layout.log_probs(model, samples), reference)
        with timed("backward"):
            loss.backward()
        result.loss += loss.item()
        report("update", done, len(batches))
    with timed("optimizer"):
        optimizer.step()

    result.gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    result.log_probs = _in_order_of_samples(job, batches, old).cpu()
    return result


def _in_order_of_samples(job: Job, batches: list[list[Sample]], values: list[torch.Tensor]) -> torch.Tensor:
    pieces = {}
    for samples, flat in zip(batches, values):
        pieces.update(zip(samples, flat.split(job.lengths(samples))))
    return torch.cat([pieces[sample] for sample in job.samples])


# ------------------------------------------------------------------------------------------------- process


def run_child(layout_name: str, job: Job, result_path: Path, connection) -> None:
    """Runs an update in this process, which should be fresh, and saves its Result.

    Sends ("progress", phase, done, total) for each micro-batch, and ("failed", message) if it fails.
    """
    try:
        torch.set_num_threads(job.threads)
        transformers.utils.logging.disable_progress_bar()
        layout = LAYOUTS[layout_name](job)
        model = load_model(job)
        layout.prepare_model(model)
        loaded = _memory(job, peak=False)
        _warm_up(model, layout, job)
        result = run_update(model, layout, job, lambda *event: connection.send(("progress", *event)))
        result.loaded_bytes = loaded
        result.peak_bytes = _memory(job, peak=True) - loaded
        torch.save(vars(result), result_path)
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _warm_up(model, layout, job: Job) -> None:
    """Runs the shortest sample once, so that the start of thread pools is in no phase."""
    shortest = min(job.samples, key=lambda sample: len(job.sequence(sample)))
    with _autocast(job):
        total = layout.log_probs(model, [shortest]).sum()
    total.backward()
    model.zero_grad(set_to_none=True)
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with suppress(OSError):  # some sandboxes forbid it; the peak then includes the loading of the model
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten


def _memory(job: Job, peak: bool) -> int:
    """Bytes that are in use now, or were at the peak: on a GPU of tensors, else what is resident. That is the
    peak in both cases elsewhere than on Linux."""
    if job.device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if sys.platform == "linux":
        # NOTE: not ru_maxrss, which a child inherits from the process that started it.
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == ("VmHWM" if peak else "VmRSS"):
                return int(value.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
