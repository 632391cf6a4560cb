"""The report: its tables and pictures, what it is refused for, and how a browser shows it."""

import json
import re
import shutil
import zipfile

import pytest

import verify
from conftest import Workflow
from snakechat.reporting import plots as pictures
from snakechat.reporting import report_tables as chapters
from support.browser import browser, find_browser

# --- by hand --------------------------------------------------------------------------------


def of_model(score, length):
    """Figures of a model's responses."""
    return {"score": score, "length": length, "ended_by_eos": 1.0, "kl_to_sft": 0.25}


def around(figures):
    """An interval of each figure."""
    return {name: [value - 0.5, value + 0.5] for name, value in figures.items()}


def won(mean, **more):
    """How often a model wins, with its interval."""
    return {"mean": mean, "interval_95": [mean - 0.125, mean + 0.125], "longer": 0.5, **more}


MODELS = {"rlhf": of_model(3.0, 20.0), "base": of_model(0.0, 30.0), "sft": of_model(1.0, 10.0)}
MODELS["dpo/tiny"] = of_model(2.0, 12.0)
FIGURES = {
    **MODELS,
    "num_prompts": 1000,
    "num_generations": 2,
    "intervals_95": {name: around(figures) for name, figures in MODELS.items()},
    "score_difference": {"mean": 2.0, "interval_95": [1.5, 2.5]},
    "wins": {
        "sft": {"base": {"score": won(0.625)}},
        "rlhf": {
            "sft": {"judge_score": won(0.5), "score": won(0.75, when_longer=1.0)},
            "base": {"score": won(0.875)},
        },
        "dpo/tiny": {"sft": {"score": won(0.25)}},
    },
}


@pytest.mark.parametrize(
    ("share", "number", "interval"),
    # Wilson's, as Newcombe 1998 and others print them.
    [(0, 10, [0, 0.2775]), (0.5, 10, [0.2366, 0.7634]), (81 / 263, 263, [0.2553, 0.3662])],
)
def test_the_interval_of_a_share(share, number, interval):
    assert chapters.share_interval(share, number) == pytest.approx(interval, abs=1e-4)


def test_models_stand_in_the_order_of_the_road_with_intervals_and_the_difference():
    title, head, rows = chapters.response_table(FIGURES)
    assert title == "Responses to 1,000 held-out prompts, 2 of each model to each"
    assert head == ["", "base", "SFT", "RLHF", "dpo/tiny", "RLHF - SFT"]
    table = {name: cells for name, *cells in rows}
    assert table["score"][2:] == ["3 (2.5 … 3.5)", "2 (1.5 … 2.5)", "2 (1.5 … 2.5)"]
    # What nobody measured has no row, and no difference is made up.
    assert "exactly right (share)" not in table
    assert table["length (tokens)"][-1] == ""


def test_wins_are_told_of_each_pair_of_models_with_what_length_has_to_do_with_it():
    _, _, rows = chapters.win_table(FIGURES)
    assert [row[0] for row in rows] == [
        "SFT over base, by score",
        "RLHF over SFT, by score",
        "RLHF over SFT, by score of the judge",
        "RLHF over base, by score",
        "dpo/tiny over SFT, by score",
    ]
    assert rows[1][1:] == ["0.75 (0.625 … 0.875)", "0.5", "1", ""]


def test_wins_are_drawn_against_lengths_and_sft_draws_with_itself():
    panels = chapters.trade_off(FIGURES)
    assert panels == {
        "by score": {
            "SFT": (10, [9.5, 10.5], 0.5, None),
            "RLHF": (20, [19.5, 20.5], 0.75, [0.625, 0.875]),
            "dpo/tiny": (12, [11.5, 12.5], 0.25, [0.125, 0.375]),
        },
        "by score of the judge": {
            "SFT": (10, [9.5, 10.5], 0.5, None),
            "RLHF": (20, [19.5, 20.5], 0.5, [0.375, 0.625]),
        },
    }


def test_error_bars_reach_as_far_as_their_intervals():
    assert pictures.reach(2, [1.5, 4]) == [[0.5], [2]]
    # A mean may be outside its percentiles.
    assert pictures.reach(2, [2.5, 4]) == [[0], [2]]
    assert pictures.reach(2, [1, 1.5]) == [[1], [0]]
    assert pictures.reach(2, None) is None


