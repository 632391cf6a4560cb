"""Reports: the page and the record of a build, rejection of stale results."""

import json
import re

import pytest

from conftest import Workflow
from snakechat.pages.metrics import NAMES, format_number
from snakechat.pages.page import format_metric

REPORT = "output/report/rlhf/tiny/report.html"
RECIPES = ("rlhf/tiny", "dpo/tiny")


@pytest.fixture(scope="module")
def report(quick):
    """The report of Snakemake."""
    path = quick.folder / "report.html"
    process = quick.snakemake("--report", path.name, *(f"output/{recipe}" for recipe in RECIPES))
    assert process.returncode == 0, process.stdout
    assert "are stale" not in process.stdout
    return path


def read_variable(page, name):
    """A JavaScript variable of Snakemake's report, which it gets as JSON."""
    found = re.search(rf"^ *var {name} = ([{{\"].*);$", page.read_text(), re.MULTILINE)
    return json.loads(found[1])


def rows_in(page):
    """The cells of each row of a page, by its header."""
    found = {}
    for label, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page, re.DOTALL):
        texts = [re.sub("<.*?>", "", cell) for cell in re.findall("<td.*?>(.*?)</td>", cells)]
        found.setdefault(label, texts)
    return found


def test_snakemakes_report_has_a_page_and_a_caption_for_each_recipe(quick, report):
    categories, results = (read_variable(report, name) for name in ("categories", "results"))
    files = {
        recipe: {path.rpartition("/")[2] for path in paths}
        for recipe, paths in categories["Recipes"].items()
    }
    assert files == {recipe: {"report.html", "metrics.csv"} for recipe in RECIPES}
    # It opens offline.
    assert not re.search(r'(?:src|href)="(?:https?:)?//', report.read_text())
    for path, result in results.items():
        assert len(re.sub("<.*?>", "", result["caption"]).strip()) > 20, path
        assert result["data_uri"].startswith("data:"), path
    # The start page has the main result, with n and the cost.
    text = read_variable(report, "workflow_desc")
    metrics = json.loads((quick.folder / "output/eval/rlhf/tiny/metrics.json").read_text())
    won = format_metric("ties", metrics["wins"]["rlhf"]["sft"]["score"]["mean"])
    assert text.index("<strong>rlhf/tiny</strong>") < text.index(f"<dd>{won}</dd>")
    assert "<dt>held-out prompts</dt><dd>20</dd>" in text and "<dt>time of all jobs</dt>" in text
    assert "Seed of the\nconfig: 1234." in text


def test_a_report_has_the_numbers_of_the_recipe_and_of_the_stages_before_it(quick):
    folder = quick.folder / "output"
    page = (quick.folder / REPORT).read_text()
    rows = rows_in(page)
    metrics = json.loads((folder / "eval/sft/tiny/metrics.json").read_text())
    for key, label in NAMES["perplexities"].items():
        for when, cell in zip(("before", "after"), rows[label["en"]], strict=True):
            assert cell.startswith(format_number(metrics[when][key]))
            low, high = metrics["intervals_95"][when][key]
            assert f"[{format_number(low)}, {format_number(high)}]" in cell
    reward = json.loads((folder / "eval/reward/tiny/metrics.json").read_text())
    before, after = rows["accuracy"]
    assert before.endswith("%") and after.startswith(format_metric("ties", reward["accuracy"]))
    names = json.loads((folder / "report/rlhf/tiny.manifest.json").read_text())["spec"]["names"]
    assert {path.removeprefix("output/") for path in names} - {"report/rlhf/tiny"} <= rows.keys()
    assert ">?</td>" not in page
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert {"value loss", "explained variance of the returns"} <= set(titles)
    record = (quick.folder / REPORT).with_name("record.md").read_text()
    assert record.count("](figure-") == len(titles)


def rejection(workflow, *options):
    """The error of a report that is rejected: one line, and no report."""
    process = workflow.snakemake("--report", "rejected.html", "output/rlhf/tiny", *options)
    assert process.returncode == 1, process.stdout
    assert not (workflow.folder / "rejected.html").exists()
    [line] = [line for line in process.stdout.splitlines() if line.startswith("error: ")]
    return line


def test_a_report_of_stale_or_missing_results_is_rejected(quick, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("evaluation: {temperature: 0.9}")
    changed = Workflow(quick.folder, *quick.options, str(more))
    assert rejection(changed).startswith("error: output/eval/rlhf/tiny is stale, and a report")
    # The results stay up to date.
    assert quick.planned() == set()
    copy = quick.copy(tmp_path / "copy")
    (copy.folder / "output/report/rlhf/tiny.manifest.json").unlink()
    assert rejection(copy).startswith("error: output/report/rlhf/tiny is incomplete, and")
