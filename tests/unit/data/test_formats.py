"""Conversion of rows of every format to prompt, chosen and rejected."""

import json

import pytest

from snakechat.data.cells import BadRow, DroppedRow
from snakechat.data.formats import (
    FORMATS,
    columns_of,
    kept_cells,
    named_columns,
    record_of,
    with_instructions,
)
from snakechat.data.records import texts_of


def read(row, format="messages", **columns):
    """Return the record of a row, or why there is none. Columns default to the format's."""
    try:
        return record_of(row, format, columns_of(format, columns or None))
    except (BadRow, DroppedRow) as error:
        assert "\n" not in str(error)
        return f"{type(error).__name__}: {error}"


def check(found, expected):
    """Check the texts of a record, or the start of the reason why there is none."""
    if isinstance(expected, str):
        assert found.startswith(expected)
    else:
        assert texts_of(found) == expected


def prompt_of(*turns):
    """Return the text of a prompt with turns of the user and the assistant in turn."""
    names = ["Human", "Assistant"] * len(turns)
    texts = (f"\n\n{name}: {text}" for name, text in zip(names, turns, strict=False))
    return "".join(texts) + "\n\nAssistant:"


def messages(*turns):
    """Return turns as messages with role, content and, if they have one, a weight."""
    return [dict(zip(("role", "content", "weight"), turn, strict=False)) for turn in turns]


DIALOGUE = prompt_of("a", "b", "c")
QUESTION = [("user", "a"), ("assistant", "b"), ("user", "c")]
NAMES = ("human", "gpt", "human", "gpt")
SHAREGPT = [{"from": name, "value": text} for name, text in zip(NAMES, "abcd", strict=True)]
DE = (DIALOGUE, " d", " e")
PLAIN = {"prompt": DIALOGUE, "chosen": " d", "rejected": " e"}
TWO = {"prompt": "a", "first": "d", "second": "e"}
SCORED = {**TWO, "first_score": 2, "second_score": 1.5}
ULTRAFEEDBACK = {
    "chosen": messages(*QUESTION, ("assistant", "d")),
    "rejected": messages(*QUESTION, ("assistant", "e")),
}
A_B = ("user", "a"), ("assistant", "b")
A_DE, REPEATED = (prompt_of("a"), " d", " e"), (f"{DIALOGUE} d", f"{DIALOGUE} e")
GOOD_OR_BAD = {"messages": messages(*A_B)}
ASKED = messages(("user", "a"))
DIFFER = "DroppedRow: dialogues differ before the last response"
WEIGHT_0 = "DroppedRow: response with weight 0"
KTO = {"prompt": ASKED, "completion": messages(A_B[1])}
ZERO = [("user", "a"), ("assistant", "b", "0"), ("user", "c")]
NOT_JSON = "is text, but not JSON of messages: Expecting"


