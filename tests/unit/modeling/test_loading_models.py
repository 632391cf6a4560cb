"""Loading models, and errors about unsupported ones."""

import ast
import io
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from conftest import INIT
from fetch_model import copy_model
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.models import make_causal
from snakechat.workflow.errors import InputError
from support.family_tokenizers import toy

SCRIPTS = Path(__file__).parents[3] / "scripts"
# Of folders with a language model.
LOADERS = (load_causal, partial(load_scorer, new_head=True))


def test_a_vocabulary_larger_than_the_embeddings_raises(folder, tokenizer):
    larger = toy(310)
    for load in LOADERS:
        with pytest.raises(InputError, match="310 tokens, but the model has only 300 embeddings"):
            load(folder, "fp32", larger)


def test_only_a_new_head_may_be_missing(folder, tokenizer):
    with pytest.raises(InputError, match="causal is OPTForCausalLM, expected a sequence class"):
        load_scorer(folder, "fp32", tokenizer)
    # Without architectures, the weights decide.
    change_config(folder, architectures=None)
    with pytest.raises(InputError, match=r"weights are missing: score\.weight"):
        load_scorer(folder, "fp32", tokenizer)
    change_weights(folder, {LAYER: None})
    for load in LOADERS:
        with pytest.raises(InputError, match=re.escape(LAYER)):
            load(folder, "fp32", tokenizer)


@pytest.mark.parametrize(
    ("load", "labels", "message"),
    [
        # transformers does not write its default of two labels.
        (load_scorer, None, "has 2 labels, expected 1, the score: use another classifier"),
        *(
            (load, {0: "score"}, "scorer is a sequence classifier, expected a language model: use")
            for load in LOADERS
        ),
    ],
)
def test_classifiers_are_reward_models_with_one_label(
    load, labels, message, scorer_folder, tokenizer, tmp_path
):
    change_config(scorer_folder, id2label=labels)
    with pytest.raises(InputError, match=message):
        load(scorer_folder, "fp32", tokenizer)
    if labels is None:
        with pytest.raises(InputError, match=f"the model {message}"):
            copy_model(scorer_folder, tmp_path / "copy")


@pytest.mark.parametrize("load", [load_causal, load_scorer])
@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gemma3", r"is a multimodal model \(gemma3\), .*: use a checkpoint of gemma3_text"),
        ("t5", "t5 has an encoder"),
    ],
)
def test_models_of_other_kinds_raise(model_type, message, load, tokenizer, tmp_path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        load(tmp_path, "fp32", tokenizer)
    if model_type == "gemma3":
        with pytest.raises(InputError, match=message):
            copy_model(tmp_path, tmp_path / "copy")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder, changes):
    """Replace weights of a folder; None removes one."""
    weights = load_file(folder / "model.safetensors") | changes
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "model.decoder.layers.1.fc1.bias"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({LAYER: None}, f"weights are missing: {LAYER}"),
        ({"model.stray": torch.ones(2)}, "weights are not in the model: model.stray"),
        ({"score.weight": torch.ones(2, 32)}, "do not have the model's shape: score.weight"),
    ],
)
@pytest.mark.parametrize("deferred", [False, True])
def test_weights_that_do_not_match_the_config_raise(
    deferred, scorer_folder, tokenizer, changes, message
):
    change_weights(scorer_folder, changes)
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load_scorer(scorer_folder, "fp32", tokenizer, deferred=deferred)
    assert str(error.value).startswith(f"{scorer_folder}: ")
    assert "\n" not in str(error.value)


def test_code_of_a_folder_never_runs(folder, tokenizer, monkeypatch):
    # The answer to the question of transformers whether code may run.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    path = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["mine.Tokenizer", "mine.Tokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    # A tokenizer of its own is not needed: the folder has tokenizer.json.
    assert load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()
    change_config(
        folder,
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    )
    for load in LOADERS:
        with pytest.raises(InputError, match="contains custom code") as error:
            load(folder, "fp32", tokenizer)
        assert "\n" not in str(error.value)


def test_only_one_function_loads_folders():
    # Another one might run code that a folder has.
    found = [
        str(path)
        for path in sorted(SCRIPTS.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained"
    ]
    assert found == [str(SCRIPTS / "snakechat/data/model_files.py")]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no-such-model"},
        # 32 is not a multiple of 5.
        {"num_attention_heads": 5},
        {"num_hidden_layers": 10_000_000},
        {"model_type": "bart", "decoder_layers": 10**18},
        {"attn_implementation": "kernels-community/flash-attn"},
    ],
)
def test_an_invalid_init_raises_an_error_of_one_line(tokenizer, changes):
    with pytest.raises(InputError) as error:
        make_causal({**INIT, **changes}, tokenizer, 1)
    assert "\n" not in str(error.value)
