"""Encode prompts and responses: what a template writes of a dialogue, and the ids of this text."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from snakechat.data.chat_templates import (
    ANSWER,
    ASSISTANT,
    QUESTION,
    USER,
    SpecialTokens,
    TurnsRejected,
    end_of_turn,
    limited_steps,
    render_turns,
    rendered_or_empty,
    source_of,
    text_backend,
)
from snakechat.data.dialogues import (
    MESSAGE,
    RESPONSE,
    THOUGHTS,
    TOOLS,
    Turn,
    message_of,
    render_prompt,
    response_content,
    response_turn,
)
from snakechat.data.tokenizers import resolved_template
from snakechat.workflow.errors import InputError

# Characters of a difference between two texts that an error shows, before and after its start.
SHOWN_BEFORE, SHOWN = 20, 40
# How some templates start the thoughts of a response, in the prompt or in the response.
THINK = "<think>"
START_OF_THOUGHTS = re.compile(rf"{THINK}\s*\Z")

# Marks around special tokens in a text while a chat template renders it. Unicode assigns these
# characters no meaning.
OPEN, CLOSE = "\U00100000", "\U00100001"
MARKED = re.compile(f"{OPEN}([{OPEN}{CLOSE}]|[^{OPEN}{CLOSE}]+){CLOSE}")

# Rows whose texts are held at a time.
ROWS = 128

Ids = list[int]
# The turns of a prompt and its responses, as in records; and the texts of both.
Conversation = tuple[list[Turn], Sequence[Any]]
Written = tuple[str, list[str | None]]
T = TypeVar("T")


def accepted(rows: Iterable[T | TurnsRejected]) -> Iterator[T]:
    """Yield rows; raise the first rejection among them."""
    for row in rows:
        if isinstance(row, TurnsRejected):
            raise row
        yield row


# --- templates --------------------------------------------------------------------------------


class DialogueTemplate:
    """The template `dialogue`: texts in which "Human:" and "Assistant:" mark the turns."""

    # The text between the last turn of a prompt and a response, and the text that ends a response.
    context, end = RESPONSE, ""

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Return the text of a prompt. Raises TurnsRejected if a turn is more than a text."""
        if any(role in (TOOLS, MESSAGE, "tool") for role, _ in turns):
            raise TurnsRejected(
                "template: dialogue cannot write thoughts, tools and their calls: use a model with"
                " a chat template that does, and template: chat"
            )
        return render_prompt(turns)

    def response(self, prompt: str, turns: Sequence[Turn], response: str) -> str:
        """Return the text of a response behind its prompt."""
        # self.prompt rejects a message that is more than a text.
        self.prompt([response_turn(response)])
        return response

    sampled = response


