"""Saved models in plain transformers: pipelines, padded batches and classifiers, no warnings."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.families import FAMILIES

END, TURN_END = "<|endoftext|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Family, prompt template, special tokens, names of some of them, and what ends a response.
CASES = {
    "GPT-2": ("gpt2", "dialogue", [END], {"bos": END, "eos": END, "unk": END}, [END]),
    "SmolLM2": (
        "llama",
        "chat",
        [END, "<|im_start|>", TURN_END],
        {"bos": "<|im_start|>", "eos": TURN_END, "pad": TURN_END, "unk": END},
        [TURN_END],
    ),
    "Qwen base": (
        "qwen3",
        "chat",
        [END, "<|im_start|>", TURN_END],
        {"eos": END, "pad": END},
        [TURN_END, END],
    ),
}

USE = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import pipeline

found = {}
for name in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(f"{name}/causal", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(f"{name}/causal")
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "Hi"}]
    generate(messages, max_new_tokens=3)
    generate(["Hi", "Why so?"], max_new_tokens=3, batch_size=2)
    batch = tokenizer(["Hi", "Why so?"], padding=True, return_tensors="pt")
    model.generate(**batch, max_new_tokens=3)

    # With pads on the right, on the left, and alone; each sequence ends in the end of a turn.
    scorer = AutoModelForSequenceClassification.from_pretrained(f"{name}/scorer")
    end = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    end = end if isinstance(end, str) else end[0]
    texts = [f"Hi, who are you?{end}", f"No{end}{end}", f"So?{end}"]
    scores = []
    with torch.no_grad():
        for side in ("right", "left"):
            batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
            positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
            scores.append(scorer(**batch, position_ids=positions).logits[:, 0].tolist())
        alone = [tokenizer(text, return_tensors="pt") for text in texts]
        scores.append([scorer(**batch).logits.item() for batch in alone])
        hidden = [scorer.base_model(**batch).last_hidden_state[0, -1] for batch in alone]
        scores.append([scorer.score(state).item() for state in hidden])
    found[name] = {"scores": scores, "eos": model.generation_config.eos_token_id}
print(json.dumps(found))
"""


def make_tokenizer(special, names, template):
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(ByteLevel.alphabet())}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(special)
    names = {f"{key}_token": name for key, name in names.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if template == "chat":
        tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """What plain transformers does with a saved model of each case; and the folder."""
    folder = tmp_path_factory.mktemp("saved")
    for name, (family, template, special, names, _) in CASES.items():
        make_tokenizer(special, names, template).save_pretrained(folder / name / "base")
        tokenizer = load_training_tokenizer(folder / name / "base", template)
        init = FAMILIES[family] | {"initializer_range": 0.3}
        save_model(make_causal(init, tokenizer, 1), tokenizer, folder / name / "base")
        for kind, load in (("causal", load_causal), ("scorer", load_scorer)):
            new_head = {"new_head": True} if kind == "scorer" else {}
            model = load(folder / name / "base", "fp32", tokenizer, **new_head)
            save_model(model, tokenizer, folder / name / kind)
    command = [sys.executable, "-c", USE, *CASES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def test_plain_transformers_reports_nothing(used):
    *_, stderr = used
    lines = [line for line in stderr.splitlines() if "Loading weights" not in line]
    assert not [line for line in lines if line.strip()]


@pytest.mark.parametrize("name", CASES)
def test_a_batch_has_the_scores_of_its_rows_alone(used, name):
    right, left, alone, at_last_token = used[1][name]["scores"]
    assert right == pytest.approx(alone, abs=1e-4)
    assert left == pytest.approx(alone, abs=1e-4)
    assert alone == pytest.approx(at_last_token, abs=1e-4)
    assert max(alone) - min(alone) > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_generation_config_has_all_stop_ids(used, name):
    folder, found, _ = used
    *_, ends = CASES[name]
    tokenizer = load_training_tokenizer(folder / name / "causal", CASES[name][1])
    ids = tokenizer.convert_tokens_to_ids(ends)
    assert found[name]["eos"] == (ids if len(ids) > 1 else ids[0])
    assert tokenizer.pad_token_id not in ids
