"""Chat templates that do not end, take too much memory or fail."""

import signal
import subprocess
import sys

import pytest

from conftest import ROOT
from launch import describe_kill
from snakechat.data.chat_templates import TurnsRejected, render_turns
from snakechat.data.memory_limit import limited_memory
from snakechat.workflow.errors import InputError

TURNS = [("user", "Hello")]
PROGRAM = """
import sys
from transformers import AutoTokenizer
from snakechat.data import chat_templates, tokenizers
chat_templates.MAX_SECONDS = 0.2
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for template in sys.argv[2:]:
    tokenizer.chat_template = template
    chat_templates.render_turns(tokenizer, [("user", "Hello")])
"""


@pytest.fixture
def render(tokenizer, monkeypatch):
    """A function that renders TURNS by a template, within 300 MB."""
    monkeypatch.setattr(tokenizer, "name_or_path", "models/mine", raising=False)

    def call(template):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with limited_memory(300 << 20):
            return render_turns(tokenizer, TURNS)

    return call


def test_a_template_that_ends_is_rendered(render):
    assert render("{{ messages[0].content }} {{ 1.234|round(1) }}") == "Hello 1.2"
    with pytest.raises(TurnsRejected, match="the chat template rejects turns of user: no"):
        render("{{ raise_exception('no') }}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x'.ljust(10 ** 10) }}", "takes too much memory"),
        ("{{ messages[0].content + 1 }}", "fails: TypeError"),
        # Another text at another time.
        ("{{ strftime_now('%Y') }}", "writes the current day"),
        ("{{ [1, 2, 3] | random }}", "writes random values"),
        ("{{ lipsum() }}", "writes random values"),
    ],
)
def test_a_template_that_fails_is_an_error(render, template, reason):
    with pytest.raises(InputError, match=f"^models/mine: the chat template {reason}"):
        render(template)


# Numbers of unlimited size, whose computation Python cannot interrupt: in a constant, and in a row.
@pytest.mark.parametrize(
    "endless", ["{{ 9 ** (9 ** 9) }}", "{{ 9 ** (9 ** (messages | length + 8)) }}"]
)
def test_a_template_without_end_ends_the_process_with_one_line(endless, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-c", PROGRAM, tmp_path, "{{ messages }}", endless]
    process = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, timeout=100)
    assert (process.returncode, process.stderr) == (-signal.SIGPROF, b"")
    line = describe_kill("scripts/fetch_model.py", signal.SIGPROF)
    assert line.startswith("fetch_model.py: a chat template did not end: replace the template")
