"""explain.py on a small build: the changes that it reports, and the downstream jobs."""

import shutil
from pathlib import Path

from conftest import edited
from snakechat.jobs.stale_causes import causes_of
from snakechat.workflow.manifest import read_manifest, sealed_json

TARGET = "output/rlhf/tiny"


def explain(workflow, *words):
    """Return what explain.py prints; it must succeed."""
    process = workflow.run("python", "scripts/explain.py", *words, *workflow.options)
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_results_that_are_up_to_date_take_one_line(quick):
    assert explain(quick, TARGET) == "output/rlhf/tiny is up to date\n"
    assert explain(quick) == "all results are up to date\n"


def test_a_changed_setting_is_printed_with_both_values_and_the_downstream_jobs(quick):
    learning_rate = ("learning_rate: 4.0e-3", "learning_rate: 1.0e-5")
    with edited(quick.folder / "config/recipes.yaml", learning_rate):
        assert explain(quick, TARGET) == (
            "train_sft tiny is stale: learning_rate changed from 0.004 to 1e-05\n"
            "  makes stale if the content changes: evaluate_sft tiny, train_reward tiny,"
            " evaluate_reward tiny, train_rlhf tiny, evaluate_rlhf tiny, draw_report rlhf/tiny\n"
        )


def test_damage_and_inputs_with_other_content_are_causes(quick, tmp_path, monkeypatch):
    copy = quick.copy(tmp_path / "copy")
    monkeypatch.chdir(copy.folder)
    evaluation, trained = (copy.spec_of(f"output/{path}/tiny") for path in ("eval/reward", "rlhf"))
    result = Path("output/eval/reward/tiny")
    (result / "metrics.json").resolve().write_text("{}")
    assert causes_of(evaluation, []) == [f"{result}: metrics.json has another size"]
    shutil.rmtree(result.resolve())
    assert causes_of(evaluation, []) == [f"{result} is missing"]
    # As another machine might have made it from the same spec.
    manifest = Path("output/tokens/rlhf/tiny.manifest.json")
    content = read_manifest(manifest)
    content["files"]["stats.json"]["sha256"] = "0" * 64
    manifest.write_text(sealed_json(content))
    assert causes_of(trained, []) == ["tokenize_rlhf tiny was rebuilt with other content"]
    # Unless it will be rebuilt.
    assert causes_of(trained, [], ["output/tokens/rlhf/tiny"]) == []
