"""Exports to GGUF: tokens, greedy responses and probabilities of llama.cpp are the model's."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import export_gguf
from conftest import ROOT
from snakechat.data.gguf_vocabulary import adds_bos
from snakechat.data.ollama import modelfile, turn_texts
from snakechat.data.special_tokens import render_chat, stop_ids
from snakechat.data.tokenizers import load_tokenizer, load_training_tokenizer
from snakechat.modeling.gguf_export import FAMILIES
from snakechat.workflow.errors import InputError
from support.families import CHECKPOINTS, save_checkpoint

# With xllamacpp of tests/requirements-llama-cpp.txt.
PACKAGES = ROOT / ".venv-llama-cpp"
SYMBOLS = "3 33 333 3.3 🚀 😶‍🌫️ នតែ apple工作1314 нещо I've 'RE you?  Two   spaces.\n\nA line.\tTab"
ONE_TURN = [("user", "What is the capital of France?")]
MORE_TURNS = [*ONE_TURN, ("assistant", "Paris, on the river."), ("user", SYMBOLS)]
NUM_TOKENS = 8


def exported(folder, result, quantization="f16"):
    """Export a model; return the folder of the result."""
    result.mkdir()
    export_gguf.main(
        SimpleNamespace(
            inputs={"model": folder},
            settings=SimpleNamespace(quantization=quantization),
            spec={"name": "sft/mine"},
            result=result,
            target=result,
        )
    )
    return result


def llama_cpp(result, *requests):
    """Return the replies of llama.cpp's server to requests [path, body]."""
    if not (PACKAGES / "xllamacpp").exists():
        pytest.skip("needs llama.cpp: make .venv-llama-cpp/ready")
    process = subprocess.run(
        [sys.executable, ROOT / "tests/support/llama_cpp.py", result / "model.gguf"],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)


