"""Turns rendered by chat templates, and the special tokens that end a turn, stop sampling and pad.

A chat template is a program that comes with a tokenizer. transformers runs it in a sandbox that
denies access to Python, but neither endless loops nor 9 ** 9999999999, which nothing in Python can
interrupt: the kernel ends the process, and scripts/launch.py says why. What would give the same
conversation another text at another time is rejected: the day, and random values.
"""

import json
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from snakechat.data.dialogues import Turn, messages_of, tools_of
from snakechat.workflow.errors import InputError

# CPU time (s) of all threads that rendering one conversation may take, usually less than 1 ms.
MAX_SECONDS = 30.0
# Memory (bytes) that a process may take in addition while it renders conversations.
MAX_MEMORY = 8 << 30
REPLACE = "replace the template in the tokenizer's files"
# The function that formats the current day.
DAY = "strftime_now"
# Turns that show what a chat template writes around them.
USER, ASSISTANT = "Question", "Answer"
QUESTION, ANSWER = ("user", USER), ("assistant", ASSISTANT)
# "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>", "<|fim_pad|>".
PADDING = re.compile(r"(?<![a-z])pad(ding)?(?![a-z])", re.IGNORECASE)
# The byte 0xFF in the alphabet of byte-level vocabularies. UTF-8 has no such byte.
IMPOSSIBLE_BYTE = "ÿ"
# The bytes in that alphabet, each of which is a letter, too.
LETTERS = frozenset(ByteLevel.alphabet())


def _random(*_: object, **__: object) -> NoReturn:
    raise InputError(f"the chat template writes random values: {REPLACE}")


def _current_day(*_: object) -> NoReturn:
    raise InputError(
        "the chat template writes the current day, which would make prompts differ from day to day:"
        f" add template_arguments: {{{DAY}: '2026-01-31'}} to the model, with a date of your choice"
        " (or replace a call that computes its format)"
    )


DEFAULT_FILTERS["random"] = DEFAULT_NAMESPACE["lipsum"] = _random


class TurnsRejected(InputError):
    """A template rejects the turns of a conversation."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF after some CPU time of its threads in a context; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def limited_steps(source: str) -> Iterator[None]:
    """Raise InputError if a regular expression of tokenizer.json takes too many steps on a text.

    source: What errors call the tokenizer.
    """
    try:
        yield
    except BaseException as error:
        # It is not an Exception, and cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{source}: tokenizer.json cannot encode a text: {error}: correct its regular"
            " expressions"
        ) from None


def source_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what errors call a tokenizer."""
    return tokenizer.name_or_path or "tokenizer"


def render_turns(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], prompt: bool = False
) -> str:
    """Return turns rendered by the chat template, as apply_chat_template does.

    prompt: Whether a response follows.

    Raises:
        TurnsRejected: The template rejects the turns, or would leave out tools, their calls or
            results.
        InputError: The template is missing, fails or takes too much memory.
    """
    if not tokenizer.chat_template:
        raise InputError(
            f"{source_of(tokenizer)}: the tokenizer has no chat template, which template: chat"
            " requires: use template: dialogue"
        )
    messages, tools = messages_of(turns), tools_of(turns)
    text = _render(tokenizer, messages, tools, prompt)
    without_calls = [
        {**each, "tool_calls": []} if "tool_calls" in each else each for each in messages
    ]
    # Templates may leave out white space.
    without_results = [
        {**each, "content": ""} if each["role"] == "tool" and each["content"].strip() else each
        for each in messages
    ]
    for what, rest in (
        ("the definitions of tools", (messages, None)),
        ("calls of tools", (without_calls, tools)),
        ("results of tools", (without_results, tools)),
    ):
        # What some templates leave out without an error makes no difference to their text.
        is_left_out = False
        with suppress(InputError):
            is_left_out = rest != (messages, tools) and _render(tokenizer, *rest, prompt) == text
        if is_left_out:
            raise TurnsRejected(
                f"{source_of(tokenizer)}: the chat template does not write {what}: use a model"
                " whose template does"
            )
    return text


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
        reason = syntax_problem(error)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = f"the chat template rejects turns of {roles}: {' '.join(str(error).split())}"
        raise TurnsRejected(f"{source_of(tokenizer)}: {reason}") from None
    except InputError as error:
        reason = str(error)
    except MemoryError:
        reason = f"the chat template takes too much memory: {REPLACE}"
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"the chat template fails: {type(error).__name__}: {error}"
    raise InputError(f"{source_of(tokenizer)}: {reason}")


def syntax_problem(error: TemplateSyntaxError) -> str:
    """Return what is wrong with a chat template that is not Jinja, without its text."""
    reason = str(error.message).rstrip(".")
    return f"line {error.lineno} of the chat template: {reason}: {REPLACE}"


def rendered_or_empty(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], prompt: bool = False
) -> str:
    """Return what render_turns does, or "" without a template, or if it rejects the turns."""
    with suppress(TurnsRejected):
        return render_turns(tokenizer, turns, prompt) if tokenizer.chat_template else ""
    return ""


