"""Conversion of rows of every format to prompt, chosen and rejected."""

# Chinese texts have Chinese punctuation.
# ruff: noqa: RUF001

import gzip
import json
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from conftest import ROOT
from import_dataset import import_split
from snakechat.data.formats import FORMATS, BadRow, DroppedRow, columns_of, has_pairs, record_of
from snakechat.data.records import read_records
from snakechat.data.sources import read_rows

DATASETS = yaml.safe_load((ROOT / "config.yaml").read_text())["datasets"]
READ = {name: dataset for name, dataset in DATASETS.items() if "generate" not in dataset}


def read(row, format, **columns):
    """Return the record of a row, with the default columns unless others are given."""
    return record_of(row, format, columns_of(format, columns or None))


def bad(row, format, **columns):
    with pytest.raises(BadRow) as error:
        read(row, format, **columns)
    assert "\n" not in str(error.value)
    return str(error.value)


def dropped(row, format, **columns):
    with pytest.raises(DroppedRow) as reason:
        read(row, format, **columns)
    return str(reason.value)


def question(text):
    return f"\n\nHuman: {text}\n\nAssistant:"


def messages(*turns):
    """Return turns as messages with role and content."""
    return [{"role": role, "content": text} for role, text in turns]


# --- one row of every dataset of config.yaml, in its real layout, and its record ----------