def saved(name, request, folder):
    """Write a checkpoint as a trainer saves it; return its tokenizer."""
    checkpoint = CHECKPOINTS[name]
    save_checkpoint(checkpoint, lambda: request.getfixturevalue("shared_data"), folder)
    load_training_tokenizer(folder, checkpoint.template).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    # llama.cpp has no windows: the context of the export would be as short as one.
    config["sliding_window"] = None
    (folder / "config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def prompt_ids(tokenizer, turns):
    """The tokens of a prompt as in training."""
    prompt = render_chat(tokenizer, turns, prompt=True)
    return tokenizer(prompt, add_special_tokens=False).input_ids


def greedy(folder, prompt):
    """Return the tokens that a model continues a prompt with, and the log-probabilities of each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, rows = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            rows.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1))
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], rows


# Those with real tokenizers need data next to the checkout.
EXPORTABLE = [
    name for name, (config, *_) in CHECKPOINTS.items() if config["model_type"] in FAMILIES
]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTABLE)
def test_llama_cpp_reads_and_writes_the_tokens_of_the_model(name, request, tmp_path):
    folder = tmp_path / "model"
    tokenizer = saved(name, request, folder)
    result = exported(folder, tmp_path / "result", "f32")
    conversations = ONE_TURN, MORE_TURNS
    prompts = [prompt_ids(tokenizer, turns) for turns in conversations]
    # llama.cpp takes bos from the text of the chat template where it puts bos in front.
    bos = tokenizer.bos_token if adds_bos(tokenizer) else ""
    texts = [
        render_chat(tokenizer, turns, prompt=True).removeprefix(bos) for turns in conversations
    ]
    messages = [
        [{"role": role, "content": text} for role, text in turns] for turns in conversations
    ]
    special = {"add_special": True, "parse_special": True}
    options = {"temperature": 0, "n_predict": NUM_TOKENS, "ignore_eos": True}
    *replies, reply = llama_cpp(
        result,
        *(["/apply-template", {"messages": turns}] for turns in messages),
        *(["/tokenize", {"content": text, **special}] for text in texts),
        ["/completion", {"prompt": prompts[0], "return_tokens": True, **options}],
    )
    assert [found["prompt"] for found in replies[:2]] == texts
    assert [found["tokens"] for found in replies[2:]] == prompts
    assert reply["tokens"] == greedy(folder, prompts[0])[0]


@pytest.mark.slow
@pytest.mark.parametrize("quantization, bound", [("f16", 1e-4), ("bf16", 3e-3), ("q8_0", 3e-3)])
def test_a_quantization_changes_probabilities_a_little(quantization, bound, request, tmp_path):
    folder = tmp_path / "model"
    tokenizer = saved("smollm2", request, folder)
    prompt = prompt_ids(tokenizer, ONE_TURN)
    options = {"n_predict": 1, "temperature": 0, "n_probs": len(tokenizer)}
    result = exported(folder, tmp_path / "result", quantization)
    [reply] = llama_cpp(result, ["/completion", {"prompt": prompt, **options}])
    [position] = reply["completion_probabilities"]
    found = {entry["id"]: entry["logprob"] for entry in position["top_logprobs"]}
    expected = greedy(folder, prompt)[1][0].numpy()
    logprobs = np.array([found[number] for number in range(len(expected))])
    divergence = np.sum(np.exp(expected) * (expected - logprobs))
    assert abs(divergence) < bound


def test_the_card_of_the_model_is_copied(request, tmp_path):
    saved("smollm2", request, tmp_path / "model")
    (tmp_path / "model/README.md").write_text("A card.\n")
    result = exported(tmp_path / "model", tmp_path / "result")
    assert sorted(path.name for path in result.iterdir()) == [
        "Modelfile",
        "README.md",
        "model.gguf",
    ]
    assert (result / "README.md").read_text() == "A card.\n"


def test_two_exports_have_the_same_bytes(request, tmp_path):
    saved("smollm2", request, tmp_path / "model")
    one, two = (
        exported(tmp_path / "model", tmp_path / name, "q8_0") / "model.gguf" for name in "ab"
    )
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("name", ["gpt2", "pythia", "bloom", "phi3"])
def test_an_unknown_family_is_reported_with_those_that_are_known(name, request, tmp_path):
    saved(name, request, tmp_path / "model")
    with pytest.raises(
        InputError, match=r"cannot be exported to GGUF: the families are gemma, lla"
    ):
        exported(tmp_path / "model", tmp_path / "result")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "relu"}, "the activation of the model is relu; llama.cpp has silu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "the positions of the model are scaled by yarn; default, linear and llama3",
        ),
    ],
)
def test_what_llama_cpp_computes_in_another_way_is_rejected(change, message, request, tmp_path):
    saved("smollm2", request, tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=re.escape(message)):
        exported(tmp_path / "model", tmp_path / "result")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pre_tokenizer": {"type": "BertPreTokenizer"}}, "the pre-tokenizer BertPreTokenizer"),
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer Lowercase"),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "a|b"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "another pre-tokenizer",
        ),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_rejected(change, message, request, tmp_path):
    saved("smollm2", request, tmp_path / "model")
    path = tmp_path / "model/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=f"the tokenizer has {message}, which the export"):
        exported(tmp_path / "model", tmp_path / "result")


def test_a_weight_that_f16_does_not_have_is_rejected(request, tmp_path):
    folder = tmp_path / "model"
    saved("smollm2", request, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 4] = 1e5
    model.save_pretrained(folder)
    with pytest.raises(InputError, match=r"token_embd\.weight has values above 65,504"):
        exported(folder, tmp_path / "result")


# Modelfiles. Ollama executes templates by Go's text/template.

ACTION = re.compile(r"\{\{ (.*?) \}\}")


def executed(template, system, messages):
    """Execute the part of Go's templates that a Modelfile uses."""
    pieces = ACTION.split(template)
    output, position = [], 0

    def block(write, message=None):
        """Execute up to the end of a block; return the action that ends it."""
        nonlocal position
        while position < len(pieces):
            if position % 2 == 0:
                output.extend([pieces[position]] if write else [])
                position += 1
                continue
            action = pieces[position]
            position += 1
            if action == "end" or action.startswith("else"):
                return action
            if action == ".Content":
                output.extend([message["content"]] if write else [])
            elif action == "range .Messages":
                start = position
                for message in messages:
                    position = start
                    assert block(write, message) == "end"
            else:
                condition, done = action, False
                while condition != "end":
                    holds = not done and holds_for(condition.removeprefix("else "), message)
                    condition = block(write and holds, message)
                    done |= holds
        return None

    def holds_for(condition, message):
        if condition == "if not .System":
            return not system
        return re.fullmatch(r'if eq \.Role "(\w+)"', condition)[1] == message["role"]

    assert block(True) is None
    return "".join(output)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_template_of_a_modelfile_writes_what_the_chat_template_writes(name, request, tmp_path):
    checkpoint = CHECKPOINTS[name]
    if isinstance(checkpoint.tokenizer, str):
        folder = request.getfixturevalue("shared_data") / checkpoint.tokenizer
    else:
        folder = tmp_path
        checkpoint.tokenizer().save_pretrained(folder)
    tokenizer = load_training_tokenizer(folder, checkpoint.template)
    text = modelfile(tokenizer, (), "model.gguf")
    template = re.search('TEMPLATE """(.*?)"""', text, re.DOTALL)[1]
    for turns in (ONE_TURN, MORE_TURNS, [*MORE_TURNS, ("assistant", "No."), ("user", "Why?")]):
        for system in ("", "Be brief."):
            whole = [("system", system), *turns] if system else turns
            expected = render_chat(tokenizer, whole, prompt=True)
            # Mistral's and Gemma's templates here reject a system turn.
            if expected is None:
                continue
            bos = tokenizer.bos_token if adds_bos(tokenizer) else ""
            messages = [{"role": role, "content": content} for role, content in whole]
            assert bos + executed(template, system, messages) == expected


def test_a_modelfile_names_the_file_the_stops_and_plain_sampling(request, tmp_path):
    tokenizer = saved("smollm2", request, tmp_path / "model")
    stops = stop_ids(tokenizer, tmp_path / "model")
    lines = modelfile(tokenizer, stops, "model.gguf").splitlines()
    assert "FROM ./model.gguf" in lines
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert "PARAMETER repeat_penalty 1.0" in lines


def test_a_chat_template_that_depends_on_more_than_roles_has_no_modelfile(
    request, tmp_path, capsys
):
    folder = tmp_path / "model"
    tokenizer = saved("smollm2", request, folder)
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1].content }}"
    assert turn_texts(tokenizer) is None
    tokenizer.save_pretrained(folder)
    result = exported(folder, tmp_path / "result")
    assert [path.name for path in result.iterdir()] == ["model.gguf"]
    assert "has no Modelfile" in capsys.readouterr().err
