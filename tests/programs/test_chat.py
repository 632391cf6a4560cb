"""chat.py: input, commands, output and interruption."""

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
from snakechat.workflow.printable import printable_text
from support.talking import make_folders, pieces_of_response, script_response


@pytest.fixture
def folders(tokenizer, tmp_path):
    """Folders of chat models by name."""
    return make_folders(tokenizer, tmp_path)


@pytest.fixture
def dialogue(folders):
    """A session with the dialogue template."""
    return load(folders["rlhf"])


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


def responses_to(folder, *prompts, seed=1234):
    """The responses of a model to prompts in one session."""
    session = load(folder)
    settings = seed, 0.7, 20
    return ["".join(pieces_of_response(session, prompt, settings)) for prompt in prompts]


def test_each_line_of_standard_input_gets_a_response(folders, run_chat):
    lines = [b"Why?", b"", b"  And how? "]
    output, notes, code = run_chat(folders["rlhf"], "--max-tokens", 20, lines=lines)
    responses = responses_to(folders["rlhf"], "Why?", "And how?")
    assert output == "".join(printable_text(response) + "\n" for response in responses)
    assert (notes, code) == ("", 0)
    assert all(responses) and responses[0] != responses[1]


def test_commands(folders, run_chat):
    folder = folders["rlhf"]
    lines = [b"/help", b"Why?", b"/reset", b"Why?", b"/reset", b"/seed 7", b"Why?", b"/reset"]
    lines += [b"/system Be brief.", b"Why?", b"/quit", b"Why?"]
    output, notes, _ = run_chat(folder, "--max-tokens", 20, lines=lines)
    (first,), (second,) = responses_to(folder, "Why?"), responses_to(folder, "Why?", seed=7)
    session = load(folder)
    session.system = "Be brief."
    third = "".join(pieces_of_response(session, "Why?", (7, 0.7, 20)))
    responses = [first, first, second, third]
    assert output == "".join(printable_text(response) + "\n" for response in responses)
    assert notes.startswith(chat.HELP)
    assert notes.splitlines()[-4:] == [
        "New conversation.",
        "Seed: 7",
        "New conversation.",
        "System prompt: Be brief.",
    ]


def test_two_models_respond_one_below_the_other(folders, run_chat):
    rlhf, sft = folders["rlhf"], folders["sft"]
    output, _, code = run_chat(rlhf, "--compare", sft, "--max-tokens", 20, lines=[b"Why?", b"How?"])
    responses = [responses_to(folder, "Why?", "How?") for folder in (rlhf, sft)]
    expected = [
        f"{folder}:\n{printable_text(texts[number])}\n\n"
        for number in (0, 1)
        for folder, texts in zip((rlhf, sft), responses, strict=True)
    ]
    assert (output, code) == ("".join(expected), 0)
    assert responses[0] != responses[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("\x9b2J\x00", "\\x9b2J\\x00"),
        ("a\u202egnp.exe\u2066", "a\\u202egnp.exe\\u2066"),
        ("lines\nand\ttabs, 天空 é 👩\u200d🚀 [bold] \\x1b", None),
    ],
)
def test_control_characters_are_escaped(folders, run_chat, monkeypatch, text, shown):
    session = load(folders["rlhf"])
    script_response(session, f" {text}.")
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: session)
    output, _, _ = run_chat(folders["rlhf"], lines=[b"Why?"])
    assert output == f"{shown or text}.\n"
    # The session keeps the original text.
    assert session.turns[-1] == ("assistant", f"{text}.")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"/nonsense", "error: unknown command /nonsense: /help lists the commands"),
        (b"/seed -1", "error: /seed: expected an integer of at least 0, found '-1'"),
    ],
)
def test_an_invalid_line_ends_a_pipe(folders, run_chat, line, message):
    output, _, code = run_chat(folders["rlhf"], lines=[line, b"Why?"])
    assert output == "" and message in code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", str(1 << 63)], "--seed: expected an integer of at least 0, found '92"),
        (["--temperature", "nan"], "--temperature: expected a number of at least 0, found 'nan'"),
        (["--path", "x"], "the model is an argument without an option: chat.py output/rlhf/RECIPE"),
    ],
)
def test_invalid_arguments_are_usage_errors(run_chat, arguments, message):
    _, notes, code = run_chat("x", *arguments)
    assert code == 2 and message in notes


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
    program = chat.Chat(SimpleNamespace(model="x", compare=None, **settings))
    program.is_terminal = True
    lines = iter(["One?", "/reset", "Two?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    script_response(dialogue, " Yes indeed.")
    interrupt_first_response(dialogue)
    program.run()
    first, second = capsys.readouterr().out.splitlines()
    assert "Yes indeed.".startswith(first) and first != "Yes indeed."
    # The scripted text continues where it was stopped, so that only its presence is checked.
    assert second and dialogue.turns[0] == ("user", "Two?")


def test_ctrl_c_ends_a_pipe(folders, run_chat, monkeypatch):
    session = load(folders["rlhf"])
    monkeypatch.setattr("snakechat.evaluation.chat_session.load", lambda folder: session)
    script_response(session, " Yes indeed.")
    interrupt_first_response(session)
    output, _, code = run_chat(folders["rlhf"], lines=[b"One?", b"Two?"])
    assert code == 130 and "Yes indeed.".startswith(output)


# Makes standard input the controlling terminal, so that Ctrl-C works, and executes a program.
# preexec_fn would fork the process of the tests, which may be too large for that.
WITH_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """chat.py on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITH_TERMINAL, ROOT / "scripts/chat.py", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""},
        )
        os.close(theirs)
        self.unread = ""

    def resize(self, columns):
        """Set the width."""
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def type(self, text):
        """Send a text."""
        os.write(self.ours, text.encode())

    def interrupt(self):
        """Press Ctrl-C at the prompt; return the exit code.

        Python notices a Ctrl-C between the display of the prompt and the wait for a key only at
        the next key.
        """
        for _ in range(6):
            self.type("\x03")
            try:
                return self.process.wait(10)
            except subprocess.TimeoutExpired:
                pass
        raise AssertionError("the program is still running")

    def until(self, text, seconds=60):
        """Return the unread output up to a text; fail if the text does not appear in time."""
        deadline = time.monotonic() + seconds
        while text not in self.unread:
            ready, _, _ = select.select([self.ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, self.unread
            self.unread += os.read(self.ours, 4096).decode(errors="replace")
        shown, found, self.unread = self.unread.partition(text)
        return shown + found


def test_on_a_terminal(folders):
    rlhf, sft = str(folders["rlhf"]), str(folders["sft"])
    terminal = Terminal(rlhf, "--compare", sft, "--max-tokens", "5")
    terminal.resize(79)
    assert f"{rlhf}: " in terminal.until("\r\n> ")
    terminal.type("Why?\n")
    under = terminal.until(f"{sft}:\r\n")
    assert under.index("Why?") < under.index(f"{rlhf}:\r\n")
    terminal.resize(300)
    terminal.type("/nonsense\n")
    terminal.until("error: unknown command /nonsense: /help lists the commands")
    terminal.type("Why?\n")
    # rich shows the cursor again after both responses.
    lines = terminal.until("\x1b[?25h").splitlines()
    assert any(rlhf in line and sft in line for line in lines)
    # At the prompt, Ctrl-C ends the program; before it, Ctrl-C ends a response.
    terminal.until("> ")
    assert terminal.interrupt() == 130
