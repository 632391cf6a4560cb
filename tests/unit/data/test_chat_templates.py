"""Chat templates that do not end, take too much memory or fail."""

import resource
import signal

import pytest
from jinja2 import TemplateError

from snakechat.data import chat_templates
from snakechat.data.chat_templates import render_messages
from snakechat.workflow.errors import InputError

LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = (
    "{% set n = namespace(s='a' * 1000000) %}"
    "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)
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


@pytest.mark.parametrize("template", [LOOP, DOUBLED], ids=["loop", "memory"])
def test_template_without_end_is_an_error(render, template):
    with pytest.raises(InputError, match=r"^models/mine: the chat template did not end"):
        render(template)
    assert render("{{ messages[0].content }}") == "Hello"


@pytest.mark.parametrize("product", ["9 ** (9 ** 9)", "(9 ** 9000) ** 9000"])
def test_a_product_that_nothing_could_interrupt_is_an_error(render, product):
    with pytest.raises(InputError, match=r"^models/mine: the chat template fails: OverflowError"):
        render("{{ (" + product + ")|string|length }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ [1]|batch(10 ** 9, 0)|list }}",
    ],
)
def test_a_single_step_without_end_is_an_error(render, template):
    with pytest.raises(InputError, match=r"^models/mine: the chat template did not end"):
        render(template)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_numbers_of_unlimited_size_are_an_error(render):
    with pytest.raises(InputError, match="OverflowError: the result of round is too large"):
        render("{{ 12|round(-10 ** 9) }}")
    assert render("{{ 1.234|round(1) }} {{ 1234|round(-2)|int }}") == "1.2 1200"


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0].content + 1 }}"])
def test_template_that_fails_is_an_error(render, template):
    with pytest.raises(InputError, match="models/mine: the chat template fails: "):
        render(template)