# --- special tokens -------------------------------------------------------------------------


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Return the text between an assistant turn and the token that ends it, and this token.

    It is the first added token, special or not, that the chat template writes after the text of the
    turn; eos without one, or without a template.
    """
    _, _, after = rendered_or_empty(tokenizer, [QUESTION, ANSWER]).rpartition(ASSISTANT)
    contents = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if match := _pattern({*contents, tokenizer.eos_token}).search(after):
        found: Any = tokenizer.convert_tokens_to_ids(match[0])
        return after[: match.start()], int(found)
    return "", int(tokenizer.eos_token_id)


def stop_ids(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> tuple[int, ...]:
    """Return the ids that end a response: end of turn, eos, and the ids in the model's folder.

    They are eos_token_id in generation_config.json or, without that file, in config.json, as in
    transformers.
    """
    ids: list[Any] = [end_of_turn(tokenizer)[1], int(tokenizer.eos_token_id)]
    paths = [Path(folder, name) for name in ("generation_config.json", "config.json")]
    if path := next(filter(Path.is_file, paths), None):
        value = json.loads(path.read_text()).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    # Without duplicates, in this order.
    return tuple(number for number in dict.fromkeys(ids) if number is not None)


class SpecialTokens:
    """The special tokens of a tokenizer, as they occur in texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = {token.content for token in special}
        self.pattern = _pattern(names | set(map(str, tokenizer.all_special_tokens)))
        # These match a text after its normalization, such as "<S>" in lower case.
        names = {token.content for token in special if token.normalized}
        self.source, normalizer = source_of(tokenizer), tokenizer.backend_tokenizer.normalizer
        self.normalize = normalizer.normalize_str if names and normalizer else str
        with limited_steps(self.source):
            self.normalized = _pattern(map(self.normalize, names))

    def occur_in(self, text: str) -> bool:
        """Return whether a text would be encoded to special tokens."""
        with limited_steps(self.source):
            found = self.pattern.search(text) or self.normalized.search(self.normalize(text))
        return found is not None


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches tokens in a text, without those that are letters of it."""
    # The longest one where several match.
    ordered = sorted({*tokens} - LETTERS, key=lambda text: (-len(text), text))
    # Without tokens, nothing matches.
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def text_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizer of the tokenizers library, for which a letter in a text is a letter.

    A byte that serves as pad ("ÿ", "!") is an added token, which would match its letter.
    """
    backend: Tokenizer = tokenizer.backend_tokenizer
    if any(token.content in LETTERS for token in tokenizer.added_tokens_decoder.values()):
        data = json.loads(backend.to_str())
        data["added_tokens"] = [
            token for token in data["added_tokens"] if token["content"] not in LETTERS
        ]
        backend = Tokenizer.from_str(json.dumps(data))
    backend.no_padding()
    backend.no_truncation()
    return backend


def set_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set a pad token that has an id already, and that does not end a turn.

    It is the first of pad_token, unk_token, an added token that is named padding, the last of the
    other special ones, in a byte-level vocabulary the byte 0xFF, which UTF-8 does not have, and
    bos, which starts a text. As a special token, the byte changes the ids of no text except a "ÿ"
    that stands alone. Added tokens that the chat template writes do not count.

    Raises:
        InputError: There is none.
    """
    token = next(_pad_candidates(tokenizer), None)
    if token is None:
        raise InputError(
            f"{tokenizer.name_or_path}: the tokenizer has no token that can serve as pad: set"
            " pad_token in tokenizer_config.json"
        )
    if token == IMPOSSIBLE_BYTE and token != tokenizer.pad_token:
        tokenizer.add_special_tokens(
            {"pad_token": AddedToken(token, single_word=True, normalized=False, special=True)}
        )
    tokenizer.pad_token = token


def _pad_candidates(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the tokens that can serve as pad, the best one first."""
    named: Mapping[str, Any] = tokenizer.special_tokens_map
    ends = {tokenizer.eos_token, tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)[1])}
    ended = {None, *ends}
    yield from (named[key] for key in ("pad_token", "unk_token") if named.get(key) not in ended)
    # What the chat template writes, literally or put together.
    turns = [("system", USER), QUESTION, ANSWER, QUESTION]
    texts = [
        *(rendered_or_empty(tokenizer, some, prompt=True) for some in (turns, turns[1:])),
        str(tokenizer.chat_template or ""),
    ]
    taken = ends | {named.get("bos_token")}
    # From the last one: the first ones often mark the start of a document or a turn.
    added = [
        token
        for _, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if token.content not in taken and not any(token.content in text for text in texts)
    ]
    yield from (token.content for token in added[::-1] if PADDING.search(token.content))
    yield from (token.content for token in added if token.special)
    if tokenizer.get_vocab().keys() >= LETTERS:
        yield IMPOSSIBLE_BYTE
    if named.get("bos_token") not in ended:
        yield named["bos_token"]
