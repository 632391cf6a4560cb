"""Base models from local folders, valid and damaged."""

import json
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from conftest import INIT, Workflow, copy_sources
from snakechat.data.model_files import model_files
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.chat_templates import CHATML


def test_files_of_a_model_are_selected():
    listed = ["README.md", "config.json", "generation_config.json", "merges.txt"]
    listed += ["spiece.model", "tokenizer.json", "chat_template.jinja", "training_args.bin"]
    listed += ["notes.md", "notes.txt", "LICENSE.txt"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = ["pytorch_model.bin", "tf_model.h5", "onnx/model.safetensors", "adapter/config.json"]
    kept = [name for name in listed if not name.startswith(("notes", "LICENSE", "training"))]
    assert sorted(model_files([*listed, *shards, *others])) == sorted([*kept, *shards])
    # PyTorch's format if there are no safetensors.
    assert sorted(model_files([*listed, *others])) == sorted([*kept, "pytorch_model.bin"])


MODELS = ("whole", "bare", "template")
ARGUMENTS = {"template_arguments": {"enable_thinking": False}}
EMPTY = "<think>\n\n</think>\n\n"
THINKING = CHATML + "{% if add_generation_prompt and not enable_thinking %}" + EMPTY + "{% endif %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    """A workflow that has built all models from folders, and Snakemake's process."""
    folder = tmp_path_factory.mktemp("local") / "work"
    copy_sources(folder)
    (folder / "mine.yaml").write_text(
        yaml.safe_dump(
            {
                "models": {
                    name: {"path": f"given/{name}", **(ARGUMENTS if name == "template" else {})}
                    for name in MODELS
                }
            }
        )
    )
    whole = folder / "given/whole"
    model = make_causal(INIT, tokenizer, 1)
    whole.mkdir(parents=True)
    save_model(model, tokenizer, whole)
    (whole / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    for name in MODELS[1:]:
        shutil.copytree(whole, folder / "given" / name)
        weights = folder / "given" / name / "model.safetensors"
        if name == "bare":
            weights.unlink()
            torch.save({}, weights.with_name("pytorch_model.bin"))
        if name == "template":
            (folder / "given" / name / "chat_template.jinja").write_text(THINKING)
    (folder / "given/whole/training_args.bin").write_text("not read")
    workflow = Workflow(folder, "--configfile", "mine.yaml", "--cores", "2", "--keep-going")
    targets = [f"output/models/{name}.manifest.json" for name in MODELS]
    return workflow, workflow.snakemake(*targets)


def result(workflow, name):
    return workflow.folder / "output/models" / name


def test_model_of_a_folder_is_stored_with_what_it_was_made_from(made):
    workflow, process = made
    folder = result(workflow, "whole")
    assert (folder / "model.safetensors").exists(), process.stdout
    given = load_file(workflow.folder / "given/whole/model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert given.keys() == found.keys()
    assert all(torch.equal(given[key], found[key]) for key in given)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["facts"] == {"licence": "mit"}
    files = manifest["spec"]["files"].keys()
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= files
    assert "training_args.bin" not in files


def test_template_arguments_are_part_of_the_stored_template(made):
    workflow, process = made
    assert result(workflow, "template").exists(), process.stdout
    tokenizer = AutoTokenizer.from_pretrained(result(workflow, "template"))
    given = AutoTokenizer.from_pretrained(workflow.folder / "given/template")
    messages = [{"role": "user", "content": "Hello"}]

    def rendered(each, **arguments):
        return each.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **arguments
        )

    assert rendered(tokenizer) == rendered(given, enable_thinking=False)
    assert rendered(tokenizer).endswith(EMPTY)
    assert rendered(tokenizer, enable_thinking=True) + EMPTY == rendered(tokenizer)
    manifest = json.loads((result(workflow, "template") / "manifest.json").read_text())
    assert manifest["spec"]["settings"]["template_arguments"] == {"enable_thinking": False}


def test_damaged_model_is_one_error_line_without_a_result(made):
    workflow, process = made
    assert process.returncode == 1
    log = (workflow.folder / "output/logs/fetch_model/bare.log").read_text()
    assert re.search(r"^error: model in given/bare: weights are missing: lm_head", log, re.M), log
    assert "Traceback" not in log
    assert not result(workflow, "bare").exists()


def test_folder_without_a_model_is_an_error_while_planning(made):
    workflow, _ = made
    process = workflow.snakemake(
        "-n", "output/models/mine.manifest.json", "--config", "models={mine: {path: rules}}"
    )
    assert process.returncode == 1
    reason = "models.mine.path: rules has no *.safetensors and no pytorch_model*.bin"
    assert f"error: config: {reason}" in process.stdout