def words_of(picture):
    """The texts of a picture, which it has in comments."""
    return set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_axes_have_names_with_units_and_models_theirs(tmp_path):
    path = tmp_path / "wins.svg"
    pictures.draw_trade_off(path, chapters.trade_off(FIGURES), "length (tokens)", "wins (share)")
    told = {"length (tokens)", "wins (share)", "by score", "SFT", "RLHF", "dpo/tiny"}
    assert told <= words_of(path)


def test_panels_stand_two_in_a_row(tmp_path):
    path = tmp_path / "curves.svg"
    points = {"": [(1, 0.5), (2, 0.25)]}
    pictures.draw_curves(path, {name: points for name in "abcde"})
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', path.read_text()).groups())
    assert (width, height) == pytest.approx((72 * 9.2, 72 * 9.6), rel=0.01)
    assert words_of(path) >= {"a", "b", "c", "d", "e", "step"}


def test_neighbours_are_drawn_together_where_there_are_many_points():
    steps = [{"step": step, "loss": float(step)} for step in range(1, 301)]
    [lines] = pictures.panels_of(steps, {"loss": "loss"}).values()
    assert len(lines[""]) == 100
    assert lines[""][:2] == [(2, 2.0, 1.0, 3.0), (5, 5.0, 4.0, 6.0)]
    [few] = pictures.panels_of(steps[:100], {"loss": "loss"}).values()
    assert few[""][-1] == (100, 100.0)


def test_a_picture_of_the_same_figures_is_the_same_bytes(tmp_path):
    paths = [tmp_path / "1.svg", tmp_path / "2.svg"]
    for path in paths:
        bins = [(0.6, 0.5, [0.25, 0.75], 8), (0.9, 1.0, [0.5, 1.0], 4)]
        pictures.draw_calibration(path, bins)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def lines_of(responses):
    """Lines of responses.jsonl. responses: of each model, (prompt, response, score) of each sample."""
    return [
        {"model": model, "prompt": prompt, "response": response, "score": score}
        for model, found in responses.items()
        for prompt, response, score in found
    ]


def test_what_models_write_is_text(tmp_path):
    wicked = "</td><script>alert(1)</script>\n\nHuman: and now?\n\nAssistant: <b>"
    lines = lines_of({"sft": [("p & q", "fine", 1.0)], "rlhf": [("p & q", wicked, 0.5)]})
    chapters.write_responses(tmp_path / "responses.html", "tiny", lines, 1)
    page = (tmp_path / "responses.html").read_text()
    assert "<script" not in page and "<b>" not in page
    assert (
        "&lt;script&gt;alert(1)&lt;/script&gt;\n\nHuman: and now?\n\nAssistant: &lt;b&gt;" in page
    )
    assert "p &amp; q" in page


def test_first_samples_are_shown_and_where_rlhf_lost_most(tmp_path):
    prompts = [f"prompt {number}" for number in range(20)]
    # Two samples of each; RLHF is the better one, but for the prompts 15 to 18.
    falls = {15: -1, 16: -4, 17: -2, 18: -3}
    responses = {
        "sft": [(p, f"sft {p} {s}", 0.0) for p in prompts for s in "ab"],
        "rlhf": [
            (p, f"rlhf {p} {s}", falls.get(row, 1)) for row, p in enumerate(prompts) for s in "ab"
        ],
    }
    chapters.write_responses(tmp_path / "responses.html", "tiny", lines_of(responses), 2)
    page = (tmp_path / "responses.html").read_text()
    asked = re.findall(r"<caption>prompt (\d+)</caption>", page)
    assert asked == [*map(str, range(10)), "16", "18", "17"]
    assert "rlhf prompt 3 a" in page and "rlhf prompt 3 b" not in page


def test_no_prompt_is_shown_as_lost_that_was_not(tmp_path):
    responses = {
        "sft": [("p", "a", 1.0), ("q", "b", 1.0)],
        "rlhf": [("p", "c", 1.0), ("q", "d", 0)],
    }
    chapters.write_responses(tmp_path / "responses.html", "tiny", lines_of(responses), 1)
    page = (tmp_path / "responses.html").read_text()
    assert re.findall("<caption>(.)</caption>", page) == ["p", "q", "q"]


