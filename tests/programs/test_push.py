"""scripts/push.py uploads a model to a local server that implements the hub's protocol."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification

from conftest import Workflow
from snakechat.workflow.manifest import result_files
from support.hub import serving
from support.hub_uploads import UploadHub, card_errors

TARGET, REPOSITORY = "output/reward/tiny", "lab/tiny-reward"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(quick, scratch):
    """A copy of the quick build; each test writes its config first."""
    copy = quick.copy(scratch / "push")
    return Workflow(copy.folder, *copy.options, "mine.yaml")


@pytest.fixture
def hub(tree):
    """An empty hub, whose user has a token."""
    with serving(UploadHub) as hub:
        tree.environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tree.folder / "home"),
            "HF_HUB_OFFLINE": "0",
            # The server has no Xet.
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_secret",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        yield hub


def push(tree, *options, config=(), target=TARGET):
    """Run the program with settings of the recipe; return its exit code and its output."""
    recipe = {"reward": {"recipes": {"tiny": dict(config)}}}
    (tree.folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    arguments = (target, REPOSITORY, *options, *tree.options)
    process = tree.run("python", "scripts/push.py", *arguments)
    assert "Traceback" not in process.stdout, process.stdout
    return process.returncode, process.stdout


def error_of(outcome):
    """Return the error of a run that failed: its last line."""
    code, output = outcome
    assert code == 1, output
    return output.splitlines()[-1]


def test_a_model_arrives_with_its_card_evaluation_and_lineage(tree, hub, tmp_path):
    code, output = push(tree)
    assert code == 0, output
    assert f"repository: {REPOSITORY} (new, private)" in output
    assert "licences: " in output and "model.safetensors" in output
    assert output.endswith("nothing was uploaded: add --yes\n")
    assert {request.command for request in hub.requests} == {"GET"}
    code, output = push(tree, "--yes")
    assert code == 0, output
    # One commit after the one that creates a repository.
    assert len(hub.commits[REPOSITORY]) == 2
    files = hub.repositories[f"model/{REPOSITORY}"]
    manifest = json.loads((tree.folder / f"{TARGET}.manifest.json").read_text())
    assert files.keys() == {*manifest["files"], "README.md", "manifest.json", ".gitattributes"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    # What was downloaded is what was built.
    (tmp_path / ".gitattributes").unlink()
    assert result_files(tmp_path) == json.loads(files["manifest.json"])["files"]
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).num_labels == 1
    for name, content in files.items():
        assert str(tree.folder).encode() not in content, name
        assert b"/tests/configs/" not in content and b"hf_secret" not in content, name
    card = ModelCard(files["README.md"].decode())
    metrics = json.loads((tree.folder / "output/eval/reward/tiny/metrics.json").read_text())
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results["accuracy"] == pytest.approx(metrics["accuracy"], rel=1e-5)
    assert card_errors(str(card)) == [] and "--configfile quick.yaml" in str(card)


def test_stale_results_are_uploaded_on_request(tree, hub):
    line = error_of(push(tree, config={"epochs": 3}))
    assert line.startswith(f"error: {TARGET} is stale: reward.epochs changed from ")
    code, output = push(tree, "--allow-stale", config={"epochs": 3})
    assert code == 0 and f"evaluation: {TARGET.replace('output', 'output/eval')}\n" in output


def test_missed_expectations_are_uploaded_on_request(tree, hub):
    config = {"expect": {"accuracy": {"min": 1.5}}}
    assert "expected at least 1.5: add --allow-missed" in error_of(push(tree, config=config))
    assert push(tree, "--allow-missed", "--yes", config=config)[0] == 0
    card = hub.repositories[f"model/{REPOSITORY}"]["README.md"].decode()
    assert "- **missed**: accuracy" in card


def test_damaged_results_and_paths_of_the_machine_are_not_uploaded(tree, hub):
    folder = tree.folder / TARGET
    manifest = tree.folder / f"{TARGET}.manifest.json"
    content = json.loads((folder / "config.json").read_text())
    # Not the same file as the one in the cache.
    (folder / "config.json").unlink()
    text = json.dumps(content | {"_name_or_path": f"{tree.folder}/base"})
    (folder / "config.json").write_text(text)
    assert "config.json does not match its manifest" in error_of(push(tree))
    manifest.write_text(
        json.dumps(json.loads(manifest.read_text()) | {"files": result_files(folder)})
    )
    line = error_of(push(tree, "--allow-stale"))
    assert line.startswith("error: config.json contains the path of a folder of this machine")
