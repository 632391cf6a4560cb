"""chat.py: input, commands, output and interruption."""

import io
from types import SimpleNamespace

import pytest

import chat
from snakechat.evaluation.chat_session import load
from snakechat.workflow.printable import printable_text
from support.talking import (  # noqa: F401
    chat_folders,
    dialogue_session,
    pieces_of_response,
    script_response,
)


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
    lines += [b"/system Be brief.", b"Why?", b"/quit", b"Why?"]
    output, notes, _ = run_chat(folder, "--max-tokens", 20, lines=lines)
    plain, brief = load(folder), load(folder)
    brief.system = "Be brief."
    first, last = (
        "".join(pieces_of_response(session, "Why?", (1234, 0.7, 20))) for session in (plain, brief)
    )
    assert output == "".join(printable_text(text) + "\n" for text in (first, first, last))
    assert notes.startswith(chat.HELP)
    assert notes.splitlines()[-2:] == ["New conversation.", "System prompt: Be brief."]


def test_control_characters_are_escaped(dialogue, run_chat, monkeypatch):
    script_response(dialogue, " \x1b[31mred\nand\ttabs, 天空 é 👩\u200d🚀.")
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: dialogue)
    output, _, _ = run_chat("x", lines=[b"Why?"])
    assert output == "\\x1b[31mred\nand\ttabs, 天空 é 👩\u200d🚀.\n"
    # The session keeps the original text.
    assert dialogue.turns[-1] == ("assistant", "\x1b[31mred\nand\ttabs, 天空 é 👩\u200d🚀.")


def test_an_invalid_line_ends_a_pipe(folders, run_chat):
    output, _, code = run_chat(folders["rlhf"], lines=[b"/nonsense", b"Why?"])
    assert output == "" and code == "error: unknown command /nonsense: /help lists the commands"


def test_invalid_arguments_are_usage_errors(run_chat):
    _, notes, code = run_chat("x", "--seed", 1 << 63)
    assert code == 2 and f"--seed: expected an integer of at least 0, found '{1 << 63}'" in notes
    _, notes, code = run_chat("x", "--temperature", -1)
    assert code == 2 and "--temperature: expected a number of at least 0, found -1" in notes


def interrupt_first_response(session):
    """Simulate Ctrl-C after the first piece of the first response of a session."""
    respond, interrupts = session.respond, [KeyboardInterrupt]

    def respond_interrupted(*arguments):
        *arguments, show = arguments

        def show_and_interrupt(text):
            show(text)
            if interrupts:
                raise interrupts.pop()

        return respond(*arguments, show_and_interrupt)

    session.respond = respond_interrupted


def test_ctrl_c_stops_a_response_on_a_terminal(dialogue, monkeypatch, capsys):
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: dialogue)
    settings = {"seed": 1, "temperature": 0, "max_tokens": 40}
    program = chat.Chat(SimpleNamespace(model="x", **settings))
    program.is_terminal = True
    # An error does not end a terminal.
    lines = iter(["One?", "/reset", "/nonsense", "Two?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    script_response(dialogue, " Yes indeed.")
    interrupt_first_response(dialogue)
    program.run()
    printed = capsys.readouterr()
    assert "error: unknown command /nonsense: /help lists the commands" in printed.err
    first, second = printed.out.splitlines()
    assert "Yes indeed.".startswith(first) and first != "Yes indeed."
    # The scripted text continues where it was stopped, so that only its presence is checked.
    assert second and dialogue.turns[0] == ("user", "Two?")


def test_ctrl_c_ends_a_pipe(dialogue, run_chat, monkeypatch):
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: dialogue)
    script_response(dialogue, " Yes indeed.")
    interrupt_first_response(dialogue)
    output, _, code = run_chat("x", lines=[b"One?", b"Two?"])
    assert code == 130 and "Yes indeed.".startswith(output) and output != "Yes indeed."
    # What was shown is part of the conversation.
    assert dialogue.turns == [("user", "One?"), ("assistant", output)]
