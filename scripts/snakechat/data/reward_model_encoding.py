"""Whole conversations as reward models read them: a prompt and its response in one sequence.

A reward model whose tokenizer or template differs from the actor's reads the text of a response, in
the form that it was trained on. Special tokens that occur in the text are text.
"""

import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from snakechat.data.dialogues import Turn, render_response, response_content
from snakechat.data.encoder import Encoder, render_turns
from snakechat.data.special_tokens import SpecialTokens, text_backend
from snakechat.data.tokenizers import check_tokenizer, encode_texts

# Returns the token ids of each conversation, given the turns of prompts and the texts of responses.
# A space in front of a response separates it from a marker; it is not part of a message.
ConversationEncoder = Callable[[Sequence[list[Turn]], Sequence[str]], list[list[int]]]

# Characters that stand for special tokens in a text while a chat template renders it. Unicode
# assigns them no meaning.
PRIVATE_USE = range(0xF0000, 0xFFFFE)


class TurnEncoder:
    """Encode conversations as the trainers of the pipeline do: prompt, response, end of turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self.encoder = Encoder(tokenizer, template)

    def __call__(self, prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[list[int]]:
        responses = [render_response(response_content(text)) for text in responses]
        prompt_ids, response_ids = self.encoder.prompts(prompts), self.encoder.responses(responses)
        for row, text in enumerate(responses):
            if self.encoder.has_special_token(text):
                self.encoder.backend.encode_special_tokens = True
                [response_ids[row]] = self.encoder.responses([text])
                self.encoder.backend.encode_special_tokens = False
        return [[*a, *b] for a, b in zip(prompt_ids, response_ids, strict=True)]


class ChatEncoder:
    """Encode conversations by the chat template of a classifier, with the response as last turn.

    Raises:
        InputError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_tokenizer(tokenizer, "chat")
        self.tokenizer = tokenizer
        self.backend, self.special = text_backend(tokenizer), SpecialTokens(tokenizer)
        self.backend.encode_special_tokens = False
        # The characters that stand for special tokens, and back.
        self.marks: dict[str, str] = {}

    def __call__(self, prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[list[int]]:
        texts = map(self._render, prompts, responses)
        return [self._ids(text) for text in texts]

    def _render(self, turns: list[Turn], response: str) -> str:
        turns = [*turns, ("assistant", response_content(response))]
        marked = [(role, self._marked(text)) for role, text in turns]
        return render_turns(self.tokenizer, marked)

    def _marked(self, text: str) -> str:
        """Return a text in which characters stand for special tokens."""
        text = self.special.pattern.sub(lambda match: self._mark(match[0]), text)
        # What only its normalization makes a special token has no place in the text.
        return self._mark(text) if self.special.occur_in(text) else text

    def _mark(self, text: str) -> str:
        return self.marks.setdefault(text, chr(PRIVATE_USE[len(self.marks)]))

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation. Marked special tokens are encoded as text."""
        if not self.marks:
            return self._piece_ids(text)
        texts = {mark: special for special, mark in self.marks.items()}
        ids: list[int] = []
        for piece in re.split(f"([{''.join(texts)}])", text):
            if not piece:
                continue
            self.backend.encode_special_tokens = piece in texts
            ids += self._piece_ids(texts.get(piece, piece))
        self.backend.encode_special_tokens = False
        return ids

    def _piece_ids(self, text: str) -> list[int]:
        return encode_texts(self.tokenizer, self.backend, [text], add_special_tokens=False)[0]


def response_texts(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[int]], ended: Sequence[bool]
) -> list[str]:
    """Return sampled responses as text, without the tokens that end them.

    Other special tokens that the actor sampled stay visible: they are not part of a good response.
    """
    ids = [
        list(ids[:-1] if is_ended else ids) for ids, is_ended in zip(responses, ended, strict=True)
    ]
    texts: list[str] = tokenizer.batch_decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return texts
