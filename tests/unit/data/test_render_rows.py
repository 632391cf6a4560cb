"""Rows as files for other trainers: as messages, and as the template writes them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import render_rows
from snakechat.data.records import open_records
from snakechat.workflow.errors import InputError
from support.chat_templates import CHATML, WITHOUT_SYSTEM

PAIR = ([("user", "Far?")], " No.", " Yes.")
TALK = ([("user", "a"), ("assistant", "b"), ("user", "c")], " d", None)


@pytest.fixture
def render(trained, tmp_path):
    """A function that renders records, as both splits of a dataset; it returns the files' lines."""

    def run(records, tokenizer=trained, kept=(), **settings):
        for name in ("model", "records", "rows", "result"):
            (tmp_path / name).mkdir()
        tokenizer.save_pretrained(tmp_path / "model")
        with open_records(tmp_path / "records/train.parquet", [name for name, _ in kept]) as write:
            for record in records:
                write(record, *(cell for _, cell in kept))
        for split in ("train", "eval"):
            np.save(tmp_path / f"rows/reward.{split}.npy", np.arange(len(records)))
        defaults = {"template": "dialogue", "phase": "reward", "seed": None, "unpaired": False}
        defaults |= {"fields": ["prompt", "chosen", "rejected"], "weights": [1]}
        inputs = {"tokenizer": "model", "records.1": "records", "rows.1": "rows"}
        job = SimpleNamespace(
            spec={"inputs": {"records.1": {"name": "mine"}}},
            settings=SimpleNamespace(**(defaults | settings)),
            inputs={key: tmp_path / name for key, name in inputs.items()},
            result=tmp_path / "result",
            facts={},
        )
        render_rows.main(job)
        texts = [(job.result / name).read_text() for name in ("train.jsonl", "train.text.jsonl")]
        assert [(job.result / f"eval{end}.jsonl").read_text() for end in ("", ".text")] == texts
        lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
        return *lines, job.facts["dropped"]["train"]

    return run


def test_pairs_have_messages_and_texts_that_end_in_the_token_that_ends_a_response(render):
    messages, texts, dropped = render([PAIR, ([("user", "Far?")], " Same.", " Same.")])
    assert messages == [
        {
            "prompt": [{"role": "user", "content": "Far?"}],
            "chosen": [{"role": "assistant", "content": "No."}],
            "rejected": [{"role": "assistant", "content": "Yes."}],
        }
    ]
    prompt = "\n\nHuman: Far?\n\nAssistant:"
    assert texts == [{"prompt": prompt, "chosen": " No.</s>", "rejected": " Yes.</s>"}]
    assert dropped == {"equal responses": 1}


def test_a_chat_template_writes_the_texts(render, chat_tokenizer):
    _, [line], _ = render([PAIR], chat_tokenizer(CHATML), template="chat")
    assert line["prompt"].endswith("<|im_start|>user\nFar?<|im_end|>\n<|im_start|>assistant\n")
    assert line["chosen"] == "No.<|im_end|>"


FIRST = {"prompt": "\n\nHuman: a\n\nAssistant:", "completion": " b</s>"}
LAST = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
LAST = {"prompt": LAST, "completion": " d</s>"}


@pytest.mark.parametrize(
    ("train_on", "texts"), [("response", [LAST]), ("all_turns", [FIRST, LAST])]
)
def test_dialogues_of_sft_have_one_text_or_one_for_each_turn_that_is_trained(
    render, train_on, texts
):
    text = ([], "All of it.", None)
    lines, found, _ = render([TALK, text], fields=["prompt", "chosen"], train_on=train_on)
    assert [message["content"] for message in lines[0]["messages"]] == ["a", "b", "c", "d"]
    # Without turns, a text is a text.
    assert lines[1] == {"text": "All of it."}
    assert found == [*texts, {"text": "All of it.</s>"}]


def test_labelled_responses_have_labels(render):
    good, bad = ([("user", "x")], " a", None), ([("user", "x")], None, " b")
    lines, texts, _ = render([PAIR, good, bad], unpaired=True)
    labels = [("No.", True), ("Yes.", False), ("a", True), ("b", False)]
    assert [(line["completion"][0]["content"], line["label"]) for line in lines] == labels
    assert [(text["completion"], text["label"]) for text in texts[2:]] == [
        (" a</s>", True),
        (" b</s>", False),
    ]


def test_prompts_keep_the_columns_of_reward_functions(render):
    record = ([("user", "1 + 1?")], None, None)
    [line], [text], _ = render([record], kept=[("solution", "[2]")], fields=["prompt"])
    assert line == {"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": [2]}
    assert text == {"prompt": "\n\nHuman: 1 + 1?\n\nAssistant:", "solution": [2]}


@pytest.mark.parametrize("skips", [False, True])
def test_a_row_that_the_template_rejects_is_dropped_or_an_error(render, chat_tokenizer, skips):
    rows = [PAIR, ([("system", "s"), ("user", "x")], " a", " b")]
    tokenizer = chat_tokenizer(WITHOUT_SYSTEM)
    if skips:
        *_, dropped = render(rows, tokenizer, template="chat", skip_rejected=[1])
        assert dropped == {"rejected by the chat template": 1}
    else:
        with pytest.raises(InputError, match=r"dataset mine: .*: row 2: "):
            render(rows, tokenizer, template="chat")