DIALOGUE = "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: Name a fruit."
PLAIN = {
    "prompt": f"{DIALOGUE}\n\nAssistant:",
    "chosen": " An apple.",
    "rejected": " A stone.",
}
QUESTION = [("user", "Hello."), ("assistant", "Hi."), ("user", "Name a fruit.")]
PLAIN_RECORD = (f"{DIALOGUE}\n\nAssistant:", " An apple.", " A stone.")
ULTRAFEEDBACK = {
    "prompt": "Name a fruit.",
    "chosen": messages(*QUESTION, ("assistant", "An apple.")),
    "rejected": messages(*QUESTION, ("assistant", "A stone.")),
    "score_chosen": 7.0,
}
WEBGPT = {
    "question": {
        "dataset": "triviaqa",
        "id": "6b2d0c8b",
        "full_text": "Voiced by Harry Shearer, what Simpsons character was Springfield's deacon?",
    },
    "quotes_0": {"title": ["Ned Flanders (simpsons.fandom.com)"], "extract": ["He is voiced by"]},
    "answer_0": "Ned Flanders [1, 2].",
    "tokens_0": {"prefix": [2, 7], "completion": [31]},
    "score_0": -0.25,
    "quotes_1": {"title": ["Timothy Lovejoy (wiki)", "Simpsons"], "extract": ["Rev.", "Voices"]},
    "answer_1": "Reverend Lovejoy [1].\n\nHe is voiced by Shearer [1][2] (see above).",
    "tokens_1": {"prefix": [2, 7], "completion": [31, 5]},
    "score_1": 0.25,
}
SHP = {
    "post_id": "qt3nxl",
    "domain": "askculinary_train",
    "upvote_ratio": 0.98,
    "history": "What's the best way to disassemble raspberries?\n\nLike this: [picture]",
    "c_root_id_A": "hkh25sc",
    "c_root_id_B": "hkh25lp",
    "created_at_utc_A": 1636822112,
    "created_at_utc_B": 1636822110,
    "score_A": 340,
    "score_B": 166,
    "human_ref_A": "Pectinex, perhaps?",
    "human_ref_B": "Raspberry juice will likely work.",
    "labels": 1,
    "seconds_difference": 2.0,
    "score_ratio": 2.05,
}
MIRACL_ZH = {
    "query_id": "3#0",
    "query": "中国历史上最后一个皇帝是谁?",
    "positive_passages": [
        {"docid": "8195#0", "title": "溥仪", "text": "溥仪是清朝末代皇帝。"},
        {"docid": "8195#4", "title": "溥仪", "text": "他在位三年。"},
    ],
    "negative_passages": [
        {"docid": "13#2", "title": "皇帝", "text": "皇帝是君主的称号。"},
        {"docid": "77#0", "title": "清朝", "text": "清朝建立于1636年。"},
    ],
}
MIRACL_JA = {
    "query_id": "0#0",
    "query": "日本で一番高い山は?",
    "positive_passages": [
        {"docid": "5#0", "title": "富士山", "text": "富士山は日本最高峰である。"}
    ],
    "negative_passages": [{"docid": "6#1", "title": "北岳", "text": "北岳は二番目に高い。"}],
}
HC3 = {
    "question": "我有点感冒，怎么办？",
    "human_answers": ["多喝热水，注意休息。", "去看医生。"],
    "chatgpt_answers": ["感冒通常会在一周内好转。"],
    "source": "medicine",
}
MKQA = {
    "example_id": -7449157003522518870,
    "queries": {
        "en": "what is the capital of france",
        "ja": "フランスの首都は",
        "zh_cn": "法国首都",
    },
    "query": "what is the capital of france",
    "answers": {
        "en": [{"type": 5, "entity": "Q90", "text": "Paris", "aliases": ["City of Light"]}],
        "ja": [{"type": 5, "entity": "Q90", "text": "パリ", "aliases": []}],
        "zh_cn": [
            {"type": 5, "entity": "Q90", "text": "巴黎", "aliases": ["花都"]},
            {"type": 5, "entity": "Q90", "text": "巴黎市", "aliases": []},
        ],
    },
}
QG_JAQUAD = {
    "answer": "瀬長島",
    "paragraph_question": "question: 第1滑走路から見える島は?, context: 瀬長島は近い。",
    "question": "第1滑走路から見える島は?",
    "sentence": "第1滑走路からは瀬長島が見える。",
    "paragraph": "第1滑走路からは瀬長島が見える。瀬長島は近い。",
    "sentence_answer": "第1滑走路からは<hl> 瀬長島 <hl>が見える。",
    "paragraph_id": "tr-011-00-000",
}
QAG_JAQUAD = {
    "answers": ["瀬長島", "第1滑走路"],
    "questions": ["第1滑走路から見える島は?", "島が見えるのはどこから?"],
    "paragraph": "第1滑走路からは瀬長島が見える。",
    "paragraph_id": "tr-011-00",
    "questions_answers": "question: 第1滑走路から見える島は?, answer: 瀬長島 | question: …",
}
ROWS = {
    # response is a copy of chosen.
    "rm-static": ({**PLAIN, "response": PLAIN["chosen"]}, PLAIN_RECORD),
    # Some responses have no leading space.
    "full-hh-rlhf": (
        {**PLAIN, "response": "An apple.", "chosen": "An apple.", "rejected": "A stone."},
        PLAIN_RECORD,
    ),
    "synthetic-instruct-gptj-pairwise": (
        # No markers, and whitespace around texts.
        {"prompt": "Name a fruit.", "chosen": "An apple.\n", "rejected": "  A stone."},
        (question("Name a fruit."), " An apple.", " A stone."),
    ),
    "rlhf-reward-datasets": (
        # Prompts end before the last marker; responses repeat the dialogue.
        {
            "prompt": f"{DIALOGUE}\n\n",
            "chosen": f"{DIALOGUE}\n\nAssistant: An apple.",
            "rejected": f"{DIALOGUE}\n\nAssistant: A stone.",
        },
        PLAIN_RECORD,
    ),
    "webgpt_comparisons": (
        WEBGPT,
        (
            "\n\nHuman: Voiced by Harry Shearer, what Simpsons character was Springfield's deacon?"
            "\n\nAssistant:",
            " Reverend Lovejoy [1].\n\nHe is voiced by Shearer [1][2] (see above).",
            " Ned Flanders [1, 2].",
        ),
    ),
    "SHP": (
        SHP,
        (
            "\n\nHuman: What's the best way to disassemble raspberries?\n\nLike this: [picture]"
            "\n\nAssistant:",
            " Pectinex, perhaps?",
            " Raspberry juice will likely work.",
        ),
    ),
    "sharegpt_alpaca_oa_vicuna_format": (
        {
            "prompt": "USER: Hello.\nHow are you? ASSISTANT: Fine.  USER: Name a fruit. ASSISTANT:",
            "label": "An apple.",
        },
        (
            "\n\nHuman: Hello.\nHow are you?\n\nAssistant: Fine.\n\nHuman: Name a fruit."
            "\n\nAssistant:",
            " An apple.",
            None,
        ),
    ),
    "Zhihu-KOL": (
        {
            "INSTRUCTION": "怎么说服男朋友买烤箱？\n",
            "RESPONSE": "emmmmm，首先想说的是……\n\n其次是……",
            "SOURCE": "Zhihu",
            "METADATA": '{"question_id": 357137111.0, "answer_id": 914332816.0}',
        },
        (question("怎么说服男朋友买烤箱？"), " emmmmm，首先想说的是……\n\n其次是……", None),
    ),
    "miracl-zh": (
        MIRACL_ZH,
        (
            question("中国历史上最后一个皇帝是谁?"),
            " 溥仪是清朝末代皇帝。",
            " 皇帝是君主的称号。",
        ),
    ),
    "miracl-ja": (
        MIRACL_JA,
        (
            question("日本で一番高い山は?"),
            " 富士山は日本最高峰である。",
            " 北岳は二番目に高い。",
        ),
    ),
    "HC3-Chinese": (HC3, (question("我有点感冒，怎么办？"), " 多喝热水，注意休息。", None)),
    "mkqa-zh": (MKQA, (question("法国首都"), " 巴黎", None)),
    "mkqa-ja": (MKQA, (question("フランスの首都は"), " パリ", None)),
    "qg_jaquad": (
        QG_JAQUAD,
        (question("第1滑走路から見える島は?"), " 第1滑走路からは瀬長島が見える。", None),
    ),
    "qag_jaquad": (
        QAG_JAQUAD,
        (question("第1滑走路から見える島は?"), " 第1滑走路からは瀬長島が見える。", None),
    ),
    "local": (PLAIN, PLAIN_RECORD),
    "hh-rlhf": (
        {
            "chosen": f"{DIALOGUE}\n\nAssistant: An apple.",
            "rejected": f"{DIALOGUE}\n\nAssistant: A stone.",
        },
        PLAIN_RECORD,
    ),
    "smol-smoltalk": (
        {"messages": messages(*QUESTION, ("assistant", "An apple.")), "source": "everyday"},
        (PLAIN["prompt"], PLAIN["chosen"], None),
    ),
    "ultrafeedback": (ULTRAFEEDBACK, PLAIN_RECORD),
}


