"""Encode prompts and responses: what a model reads, and what it is trained to write."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from snakechat.data.chat_templates import (
    SpecialTokens,
    TurnsRejected,
    end_of_turn_id,
    render_turns,
    source_of,
    text_backend,
)
from snakechat.data.dialogues import Turn
from snakechat.data.templates import ChatTemplate, DialogueTemplate, Written
from snakechat.data.tokenizers import encode_texts, resolved_template
from snakechat.workflow.errors import InputError

# Marks around special tokens in a text while a chat template renders it. Unicode assigns these
# characters no meaning.
OPEN, CLOSE = "\U00100000", "\U00100001"
MARKED = re.compile(f"{OPEN}([{OPEN}{CLOSE}]|[^{OPEN}{CLOSE}]+){CLOSE}")

# Rows that are encoded while the next ones are rendered.
ROWS = 128

Ids = list[int]
T = TypeVar("T")


class Encoded(NamedTuple):
    """The ids of a prompt and of a response with the token that ends it.

    Attributes:
        prompt: If it continues the response before it, only the ids after that response.
        continues: Whether it does.
    """

    prompt: Ids
    response: Ids
    continues: bool


def accepted(rows: Iterable[T | TurnsRejected]) -> Iterator[T]:
    """Yield rows; raise the first rejection among them."""
    for row in rows:
        if isinstance(row, TurnsRejected):
            raise row
        yield row


class Encoder:
    """Encode prompts and responses by the tokenizers library.

    A response has the ids that follow the prompt's ids when both are encoded as one text: this is
    what a model generates after the prompt. They can differ from the ids of the response
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
        self.is_chat = template == "chat"
        if not tokenizer.is_fast:
            raise InputError(
                f"{source_of(tokenizer)}: the tokenizer has no tokenizer.json: convert it to a fast"
                " one"
            )
        if self.is_chat and not tokenizer.chat_template:
            raise InputError(
                f"{source_of(tokenizer)}: the tokenizer has no chat template, which template: chat"
                " requires: use template: dialogue"
            )
        self.backend = text_backend(tokenizer)
        # In text, "</s>" is text and must not end a response; in a chat template it is a token.
        self.backend.encode_special_tokens = not self.is_chat
        self.special = SpecialTokens(tokenizer)
        self.end_id: int = end_of_turn_id(tokenizer) if self.is_chat else tokenizer.eos_token_id
        # What writes the turns as texts.
        self.writer = ChatTemplate(tokenizer, generates) if self.is_chat else DialogueTemplate()
        self.contexts: dict[str, Ids] = {}
        # Whether texts may have marks: only `marked` writes them.
        self.has_marks = False
        self.num_appended = self._num_appended()

    def prompts(self, prompts: Sequence[list[Turn]]) -> list[Ids]:
        """Return the ids of each prompt, with the prefix (bos) of the tokenizer or its template."""
        return self._prompt_ids(list(map(self.writer.prompt, prompts)))

    def conversations(
        self,
        prompts: Sequence[list[Turn]],
        *responses: Sequence[str | None],
        sampled: bool = False,
    ) -> Iterator[tuple[Ids, list[Ids]] | TurnsRejected]:
        """Yield the ids of each prompt and of its responses, with the tokens that end them.

        In place of them, yield why the template rejects the turns, or does not write a response.

        Args:
            responses: As in records, with a space in front or as JSON of a message. One that is
                None has no ids.
            sampled: A response that the template does not write follows the prompt as it is.
        """
        write = self.writer.sampled if sampled else self.writer.response

        def written(turns: list[Turn], *texts: str | None) -> list[Written]:
            prompt = self.writer.prompt(turns)
            return [
                Written(prompt, None if text is None else write(prompt, turns, text))
                for text in texts or (None,)
            ]

        for row in self.encoded(written, prompts, *responses):
            if isinstance(row, TurnsRejected):
                yield row
            else:
                yield row[0].prompt, [each.response for each in row]

    def encoded(
        self, write: Callable[..., list[Written]], *columns: Sequence[Any]
    ) -> Iterator[list[Encoded] | TurnsRejected]:
        """Return the ids of what `write` makes of each row, or its rejection.

        Args:
            write: Such as `writer.responses`.
            columns: The arguments of `write` for each row.

        The texts of the next rows are written while a thread encodes the rows before. It ends here:
        garbage collection of a suspended iterator would wait for it, maybe where it cannot end.
        """

        def written(*row: Any) -> list[Written] | TurnsRejected:
            try:
                return write(*row)
            except TurnsRejected as error:
                return error

        rows = map(written, *columns)
        with ThreadPoolExecutor(1) as thread:
            parts = iter(lambda: list(islice(rows, ROWS)), [])
            encoded = list(thread.map(self._ids_of_rows, parts))
        return chain.from_iterable(encoded)

    def _ids_of_rows(
        self, rows: Sequence[list[Written] | TurnsRejected]
    ) -> list[list[Encoded] | TurnsRejected]:
        """Return the ids of responses and of their prompts."""
        everything = [each for row in rows if isinstance(row, list) for each in row]
        responses = iter(self._response_ids([e for e in everything if e.response is not None]))
        # The responses of a pair have one prompt.
        starts = list({each.prompt: None for each in everything if each.between is None})
        prompts = dict(zip(starts, self._prompt_ids(starts), strict=True))
        between = iter(self._ids(each.between for each in everything if each.between is not None))
        follows, found = False, list[Encoded]()
        for each in everything:
            if each.between is None:
                prompt, continues = prompts[each.prompt], False
            else:
                # The ids of the token that ends the response before it are that response's.
                prompt, continues = next(between)[1:], follows
                if not follows:
                    [prompt] = self._prompt_ids([each.prompt])
            ids, follows = ([], False) if each.response is None else next(responses)
            found.append(Encoded(prompt, ids, continues))
        encoded = iter(found)
        return [
            row if isinstance(row, TurnsRejected) else list(islice(encoded, len(row)))
            for row in rows
        ]

    def rendered(self, turns: Sequence[Turn]) -> Ids:
        """Return the ids of turns as the chat template renders them, to the end of the text."""
        return self._ids([render_turns(self.tokenizer, turns)])[0]

    def texts(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of plain texts, from the tokenizer's prefix to eos."""
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
        # In text, no token ends a response. In a chat, white space before it may belong to it.
        text_of_end, ids_of_end = self.writer.end, [] if self.is_chat else [self.end_id]
        contexts = [self._context(each.prompt) for each in written]
        texts = [f"{c}{each.response}" for c, each in zip(contexts, written, strict=True)]
        encoded = self._ids(text + text_of_end for text in texts)
        responses = []
        for ids, name, each in zip(encoded, contexts, written, strict=True):
            context = self.contexts[name]
            start, ids = ids[: len(context)], ids[len(context) :] + ids_of_end
            fits = start == context and ids[-1:] == [self.end_id]
            if not fits:
                ids = [*self._ids([str(each.response)])[0], self.end_id]
            responses.append((ids, fits))
        return responses

    def _context(self, prompt: str) -> str:
        """Return the end of a prompt that a response is encoded with, from a special token on."""
        text = self.writer.context
        if self.is_chat and not prompt.endswith(text):
            found = [*self.special.pattern.finditer(prompt)]
            text = prompt[found[-1].start() :] if found else prompt
        if text not in self.contexts:
            [self.contexts[text]] = self._ids([text])
        return text

    def _ids(self, texts: Iterable[str], add_special_tokens: bool = False) -> list[Ids]:
        texts = list(texts)
        options = {"add_special_tokens": add_special_tokens}
        if not (self.has_marks and any(OPEN in text for text in texts)):
            return encode_texts(self.tokenizer, self.backend, texts, **options)
        encoded = []
        for text in texts:
            ids: Ids = []
            # Every second piece was marked.
            for number, piece in enumerate(MARKED.split(text)):
                if piece:
                    self.backend.encode_special_tokens = number % 2 == 1
                    ids += encode_texts(self.tokenizer, self.backend, [piece], **options)[0]
            encoded.append(ids)
        self.backend.encode_special_tokens = False
        return encoded
