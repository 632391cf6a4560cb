"""Training records: the records of a build in both languages."""

import html
import json
import re
import shutil
from statistics import fmean

import pytest

from snakechat.reporting.formatting import format_memory, format_number
from snakechat.reporting.labels import PERPLEXITIES
from snakechat.reporting.translations import translations

STAGES = ("sft", "reward", "dpo", "rlhf")
PAGES = [f"output/record/{stage}/tiny.html" for stage in STAGES]


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
            assert cell.startswith(format_number(metrics[when][key]))
            low, high = metrics["intervals_95"][when][key]
            assert f"[{format_number(low)}, {format_number(high)}]" in cell
    run = json.loads((folder / "sft/tiny/run.json").read_text())
    assert rows["steps"] == ["8"] and run["steps"] == 8
    assert rows["seconds_per_step"] == [format_number(run["seconds_per_step"])]
    assert rows["sft/tiny"][2] == format_memory(run["peak_memory_mb"])
    assert rows["sft.train"][0] == "120"
    # 141,184 parameters of the tiny model, and adapters of rank 4.
    adapters = run["models"]["model"]["trained"]
    sizes = {"hidden_size": 64, "layers": 2, "trained": adapters, "weights": 141184 + adapters}
    assert json.loads(html.unescape(rows["models"][0])) == {"model": sizes}
    assert rows["global_batch_size"] == ["16"]
    assert rows["micro_batch_tokens"] == ["8192"]
    assert rows["host"] == ["a|&lt;script&gt;"]
    assert rows["command"][0].startswith("snakemake --cores 1 output/sft/tiny")
    assert not rows.keys() & {"licenses", "options"}
    steps = [json.loads(line) for line in (folder / "sft/tiny/metrics.jsonl").open()]
    losses, tokens = ([line[key] for line in steps] for key in ("loss", "tokens"))
    assert rows["1"] == [format_number(fmean(losses, tokens))]
    markdown = (folder / "record/sft/tiny/record.md").read_text()
    assert f"| 1 | {rows['1'][0]} |\n" in markdown and "![learning rate](figure-2.svg)" in markdown
    assert (folder / "record/sft/tiny/figure-2.svg").exists()
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
        assert rows["flops_per_second"]
        if stage == "reward":
            accuracy, after = rows["accuracy"]
            assert accuracy.endswith("%") and after.endswith("%")
            assert len(rows["mean score of chosen responses"]) == 2
    assert json.loads(html.unescape(rows["models"][0])).keys() == {"actor", "critic"}
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
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
    for folder in ("output/record/sft", "output/store/write_record/sft"):
        shutil.rmtree(copy.folder / folder)
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
    assert '<html lang="zh">' in text and translations("zh")["loss (nats per token)"] in text
    # Back to English, without a job: the pages change with the results.
    copy.options = recorded.options
    assert copy.planned(*PAGES) == set()
    copy.build(*PAGES)
    assert chinese.read_text() == english.read_text()