def of_config(name, row):
    """Return the record of a row of a dataset in config.yaml."""
    dataset = DATASETS[name]
    return record_of(row, dataset["format"], columns_of(dataset["format"], dataset.get("columns")))


def test_every_dataset_of_the_config_has_an_example_row():
    assert set(ROWS) == set(READ)


@pytest.mark.parametrize("name", ROWS)
def test_row_becomes_a_record(name):
    row, record = ROWS[name]
    assert of_config(name, row) == record


@pytest.mark.parametrize("name", ROWS)
def test_row_in_a_file_becomes_a_record(name, tmp_path):
    # Parquet keeps lists and structs.
    row, record = ROWS[name]
    if name == "HC3-Chinese":
        path = tmp_path / "all.jsonl"
        path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    elif name == "hh-rlhf":
        path = tmp_path / "train.jsonl.gz"
        path.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    else:
        path = tmp_path / "train.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
    assert [of_config(name, found) for _, found in read_rows(path)] == [record]


@pytest.mark.parametrize("name", ROWS)
def test_rejected_response_exists_if_the_format_has_pairs(name):
    _, (_, _, rejected) = ROWS[name]
    dataset = DATASETS[name]
    assert has_pairs(dataset["format"], dataset.get("columns")) == (rejected is not None)


@pytest.mark.parametrize("name", [name for name, (_, record) in ROWS.items() if record[2] is None])
def test_datasets_without_pairs_are_used_for_sft_only(name):
    assert DATASETS[name]["split"] == {"sft": 1, "reward": 0, "rlhf": 0}


def imported(folder, name, rows):
    """Import rows of a dataset. Returns the records and the reasons of dropped rows."""
    settings = SimpleNamespace(on_bad_row="fail", **DATASETS[name])
    job = SimpleNamespace(settings=settings, result=folder, facts={})
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_split(job, "train", {"source.jsonl": source})
    return list(read_records(folder / "train.parquet")), job.facts["dropped"]["train"]


def test_citation_marks_are_removed_from_webgpt(tmp_path):
    asks = {**WEBGPT, "question": {**WEBGPT["question"], "full_text": "What is x [1]?"}}
    other = {**asks, "answer_0": "Both [1, 12] of [it] (2) [a1].", "answer_1": "[3] x[4] [5]"}
    found, _ = imported(tmp_path, "webgpt_comparisons", [WEBGPT, other])
    assert [responses for _, *responses in found] == [
        [" Reverend Lovejoy.\n\nHe is voiced by Shearer (see above).", " Ned Flanders."],
        [" x", " Both of [it] (2) [a1]."],
    ]
    # The question is unchanged.
    assert found[1][0] == question("What is x [1]?")


def test_a_dataset_without_rejected_responses_is_imported(tmp_path):
    found, reasons = imported(tmp_path, "HC3-Chinese", [HC3, {**HC3, "human_answers": []}])
    assert found == [ROWS["HC3-Chinese"][1]]
    assert reasons == {"no chosen": 1}


# --- incomplete rows of these datasets ------------------------------------------------------


def dropped_of(name, **changes):
    with pytest.raises(DroppedRow) as reason:
        of_config(name, {**ROWS[name][0], **changes})
    return str(reason.value)


def test_ties_of_webgpt_are_dropped():
    assert dropped_of("webgpt_comparisons", score_0=0.0, score_1=0.0) == "tie"
    assert dropped_of("webgpt_comparisons", score_0=0, score_1=-0.0) == "tie"


def test_the_response_with_the_higher_score_is_chosen():
    _, chosen, rejected = of_config("webgpt_comparisons", {**WEBGPT, "score_0": 1, "score_1": -1})
    assert chosen == " Ned Flanders [1, 2]."
    assert rejected.startswith(" Reverend Lovejoy")


def test_label_0_of_shp_chooses_the_second_response():
    # The scores are ignored.
    assert of_config("SHP", {**SHP, "labels": 0})[1:] == (
        " Raspberry juice will likely work.",
        " Pectinex, perhaps?",
    )


@pytest.mark.parametrize("name", ["miracl-zh", "miracl-ja"])
def test_miracl_rows_without_passages(name):
    row, (prompt, chosen, _) = ROWS[name]
    assert dropped_of(name, positive_passages=[]) == "no chosen"
    # The chosen response is still trained on.
    assert of_config(name, {**row, "negative_passages": []}) == (prompt, chosen, None)


