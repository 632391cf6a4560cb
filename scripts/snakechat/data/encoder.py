"""Encode prompts and responses: what a model reads, and what it is trained to write."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from snakechat.data.chat_templates import render_messages
from snakechat.data.dialogues import (
    RESPONSE,
    THOUGHTS,
    Turn,
    has_messages,
    is_message,
    message_of,
    messages_of,
    recorded_response,
    render_prompt,
    response_content,
    response_turn,
    tools_of,
)
from snakechat.data.special_tokens import (
    ASSISTANT,
    USER,
    SpecialTokens,
    end_of_turn_id,
    response_context,
    text_backend,
)
from snakechat.data.tokenizers import (
    check_tokenizer,
    encode_texts,
    resolved_template,
    source_of,
)
from snakechat.data.tool_templates import unwritten
from snakechat.workflow.errors import InputError

# Dialogues with which an Encoder checks the chat template: two turns of the user, or one.
PROBES: tuple[list[Turn], ...] = (
    [("user", USER), ("assistant", ASSISTANT), ("user", USER)],
    [("user", USER)],
)
# Characters of a difference between two texts that an error shows, before and after its start.
SHOWN_BEFORE, SHOWN = 20, 40
# How some templates start the thoughts of a response, in the prompt or in the response.
THINK = "<think>"
START_OF_THOUGHTS = re.compile(rf"{THINK}\s*\Z")
# Characters that stand for special tokens in a text while a chat template renders it. Unicode
# assigns them no meaning.
PRIVATE_USE = range(0xF0000, 0xFFFFE)

# Rows that are encoded while the next ones are rendered.
ROWS = 128

Ids = list[int]
T = TypeVar("T")
R = TypeVar("R")


class TurnsRejected(InputError):
    """A chat template rejects the turns of a conversation."""


class Written(NamedTuple):
    """A response as it is written behind its prompt.

    Attributes:
        prompt: The whole text in front of the response.
        response: The text of the response, without the token that ends it.
        between: The part of `prompt` from the token that ends the response before it; None if the
            prompt does not continue that response.
    """

    prompt: str
    response: str
    between: str | None = None


class Encoded(NamedTuple):
    """The ids of a prompt and of a response with the token that ends it.

    Attributes:
        prompt: If it continues the response before it, only the ids after that response.
        continues: Whether it does.
    """

    prompt: Ids
    response: Ids
    continues: bool


def render_turns(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], prompt: bool = False
) -> str:
    """Return turns rendered by the chat template.

    Args:
        prompt: Whether a response follows.

    Raises:
        TurnsRejected: The template rejects the turns, or would leave out tools, calls or results.
    """
    messages, tools = messages_of(turns), tools_of(turns)
    if has_messages(turns) and (missing := unwritten(tokenizer, messages, tools)):
        raise TurnsRejected(
            f"{source_of(tokenizer)}: the chat template does not write {missing}: use a model whose"
            " template does"
        )
    try:
        return render_messages(tokenizer, messages, add_generation_prompt=prompt, tools=tools)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split())
        raise TurnsRejected(
            f"{source_of(tokenizer)}: the chat template rejects turns of {roles}: {reason}"
        ) from None


def common_length(first: str, second: str) -> int:
    """Return how many characters at the start of two texts are equal."""
    pairs = zip(first, second, strict=False)
    differences = (place for place, (a, b) in enumerate(pairs) if a != b)
    return next(differences, min(len(first), len(second)))


class Encoder:
    """Encode prompts and responses by the tokenizers library.

    What is trained is the chat template's own rendering of the whole dialogue, row by row: the
    response is what it writes between the prompt, rendered alone, and the token that ends the turn.

    A response has the ids that follow those of a prompt when both are encoded as one text: this is
    what a model generates after the prompt's ids. They can differ from the ids of the response
    alone, which in SentencePiece models starts with a space. Where one token would span the end of
    the prompt and the start of the response, which no generated response can have, the response has
    the ids that it has alone. Added tokens divide a text, so that its parts between them are
    encoded apart.

    Args:
        tokenizer: A fast tokenizer.
        template: "dialogue" renders the turns of a prompt with "Human:" and "Assistant:"; "chat"
            by the tokenizer's chat template.
        generates: Whether the model responds; a classifier's template need not write prompts.

    Attributes:
        template: "dialogue" or "chat".
        end_id: The token that ends a response: eos, or the chat template's end of a turn.

    Raises:
        InputError: The tokenizer is not a fast one, has no chat template although template is
            "chat", or one that does not continue a prompt by its response.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, generates: bool = True
    ) -> None:
        template = resolved_template(tokenizer, template)
        self.tokenizer, self.template = tokenizer, template
        check_tokenizer(tokenizer, template)
        self.backend = text_backend(tokenizer)
        # In text, "</s>" is text and must not end a response; in a chat template it is a token.
        self.backend.encode_special_tokens = template == "dialogue"
        self.special = SpecialTokens(tokenizer)
        self.is_chat = template == "chat"
        self.end_id: int = end_of_turn_id(tokenizer) if self.is_chat else tokenizer.eos_token_id
        self.end = str(tokenizer.decode([self.end_id]))
        # The text between the last turn of a prompt and a response, and around the response.
        self.context, self.space, self.after = (
            response_context(tokenizer) if self.is_chat else (RESPONSE, "", "")
        )
        # What no text of a turn can have.
        self.has_header = self.is_chat and self.special.pattern.search(self.context) is not None
        self.contexts: dict[str, Ids] = {}
        # Special tokens in texts, by the characters that stand for them.
        self.marks: dict[str, str] = {}
        self.num_appended = self._num_appended()
        if self.is_chat and generates:
            self._check_template()

    def prompts(self, prompts: Sequence[list[Turn]]) -> list[Ids]:
        """Return the ids of each prompt, with the prefix (bos) of the tokenizer or its template."""
        return self._prompt_ids(list(map(self._prompt, prompts)))

    def conversations(
        self,
        prompts: Sequence[list[Turn]],
        *responses: Sequence[str | None],
        sampled: bool = False,
    ) -> Iterator[tuple[Ids, list[Ids]]]:
        """Yield the ids of each prompt and of its responses, with the tokens that end them.

        Args:
            responses: As in records, with a space in front or as JSON of a message. One that is
                None has no ids.
            sampled: A response that the template does not write follows the prompt as it is.

        Raises:
            TurnsRejected: The template rejects the turns, or does not write a response.
        """
        write = self._sampled if sampled else self._response

        def written(start: int) -> list[tuple[str, list[str | None]]]:
            rows = []
            for turns, *row in zip(*(each[start : start + ROWS] for each in columns), strict=True):
                prompt = self._prompt(turns)
                texts = [None if text is None else write(prompt, turns, text) for text in row]
                rows.append((prompt, texts))
            return rows

        columns: list[Sequence[Any]] = [prompts, *responses]
        parts = map(written, range(0, len(prompts), ROWS))
        yield from chain.from_iterable(_while_next(parts, self._conversation_ids))

    def _conversation_ids(
        self, rows: Sequence[tuple[str, list[str | None]]]
    ) -> list[tuple[Ids, list[Ids]]]:
        """Return the ids of prompts and of the responses of each, given their texts."""
        present = [
            Written(prompt, text) for prompt, row in rows for text in row if text is not None
        ]
        encoded = iter(self._response_ids(present))
        return [
            (ids, [[] if text is None else next(encoded)[0] for text in row])
            for ids, (_, row) in zip(
                self._prompt_ids([prompt for prompt, _ in rows]), rows, strict=True
            )
        ]

    def dialogues(
        self, dialogues: Sequence[list[Turn]], places: Sequence[Sequence[int]]
    ) -> Iterator[list[Encoded]]:
        """Yield the ids of the responses of each dialogue, each with its prompt.

        places: Numbers of the turns that are responses, in ascending order.

        Raises:
            TurnsRejected: As in `conversations`.
        """

        def written(start: int) -> list[list[Written]]:
            part = slice(start, start + ROWS)
            return list(map(self._written, dialogues[part], places[part]))

        parts = map(written, range(0, len(dialogues), ROWS))
        yield from chain.from_iterable(_while_next(parts, self._dialogue_ids))

    def _dialogue_ids(self, dialogues: Sequence[list[Written]]) -> list[list[Encoded]]:
        """Return the ids of the responses of dialogues, given their texts."""
        everything = [each for row in dialogues for each in row]
        responses = iter(self._response_ids(everything))
        starts = iter(
            self._prompt_ids([each.prompt for each in everything if each.between is None])
        )
        between = iter(self._ids(each.between for each in everything if each.between is not None))
        encoded = []
        for row in dialogues:
            follows = False
            encoded.append(list[Encoded]())
            for each in row:
                if each.between is None:
                    prompt, continues = next(starts), False
                else:
                    # The ids of the token that ends the response before it are that response's.
                    prompt, continues = next(between)[1:], follows
                    if not follows:
                        [prompt] = self._prompt_ids([each.prompt])
                ids, follows = next(responses)
                encoded[-1].append(Encoded(prompt, ids, continues))
        return encoded

    def rendered(self, turns: Sequence[Turn]) -> Ids:
        """Return the ids of turns as the chat template renders them, to the end of the text."""
        return self._ids([render_turns(self.tokenizer, turns)])[0]

    def texts(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts that are no dialogues, from the tokenizer's prefix to eos."""
        in_dialogues = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        encoded = self._ids(texts, add_special_tokens=True)
        self.backend.encode_special_tokens = in_dialogues
        eos = self.tokenizer.eos_token_id
        return [[*ids[: len(ids) - self.num_appended], eos] for ids in encoded]

    def has_special_token(self, text: str) -> bool:
        """Return whether a text would be encoded to special tokens.

        This happens with a chat template only, which writes special tokens as text.
        """
        return self.is_chat and self.special.occur_in(text)

    def marked(self, text: str) -> str:
        """Return a text in which characters stand for special tokens: they are encoded as text."""
        if not self.has_special_token(text):
            return text
        text = self.special.pattern.sub(lambda match: self._mark(match[0]), text)
        # What only its normalization makes a special token has no place in the text.
        return self._mark(text) if self.special.occur_in(text) else text

    def _mark(self, text: str) -> str:
        marks = {special: mark for mark, special in self.marks.items()}
        mark = marks.get(text, chr(PRIVATE_USE[len(marks)]))
        self.marks[mark] = text
        return mark

    def _prompt(self, turns: list[Turn]) -> str:
        """Return the text of a prompt."""
        if self.is_chat:
            return render_turns(self.tokenizer, turns, prompt=True)
        if has_messages(turns):
            raise TurnsRejected(
                "template: dialogue cannot write thoughts, tools and their calls: use a model with"
                " a chat template that does, and template: chat"
            )
        return render_prompt(turns)

    def _sampled(self, prompt: str, turns: list[Turn], response: str) -> str:
        """Return the text of a sampled response behind its prompt, whatever it is."""
        try:
            return self._response(prompt, turns, response)
        except TurnsRejected:
            return self.space + response_content(response) + self.after

    def _response(self, prompt: str, turns: list[Turn], response: str) -> str:
        """Return the text of a response behind its prompt, without the token that ends it.

        The response is an earlier turn, in front of which no template writes empty thoughts, or
        otherwise the last one, of which more templates keep the thoughts.

        Args:
            prompt: The text of the prompt.
            turns: Its turns.
            response: As in records.

        Raises:
            TurnsRejected: The template does not continue the prompt by the response, or leaves out
                a part of the response.
        """
        if not self.is_chat:
            if is_message(response):
                self._prompt([response_turn(response)])
            return response
        # A sampled response has the text in front of the token that ends it.
        turn = response_turn(
            response if is_message(response) else response.removesuffix(self.after)
        )
        for further in ([("user", USER)], []):
            try:
                whole = render_turns(self.tokenizer, [*turns, turn, *further])
                stop = whole.find(self.end, len(prompt)) if whole.startswith(prompt) else -1
                if stop < 0:
                    raise self._mismatch(prompt, whole, message_of(turn)["content"])
                text = whole[len(prompt) : stop]
                self._require_whole(prompt, text, turn)
                return text
            except TurnsRejected as error:
                rejected = error
        raise rejected

    def _mismatch(self, prompt: str, whole: str, content: str) -> TurnsRejected:
        """Return the error of a rendering that does not continue a prompt by a response."""
        ours = f"{prompt}{content}{self.end}"
        place = common_length(ours, whole)
        shown = slice(max(0, place - SHOWN_BEFORE), place + SHOWN)
        return TurnsRejected(
            f"{source_of(self.tokenizer)}: the chat template renders a dialogue as"
            f" {whole[shown]!r}, but the prompt, the response and the token that ends it are"
            f" {ours[shown]!r}: correct the template (add_generation_prompt writes the header of a"
            " response, an added token ends it) or set template: dialogue"
        )

    def _require_whole(self, prompt: str, text: str, response: Turn) -> None:
        """Raise TurnsRejected if a template leaves out a part of a response, but for white space.

        text: The response as the template writes it.
        """
        starts = START_OF_THOUGHTS.search(prompt) is not None
        if starts and text.lstrip().startswith(THINK):
            raise TurnsRejected(
                f"{source_of(self.tokenizer)}: the chat template writes {THINK} in front of a"
                f" response that starts with it: remove {THINK} from the response"
            )
        message = message_of(response)
        parts = [(key, message.get(key) or "") for key in (THOUGHTS, "content")]
        parts += [("calls", call["function"]["name"]) for call in message.get("tool_calls", ())]
        written, place = _squeezed(f"{THINK if starts else ''}{text}"), 0
        for key, part in parts:
            squeezed = _squeezed(part)
            place = written.find(squeezed, place)
            if place < 0:
                raise TurnsRejected(
                    f"{source_of(self.tokenizer)}: the chat template does not write the {key} of a"
                    f" response, {part[:SHOWN]!r}: use a model whose template does"
                )
            place += len(squeezed)

    def _written(self, turns: list[Turn], places: Sequence[int]) -> list[Written]:
        """Return the responses of a dialogue as they are written behind their prompts."""
        if self.has_header and not has_messages(turns):
            found = self._found(turns, places)
            if found is not None:
                return found
        whole = self._whole(turns, places)
        written: list[Written] = []
        # Where the response before ends in the rendering of the whole dialogue; None if it does
        # not have it.
        stop: int | None = None
        for place in places:
            prompt = self._prompt(turns[:place])
            follows = whole.startswith(prompt)
            between = None
            if follows and stop is not None and stop <= len(prompt):
                between = prompt[stop:]
            text = self._response(prompt, turns[:place], recorded_response(turns[place]))
            written.append(Written(prompt, text, between))
            is_there = follows and whole.startswith(text + self.end, len(prompt))
            stop = len(prompt) + len(text) if is_there else None
        return written

    def _whole(self, turns: list[Turn], places: Sequence[int]) -> str:
        """Return the rendering of a dialogue up to its last response, and a further question.

        It is "" without a template, or if the template rejects it.
        """
        if self.is_chat and places:
            with suppress(TurnsRejected):
                return render_turns(self.tokenizer, [*turns[: places[-1] + 1], ("user", USER)])
        return ""

    def _found(self, turns: list[Turn], places: Sequence[int]) -> list[Written] | None:
        """Return the responses of a dialogue of texts as its rendering as a whole has them.

        This saves the rendering of each prompt. The header of a response has a special token, so
        that no text of a turn has it. The text between header and end of a turn must be its
        content, and the first, second, fourth ... and the last prompt must be as rendered alone.

        Returns:
            None if the rendering differs: the template treats earlier turns in another way.
        """
        whole, written = self._whole(turns, places), list[Written]()
        # The ends of the last response, and of the last one in `places`.
        stop = before = 0
        for number, turn in enumerate(turns[: places[-1] + 1] if places else ()):
            message = message_of(turn)
            if message["role"] != "assistant":
                continue
            header = whole.find(self.context, stop)
            start = header + len(self.context)
            stop = whole.find(self.end, start)
            prompt, text = whole[:start], whole[start:stop]
            if header < 0 or stop < 0 or text.strip() != message["content"].strip():
                return None
            if number in places:
                count = len(written) + 1
                is_compared = number == places[-1] or count & (count - 1) == 0
                if is_compared and self._prompt(turns[:number]) != prompt:
                    return None
                written.append(Written(prompt, text, whole[before:start] if written else None))
                before = stop
        return written

    def _check_template(self) -> None:
        """Raise InputError if the chat template does not continue a prompt by a response.

        A template that rejects the dialogues is not checked: rows report it. Of one that starts a
        response with thoughts, rows without thoughts report it.
        """
        for turns in PROBES:
            try:
                prompt = self._prompt(turns)
                render_turns(self.tokenizer, [*turns, ("assistant", ASSISTANT)])
            except TurnsRejected:
                continue
            start = START_OF_THOUGHTS.sub("", prompt)
            text = self._response(start, turns, ASSISTANT)
            if self.special.pattern.search(text) and render_turns(self.tokenizer, turns) == prompt:
                raise self._mismatch(prompt, prompt + text + self.end, ASSISTANT)
            return

    def _num_appended(self) -> int:
        """Return how many tokens, such as eos, the tokenizer appends to each text."""
        [[*_, last]] = self._ids([":"])
        [with_special] = self._ids([":"], add_special_tokens=True)
        return with_special[::-1].index(last)

    def _prompt_ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of the texts of prompts."""
        if self.is_chat:
            return self._ids(texts)
        encoded = self._ids(texts, add_special_tokens=True)
        # Without tokens that would end a text.
        return [ids[: len(ids) - self.num_appended] for ids in encoded]

    def _response_ids(self, written: Sequence[Written]) -> list[tuple[Ids, bool]]:
        """Return the ids of each response with the token that ends it.

        Each comes with whether these are its ids in the text of the dialogue, too.
        """
        # In text, no token ends a response. In a chat, it may belong to white space before it.
        text_of_end, ids_of_end = (self.end, []) if self.is_chat else ("", [self.end_id])
        contexts = [self._context(each.prompt) for each in written]
        texts = [context + each.response for context, each in zip(contexts, written, strict=True)]
        responses = []
        for ids, name, each in zip(
            self._ids(text + text_of_end for text in texts), contexts, written, strict=True
        ):
            context = self.contexts[name]
            start, ids = ids[: len(context)], ids[len(context) :] + ids_of_end
            fits = start == context and ids[-1:] == [self.end_id]
            if not fits:
                ids = [*self._ids([each.response])[0], self.end_id]
            responses.append((ids, fits))
        return responses

    def _context(self, prompt: str) -> str:
        """Return the end of a prompt that a response is encoded with, from a special token on."""
        text = self.context
        if self.is_chat and not prompt.endswith(text):
            found = [*self.special.pattern.finditer(prompt)]
            text = prompt[found[-1].start() :] if found else prompt
        if text not in self.contexts:
            [self.contexts[text]] = self._ids([text])
        return text

    def _ids(self, texts: Iterable[str], add_special_tokens: bool = False) -> list[Ids]:
        texts = list(texts)
        if self.marks:
            return [self._ids_of_marked(text, add_special_tokens) for text in texts]
        return encode_texts(
            self.tokenizer, self.backend, texts, add_special_tokens=add_special_tokens
        )

    def _ids_of_marked(self, text: str, add_special_tokens: bool) -> Ids:
        """Return the ids of a text with marks: they are encoded as the texts they stand for."""
        ids: Ids = []
        for piece in re.split(f"([{''.join(self.marks)}])", text):
            if piece:
                self.backend.encode_special_tokens = piece in self.marks or not self.is_chat
                [found] = encode_texts(
                    self.tokenizer,
                    self.backend,
                    [self.marks.get(piece, piece)],
                    add_special_tokens=add_special_tokens,
                )
                ids += found
        self.backend.encode_special_tokens = not self.is_chat
        return ids


def _while_next(parts: Iterable[T], encode: Callable[[T], R]) -> Iterator[R]:
    """Yield the ids of each part, whose texts are made while the ids of the one before are."""
    with ThreadPoolExecutor(1) as thread:
        encoding = None
        for part in parts:
            before, encoding = encoding, thread.submit(encode, part)
            if before:
                yield before.result()
        if encoding:
            yield encoding.result()


def _squeezed(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())
