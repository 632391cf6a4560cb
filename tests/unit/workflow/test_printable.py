"""What is shown of hostile text: no control characters, limited length."""

import random

from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.printable import printable_line, printable_text

HOSTILE = "\x1b[31m\r\x07\x9b2J\u202eabc\u2066\udcff\x7f"


def test_control_characters_are_escaped():
    shown = printable_line(f"{HOSTILE}\n\t")
    assert shown == ("\\x1b[31m\\r\\x07\\x9b2J\\u202eabc\\u2066\\udcff\\x7f\\n\\t")
    assert printable_text("a\n\tb\x1b") == "a\n\tb\\x1b"


def test_any_text_is_shown_on_one_line():
    # Each character below the first emoji, surrogates included, and some of the others.
    numbers = [*range(0x1F000), *range(0x1F000, 0x110000, 97)]
    random.Random(1).shuffle(numbers)
    for start in range(0, len(numbers), 500):
        text = "".join(map(chr, numbers[start : start + 500]))
        shown = printable_line(text)
        assert len(shown.splitlines()) == 1 and "\x1b" not in shown
        assert shown == printable_line(shown)
        shown.encode()
        printable_text(text).encode()


def test_long_messages_are_shortened_in_the_middle():
    shown = printable_line("a" * 3_000_000 + "b" * 3_000_000)
    assert shown.startswith("a" * 1000 + " [5,998,000 characters] b")
    assert len(shown) < 2100


def test_errors_and_warnings_are_printable(capsys):
    assert str(InputError(HOSTILE * 1000)).isprintable()
    warn(f"file {HOSTILE}")
    warning = capsys.readouterr().err
    assert warning.startswith("warning: file \\x1b[31m") and warning.count("\n") == 1