def test_hc3_rows_without_a_response_of_a_human_are_dropped():
    assert dropped_of("HC3-Chinese", human_answers=[]) == "no chosen"


def test_qag_jaquad_rows_without_questions_are_dropped():
    assert dropped_of("qag_jaquad", questions=[]) == "no prompt"


@pytest.mark.parametrize(
    "responses",
    [
        # The value in mkqa for questions without an answer.
        [{"type": 6, "entity": "", "text": None, "aliases": []}],
        [],
        None,
    ],
)
def test_mkqa_rows_without_a_response_are_dropped(responses):
    row = {"ja": responses, "zh_cn": responses, "en": MKQA["answers"]["en"]}
    assert dropped_of("mkqa-zh", answers=row) == "no chosen"
    assert dropped_of("mkqa-ja", answers=row) == "no chosen"
    # Responses in other languages are ignored.
    other = {**MKQA, "answers": {**row, "ja": MKQA["answers"]["ja"]}}
    assert of_config("mkqa-ja", other)[1] == " パリ"


def test_mkqa_rows_without_a_question_are_dropped():
    queries = {**MKQA["queries"], "zh_cn": None}
    assert dropped_of("mkqa-zh", queries=queries) == "no prompt"


# plain, instruct, last_turn.


def test_plain_texts_are_unchanged():
    row = {"prompt": " a \n", "chosen": "\n b ", "rejected": ""}
    assert read(row, "plain") == (" a \n", "\n b ", "")


def test_plain_response_without_a_leading_space_gets_one():
    row = {**PLAIN, "chosen": "An apple. ", "rejected": "\tA stone."}
    assert read(row, "plain")[1:] == (" An apple. ", "\tA stone.")


@pytest.mark.parametrize("format", ["plain", "instruct"])
def test_rejected_is_optional_in_columns(format):
    row = {"q": "Name a fruit.", "a": "An apple."}
    _, chosen, rejected = read(row, format, prompt="q", chosen="a")
    assert (chosen, rejected) == (" An apple.", None)


def test_markers_in_instruct_texts_start_no_turns():
    row = {"prompt": "a\n\nHuman: b", "chosen": "c\n\nAssistant: d", "rejected": "e"}
    assert read(row, "instruct") == (question("a\nHuman: b"), " c\nAssistant: d", " e")


def test_last_turn_responses_without_the_dialogue():
    row = {
        "prompt": "\n\nHuman: Name a fruit.\n\n",
        "chosen": "Assistant: An apple.",
        "rejected": "Assistant: A stone.",
    }
    assert read(row, "last_turn") == (question("Name a fruit."), " An apple.", " A stone.")


# dialogues.


def whole(*turns):
    """Return a dialogue in the format of hh-rlhf."""
    names = ["Human", "Assistant"] * len(turns)
    return "".join(f"\n\n{name}: {text}" for name, text in zip(names, turns, strict=False))


def test_dialogues_are_split_before_their_last_responses():
    row = {"chosen": whole("a", "b", "c", "d"), "rejected": whole("a", "b", "c", "e")}
    assert read(row, "dialogues") == (whole("a", "b", "c") + "\n\nAssistant:", " d", " e")


def test_responses_of_dialogues_may_be_empty_or_begin_alike():
    row = {"chosen": whole("a", ""), "rejected": whole("a", "b")}
    assert read(row, "dialogues") == (question("a"), " ", " b")
    row = {"chosen": whole("a", "b c"), "rejected": whole("a", "b")}
    assert read(row, "dialogues") == (question("a"), " b c", " b")


@pytest.mark.parametrize(
    "rejected",
    [
        whole("a", "x", "c", "e"),
        whole("a", "b", "x", "e"),
        # Shorter, and longer.
        whole("a", "e"),
        whole("a", "b", "c", "d", "c", "e"),
        whole("a", "b", "c"),
        "",
    ],
)
def test_dialogues_that_differ_before_the_last_response_are_dropped(rejected):
    row = {"chosen": whole("a", "b", "c", "d"), "rejected": rejected}
    assert dropped(row, "dialogues") == "dialogues differ before the last response"