# Format, row, and the texts of its record or why there is none.
@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        ("plain", {**PLAIN, "chosen": b"a"}, "BadRow: chosen is bytes, expected text"),
        ("last_turn", dict(zip(PLAIN, (DIALOGUE[:-10], *REPEATED), strict=True)), DE),
        ("dialogues", {"chosen": f"{DIALOGUE} d", "rejected": f"{DIALOGUE} e"}, DE),
        ("dialogues", {"chosen": DIALOGUE + " d", "rejected": prompt_of("a", "x", "c")}, DIFFER),
        ("scored", {**SCORED, "first_score": -3}, (prompt_of("a"), " e", " d")),
        ("scored", {**SCORED, "first_score": 1.5}, "DroppedRow: tie"),
        ("scored", {**SCORED, "first_score": "nan"}, "BadRow: first_score is 'nan'"),
        # As text, as csv has it.
        ("labelled", {**TWO, "label": "1"}, A_DE),
        ("labelled", {**TWO, "label": 2}, "BadRow: label is 2, expected 1 or 0"),
        (
            "vicuna",
            {"prompt": "A chat. USER:a\nMYUSER: b ASSISTANT:b</s>USER:c ASSISTANT:", "label": "d"},
            ("\n\nSystem: A chat." + prompt_of("a\nMYUSER: b", "b</s>", "c"), " d", None),
        ),
        ("messages", {**GOOD_OR_BAD, "source": "x"}, (prompt_of("a"), " b", None)),
        ("sharegpt", {"conversations": json.dumps(SHAREGPT)}, (DIALOGUE, " d", None)),
        *(
            ("messages", {"messages": value}, expected)
            for value, expected in (
                (messages(("developer", "c"), *A_B), (f"\n\nSystem: c{A_DE[0]}", " b", None)),
                (ASKED, "DroppedRow: no response"),
                ([3], "BadRow: messages contains int, expected messages with"),
                (messages(("assistant", "b")), "DroppedRow: no prompt"),
                ("Human: a", f"BadRow: messages {NOT_JSON}"),
                ("[" * 100_000, "BadRow: messages is text, but not JSON"),
                ('[{"role": "user", "role": "x"}]', "BadRow: messages is text, but not JSON"),
                (messages(*ZERO), WEIGHT_0),
                (messages(ZERO[0], ("assistant", "b", 0.5)), "BadRow: weight is"),
            )
        ),
        # As pandas writes lists to csv.
        ("prompt", {"prompt": str(ASKED)}, f"BadRow: prompt {NOT_JSON}"),
        ("prompt", {"prompt": "a"}, (prompt_of("a"), None, None)),
        ("prompt", {"prompt": ASKED[0]}, (prompt_of("a"), None, None)),
        ("message_pairs", ULTRAFEEDBACK, DE),
        ("kto", {**GOOD_OR_BAD, "label": True}, (prompt_of("a"), " b", None)),
        ("kto", {**GOOD_OR_BAD, "label": False}, (prompt_of("a"), None, " b")),
        ("kto_text", {"prompt": "a", "completion": "b", "label": 1}, (prompt_of("a"), " b", None)),
        ("kto_text", {**KTO, "label": 0}, (A_DE[0], None, " b")),
    ],
)
def test_rows_become_records(format, row, expected):
    check(read(row, format), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_row_without_any_column_is_bad_in_every_format(format):
    assert " is missing; the row has x: " in read({"x": 1}, format)
    assert read(dict.fromkeys(columns_of(format).values()), format).endswith("is null")


# --- turns, tools and weights -----------------------------------------------------------------

CALL = {"name": "look", "arguments": {"at": "Äpfel", "n": 2}}
FUNCTION = {"type": "function", "function": CALL}
CALLING = {"role": "assistant", "content": "", "tool_calls": [FUNCTION]}
DEFINITION = {"name": "look", "description": "Look at it.", "parameters": {"type": "object"}}
DEFINED = ("tools", json.dumps([{"type": "function", "function": DEFINITION}]))


def turn_of(message):
    """Return the turn of a message that is more than a role and a text."""
    return "message", json.dumps(message, ensure_ascii=False)


def calling(call):
    return {"role": "assistant", "tool_calls": [call]}


def part(**keys):
    """Return a message of the user whose content is one part."""
    return {"role": "user", "content": [keys]}


# The second of three messages, and why the row is a bad one.
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "critic", "content": "b"}, "role 'critic', expected one of system, developer,"),
        ({"role": "user", "content": "a", "thinking": "Hm."}, "a turn of user with thoughts"),
        (part(type="image"), "a part of type 'image', expected text"),
        (part(x="y"), "a part without the key text or value; it has"),
        (part(text="a", image="1.jpg"), "a part has image, and models read text alone"),
        (part(text="a", train=False), "a part that is excluded from the loss"),
        ({**CALLING, "image_url": "1.jpg"}, "a turn has image_url, and models read text"),
        ({**CALLING, "lossMask": 0}, "a turn with lossMask, which looks like a mask of"),
        ({**CALLING, "loss": True, "weight": 0}, "a turn whose loss and weight differ"),
        ({**CALLING, "reasoningDetails": [{"text": "Hm."}]}, "a turn with reasoningDetails"),
        ({**CALLING, "think": "Hm."}, "a turn with think, expected thoughts in reasoning_con"),
        ({**CALLING, "from": "human"}, "has role and from, which differ"),
        (calling({"name": "x", "input": {"y": 1}}), "a call with input, expected name and arg"),
        (calling({"name": "x", "arguments": '{"y": 1, "y": 2}'}), "key 'y' occurs twice"),
        ({"from": "function_call", "value": "look()"}, "a call is text, but not JSON: Expecting"),
        (calling('{"x": 1}'), "a call has no name of a function"),
        (calling({"name": "x", "arguments": [{}, {}]}), "of x are 2 objects, expected one"),
        ({"role": "tool", "content": None}, "the text of a turn is NoneType, expected text"),
    ],
)
def test_turns_that_cannot_be_read_are_bad(message, reason):
    found = read({"messages": [*ASKED, message, *messages(A_B[1])]})
    assert found.startswith("BadRow: ") and reason in found


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "thinking", "name"])
@pytest.mark.parametrize("nothing", [None, [], ""])
def test_tables_have_nothing_where_a_turn_has_text_alone(key, nothing):
    turns = [*ASKED, {"role": "assistant", "content": "b", key: nothing}]
    assert read({"messages": turns, "tools": nothing}) == ([("user", "a")], " b", None)