class ChatTemplate:
    """The chat template of a tokenizer.

    A response is what the template writes between the prompt, rendered alone, and the token that
    ends the turn, when it renders the whole dialogue. Each row is compared with this rendering.

    generates: Whether a model responds; a classifier's template need not write prompts.

    Raises:
        InputError: The template does not continue a prompt by a response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, generates: bool = True) -> None:
        self.tokenizer, self.special = tokenizer, SpecialTokens(tokenizer)
        # Some templates write white space in front of a response, and a text behind it.
        self.after, end_id = end_of_turn(tokenizer)
        self.end = str(tokenizer.decode([end_id]))
        prompt = rendered_or_empty(tokenizer, [QUESTION], prompt=True)
        dialogue = rendered_or_empty(tokenizer, [QUESTION, ANSWER])
        self.context = prompt.rpartition(USER)[2]
        # Other text in front, such as empty thoughts, is left to the model.
        space = dialogue.rpartition(ASSISTANT)[0].removeprefix(prompt)
        self.space = space if space.isspace() else ""
        # Rows report a template that rejects these turns, or starts a response with thoughts.
        if generates and prompt and dialogue:
            start = START_OF_THOUGHTS.sub("", prompt)
            text = self.response(start, [QUESTION], ASSISTANT)
            if self.special.pattern.search(text) and render_turns(tokenizer, [QUESTION]) == prompt:
                raise self._mismatch(prompt, prompt + text + self.end, ASSISTANT)

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Return the text of a prompt."""
        return render_turns(self.tokenizer, turns, prompt=True)

    def sampled(self, prompt: str, turns: Sequence[Turn], response: str) -> str:
        """Return the text of a sampled response behind its prompt, whatever it is."""
        try:
            return self.response(prompt, turns, response)
        except TurnsRejected:
            return self.space + response_content(response) + self.after

    def response(self, prompt: str, turns: Sequence[Turn], response: str) -> str:
        """Return the text of a response, as in records, behind its prompt, without the end token.

        The response is an earlier turn, in front of which no template writes empty thoughts, or
        otherwise the last one, of which more templates keep the thoughts.

        Raises:
            TurnsRejected: The template does not continue the prompt by the response, or leaves out
                a part of the response.
        """
        # A sampled response has the text in front of the token that ends it.
        turn = response_turn(response.removesuffix(self.after))
        for further in ([QUESTION], []):
            try:
                whole = render_turns(self.tokenizer, [*turns, turn, *further])
                stop = whole.find(self.end, len(prompt)) if whole.startswith(prompt) else -1
                if stop < 0:
                    raise self._mismatch(prompt, whole, message_of(turn)["content"])
                self._require_whole(prompt, whole[len(prompt) : stop], turn)
                return whole[len(prompt) : stop]
            except TurnsRejected as error:
                rejected = error
        raise rejected

    def _require_whole(self, prompt: str, text: str, response: Turn) -> None:
        """Raise TurnsRejected if the text of a response lacks a part of it, but for white space."""
        starts = START_OF_THOUGHTS.search(prompt) is not None
        if starts and text.lstrip().startswith(THINK):
            raise TurnsRejected(
                f"{source_of(self.tokenizer)}: the chat template writes {THINK} in front of a"
                f" response that starts with it: remove {THINK} from the response"
            )
        message = message_of(response)
        parts = [
            *((key, message.get(key) or "") for key in (THOUGHTS, "content")),
            *(("calls", call["function"]["name"]) for call in message.get("tool_calls", ())),
        ]
        written, place = "".join(f"{THINK if starts else ''}{text}".split()), 0
        for key, part in parts:
            squeezed = "".join(part.split())
            place = written.find(squeezed, place) + len(squeezed)
            if place < len(squeezed):
                raise TurnsRejected(
                    f"{source_of(self.tokenizer)}: the chat template does not write the {key} of a"
                    f" response, {part[:SHOWN]!r}: use a model whose template does"
                )

    def _mismatch(self, prompt: str, whole: str, content: str) -> TurnsRejected:
        """Return the error of a rendering that does not continue a prompt by a response."""
        ours = f"{prompt}{content}{self.end}"
        pairs = enumerate(zip(ours, whole, strict=False))
        place = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(whole)))
        shown = slice(max(0, place - SHOWN_BEFORE), place + SHOWN)
        return TurnsRejected(
            f"{source_of(self.tokenizer)}: the chat template renders a dialogue as"
            f" {whole[shown]!r}, but the prompt, the response and the token that ends it are"
            f" {ours[shown]!r}: correct the template (add_generation_prompt writes the header of a"
            " response, an added token ends it) or set template: dialogue"
        )


# --- ids --------------------------------------------------------------------------------------


