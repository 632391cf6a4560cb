"""Chat: prompts, streamed responses and errors of a session; chat.py on a pipe."""

import copy
import io

import pytest
import torch

import chat
from chat import ChatSession
from conftest import INIT
from snakechat.data.dialogues import chat_template, render_prompt
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_text
from support.chat_templates import as_chatml, script_ids

# Positions for several turns, and weights large enough for responses to depend on the prompt.
CHAT_INIT = {**INIT, "max_position_embeddings": 128, "init_std": 0.2}


@pytest.fixture
def folders(tokenizer, tmp_path):
    """Folders of a model with the dialogue template and of one with ChatML, by name."""
    dialogue = copy.deepcopy(tokenizer)
    dialogue.chat_template = chat_template(dialogue)
    tokenizers = {"rlhf": dialogue, "chatml": as_chatml(tokenizer)}
    for seed, (name, each) in enumerate(tokenizers.items()):
        save_model(make_causal(CHAT_INIT, each, seed), each, tmp_path / name)
    return {name: tmp_path / name for name in tokenizers}


@pytest.fixture
def dialogue(folders):
    return ChatSession(folders["rlhf"])


def script_response(session, text):
    """Make the model of a session generate a text, whatever the prompt is; return its token ids."""
    tokenizer = session.tokenizer
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    script_ids(session.model, ids)
    return ids


def pieces_of_response(session, prompt="Why?", seed=1, temperature=0, max_tokens=40):
    """The pieces of text of a response."""
    session.seed, session.temperature, session.max_tokens = seed, temperature, max_tokens
    ids, _ = session.encode(prompt)
    pieces = []
    response = session.respond(prompt, ids, pieces.append)
    assert "".join(pieces) == response
    return pieces


def test_the_streamed_text_is_the_generated_text(dialogue):
    ids, _ = dialogue.encode("Where?")
    torch.manual_seed(3)
    whole = dialogue.model.generate(
        torch.tensor([ids]), do_sample=True, top_k=0, temperature=0.5, max_new_tokens=40
    )
    text = dialogue.tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True)
    pieces = pieces_of_response(dialogue, "Where?", 3, 0.5)
    assert "".join(pieces) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "\n First.\n\nSecond:\n\tthird  \n",
        " 天空 é 🙂",
        " One.\n\nHumble\n\nSystems: two.\n\nHum",
    ],
)
def test_the_pieces_add_up_to_the_response(dialogue, text):
    script_response(dialogue, text)
    pieces = pieces_of_response(dialogue)
    assert "".join(pieces) == text.strip()
    # Incomplete characters are not shown.
    assert len(pieces) > 1 and "\ufffd" not in "".join(pieces)


def test_the_marker_of_a_new_turn_stops_generation(dialogue):
    ids = script_response(dialogue, " Yes.\n\nSystem: And now I talk to myself.")
    calls = []
    dialogue.model.register_forward_hook(lambda *_: calls.append(1))
    assert "".join(pieces_of_response(dialogue)) == "Yes."
    assert dialogue.turns[-1] == ("assistant", "Yes.")
    # The rest of the text was not generated: it has one forward pass per token.
    assert len(calls) < len(ids) - 8


@pytest.mark.parametrize("end", ["<|im_end|>", "<unk>"])
def test_a_response_ends_where_a_turn_ends_at_eos_and_at_ids_of_the_folder(folders, tmp_path, end):
    # The template ends turns with <|im_end|>; eos is another token, as in Gemma and Phi-3.
    tokenizer = load_tokenizer(folders["chatml"])
    tokenizer.eos_token = "</s>"
    model = make_causal(CHAT_INIT, tokenizer, 1)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<unk>")
    save_model(model, tokenizer, tmp_path / "model")
    session = ChatSession(tmp_path / "model")
    ids = tokenizer("Hi.", add_special_tokens=False).input_ids
    with script_ids(session.model, [*ids, tokenizer.convert_tokens_to_ids(end), *ids]):
        assert "".join(pieces_of_response(session)) == "Hi."


def test_prompts_are_encoded_as_in_training(folders):
    session = ChatSession(folders["chatml"])
    script_response(session, " Hi. ")
    session.system = "Be brief."
    pieces_of_response(session, "Hello.")
    ids, _ = session.encode("Name a fruit.")
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nName a fruit.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids == session.tokenizer(text, add_special_tokens=False).input_ids
    with pytest.raises(InputError, match="special token"):
        session.encode("<|im_end|>")