def test_dialogue_without_a_response_is_bad():
    row = {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a"}
    assert bad(row, "dialogues") == "chosen has no turn 'Assistant:'"


# Scores and labels.

SCORED = {
    "prompt": "Name a fruit.",
    "first": "An apple.",
    "second": "A stone.",
    "first_score": 2,
    "second_score": 1.5,
}
LABELLED = {"prompt": "Name a fruit.", "first": "An apple.", "second": "A stone.", "label": 1}
RIGHT_WAY = (question("Name a fruit."), " An apple.", " A stone.")


def test_scored_responses():
    assert read(SCORED, "scored") == RIGHT_WAY
    assert read({**SCORED, "first_score": -3}, "scored")[1:] == (" A stone.", " An apple.")


@pytest.mark.parametrize("score", ["two", None, [2], float("nan")])
def test_score_that_is_not_a_number_is_bad(score):
    row = {**SCORED, "first_score": score}
    assert "score" in bad(row, "scored")


# As text, as csv has it.
@pytest.mark.parametrize("label", [1, 1.0, True, "1"])
def test_labels_of_the_first_response(label):
    assert read({**LABELLED, "label": label}, "labelled") == RIGHT_WAY


@pytest.mark.parametrize("label", [0, 0.0, False, "0"])
def test_labels_of_the_second_response(label):
    row = {**LABELLED, "label": label}
    assert read(row, "labelled")[1:] == (" A stone.", " An apple.")


@pytest.mark.parametrize("label", [2, -1, 0.5, "yes", [1], float("nan")])
@pytest.mark.parametrize("format", ["labelled", "kto"])
def test_label_other_than_0_or_1_is_bad(format, label):
    row = {**LABELLED, "messages": [], "label": label}
    assert bad(row, format).startswith(f"label is {label!r}, expected ")


# vicuna.


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("USER: a ASSISTANT:", "\n\nHuman: a\n\nAssistant:"),
        ("USER: a ASSISTANT: ", "\n\nHuman: a\n\nAssistant:"),
        ("USER: a", "\n\nHuman: a\n\nAssistant:"),
        ("USER: a\nSUPERUSER: b\n\nASSISTANT:", "\n\nHuman: a\nSUPERUSER: b\n\nAssistant:"),
        (
            "USER:a ASSISTANT:b</s>USER:c ASSISTANT:",
            "\n\nHuman: a\n\nAssistant: b</s>\n\nHuman: c\n\nAssistant:",
        ),
        ("USER: 你好 ASSISTANT:", "\n\nHuman: 你好\n\nAssistant:"),
        # Vicuna's own beginning.
        (
            "A chat between a user and an assistant. USER: a ASSISTANT:",
            "\n\nSystem: A chat between a user and an assistant.\n\nHuman: a\n\nAssistant:",
        ),
    ],
)
def test_vicuna_prompts(prompt, expected):
    assert read({"prompt": prompt, "label": " b\n"}, "vicuna") == (expected, " b", None)


def test_vicuna_prompts_without_a_user_turn_are_dropped():
    assert dropped({"prompt": "ASSISTANT:", "label": "b"}, "vicuna") == "no prompt"
    assert dropped({"prompt": "Be brief.", "label": "b"}, "vicuna") == "no prompt"


# Lists of messages.


def sharegpt(*turns):
    """Return turns as messages with from and value."""
    return [{"from": role, "value": text} for role, text in turns]


SHAREGPT_QUESTION = [("human", "Hello."), ("gpt", "Hi."), ("human", "Name a fruit.")]


def test_the_last_response_of_messages_is_chosen():
    row = {"messages": messages(*QUESTION, ("assistant", "An apple.\n")), "source": "x"}
    assert read(row, "messages") == (PLAIN["prompt"], " An apple.", None)


def test_the_last_response_of_sharegpt_is_chosen():
    row = {"conversations": sharegpt(*SHAREGPT_QUESTION, ("gpt", "An apple."))}
    assert read(row, "sharegpt") == (PLAIN["prompt"], " An apple.", None)


@pytest.mark.parametrize("format", ["messages", "sharegpt"])
def test_both_spellings_of_turns_are_read(format):
    cell = {"messages": "messages", "sharegpt": "conversations"}[format]
    turns = [*messages(*QUESTION[:1]), *sharegpt(("model", "Hi."), ("human", "Name a fruit."))]
    turns += messages(("assistant", "An apple."))
    assert read({cell: turns}, format) == (PLAIN["prompt"], " An apple.", None)


def test_messages_after_the_last_response_are_dropped():
    row = {"messages": messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("system", "d"))}
    assert read(row, "messages") == (question("a"), " b", None)


def test_system_turn_keeps_its_position():
    row = {"messages": messages(("system", "Be brief."), ("user", "a"), ("assistant", "b"))}
    assert read(row, "messages")[0] == "\n\nSystem: Be brief.\n\nHuman: a\n\nAssistant:"


@pytest.mark.parametrize("format", ["messages", "sharegpt", "kto"])
def test_a_system_column_comes_first(format):
    turns = messages(("user", "a"), ("assistant", "b"))
    row = {"m": turns, "l": True, "s": "Be brief."}
    columns = {"messages": "m", "system": "s"} | ({"label": "l"} if format == "kto" else {})
    expected = "\n\nSystem: Be brief.\n\nHuman: a\n\nAssistant:"
    assert read(row, format, **columns) == (expected, " b", None)
    # A row without a system text has no system turn.
    for nothing in (None, ""):
        assert read({**row, "s": nothing}, format, **columns) == (question("a"), " b", None)


