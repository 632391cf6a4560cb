"""Turns rendered by chat templates.

A chat template is a program that comes with a tokenizer. transformers runs it in a sandbox that
denies access to Python, but neither endless loops nor 9 ** 9999999999, which nothing in Python can
interrupt: the kernel ends the process, and scripts/launch.py says why. What would give the same
conversation another text at another time is rejected: the day, and random values.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from snakechat.data.dialogues import Turn, messages_of, tools_of
from snakechat.data.limits import limited_time
from snakechat.workflow.errors import InputError

# CPU time (s) of all threads that rendering one conversation may take, usually less than 1 ms.
MAX_SECONDS = 30.0
# Memory (bytes) that a process may take in addition while it renders conversations.
MAX_MEMORY = 8 << 30
REPLACE = "replace the template in the tokenizer's files"
# The function that formats the current day.
DAY = "strftime_now"


def _random(*_: object, **__: object) -> NoReturn:
    raise InputError(f"the chat template writes random values: {REPLACE}")


def _current_day(*_: object) -> NoReturn:
    raise InputError(
        "the chat template writes the current day, which would make prompts differ from day to day:"
        f" add template_arguments: {{{DAY}: '2026-01-31'}} to the model, with a date of your choice"
    )


DEFAULT_FILTERS["random"] = DEFAULT_NAMESPACE["lipsum"] = _random

# What some templates leave out without an error: words that nothing else has show it.
TOOLS, CALLS, RESULTS = "the definitions of tools", "calls of tools", "results of tools"
WORDS = {
    TOOLS: ("probed_tool",),
    CALLS: ("probed_call", "probed_value"),
    RESULTS: ("probed_result",),
}
# Mistral's templates require identifiers of nine letters or digits.
IDENTIFIER = "abcdefgh9"
CALL = {"name": "probed_call", "arguments": {"key": "probed_value"}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": IDENTIFIER, "type": "function", "function": CALL}],
    },
    {"role": "tool", "name": "look", "tool_call_id": IDENTIFIER, "content": "probed_result"},
]
PARAMETERS = {"type": "object", "properties": {}, "required": []}
DEFINITION = {"name": "probed_tool", "description": "Look", "parameters": PARAMETERS}


class TurnsRejected(InputError):
    """A template rejects the turns of a conversation."""


def source_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what errors call a tokenizer."""
    return tokenizer.name_or_path or "tokenizer"


def render_turns(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], prompt: bool = False
) -> str:
    """Return turns rendered by the chat template, as apply_chat_template does.

    Args:
        prompt: Whether a response follows.

    Raises:
        TurnsRejected: There is no template, it rejects the turns, or it would leave out tools,
            their calls or results.
        InputError: The template fails, or takes too much memory.
    """
    if not tokenizer.chat_template:
        raise TurnsRejected(f"{source_of(tokenizer)}: the tokenizer has no chat template")
    messages, tools = messages_of(turns), tools_of(turns)
    needed = {
        TOOLS: bool(tools),
        CALLS: any("tool_calls" in message for message in messages),
        RESULTS: any(message["role"] == "tool" for message in messages),
    }
    for what, is_needed in needed.items():
        if is_needed and what not in _written(tokenizer):
            raise TurnsRejected(
                f"{source_of(tokenizer)}: the chat template does not write {what}: use a model"
                " whose template does"
            )
    return _render(tokenizer, messages, tools, prompt)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    prompt: bool,
) -> str:
    """Return messages rendered by the chat template; see render_turns."""
    try:
        with limited_time(MAX_SECONDS):
            # apply_chat_template copies each value, and writes the current day.
            template = _compile_jinja_template(tokenizer.get_chat_template(tools=tools))
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **tokenizer.special_tokens_map,
                **{DAY: _current_day},
            )
    except TemplateSyntaxError as error:
        raise InputError(f"{source_of(tokenizer)}: {syntax_problem(error)}") from None
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split())
        raise TurnsRejected(
            f"{source_of(tokenizer)}: the chat template rejects turns of {roles}: {reason}"
        ) from None
    except InputError as error:
        raise InputError(f"{source_of(tokenizer)}: {error}") from None
    except MemoryError:
        reason = f"the chat template takes too much memory: {REPLACE}"
        raise InputError(f"{source_of(tokenizer)}: {reason}") from None
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"the chat template fails: {type(error).__name__}: {error}"
        raise InputError(f"{source_of(tokenizer)}: {reason}") from None


def syntax_problem(error: TemplateSyntaxError) -> str:
    """Return what is wrong with a chat template that is not Jinja, without its text."""
    reason = str(error.message).rstrip(".")
    return f"line {error.lineno} of the chat template: {reason}: {REPLACE}"


def rendered_or_empty(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], prompt: bool = False
) -> str:
    """Return what render_turns does, or an empty text if the template rejects the turns."""
    with suppress(TurnsRejected):
        return render_turns(tokenizer, turns, prompt)
    return ""


@cache
def _written(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return what the chat template of a tokenizer writes of tools."""
    written: set[str] = set()
    tools: list[dict[str, Any]] = [{"type": "function", "function": DEFINITION}]
    for length in range(1, len(CONVERSATION) + 1):
        with suppress(InputError):
            text = _render(tokenizer, CONVERSATION[:length], tools, prompt=False)
            written |= {what for what, words in WORDS.items() if all(w in text for w in words)}
    return written
