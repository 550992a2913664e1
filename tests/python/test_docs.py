"""The documents: pictures are those that the scripts draw, examples run, and what they name exists."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "HACKING.md", ROOT / "CONTRIBUTING.md", *DOCS]

sys.path.insert(0, str(ROOT / "tools"))
import draw_hopper_backward  # noqa: E402
import draw_hopper_forward  # noqa: E402
import draw_plans  # noqa: E402

SCRIPTS = (draw_plans, draw_hopper_forward, draw_hopper_backward)
PICTURES = {name: draw for script in SCRIPTS for name, draw in script.PICTURES.items()}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=relative)


def repository_files() -> set[str]:
    """Files under version control, or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return {name for name in result.stdout.splitlines() if (ROOT / name).is_file()}


def code_in(text: str) -> list[str]:
    """Inline code, and the lines of blocks of shell commands."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose) + [line for block in blocks for line in block.splitlines()]


# -------------------------------------------------------------------------------------------------- pictures


def test_the_pictures_are_those_that_the_scripts_draw(tmp_path, monkeypatch):
    committed = {path.name for path in (ROOT / "docs").glob("*.svg")}
    assert committed == set(PICTURES)
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [script.__name__, str(tmp_path)])
        script.main()
    for name in committed:
        drawn = (tmp_path / name).read_bytes()
        assert drawn == (ROOT / "docs" / name).read_bytes(), f"docs/{name} is out of date: run make docs"
        assert len(drawn) < 100_000, name


def test_every_picture_is_shown():
    text = "".join(document.read_text() for document in DOCUMENTS)
    for name in PICTURES:
        assert re.search(rf"!\[[^\]]+\]\((docs/)?{re.escape(name)}\)", text), name


@pytest.mark.parametrize("backward_parts", [0, 7])
@pytest.mark.parametrize("window_left", [None, 6])
@pytest.mark.parametrize("forest", [draw_plans.GROUP, draw_plans.TREE], ids=["group", "tree"])
def test_plans_are_drawn_as_they_are(forest, window_left, backward_parts):
    """Each visible pair lies in one tile of either schedule, unmasked tiles hide none, and turns count the
    visits to a query tile."""
    mask = draw_plans.visible(forest, window_left)
    assert sum(map(sum, mask)) == forest.visible_pairs(window_left)
    pairs = {(i, j) for i, row in enumerate(mask) for j, seen in enumerate(row) if seen}
    plan = draw_plans.read_plan(forest, 4, window_left, backward_parts)
    for visits in (plan.forward, plan.backward):
        covered = [(i, j) for visit in visits for i in visit.queries for j in visit.keys]
        assert len(covered) == len(set(covered))
        assert pairs <= set(covered)
        for visit in visits:
            assert visit.masked or pairs.issuperset((i, j) for i in visit.queries for j in visit.keys)
    turns = {}
    for visit in plan.backward:
        assert visit.turn == turns.get(visit.queries, 0)
        turns[visit.queries] = visit.turn + 1


@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
def test_the_tensor_cores_of_the_model_do_one_thing_at_a_time_and_everything_once(consumers):
    spans = draw_hopper_forward.simulate(consumers, tiles=3, steps=5)
    products = sorted((span.begin, span.end) for span in spans if span.kind in ("scores", "values"))
    assert all(end <= begin for (_, end), (begin, _) in zip(products, products[1:]))
    made = [(span.kind, span.consumer, span.tile, span.step) for span in spans]
    assert len(made) == len(set(made)) == consumers * 3 * (4 * 5 + 1)


@pytest.mark.parametrize("adds", [0, 400, 1500])
def test_the_backward_of_the_model_does_everything_once_and_in_order(adds):
    spans, steps = draw_hopper_backward.simulate(5, adds), range(1, 6)
    products = sorted((span.begin, span.end) for span in spans if span.kind in draw_hopper_backward.PRODUCTS)
    assert all(end <= begin for (_, end), (begin, _) in zip(products, products[1:]))
    own = {"scores", "exponentials", "packing", "dweights", "dV", "dscores", "issue", "dK", "handover"}
    wanted = [(kind, worker, step) for kind in own for worker in (0, 1) for step in steps]
    wanted += [(kind, draw_hopper_backward.REDUCER, step) for kind in ("dQ", "adds") for step in steps] * 2
    made = [(span.kind, span.worker, span.step) for span in spans]
    assert sorted(made) == sorted(wanted)
    begins = {(span.kind, span.worker, span.step): span.begin for span in reversed(spans)}
    ends = {(span.kind, span.worker, span.step): span.end for span in spans}
    for step in steps:
        for worker in (0, 1):
            order = ("scores", "exponentials", "packing", "dweights", "dV", "dscores", "issue", "dK")
            for before, after in zip(order, order[1:]):
                assert ends[before, worker, step] <= begins[after, worker, step]
            assert ends["handover", worker, step] <= begins["dQ", draw_hopper_backward.REDUCER, step]
            if step > draw_hopper_backward.DSCORES_BUFFERS:
                read = ends["dQ", draw_hopper_backward.REDUCER, step - draw_hopper_backward.DSCORES_BUFFERS]
                assert read <= begins["dscores", worker, step]


# -------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("document", DOCS, ids=relative)
def test_examples_print_what_they_say(document):
    blocks = re.findall(r"^```pycon\n(.*?)^```", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, document.name, str(document), 0)
    report = []
    doctest.DocTestRunner().run(test, out=report.append)
    assert report == [], "".join(report)


# ----------------------------------------------------------------------------------------- links, files, make


def anchors_of(text: str) -> set[str]:
    """Fragments of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_relative_links_resolve(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, fragment = link.partition("#")
        target = document.parent / place if place else document
        assert target.exists(), link
        assert not fragment or fragment in anchors_of(target.read_text()), link


@each_document
def test_files_that_are_named_exist(document):
    """A path below a folder of the repository, or the name of a file of one of its kinds."""
    files = repository_files()
    names = {Path(name).name for name in files}
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    top_level = {folder for folder in folders if "/" not in folder}
    kinds = {"cmake", "cpp", "cu", "cuh", "h", "hpp", "md", "py", "sh", "svg", "toml"}
    for code in code_in(document.read_text()):
        for word in code.split():
            path = word.rstrip("/,:")
            if not re.fullmatch(r"[\w./-]+", path):
                continue
            if "/" in path and path.split("/")[0] in top_level:
                assert path in files | folders, path
            elif "/" not in path and path.rpartition(".")[2] in kinds and "." in path:
                assert path in names, path


@each_document
def test_make_targets_that_are_named_exist(document):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^([a-z -]+):", makefile, flags=re.MULTILINE)).split())
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE).group(1).split())
    assert phony == targets
    for code in code_in(document.read_text()):
        for target in re.findall(r"^make ([\w-]+)", code):
            assert target in targets, code
