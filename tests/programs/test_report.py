"""The report of a build: chapters and pages, rejection of stale results, display in a browser."""

import json
import re
import shutil
import zipfile

import pytest

import verify
from conftest import Workflow
from support.browser import browser, find_browser


def test_only_costs_may_differ_between_two_builds_of_a_report(tmp_path):
    spec = {"rule": "draw_report", "path": "output/report/tiny", "inputs": {}}
    for name in ("ours", "theirs"):
        manifest = {"spec": spec, "inputs": {}, "lineage": {}, "facts": {"n": name}, "files": {}}
        (tmp_path / f"{name}.manifest.json").write_text(json.dumps(manifest))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    facts = {
        folder: {
            name: {"size": 1, "sha256": f"{folder}"}
            for name in ("costs.html", "costs_throughput.svg", "sft.svg")
        }
        for folder in (ours, theirs)
    }
    assert list(verify.find_differences(ours, theirs, facts)) == [
        f"{ours}/sft.svg: differs from {theirs}/sft.svg"
    ]


# --- a build --------------------------------------------------------------------------------

CHAPTERS = {
    "1 Results": {"results.html", "wins.svg", "metrics.csv"},
    "2 Data": {"data.svg", "data.csv"},
    "3 Training": {"sft.svg", "rlhf.svg", "reward.svg", "calibration.svg"},
    "4 Responses": {"responses.html"},
    "5 Lineage": {"lineage.svg"},
    "6 Costs": {"costs.html", "costs.svg", "costs_throughput.svg"},
}
# Okabe and Ito's palette; plots also have white, black and greys.
PALETTE = {"#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#f0e442"}
GREY = re.compile(r"#(..)\1\1$")


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
        chapter: {path.rpartition("/")[2] for path in recipes["tiny"]}
        for chapter, recipes in categories.items()
    }
    assert found == CHAPTERS
    files = {path.name for path in (quick.folder / "output/report/tiny").glob("*.*")}
    assert files - {"manifest.json", ".snakemake_timestamp"} == set().union(*found.values())
    for path, result in results.items():
        assert len(re.sub("<.*?>", "", result["caption"]).strip()) > 20, path
        assert result["data_uri"].startswith("data:"), path


def test_the_start_page_shows_a_plot_and_lists_the_chapters(report):
    text = read_variable(report, "workflow_desc")
    places = [text.index(f"<strong>{chapter}</strong>: ") for chapter in CHAPTERS]
    assert places == sorted(places)
    # The plot comes first.
    assert text.count("<svg ") == text.count("</svg>") == 1
    assert text.index("<svg ") < places[0]
    assert "Seed of the\nconfig: 1234." in text


def test_plots_use_a_palette_for_all_kinds_of_colour_vision(quick):
    for path in (quick.folder / "output/report/tiny").glob("*.svg"):
        colours = set(re.findall(r"#[0-9a-f]{6}\b", path.read_text()))
        assert colours - PALETTE - set(filter(GREY.match, colours)) == set(), path


def test_the_results_page_has_the_metrics_of_the_evaluations(quick):
    folder = quick.folder / "output"
    page = (folder / "report/tiny/results.html").read_text()
    sft = json.loads((folder / "eval/sft/tiny/metrics.json").read_text())
    reward = json.loads((folder / "eval/reward/tiny/metrics.json").read_text())
    assert f"<td>{sft['after']['perplexity']:.4g}</td>" in page
    assert f"<td>{reward['accuracy']:.4g} (" in page
    for cell in ("tiny", "ppo", "1234", "sft/tiny", "generated (shop, seed 1234)"):
        assert f"<td>{cell}</td>" in page
    assert "RLHF against SFT, by score" in page


def test_the_costs_page_has_all_jobs(quick):
    page = (quick.folder / "output/report/tiny/costs.html").read_text()
    lineage = json.loads((quick.folder / "output/report/tiny.manifest.json").read_text())["lineage"]
    for path in lineage:
        assert f"<th>{path.removeprefix('output/')}</th>" in page
    assert "unknown" not in page


def test_a_zipped_report_contains_all_files(quick, report):
    process = quick.snakemake("--report", "report.zip", "output/rlhf/tiny")
    assert process.returncode == 0, process.stdout
    names = zipfile.ZipFile(quick.folder / "report.zip").namelist()
    assert "report/report.html" in names
    contained = {name.rpartition("/")[2] for name in names}
    assert set().union(*CHAPTERS.values()) <= contained


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
    # The first stale job in the order of the build.
    assert rejection(quick, "--config", "seed=5") == f"error: output/data/toy is stale{WAY}"
    # The results stay up to date.
    assert quick.planned() == set()


def test_a_report_of_missing_results_is_rejected(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    (copy.folder / "output/report/tiny.manifest.json").unlink()
    assert rejection(copy) == f"error: output/report/tiny is incomplete{WAY}"
    shutil.rmtree(copy.folder / "output")
    assert rejection(copy) == f"error: output/rlhf/tiny is incomplete{WAY}"


# --- in a browser ---------------------------------------------------------------------------


@pytest.fixture
def chromium(tmp_path):
    """A browser."""
    if not find_browser():
        pytest.skip("needs Chromium (apt-get install chromium)")
    with browser(tmp_path / "profile") as opened:
        yield opened


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
        if result["mime_type"] == "text/html":
            chromium.wait_for(
                f"document.querySelector('iframe')?.src === results[{json.dumps(path)}].data_uri"
            )
        else:
            # Decoded.
            chromium.wait_for(
                "(image => image?.complete && image.naturalWidth > 300 && image.src ==="
                f" results[{json.dumps(path)}].data_uri)"
                "(document.querySelector('.grow img'))"
            )
        shown.add(path.rpartition("/")[2])
    assert shown == {name for names in CHAPTERS.values() for name in names} - {
        "metrics.csv",
        "data.csv",
    }
    assert chromium.requests == []
    assert chromium.errors == []


def test_tables_fit_into_the_window(chromium, quick):
    for name, tables in (("results", 5), ("responses", 10), ("costs", 4)):
        chromium.open(quick.folder / f"output/report/tiny/{name}.html")
        assert chromium.run("document.querySelectorAll('table').length") >= tables
        assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.requests == []
    assert chromium.errors == []
