"""Training records: what they say of a build, in both languages, and what it costs by hand."""

import ast
import json
import re
import shutil

import pytest

import write_record
from conftest import ROOT
from snakechat.planning import flops as costs
from snakechat.reporting import translations as words
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.errors import InputError

STAGES = ("sft", "reward", "dpo", "rlhf")
PAGES = [f"output/record/{stage}/tiny.md" for stage in STAGES]


# --- by hand --------------------------------------------------------------------------------

MODEL = {"weights": 100, "trained": 100, "layers": 2, "hidden_size": 4}
ADAPTED = MODEL | {"trained": 10}


def test_operations_of_a_token():
    # Attention over 5 tokens: 4 * 2 * 4 * 5.
    assert costs.attention_flops(MODEL, 5) == 160
    assert costs.forward_flops(MODEL, 5) == 200 + 160
    assert costs.training_flops(MODEL, 5) == 600 + 480
    assert costs.training_flops(ADAPTED, 5) == 420 + 480
    # Sampled and rated by the actor, rated by the reference, scored twice; learnt twice by both.
    both = {"actor": MODEL, "critic": MODEL}
    assert costs.rlhf_flops(both, 5, 2) == 5 * 360 + 2 * 2 * 1080
    # Without a critic: sampled, rated twice, learnt twice.
    assert costs.rlhf_flops({"actor": MODEL}, 5, 2) == 3 * 360 + 2 * 1080


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("A card of tomorrow", None),
        ("", None),
    ],
)
def test_peaks_are_known_by_the_names_of_gpus(gpu, peak):
    assert costs.peak_flops(gpu) == peak


def a_training(**changes):
    """A training on two GPUs that was resumed, of which all is known."""
    run = {
        "steps": 3,
        "resumed_after_step": 1,
        "seconds": 3700.4,
        "saving_seconds": 1.25,
        "seconds_per_step": 0.5,
        "peak_memory_mb": 1234,
        "gpu": "NVIDIA H100 PCIe",
        "peak_gpu_memory_mb": 567,
    }
    settings = {"dtype": "fp16", "ppo_epochs": 1, "global_batch_size": 8}
    training = write_record.Training.__new__(write_record.Training)
    vars(training).update(
        stage="sft",
        settings=settings,
        run=run | {"placement": {"nodes": 1, "gpus_per_node": 2}},
        models={"model": MODEL},
        steps=[
            {"step": 0, "eval_loss": 2.0},
            {"step": 1, "loss": 1.0},
            {"step": 2, "grad_norm": 1},
        ],
        data={"train": {"rows": 100, "tokens": {"prompt": {"sum": 300}, "chosen": {"sum": 200}}}},
    )
    vars(training).update(changes)
    return training


def test_rates_of_a_run():
    told = dict(write_record.how_it_went(a_training(), str))
    # 16 rows a second of 5 tokens.
    assert told["rows a second"] == 16
    assert told["tokens a second"] == 80
    assert told["TFLOP/s, all processes"] == 80 * 1080 / 1e12
    assert told["share of the GPUs' peak (MFU)"] == 80 * 1080 / (2 * 756e12)
    assert told["time in all"] == "1:01:40"
    assert told["of it, saving states"] == "1.2 s"
    assert told["steps left out, too large for fp16"] == 1


def test_responses_of_a_pair_do_not_see_each_other():
    training = a_training()
    training.data["train"]["tokens"]["rejected"] = {"sum": 600}
    assert training.row_length == 3 + 2 + 6
    # Sequences of a prompt of 3 and a response of 4, on the average.
    assert training.flops_a_token == costs.training_flops(MODEL, 7)


def test_what_is_not_known_is_left_out():
    training = a_training()
    del training.run["seconds_per_step"], training.run["gpu"]
    training.settings["dtype"] = "fp32"
    assert list(dict(write_record.how_it_went(training, str))) == [
        "steps",
        "went on after step (times and memory are told of the rest)",
        "time in all",
        "of it, saving states",
        "peak memory of the first process (MB)",
    ]


def test_no_share_of_a_peak_of_other_numbers():
    training = a_training()
    training.settings["dtype"] = "fp32"
    assert "share of the GPUs' peak (MFU)" not in dict(write_record.how_it_went(training, str))


