"""The report of a build: chapters and pages, rejection of stale results, display in a browser."""

import json
import re
import shutil

import pytest

from conftest import Workflow
from snakechat.reporting.formatting import format_metric, format_number

# --- a build --------------------------------------------------------------------------------

CHAPTERS = {
    "1 Results": {"results.html", "metrics.csv"},
    "2 Data": {"data.html", "data.csv"},
    "3 Training": {"training.html"},
    "4 Lineage": {"lineage.html"},
    "5 Costs": {"costs.html"},
    "6 Responses": {"responses.html"},
}
PAGES = {name for names in CHAPTERS.values() for name in names if name.endswith(".html")}


@pytest.fixture(scope="module")
def report(quick):
    """The report of the quick build as one page."""
    path = quick.folder / "report.html"
    process = quick.snakemake("--report", path.name, "output/rlhf/tiny")
    assert process.returncode == 0, process.stdout
    assert "are stale" not in process.stdout
    return path


def read_variable(page, name):
    """A JavaScript variable of the report, which it gets as JSON."""
    found = re.search(rf"^ *var {name} = ([{{\"].*);$", page.read_text(), re.MULTILINE)
    return json.loads(found[1])


def test_every_file_has_a_chapter_and_a_caption(quick, report):
    categories, results = (read_variable(report, name) for name in ("categories", "results"))
    found = {
        chapter: {path.rpartition("/")[2] for path in recipes["rlhf/tiny"]}
        for chapter, recipes in categories.items()
    }
    assert found == CHAPTERS
    files = {path.name for path in (quick.folder / "output/report/rlhf/tiny").glob("*.*")}
    assert files - {
        "manifest.json",
        "run.json",
        ".snakemake_timestamp",
        "costs_and_headline.html",
    } == set().union(*found.values())
    for path, result in results.items():
        assert len(re.sub("<.*?>", "", result["caption"]).strip()) > 20, path
        assert result["data_uri"].startswith("data:"), path


def test_the_start_page_shows_the_headline_and_lists_the_chapters(quick, report):
    text = read_variable(report, "workflow_desc")
    places = [text.index(f"<strong>{chapter}</strong>: ") for chapter in CHAPTERS]
    assert places == sorted(places)
    # The main result comes first, with n and the cost.
    metrics = json.loads((quick.folder / "output/eval/rlhf/tiny/metrics.json").read_text())
    won = format_metric("ties", metrics["wins"]["rlhf"]["sft"]["score"]["mean"])
    assert text.index("<strong>rlhf/tiny</strong>") < text.index(f"<dd>{won}</dd>") < places[0]
    assert "<dt>held-out prompts</dt><dd>20</dd>" in text and "<dt>time of all jobs</dt>" in text
    assert "Seed of the\nconfig: 1234." in text


def test_the_results_page_has_the_metrics_of_the_evaluations(quick):
    folder = quick.folder / "output"
    page = (folder / "report/rlhf/tiny/results.html").read_text()
    sft = json.loads((folder / "eval/sft/tiny/metrics.json").read_text())
    reward = json.loads((folder / "eval/reward/tiny/metrics.json").read_text())
    assert f'<span class="value">{format_number(sft["after"]["response_perplexity"])}' in page
    assert f'<span class="value">{format_metric("ties", reward["accuracy"])}</span>' in page
    for cell in ("ppo", "1234"):
        assert f"<td>{cell}</td>" in page
    assert "win rate of RLHF against SFT, by score" in page
    lineage = (folder / "report/rlhf/tiny/lineage.html").read_text()
    assert "generated (shop, seed 1234)" in lineage


def test_chapters_number_through(quick):
    for place, chapter in enumerate(CHAPTERS, 1):
        [name] = {name for name in CHAPTERS[chapter] if name in PAGES}
        page = (quick.folder / "output/report/rlhf/tiny" / name).read_text()
        number, title = chapter.split()
        assert f'<h1><span class="number">{number}</span>{title}</h1>' in page
        sections = re.findall(r'<h2><span class="number">([\d.]+)</span>', page)
        assert sections == [f"{place}.{section}" for section in range(1, len(sections) + 1)]


