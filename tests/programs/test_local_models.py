"""fetch_model on models of local folders, in this process.

A build of such models: test_plain_models.py.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import fetch_model
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.placement import RunOptions
from support.chat_templates import CHATML

THINKING = CHATML + "{% if add_generation_prompt and not enable_thinking %}<think>{% endif %}"


@pytest.fixture
def fetch(folder, tmp_path):
    """A function that fetches the model of `folder`; it returns the job."""

    def fetch(**settings):
        files = {path.name: file_digest(path) for path in folder.iterdir()}
        job = SimpleNamespace(
            settings=SimpleNamespace(card={"licence": "mit"}, **settings),
            options=RunOptions(source=str(folder)),
            spec={"name": "mine", "files": files},
            result=tmp_path / "result",
            facts={},
        )
        job.result.mkdir()
        fetch_model.main(job)
        return job

    return fetch


def test_the_weights_are_stored_and_template_arguments_are_part_of_the_template(fetch, folder):
    (folder / "chat_template.jinja").write_text(THINKING)
    job = fetch(template_arguments={"enable_thinking": True})
    assert job.facts == {"licence": "mit"}
    given, found = (load_file(path / "model.safetensors") for path in (folder, job.result))
    assert given.keys() == found.keys()
    assert all(torch.equal(given[key], found[key]) for key in given)

    def rendered(path, **arguments):
        messages = [{"role": "user", "content": "Hello"}]
        return AutoTokenizer.from_pretrained(path).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **arguments
        )

    # Undefined, the argument is false in the given template.
    assert rendered(job.result) == rendered(folder, enable_thinking=True) != rendered(folder)
    assert rendered(job.result, enable_thinking=False) == rendered(folder)


def test_a_value_of_another_type_in_the_config_is_named(fetch, folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": "x"}))
    with pytest.raises(InputError, match=r"'hidden_size'.* expected int, got str \(value: 'x'\)$"):
        fetch()


def test_a_damaged_model_is_an_error(fetch, folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=rf"^model in {folder}: weights are missing: lm_head"):
        fetch()
