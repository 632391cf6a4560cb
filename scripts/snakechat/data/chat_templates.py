"""Chat templates, rendered within limits of time and memory, and what they write of tools.

A chat template is a program that comes with a tokenizer. transformers runs it in a sandbox that
denies access to Python, but neither endless loops nor 9 ** 9999999999, which nothing can interrupt.
The kernel limits memory, an alarm limits time, and numbers of unlimited size are not computed.
What would give the same conversation another text at another time is rejected: the day, and random
values.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from jinja2.filters import do_round
from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

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

# What some templates leave out without an error: a word that nothing else has shows it.
TOOLS, CALLS, RESULTS = "the definitions of tools", "calls of tools", "results of tools"
WORD = "probed_word"
# Mistral's templates require identifiers of nine letters or digits.
IDENTIFIER = "abcdefgh9"
QUESTION: Message = {"role": "user", "content": "Question"}
TOOL: Message = {
    "type": "function",
    "function": {
        "name": WORD,
        "description": "Look",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
RESULT: Message = {"role": "tool", "name": "look", "tool_call_id": IDENTIFIER, "content": WORD}


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


def unwritten(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: object
) -> str | None:
    """Return what the chat template of a tokenizer would leave out of a dialogue, or None."""
    needed = {
        TOOLS: bool(tools),
        CALLS: any("tool_calls" in message for message in messages),
        RESULTS: any(message["role"] == "tool" for message in messages),
    }
    written = _written(tokenizer)
    return next((what for what in needed if needed[what] and what not in written), None)


@cache
def _written(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return what the chat template of a tokenizer writes."""

    def writes(messages: list[Message], **options: Any) -> bool:
        try:
            return WORD in render_messages(tokenizer, messages, **options)
        except (TemplateError, InputError):
            return False

    written = {
        TOOLS: writes([QUESTION], tools=[TOOL]),
        CALLS: writes([QUESTION, _call(WORD, {})])
        and writes([QUESTION, _call("look", {"a": WORD})]),
        RESULTS: writes([QUESTION, _call("look", {}), RESULT]),
    }
    return {what for what, is_written in written.items() if is_written}


def _call(name: str, arguments: Message) -> Message:
    """Return a message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    call = {"id": IDENTIFIER, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
