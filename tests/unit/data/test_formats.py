"""Conversion of rows of every format to prompt, chosen and rejected."""

# Chinese texts have Chinese punctuation.

import json
import re

import pytest

from snakechat.data.cells import BadRow
from snakechat.data.formats import FORMATS, columns_of, kept_cells, named_columns, record_of
from support.formats import (
    PLAIN,
    PLAIN_RECORD,
    QUESTION,
    ULTRAFEEDBACK,
    bad,
    dropped,
    messages,
    question,
    read,
)

# plain, instruct, last_turn.


def test_texts_are_kept_as_they_are():
    text = "    if x:\n        return 1\n\nHuman: b "
    expected = ([("user", text)], f" {text}", f" {text}")
    row = {"prompt": text, "chosen": text, "rejected": text}
    assert record_of(row, "instruct", columns_of("instruct")) == expected
    whole = messages(("user", text), ("assistant", text))
    for format, cells in {
        "messages": {"messages": whole},
        "sharegpt": {"conversations": sharegpt(("human", text), ("gpt", text))},
        "kto": {"messages": whole, "label": 1},
        "message_pairs": {"chosen": whole, "rejected": whole},
    }.items():
        found = record_of(cells, format, columns_of(format))
        assert found == (*expected[:2], expected[2] if "rejected" in cells else None)


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


@pytest.mark.parametrize(
    "rejected",
    # Another prompt; a shorter dialogue.
    [whole("a", "x", "c", "e"), whole("a", "e")],
)
def test_dialogues_that_differ_before_the_last_response_are_dropped(rejected):
    row = {"chosen": whole("a", "b", "c", "d"), "rejected": rejected}
    assert dropped(row, "dialogues") == "dialogues differ before the last response"


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


@pytest.mark.parametrize("score", [[2], float("nan")])
def test_score_that_is_not_a_number_is_bad(score):
    row = {**SCORED, "first_score": score}
    assert "score" in bad(row, "scored")


# As text, as csv has it.
@pytest.mark.parametrize(("first", "second"), [(1, 0), ("1", "0")])
def test_labels_of_the_first_and_of_the_second_response(first, second):
    assert read({**LABELLED, "label": first}, "labelled") == RIGHT_WAY
    swapped = read({**LABELLED, "label": second}, "labelled")
    assert swapped[1:] == (" A stone.", " An apple.")


@pytest.mark.parametrize(("format", "label"), [("labelled", 2), ("kto", [1])])
def test_label_other_than_0_or_1_is_bad(format, label):
    row = {**LABELLED, "messages": [], "label": label}
    assert bad(row, format).startswith(f"label is {label!r}, expected ")


# vicuna.


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("USER: a\nSUPERUSER: b\n\nASSISTANT:", "\n\nHuman: a\nSUPERUSER: b\n\nAssistant:"),
        (
            "USER:a ASSISTANT:b</s>USER:c ASSISTANT:",
            "\n\nHuman: a\n\nAssistant: b</s>\n\nHuman: c\n\nAssistant:",
        ),
        # Vicuna's own beginning.
        (
            "A chat between a user and an assistant. USER: a ASSISTANT:",
            "\n\nSystem: A chat between a user and an assistant.\n\nHuman: a\n\nAssistant:",
        ),
    ],
)
def test_vicuna_prompts(prompt, expected):
    assert read({"prompt": prompt, "label": " b\n"}, "vicuna") == (expected, " b\n", None)


# Lists of messages.


def sharegpt(*turns):
    """Return turns as messages with from and value."""
    return [{"from": role, "value": text} for role, text in turns]


SHAREGPT_QUESTION = [("human", "Hello."), ("gpt", "Hi."), ("human", "Name a fruit.")]


def test_the_last_response_of_messages_is_chosen():
    row = {"messages": messages(*QUESTION, ("assistant", "An apple.\n")), "source": "x"}
    assert read(row, "messages") == (PLAIN["prompt"], " An apple.\n", None)


def test_the_last_response_of_sharegpt_is_chosen():
    row = {"conversations": sharegpt(*SHAREGPT_QUESTION, ("gpt", "An apple."))}
    assert read(row, "sharegpt") == (PLAIN["prompt"], " An apple.", None)


@pytest.mark.parametrize("turns", [[], [("system", "a"), ("user", "b")]])
def test_messages_without_a_response_are_dropped(turns):
    assert dropped({"messages": messages(*turns)}, "messages") == "no response"


@pytest.mark.parametrize("before", [[], [("system", "Be brief.")]])
def test_messages_without_a_question_are_dropped(before):
    row = {"messages": messages(*before, ("assistant", "An apple."))}
    assert dropped(row, "messages") == "no prompt"