@pytest.mark.parametrize("write", [json.dumps, lambda value: value])
def test_null_is_a_value_in_json_text_and_a_missing_key_in_a_table(write):
    call = calling({"name": "look", "arguments": write({"at": None, "n": 2})})
    tools = write([{**DEFINITION, "default": None}])
    prompt, chosen, _ = read({"messages": [*ASKED, call], "tools": tools})
    assert ('"default": null' in prompt[0][1], '"at": null' in chosen) == (write is json.dumps,) * 2


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_kept_with_their_response(key):
    first, last = ({"role": "assistant", "content": text, key: "Hm."} for text in "bd")
    prompt, chosen, _ = read({"messages": [*ASKED, first, last]})
    kept = [{"role": "assistant", "content": text, "reasoning_content": "Hm."} for text in "bd"]
    assert [json.loads(text) for text in (prompt[1][1], chosen)] == kept
    prompt, *_ = read({"messages": [*ASKED, {**first, "weight": 0}, last]})
    assert json.loads(prompt[1][1]) == {**kept[0], "weight": 0}


def test_content_parts_that_are_all_text_are_one_text():
    # A table has null where a part has no image.
    parts = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "b"}]
    turns = messages(("user", parts), ("assistant", [{"type": "text", "value": "c"}]))
    assert read({"messages": turns}) == ([("user", "a b")], " c", None)


@pytest.mark.parametrize(
    "message",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "assistant", "content": None, "function_call": CALL},
        calling(CALL),
        # OpenAI's arguments are text; a table has each argument of all rows.
        calling({"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}),
        calling({"id": None, "function": {**CALL, "arguments": {**CALL["arguments"], "x": None}}}),
    ],
)
def test_calls_of_tools_are_read_as_transformers_documents_them(message):
    turns = [*ASKED, message, {"from": "observation", "value": "b"}]
    expected = [("user", "a"), turn_of(CALLING), ("tool", "b")]
    assert read({"messages": [*turns, *messages(("assistant", "c"))]}) == (expected, " c", None)
    # A dialogue may end with a call.
    assert read({"messages": turns[:2]}) == (expected[:1], expected[1][1], None)


