"""Training records: throughput by hand, tables, and the records of a build in both languages."""

import json
import re
import shutil

import pytest

import write_record
from snakechat.planning import flops
from snakechat.reporting.formatting import format_memory, format_significant
from snakechat.reporting.labels import PERPLEXITIES
from snakechat.reporting.training_summary import TrainingSummary, read_run
from snakechat.reporting.translations import translator
from snakechat.workflow.errors import InputError
from support.specs import EMPTY_RUN

STAGES = ("sft", "reward", "dpo", "rlhf")
PAGES = [f"output/record/{stage}/tiny.html" for stage in STAGES]


# --- by hand --------------------------------------------------------------------------------

MODEL = {"weights": 100, "trained": 100, "layers": 2, "hidden_size": 4}
ADAPTED = MODEL | {"trained": 10}


def test_flops_per_token():
    # Attention over 5 tokens: 4 * 2 * 4 * 5.
    assert flops.attention_flops(MODEL, 5) == 160
    assert flops.forward_flops(MODEL, 5) == 200 + 160
    assert flops.training_flops(MODEL, 5) == 600 + 480
    assert flops.training_flops(ADAPTED, 5) == 420 + 480
    # Forward passes of actor (2), reference (1) and scorers (2); both models train for two epochs.
    both = {"actor": MODEL, "critic": MODEL}
    assert flops.rlhf_flops(both, 5, 2) == 5 * 360 + 2 * 2 * 1080
    # Without a critic.
    assert flops.rlhf_flops({"actor": MODEL}, 5, 2) == 3 * 360 + 2 * 1080


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("An unknown GPU", None),
        ("", None),
    ],
)
def test_peak_flops_by_the_name_of_the_gpu(gpu, peak):
    assert flops.peak_flops(gpu) == peak


def a_training(**changes):
    """A training on two GPUs that was resumed."""
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
    training = TrainingSummary.__new__(TrainingSummary)
    vars(training).update(
        stage="sft",
        settings=settings,
        run=run | {"models": {"model": MODEL}, "placement": {"nodes": 1, "gpus_per_node": 2}},
        steps=[
            {"step": 0, "eval_loss": 2.0},
            {"step": 1, "loss": 1.0},
            {"step": 2, "grad_norm": 1},
        ],
        data={"train": {"rows": 100, "tokens": {"prompt": {"sum": 300}, "chosen": {"sum": 200}}}},
    )
    vars(training).update(changes)
    return training


def english(text, **values):
    return text.format(**values)


def rows_of(training, translate=english):
    """Rows of times, throughput and memory, by label."""
    return dict(write_record.run_rows(training, translate))


def test_throughput_of_a_run():
    rows = rows_of(a_training())
    # 16 rows a second of 5 tokens.
    assert rows["rows per second"] == 16
    assert rows["tokens per second"] == 80
    assert rows["TFLOP/s, all processes"] == 80 * 1080 / 1e12
    assert rows["model FLOPs utilization (MFU)"] == 80 * 1080 / (2 * 756e12)
    assert rows["total time"] == "1:01:40"
    assert rows["time for saving checkpoints"] == "1.2 s"
    assert rows["steps skipped for fp16 overflow"] == 1


def test_responses_of_a_pair_do_not_attend_to_each_other():
    training = a_training()
    training.data["train"]["tokens"]["rejected"] = {"sum": 600}
    assert training.tokens_per_row == 3 + 2 + 6
    # A prompt of 3 tokens and a response of 4, on average.
    assert training.flops_per_token == flops.training_flops(MODEL, 7)


def test_unknown_measurements_have_no_row():
    training = a_training()
    del training.run["seconds_per_step"], training.run["gpu"]
    training.settings["dtype"] = "fp32"
    assert list(rows_of(training)) == [
        "steps",
        "resumed after step (times and memory count from there)",
        "total time",
        "time for saving checkpoints",
        "peak memory of the first process",
    ]


def test_fp32_has_no_utilization_of_the_16_bit_peak():
    training = a_training()
    training.settings["dtype"] = "fp32"
    assert "model FLOPs utilization (MFU)" not in rows_of(training)


def test_all_rows_have_a_translation():
    assert not rows_of(a_training()).keys() & rows_of(a_training(), translator("zh")).keys()


def test_the_table_of_steps_has_ten_with_the_first_and_the_last():
    steps = [{"step": 0, "eval_loss": 1.0}, *({"step": n, "loss": n / 8} for n in range(1, 101))]
    head, rows = write_record.step_table(steps, {"loss": "loss"}, english)
    assert head == ["step", "loss"]
    assert [int(row[0]) for row in rows] == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100]
    _, rows = write_record.step_table(steps[:4], {"loss": "loss"}, english)
    assert [row[0] for row in rows] == ["1", "2", "3"]