@pytest.mark.parametrize("role", ["critic", None])
def test_unknown_role_is_bad_and_the_error_lists_the_roles(role):
    row = {"messages": messages(("user", "a"), (role, "b"), ("assistant", "c"))}
    message = bad(row, "messages")
    assert repr(role) in message
    assert "system, user, human, assistant, gpt, model" in message


def test_turns_with_thoughts_are_bad():
    turns = [*messages(("user", "a")), {"role": "assistant", "content": "b", "thinking": "Hm."}]
    assert bad({"messages": turns}, "messages") == (
        "messages has a turn with thinking, which is not supported"
    )


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "thinking", "name"])
@pytest.mark.parametrize("nothing", [None, [], ""])
def test_tables_have_nothing_where_a_turn_has_text_alone(key, nothing):
    turns = [*messages(("user", "a")), {"role": "assistant", "content": "b", key: nothing}]
    row = {"messages": turns, "tools": nothing}
    assert record_of(row, "messages", columns_of("messages")) == ([("user", "a")], " b", None)


def test_content_parts_that_are_all_text_are_one_text():
    # A table has null where a part has no image.
    parts = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "b"}]
    turns = messages(("user", parts), ("assistant", [{"type": "text", "text": "c"}]))
    assert read({"messages": turns}, "messages") == (question("a b"), " c", None)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "text": None}, "a part of type 'image', expected text alone"),
        ("a", "a part of type 'str', expected text alone"),
        ({"type": "text", "text": 1}, "the text of a part is int, expected text"),
    ],
)
def test_other_content_parts_are_bad(part, reason):
    turns = messages(("user", [part]), ("assistant", "c"))
    assert reason in bad({"messages": turns}, "messages")


# --- tools ----------------------------------------------------------------------------------

CALL = {"name": "look", "arguments": {"at": "Äpfel", "n": 2}}
FUNCTION = {"type": "function", "function": CALL}
CALLING = {"role": "assistant", "content": "", "tool_calls": [FUNCTION]}
DEFINITION = {"name": "look", "description": "Look at it.", "parameters": {"type": "object"}}
DEFINED = ("tools", json.dumps([{"type": "function", "function": DEFINITION}]))


def turn_of(message):
    """Return the turn of a message that is more than a role and a text."""
    return "message", json.dumps(message, ensure_ascii=False)


@pytest.mark.parametrize(
    "message",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        # OpenAI's arguments are text; a table has each argument of all rows.
        {
            "role": "assistant",
            "tool_calls": [{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": None, "function": {**CALL, "arguments": {"at": "Äpfel", "x": None, "n": 2}}}
            ],
        },
    ],
)
def test_calls_of_tools_are_read_as_transformers_documents_them(message):
    turns = [*messages(("user", "a")), message, {"from": "observation", "value": "b"}]
    row = {"messages": [*turns, *messages(("assistant", "c"))]}
    expected = [("user", "a"), turn_of(CALLING), ("tool", "b")]
    assert record_of(row, "messages", columns_of("messages")) == (expected, " c", None)
    # A dialogue may end with a call.
    ending = {"messages": turns[:2]}
    assert record_of(ending, "messages", columns_of("messages")) == (
        expected[:1],
        expected[1][1],
        None,
    )


def test_calls_and_results_keep_what_templates_write_of_them():
    calling = {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "c1", **FUNCTION}] * 2,
    }
    result = {"role": "tool", "content": "b", "name": "look", "tool_call_id": "c1"}
    turns = [*messages(("user", "a")), calling, result, *messages(("assistant", "c"))]
    prompt, _, _ = record_of({"messages": turns}, "messages", columns_of("messages"))
    assert prompt == [("user", "a"), turn_of(calling), turn_of(result)]


@pytest.mark.parametrize(
    "tools",
    [
        [DEFINITION],
        json.dumps([DEFINITION]),
        [{"type": "function", "function": DEFINITION}],
        [json.dumps(DEFINITION)],
        [{**DEFINITION, "more": None}],
        json.dumps(DEFINITION),
    ],
)
def test_tools_are_the_first_turn(tools):
    row = {"messages": messages(("user", "a"), ("assistant", "b")), "tools": tools}
    expected = [DEFINED, ("user", "a")]
    assert record_of(row, "messages", columns_of("messages")) == (expected, " b", None)
    row["system"] = "c"
    columns = columns_of("messages", {"messages": "messages", "system": "system"})
    assert record_of(row, "messages", columns)[0] == [DEFINED, ("system", "c"), ("user", "a")]
    # The column has no meaning in texts.
    assert read({**PLAIN, "tools": tools}, "plain") == PLAIN_RECORD
    for nothing in (None, [], "", "[]", "null", "{}"):
        assert (
            record_of({**row, "tools": nothing}, "messages", columns_of("messages"))[0]
            == (expected[1:])
        )


