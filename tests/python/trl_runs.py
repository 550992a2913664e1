"""Short GRPO trainings of a tiny Qwen3 with TRL, stock and packed, on completions that nobody has to sample."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")

from datasets import Dataset  # noqa: E402

from dualkv.integrations.trl import GRPOTrainer  # noqa: E402

VOCAB = 32
RESPONSE = 6  # tokens at most

# What a run's clock says, and what only packed runs log.
_INCOMPARABLE = ("step_time", "runtime", "per_second", "dualkv")


def make_tokenizer():
    """A token for each word: w0 to w27, and special ones."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_model(path, config_class="Qwen3Config", **options) -> str:
    """Saves a tiny random model of two layers, H = 4, Hk = 2, D = 8. Returns the path."""
    config = getattr(transformers, config_class)(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # The default initialisation is so small that attention is almost uniform and hides mistakes.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.25)
    model.save_pretrained(path)
    return str(path)


def make_prompts(count: int = 8, seed: int = 0) -> Dataset:
    """Prompts of 5 to 12 words."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, size=()):
        return torch.randint(low, high, size, generator=generator)

    lengths = [int(draw(5, 13)) for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": " ".join(f"w{i}" for i in draw(0, VOCAB - 3, (n,)).tolist())} for n in lengths]
    )


def share_of_low_ids(completion_ids, **columns) -> list[float]:
    return [sum(token < VOCAB // 2 for token in ids) / len(ids) for ids in completion_ids]


class MadeUpCompletions:
    """Completions from the step and the row: the same in every run, ragged, most of them with an end."""

    def _generate_single_turn(self, prompt_ids, *arguments, **options):
        seed = 1000 * self._step + self.accelerator.process_index
        generator = torch.Generator().manual_seed(seed)
        completions = []
        for _ in prompt_ids:
            length = int(torch.randint(1, RESPONSE + 1, (), generator=generator))
            tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            completions.append(tokens if length == RESPONSE else [*tokens, 1])
        return completions, None


class StockTrainer(MadeUpCompletions, trl.GRPOTrainer):
    pass


class PackedTrainer(MadeUpCompletions, GRPOTrainer):
    pass


# Options that are the trainer's own, not its configuration's.
_OF_TRAINER = ("eval_dataset", "peft_config", "rollout_func")


def make_trainer(trainer_class, model, tmp_path, **options):
    options = {
        "learning_rate": 0.05,
        # Adam divides by the size of a gradient: where that is no more than rounding, so is the update's sign.
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "steps_per_generation": 1,
        "max_completion_length": RESPONSE,
        "bf16": False,
        "use_cpu": True,
        **options,
    }
    of_trainer = {name: options.pop(name) for name in _OF_TRAINER if name in options}
    return trainer_class(
        model=model,
        reward_funcs=share_of_low_ids,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
        **of_trainer,
    )


def metrics_of(trainer) -> list[dict]:
    """What was logged, without times."""
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in _INCOMPARABLE)}
        for entry in trainer.state.log_history
    ]


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def assert_same_training(packed, stock, tolerance=2e-5, except_for=()) -> None:
    """Metrics, but for some, and weights of two finished trainings agree."""
    assert len(packed.state.log_history) == len(stock.state.log_history)
    for step, (found, expected) in enumerate(zip(metrics_of(packed), metrics_of(stock))):
        assert found.keys() == expected.keys()
        for name in expected.keys() - set(except_for):
            value = expected[name]
            assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), f"{name}, entry {step}"
    start = {name: value.clone() for name, value in weights_of(stock).items()}
    for name, value in weights_of(packed).items():
        torch.testing.assert_close(
            value, start[name], rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
        )