def test_calls_and_results_keep_what_templates_write_of_them():
    calls = {**CALLING, "content": "I look.", "tool_calls": [{"id": "c1", **FUNCTION}] * 2}
    result = {"role": "tool", "content": "b", "name": "look", "tool_call_id": "c1"}
    turns = [*ASKED, calls, result, *messages(("assistant", "c"))]
    assert read({"messages": turns})[0] == [("user", "a"), turn_of(calls), turn_of(result)]


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps([DEFINITION]),
        [{"type": "function", "function": DEFINITION}],
        [{**DEFINITION, "more": None}],
        json.dumps(DEFINITION),
    ],
)
def test_tools_are_the_first_turn(tools):
    row = {**GOOD_OR_BAD, "tools": tools}
    assert read(row) == ([DEFINED, ("user", "a")], " b", None)
    prompt, _, _ = read({**row, "system": "c"}, messages="messages", system="system")
    assert prompt == [DEFINED, ("system", "c"), ("user", "a")]
    # The column has no meaning in texts.
    assert read({**PLAIN, "tools": tools}, "plain") == read(PLAIN, "plain")


@pytest.mark.parametrize("text", [json.dumps(CALLING), "    if x:\n        return 1\n\nHuman: b "])
def test_texts_are_kept_as_they_are(text):
    whole = messages(A_B[0], ("assistant", text))
    for format, row in {
        "instruct": {"prompt": "a", "chosen": text, "rejected": text},
        "messages": {"messages": whole},
        "message_pairs": {"chosen": whole, "rejected": whole},
    }.items():
        rejected = f" {text}" if "rejected" in row else None
        assert read(row, format) == ([("user", "a")], f" {text}", rejected)
    assert read({"messages": messages(("user", text), A_B[1])})[0] == [("user", text)]


@pytest.mark.parametrize(
    "mask", [{"loss_weight": 0.0}, {"train": False}, {"train": 0, "loss": False}]
)
def test_masks_of_other_programs_are_weights(mask):
    turns = messages(*QUESTION, ("assistant", "d"))
    turns[1] |= mask
    more = {**dict.fromkeys(mask, True), "mask": None, "constraint": "short", "grade": 3}
    # Numbers and flags are not thoughts.
    more |= {"grading": "-", "thinking_elapsed_secs": 2.5, "thinkEnabled": True}
    turns = [{**more, **turn} for turn in turns]
    assert read({"messages": turns})[0] == [("user", "a"), ("untrained", "b"), ("user", "c")]
    assert read({"messages": turns[:2]}) == WEIGHT_0
    # The last response to learn is chosen.
    more = [*turns, *messages(("user", "e")), {**turns[1], "content": "f"}]
    assert read({"messages": more}) == read({"messages": turns})


@pytest.mark.parametrize("column", ["Images", "image_0", "img", "rejected_images", "audio_array"])
def test_rows_with_more_than_text_are_bad_unless_columns_name_the_column(column):
    for value in ["1.jpg", ["1.jpg"], {"bytes": b"x", "path": None}]:
        for format, row in (("messages", GOOD_OR_BAD), ("plain", PLAIN)):
            found = read({**row, column: value}, format)
            assert found.startswith(f"BadRow: the row has {column}, and models read text alone")
    for nothing in [None, "", "[]", [], {"bytes": None, "path": None}]:
        assert read({**PLAIN, column: nothing}, "plain") == read(PLAIN, "plain")
    named = {"prompt": f"{column}.caption", "chosen": "chosen"}
    row = {column: {"caption": "a"}, "chosen": "b"}
    assert read(row, "instruct", **named) == ([("user", "a")], " b", None)


def test_calls_and_earlier_responses_with_weight_0_are_not_learned():
    call = {**CALLING, "weight": 0}
    assert read({"messages": [*messages(ZERO[0]), call]}) == WEIGHT_0
    turns = messages(*ZERO, ("assistant", "d", 1))
    prompt, _, _ = read({"messages": [*turns[:2], call, *turns[2:]]})
    assert prompt == [("user", "a"), ("untrained", "b"), turn_of(call), ("user", "c")]


# --- columns and fields ---------------------------------------------------------------------

PAIRED = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
PAIR = {"chosen": "chosen", "rejected": "rejected"}
DE_ALONE = {"chosen": "d", "rejected": "e"}
FROM_Q, ROW = {"prompt": "q", "chosen": "c"}, {"q": "y", "c": "x", "a": []}
YX = (prompt_of("y"), " x", None)