@pytest.mark.parametrize(
    ("message", "tools", "reason"),
    [
        ({"from": "function_call", "value": "look()"}, None, "a call is text, but not JSON: Exp"),
        (
            {"role": "assistant", "tool_calls": ["{}"]},
            None,
            "a call without the name of a function",
        ),
        ({"role": "assistant", "tool_calls": [3]}, None, "a call is int, expected an object"),
        (
            {"role": "assistant", "tool_calls": [{"name": "look", "arguments": [{}, {}]}]},
            None,
            "the arguments of look are 2 objects, expected one",
        ),
        ({"role": "tool", "content": None}, None, "the text of a turn is NoneType, expected text"),
        (CALLING, '[{"type": "function"}]', "tools has a tool without the name of a function"),
        (CALLING, [3], "tools is int, expected an object"),
        (CALLING, [{"name": "look", "x": b"y"}], "has no JSON form"),
    ],
)
def test_calls_and_tools_that_cannot_be_read_are_bad(message, tools, reason):
    turns = [*messages(("user", "a")), message, *messages(("assistant", "b"))]
    assert reason in bad({"messages": turns, "tools": tools}, "messages")


def test_text_that_looks_like_a_message_is_text():
    text = json.dumps(CALLING)
    for format, row in (
        ("instruct", {"prompt": "a", "chosen": text, "rejected": "b"}),
        ("last_turn", {"prompt": "a", "chosen": f"Assistant:{text}", "rejected": text}),
        ("dialogues", {"chosen": question("a") + text, "rejected": question("a") + "b"}),
        ("messages", {"messages": messages(("user", "a"), ("assistant", text))}),
    ):
        assert read(row, format)[1] == f" {text}"


# --- weights --------------------------------------------------------------------------------


def weighted(*turns):
    """Return turns as messages with a weight."""
    return [{"role": role, "content": text, "weight": weight} for role, text, weight in turns]


def test_a_response_with_weight_0_is_dropped():
    zero = "0"
    turns = [("user", "a", None), ("assistant", "b", zero), ("user", "c", None)]
    assert dropped({"messages": weighted(*turns)}, "messages") == "response with weight 0"
    assert dropped({"messages": weighted(*turns), "label": 1}, "kto") == "response with weight 0"
    whole = weighted(*turns, ("assistant", "d", 1))
    expected = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert read({"messages": whole}, "messages") == (expected, " d", None)
    row = {"chosen": whole, "rejected": weighted(*turns, ("assistant", "e", zero))}
    assert dropped(row, "message_pairs") == "response with weight 0"
    call = {**CALLING, "weight": 0}
    assert dropped({"messages": [*weighted(turns[0]), call]}, "messages") == (
        "response with weight 0"
    )
    # An earlier one is not to be learned.
    prompt, _, _ = record_of(
        {"messages": [*whole[:2], call, *whole[2:]]}, "messages", columns_of("messages")
    )
    assert prompt == [("user", "a"), ("untrained", "b"), turn_of(call), ("user", "c")]
    row = {"messages": weighted(turns[0], ("assistant", "b", 0.5))}
    assert bad(row, "messages") == "weight is 0.5, expected 1 or 0"


# --- messages as JSON text ------------------------------------------------------------------


def test_messages_may_be_json_text():
    indent = 2
    turns = messages(*QUESTION, ("assistant", "An apple."))
    expected = (PLAIN["prompt"], " An apple.", None)
    assert read({"messages": json.dumps(turns, indent=indent)}, "messages") == expected
    row = {"conversations": json.dumps(sharegpt(*SHAREGPT_QUESTION, ("gpt", "An apple.")))}
    assert read(row, "sharegpt") == expected
    row = {"prompt": json.dumps(messages(*QUESTION), indent=indent)}
    assert read(row, "prompt") == (PLAIN["prompt"], None, None)
    texts = {name: json.dumps(cell, indent=indent) for name, cell in ULTRAFEEDBACK.items()}
    assert read(texts, "message_pairs") == PLAIN_RECORD


def test_text_that_is_not_json_of_messages_is_bad():
    turns = messages(("user", "a"), ("assistant", "b"))
    message = "messages is text, but not JSON of messages: Expecting"
    # As pandas writes lists to csv.
    assert bad({"messages": str(turns)}, "messages").startswith(message)
    assert bad({"messages": "Human: a"}, "messages").startswith(message)
    assert bad({"prompt": str(turns[:1])}, "prompt").startswith("prompt is text, but not JSON")
    assert "not JSON" in bad({"messages": "[" * 100_000}, "messages")


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


