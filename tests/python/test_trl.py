"""GRPO with TRL: packed trainings are the stock ones, what cannot be packed says so, groups stay together."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

trl = pytest.importorskip("trl")

from dualkv.integrations import trl as integration  # noqa: E402
from dualkv.integrations.trl import GRPOTrainer, group_rows, regroup  # noqa: E402
from trl_runs import (  # noqa: E402
    RESPONSE,
    VOCAB,
    PackedTrainer,
    StockTrainer,
    assert_same_training,
    make_prompts,
    make_tokenizer,
    make_trainer,
    metrics_of,
    save_model,
    share_of_low_ids,
    weights_of,
)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def train_both(tmp_path):
    """Trains packed and stock with the same options. Returns both trainers, the packed one first."""

    def train(model, packed_class=PackedTrainer, stock_class=StockTrainer, **options):
        trainers = []
        for kind in (packed_class, stock_class):
            trainers.append(make_trainer(kind, model, tmp_path, **options))  # sets the seeds
            trainers[-1].train()
        return trainers

    return train


@pytest.fixture
def in_order(monkeypatch):
    """TRL does not shuffle the rows of a generated batch, so that stock micro-batches hold whole groups too."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda rows: rows)


def token_ratios(trainer) -> list[float]:
    history = trainer.state.log_history
    return [entry["dualkv/token_ratio"] for entry in history if "dualkv/token_ratio" in entry]


# ------------------------------------------------------------------------------------------ the same training


@pytest.mark.parametrize("optimizer", [{}, {"optim": "adamw_torch", "learning_rate": 1e-3}])
def test_twenty_steps_with_reference_and_old_policy(qwen3, train_both, optimizer):
    packed, stock = train_both(qwen3, max_steps=20, beta=0.1, num_iterations=2, **optimizer)
    assert_same_training(packed, stock)
    assert min(token_ratios(packed)) > 1.5
    assert max(entry.get("kl", 0.0) for entry in metrics_of(packed)) > 1e-3
    if not optimizer:
        assert max(entry.get("clip_ratio/region_mean", 0.0) for entry in metrics_of(packed)) > 0.1