def test_costs_are_those_of_the_runs_that_made_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {"seconds": 61, "peak_memory_mb": 1234, "started": "2026-01-02T03:04:05", "host": "here"}
    lineage = {}
    for name, recorded in (("data", "a"), ("sft", "other"), ("rlhf", None)):
        lineage[name] = {"spec": "a", "inputs": []}
        if recorded:
            (tmp_path / f"{name}.run.json").write_text(json.dumps(run | {"spec": recorded}))
    runs = chapters.runs_of(lineage)
    assert runs == {"data": run | {"spec": "a"}, "sft": None, "rlhf": None}
    assert chapters.cost_cells(runs["data"]) == [
        *("2026-01-02 03:04", "0:01:01", "1,234", "", "", "", "here")
    ]
    assert chapters.cost_cells(None)[0] == "not known"
    runs["output/rlhf/tiny"] = None
    chapters.write_costs(tmp_path / "costs.html", "tiny", runs)
    assert "All jobs together: 0:01:01." in (tmp_path / "costs.html").read_text()


def test_only_costs_may_differ_between_two_builds_of_a_report(tmp_path):
    spec = {"rule": "draw_report", "path": "output/report/tiny", "inputs": {}}
    for name in ("ours", "theirs"):
        manifest = {"spec": spec, "inputs": {}, "lineage": {}, "facts": {"n": name}, "files": {}}
        (tmp_path / f"{name}.manifest.json").write_text(json.dumps(manifest))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    facts = {
        folder: {name: {"size": 1, "sha256": f"{folder}"} for name in ("costs.html", "sft.svg")}
        for folder in (ours, theirs)
    }
    assert list(verify.differences(ours, theirs, facts)) == [
        f"{ours}/sft.svg: differs from {theirs}/sft.svg"
    ]


# --- of a build -----------------------------------------------------------------------------

CHAPTERS = {
    "1 Results": {"results.html", "wins.svg", "figures.csv"},
    "2 Data": {"data.svg", "data.csv"},
    "3 SFT": {"sft.svg"},
    "4 Reward model": {"reward.svg", "calibration.svg"},
    "5 RLHF": {"rlhf.svg"},
    "6 Responses": {"responses.html"},
    "7 Origins": {"lineage.svg"},
    "8 Costs": {"costs.html", "costs.svg", "throughput.svg"},
}
# Okabe and Ito's colours, and what pictures have beside them: white, black and greys.
SEEN_BY_ALL = {"#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#f0e442"}
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
    """A value of JavaScript that a page gets as JSON."""
    found = re.search(rf"^ *var {name} = ([{{\"].*);$", page.read_text(), re.MULTILINE)
    return json.loads(found[1])


def test_all_that_was_drawn_stands_in_a_chapter_and_has_a_caption(quick, report):
    categories, results = (read_variable(report, name) for name in ("categories", "results"))
    found = {
        chapter: {path.rpartition("/")[2] for path in recipes["tiny"]}
        for chapter, recipes in categories.items()
    }
    assert found == CHAPTERS
    drawn = {path.name for path in (quick.folder / "output/report/tiny").glob("*.*")}
    assert drawn - {"manifest.json", ".snakemake_timestamp"} == set().union(*found.values())
    for path, result in results.items():
        assert len(re.sub("<.*?>", "", result["caption"]).strip()) > 20, path
        assert result["data_uri"].startswith("data:"), path


def test_a_reader_is_told_how_to_read_it(report):
    text = read_variable(report, "workflow_desc")
    places = [text.index(f"<strong>{chapter}</strong>: ") for chapter in CHAPTERS]
    assert places == sorted(places)
    assert "Seed of\nthe config: 1234." in text


def test_pictures_have_colours_that_all_kinds_of_vision_tell_apart(quick):
    for path in (quick.folder / "output/report/tiny").glob("*.svg"):
        colours = set(re.findall(r"#[0-9a-f]{6}\b", path.read_text()))
        assert colours - SEEN_BY_ALL - set(filter(GREY.match, colours)) == set(), path


