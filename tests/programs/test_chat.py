"""The program that talks: how it is typed, what it prints, how it is stopped."""

import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from types import SimpleNamespace

import pytest

import chat
from conftest import ROOT
from snakechat.evaluation.chat_session import load
from support.talking import ask, make_folders, say


@pytest.fixture
def folders(tokenizer, tmp_path):
    """Folders of models to talk to."""
    return make_folders(tokenizer, tmp_path)


@pytest.fixture
def dialogue(folders):
    """A conversation in the Human/Assistant form."""
    return load(folders["rlhf"])


@pytest.fixture
def talk(monkeypatch, capsys):
    """A function that runs the program with lines on standard input: (output, notes, exit code)."""

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


def responses_to(folder, *questions, seed=1234):
    """What a model responses in a row."""
    conversation = load(folder)
    settings = seed, 0.7, 20
    return ["".join(ask(conversation, question, settings)) for question in questions]


def test_lines_of_standard_input_are_responded(folders, talk):
    lines = [b"Why?", b"", b"  And how? "]
    output, notes, code = talk(folders["rlhf"], "--max-tokens", 20, lines=lines)
    responses = responses_to(folders["rlhf"], "Why?", "And how?")
    assert output == "".join(chat.escaped(response) + "\n" for response in responses)
    assert (notes, code) == ("", 0)
    assert all(responses) and responses[0] != responses[1]


def test_commands_do_what_they_say(folders, talk):
    folder = folders["rlhf"]
    lines = [b"/help", b"Why?", b"/reset", b"Why?", b"/reset", b"/seed 7", b"Why?", b"/reset"]
    lines += [b"/system Be brief.", b"Why?", b"/quit", b"Why?"]
    output, notes, _ = talk(folder, "--max-tokens", 20, lines=lines)
    (first,), (second,) = responses_to(folder, "Why?"), responses_to(folder, "Why?", seed=7)
    conversation = load(folder)
    conversation.system = "Be brief."
    third = "".join(ask(conversation, "Why?", (7, 0.7, 20)))
    responses = [first, first, second, third]
    assert output == "".join(chat.escaped(response) + "\n" for response in responses)
    assert notes.startswith(chat.HELP)
    assert notes.splitlines()[-4:] == [
        "All turns are forgotten.",
        "Seed: 7",
        "All turns are forgotten.",
        "Before all turns: Be brief.",
    ]


def test_two_models_response_one_under_the_other(folders, talk):
    rlhf, sft = folders["rlhf"], folders["sft"]
    output, _, code = talk(rlhf, "--compare", sft, "--max-tokens", 20, lines=[b"Why?", b"How?"])
    responses = [responses_to(folder, "Why?", "How?") for folder in (rlhf, sft)]
    expected = [
        f"{folder}:\n{chat.escaped(found[number])}\n\n"
        for number in (0, 1)
        for folder, found in zip((rlhf, sft), responses, strict=True)
    ]
    assert (output, code) == ("".join(expected), 0)
    assert responses[0] != responses[1]


def test_turns_that_are_left_out_are_told(folders, talk):
    _, notes, code = talk(folders["rlhf"], "--max-tokens", 64, lines=[b"Why? " * 6] * 9)
    note = f"note: {folders['rlhf']} has positions for 128 tokens: its oldest 2 turns are left out"
    assert note in notes.splitlines()
    assert code == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("over\rwritten\x08\x7f", "over\\rwritten\\x08\\x7f"),
        ("\x9b2J\x00", "\\x9b2J\\x00"),
        ("a\u202egnp.exe\u2066", "a\\u202egnp.exe\\u2066"),
        ("lines\nand\ttabs, 天空 é 👩\u200d🚀 [bold] \\x1b", None),
    ],
)
def test_control_characters_are_told_and_not_obeyed(folders, talk, monkeypatch, text, shown):
    conversation = load(folders["rlhf"])
    say(conversation, f" {text}.")
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: conversation)
    output, _, _ = talk(folders["rlhf"], lines=[b"Why?"])
    assert output == f"{shown or text}.\n"
    # What the model has written, it reads again as it was.
    assert conversation.turns[-1] == ("assistant", f"{text}.")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"/nonsense", "error: /nonsense is no command: /help tells them"),
        (b"/seed -1", "error: /seed: '-1' is not a whole number from 0 on"),
        (b"why " * 200, "but positions for 128: ask in fewer words"),
    ],
)
def test_a_line_that_cannot_be_responded_ends_a_pipe(folders, talk, line, told):
    output, _, code = talk(folders["rlhf"], lines=[line, b"Why?"])
    assert output == "" and told in code