def test_a_stage_alone_has_a_report(quick):
    folder = quick.folder / "output/report/dpo/tiny"
    assert {path.name for path in folder.glob("*.html")} == PAGES - {"responses.html"} | {
        "costs_and_headline.html"
    }
    page = (folder / "results.html").read_text()
    accuracy = json.loads((quick.folder / "output/eval/dpo/tiny/metrics.json").read_text())
    assert f"<dd>{format_metric('ties', accuracy['accuracy'])}</dd>" in page
    process = quick.snakemake("--report", "dpo.html", "output/dpo/tiny")
    assert process.returncode == 0, process.stdout
    found = read_variable(quick.folder / "dpo.html", "categories")
    assert sorted(found) == [chapter for chapter in CHAPTERS if chapter != "6 Responses"]


def test_the_costs_page_has_all_jobs(quick):
    page = (quick.folder / "output/report/rlhf/tiny/costs.html").read_text()
    manifest = json.loads((quick.folder / "output/report/rlhf/tiny.manifest.json").read_text())
    for path in manifest["lineage"]:
        assert f'<th scope="row">{path.removeprefix("output/")}</th>' in page
    assert "<td>unknown</td>" not in page and "tokens_per_second" in page


def rejection(workflow, *options):
    """The error of a report that is rejected: one line, and no report."""
    process = workflow.snakemake("--report", "rejected.html", "output/rlhf/tiny", *options)
    assert process.returncode == 1, process.stdout
    assert not (workflow.folder / "rejected.html").exists()
    [line] = [line for line in process.stdout.splitlines() if line.startswith("error: ")]
    return line


WAY = (
    ", and a report shows results that are up to date: first run the same command with --cores 1"
    " instead of --report (python scripts/explain.py prints what changed)"
)


def test_a_report_of_stale_results_is_rejected(quick, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("evaluation: {bootstrap_resamples: 101}")
    changed = Workflow(quick.folder, *quick.options, str(more))
    assert rejection(changed) == f"error: output/eval/rlhf/tiny is stale{WAY}"
    # The first one that Snakemake plans.
    assert rejection(quick, "--config", "seed=5") == f"error: output/rlhf/tiny is stale{WAY}"
    # The results stay up to date.
    assert quick.planned() == set()


def test_a_report_of_missing_results_is_rejected(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    (copy.folder / "output/report/rlhf/tiny.manifest.json").unlink()
    assert rejection(copy) == f"error: output/report/rlhf/tiny is incomplete{WAY}"
    shutil.rmtree(copy.folder / "output")
    assert rejection(copy) == f"error: output/rlhf/tiny is incomplete{WAY}"


# --- in a browser ---------------------------------------------------------------------------


def test_the_browser_records_requests_and_errors(chromium, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        '<img src="http://localhost:9/a.png"><iframe src="data:text/html,<script>throw 1</script>'
        '<img src=http://localhost:9/b.png>"></iframe><script>console.error("no")</script>'
    )
    chromium.open(path)
    assert {url[-5:] for url in chromium.requests} == {"a.png", "b.png"}
    assert "['no']" in chromium.errors
    assert any("Uncaught" in error or error == "1" for error in chromium.errors)


def test_a_browser_shows_the_whole_report_without_a_network(chromium, report):
    chromium.open(report)
    chromium.wait_for("document.querySelector('.vega-embed svg, .vega-embed canvas') !== null")
    results = read_variable(report, "results")
    shown = set()
    for path, result in results.items():
        if result["mime_type"] == "text/csv":
            continue
        chromium.run(f"new ToggleViewManager(app).handleSelectedResult({json.dumps(path)})")
        chromium.wait_for(
            f"document.querySelector('iframe')?.src === results[{json.dumps(path)}].data_uri"
        )
        shown.add(path.rpartition("/")[2])
    assert shown == PAGES
    assert chromium.requests == []
    assert chromium.errors == []


@pytest.mark.parametrize("width", [390, 1500])
def test_the_first_page_of_a_report_starts_within_reach(chromium, report, width):
    chromium.resize(width)
    chromium.open(report)
    chromium.wait_for("document.querySelector('.snakechat .cards') !== null")
    assert chromium.run("document.querySelector('#snakechat h1').getBoundingClientRect().top") >= 0


@pytest.mark.parametrize("width", [390, 1500])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_fit_into_the_window_and_follow_the_theme(chromium, quick, width, theme):
    chromium.resize(width)
    chromium.prefer(theme)
    for name in sorted(PAGES):
        chromium.open(quick.folder / "output/report/rlhf/tiny" / name)
        assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth"), name
        background = chromium.run("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[theme]
    assert chromium.requests == []
    assert chromium.errors == []