def test_the_page_of_results_has_the_figures_of_the_evaluations(quick):
    folder = quick.folder / "output"
    page = (folder / "report/tiny/results.html").read_text()
    sft = json.loads((folder / "eval/sft/tiny/metrics.json").read_text())
    reward = json.loads((folder / "eval/reward/tiny/metrics.json").read_text())
    assert f"<td>{sft['after']['perplexity']:.4g}</td>" in page
    assert f"<td>{reward['accuracy']:.4g} (" in page
    for told in ("tiny", "ppo", "1234", "sft/tiny", "generated (shop, seed 1234)"):
        assert f"<td>{told}</td>" in page
    assert "RLHF over SFT, by score" in page


def test_the_page_of_costs_has_all_jobs(quick):
    page = (quick.folder / "output/report/tiny/costs.html").read_text()
    lineage = json.loads((quick.folder / "output/report/tiny.manifest.json").read_text())["lineage"]
    for path in lineage:
        assert f"<th>{path.removeprefix('output/')}</th>" in page
    assert "not known" not in page


def test_a_report_as_zip_has_a_page_and_its_files(quick, report):
    process = quick.snakemake("--report", "report.zip", "output/rlhf/tiny")
    assert process.returncode == 0, process.stdout
    names = zipfile.ZipFile(quick.folder / "report.zip").namelist()
    assert "report/report.html" in names
    held = {name.rpartition("/")[2] for name in names}
    assert set().union(*CHAPTERS.values()) <= held


def refused(workflow, *options):
    """What a report is refused with: one line, and no report."""
    process = workflow.snakemake("--report", "refused.html", "output/rlhf/tiny", *options)
    assert process.returncode == 1, process.stdout
    assert not (workflow.folder / "refused.html").exists()
    [line] = [line for line in process.stdout.splitlines() if line.startswith("error: ")]
    return line


WAY = (
    ", and a report tells of what is up to date: give the same command with --cores 1 in the"
    " place of --report first (python scripts/explain.py says what changed)"
)


def test_no_report_of_what_is_stale(quick, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("evaluation: {bootstrap_resamples: 101}")
    changed = Workflow(quick.folder, *quick.options, str(more))
    assert refused(changed) == f"error: output/eval/rlhf/tiny is stale{WAY}"
    # The first thing on the road that is.
    assert refused(quick, "--config", "seed=5") == f"error: output/data/toy is stale{WAY}"
    # It was only asked: what is there is as good as before.
    assert quick.planned() == set()


def test_no_report_of_what_is_not_there(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    (copy.folder / "output/report/tiny.manifest.json").unlink()
    assert refused(copy) == f"error: output/report/tiny is not whole{WAY}"
    shutil.rmtree(copy.folder / "output")
    assert refused(copy) == f"error: output/rlhf/tiny is not whole{WAY}"


# --- in a browser ---------------------------------------------------------------------------


@pytest.fixture
def chromium(tmp_path):
    """A browser."""
    if not find_browser():
        pytest.skip("needs Chromium (apt-get install chromium)")
    with browser(tmp_path / "profile") as opened:
        yield opened


def test_the_browser_notices_what_is_wrong_with_a_page(chromium, tmp_path):
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
            # Decoded, and of a size.
            chromium.wait_for(
                "(image => image?.complete && image.naturalWidth > 300 && image.src ==="
                f" results[{json.dumps(path)}].data_uri)"
                "(document.querySelector('.grow img'))"
            )
        shown.add(path.rpartition("/")[2])
    assert shown == {name for names in CHAPTERS.values() for name in names} - {
        "figures.csv",
        "data.csv",
    }
    assert chromium.requests == []
    assert chromium.errors == []


def test_pages_of_a_report_show_their_tables(chromium, quick):
    for name, tables in (("results", 5), ("responses", 10), ("costs", 4)):
        chromium.open(quick.folder / f"output/report/tiny/{name}.html")
        assert chromium.run("document.querySelectorAll('table').length") >= tables
        # No table is wider than the window.
        assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.requests == []
    assert chromium.errors == []