def test_all_models_that_responded_are_told_in_the_order_of_the_road():
    won = {"mean": 0.75, "interval_95": [0.5, 1.0]}
    models = {name: {"score": place} for place, name in enumerate(("ema", "dpo/a", "rlhf", "sft"))}
    figures = {
        **models,
        "num_prompts": 20,
        "intervals_95": models,
        "score_difference": {"mean": -1, "interval_95": [-2, 0.5]},
        "wins": {"rlhf": {"sft": {"score": won}}, "ema": {"sft": {"score": won}}},
    }
    assert write_record.of_rlhf(figures, str) == [
        ["held-out prompts: 20", "SFT", "RLHF", "EMA", "dpo/a", "RLHF - SFT (95 % interval)"],
        ["score", 3, 2, 0, 1, "-1 (-2 … 0.5)"],
        ["wins over SFT by score", "", "0.75 (0.5 … 1)", "0.75 (0.5 … 1)", "", ""],
    ]


def test_each_of_several_datasets_has_its_accuracy():
    figures = dict.fromkeys(("accuracy", "ties", "longer_wins_accuracy", "loss"), 0.5)
    figures |= dict.fromkeys(("chosen_score", "rejected_score", "calibration_error"), 0.5)
    alone = write_record.of_pairs({"pairs": 4, **figures}, str)
    both = write_record.of_pairs({"pairs": 4, **figures, "by_dataset": {"a": {"accuracy": 1}}}, str)
    assert both == [*alone, ["accuracy (share): a", 1]]


def test_about_ten_steps_with_the_first_and_the_last():
    steps = [{"step": 0, "eval_loss": 1.0}, *({"step": n, "loss": n / 8} for n in range(1, 101))]
    head, *rows = write_record.steps_told(steps, {"loss": "loss"}, str)
    assert head == ["step", "loss"]
    assert [row[0] for row in rows] == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100]
    few = write_record.steps_told(steps[:4], {"loss": "loss"}, str)
    assert [row[0] for row in few[1:]] == [1, 2, 3]


def test_numbers_as_people_read_them():
    told = [words.as_number(n) for n in (141184, 12345.6, 0.123456, 1.5e-7, 0)]
    assert told == ["141,184", "12,346", "0.1235", "1.5e-07", "0"]
    assert [words.as_time(s) for s in (0.04, 59, 60, 86399.6)] == [
        "0.0 s",
        "59.0 s",
        "0:01:00",
        "24:00:00",
    ]


def test_text_makes_neither_cells_nor_tags_nor_links():
    text = "a|b\n<img src=x> [here](http://there) &"
    cell = "a&#124;b &lt;img src=x&gt; [here]&#40;http://there) &amp;"
    assert words.as_cell(text) == cell
    assert write_record.table([["x", "y"], ["k", text]]) == f"| x | y |\n|---|---|\n| k | {cell} |"


def test_a_record_of_another_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"tiny\.run\.json cannot be read"):
        write_record.run_record(tmp_path / "tiny", "spec")
    (tmp_path / "tiny.run.json").write_text('{"spec": "other"}')
    with pytest.raises(InputError, match="another run"):
        write_record.run_record(tmp_path / "tiny", "spec")


# --- words ----------------------------------------------------------------------------------


def test_each_word_is_used_and_each_has_its_chinese():
    texts = set()
    for path in (ROOT / "scripts").rglob("*.py"):
        if path.stem == "words":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    # Names of models in NAME.run.json.
    assert words.ZH.keys() <= texts | {"actor", "critic"}
    zh = words.teller("zh")
    assert zh("perplexity") == "困惑度" and words.teller("en")("perplexity") == "perplexity"
    # Nothing is said that has no Chinese, whatever a run was like.
    assert len(dict(write_record.how_it_went(a_training(), zh))) == 12
    for text, chinese in words.ZH.items():
        assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", chinese))


# --- a build --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(quick, tmp_path_factory):
    """The quick build with its records. The host has a name that breaks tables and pages."""
    copy = quick.copy(tmp_path_factory.mktemp("recorded") / "work")
    path = copy.folder / "output/sft/tiny.run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "a|<script>"}))
    copy.build(*PAGES)
    return copy


def tables(page):
    """The rows of each table of a page, by the title before it."""
    found = {}
    for title, text in re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", page, re.MULTILINE):
        rows = [[c.strip() for c in line[2:-2].split("|")] for line in text.splitlines()]
        found[title] = [rows[0], *rows[2:]]
    return found