@pytest.mark.parametrize(
    ("format", "row", "columns", "expected"),
    [
        # A prompt column is not repeated; responses may be texts.
        ("message_pairs", {**ULTRAFEEDBACK, "prompt": "a"}, PAIRED, DE),
        ("message_pairs", {**DE_ALONE, "prompt": messages(*QUESTION)}, PAIRED, DE),
        # The rejected response alone, as in ms-swift's rows. Which turn of two it follows is
        # unknown.
        *(
            ("message_pairs", {**ULTRAFEEDBACK, "rejected": rejected}, PAIR, expected)
            for rejected, expected in (
                ("e", DE),
                (messages(("assistant", "e")), DE),
                (messages(*QUESTION[1:2], ("assistant", "e")), DIFFER),
            )
        ),
        ("message_pairs", {**DE_ALONE, "prompt": "a", "rejected": ASKED}, PAIRED, "BadRow: "),
        # Joined by newlines without the empty ones.
        (
            "instruct",
            {"instruction": "Translate.", "empty": "", "input": "cat", "null": None, "output": "a"},
            {"prompt": ["instruction", "empty", "input", "null"], "chosen": "output"},
            (prompt_of("Translate.\ncat"), " a", None),
        ),
        # A column whose name has dots in it.
        ("instruct", {**ROW, "a.b": "x"}, {**FROM_Q, "chosen": "a.b"}, YX),
        # Paths without a value. The rejected response is optional.
        ("instruct", ROW, {**FROM_Q, "chosen": "a.0.b"}, "DroppedRow: no chosen"),
        ("instruct", ROW, {**FROM_Q, "rejected": "a.0.b"}, YX),
        ("dialogues", PLAIN | {"a": []}, PAIR | {"rejected": "a.0"}, "BadRow: rejected is None"),
        ("instruct", ROW, {**FROM_Q, "chosen": "c.0"}, "BadRow: c.0: str has no key 0"),
        # A misspelled key would drop every rejected response.
        ("instruct", {**ROW, "a": [{"x": 1}]}, {**FROM_Q, "rejected": "a.0.y"}, "BadRow: a.0.y: "),
    ],
)
def test_columns_of_the_config_are_read(format, row, columns, expected):
    check(read(row, format, **columns), expected)


def test_kept_cells_are_json():
    row = {"solution": "四", "meta": {"tests": ["assert x", 1.5, True], "none": None}}
    cells = kept_cells(row, ["solution", "meta.tests", "meta.none", "meta.absent"])
    assert cells == ['"四"', '["assert x", 1.5, true]', "null", "null"]


def test_kept_columns_have_the_last_key_of_their_path_or_a_name_of_their_own():
    expected = {"solution": "solution", "tests": "meta.tests"}
    assert named_columns(["solution", "meta.tests"]) == expected
    assert named_columns({"solution": "answer"}) == {"solution": "answer"}
    with pytest.raises(ValueError, match="two columns have the name tests"):
        named_columns(["meta.tests", "tests"])


BRIEF, TOOL, RESULT = ("system", "Be brief."), ("tools", "[]"), ("message", "{}")
MARKER = "\n\nAssistant:"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([("user", "{x}?")], [BRIEF, ("user", "Q: {x}? A:")]),
        ([("system", "S"), ("user", "1")], [("system", "S"), ("user", "Q: 1 A:")]),
        # The definitions of tools come first, and the last turn may be a result.
        ([TOOL, ("user", "1"), RESULT], [TOOL, BRIEF, ("user", "Q: 1 A:"), RESULT]),
        # A plain prompt that ends with the marker of the response.
        ([("unmarked", f"1{MARKER}")], [BRIEF, ("unmarked", f"Q: 1 A:{MARKER}")]),
    ],
)
def test_instructions_around_a_prompt(prompt, expected):
    assert with_instructions(prompt, "Q: {prompt} A:", "Be brief.") == expected
    assert with_instructions(prompt, None, None) == prompt
