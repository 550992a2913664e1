"""bench/policy_update.py and bench/single_layer.py with tiny sizes on a CPU; the tables and the page made from them."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import dualkv

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "bench"), str(ROOT / "tools")]
import draw_policy_update  # noqa: E402
import largest_micro_batch  # noqa: E402
import mfu  # noqa: E402
import single_layer  # noqa: E402
from attention_batches import SINGLE_LAYER, Batch  # noqa: E402
from meter import BACKENDS, Meter, seconds_of_backends  # noqa: E402

# Not by its name, which an example has too.
_spec = importlib.util.spec_from_file_location("bench_policy_update", ROOT / "bench" / "policy_update.py")
policy_update = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(policy_update)

METER = Meter("cpu")
RUN = ["--tiny", "--device", "cpu", "--commit", "a commit"]


def run(*arguments) -> list[dict]:
    """The records that the program writes."""
    arguments = [str(argument) for argument in arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["policy_update.py", *RUN, *arguments])
        policy_update.main()
    return json.loads(Path(arguments[arguments.index("--output") + 1]).read_text())


def of_part(records: list[dict], name: str, **wanted) -> list[dict]:
    return draw_policy_update.part(records, name, **wanted)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[dict]:
    return run(
        "--parts", "policy", "largest", "layer", "--output", tmp_path_factory.mktemp("run") / "out.json"
    )


# ----------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("count, ratio", [(4, 2.5), (8, 10 / 3), (16, 4.0)])
def test_token_ratios(count, ratio):
    lengths = policy_update.LENGTHS
    problem = policy_update.Problem({"vocab_size": 9}, lengths["prompt"], lengths["response"], count)
    sides = policy_update.Packed(problem), policy_update.Replicated(problem, "MATH")
    packed, replicated = ({"tokens": side.tokens, "old_s": 1.0, "update_s": 4.0} for side in sides)
    found = policy_update.speedups(packed, {**replicated, "old_s": 2.0, "update_s": 10.0})
    assert found["token_ratio"] == pytest.approx(ratio)
    assert (found["old_speedup"], found["update_speedup"]) == (2.0, 2.5)
    assert found["update_speedup_of_ratio"] == pytest.approx(2.5 / ratio)


def test_flops_are_those_of_the_weights_and_of_visible_pairs():
    sizes = policy_update.QWEN3_8B
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3Config(**sizes, tie_word_embeddings=False)
        )
    layers = sum(x.numel() for x in model.model.layers.parameters() if x.dim() == 2)
    head = model.lm_head.weight.numel()
    assert mfu.forward_flops(sizes, tokens=5, scored=3, pairs=0) == 2 * (5 * layers + 3 * head)
    attention = mfu.forward_flops(sizes, tokens=0, scored=0, pairs=7)
    assert attention == 36 * 32 * 7 * (2 * 128 + 2 * 128)  # layers, heads, pairs, scores and weighted values

    packed = mfu.batch_flops(sizes, 8192, 2048, 4, replicated=False)
    pairs = 8192**2 / 2 + 4 * (8192 * 2048 + 2048**2 / 2)
    assert packed == mfu.forward_flops(sizes, 8192 + 4 * 2048, 4 * 2047 + 1, pairs)
    replicated = mfu.batch_flops(sizes, 8192, 2048, 4, replicated=True)
    assert replicated == mfu.forward_flops(sizes, 4 * 10240, 4 * 2048, 4 * 10240**2 / 2)


def test_utilization():
    sizes, micro_batch = policy_update.TINY, {"prompt": 24, "response": 8, "count": 4}
    replicated, packed = (mfu.batch_flops(sizes, **micro_batch, replicated=x) for x in (True, False))
    seconds = {"old": 2.0, "update": 3.0}
    peaks = {"": 1e-12 * replicated, "_of_matmul": 2e-12 * replicated, "_of_nothing": None}
    found = mfu.utilization(sizes, micro_batch, seconds, False, peaks)
    assert found["old_effective_mfu"] == pytest.approx(1 / 2)
    assert found["update_effective_mfu"] == pytest.approx(3 / 3)
    assert found["update_effective_mfu_of_matmul"] == pytest.approx(1 / 2)
    assert found["update_physical_mfu"] == pytest.approx(packed / replicated)
    assert found["old_effective_mfu_of_nothing"] is None
    of_replicated = mfu.utilization(sizes, micro_batch, seconds, True, peaks)
    assert of_replicated["update_physical_mfu"] == of_replicated["update_effective_mfu"]


# ------------------------------------------------------------------------------------------------- policy update


def test_both_sides_of_an_update_agree(records):
    for record in of_part(records, "comparison"):
        assert record["logprob_difference"] < 1e-5
        assert set(record["gradient_differences"]) == set(policy_update.COMPARED)
        assert max(record["gradient_differences"].values()) < 1e-5
    first, second = of_part(records, "comparison")
    assert first["token_ratio"] == 2 * 32 / (24 + 2 * 8) and second["token_ratio"] == 4 * 32 / (24 + 4 * 8)
    assert "between_backends" in first and "between_backends" not in second


def test_records_of_an_update(records):
    found = of_part(records, "policy")
    sides = [(record["micro_batch"], record["side"]) for record in found]
    assert sides == [(2, "packed"), (2, "replicated"), (2, "replicated"), (4, "packed"), (4, "replicated")]
    assert found[1]["attention"] != found[2]["attention"] and found[1]["attention"] == found[4]["attention"]
    for record in found:
        assert record["status"] == "ok" and record["layers"] == 3 and record["commit"] == "a commit"
        assert record["weights_bytes"] > 0 and record["matmul_tflops"] > 0
        assert {"device", "dtype", "torch", "transformers", "sdpa_seconds", "nominal_tflops"} <= set(record)
        for name in mfu.PASSES:
            assert record[f"{name}_s"] > 0
            assert {f"{name}_allocated_bytes", f"{name}_reserved_bytes"} <= set(record)
            effective, physical = (record[f"{name}_{of}_mfu_of_matmul"] for of in ("effective", "physical"))
            assert effective == physical if record["side"] == "replicated" else effective > physical


def test_gradients_differ_where_a_side_is_wrong(tmp_path, monkeypatch):
    class Wrong(policy_update.Packed):
        def logprobs(self, model):
            return 1.01 * super().logprobs(model)

    monkeypatch.setattr(policy_update, "Packed", Wrong)
    [record] = of_part(
        run("--parts", "policy", "--micro-batches", 2, "--output", tmp_path / "out.json"), "comparison"
    )
    assert record["logprob_difference"] > 1e-3 and max(record["gradient_differences"].values()) > 1e-3


def test_replicated_is_stock_attention_without_masks_or_copied_keys(monkeypatch):
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((q.shape, k.shape, options))
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model = policy_update.make_model(policy_update.TINY, METER)
    problem = policy_update.Problem(policy_update.TINY, 24, 8, 2)
    side = policy_update.Replicated(problem, "MATH")
    side.prepare(model)
    with side.attend():
        policy_update.update(model, side, problem, None)
    assert len(calls) == 2 * 3  # layers, and again for the backward
    for q, k, options in calls:
        assert (q, k) == ((2, 4, 32, 16), (2, 2, 32, 16))
        assert options["attn_mask"] is None and options["is_causal"] and options["enable_gqa"]


def test_a_backend_that_cannot_run_leaves_its_error(monkeypatch):
    monkeypatch.setitem(BACKENDS, "cpu", ["CUDNN_ATTENTION", "MATH"])
    found = seconds_of_backends(METER, policy_update.TINY, 32)
    assert found["MATH"] > 0 and "RuntimeError" in found["CUDNN_ATTENTION"]


def test_a_side_that_is_out_of_memory_is_a_record(tmp_path, monkeypatch):
    class Large(policy_update.Replicated):
        def logprobs(self, model):
            if len(self.input_ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nand more")
            return super().logprobs(model)

    monkeypatch.setattr(policy_update, "Replicated", Large)
    records = run("--parts", "policy", "--output", tmp_path / "out.json")
    record = of_part(records, "policy", micro_batch=4, side="replicated")[0]
    assert record["status"] == "oom"
    assert record["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"
    assert of_part(records, "policy", micro_batch=4, side="packed")[0]["status"] == "ok"
    assert [record["micro_batch"] for record in of_part(records, "comparison")] == [2]


def test_nothing_is_measured_after_the_budget(tmp_path):
    records = run("--budget-s", 0, "--output", tmp_path / "out.json")
    assert {record["status"] for record in records if record["part"] == "layer"} == {"skipped"}
    found = of_part(records, "policy")
    assert [record["status"] for record in found].count("ok") == 0 and found[0]["estimate_s"] == 0
    assert found[0]["error"] == "it would take longer than what is left of the budget"


def test_records_of_what_is_not_measured_are_kept(tmp_path):
    output = tmp_path / "out.json"
    kept = [{"part": "layer", "batch": "kept"}, {"part": "comparison", "micro_batch": 3}]
    output.write_text(json.dumps([*kept, {"part": "comparison", "micro_batch": 2, "old": True}]))
    records = run("--parts", "policy", "--micro-batches", 2, "--output", output)
    assert records[:2] == kept and records[2]["part"] == "policy"
    compared = of_part(records[2:], "comparison")
    assert [record["micro_batch"] for record in compared] == [2] and "old" not in compared[0]

    output.write_text(
        json.dumps([{"part": "layer", "prompt": 39}, {"part": "layer", "prompt": 64, "old": True}])
    )
    records = run("--parts", "layer", "--layer-prompts", 64, "--impls", "dualkv", "--output", output)
    assert records[0] == {"part": "layer", "prompt": 39}
    assert [record["batch"] for record in records[1:]] == ["8192, 1", "8192, 2", "8192, 4"]
    assert all(record["prompt"] == 64 and "old" not in record for record in records[1:])


@pytest.mark.usefixtures("gpu")
def test_everything_runs_on_a_gpu(tmp_path):
    impls = [name for name in single_layer.IMPLS if name != "flex"]  # which takes a while to compile
    records = run("--device", "cuda", "--impls", *impls, "--output", tmp_path / "out.json")
    failed = [
        record["error"] for record in records if record["part"] != "comparison" and record["status"] != "ok"
    ]
    assert not failed
    assert all(record["update_allocated_bytes"] > 0 for record in of_part(records, "policy"))
    for record in of_part(records, "comparison"):
        assert record["logprob_difference"] < 0.1 and max(record["gradient_differences"].values()) < 0.1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "cpu"], "--device cpu is for --tiny only"),
        (["--tiny", "--device", "cpu", "--parts", "largest"], "--parts largest starts from"),
        (["--tiny", "--device", "cpu", "--repeats", "0"], "argument --repeats: must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["policy_update.py", *arguments])
    with pytest.raises(SystemExit):
        policy_update.main()
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- largest micro-batch


@pytest.mark.parametrize("fits", [16, 17, 29, 64, 200])
@pytest.mark.parametrize("off", [0.9, 1.0, 1.1, 1.25, 2.0])
def test_the_largest_micro_batch_is_found_in_few_tries(fits, off):
    """Peaks lie on a line; memory ends a bit before it should, or some time before, or after."""
    peaks = {count: 30 + count for count in (4, 8, 16)}
    capacity, fails, tries = int(off * (30 + fits)), None, 0
    while (count := largest_micro_batch.next_micro_batch(peaks, fails, capacity)) is not None:
        assert max(peaks) < count and (fails is None or count < fails)
        tries += 1
        if count <= fits:
            peaks[count] = 30 + count
        else:
            fails = count
    assert max(peaks) <= fits < fails
    assert fails - max(peaks) <= max(1, largest_micro_batch.WITHIN * max(peaks))
    assert tries <= (4 if off == 1.0 else policy_update.LARGEST_TRIES)


@pytest.mark.parametrize("most_tries, status, out_of_memory", [(3, "ok", 39), (2, "skipped", 40)])
def test_the_largest_micro_batch_of_a_side(tmp_path, monkeypatch, most_tries, status, out_of_memory):
    """With a device that has 40 bytes, and updates that take one for each response."""

    class Fake(Meter):
        def capacity(self):
            return 40

        def timed(self, function):
            seconds, result, peaks = super().timed(function)
            return seconds, result, {**peaks, "allocated_bytes": count_of["now"]}

    count_of = {}
    update = policy_update.update

    def limited(model, side, problem, old):
        count_of["now"] = len(problem.lengths)
        if count_of["now"] > 38:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return update(model, side, problem, old)

    count_of["now"] = 0
    monkeypatch.setattr(policy_update, "Meter", Fake)
    monkeypatch.setattr(policy_update, "update", limited)
    monkeypatch.setattr(policy_update, "LARGEST_TRIES", most_tries)
    found = of_part(run("--parts", "policy", "largest", "--output", tmp_path / "out.json"), "largest")
    assert [record["side"] for record in found] == ["packed", "replicated"]
    for record in found:
        assert (record["status"], record["fits"], record["out_of_memory"]) == (status, 38, out_of_memory)
        tries = [(tried["micro_batch"], tried["status"]) for tried in record["tries"]]
        assert tries == [(40, "oom"), (38, "ok"), (39, "oom")][:most_tries]


def test_without_measured_memory_there_is_no_largest_micro_batch(records):
    errors = {record["side"]: record["error"] for record in of_part(records, "largest", status="error")}
    error = "nothing to start from: memory is not measured with --device cpu"
    assert errors == {"packed": error, "replicated": error}


# --------------------------------------------------------------------------------------------------------- layer


def test_the_batches_are_those_of_the_paper():
    assert len(SINGLE_LAYER) == 54
    prompts = [5059, *(8192 << shift for shift in range(8))]
    sizes = [(batch.groups[0][0], len(batch.groups[0][1])) for batch in SINGLE_LAYER]
    assert sizes == [(prompt, 1 << shift) for prompt in prompts for shift in range(6)]
    assert SINGLE_LAYER[5].tokens == 5059 + 36264


def test_records_of_the_layer(records):
    found = of_part(records, "layer")
    assert len(found) == len(single_layer.TINY_BATCHES) * len(single_layer.IMPLS) == 24
    assert [record["impl"] for record in found[:4]] == list(single_layer.IMPLS)
    for record in found:
        if record["impl"] == "flex":  # which has no backward on a CPU
            assert record["status"] == "error" and "does not support backward on CPU" in record["error"]
        else:
            assert record["status"] == "ok" and record["difference"] < 1e-5
            assert record["seconds"] > 0 and record["useful_tflops"] > 0 and record["warm"]
            assert record["rows"] >= record["tokens"]
            assert {"allocated_bytes", "reserved_bytes", "weights_bytes", "sdpa_backend"} <= set(record)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_without_gradients():
    layer = single_layer.Layer(policy_update.TINY, METER)
    batch = Batch("small", [(140, [20, 130, 7])])
    hidden = torch.randn(batch.tokens, 32)
    with torch.no_grad():
        outs = []
        for make in (single_layer.Dualkv, single_layer.Flex):
            impl = make(batch, METER)
            outs.append(layer(hidden, impl.positions, impl.attend))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "prompt, responses", [(1, [1]), (300, [90, 200, 1]), (128, [128, 256]), (500, [3] * 9)]
)
def test_blocks_of_the_mask_are_those_of_its_pairs(prompt, responses):
    forest = dualkv.SegmentForest.from_groups([prompt], [responses])
    mask = single_layer.shared_prompt_mask(forest, "cpu")
    rows = torch.arange(forest.total_tokens)
    seen = mask.mask_mod(None, None, rows[:, None], rows)
    assert seen.sum() == forest.visible_pairs()
    size = single_layer.FLEX_BLOCK
    blocks = math.ceil(len(rows) / size)
    for name, lists in (
        ("some", (mask.kv_num_blocks, mask.kv_indices)),
        ("full", (mask.full_kv_num_blocks, mask.full_kv_indices)),
    ):
        counts, indices = (x[0, 0] for x in lists)
        for i in range(blocks):
            listed = set(indices[i, : counts[i]].tolist())
            for j in range(blocks):
                block = seen[i * size : (i + 1) * size, j * size : (j + 1) * size]
                whole = block.all() and i != j
                assert (j in listed) == bool(whole if name == "full" else block.any() and not whole), (
                    name,
                    i,
                    j,
                )


def test_results_of_the_layer_are_compared(tmp_path, monkeypatch):
    class Wrong(single_layer.PrefixGrouping):
        def replicate(self, x):
            return 1.1 * super().replicate(x)

    monkeypatch.setitem(single_layer.IMPLS, "prefix-grouping", Wrong)
    records = run(
        "--parts", "layer", "--impls", "dualkv", "prefix-grouping", "--output", tmp_path / "out.json"
    )
    wrong = of_part(records, "layer", impl="prefix-grouping")
    assert all(record["status"] == "error" and "off by" in record["error"] for record in wrong)
    assert {record["status"] for record in of_part(records, "layer", impl="dualkv")} == {"ok"}


def test_a_layer_that_is_out_of_memory_is_not_tried_with_more_responses(tmp_path, monkeypatch):
    tried = []

    class Large(single_layer.Replicated):
        def attend(self, q, k, v):
            tried.append(self.batch.name)
            if len(self.lengths) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().attend(q, k, v)

    monkeypatch.setitem(single_layer.IMPLS, "replicated", Large)
    records = run("--parts", "layer", "--impls", "dualkv", "replicated", "--output", tmp_path / "out.json")
    found = {record["batch"]: record for record in of_part(records, "layer", impl="replicated")}
    assert [record["status"] for record in found.values()] == ["ok", "oom", "oom"] * 2
    assert found["5059, 2"]["error"] == "OutOfMemoryError: CUDA out of memory."
    assert found["5059, 4"]["error"] == "smaller 5059, 2 was out of memory" and "5059, 4" not in tried
    assert {record["status"] for record in of_part(records, "layer", impl="dualkv")} == {"ok"}


def test_calls_that_would_take_too_long_are_skipped(tmp_path):
    arguments = ["--parts", "layer", "--impls", "dualkv", "--limit-s", 0, "--output", tmp_path / "out.json"]
    first, *others = run(*arguments)
    assert first["status"] == "ok"  # nothing was known before it
    for record in others:
        assert record["status"] == "skipped" and record["estimate_s"] > 0
        assert record["error"] == "a call would take longer than the limit, 0 s"
    assert others[0]["estimate_s"] != others[1]["estimate_s"]


@pytest.mark.parametrize(
    "estimate, calls, limit, remaining, error",
    [
        (None, 2, 5, 1, None),
        (None, 2, 5, 0, "the budget is spent"),
        (1.0, 2, 5, 3, None),
        (1.0, 2, 5, 1.5, "its calls would take longer than what is left of the budget"),
        (6.0, 1, 5, 100, "a call would take longer than the limit, 5 s"),
    ],
)
def test_reasons_to_skip(estimate, calls, limit, remaining, error):
    found = single_layer.skipped(estimate, calls, limit, remaining)
    assert found == (error and {"status": "skipped", "error": error})


def test_the_estimate_of_a_call_follows_its_work():
    layer = single_layer.Layer(policy_update.TINY, METER)
    batch = Batch("small", [(60, [4, 4])])
    assert layer.estimate("dualkv", batch, None) is None
    assert layer.estimate("dualkv", batch, layer.work(68, batch)) == 1
    assert layer.estimate("replicated", batch, 1e9) > layer.estimate("dualkv", batch, 1e9)


def test_an_implementation_that_prepares_too_long_is_left_out():
    trials = single_layer.Trials()
    trials.note("5059, 1", 5059, {"status": "ok", "seconds": 1.0, "tflops": 2.0}, 42.0, 2)
    assert trials.rate == 2e12 and trials.left_out(5059) is None
    trials.note("5059, 2", 5059, {"status": "ok", "seconds": 1.0, "tflops": 2.0}, 42.0, 2)
    assert trials.left_out(5059) == {"status": "skipped", "error": "it has taken 80 s beside its calls"}


# ------------------------------------------------------------------------------------------------- page and chart


def test_the_page_has_the_tables_of_the_records():
    source = ROOT / "bench" / "results" / "h200" / "policy_update.json"
    measured = json.loads(source.read_text()) if source.exists() else None
    page = (ROOT / "docs" / "policy_update.md").read_text()
    assert page == draw_policy_update.with_tables(page, measured), "run make docs"
    assert ("Not measured yet." in page) == (measured is None)


def test_tables_and_chart(records, tmp_path, monkeypatch):
    source, page = tmp_path / "records.json", tmp_path / "page.md"
    failing = [
        {**record, "status": "oom", "error": "no"} if record.get("side") == "replicated" else record
        for record in records
    ]
    monkeypatch.setattr(draw_policy_update, "CHART_RESPONSES", 4)
    drawn = {}
    for name, of in (("all", records), ("some", failing), ("again", failing)):
        source.write_text(json.dumps(of))
        page.write_text(f"before\n{draw_policy_update.BEGIN}\nold\n{draw_policy_update.END}\nafter\n")
        picture = tmp_path / "images" / f"{name}.svg"
        monkeypatch.setattr(sys, "argv", ["draw_policy_update.py", str(source), str(picture), str(page)])
        draw_policy_update.main()
        drawn[name] = page.read_text(), picture.read_text()
    assert drawn["some"] == drawn["again"]
    text = drawn["all"][0]
    assert text.startswith("before\n") and text.endswith("after\n") and "old\n" not in text
    assert "| 2, packed | dualkv | 40 |" in text and "| 4, replicated |" in text
    [comparison] = of_part(records, "comparison", micro_batch=4)
    assert (
        f"| 4 | 2.29 | {comparison['old_speedup']:.2f} ({comparison['old_speedup_of_ratio']:.2f}) |" in text
    )
    assert "| 8192, 4 |" in text and "flex: NotImplementedError" in text
    assert (
        "| 4, replicated | " in drawn["some"][0] and "OOM" in drawn["some"][0] and "OOM" in drawn["some"][1]
    )
    for words in ("packed", "replicated", "prefix grouping", "goal: 0.92 of the token ratio"):
        assert words in drawn["all"][1]


def test_what_is_larger_than_what_ran_out_of_memory_is_too_large():
    def record(prompt, responses, status, impl="flex"):
        return {"part": "layer", "impl": impl, "prompt": prompt, "responses": responses, "status": status}

    records = [
        record(64, 4, "oom"),
        *(
            record(64, 2, "skipped"),
            record(128, 4, "skipped"),
            record(128, 2, "skipped"),
            record(64, 8, "ok"),
        ),
        record(128, 4, "skipped", impl="dualkv"),
    ]
    statuses = [found["status"] for found in draw_policy_update.layer_records(records)]
    assert statuses == ["oom", "skipped", "oom", "skipped", "ok", "skipped"]


def test_without_records_the_page_says_so(tmp_path, monkeypatch):
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text(f"{draw_policy_update.BEGIN}\n{draw_policy_update.END}\n")
    monkeypatch.setattr(sys, "argv", ["draw_policy_update.py", str(tmp_path / "no"), str(picture), str(page)])
    draw_policy_update.main()
    assert (
        page.read_text() == f"{draw_policy_update.BEGIN}\n\nNot measured yet.\n\n{draw_policy_update.END}\n"
    )
    assert not picture.exists()
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match="the page must have the lines"):
        draw_policy_update.main()
