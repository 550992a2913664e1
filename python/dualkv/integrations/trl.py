"""GRPO with TRL, each prompt of a micro-batch computed once (TRL 1.16).

    from dualkv.integrations.trl import GRPOTrainer            # in place of trl.GRPOTrainer

TRL computes log-probabilities in three passes: of the policy that is updated, of the policy that sampled, and
of the reference. Here each of them runs on a packed batch, and what comes out is put back into TRL's padded
layout. Generation, rewards, advantages, losses and metrics are TRL's own.

Rows that share a prompt must meet in a micro-batch. TRL shuffles the rows of the generated batch before it cuts
it into micro-batches; this trainer regroups them, still in random order.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable
from contextlib import contextmanager, nullcontext
from types import MethodType

import torch
import trl
from accelerate.utils import DistributedType
from torch import nn

import dualkv
from dualkv import _abi
from dualkv.forest import tile_sizes
from dualkv.integrations.transformers import allow_packed_passes, packed_logprobs, plain_head
from dualkv.logprob_chunks import require_products

# What is overridden or relied on, with the parameters it must have: TRL's trainer has no public hooks for its
# passes, so other versions are refused, and installations that differ in one of these.
_SUPPORTED_VERSION = "1.16"
_MULTIMODAL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
_PARAMETERS = {
    "_prepare_inputs": ("self", "generation_batch"),
    "_get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
        *_MULTIMODAL_INPUTS,
    ),
}
_ATTRIBUTES = ("_buffered_inputs", "_metrics", "_step", "aux_loss_enabled", "ref_model", "temperature")

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_PACKED_DISTRIBUTIONS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class GRPOTrainer(trl.GRPOTrainer):
    """`trl.GRPOTrainer` with packed passes. Takes its arguments.

    A micro-batch has the same results up to rounding. Which rows it holds may differ: what TRL averages over a
    micro-batch's tokens then does too (see `docs/trl.md`, "Same results").

    Trainings that cannot be packed (see `docs/trl.md`) run as in TRL, after one warning that says why.
    The metric `dualkv/token_ratio` is the number of tokens of the replicated sequences over that of the packed
    ones, over all passes since the last log and all processes: how many times fewer tokens the model had to
    compute.

    A micro-batch computes a prompt once: `per_device_train_batch_size` should be a multiple of
    `num_generations`, or large. Rows of one group then stay in one micro-batch.

    Raises:
        RuntimeError: the installed version of TRL is not the supported one, or differs in a method that this
            class relies on.
    """

    def __init__(self, *args, **kwargs):
        _check_version()
        _check_methods(trl.GRPOTrainer)
        super().__init__(*args, **kwargs)
        _check_attributes(self)
        self._warned_of = set()
        self._token_counts = {}  # mode -> replicated and packed tokens since the last log
        self._stock_reason = _reason_against_packing(self)
        if self._stock_reason is not None:
            self._warn_once(f"{self._stock_reason}: training runs as in TRL, without packing")

    def _prepare_inputs(self, generation_batch):
        """TRL's inputs of the next micro-batch, from a buffer in which groups stand together."""
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        generated = self._buffered_inputs is not buffered
        # Images are not one for each row; and such batches are not packed.
        multimodal = any(name in inputs for name in _MULTIMODAL_INPUTS)
        if not generated or multimodal or self._stock_reason is not None:
            return inputs
        self._buffered_inputs = regroup(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **multimodal_inputs,
    ):
        """Log-probs [B, R], entropies [B, R] or None, and the auxiliary loss, of rows [B, S], R = logits_to_keep."""
        given = sorted(name for name, value in multimodal_inputs.items() if value is not None)
        if given:
            self._warn_once(f"a batch has {', '.join(given)}: it runs as in TRL, without packing")
        if given or self._stock_reason is not None:
            tokens = int(attention_mask.sum())
            self._log_token_ratio(tokens, tokens)
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **multimodal_inputs,
            )
        results, replicated_tokens, packed_tokens = [], 0, 0
        chunk = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(chunk), attention_mask.split(chunk)):
            prompts = _prompts(ids, mask, logits_to_keep)
            batch = dualkv.pack_padded(ids, mask, mask[:, -logits_to_keep:], prompts)
            replicated_tokens += batch.replicated_tokens
            packed_tokens += batch.num_tokens
            results.append(self._packed_logprobs(model, batch.to(ids.device)))
        # An evaluation with one completion for each prompt has nothing to share, and that is as it should be.
        if replicated_tokens == packed_tokens and self.model.training:
            self._warn_once(
                "no two rows of a micro-batch share a prompt, so packing saves padding only; "
                "per_device_train_batch_size should be a multiple of num_generations"
            )
        self._log_token_ratio(replicated_tokens, packed_tokens)
        logprobs, entropies = (torch.cat(parts) for parts in zip(*results))
        return logprobs, entropies if compute_entropy else None, None

    def _packed_logprobs(self, model, batch):
        """Log-probs and entropies of a packed batch in TRL's layout, [rows, R] each, 0 where padding is."""
        policy = _causal_lm(self.accelerator.unwrap_model(model))

        def forward(**inputs):
            with _head_replaced(policy, self.args):
                return packed_logprobs(
                    policy,
                    batch,
                    temperature=self.temperature,
                    head_dtype=torch.float32 if self.args.cast_lm_head_to_fp32 else None,
                )

        # The call goes through all wrappers around the model: those of accelerate prepare the exchange of
        # gradients in it, and those of peft their adapters.
        with _forward_replaced(policy, forward), self.accelerator.autocast():
            values = model(input_ids=batch.input_ids[None])
        return tuple(batch.unpack_padded(value) for value in values)

    def _log_token_ratio(self, replicated_tokens: int, packed_tokens: int) -> None:
        """Adds the counts of a pass. TRL averages a metric's values; here one value is the ratio of the sums."""
        counts = torch.tensor([replicated_tokens, packed_tokens], device=self.accelerator.device)
        replicated_tokens, packed_tokens = self.accelerator.reduce(counts, reduction="sum").tolist()
        mode = "train" if self.model.training else "eval"
        logged = self._metrics[mode]["dualkv/token_ratio"]
        if logged:  # TRL clears its metrics with each log
            replicated_before, packed_before = self._token_counts[mode]
            replicated_tokens += replicated_before
            packed_tokens += packed_before
        self._token_counts[mode] = replicated_tokens, packed_tokens
        logged[:] = [replicated_tokens / packed_tokens]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned_of and self.accelerator.is_main_process:
            warnings.warn(f"dualkv: {message}", stacklevel=3)
        self._warned_of.add(message)