@pytest.mark.parametrize("meta", [{"system": None}, {}, None])
def test_system_field_in_a_struct_may_be_null(meta):
    row = {"messages": messages(("user", "a"), ("assistant", "b")), "meta": meta}
    columns = {"messages": "messages", "system": "meta.system"}
    assert read(row, "messages", **columns) == (question("a"), " b", None)
    row["meta"] = {"system": "Be brief."}
    assert read(row, "messages", **columns)[0].startswith("\n\nSystem: Be brief.\n\nHuman: a")


@pytest.mark.parametrize(
    "turns", [[], [("user", "a")], [("system", "a")], [("system", "a"), ("user", "b")]]
)
def test_messages_without_a_response_are_dropped(turns):
    assert dropped({"messages": messages(*turns)}, "messages") == "no response"


@pytest.mark.parametrize("before", [[], [("system", "Be brief.")], [("assistant", "Hi.")]])
def test_messages_without_a_question_are_dropped(before):
    row = {"messages": messages(*before, ("assistant", "An apple."))}
    assert dropped(row, "messages") == "no prompt"


@pytest.mark.parametrize("role", ["tool", "observation", "User", None, ["user"]])
def test_unknown_role_is_bad_and_the_error_lists_the_roles(role):
    row = {"messages": messages(("user", "a"), (role, "b"), ("assistant", "c"))}
    message = bad(row, "messages")
    assert repr(role) in message
    assert "system, user, human, assistant, gpt, model" in message


@pytest.mark.parametrize("text", [None, 7, ["a"], {"text": "a"}])
def test_turn_without_text_is_bad(text):
    row = {"messages": messages(("user", text), ("assistant", "b"))}
    assert f"is {type(text).__name__}, expected text" in bad(row, "messages")


@pytest.mark.parametrize("turn", ["a", None, 7, ["user", "a"]])
def test_turn_without_a_role_is_bad(turn):
    message = bad({"messages": [turn, *messages(("assistant", "b"))]}, "messages")
    assert f"messages contains {type(turn).__name__}, expected messages" in message


# --- pairs of messages ----------------------------------------------------------------------


def test_message_pairs_as_whole_dialogues():
    assert read(ULTRAFEEDBACK, "message_pairs") == PLAIN_RECORD
    # A prompt column is not repeated.
    same = {name: name for name in ("prompt", "chosen", "rejected")}
    assert read(ULTRAFEEDBACK, "message_pairs", **same) == PLAIN_RECORD


PAIRED = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
RESPONSES = {
    "chosen": messages(("assistant", "An apple.")),
    "rejected": messages(("assistant", "A stone.")),
}


def test_message_pairs_with_a_prompt_text():
    row = {"prompt": "Name a fruit.", **RESPONSES}
    assert read(row, "message_pairs", **PAIRED) == RIGHT_WAY


def test_message_pairs_with_a_prompt_list():
    row = {"prompt": messages(*QUESTION), **RESPONSES}
    assert read(row, "message_pairs", **PAIRED) == PLAIN_RECORD


@pytest.mark.parametrize(
    "responses",
    [
        {"chosen": "An apple.", "rejected": "A stone."},
        {name: turns[0] for name, turns in RESPONSES.items()},
    ],
)
def test_responses_of_message_pairs_may_be_texts_or_single_messages(responses):
    assert (
        read({"prompt": messages(*QUESTION), **responses}, "message_pairs", **PAIRED)
        == PLAIN_RECORD
    )


def test_message_pairs_with_a_system_column():
    row = {"prompt": "Name a fruit.", "system": "Be brief.", **RESPONSES}
    prompt, *responses = read(row, "message_pairs", **PAIRED, system="system")
    assert prompt == "\n\nSystem: Be brief.\n\nHuman: Name a fruit.\n\nAssistant:"
    assert responses == [" An apple.", " A stone."]


def test_sharegpt_pairs():
    row = {
        "conversations": sharegpt(("system", "Be brief."), *SHAREGPT_QUESTION),
        "chosen": {"from": "gpt", "value": "An apple."},
        "rejected": {"from": "gpt", "value": "A stone."},
    }
    prompt, *responses = PLAIN_RECORD
    expected = (f"\n\nSystem: Be brief.{prompt}", *responses)
    assert read(row, "sharegpt_pairs") == expected


def test_message_pairs_that_differ_before_the_last_response_are_dropped():
    row = {
        "chosen": messages(("user", "a"), ("assistant", "b")),
        "rejected": messages(("user", "x"), ("assistant", "c")),
    }
    assert dropped(row, "message_pairs") == "dialogues differ before the last response"


@pytest.mark.parametrize("cell", ["chosen", "rejected"])
@pytest.mark.parametrize("turns", [[], messages(("user", "a"))])
def test_message_pairs_that_end_without_a_response_are_bad(cell, turns):
    row = {"prompt": "Name a fruit.", **RESPONSES, cell: turns}
    assert bad(row, "message_pairs", **PAIRED) == f"{cell} does not end with a response"


