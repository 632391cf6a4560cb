"""Encode prompts and responses: what a model reads, and what it is trained to write."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from snakechat.data.chat_templates import render_messages
from snakechat.data.dialogues import (
    MESSAGE,
    RESPONSE,
    Turn,
    is_message,
    messages_of,
    render_prompt,
    response_content,
    response_turn,
    tools_of,
    uses_tools,
)
from snakechat.data.special_tokens import (
    ASSISTANT,
    USER,
    SpecialTokens,
    end_of_turn_id,
    response_context,
    text_backend,
)
from snakechat.data.tokenizers import check_tokenizer, encode_texts, resolved_template, source_of
from snakechat.data.tool_templates import unwritten
from snakechat.workflow.errors import InputError

# Prompts with which an Encoder compares the chat template: two turns of the user, or one.
PROBES: tuple[list[Turn], ...] = (
    [("user", USER), ("assistant", ASSISTANT), ("user", USER)],
    [("user", USER)],
)
# Characters of a difference between two texts that an error shows, before and after its start.
SHOWN_BEFORE, SHOWN = 20, 40


class TurnsRejected(InputError):
    """A chat template rejects the turns of a conversation."""


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
    if uses_tools(turns) and (missing := unwritten(tokenizer, messages, tools)):
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

    A response has the ids that follow those of a prompt when both are encoded as one text: this is
    what a model generates after the prompt's ids. They can differ from the ids of the response
    alone, which in SentencePiece models starts with a space. Where one token would span the end of
    the prompt and the start of the response, which no generated response can have, the response has
    the ids that it has alone.

    Args:
        tokenizer: A fast tokenizer.
        template: "dialogue" renders the turns of a prompt with "Human:" and "Assistant:"; "chat"
            by the tokenizer's chat template.

    Attributes:
        template: "dialogue" or "chat".
        end_id: The token that ends a response: eos, or the chat template's end of a turn.

    Raises:
        InputError: The tokenizer is not a fast one, has no chat template although template is
            "chat", or one that renders a dialogue to other ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        template = resolved_template(tokenizer, template)
        self.tokenizer, self.template = tokenizer, template
        check_tokenizer(tokenizer, template)
        self.backend = text_backend(tokenizer)
        # In text, "</s>" is text and must not end a response; in a chat template it is a token.
        self.backend.encode_special_tokens = template == "dialogue"
        self.special = SpecialTokens(tokenizer)
        is_chat = template == "chat"
        self.end_id: int = end_of_turn_id(tokenizer) if is_chat else tokenizer.eos_token_id
        # The text between the last turn of a prompt and a response, and around the response.
        self.context, self.space, self.after = (
            response_context(tokenizer) if is_chat else (RESPONSE, "", "")
        )
        self.num_appended = self._num_appended()
        if is_chat:
            self._compare_with_template()

    def prompts(self, prompts: Sequence[list[Turn]]) -> list[list[int]]:
        """Return the ids of each prompt, with the prefix (bos) of the tokenizer or its template."""
        if self.template == "chat":
            return self._ids(map(self._chat, prompts), add_special_tokens=False)
        encoded = self._ids(map(self._dialogue, prompts), add_special_tokens=True)
        # Without tokens that would end a text.
        return [ids[: len(ids) - self.num_appended] for ids in encoded]

    def responses(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each response, followed by the token that ends a turn.

        texts: Responses as in records, with a space in front or as JSON of a message.
        """
        texts = self._as_written(texts)
        (context,) = self._ids([self.context], add_special_tokens=False)
        in_context = self._ids([self.context + text for text in texts], add_special_tokens=False)
        length = len(context)
        return [
            [*(ids[length:] if ids[:length] == context else self._alone(text)), self.end_id]
            for ids, text in zip(in_context, texts, strict=True)
        ]

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
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
        return self.template == "chat" and self.special.occur_in(text)

    def _as_written(self, responses: Sequence[str]) -> Sequence[str]:
        """Return responses as they follow a prompt that the model reads."""
        if self.template == "dialogue":
            for response in filter(is_message, responses):
                self._dialogue([response_turn(response)])
            return responses
        return list(map(self._response_text, responses))

    def _response_text(self, response: str) -> str:
        """Return a response as the chat template writes it, without the token that ends it."""
        if is_message(response):
            return self._message_text((MESSAGE, response))
        # A sampled response has the text in front of the token that ends it.
        return self.space + response_content(response).removesuffix(self.after) + self.after

    def _message_text(self, message: Turn) -> str:
        """Return a message of the assistant as the chat template writes it.

        It is what follows the header of a response, preferably of an earlier one.

        Raises:
            TurnsRejected: The template writes it elsewhere, or without the token that ends a turn.
        """
        question, end = ("user", USER), str(self.tokenizer.decode([self.end_id]))
        start = self._chat([question])
        for turns in ([question, message, question], [question, message]):
            with suppress(TurnsRejected):
                whole = render_turns(self.tokenizer, turns)
                text, found, _ = whole.removeprefix(start).partition(end)
                if found and whole.startswith(start):
                    return text
        # The template's own reason, if it has one.
        render_turns(self.tokenizer, [question, message])
        raise TurnsRejected(
            f"{source_of(self.tokenizer)}: the chat template does not write a call of tools between"
            f" the header of a response and {end}: use a model whose template does"
        )

    def _chat(self, prompt: list[Turn]) -> str:
        return render_turns(self.tokenizer, prompt, prompt=True)

    def _dialogue(self, prompt: list[Turn]) -> str:
        if uses_tools(prompt):
            raise TurnsRejected(
                "template: dialogue cannot write tools and their calls: use a model with a chat"
                " template that does, and template: chat"
            )
        return render_prompt(prompt)

    def _compare_with_template(self) -> None:
        """Raise InputError if the chat template renders a dialogue to another text than ours.

        The response is the last turn or an earlier one, which some templates render differently
        (Qwen3 puts an empty thought in front of the last response). A template that rejects the
        dialogues is compared with none: rows report it.
        """
        end = self.tokenizer.decode([self.end_id])
        for prompt in PROBES:
            turns = [*prompt, response_turn(ASSISTANT)]
            try:
                wholes = [
                    render_turns(self.tokenizer, dialogue)
                    for dialogue in (turns, [*turns, ("user", USER)])
                ]
                ours = f"{self._chat(prompt)}{self._response_text(ASSISTANT)}{end}"
            except TurnsRejected:
                continue
            if not any(whole.startswith(ours) for whole in wholes):
                place, whole = max((common_length(ours, whole), whole) for whole in wholes)
                shown = slice(max(0, place - SHOWN_BEFORE), place + SHOWN)
                raise InputError(
                    f"{source_of(self.tokenizer)}: the chat template renders a dialogue as"
                    f" {whole[shown]!r}, but the prompt, the response and the token that ends it"
                    f" are {ours[shown]!r}: correct the template (add_generation_prompt writes the"
                    " header of a response, an added token ends it) or set template: dialogue"
                )
            return

    def _num_appended(self) -> int:
        """Return how many tokens, such as eos, the tokenizer appends to each text."""
        [[*_, last]] = self._ids([":"], add_special_tokens=False)
        [with_special] = self._ids([":"], add_special_tokens=True)
        return with_special[::-1].index(last)

    def _alone(self, text: str) -> list[int]:
        """Return the ids of a response without its context."""
        return self._ids([text], add_special_tokens=False)[0]

    def _ids(self, texts: Iterable[str], add_special_tokens: bool) -> list[list[int]]:
        return encode_texts(
            self.tokenizer, self.backend, list(texts), add_special_tokens=add_special_tokens
        )