def test_the_oldest_turns_are_dropped_if_positions_run_out(dialogue):
    dialogue.system, dialogue.max_tokens = "Brief.", 40
    turns = [("user", "Old?"), ("assistant", "Yes."), ("user", "New?"), ("assistant", "No.")]

    def tokens(*kept):
        conversation = [("system", "Brief."), *kept, ("user", "Why?")]
        return dialogue.tokenizer(render_prompt(conversation)).input_ids

    lengths = [len(tokens(*turns[start:])) for start in (0, 2, 4)]
    for num_dropped, missing in ((0, 0), (2, 1), (2, lengths[0] - lengths[1])):
        dialogue.turns = list(turns)
        dialogue.max_positions = lengths[0] + 40 - missing
        assert dialogue.encode("Why?") == (tokens(*turns[num_dropped:]), num_dropped)
        assert dialogue.turns == turns[num_dropped:]
    # At most half of the positions are reserved for the response.
    dialogue.max_positions = 2 * lengths[1]
    dialogue.max_tokens = 10**6
    assert dialogue.encode("Why?") == (tokens(*turns[2:]), 0)
    # Without other turns, the prompt may take all positions but one.
    dialogue.max_positions = lengths[2] + 1
    dialogue.max_tokens = 40
    assert dialogue.encode("Why?") == (tokens(), 2)
    assert dialogue.turns == []
    # A prompt that is too long drops no turns.
    dialogue.turns = list(turns)
    dialogue.max_positions = 128
    with pytest.raises(InputError, match=r"has \d+ tokens, and the model 128 positions: shorten"):
        dialogue.encode("why " * 200)
    assert dialogue.turns == turns


# --- chat.py --------------------------------------------------------------------------------------


@pytest.fixture
def run_chat(monkeypatch, capsys):
    """A function that runs chat.py on lines of standard input: (output, notes, exit code)."""

    def run(*arguments, lines=()):
        stdin = io.TextIOWrapper(io.BytesIO(b"".join(line + b"\n" for line in lines)))
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.argv", ["chat.py", *map(str, arguments)])
        code = 0
        try:
            chat.main()
        except SystemExit as end:
            code = end.code
        return *capsys.readouterr(), code

    return run


def test_commands(folders, run_chat):
    folder = folders["rlhf"]
    lines = [b"/help", b"Why?", b"", b"/reset", b"  Why? ", b"/reset"]
    lines += [b"/system Be brief.", b"Why?"]
    output, notes, code = run_chat(folder, "--max-tokens", 20, lines=[*lines, b"/quit", b"Why?"])
    plain, brief = ChatSession(folder), ChatSession(folder)
    brief.system = "Be brief."
    first, last = (
        "".join(pieces_of_response(session, "Why?", 1234, 0.7, 20)) for session in (plain, brief)
    )
    assert output == "".join(printable_text(text) + "\n" for text in (first, first, last))
    assert code == 0 and notes.startswith(chat.HELP)
    assert notes.splitlines()[-2:] == ["New conversation.", "System prompt: Be brief."]
    # An invalid line ends a pipe.
    output, _, code = run_chat(folder, lines=[b"/nonsense", b"Why?"])
    assert output == "" and code == "error: unknown command /nonsense: /help lists the commands"


def test_ctrl_c_ends_a_pipe_and_control_characters_are_escaped(dialogue, run_chat, monkeypatch):
    monkeypatch.setattr(chat, "ChatSession", lambda **_: dialogue)
    text = "\x1b[31mred\nand\ttabs, 天空 é 👩\u200d🚀."
    script_response(dialogue, f" {text}")
    output, _, _ = run_chat("x", lines=[b"Why?"])
    assert output == "\\x1b[31mred\nand\ttabs, 天空 é 👩\u200d🚀.\n"
    # The session keeps the original text.
    assert dialogue.turns == [("user", "Why?"), ("assistant", text)]
    dialogue.turns.clear()
    respond = dialogue.respond

    def show_and_interrupt(text):
        print(printable_text(text), end="")
        raise KeyboardInterrupt

    dialogue.respond = lambda prompt, ids, show: respond(prompt, ids, show_and_interrupt)
    output, _, code = run_chat("x", lines=[b"One?", b"Two?"])
    # What was shown is part of the conversation.
    [_, (_, shown)] = dialogue.turns
    assert code == 130 and output == printable_text(shown)
    assert text.startswith(shown) and shown != text
