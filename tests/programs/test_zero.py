"""The comparison of ZeRO stages: its runs, its page, and what is sent by hand."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import compare_zero
import draw_zero
from snakechat.data.tokens import Ragged, RaggedWriter
from snakechat.planning.changes import spec_changes
from snakechat.planning.flops import sent_elements
from snakechat.reporting import translations as words
from snakechat.reporting.pages import write_page
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import check_input

PAGE = "output/zero/sft/tiny.html"


# --- by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "all_trained", "adapters"),
    [
        (0, 200, 20),
        (1, 200, 20),
        (2, 200, 20),
        (3, 300, 210),
    ],
)
def test_what_is_sent_for_a_step(stage, all_trained, adapters):
    assert sent_elements({"weights": 100, "trained": 100}, stage, 2) == all_trained
    assert sent_elements({"weights": 100, "trained": 10}, stage, 64) == adapters
    assert sent_elements({"weights": 100, "trained": 100}, stage, 1) == 0


def test_a_placement_at_each_stage():
    def told(offload, stage):
        where = compare_zero.placed(
            {"offload": offload, "zero_stage": 3, "launch": "python"}, stage
        )
        assert where.keys() == {"offload", "zero_stage"} and where["zero_stage"] == stage
        return where["offload"]

    assert [told("none", stage) for stage in range(4)] == ["none"] * 4
    assert [told("optimizer", stage) for stage in range(4)] == ["none"] + ["optimizer"] * 3
    assert [told("parameters", stage) for stage in range(4)] == [
        "none",
        "optimizer",
        "optimizer",
        "parameters",
    ]


def test_rows_of_some_steps():
    assert compare_zero.rows_of({"global_batch_size": 16}, 3) == {"train": 48, "eval": 16}
    settings = {"global_batch_size": 16, "rollout_batch_size": 5}
    assert compare_zero.rows_of(settings, 2) == {"train": 10, "eval": 5}


def test_inputs_are_cut_to_their_first_rows(tmp_path):
    rows = {f"{part}.prompt": [[1, 2], [3], [4, 5, 6]] for part in ("train", "eval")}
    sources = {key: tmp_path / key for key in ("tokens", "reference", "model")}
    for folder in sources.values():
        folder.mkdir()
    for name, sequences in rows.items():
        with RaggedWriter(sources["tokens"], name, 300) as writer:
            writer.write(sequences)
    for part in ("train", "eval"):
        np.save(sources["reference"] / f"{part}.npy", np.arange(6.0).reshape(2, 3))
    inputs = {}
    for key, folder in sources.items():
        spec = {"path": str(folder), "inputs": {}}
        manifest = {"spec": spec, "inputs": {}, "lineage": {}, "facts": {}, "files": {}}
        folder.with_name(f"{key}.manifest.json").write_text(json.dumps(manifest))
        inputs[key] = {"path": str(folder), "spec": digest(spec)}
    found = compare_zero.cut_inputs(inputs, {"train": 2, "eval": 5}, tmp_path / "scratch")
    assert found["model"] == inputs["model"]
    cut = Path(found["tokens"]["path"])
    for part, number in (("train", 2), ("eval", 3)):
        array = Ragged(cut, f"{part}.prompt")
        assert [list(array[row]) for row in range(len(array))] == rows[f"{part}.prompt"][:number]
        assert array.ids.dtype == np.uint16
        reference = np.load(Path(found["reference"]["path"]) / f"{part}.npy")
        assert reference.tolist() == [[0.0, 1.0, 2.0][:number], [3.0, 4.0, 5.0][:number]]
    # A training program takes them for its inputs.
    for key in ("tokens", "reference"):
        assert check_input(found[key]) == Path(f"{found[key]['path']}.manifest.json")


def train(tmp_path, script):
    """A run whose program is a shell script."""
    spec = {"rule": "train_sft", "name": "tiny@zero-0", "path": str(tmp_path / "stage-0")}
    return compare_zero.train(spec, {}, f"sh -c '{script}'")


@pytest.mark.parametrize(
    "script",
    [
        'echo "error: output/sft/tiny: out of memory: placement has ..." ; exit 1',
        'echo "error: process 1 of the job was ended by SIGKILL"; exit 1',
        "kill -9 $$",
    ],
)
def test_a_stage_that_has_too_little_memory_is_told(tmp_path, script):
    assert train(tmp_path, script) == {"failed": "out of memory"}


def test_any_other_trouble_ends_the_comparison(tmp_path):
    with pytest.raises(InputError, match=r"^tiny@zero-0: it is broken$"):
        train(tmp_path, 'echo some; echo "error: it is broken" >&2; exit 1')


def test_what_changed_is_told_once_in_the_words_of_the_config():
    training = {"rule": "train_sft", "name": "tiny", "settings": {"epochs": 1}, "files": {}}
    training |= {
        "code": {"snakechat/workflow/job.py": "1", "snakechat/training/engine.py": "1"},
        "requirements": "1",
    }
    old = training | {
        "rule": "compare_zero",
        "name": "sft/tiny",
        "code": {"snakechat/workflow/job.py": "1"},
    }
    old |= {"settings": {"steps": 8, "training": training}}
    new = json.loads(json.dumps(old))
    new["settings"]["steps"] = 9
    new["settings"]["training"]["settings"]["epochs"] = 2
    new["code"]["snakechat/workflow/job.py"] = new["settings"]["training"]["code"][
        "snakechat/workflow/job.py"
    ] = "2"
    new["settings"]["training"]["code"]["snakechat/training/engine.py"] = "2"
    assert spec_changes(old, new, {}) == [
        "zero.steps changed from 8 to 9",
        "module snakechat/workflow/job.py changed",
        "sft.epochs changed from 1 to 2",
        "module snakechat/training/engine.py changed",
    ]


# --- the page -------------------------------------------------------------------------------


def a_comparison(**changes):
    """Four stages on two GPUs, of which the first had too little memory."""
    runs = {0: {"failed": "out of memory"}}
    for stage in (1, 2, 3):
        runs[stage] = {
            "seconds_per_step": stage / 4,
            "peak_memory_mb": 100,
            "peak_gpu_memory_mb": 5000 - 1000 * stage,
            "models": {"actor": {"weights": 100, "trained": 10}},
        }
    losses = {1: (4.0, 3.0), 2: (4.0, 3.0), 3: (4.0, 2.5)}
    comparison = draw_zero.Comparison.__new__(draw_zero.Comparison)
    vars(comparison).update(
        title="rlhf/tiny",
        dtype="fp32",
        loss="loss",
        placement={"nodes": 1, "gpus_per_node": 2, "offload": "parameters"},
        processes=2,
        runs=runs,
        steps={
            stage: [{"step": step, "loss": loss} for step, loss in enumerate(found, start=1)]
            for stage, found in losses.items()
        },
        base=1,
    )
    vars(comparison).update(changes)
    return comparison


def test_the_rows_of_a_table():
    comparison = a_comparison()
    assert draw_zero.row(comparison, 0, str)[:3] == [0, "out of memory", ""]
    assert draw_zero.row(comparison, 1, str) == [
        1, "4", "3", "0", "", "0.25", "100", "4,000", "20"
    ]  # fmt: skip
    assert draw_zero.row(comparison, 3, str) == [
        3, "4", "2.5", "0.5", "", "0.75", "100", "2,000", "210"
    ]  # fmt: skip


def test_sentences_tell_the_figures():
    assert list(draw_zero.sentences(a_comparison(), str)) == [
        "Losses differ from those of stage 1 by at most 0.5 (stage 3).",
        "A step took from 0.25 s (stage 1) to 0.75 s (stage 3).",
        "Peak memory was from 2,000 MB (stage 3) to 4,000 MB (stage 1).",
    ]
    comparison = a_comparison()
    del comparison.steps[3]
    first, *_ = draw_zero.sentences(comparison, str)
    assert first == "Losses are the same at all stages, to the last bit."


def test_notes_tell_what_a_stage_cannot_be():
    two, *others, source = draw_zero.notes(a_comparison(), str)
    assert two == "Nodes: 1, GPUs in each: 2, processes: 2, dtype: fp32."
    assert others == ["Offload: of the optimizer from stage 1 on, of parameters at stage 3 alone."]
    assert "Rajbhandari" in source
    alone = {"nodes": 1, "gpus_per_node": 0, "offload": "none"}
    comparison = a_comparison(dtype="bf16", placement=alone, processes=1)
    assert list(draw_zero.notes(comparison, str))[1:-1] == [
        "With bf16, stage 1 runs as stage 2.",
        "One process has nobody to share with: it cuts nothing up, and sends nothing.",
    ]


def test_all_of_it_has_its_chinese():
    zh = words.teller("zh")
    for comparison in (a_comparison(), a_comparison(dtype="bf16", processes=1)):
        told = [*draw_zero.sentences(comparison, zh), *draw_zero.notes(comparison, zh)]
        assert not [text for text in told if re.search(r"[{}]|\b(the|of|and)\b", text)]
        assert draw_zero.row(comparison, 0, zh)[1] == "内存不足"
    assert all(zh(text) for text in (*draw_zero.HEAD, *draw_zero.DRAWN.values()))


def test_text_is_escaped(tmp_path):
    page = tmp_path / "page.html"
    write_page(page, draw_zero.BODY, "en", "<script>", ["<b>"], head=["<i>"], rows=[["<u>"]])
    text = page.read_text()
    assert not re.search("<(script|b|i|u)>", text)
    assert text.count("&lt;script&gt;") == 2


# --- a build --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(quick, tmp_path_factory):
    """The quick build with the comparison of its SFT."""
    copy = quick.copy(tmp_path_factory.mktemp("compared") / "work")
    copy.build(PAGE)
    return copy


def steps_at(workflow, stage):
    return draw_zero.read_steps(workflow.folder / f"output/zero_runs/sft/tiny/stage-{stage}.jsonl")


def test_each_stage_took_the_same_steps(compared):
    runs = json.loads((compared.folder / "output/zero_runs/sft/tiny.run.json").read_text())
    assert list(runs["stages"]) == ["0", "1", "2", "3"]
    for stage in range(4):
        run = runs["stages"][str(stage)]
        assert run["placement"]["zero_stage"] == stage and run["steps"] == 2
        assert [line["step"] for line in steps_at(compared, stage)] == [1, 2]
    # In bf16 stage 1 is stage 2, as the page says; stages 0 and 3 add up in other orders.
    assert steps_at(compared, 1) == steps_at(compared, 2)
    for ours, other in zip(steps_at(compared, 3), steps_at(compared, 0), strict=True):
        assert ours["loss"] == pytest.approx(other["loss"], abs=0.01)


def test_no_times_are_in_what_is_compared_and_nothing_is_left(compared):
    folder = compared.folder / "output/zero_runs/sft/tiny"
    names = {path.name for path in folder.iterdir()}
    assert names == {"manifest.json", *(f"stage-{stage}.jsonl" for stage in range(4))}
    assert "seconds" not in (folder / "manifest.json").read_text()
    assert not list((compared.folder / "output/state").glob("*/*"))


def test_the_page_stands_alone(compared):
    page = (compared.folder / PAGE).read_text()
    assert page.count("<svg") == page.count("</svg>") == 1
    # Names of XML, and no address that a browser would load.
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:", ""))
    rows = re.findall(r"<tr><td>(\d)</td><td>([\d.]+)</td><td>([\d.]+)</td>", page)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][1] == words.as_number(steps_at(compared, 0)[0]["loss"])
    assert "With bf16, stage 1 runs as stage 2." in page


def test_another_language_trains_nothing_anew(compared, tmp_path):
    copy = compared.copy(tmp_path / "copy")
    copy.options = (*copy.options, "--config", "language=zh")
    assert copy.planned(PAGE) == {"draw_zero"}
    copy.build(PAGE)
    page = (copy.folder / PAGE).read_text()
    assert '<html lang="zh">' in page and "最后一步的损失" in page and ">损失<" in page
