"""Comparisons of recipes: sweeps, the page, its data."""

import csv
import json
import re

import pytest
import yaml


def test_an_unknown_recipe_is_an_error_of_one_line(quick):
    output = quick.snakemake("output/compare/dpo/tiny-vs-none.html", "-n").stdout
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "dpo.recipes has no 'none'" in line


def test_a_sweep_is_trained_and_compared(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    over = {"beta": [0.1, 0.5], "seed": [1234, 7]}
    settings = {"sweeps": {"mine": {"stage": "dpo", "recipe": "tiny", "over": over}}}
    (copy.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    copy.options = (*copy.options, "sweep.yaml", "--config", "seed=1234")
    page = copy.folder / "output/compare/dpo/mine.html"
    copy.build("output/compare/dpo/mine.html")
    text = page.read_text()
    assert text.count("<figure>") == 12
    # One file.
    assert not re.findall(r'(?:src|href)="([^#"]+)', text)
    head = re.compile(r'<thead><tr><th scope="col"></th>(.*?)</tr></thead>')
    columns = re.findall("<th.*?>(.*?)</th>", head.search(text)[1])
    assert columns == ["mine-beta-0.5"]
    assert "<caption>Differences from mine-beta-0.1</caption>" in text
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text))
    assert rows["beta"] == "<td>0.1</td><td>0.5</td>"
    assert rows["seed"] == "<td>1234, 7</td><td>1234, 7</td>"
    assert "n\xa0=\xa02" in rows["accuracy"]
    assert re.fullmatch(r"(<td>[\d.]+ s</td>){2}", rows["training time per seed"])
    # The data are those of the evaluations.
    with (page.parent / "mine/comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["group", "seed", "metric", "value", "low", "high", "n"]
    metrics = {
        seed: json.loads(
            (copy.folder / f"output/eval/dpo/mine-beta-0.5-seed-{seed}/metrics.json").read_text()
        )
        for seed in (1234, 7)
    }
    found = {
        row["seed"]: row
        for row in rows
        if (row["group"], row["metric"]) == ("mine-beta-0.5", "loss")
    }
    losses = [of["loss"] for of in metrics.values()]
    assert [float(found[seed]["value"]) for seed in ("1234", "7")] == losses
    assert float(found[""]["value"]) == pytest.approx(sum(losses) / 2)
    assert float(found[""]["low"]) <= float(found[""]["value"]) <= float(found[""]["high"])
    assert [found[seed]["n"] for seed in ("", "7")] == ["2", "1"]
    # Its recipes are targets.
    assert copy.planned("output/dpo/mine-beta-0.5-seed-7.manifest.json") == set()
    # A version in the store, of a recipe that is no longer in the config.
    path = "output/dpo/mine-beta-0.1-seed-7"
    listed = copy.run("python", "scripts/store.py", "list", path).stdout
    key = re.search(r"output/store/train_dpo/\S+/([0-9a-f]{32})", listed)[1]
    (copy.folder / "sweep.yaml").write_text("{}")
    version = f"mine-beta-0.1-seed-7@{key[:12]}"
    copy.build(f"output/compare/dpo/tiny-vs-{version}.html")
    text = (copy.folder / f"output/compare/dpo/tiny-vs-{version}.html").read_text()
    assert f'<th scope="col">tiny</th><th scope="col">{version}</th>' in text
    assert '<th scope="row">seed</th><td>1234</td><td>7</td>' in text
    assert copy.planned(f"output/compare/dpo/tiny-vs-{version}.html") == set()


def test_deployments_with_other_zero_stages_are_columns(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    cpu = yaml.safe_load((copy.folder / "config.yaml").read_text())["deployments"]["cpu"]
    deployments = {f"zero-{stage}": cpu | {"zero_stage": stage, "threads": 1} for stage in (0, 2)}
    over = {"placement": list(deployments), "max_steps": [2]}
    sweeps = {"stages": {"stage": "sft", "recipe": "tiny", "over": over}}
    (copy.folder / "zero.yaml").write_text(
        yaml.safe_dump({"deployments": deployments, "sweeps": sweeps})
    )
    copy.options = (*copy.options, "zero.yaml")
    copy.build("output/compare/sft/stages.html")
    text = (copy.folder / "output/compare/sft/stages.html").read_text()
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text))
    assert rows["placement: zero_stage"] == "<td>0</td><td>2</td>"
    assert re.fullmatch(r"(<td>[\d.]+</td>){2}", rows["seconds per step (median)"])
    assert re.fullmatch(r"(<td>[\d.]+\xa0[MG]B</td>){2}", rows["peak memory of the first process"])
    assert "peak memory of its GPU" not in rows
