"""Chat templates that do not end, take too much memory or fail."""

import signal
import subprocess
import sys

import pytest

from conftest import ROOT
from launch import describe_kill
from snakechat.data.chat_templates import render_turns
from snakechat.data.tokenizers import load_tokenizer, set_template_defaults
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import limited_memory
from support import family_tokenizers
from support.chat_templates import CHATML

TURNS = [("user", "Hello")]
PROGRAM = """
import signal, sys
from snakechat.data import chat_templates, tokenizers
chat_templates.MAX_SECONDS = 0.2
# Without torch.
tokenizer = tokenizers.load_tokenizer(sys.argv[1], is_result=True)
# No time limit holds any longer.
assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
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
    line = describe_kill("fetch_model.py", signal.SIGPROF)
    assert line.startswith("fetch_model.py: a chat template, or a regular expression of tokenizer")


# --- defaults of variables -----------------------------------------------------------------------

# As Qwen3's: without thoughts, a response starts with an empty one. A macro reads a variable too.
IS_OFF = "enable_thinking is defined and enable_thinking is false"
EMPTY = "<think>\n\n</think>\n\n"
PROMPTED = CHATML + f"{{% if add_generation_prompt and {IS_OFF} %}}{EMPTY}{{% endif %}}"
THINKING = "{%- macro shown() %}{{ name if name is defined }}{% endmacro %}" + PROMPTED.replace(
    "{{ message.content }}",
    f"{{% if loop.last and message.role == 'assistant' and {IS_OFF} %}}{EMPTY}{{% endif %}}"
    "{{ shown() if message.role == 'user' }}{{ message.content }}",
)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
VALUES = {"enable_thinking": False, "name": 'A "name" 为\n'}


def tokenizer_with(template):
    tokenizer = family_tokenizers.qwen2_5()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("start", ["", "\n", "  {% if true %}\n  x{% endif %}"])
def test_a_saved_tokenizer_renders_as_with_the_arguments(start, tmp_path):
    tokenizer = tokenizer_with(start + THINKING + "{% generation %}{% endgeneration %}")

    def rendered(each, **arguments):
        return each.apply_chat_template(MESSAGES, add_generation_prompt=True, **arguments)

    expected = rendered(tokenizer, **VALUES)
    other = rendered(tokenizer, **{**VALUES, "enable_thinking": True})
    set_template_defaults(tokenizer, VALUES)
    tokenizer.save_pretrained(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert rendered(saved) == expected
    # A caller may pass another value.
    assert rendered(saved, enable_thinking=True) == other != expected
    set_template_defaults(saved, {"enable_thinking": True})
    assert rendered(saved) == other


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (None, "no chat template"),
        (THINKING, "enable_thinking, messages"),
        ("{{ x }}\n{{ SECRET }", "line 2 of the chat template: unexpected '}'"),
    ],
)
def test_arguments_without_an_effect_are_rejected(template, found):
    with pytest.raises(InputError, match=found) as error:
        set_template_defaults(tokenizer_with(template), {"thinking": False})
    assert "\n" not in str(error.value) and "{{" not in str(error.value)


# As Llama 3.1's, and as gpt-oss's.
DAYS = {
    "date_string": CHATML + "{% if not date_string is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}",
    "call": "{% macro today() %}{{ strftime_now('%Y-%m-%d') + '|' + strftime_now(\"%d %b\") }}"
    "{% endmacro %}" + CHATML + "{% if strftime_now is defined %}{{ today() }}{% endif %}",
}


@pytest.mark.parametrize(
    ("case", "arguments", "end"),
    [
        ("date_string", {"strftime_now": "2024-07-26"}, "26 Jul 2024"),
        ("date_string", {"date_string": "a day"}, "a day"),
        ("call", {"strftime_now": "2024-07-26"}, "2024-07-26|26 Jul"),
    ],
)
def test_the_day_of_a_template_is_the_one_that_is_set(case, arguments, end, tmp_path):
    tokenizer_with(DAYS[case]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"writes the current day.*template_arguments: {strftime"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, arguments)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        assert each.apply_chat_template(MESSAGES, tokenize=False).endswith(f"<|im_end|>\n{end}")
