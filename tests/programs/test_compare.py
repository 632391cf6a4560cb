"""Comparisons of recipes: sweeps, the page, its data."""

import csv
import json
import re

import pytest
import yaml


def test_a_sweep_is_trained_and_compared(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    cpu = yaml.safe_load((copy.folder / "config.yaml").read_text())["deployments"]["cpu"]
    deployments = {f"zero-{stage}": cpu | {"zero_stage": stage, "threads": 1} for stage in (0, 2)}
    over = {"placement": list(deployments), "seed": [1234, 7]}
    settings = {"sweeps": {"mine": {"stage": "dpo", "recipe": "tiny", "over": over}}}
    # In fp32, both seeds have the same reference.
    settings |= {"deployments": deployments, "dpo": {"recipes": {"tiny": {"dtype": "fp32"}}}}
    (copy.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    copy.options = (*copy.options, "sweep.yaml", "--config", "seed=1234")
    page = copy.folder / "output/compare/dpo/mine.html"
    copy.build("output/compare/dpo/mine.html")
    text = page.read_text()
    assert text.count("<figure>") == 6
    # One file.
    assert not re.findall(r'(?:src|href)="([^#"]+)', text)
    head = re.compile(r'<thead><tr><th scope="col"></th>(.*?)</tr></thead>')
    columns = re.findall("<th.*?>(.*?)</th>", head.search(text)[1])
    assert columns == ["zero_stage 2"]
    assert "<caption>Differences from zero_stage 0</caption>" in text
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text))
    assert rows["placement: zero_stage"] == "<td>0</td><td>2</td>"
    assert rows["seed"] == "<td>1234, 7</td><td>1234, 7</td>"
    assert "n\xa0=\xa02" in rows["accuracy"]
    assert re.fullmatch(r"(<td>[\d.]+ s/step</td>){2}", rows["time of a step (median)"])
    # The file holds the data of the evaluations.
    with (copy.folder / "output/pages/compare/dpo/mine/comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["group", "seed", "metric", "value", "low", "high", "n"]
    name = "mine-placement-zero-2"
    paths = (f"output/eval/dpo/{name}-seed-{seed}/metrics.json" for seed in (1234, 7))
    losses = [json.loads((copy.folder / path).read_text())["loss"] for path in paths]
    found = {
        row["seed"]: row
        for row in rows
        if (row["group"], row["metric"]) == ("zero_stage 2", "loss")
    }
    assert [float(found[seed]["value"]) for seed in ("1234", "7")] == losses
    assert float(found[""]["value"]) == pytest.approx(sum(losses) / 2)
    assert float(found[""]["low"]) <= float(found[""]["value"]) <= float(found[""]["high"])
    assert [found[seed]["n"] for seed in ("", "7")] == ["2", "1"]
    # Its recipes are targets.
    assert copy.planned("output/dpo/mine-placement-zero-2-seed-7.manifest.json") == set()
    # A version in the store, of a recipe that is no longer in the config.
    path = "output/dpo/mine-placement-zero-0-seed-7"
    listed = copy.run("python", "scripts/store.py", "list", path).stdout
    key = re.search(r"output/store/train_dpo/([0-9a-f]{32})", listed)[1]
    (copy.folder / "sweep.yaml").write_text("{}")
    version = f"mine-placement-zero-0-seed-7@{key[:12]}"
    copy.build(f"output/compare/dpo/tiny-vs-{version}.html")
    text = (copy.folder / f"output/compare/dpo/tiny-vs-{version}.html").read_text()
    assert f'<th scope="col">tiny</th><th scope="col">{version}</th>' in text
    assert '<th scope="row">seed</th><td>1234</td><td>7</td>' in text
    assert copy.planned(f"output/compare/dpo/tiny-vs-{version}.html") == set()
    # A training log of DeepSpeed-Chat.
    log, target = copy.folder / "training.log", "output/compare/dpo/tiny-vs-original.html"
    log.write_text("<script>\nchosen: 1.5, rejected: -0.25, loss: 0.4375\n" * 2)
    (copy.folder / "sweep.yaml").write_text("logs: {original: training.log}")
    copy.build(target)
    text = (copy.folder / target).read_text()
    assert '<th scope="col">tiny</th><th scope="col">original</th>' in text
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text))
    assert rows["mean score of chosen responses"].count("<td>") == 2
    assert ">1.50<" in rows["mean score of chosen responses"]
    assert ">0.438<" in rows["loss (nats per row) before training"]
    assert "original: of a training log" in text and "tiny, original" not in text
    assert copy.planned(target) == set()
    log.write_text("\n" + log.read_text())
    assert copy.planned(target) == {"draw_page"}
    log.write_text("ppl: 5.9")
    process = copy.snakemake(target, "--cores", "1")
    error = "logs.original: training.log is a log of sft: expected one of DeepSpeed-Chat's dpo"
    assert process.returncode and error in process.stdout
