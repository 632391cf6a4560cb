"""Whole conversations as reward models read them: a prompt and its response in one sequence.

A reward model whose tokenizer or template differs from the actor's reads the text of a response, in
the form that it was trained on. Special tokens that occur in the text are text.
"""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from snakechat.data.dialogues import Turn, render_response, response_content
from snakechat.data.encoder import Encoder

# Returns the token ids of each conversation, given the turns of prompts and the texts of responses.
# A space in front of a response separates it from a marker; it is not part of a message.
ConversationEncoder = Callable[[Sequence[list[Turn]], Sequence[str]], list[list[int]]]


class TurnEncoder:
    """Encode conversations as the trainers of the pipeline do: prompt, response, end of turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self.encoder = Encoder(tokenizer, template)

    def __call__(self, prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[list[int]]:
        prompts = [_marked(self.encoder, turns) for turns in prompts]
        texts = [self.encoder.marked(response_content(text)) for text in responses]
        texts = list(map(render_response, texts))
        rows = list(self.encoder.conversations(prompts, texts, sampled=True))
        self.encoder.marks.clear()
        return [[*prompt, *response] for prompt, [response] in rows]


class ChatEncoder:
    """Encode conversations by the chat template of a classifier, with the response as last turn.

    Raises:
        InputError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.encoder = Encoder(tokenizer, "chat", generates=False)

    def __call__(self, prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[list[int]]:
        encoded = []
        for turns, text in zip(prompts, responses, strict=True):
            response = ("assistant", response_content(text))
            encoded.append(self.encoder.rendered(_marked(self.encoder, [*turns, response])))
            self.encoder.marks.clear()
        return encoded


def _marked(encoder: Encoder, turns: Sequence[Turn]) -> list[Turn]:
    """Return turns in which characters stand for special tokens."""
    return [(role, encoder.marked(text)) for role, text in turns]


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