@pytest.mark.parametrize(("cell", "turns"), [("chosen", []), ("rejected", messages(("user", "a")))])
def test_message_pairs_that_end_without_a_response_are_bad(cell, turns):
    row = {"prompt": "Name a fruit.", **RESPONSES, cell: turns}
    assert bad(row, "message_pairs", **PAIRED) == f"{cell} does not end with a response"


def test_message_pairs_without_a_question_are_dropped():
    assert dropped(RESPONSES, "message_pairs") == "no prompt"
    assert dropped({"prompt": [], **RESPONSES}, "message_pairs", **PAIRED) == "no prompt"


# --- kto ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    ["Name a fruit.", messages(("user", "Name a fruit.")), messages(("user", "Name a fruit."))[0]],
)
def test_a_prompt_alone_is_a_text_or_messages(prompt):
    assert read({"prompt": prompt}, "prompt") == (question("Name a fruit."), None, None)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Translate.", "input": "cat"}, "Translate.\ncat"),
        ({"instruction": "Name a color.", "input": None}, "Name a color."),
        ({"instruction": "", "input": "cat"}, "cat"),
    ],
)
def test_columns_are_joined_by_newlines_without_the_empty_ones(row, prompt):
    columns = {"prompt": ["instruction", "input"], "chosen": "output"}
    assert read({**row, "output": "a"}, "instruct", **columns) == (question(prompt), " a", None)


def test_kept_cells_are_json():
    row = {"solution": "四", "meta": {"tests": ["assert x", 1.5, True], "none": None}}
    cells = kept_cells(row, ["solution", "meta.tests", "meta.none", "meta.absent"])
    assert cells == ['"四"', '["assert x", 1.5, true]', "null", "null"]


def test_kept_columns_have_the_last_key_of_their_path_or_a_name_of_their_own():
    assert named_columns(["solution", "meta.tests"]) == {
        "solution": "solution",
        "tests": "meta.tests",
    }
    assert named_columns({"solution": "answer"}) == {"solution": "answer"}
    with pytest.raises(ValueError, match="two columns have the name tests"):
        named_columns(["meta.tests", "tests"])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"other": 1},
            "column solution is missing; the row has other: check format, columns and keep",
        ),
        ({"solution": b"x"}, "column solution: .*bytes is not JSON serializable"),
        ({"solution": float("nan")}, "column solution: .*not JSON compliant"),
    ],
)
def test_a_cell_that_cannot_be_kept_is_bad(row, reason):
    with pytest.raises(BadRow, match=reason):
        kept_cells(row, ["solution"])


def test_good_responses_of_kto_are_chosen_and_bad_ones_rejected():
    row = {"messages": messages(("user", "a"), ("assistant", "b")), "label": True}
    assert read(row, "kto") == (question("a"), " b", None)
    assert read({**row, "label": False}, "kto") == (question("a"), None, " b")


# --- columns and fields ---------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_field_that_is_null_or_not_text_is_named(name):
    assert bad({**PLAIN, name: None}, "plain") == f"column {name} is null"
    assert bad({**PLAIN, name: b"a"}, "plain") == f"{name} is bytes, expected text"


@pytest.mark.parametrize("format", FORMATS)
def test_row_without_any_column_is_bad_in_every_format(format):
    assert " is missing; the row has x: " in bad({"x": 1}, format)
    assert bad(dict.fromkeys(columns_of(format).values()), format).endswith("is null")


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("a.1", {"a": ["y", "x"]}),
        ("a.b.0.c", {"a": {"b": [{"c": "x"}]}}),
        # A column whose name has dots in it.
        ("a.b", {"a.b": "x", "a": {"b": "y"}}),
        ("a.0", {"a": {"0": "x"}}),
        ("答案.文本", {"答案": {"文本": "x"}}),
    ],
)
def test_path_into_lists_and_structs(path, row):
    assert read({"q": "y", **row}, "instruct", prompt="q", chosen=path)[1] == " x"


@pytest.mark.parametrize("row", [{"a": []}, {"a": [{"b": None}]}])
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


@pytest.mark.parametrize(
    ("format", "columns", "message"),
    [
        ("plain", {**PAIRED, "respones": "b"}, "plain has no field respones (fields: prompt, "),
        ("instruct", {"prompt": "q"}, "requires chosen (fields: prompt, chosen, rejected)"),
        # An optional field is listed, but not required.
        ("messages", {"system": "s"}, "requires messages (fields: messages, system)"),
    ],
)
def test_unknown_and_missing_fields_are_named(format, columns, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        columns_of(format, columns)
