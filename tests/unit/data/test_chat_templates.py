"""Chat templates that do not end, take too much memory or fail."""

import resource
import signal

import pytest
from jinja2 import TemplateError

from snakechat.data import chat_templates
from snakechat.data.chat_templates import render_messages
from snakechat.workflow.errors import InputError

LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def render(tokenizer, monkeypatch):
    """A function that renders MESSAGES by a template, within low limits."""
    monkeypatch.setattr(chat_templates, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(chat_templates, "MAX_BYTES", 100 << 20)
    monkeypatch.setattr(tokenizer, "name_or_path", "models/mine", raising=False)

    def call(template):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return render_messages(tokenizer, MESSAGES)

    return call


def test_template_within_the_limits(render):
    assert render("{{ messages[0].content }}!") == "Hello!"
    with pytest.raises(TemplateError, match="no"):
        render("{{ raise_exception('no') }}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "did not end"),
        # Single steps without end.
        ("{{ 'x'.ljust(10 ** 10) }}", "did not end"),
        ("{{ 'x' * 10 ** 10 }}", "did not end"),
        # Numbers of unlimited size, which nothing could interrupt.
        ("{{ (9 ** (9 ** 9))|string|length }}", "fails: OverflowError"),
        ("{{ ((9 ** 9000) ** 9000)|string|length }}", "fails: OverflowError"),
        ("{{ 12|round(-10 ** 9) }}", "fails: OverflowError: the result of round is too large"),
        ("{{ messages[0].content + 1 }}", "fails: TypeError"),
        # Another text at another time.
        ("{{ strftime_now('%Y') }}", "writes the current day"),
        ("{{ [1, 2, 3] | random }}", "writes random values"),
        ("{{ lipsum() }}", "writes random values"),
    ],
)
def test_template_without_end_or_that_fails_is_an_error(render, template, reason):
    with pytest.raises(InputError, match=f"^models/mine: the chat template {reason}"):
        render(template)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert render("{{ messages[0].content }} {{ 1.234|round(1) }}") == "Hello 1.2"