OPTIONS = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "learning_rate": 0.005},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "top entropy": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.1},
    "truncated completions": {"mask_truncated_completions": True},
    "temperature": {"temperature": 0.7},
    "fp32 head": {"cast_lm_head_to_fp32": True},
    "no checkpointing": {"gradient_checkpointing": False},
    "reentrant checkpointing": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "padded widths": {"pad_to_multiple_of": 16},
    "groups across micro-batches": {
        "per_device_train_batch_size": 2,
        "steps_per_generation": 4,
        "max_steps": 8,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(qwen3, train_both, in_order, options):
    assert_same_training(*train_both(qwen3, **{"num_iterations": 2, "max_steps": 3, **options}))


def test_gradient_accumulation(qwen3, train_both, in_order):
    packed, stock = train_both(
        qwen3, steps_per_generation=4, gradient_accumulation_steps=2, max_steps=4, beta=0.1
    )
    assert_same_training(packed, stock)
    assert min(token_ratios(packed)) > 1.5


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_gradient_accumulation_over_micro_batches_of_other_rows(qwen3, train_both, loss):
    """Stock micro-batches hold what TRL's shuffle gives them, packed ones whole groups."""
    packed, stock = train_both(
        qwen3,
        loss_type=loss,
        steps_per_generation=4,
        gradient_accumulation_steps=4,
        max_steps=4,
        beta=0.1,
        learning_rate=0.02,
    )
    assert_same_training(packed, stock, except_for=["entropy", "kl"])  # means over a micro-batch's tokens
    entropies = [metrics_of(trainer)[0]["entropy"] for trainer in (packed, stock)]
    assert abs(entropies[0] - entropies[1]) > 1e-4, "the rows of micro-batches are the same"


def test_autocast(qwen3, train_both, cpu_or_gpu):
    options = {"use_cpu": cpu_or_gpu.type == "cpu", "beta": 0.1, "num_iterations": 2, "learning_rate": 0.005}
    packed, stock = train_both(qwen3, bf16=True, max_steps=3, **options)
    assert_same_training(packed, stock, tolerance=0.03)
    assert min(token_ratios(packed)) > 1.5


def test_softcaps_windows_and_eager_attention(tmp_path, train_both):
    model = save_model(
        tmp_path / "model",
        "Gemma2Config",
        sliding_window=4,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
        attn_implementation="eager",
    )
    packed, stock = train_both(model, beta=0.1, model_init_kwargs={"attn_implementation": "eager"})
    assert_same_training(packed, stock)
    assert min(token_ratios(packed)) > 1.5


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(qwen3, train_both, beta):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    packed, stock = train_both(qwen3, peft_config=lora, num_iterations=2, beta=beta)
    assert_same_training(packed, stock)
    assert min(token_ratios(packed)) > 1.5


def test_tokens_of_an_environment_are_seen_and_not_trained(qwen3, train_both, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def rollout(prompts, trainer):
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        completion_ids, _ = trainer._generate_single_turn(prompt_ids)
        mask = [[int(i % 3 != 1) for i in range(len(ids))] for ids in completion_ids]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": None,
            "env_mask": mask,
        }

    assert_same_training(*train_both(qwen3, num_iterations=2, rollout_func=rollout))


def test_completions_sampled_from_the_model(qwen3, train_both):
    packed, stock = train_both(qwen3, GRPOTrainer, trl.GRPOTrainer, max_steps=3)
    assert_same_training(packed, stock)


def test_evaluation(qwen3, tmp_path):
    trainers = [
        make_trainer(
            kind, qwen3, tmp_path, beta=0.1, per_device_eval_batch_size=8, eval_dataset=make_prompts(2)
        )
        for kind in (PackedTrainer, StockTrainer)
    ]
    packed, stock = (trainer.evaluate() for trainer in trainers)
    assert packed["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-6)
    assert packed["eval_entropy"] == pytest.approx(stock["eval_entropy"], rel=1e-5)
    assert packed["eval_dualkv/token_ratio"] > 1.5


def test_the_logged_token_ratio_is_that_of_all_tokens(qwen3, tmp_path):
    trainer = make_trainer(PackedTrainer, qwen3, tmp_path)

    def compute(prompt, rows_share_it, **inputs):
        """A pass of 4 rows, each a prompt of so many tokens and 4 of a response."""
        ids = torch.full((4, prompt + 4), 5)
        if not rows_share_it:
            ids[:, 0] = torch.arange(5, 9)
        mask = torch.ones_like(ids)
        mask[:, -1] = 0  # padding is not counted
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4, **inputs)

    def logged():
        trainer.log({})
        return trainer.state.log_history[-1]

    trainer.model.train()
    compute(40, rows_share_it=False)
    compute(5, rows_share_it=True)
    trainer.model.eval()
    compute(6, rows_share_it=True)
    trainer.model.train()
    assert logged()["dualkv/token_ratio"] == pytest.approx((4 * 43 + 4 * 8) / (4 * 43 + 5 + 4 * 3))
    compute(5, rows_share_it=True)
    compute(5, rows_share_it=True, token_type_ids=torch.zeros(4, 9, dtype=torch.long))  # runs as in TRL
    assert logged()["dualkv/token_ratio"] == pytest.approx((4 * 8 + 4 * 8) / (5 + 4 * 3 + 4 * 8))
    trainer.model.eval()
    assert logged()["eval_dualkv/token_ratio"] == pytest.approx(4 * 9 / (6 + 4 * 3))


def test_completions_that_are_masked_altogether(qwen3, tmp_path):
    """Log-probs, entropies and gradients are 0, as in TRL."""
    trainer = make_trainer(PackedTrainer, qwen3, tmp_path)
    ids = torch.full((4, 9), 5)
    mask = torch.ones_like(ids)
    mask[:, 5:] = 0
    logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, 4, compute_entropy=True
    )
    (logprobs + entropies).sum().backward()
    assert torch.equal(logprobs, torch.zeros(4, 4)) and torch.equal(entropies, torch.zeros(4, 4))
    assert all(parameter.grad.abs().max() == 0 for parameter in trainer.model.parameters())


def test_the_model_keeps_its_own_attention(qwen3, tmp_path):
    trainer = make_trainer(PackedTrainer, qwen3, tmp_path, max_steps=2)
    assert trainer.model.config._attn_implementation == "sdpa"
    trainer.train()
    assert trainer.model.config._attn_implementation == "sdpa"
    ids = torch.tensor([[4, 5, 6]])
    assert trainer.model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)