def test_a_record_tells_what_was_built(recorded):
    folder = recorded.folder / "output"
    page = (folder / "record/sft/tiny.md").read_text()
    told = tables(page)
    figures = json.loads((folder / "eval/sft/tiny/metrics.json").read_text())
    perplexities = [words.as_number(figures[when]["perplexity"]) for when in ("before", "after")]
    assert told["What came of it"][1] == ["perplexity", *perplexities]
    run = json.loads((folder / "sft/tiny.run.json").read_text())
    went = dict(told["The run"])
    assert went["steps"] == "8" and run["steps"] == 8
    assert went["seconds a step, median"] == words.as_number(run["seconds_per_step"])
    assert went["peak memory of the first process (MB)"] == words.as_number(run["peak_memory_mb"])
    data = dict(told["Data and batches"])
    assert (data["rows to train on"], data["rows of a step"]) == ("120", "16")
    assert (data["steps of an epoch"], data["steps planned"]) == ("8", "8")
    # 141,184 weights of the tiny model, and adapters of rank 4.
    adapters = run["models"]["model"]["trained"]
    assert told["Weights"][1] == ["model", f"{141184 + adapters:,}", f"{adapters:,}", "2", "64"]
    assert [row[0] for row in told["Steps"][1:]] == [str(step) for step in range(1, 9)]
    assert ["`global_batch_size`", "16"] in told["Settings"]
    assert ["`micro_batch_tokens`", "8192"] in told["Placement"]
    assert ["host", "a&#124;&lt;script&gt;"] in told["Environment"]
    assert "<script" not in page


def test_each_stage_has_its_own_figures(recorded):
    figures = {
        "sft": {"perplexity", "perplexity of responses"},
        "reward": {"accuracy (share)", "accuracy of “the longer one”"},
        "dpo": {"accuracy (share)", "loss (nats per pair)"},
        "rlhf": {"score", "KL to SFT (nats per response)"},
    }
    for stage, names in figures.items():
        told = tables((recorded.folder / f"output/record/{stage}/tiny.md").read_text())
        assert names <= {row[0] for row in told["What came of it"]}
        assert float(dict(told["The run"])["TFLOP/s, all processes"]) > 0
    assert [row[0] for row in told["Weights"][1:]] == ["actor", "critic"]


def test_the_picture_is_where_the_page_says(recorded):
    for stage in STAGES:
        page = recorded.folder / f"output/record/{stage}/tiny.md"
        [link] = re.findall(r"!\[.*\]\((.*)\)", page.read_text())
        assert (page.parent / link).read_text().count("<svg") == 1
        # So it does in the result itself.
        inside = page.with_suffix("") / "record.md"
        assert (inside.parent / "loss.svg").exists() and "](loss.svg)" in inside.read_text()


def test_a_page_that_is_gone_is_written_again_and_nothing_else(recorded):
    page = recorded.folder / PAGES[0]
    before = page.read_text()
    page.unlink()
    assert recorded.planned(*PAGES) == {"write_record"}
    recorded.build(*PAGES)
    assert page.read_text() == before
    assert recorded.planned(*PAGES) == set()


def test_another_build_has_other_times_and_is_the_same(recorded, tmp_path):
    copy = recorded.copy(tmp_path / "copy")
    path = copy.folder / "output/sft/tiny.run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 77.7}))
    shutil.rmtree(copy.folder / "output/record/sft")
    copy.build(PAGES[0])
    assert "| 0:01:18 |" in (copy.folder / PAGES[0]).read_text()
    twin = str(recorded.folder / "output")
    process = copy.run("python", "scripts/verify.py", "--same-as", twin)
    assert process.returncode == 0, process.stdout


def test_a_record_in_chinese(recorded, tmp_path):
    copy = recorded.copy(tmp_path / "copy")
    copy.options = (*copy.options, "--config", "language=zh")
    assert copy.planned(*PAGES) == {"write_record"}
    copy.build(*PAGES)
    english, chinese = (tree.folder / PAGES[0] for tree in (recorded, copy))
    told = tables(chinese.read_text())
    assert "训练结果" in told and told["训练结果"][1][0] == "困惑度"
    # The same numbers.
    numbers = [re.findall(r"\| ([\d.,]+) \|", page.read_text()) for page in (english, chinese)]
    assert numbers[0] == numbers[1]
    picture = (chinese.with_suffix("") / "loss.svg").read_text()
    assert words.ZH["loss (nats per token)"] in picture


def test_records_are_no_part_of_a_chat_model(recorded):
    digests = code_digests(ROOT / "scripts/write_record.py")
    assert not {"torch", "transformers"} & set(digests)
    assert "write_record" not in recorded.planned("output/rlhf/tiny", "--forceall")
