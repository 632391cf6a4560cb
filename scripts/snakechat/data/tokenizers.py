"""Tokenizers: loading, encoding of prompts and responses."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from snakechat.data.dialogues import (
    RESPONSE,
    Turn,
    chat_template,
    messages_of,
    render_prompt,
    response_content,
)
from snakechat.data.model_files import load_pretrained
from snakechat.data.special_tokens import (
    end_of_turn_id,
    response_context,
    set_pad_token,
    special_pattern,
)
from snakechat.data.template_limits import render_messages
from snakechat.workflow.errors import InputError


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, with a pad token that does not end a turn.

    Raises:
        InputError: The tokenizer has no eos token.
    """
    tokenizer = load_pretrained(AutoTokenizer, folder)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{folder}: the tokenizer has no eos token, which ends a response:"
            " set eos_token in tokenizer_config.json"
        )
    set_pad_token(tokenizer)
    # Decoding returns the text of the ids. transformers warns of true, which Llama 3's files have.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def load_training_tokenizer(folder: str | Path, template: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model to train, with the chat template that the model is trained on.

    template: As in resolved_template; "dialogue" sets the template of snakechat.data.dialogues,
    "chat" keeps the tokenizer's.
    """
    tokenizer = load_tokenizer(folder)
    if resolved_template(tokenizer, template) == "dialogue":
        tokenizer.chat_template = chat_template(tokenizer)
    return tokenizer


def resolved_template(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the prompt template of a model: dialogue or chat.

    template: "auto" is "chat" if the tokenizer has a chat template. A model that was trained with
    "dialogue" has a chat template that renders this format: it remains "dialogue".
    """
    if template != "auto":
        return template
    has_own = tokenizer.chat_template and tokenizer.chat_template != chat_template(tokenizer)
    return "chat" if has_own else "dialogue"


class Encoder:
    """Encode prompts and responses by the tokenizers library; safe to call from several threads.

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
        InputError: The tokenizer is not a fast one, or has no chat template although template is
            "chat".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        template = resolved_template(tokenizer, template)
        self.tokenizer, self.template = tokenizer, template
        # For errors.
        self.source = tokenizer.name_or_path or "tokenizer"
        if not tokenizer.is_fast:
            raise InputError(
                f"{self.source}: the tokenizer has no tokenizer.json: convert it to a fast one"
            )
        if template == "chat" and not tokenizer.chat_template:
            raise InputError(
                f"{self.source}: the tokenizer has no chat template, which template: chat requires:"
                " use template: dialogue"
            )
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        # In text, "</s>" is text and must not end a response; in a chat template it is a token.
        self.backend.encode_special_tokens = template == "dialogue"
        self.special = special_pattern(tokenizer)
        is_chat = template == "chat"
        self.end_id: int = end_of_turn_id(tokenizer) if is_chat else tokenizer.eos_token_id
        # The text between the last turn of a prompt and a response.
        self.context, self.space = response_context(tokenizer) if is_chat else (RESPONSE, "")

    def prompts(self, prompts: Sequence[list[Turn]]) -> list[list[int]]:
        """Return the ids of each prompt, with the prefix (bos) of the tokenizer or its template."""
        return self._ids(self._rendered(prompts), add_special_tokens=self.template == "dialogue")

    def responses(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each response, followed by the token that ends a turn.

        texts: Responses as in records, with a space in front.
        """
        texts = self._as_written(texts)
        (context,) = self._ids([self.context], add_special_tokens=False)
        in_context = self._ids([self.context + text for text in texts], add_special_tokens=False)
        length = len(context)
        return [
            [*(ids[length:] if ids[:length] == context else self._alone(text)), self.end_id]
            for ids, text in zip(in_context, texts, strict=True)
        ]

    def are_joint(self, prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[bool]:
        """Return whether a prompt and its response together have the ids of the two as one text."""
        texts = zip(self._rendered(prompts), self._as_written(responses), strict=True)
        expected = self._ids(map("".join, texts), add_special_tokens=self.template == "dialogue")
        ids = zip(self.prompts(prompts), self.responses(responses), strict=True)
        return [
            [*prompt, *response[:-1]] == whole
            for (prompt, response), whole in zip(ids, expected, strict=True)
        ]

    def has_special_token(self, text: str) -> bool:
        """Return whether a text would be encoded to special tokens.

        This happens with a chat template only, which writes special tokens as text.
        """
        return self.template == "chat" and self.special.search(text) is not None

    def _rendered(self, prompts: Sequence[list[Turn]]) -> Sequence[str]:
        """Return prompts as the model reads them."""
        return list(map(self._chat if self.template == "chat" else render_prompt, prompts))

    def _as_written(self, responses: Sequence[str]) -> Sequence[str]:
        """Return responses as they follow a prompt that the model reads."""
        if self.template == "dialogue":
            return responses
        return [self.space + response_content(text) for text in responses]

    def _chat(self, prompt: list[Turn]) -> str:
        messages = messages_of(prompt)
        try:
            return render_messages(self.tokenizer, messages, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.source}: the chat template rejects turns of {roles}: {reason}"
            ) from None

    def _alone(self, text: str) -> list[int]:
        """Return the ids of a response without its context."""
        return self._ids([text], add_special_tokens=False)[0]

    def _ids(self, texts: Iterable[str], add_special_tokens: bool) -> list[list[int]]:
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]