# ---------------------------------------------------------------------------------- what cannot be packed


def warnings_of(action) -> list[str]:
    """This library's warnings in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if message.startswith("dualkv: ")]


def assert_runs_as_in_trl(tmp_path, model, message: str, **options) -> None:
    """One warning from construction to the end of training, and the same bits as stock."""
    trainers = []

    def train(kind):
        trainers.append(make_trainer(kind, model, tmp_path, max_steps=3, **options))
        trainers[-1].train()

    (found,) = warnings_of(lambda: train(PackedTrainer))
    assert message in found and found.endswith("runs as in TRL, without packing"), found
    train(StockTrainer)
    packed, stock = trainers
    assert metrics_of(packed) == metrics_of(stock)
    assert set(token_ratios(packed)) == {1.0}
    for name, value in weights_of(stock).items():
        assert torch.equal(weights_of(packed)[name], value), name


def test_unsupported_models_run_as_in_trl(tmp_path):
    model = save_model(tmp_path / "model", "PhiConfig", partial_rotary_factor=0.5)
    assert_runs_as_in_trl(tmp_path, model, "model type 'phi' (PhiForCausalLM) is not supported")


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def test_auxiliary_losses_run_as_in_trl(tmp_path):
    model = save_model(tmp_path / "model", "Qwen3MoeConfig", **EXPERTS)
    assert_runs_as_in_trl(tmp_path, model, "the auxiliary loss of routers")


def test_experts_without_auxiliary_loss_are_packed(tmp_path, train_both):
    model = save_model(tmp_path / "model", "Qwen3MoeConfig", **EXPERTS)
    packed, stock = train_both(model, router_aux_loss_coef=0.0)
    assert_same_training(packed, stock)
    assert min(token_ratios(packed)) > 1.5


def test_attention_dropout_runs_as_in_trl(tmp_path):
    model = save_model(tmp_path / "model", attention_dropout=0.1)
    assert_runs_as_in_trl(tmp_path, model, "attention dropout")


def test_heads_of_another_kind_run_as_in_trl(qwen3, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    reason = "(lm_head) is peft.utils.other.ModulesToSaveWrapper"
    assert_runs_as_in_trl(tmp_path, qwen3, reason, peft_config=lora)


def test_other_adapters_run_as_in_trl(qwen3, tmp_path):
    peft = pytest.importorskip("peft")
    prompt_tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert_runs_as_in_trl(tmp_path, qwen3, "peft adapters of PromptTuningConfig", peft_config=prompt_tuning)


def on_device(trainer, device: str, mixed_precision: str = "no", **args):
    """What is asked about the trainer's device, as if it were another one."""
    accelerator = SimpleNamespace(device=torch.device(device), mixed_precision=mixed_precision)
    return SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(cast_lm_head_to_fp32=False, **args))