def test_message_pairs_without_a_question_are_dropped():
    assert dropped(RESPONSES, "message_pairs") == "no prompt"
    assert dropped({"prompt": [], **RESPONSES}, "message_pairs", **PAIRED) == "no prompt"


# --- kto ------------------------------------------------------------------------------------


def test_good_rows_of_kto_are_chosen_and_bad_ones_dropped():
    row = {"messages": messages(("user", "a"), ("assistant", "b")), "label": True}
    assert read(row, "kto") == (question("a"), " b", None)
    assert dropped({**row, "label": False}, "kto") == "labelled bad"


# --- columns and fields ---------------------------------------------------------------------


def test_missing_column_error_lists_the_columns():
    row = {"question": "a", "chosen": "b", "answer": "c"}
    assert bad(row, "plain") == "column prompt is missing; the row has question, chosen, answer"
    message = bad(row, "instruct", prompt="question.text", chosen="response.0")
    assert message == "question.text: str has no key text"
    message = bad(row, "instruct", prompt="question", chosen="response.0")
    assert message == "column response is missing; the row has question, chosen, answer"


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("format", ["plain", "instruct", "last_turn"])
def test_null_column_is_named(format, name):
    assert bad({**PLAIN, name: None}, format) == f"column {name} is null"


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("value", [7, True, ["a"], {"text": "a"}, b"a"])
@pytest.mark.parametrize("format", ["plain", "instruct", "last_turn"])
def test_field_that_is_not_text_is_named(format, name, value):
    assert bad({**PLAIN, name: value}, format) == (
        f"{name} is {type(value).__name__}, expected text"
    )


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("dialogues", {"chosen": 7, "rejected": "a"}),
        ("scored", {**SCORED, "second": 7}),
        ("labelled", {**LABELLED, "first": 7}),
        ("vicuna", {"prompt": 7, "label": "a"}),
        ("vicuna", {"prompt": "USER: a", "label": 7}),
        ("messages", {"messages": 7}),
        ("message_pairs", {**RESPONSES, "chosen": 7}),
        ("sharegpt", {"conversations": 7}),
        ("sharegpt_pairs", {**RESPONSES, "conversations": 7}),
        ("kto", {"messages": 7, "label": 1}),
    ],
)
def test_numbers_are_not_accepted_as_text(format, row):
    assert "int, expected" in bad(row, format)


@pytest.mark.parametrize("format", FORMATS)
def test_row_without_any_column_is_bad_in_every_format(format):
    assert bad({"x": 1}, format).endswith(" is missing; the row has x")
    assert bad(dict.fromkeys(columns_of(format).values()), format).endswith("is null")


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("a", {"a": "x"}),
        ("a.b", {"a": {"b": "x"}}),
        ("a.1", {"a": ["y", "x"]}),
        ("a.b.0.c", {"a": {"b": [{"c": "x"}]}}),
        ("a.0.0", {"a": [["x"]]}),
        # A column whose name has dots in it.
        ("a.b", {"a.b": "x", "a": {"b": "y"}}),
        ("a.0", {"a": {"0": "x"}}),
        ("答案.文本", {"答案": {"文本": "x"}}),
    ],
)
def test_path_into_lists_and_structs(path, row):
    assert read({"q": "y", **row}, "instruct", prompt="q", chosen=path)[1] == " x"


@pytest.mark.parametrize("row", [{"a": []}, {"a": None}, {"a": [None]}, {"a": [{"b": None}]}])
def test_path_without_a_value_drops_the_row(row):
    row = {"q": "y", **row}
    assert dropped(row, "instruct", prompt="q", chosen="a.0.b") == "no chosen"
    # The rejected response is optional.
    record = read({**row, "c": "x"}, "instruct", prompt="q", chosen="c", rejected="a.0.b")
    assert record == (question("y"), " x", None)


def test_missing_key_of_a_struct_is_bad():
    # A misspelled key would drop every rejected response.
    row = {"q": "y", "c": "x", "a": [{"text": "z", "id": 1}]}
    message = bad(row, "instruct", prompt="q", chosen="c", rejected="a.0.txt")
    assert message == "a.0.txt: key txt is missing; found text, id"


def test_path_into_a_text_or_by_name_into_a_list_is_bad():
    row = {"q": "y", "a": ["x"]}
    message = bad(row, "instruct", prompt="q", chosen="a.b")
    assert message == "a.b: list has no key b"
    message = bad(row, "instruct", prompt="q", chosen="q.0")
    assert message == "q.0: str has no key 0"


def test_default_columns_of_the_formats():
    assert columns_of("plain") == {name: name for name in ("prompt", "chosen", "rejected")}
    assert columns_of("vicuna") == {"prompt": "prompt", "chosen": "label"}
    assert columns_of("sharegpt") == {"messages": "conversations"}


def test_columns_of_the_config_override_the_defaults():
    columns = {"prompt": "q", "chosen": "a.0"}
    assert columns_of("instruct", columns) == columns