def test_a_record_of_another_run_is_rejected(tmp_path):
    with pytest.raises(InputError, match=r"tiny\.run\.json cannot be read"):
        read_run(tmp_path / "tiny", "spec")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/run.json").write_text(json.dumps({**EMPTY_RUN, "spec": "other"}))
    with pytest.raises(InputError, match="another run"):
        read_run(tmp_path / "tiny", "spec")


# --- a build --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(quick, tmp_path_factory):
    """The quick build with its records. The host has a name that breaks tables and pages."""
    copy = quick.copy(tmp_path_factory.mktemp("recorded") / "work")
    path = copy.folder / "output/sft/tiny/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "a|<script>"}))
    copy.build(*PAGES)
    return copy


def rows_in(page):
    """The cells of each row of a page, by its header."""
    found = {}
    for label, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page, re.DOTALL):
        texts = [re.sub("<.*?>", "", cell) for cell in re.findall("<td.*?>(.*?)</td>", cells)]
        found.setdefault(label, texts)
    return found


def test_a_record_has_the_numbers_of_the_build(recorded):
    folder = recorded.folder / "output"
    page = (folder / "record/sft/tiny.html").read_text()
    rows = rows_in(page)
    metrics = json.loads((folder / "eval/sft/tiny/metrics.json").read_text())
    for key, label in PERPLEXITIES.items():
        for when, cell in zip(("before", "after"), rows[label], strict=True):
            assert cell.startswith(format_significant(metrics[when][key]))
            low, high = metrics["intervals_95"][when][key]
            assert f"[{format_significant(low)}, {format_significant(high)}]" in cell
    run = json.loads((folder / "sft/tiny/run.json").read_text())
    assert rows["steps"] == ["8"] and run["steps"] == 8
    assert rows["seconds per step (median)"] == [format_significant(run["seconds_per_step"])]
    assert rows["peak memory of the first process"] == [format_memory(run["peak_memory_mb"])]
    assert (rows["training rows"], rows["rows per step"]) == (["120"], ["16"])
    assert (rows["steps per epoch"], rows["planned steps"]) == (["8"], ["8"])
    # 141,184 parameters of the tiny model, and adapters of rank 4.
    adapters = run["models"]["model"]["trained"]
    assert rows["model"] == [f"{141184 + adapters:,}", f"{adapters:,}", "2", "64"]
    assert {str(step) for step in range(1, 9)} <= rows.keys()
    assert rows["global_batch_size"] == ["16"]
    assert rows["micro_batch_tokens"] == ["8192"]
    assert rows["host"] == ["a|&lt;script&gt;"]
    assert "|<script" not in page


def test_each_stage_has_its_own_metrics_and_curves(recorded):
    metrics = {
        "sft": {"perplexity of responses", "perplexity of prompts and responses"},
        "reward": {"accuracy", "accuracy of choosing the longer response"},
        "dpo": {"accuracy", "loss (nats per pair)"},
        "rlhf": {"score", "KL to the SFT model (nats per response)"},
    }
    for stage, names in metrics.items():
        page = (recorded.folder / f"output/record/{stage}/tiny.html").read_text()
        rows = rows_in(page)
        assert names <= rows.keys()
        assert float(rows["TFLOP/s, all processes"][0]) > 0
    assert {"actor", "critic"} <= rows.keys()
    titles = re.findall(r'<p class="title">(.*?)</p>', page)
    assert {"value loss", "explained variance of the returns"} <= set(titles)


def test_a_deleted_page_is_written_again_alone(recorded):
    page = recorded.folder / PAGES[0]
    before = page.read_text()
    page.unlink()
    assert recorded.planned(*PAGES) == {"write_record"}
    recorded.build(*PAGES)
    assert page.read_text() == before
    assert recorded.planned(*PAGES) == set()


def test_two_builds_differ_in_their_times_only(recorded, tmp_path):
    copy = recorded.copy(tmp_path / "copy")
    path = copy.folder / "output/sft/tiny/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 77.7}))
    shutil.rmtree(copy.folder / "output/record/sft")
    copy.build(PAGES[0])
    assert "<td>0:01:18</td>" in (copy.folder / PAGES[0]).read_text()
    twin = str(recorded.folder / "output")
    process = copy.run("python", "scripts/verify.py", "--same-as", twin)
    assert process.returncode == 0, process.stdout


def test_a_record_in_chinese(recorded, tmp_path):
    copy = recorded.copy(tmp_path / "copy")
    copy.options = (*copy.options, "--config", "language=zh")
    assert copy.planned(*PAGES) == {"write_record"}
    copy.build(*PAGES)
    english, chinese = (tree.folder / PAGES[0] for tree in (recorded, copy))
    ours, theirs = (rows_in(page.read_text()) for page in (chinese, english))
    assert ours["回复的困惑度"] == theirs["perplexity of responses"]
    text = chinese.read_text()
    assert '<html lang="zh">' in text and translator("zh")("loss (nats per token)") in text