@pytest.fixture
def hopper(monkeypatch):
    """As if there were a GPU of compute capability 9.0, and a build with kernels for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(integration, "tile_sizes", lambda *arguments: ())
    monkeypatch.setattr(integration, "require_products", lambda dtype: None)


def refuse(*arguments):
    raise NotImplementedError(f"refused {arguments}")


def test_gpus_of_another_compute_capability_run_as_in_trl(qwen3, tmp_path, monkeypatch):
    ask = integration._reason_against_device
    monkeypatch.setattr(
        integration,
        "_reason_against_device",
        lambda trainer, policy: ask(on_device(trainer, "cuda:0"), policy),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert_runs_as_in_trl(tmp_path, qwen3, "need a GPU of compute capability 9.0, got 8.6")


def test_what_the_cuda_kernels_cannot_run_has_a_reason(qwen3, tmp_path, hopper, monkeypatch):
    trainer = make_trainer(PackedTrainer, qwen3, tmp_path)

    def reason(*where):
        return integration._reason_against_device(on_device(trainer, *where), trainer.model)

    assert reason("cpu") is None
    assert "device mps is not supported" in reason("mps")
    assert "need bf16 or fp16 (bf16=True), got a training in torch.float32" in reason("cuda:0")
    assert reason("cuda:0", "bf16") is None
    assert reason("cuda:0", "fp16") is None
    trainer.model.to(torch.bfloat16)
    assert reason("cuda:0") is None
    monkeypatch.setattr(integration, "require_products", refuse)
    assert reason("cuda:0") == "refused (torch.bfloat16,)"
    monkeypatch.setattr(integration, "tile_sizes", refuse)
    assert reason("cuda:0") == "refused (1, 4, 2, 8)"


def test_multimodal_inputs_run_as_in_trl(qwen3, tmp_path):
    packed, stock = (make_trainer(kind, qwen3, tmp_path) for kind in (PackedTrainer, StockTrainer))
    ids = torch.randint(3, VOCAB, (4, 9))
    inputs = {"token_type_ids": torch.zeros_like(ids), "num_images": [0, 0, 0, 0]}

    def compute(trainer):
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 4, compute_entropy=True, **inputs
        )

    results = []
    found = warnings_of(lambda: results.extend([compute(packed), compute(packed)]))
    assert found == ["dualkv: a batch has num_images, token_type_ids: it runs as in TRL, without packing"]
    assert torch.equal(results[1][0], compute(stock)[0])
    assert torch.equal(results[1][1], compute(stock)[1])


def test_training_on_multimodal_inputs_is_as_in_trl(qwen3, train_both):
    """Qwen3 has no use for `token_type_ids`, and no objection either."""

    class WithTypes:
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            return {**batch, "token_type_ids": torch.zeros_like(ids)}

    class Packed(WithTypes, PackedTrainer):
        pass

    class Stock(WithTypes, StockTrainer):
        pass

    trainers = []
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    (message,) = warnings_of(lambda: trainers.extend(train_both(qwen3, Packed, Stock, **options)))
    assert "a batch has token_type_ids" in message
    assert_same_training(*trainers, tolerance=0.0)


def test_nothing_to_share_is_packed_with_one_warning(qwen3, train_both, in_order):
    trainers = []
    options = {"per_device_train_batch_size": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
    (message,) = warnings_of(lambda: trainers.extend(train_both(qwen3, **options)))
    assert "no two rows of a micro-batch share a prompt" in message
    assert_same_training(*trainers)
    assert set(token_ratios(trainers[0])) == {1.0}


def test_nothing_to_share_in_an_evaluation_is_no_warning_and_hides_none(qwen3, tmp_path):
    trainer = make_trainer(
        PackedTrainer,
        qwen3,
        tmp_path,
        per_device_train_batch_size=1,
        steps_per_generation=4,
        per_device_eval_batch_size=8,
        num_generations_eval=1,
        eval_dataset=make_prompts(),
    )
    assert warnings_of(trainer.evaluate) == []
    (message,) = warnings_of(trainer.train)
    assert "per_device_train_batch_size should be a multiple of num_generations" in message


# ------------------------------------------------------------------------------------------ other versions


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0.dev0", "1.160.0", "2.16.0"])
def test_another_version_is_an_error_at_construction(monkeypatch, version):
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"supports TRL 1\.16, and TRL {version} is installed"):
        GRPOTrainer("no model is loaded")


def test_the_extra_installs_the_supported_version():
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'\ntrl = ["trl=={integration._SUPPORTED_VERSION}.*"]\n' in project


def test_a_method_with_other_parameters_is_an_error_at_construction(monkeypatch):
    monkeypatch.setattr(trl.GRPOTrainer, "_prepare_inputs", lambda self, inputs: inputs)
    message = r"supports TRL 1\.16, and TRL .*\._prepare_inputs takes \(self, inputs\), not \(self, gen"
    with pytest.raises(RuntimeError, match=message):
        GRPOTrainer("no model is loaded")


def test_a_missing_method_is_an_error_at_construction(monkeypatch):
    monkeypatch.delattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies")
    with pytest.raises(RuntimeError, match="_get_per_token_logps_and_entropies is missing"):
        GRPOTrainer("no model is loaded")


def test_a_missing_attribute_is_an_error_at_construction(qwen3, tmp_path, monkeypatch):
    construct = trl.GRPOTrainer.__init__

    def without_buffer(self, *arguments, **options):
        construct(self, *arguments, **options)
        del self._buffered_inputs

    monkeypatch.setattr(trl.GRPOTrainer, "__init__", without_buffer)
    with pytest.raises(RuntimeError, match="has no _buffered_inputs"):
        make_trainer(PackedTrainer, qwen3, tmp_path)


def test_overrides_take_what_trl_passes():
    for name in ("_prepare_inputs", "_get_per_token_logps_and_entropies"):
        ours = inspect.signature(getattr(GRPOTrainer, name))
        theirs = inspect.signature(getattr(trl.GRPOTrainer, name))
        ours.bind(**dict.fromkeys(theirs.parameters))


# ------------------------------------------------------------------------------------------------- groups


@settings(deadline=None)
@given(st.data())
def test_every_row_is_dealt_once_and_groups_are_split_only_for_want_of_room(data):
    rows_each, count = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 6))
    ids = data.draw(st.lists(st.integers(0, 5), min_size=rows_each * count, max_size=rows_each * count))
    dealt = group_rows(ids, rows_each)
    assert [len(rows) for rows in dealt] == [rows_each] * count
    assert sorted(sum(dealt, [])) == list(range(len(ids)))
    for rows in dealt:
        groups = [ids[row] for row in rows]
        changes = sum(a != b for a, b in zip(groups, groups[1:]))
        assert changes == len(set(groups)) - 1  # the rows of a group stand side by side


@pytest.mark.parametrize(
    "sizes, rows_each, parts",
    [
        ([4, 4, 4, 4], 8, [1, 1, 1, 1]),
        ([8, 8], 4, [2, 2]),
        ([2, 4, 4, 2], 4, [1, 1, 1, 1]),
        ([4, 4, 4], 6, [1, 1, 2]),
        ([3, 3], 2, [2, 2]),
    ],
)
def test_number_of_micro_batches_that_a_group_is_in(sizes, rows_each, parts):
    ids = [g for g, size in enumerate(sizes) for _ in range(size)]
    shuffled = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).tolist()
    ids = [ids[i] for i in shuffled]
    dealt = group_rows(ids, rows_each)
    found = Counter(group for rows in dealt for group in {ids[row] for row in rows})
    assert sorted(found.values()) == sorted(parts)


def test_regroup_moves_whole_rows():
    prompts = torch.tensor([[0, 5], [7, 8], [0, 5], [7, 8]])
    mask = torch.tensor([[0, 1], [1, 1], [0, 1], [1, 1]])
    rows = torch.arange(4)

    def micro_batch(part):
        return {
            "prompt_ids": prompts[part],
            "prompt_mask": mask[part],
            "advantages": rows[part] / 10,
            "completion_ids": rows[part, None],
            "num_items_in_batch": torch.tensor(9),
            "nothing": None,
            "names": [f"row {row}" for row in rows[part].tolist()],
        }

    first, second = regroup([micro_batch(slice(0, 2)), micro_batch(slice(2, 4))])
    assert first["completion_ids"].tolist() == [[0], [2]] and second["completion_ids"].tolist() == [[1], [3]]
    assert first["prompt_ids"].tolist() == [[0, 5]] * 2 and second["prompt_mask"].tolist() == [[1, 1]] * 2
    torch.testing.assert_close(second["advantages"], torch.tensor([0.1, 0.3]))
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 9
    assert first["nothing"] is None
    assert first["names"] == ["row 0", "row 2"] and second["names"] == ["row 1", "row 3"]


def test_groups_stay_together_in_random_order(qwen3, tmp_path):
    """Micro-batches of 8 rows hold two whole groups of 4, which are not always those that came side by side."""
    trainer = make_trainer(
        PackedTrainer, qwen3, tmp_path, steps_per_generation=4, gradient_accumulation_steps=4, max_steps=4
    )
    neighbours = []
    compute = trainer._compute_loss

    def watch(model, inputs):
        prompts = Counter(tuple(prompt) for prompt in inputs["prompt_ids"].tolist())
        assert set(prompts.values()) == {4}
        neighbours.append(frozenset(prompts))
        return compute(model, inputs)

    trainer._compute_loss = watch
    trainer.train()
    assert len(neighbours) == 16 and len(set(neighbours)) > 4


def test_completion_length_and_reward_of_the_tests_vary():
    """The runs above would prove little otherwise."""
    assert make_tokenizer()("w0 w28 nothing")["input_ids"] == [3, 31, 2]
    assert len({len(row["prompt"].split()) for row in make_prompts()}) > 3
    assert share_of_low_ids([[3, 31], [4]]) == [0.5, 1.0] and RESPONSE > 3
