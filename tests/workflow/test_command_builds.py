"""Recipes with a command: results, errors, a kill and its resume."""

import json
import os
import shutil
import sys

import pytest
import yaml

from conftest import ROOT, Workflow
from support.tutorials import blocks_of

FILES = {
    "copy.sh": (ROOT / "programs/copy_model.sh").read_text(),
    "fail.py": "raise SystemExit('the loss is nan')",
    "helper.py": "VALUE = 1",
    "imports.py": "import helper",
    "reads.py": "open(__import__('sys').argv[1]).read()",
    # It is killed in its first attempt, after half of its steps.
    "resumes.py": """
import os, shutil, signal, sys
from pathlib import Path

model, output, state = map(Path, sys.argv[1:])
step = state / "step"
first = int(step.read_text()) if step.exists() else 0
print(f"starting at step {first}", flush=True)
for number in range(first, 4):
    step.write_text(str(number + 1))
    if (first, number) == (0, 1):
        os.kill(os.getpid(), signal.SIGKILL)
shutil.copytree(model, output, dirs_exist_ok=True)
(output / "metrics.jsonl").write_text('{"step": 4, "first": %d}\\n' % first)
""",
}
RECIPE = {"model": "sft/tiny", "datasets": ["toy"], "max_length": 96, "dtype": "fp32"}
RECIPE["placement"] = {"deployment": "cpu"}


def recipe(command, *files, **keys):
    return {**RECIPE, "command": command, "files": [f"programs/{file}" for file in files], **keys}


RECIPES = {
    "copied": recipe("bash programs/copy.sh {model} {output}", "copy.sh"),
    "resumed": recipe("{python} programs/resumes.py {model} {output} {state}", "resumes.py"),
    "fails": recipe("{python} programs/fail.py {output}", "fail.py"),
    "empty": {**RECIPE, "command": "true {output}"},
    "imports": recipe("{python} programs/imports.py {output}", "imports.py"),
    "reads": recipe("{python} programs/reads.py $ROOT/programs/helper.py {output}", "reads.py"),
}
ERRORS = {
    "fails": "the command ended with exit code 1: the loss is nan",
    "empty": "{output} has no config.json: save model and tokenizer",
    "imports": "the command ended with exit code 1: ModuleNotFoundError: No module named 'helper'"
    ": add the files that it reads to `files`",
    "reads": "the command ended with exit code 1: PermissionError: [Errno 13] Permission denied: ",
}


def build_in(folder, *options):
    """Return a build whose programs are run by Python itself, which commands run too."""
    workflow = Workflow(folder, *options)
    workflow.python = sys.executable
    return workflow


@pytest.fixture(scope="module")
def build(quick, tmp_path_factory):
    """A copy of the quick build with recipes of dpo that have commands. output/ is a link."""
    folder = tmp_path_factory.mktemp("commands") / "work"
    quick.copy(folder)
    results = (folder / "output").rename(tmp_path_factory.mktemp("disk") / "results")
    (folder / "output").symlink_to(results)
    (folder / "programs").mkdir(exist_ok=True)
    for name, text in FILES.items():
        (folder / "programs" / name).write_text(text)
    text = yaml.safe_dump({"dpo": {"recipes": RECIPES}}).replace("$ROOT", str(folder))
    (folder / "commands.yaml").write_text(text)
    return build_in(folder, *quick.options, "commands.yaml")


def test_a_command_makes_a_result_like_ours(build):
    build.build("output/dpo/copied", "output/compare/dpo/copied-vs-tiny.html")
    folder = build.folder / "output/dpo/copied"
    # As people copy it, with what its links lead to.
    copy = shutil.copytree(folder, build.folder / "copy")
    names = {path.name for path in copy.iterdir()}
    assert {"model.safetensors", "metrics.jsonl", "README.md", "evaluation", "report"} <= names
    assert (copy / "report/report.html").exists()
    assert "bash programs/copy.sh" in (folder / "README.md").read_text()
    metrics = json.loads((copy / "evaluation/metrics.json").read_text())
    # It did not train.
    assert metrics["accuracy"] == 0 and metrics["ties"] == 1
    assert build.planned("output/dpo/copied") == set()
    verified = build.run(sys.executable, ROOT / "scripts/verify.py", "output")
    assert verified.stdout.endswith("all as recorded\n")


def test_a_killed_command_resumes_from_its_state(build):
    process = build.snakemake("output/dpo/resumed.manifest.json", "--cores", "2")
    assert process.returncode == 1
    assert "output/dpo/resumed: the command ended with exit code 137: starting at step 0" in (
        process.stdout
    )
    [state] = build.folder.glob("output/store/train_dpo/.*/state")
    assert (state / "step").read_text() == "2"
    build.build("output/dpo/resumed.manifest.json")
    metrics = build.folder / "output/dpo/resumed/metrics.jsonl"
    assert json.loads(metrics.read_text()) == {"step": 4, "first": 2}
    assert not state.exists()


def test_each_mistake_is_one_line_and_publishes_nothing(build):
    targets = [f"output/dpo/{name}.manifest.json" for name in ERRORS]
    process = build.snakemake(*targets, "--cores", "2", "--keep-going")
    assert process.returncode == 1
    for name, message in ERRORS.items():
        assert f"error: output/dpo/{name}: {message}" in process.stdout, process.stdout[-4000:]
        assert not os.path.lexists(build.folder / f"output/dpo/{name}")


@pytest.mark.exhaustive
def test_trl_trains_and_lm_evaluation_harness_measures(build):
    for name in (".venv-trl", ".venv-eval"):
        if not (ROOT / name / "bin/python").exists():
            pytest.skip(f"needs {name}: make environments")
        (build.folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "programs", build.folder / "programs", dirs_exist_ok=True)
    [page] = [block for block in blocks_of("tutorials/commands") if block.title == "trl.yaml"]
    (build.folder / "trl.yaml").write_text(page.text)
    with_trl = build_in(build.folder, *build.options, "trl.yaml")
    with_trl.build("output/compare/dpo/trl-vs-tiny.html")
    steps = (build.folder / "output/dpo/trl/metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(steps[number]) for number in (0, -1))
    assert last["loss"] < first["loss"]
    path = build.folder / "output/benchmark/toy_pairs/dpo/trl/metrics.json"
    metrics = json.loads(path.read_text())
    low, high = metrics["intervals_95"]["accuracy"]
    assert low < metrics["accuracy"] < high
