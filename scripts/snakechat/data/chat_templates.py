"""Turns rendered by chat templates, within limits of time and memory.

A chat template is a program that comes with a tokenizer. transformers runs it in a sandbox that
denies access to Python, but neither endless loops nor 9 ** 9999999999, which nothing can interrupt.
The kernel limits memory, an alarm limits time, and numbers of unlimited size are not computed.
What would give the same conversation another text at another time is rejected: the day, and random
values.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from jinja2.filters import do_round
from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from snakechat.data.dialogues import Turn, messages_of, tools_of
from snakechat.data.memory_limit import limited_memory
from snakechat.workflow.errors import InputError

# Seconds and bytes that rendering one conversation may take; it usually takes less than 1 ms.
MAX_SECONDS = 10.0
MAX_BYTES = 2 << 30
# The function that formats the current day.
DAY = "strftime_now"
# Bits of a product or a power, and decimal places of a rounded number.
MAX_BITS = 1 << 23
MAX_PLACES = 300


def _bounded_product(
    environment: SandboxedEnvironment, context: Any, operator: str, left: Any, right: Any
) -> Any:
    """Return left * right or left ** right: a method of the sandbox.

    Raises:
        OverflowError: The result would be too large a number. Too long a text has no memory.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if (bits * right if operator == "**" else bits + right.bit_length()) > MAX_BITS:
            raise OverflowError(f"the result of {operator} is too large")
    return environment.binop_table[operator](left, right)


def _bounded_round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Return the filter `round` of jinja, which computes 10 ** precision.

    Raises:
        OverflowError: The result would be too large.
    """
    if abs(precision) > MAX_PLACES:
        raise OverflowError("the result of round is too large")
    return do_round(value, precision, method)


def _random(*_: object, **__: object) -> NoReturn:
    raise InputError(
        "the chat template writes random values: replace the template in the tokenizer's files"
    )


def _current_day(*_: object) -> NoReturn:
    raise InputError(
        "the chat template writes the current day, which would make prompts differ from day to day:"
        f" add template_arguments: {{{DAY}: '2026-01-31'}} to the model, with a date of your choice"
    )


DEFAULT_FILTERS["round"] = _bounded_round
DEFAULT_FILTERS["random"] = DEFAULT_NAMESPACE["lipsum"] = _random
# Of the class that transformers renders templates with.
SandboxedEnvironment.intercepted_binops = frozenset(["*", "**"])
setattr(SandboxedEnvironment, "call_binop", _bounded_product)  # noqa: B010 (for mypy)


Message = dict[str, Any]

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
CONVERSATION: list[Message] = [
    {"role": "user", "content": "Question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": IDENTIFIER, "type": "function", "function": CALL}],
    },
    {"role": "tool", "name": "look", "tool_call_id": IDENTIFIER, "content": "probed_result"},
]
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "probed_tool",
        "description": "Look",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class TurnsRejected(InputError):
    """A template rejects the turns of a conversation."""


class LimitExceeded(BaseException):
    """A template took too much time. Not an Exception, which libraries may catch."""


def render_messages(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    add_generation_prompt: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """Return messages as apply_chat_template of a tokenizer renders them; in the main thread.

    Args:
        messages, tools: Values of JSON.

    Raises:
        TemplateError: The template rejects the messages.
        InputError: The template takes too much time or memory, or fails.
    """
    source = tokenizer.name_or_path or "tokenizer"
    try:
        with limited():
            # apply_chat_template copies each value, and writes the current day.
            template = _compile_jinja_template(tokenizer.get_chat_template(tools=tools))
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **tokenizer.special_tokens_map,
                **{DAY: _current_day},
            )
    except TemplateError:
        raise
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except (LimitExceeded, MemoryError):
        raise InputError(
            f"{source}: the chat template did not end within {MAX_SECONDS:g} s and"
            f" {MAX_BYTES >> 30} GiB of memory: replace the template in the tokenizer's files"
        ) from None
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"{source}: the chat template fails: {type(error).__name__}: {error}"
        ) from None


def syntax_problem(error: TemplateSyntaxError) -> str:
    """Return what is wrong with a chat template that is not Jinja, without its text."""
    reason = str(error.message).rstrip(".")
    return (
        f"line {error.lineno} of the chat template: {reason}: replace the template in the"
        " tokenizer's files"
    )


@contextmanager
def limited() -> Iterator[None]:
    """Limit the memory of a context, and raise LimitExceeded in it if it takes too much time.

    The exception is raised between two steps of the interpreter, which a template has many of. A
    single step may allocate any memory, which raises MemoryError.
    """

    def stop(*_: object) -> None:
        raise LimitExceeded

    previous = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        with limited_memory(MAX_BYTES):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, previous)


def render_turns(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], prompt: bool = False
) -> str:
    """Return turns rendered by the chat template.

    Args:
        prompt: Whether a response follows.

    Raises:
        TurnsRejected: There is no template, it rejects the turns, or it would leave out tools,
            their calls or results.
    """
    source = tokenizer.name_or_path or "tokenizer"
    if not tokenizer.chat_template:
        raise TurnsRejected(f"{source}: the tokenizer has no chat template")
    messages, tools = messages_of(turns), tools_of(turns)
    needed = {
        TOOLS: bool(tools),
        CALLS: any("tool_calls" in message for message in messages),
        RESULTS: any(message["role"] == "tool" for message in messages),
    }
    for what, is_needed in needed.items():
        if is_needed and what not in _written(tokenizer):
            raise TurnsRejected(
                f"{source}: the chat template does not write {what}: use a model whose template"
                " does"
            )
    try:
        return render_messages(tokenizer, messages, add_generation_prompt=prompt, tools=tools)
    except TemplateSyntaxError as error:
        raise InputError(f"{source}: {syntax_problem(error)}") from None
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split())
        raise TurnsRejected(
            f"{source}: the chat template rejects turns of {roles}: {reason}"
        ) from None


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
    for length in range(1, len(CONVERSATION) + 1):
        with suppress(TemplateError, InputError):
            text = render_messages(tokenizer, CONVERSATION[:length], tools=[TOOL])
            written |= {
                what for what, words in WORDS.items() if all(word in text for word in words)
            }
    return written