def regroup(micro_batches: list[dict]) -> list[dict]:
    """Deals the rows of TRL's micro-batches again, so that rows with the same prompt meet.

    Args:
        micro_batches: dictionaries of tensors [m, ...] and lists of m values, with tensors `prompt_ids` and
            `prompt_mask` [m, P] among them; scalar tensors and None are the same in all.

    Returns:
        As many dictionaries of as many rows. Which group comes first, and the order of rows in a group, are as
        random as they were.
    """
    prompt_ids, prompt_mask = (
        torch.cat([batch[name] for batch in micro_batches]) for name in ("prompt_ids", "prompt_mask")
    )
    rows_each = len(micro_batches[0]["prompt_ids"])
    dealt = group_rows(_prompts(prompt_ids, prompt_mask), rows_each)

    def deal(name):
        values = [batch[name] for batch in micro_batches]
        if isinstance(values[0], list):
            values = [value for part in values for value in part]
            return [[values[row] for row in rows] for rows in dealt]
        if values[0] is None or values[0].dim() == 0:
            return values
        values = torch.cat(values)
        return [values[rows] for rows in dealt]

    columns = {name: deal(name) for name in micro_batches[0]}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(micro_batches))]


def group_rows(group_ids: list[Hashable], rows_each: int) -> list[list[int]]:
    """Row numbers of micro-batches of `rows_each` rows, in which the rows of a group stand side by side.

    A group is split if it is larger than a micro-batch, or if no micro-batch has room for it.
    """
    groups = {}
    for row, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(row)
    pieces = [rows[i : i + rows_each] for rows in groups.values() for i in range(0, len(rows), rows_each)]
    micro_batches = [[] for _ in range(len(group_ids) // rows_each)]
    # Large pieces first, while there is room for them; the sort keeps the order of equal ones.
    for rows in sorted(pieces, key=len, reverse=True):
        fitting = [batch for batch in micro_batches if len(batch) + len(rows) <= rows_each]
        for batch in fitting[:1] or micro_batches:
            taken = rows[: rows_each - len(batch)]
            batch.extend(taken)
            rows = rows[len(taken) :]
    return micro_batches


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor, response_columns: int = 0) -> list[bytes]:
    """A key for each row [B, S] that is equal for equal prompts, padded to the same width."""
    end = input_ids.shape[1] - response_columns
    prompts = input_ids[:, :end].masked_fill(mask[:, :end] == 0, -1)
    return [prompt.tobytes() for prompt in prompts.cpu().numpy()]


def _causal_lm(model: nn.Module) -> nn.Module:
    """The Transformers model, without the adapters of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def _forward_replaced(module: nn.Module, forward):
    """Calls of `module` are calls of `forward`. TRL's trainer has set a forward of its own on the module."""
    own = module.forward
    module.forward = forward
    try:
        yield
    finally:
        module.forward = own


def _head_replaced(policy: nn.Module, args: trl.GRPOConfig):
    """The head that TRL has given a forward that computes in float32 without it: packed passes do the same."""
    if not args.cast_lm_head_to_fp32:
        return nullcontext()
    head = policy.get_output_embeddings()
    return _forward_replaced(head, MethodType(nn.Linear.forward, head))


# ------------------------------------------------------------------------------------- what can be packed


def _reason_against_packing(trainer: trl.GRPOTrainer) -> str | None:
    """Why a training cannot be packed, or None. Its models can run packed passes afterwards."""
    distribution = trainer.accelerator.distributed_type
    if distribution not in _PACKED_DISTRIBUTIONS:
        return f"models distributed by {distribution.value} are not supported"
    if trainer.args.torch_compile:
        return "torch_compile is not supported"
    if trainer.aux_loss_enabled:
        return (
            "the auxiliary loss of routers counts each prompt once for each response "
            "(router_aux_loss_coef=0.0 turns it off)"
        )
    for model in filter(None, (trainer.model, trainer.ref_model)):
        model = trainer.accelerator.unwrap_model(model)
        policy = _causal_lm(model)
        if getattr(policy.config, "attention_dropout", 0.0) > 0.0:
            return "attention dropout is not supported"
        try:
            with _head_replaced(policy, trainer.args):
                plain_head(policy)
            allow_packed_passes(model)
        except (ValueError, TypeError) as error:
            return str(error)
        reason = _reason_against_device(trainer, policy)
        if reason is not None:
            return reason
    return None


def _reason_against_device(trainer: trl.GRPOTrainer, policy: nn.Module) -> str | None:
    """Why the kernels cannot run a supported model on the trainer's device and in its type, or None."""
    device = trainer.accelerator.device
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"device {device} is not supported, only CPUs and CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return "the CUDA kernels need a GPU of compute capability 9.0, got {}.{}".format(*capability)
    dtype = _AUTOCAST_DTYPES.get(trainer.accelerator.mixed_precision, policy.dtype)
    if dtype not in _AUTOCAST_DTYPES.values():
        return f"the CUDA kernels need bf16 or fp16 (bf16=True), got a training in {dtype}"
    config = policy.config
    head_dim = policy.get_decoder().layers[0].self_attn.head_dim
    try:
        tile_sizes(_abi.CUDA, config.num_attention_heads, config.num_key_value_heads, head_dim)
        require_products(torch.float32 if trainer.args.cast_lm_head_to_fp32 else dtype)
    except NotImplementedError as error:
        return str(error)
    return None


def _check_version() -> None:
    if trl.__version__.split(".")[:2] != _SUPPORTED_VERSION.split("."):
        raise RuntimeError(
            f"dualkv.integrations.trl supports TRL {_SUPPORTED_VERSION}, and TRL {trl.__version__} is installed: "
            f"pip install 'trl=={_SUPPORTED_VERSION}.*'"
        )


def _check_methods(trainer_class: type) -> None:
    for name, expected in _PARAMETERS.items():
        method = getattr(trainer_class, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found is None:
            raise _unknown_version(f"trl.GRPOTrainer.{name} is missing")
        if found != expected:
            raise _unknown_version(
                f"trl.GRPOTrainer.{name} takes ({', '.join(found)}), not ({', '.join(expected)})"
            )


def _check_attributes(trainer: trl.GRPOTrainer) -> None:
    missing = [name for name in _ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        raise _unknown_version(f"trl.GRPOTrainer has no {', '.join(missing)}")


def _unknown_version(difference: str) -> RuntimeError:
    return RuntimeError(
        f"dualkv.integrations.trl supports TRL {_SUPPORTED_VERSION}, and TRL {trl.__version__} differs from "
        f"it: {difference}"
    )
