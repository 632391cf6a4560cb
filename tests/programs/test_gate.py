"""Gates: figures by their paths, and builds of a model that passes or misses its gate."""

import json

import pytest
import yaml

from check_gate import figure_value
from conftest import Workflow
from snakechat.config.recipes import ConfigError
from snakechat.jobs import model_jobs
from snakechat.workflow.errors import InputError
from support.configs import load

TARGET = "output/reward/tiny"
PAIRS = {
    "accuracy": 0.6,
    "intervals_95": {"accuracy": [0.5, 0.7]},
    "loss": 0.5,
    "by_dataset": {
        "a.b": {"accuracy": 0.9, "intervals_95": {"accuracy": [0.625, 0.95]}},
        "a": {"accuracy": 0.3},
    },
}
RESPONSES = {
    "rlhf": {"length": 5.0, "name": "x"},
    "intervals_95": {"rlhf": {"length": [4, 6]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.6, "interval_95": [0.52, 0.68]}}}},
}


@pytest.mark.parametrize(
    ("metrics", "path", "value"),
    [
        (PAIRS, "loss", 0.5),
        # Names of datasets have dots.
        (PAIRS, "by_dataset.a.b.accuracy", 0.9),
        (PAIRS, "accuracy.upper_bound", 0.7),
        (PAIRS, "by_dataset.a.b.accuracy.lower_bound", 0.625),
        (RESPONSES, "rlhf.length.upper_bound", 6),
        (RESPONSES, "wins.rlhf.sft.score.lower_bound", 0.52),
    ],
)
def test_paths_name_figures_and_bounds_of_their_intervals(metrics, path, value):
    assert figure_value(metrics, path, "gate") == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("path", ["by_dataset.a", "accurcy", "loss.lower_bound"])
def test_other_paths_are_errors(path):
    with pytest.raises(InputError, match="gate: "):
        figure_value(PAIRS, path, "gate")


def test_a_metric_that_no_benchmark_has_is_an_error_of_planning():
    benchmark = {"command": "a {model} {output}", "metrics": {"accuracy": ["a.json", "acc"]}}

    def inputs(metric):
        recipe = {"benchmarks": ["mine"], "gate": {"metric": metric, "min": 0.5}}
        config = load({"benchmarks": {"mine": benchmark}, "sft": {"recipes": {"tiny": recipe}}})
        return model_jobs.check_gate(config, "sft", "tiny").inputs.keys()

    assert inputs("after.perplexity") == {"evaluation"}
    found = inputs("benchmarks.mine.accuracy.lower_bound")
    assert found == {"evaluation", "benchmark.sft/tiny/mine"}
    expected = r"sft\.recipes\.tiny\.gate: metric: no benchmarks\.mine\.acc \(did you mean"
    with pytest.raises(ConfigError, match=expected):
        inputs("benchmarks.mine.acc")


@pytest.mark.slow
def test_a_build_ends_with_an_error_if_the_model_misses_its_gate(quick, tmp_path):
    tree = quick.copy(tmp_path / "copy")
    tree.build("output/report/reward/tiny")
    weights = tree.folder / "output/reward/tiny/model.safetensors"
    before = weights.stat().st_mtime
    tree = Workflow(tree.folder, *tree.options, "mine.yaml")

    def build(**bounds):
        """Build with a gate. No other bound trains or evaluates anything."""
        gate = {"metric": "accuracy.lower_bound", **bounds}
        config = {"reward": {"recipes": {"tiny": {"gate": gate}}}}
        (tree.folder / "mine.yaml").write_text(yaml.safe_dump(config))
        assert tree.planned(TARGET) == {"check_gate"}
        return tree.snakemake(TARGET, "--cores", "1")

    assert build(min=0, max=1).returncode == 0
    passed = json.loads((tree.folder / "output/gate/reward/tiny/gate.json").read_text())
    assert passed.keys() == {"metric", "value", "min", "max"}
    assert tree.planned(TARGET) == set()
    # A model that misses it is kept.
    process = build(min=1.5)
    missed = f"accuracy.lower_bound is {passed['value']:.4g}, and its gate needs at least 1.5: "
    assert process.returncode == 1 and f"error: reward/tiny: {missed}" in process.stdout
    assert weights.stat().st_mtime == before
    # Until it passes.
    assert tree.planned(TARGET) == {"check_gate"}