class Encoder:
    """Encode prompts and responses by the tokenizers library.

    A response has the ids that follow the prompt's ids when both are encoded as one text, as a
    model generates them. They can differ from the ids of the response alone, which in SentencePiece
    models starts with a space. Where one token would span the end of the prompt and the start of
    the response, the response has the ids that it has alone. Added tokens divide a text, so that
    its parts between them are encoded apart.

    Args:
        template: As for resolved_template.
        generates: As for ChatTemplate.

    Attributes:
        template: "dialogue" or "chat".
        end_id: The token that ends a response: eos, or the chat template's end of a turn.

    Raises:
        InputError: The tokenizer is not a fast one, or its chat template does not continue a prompt
            by a response.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, generates: bool = True
    ) -> None:
        if not tokenizer.is_fast:
            raise InputError(
                f"{source_of(tokenizer)}: the tokenizer has no tokenizer.json: convert it to a fast"
                " one"
            )
        self.tokenizer, self.template = tokenizer, resolved_template(tokenizer, template)
        self.is_chat = self.template == "chat"
        self.backend = text_backend(tokenizer)
        self.special = SpecialTokens(tokenizer)
        self.end_id: int = end_of_turn(tokenizer)[1] if self.is_chat else tokenizer.eos_token_id
        # What writes the turns as texts.
        self.writer = ChatTemplate(tokenizer, generates) if self.is_chat else DialogueTemplate()
        self.context_ids = cache(lambda text: self._ids([text])[0])
        # Whether texts may have marks: only `marked` writes them.
        self.has_marks = False
        # Tokens, such as eos, that the tokenizer appends to each text: the special ones after the
        # last token of the text.
        with limited_steps(source_of(tokenizer)):
            mask = self.backend.encode(":").special_tokens_mask
        self.num_appended = mask[::-1].index(0)

    def prompts(self, prompts: Sequence[list[Turn]]) -> list[Ids]:
        """Return the ids of each prompt, with the prefix (bos) of the tokenizer or its template."""
        return self._prompt_ids(list(map(self.writer.prompt, prompts)))

    def conversations(
        self, rows: Iterable[Conversation], sampled: bool = False
    ) -> Iterator[tuple[Ids, list[Ids]] | TurnsRejected]:
        """Yield the ids of each prompt and of its responses, with the tokens that end them.

        In place of them, yield why the template rejects the turns, or does not write a response.

        Args:
            rows: The turns of each prompt and its responses, as in records. A response that is None
                has no ids.
            sampled: A response that the template does not write follows the prompt as it is.
        """
        write = self.writer.sampled if sampled else self.writer.response
        remaining = iter(rows)
        while part := list(islice(remaining, ROWS)):
            written: list[Written | TurnsRejected] = []
            for turns, texts in part:
                try:
                    prompt = self.writer.prompt(turns)
                    new = [None if text is None else write(prompt, turns, text) for text in texts]
                    written.append((prompt, new))
                except TurnsRejected as error:
                    written.append(error)
            encoded = self._encoded([row for row in written if not isinstance(row, TurnsRejected)])
            for row in written:
                yield row if isinstance(row, TurnsRejected) else next(encoded)

    def _encoded(self, written: Sequence[Written]) -> Iterator[tuple[Ids, list[Ids]]]:
        """Yield the ids of prompts and of their responses, given as texts.

        In a chat, a prompt that continues the row before, as in a dialogue whose turns are all
        trained, is encoded from the end of that row's response on: else, time would grow with the
        square of the number of turns.
        """
        pairs = [(prompt, text) for prompt, texts in written for text in texts if text is not None]
        ids, cuts, whole = self._response_ids(pairs), [], ""
        for prompt, texts in written:
            is_continued = self.is_chat and whole and prompt.startswith(whole)
            cuts.append(len(whole) - len(self.writer.end) if is_continued else 0)
            whole = f"{prompt}{texts[0]}{self.writer.end}" if texts and texts[0] is not None else ""
        pieces = self._prompt_ids([row[0][cut:] for row, cut in zip(written, cuts, strict=True)])
        before: Ids = []
        for (_, texts), piece, cut in zip(written, pieces, cuts, strict=True):
            # The response before has the token that ends it.
            start = [*before, *piece[1:]] if cut else piece
            responses = [[] if text is None else next(ids) for text in texts]
            before = [*start, *responses[0]] if responses else []
            yield start, responses

    def rendered(self, turns: Sequence[Turn]) -> Ids:
        """Return the ids of turns as the chat template renders them, to the end of the text."""
        return self._ids([render_turns(self.tokenizer, turns)])[0]

    def texts(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of plain texts, from the tokenizer's prefix to eos."""
        return [[*ids, self.tokenizer.eos_token_id] for ids in self._prefixed_ids(texts)]

    def has_special_token(self, text: str) -> bool:
        """Return whether a text would be encoded to special tokens.

        This happens with a chat template only, which writes special tokens as text.
        """
        return self.is_chat and self.special.occur_in(text)

    def require_text(self, name: str, texts: Iterable[str]) -> None:
        """Raise InputError if one of the texts would be encoded to special tokens.

        name: What the error calls the text.
        """
        for text in filter(self.has_special_token, texts):
            raise InputError(f"{name} {text[:60]!r} contains a special token: remove it")

    def marked(self, text: str) -> str:
        """Return a text in which marks surround special tokens: they are encoded as text."""
        if not self.is_chat:
            return text
        self.has_marks = True
        # Such a character of the text is surrounded, too.
        pattern = f"[{OPEN}{CLOSE}]|{self.special.pattern.pattern}"
        marked = re.sub(pattern, rf"{OPEN}\g<0>{CLOSE}", text)
        # What only its normalization makes a special token has no place in the text.
        if self.special.occur_in(MARKED.sub(OPEN, marked)):
            return f"{OPEN}{re.sub(f'[{OPEN}{CLOSE}]', '', text)}{CLOSE}"
        return marked

    def _prompt_ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of the texts of prompts: a chat template writes the prefix itself."""
        return self._ids(texts) if self.is_chat else self._prefixed_ids(texts)

    def _prefixed_ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of plain texts with the prefix, without tokens that are appended."""
        encoded = self._encode(texts, as_text=True, add_special_tokens=True)
        return [ids[: len(ids) - self.num_appended] for ids in encoded]

    def _response_ids(self, written: Sequence[tuple[str, str]]) -> Iterator[Ids]:
        """Yield the ids of responses behind their prompts, with the token that ends them."""
        # In text, no token ends a response. In a chat, white space before it may belong to it.
        text_of_end, ids_of_end = self.writer.end, [] if self.is_chat else [self.end_id]
        contexts = [self._context(prompt) for prompt, _ in written]
        texts = [f"{c}{text}{text_of_end}" for c, (_, text) in zip(contexts, written, strict=True)]
        for ids, name, (_, text) in zip(self._ids(texts), contexts, written, strict=True):
            context = self.context_ids(name)
            start, ids = ids[: len(context)], ids[len(context) :] + ids_of_end
            if start != context or ids[-1:] != [self.end_id]:
                ids = [*self._ids([text])[0], self.end_id]
            yield ids

    def _context(self, prompt: str) -> str:
        """Return the end of a prompt that a response is encoded with, from a special token on."""
        if not self.is_chat or prompt.endswith(self.writer.context):
            return self.writer.context
        *_, start = [0, *(found.start() for found in self.special.pattern.finditer(prompt))]
        return prompt[start:]

    def _ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts as the template writes them, some with marks."""
        if not (self.has_marks and any(OPEN in text for text in texts)):
            # In text, "</s>" is text and must not end a response; in a chat template it is a token.
            return self._encode(texts, as_text=not self.is_chat)
        encoded = []
        for text in texts:
            ids: Ids = []
            # Every second piece was marked.
            for number, piece in enumerate(MARKED.split(text)):
                if piece:
                    ids += self._encode([piece], as_text=number % 2 == 1)[0]
            encoded.append(ids)
        return encoded

    def _encode(
        self, texts: Sequence[str], as_text: bool, add_special_tokens: bool = False
    ) -> list[Ids]:
        """Return the ids of texts. as_text: Special tokens in them are text."""
        self.backend.encode_special_tokens = as_text
        with limited_steps(source_of(self.tokenizer)):
            encoded = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [each.ids for each in encoded]