def test_unknown_field_error_lists_the_fields():
    with pytest.raises(ValueError) as error:
        columns_of("plain", {**PAIRED, "respones": "b", "response": "a"})
    assert str(error.value) == (
        "format plain has no field respones, response (fields: prompt, chosen, rejected)"
    )


def test_missing_fields_are_named():
    with pytest.raises(ValueError) as error:
        columns_of("instruct", {"prompt": "q"})
    assert str(error.value) == (
        "format instruct requires chosen (fields: prompt, chosen, rejected)"
    )
    # An optional field is listed, but not required.
    with pytest.raises(ValueError, match="requires messages") as error:
        columns_of("messages", {"system": "s"})
    assert "(fields: messages, system)" in str(error.value)


def test_missing_fields_are_named_in_a_fixed_order():
    # The order of a set of strings differs between runs; the message must not.
    for cell in SCORED:
        others = [name for name in SCORED if name != cell]
        with pytest.raises(ValueError) as error:
            columns_of("scored", {cell: "x"})
        named = [f" requires {', '.join(names)} (" for names in (others, sorted(others))]
        assert any(names in str(error.value) for names in named)


@pytest.mark.parametrize(
    ("format", "columns", "pairs"),
    [
        ("plain", None, True),
        ("plain", {"prompt": "q", "chosen": "a"}, False),
        ("instruct", {"prompt": "q", "chosen": "a", "rejected": "b"}, True),
        ("last_turn", None, True),
        ("dialogues", None, True),
        ("scored", None, True),
        ("labelled", None, True),
        ("vicuna", None, False),
        ("messages", None, False),
        ("message_pairs", None, True),
        ("sharegpt", None, False),
        ("sharegpt_pairs", None, True),
        ("kto", None, False),
    ],
)
def test_formats_with_pairs(format, columns, pairs):
    assert has_pairs(format, columns) is pairs


# --- real rows in the layout of other datasets ----------------------------------------------


def real(path, format, **columns):
    """Return the records of a file, and the number of dropped rows by reason."""
    found, reasons = [], Counter()
    for _, row in read_rows(path):
        try:
            found.append(read(row, format, **columns))
        except DroppedRow as reason:
            reasons[str(reason)] += 1
    return sorted(found, key=str), reasons


@pytest.mark.parametrize(("split", "rows", "differ"), [("train", 2097, 4), ("test", 210, 1)])
def test_real_dialogues(shared_data, split, rows, differ):
    path = shared_data / f"native/hh_pair/{split}.parquet"
    found, reasons = real(path, "dialogues")
    assert len(found) == rows
    assert reasons == {"dialogues differ before the last response": differ}
    assert found == real(shared_data / f"hh_harmless/{split}.parquet", "plain")[0]


def test_real_rows_as_in_shp(shared_data):
    columns = DATASETS["SHP"]["columns"]
    found, reasons = real(shared_data / "native/shp/train.parquet", "labelled", **columns)
    assert len(found) == 2376 and not reasons
    assert found == real(shared_data / "qa_feedback/train.parquet", "plain")[0]


def test_real_rows_as_in_synthetic_instruct(shared_data):
    found, reasons = real(shared_data / "native/synthetic_instruct/train.parquet", "instruct")
    assert len(found) == 800 and not reasons
    # The other dataset has whitespace around its texts.
    plain, _ = real(shared_data / "pandalm/train.parquet", "plain")
    plain = [(question(prompt[9:-12].strip()), *responses) for prompt, *responses in plain]
    assert found == sorted(plain, key=str)


def test_real_rows_of_stack_exchange_paired(shared_data):
    path = shared_data / "native/stack_exchange_paired/stack_exchange_paired_tiny.json"
    columns = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    found, reasons = real(path, "instruct", **columns)
    assert len(found) == 25 and not reasons
    rows = json.loads(path.read_text())
    expected = [
        (question(row["question"].strip()), *(f" {row[f'response_{x}'].strip()}" for x in "jk"))
        for row in rows
    ]
    assert found == sorted(expected, key=str)


def test_real_sharegpt_pairs(shared_data):
    found, reasons = real(shared_data / "native/sharegpt_dpo_zh_demo.json", "sharegpt_pairs")
    assert len(found) == 300 and not reasons
    train, _ = real(shared_data / "dpo_demo_zh/train.parquet", "plain")
    test, _ = real(shared_data / "dpo_demo_zh/test.parquet", "plain")
    assert found == sorted(train + test, key=str)


def test_real_rows_of_kto(shared_data):
    found, reasons = real(shared_data / "native/kto/kto_en_demo.json", "kto")
    assert len(found) == 150
    assert reasons == {"labelled bad": 150}
    assert {rejected for _, _, rejected in found} == {None}


def test_real_rows_with_blank_responses(shared_data):
    found, _ = real(shared_data / "hh_harmless/train.parquet", "plain")
    assert all(prompt.endswith("\n\nAssistant:") for prompt, _, _ in found)
    assert sum(not chosen.strip() for _, chosen, _ in found) == 4