def test_bytes_that_are_no_text_are_no_end(folders, talk):
    output, _, code = talk(folders["rlhf"], "--max-tokens", 20, lines=[b"Caf\xe9?"])
    assert code == 0 and output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seed", str(1 << 63)], "--seed: '9223372036854775808' is not a whole number from 0 on"),
        (["--temperature", "nan"], "--temperature: 'nan' is not a number from 0 on"),
        (["--max-tokens", "0"], "--max-tokens: '0' is not a whole number from 1 on"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(talk, arguments, told):
    _, notes, code = talk("x", *arguments)
    assert code == 2 and told in notes


def test_a_wrong_folder_is_told_in_one_line(tmp_path, talk):
    assert talk(tmp_path / "x") == ("", "", f"error: there is no folder {tmp_path / 'x'}")


def stop_first(conversation):
    """Have Ctrl-C pressed in a conversation's first response, behind its first piece."""
    response, presses = conversation.response, [KeyboardInterrupt]

    def answer_once_stopped(*arguments):
        *arguments, show = arguments

        def shown(text):
            show(text)
            if presses:
                raise presses.pop()

        return response(*arguments, shown)

    conversation.response = answer_once_stopped


def test_ctrl_c_stops_a_response_at_a_terminal(dialogue, monkeypatch, capsys):
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: dialogue)
    settings = {"seed": 1, "temperature": 0, "max_tokens": 40}
    program = chat.Chat(SimpleNamespace(model="x", compare=None, **settings))
    program.is_terminal = True
    lines = iter(["One?", "/reset", "Two?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    say(dialogue, " Yes indeed.")
    stop_first(dialogue)
    program.talk()
    first, second = capsys.readouterr().out.splitlines()
    assert "Yes indeed.".startswith(first) and first != "Yes indeed."
    # The model's script goes on where it was stopped: only that there is a response matters.
    assert second and dialogue.turns[0] == ("user", "Two?")


def test_ctrl_c_ends_a_pipe(folders, talk, monkeypatch):
    conversation = load(folders["rlhf"])
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: conversation)
    say(conversation, " Yes indeed.")
    stop_first(conversation)
    output, _, code = talk(folders["rlhf"], lines=[b"One?", b"Two?"])
    assert code == 130 and "Yes indeed.".startswith(output)


# Makes standard input the terminal of this process, which Ctrl-C goes to, and becomes a program.
# (preexec_fn would fork the process of the tests, which may be too large for that.)
TAKE = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """The program at a terminal of its own."""

    def __init__(self, *arguments):
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE, ROOT / "scripts/chat.py", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""},
        )
        os.close(theirs)

    def resize(self, columns):
        """Give it another width."""
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def type(self, text):
        """Press the keys of a text."""
        os.write(self.ours, text.encode())

    def until(self, text, seconds=60):
        """What is shown until a text is; fails where it is not shown in time."""
        shown, deadline = "", time.monotonic() + seconds
        while text not in shown:
            ready, _, _ = select.select([self.ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, shown
            shown += os.read(self.ours, 4096).decode(errors="replace")
        return shown


def test_at_a_terminal(folders):
    rlhf, sft = str(folders["rlhf"]), str(folders["sft"])
    terminal = Terminal(rlhf, "--compare", sft, "--max-tokens", "5")
    terminal.resize(79)
    assert f"{rlhf}: " in terminal.until("\r\n> ")
    terminal.type("Why?\n")
    under = terminal.until(f"{sft}:\r\n")
    assert under.index("Why?") < under.index(f"{rlhf}:\r\n")
    terminal.resize(300)
    terminal.type("/nonsense\n")
    terminal.until("error: /nonsense is no command: /help tells them")
    terminal.type("Why?\n")
    # The cursor is shown again when both have responded.
    lines = terminal.until("\x1b[?25h").splitlines()
    assert any(rlhf in line and sft in line for line in lines)
    terminal.type("\x03")
    assert terminal.process.wait(30) == 130
