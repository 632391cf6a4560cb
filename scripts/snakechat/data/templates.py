"""Prompts and responses as texts: what a template writes of the turns of a dialogue."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from snakechat.data.chat_templates import (
    ANSWER,
    ASSISTANT,
    QUESTION,
    USER,
    SpecialTokens,
    TurnsRejected,
    end_of_turn,
    render_turns,
    rendered_or_empty,
    source_of,
)
from snakechat.data.dialogues import (
    RESPONSE,
    THOUGHTS,
    Turn,
    has_messages,
    is_message,
    message_of,
    recorded_response,
    render_prompt,
    response_content,
    response_turn,
)

# Characters of a difference between two texts that an error shows, before and after its start.
SHOWN_BEFORE, SHOWN = 20, 40
# How some templates start the thoughts of a response, in the prompt or in the response.
THINK = "<think>"
START_OF_THOUGHTS = re.compile(rf"{THINK}\s*\Z")


class Written(NamedTuple):
    """A response as it is written behind its prompt.

    Attributes:
        prompt: The whole text in front of the response.
        response: The text of the response, without the token that ends it; None without one.
        between: The part of `prompt` from the token that ends the response before it; None if the
            prompt does not continue that response.
    """

    prompt: str
    response: str | None
    between: str | None = None


class DialogueTemplate:
    """The template `dialogue`: texts in which "Human:" and "Assistant:" mark the turns.

    Attributes:
        context: The text between the last turn of a prompt and a response.
        end: The text that ends a response; "" if only a token does.
    """

    context, end = RESPONSE, ""

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Return the text of a prompt.

        Raises:
            TurnsRejected: A turn is more than a text.
        """
        if has_messages(turns):
            raise TurnsRejected(
                "template: dialogue cannot write thoughts, tools and their calls: use a model with"
                " a chat template that does, and template: chat"
            )
        return render_prompt(turns)

    def response(self, prompt: str, turns: Sequence[Turn], response: str) -> str:
        """Return the text of a response behind its prompt."""
        if is_message(response):
            self.prompt([response_turn(response)])
        return response

    sampled = response

    def responses(self, turns: Sequence[Turn], places: Sequence[int]) -> list[Written]:
        """Return the responses of a dialogue as they are written behind their prompts."""
        texts = [recorded_response(turns[place]) for place in places]
        return [
            Written(self.prompt(turns[:place]), self.response("", turns, text))
            for place, text in zip(places, texts, strict=True)
        ]


class ChatTemplate:
    """The chat template of a tokenizer.

    A response is what the template writes between the prompt, rendered alone, and the token that
    ends the turn, when it renders the whole dialogue. Each row is compared with this rendering.

    Args:
        generates: Whether a model responds; a classifier's template need not write prompts.

    Attributes: As of DialogueTemplate.

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
        is_written = bool(prompt and dialogue)
        self.context = prompt.rpartition(USER)[2] if is_written else ""
        # Other text in front, such as empty thoughts, is left to the model.
        space = dialogue.rpartition(ASSISTANT)[0].removeprefix(prompt)
        self.space = space if is_written and space.isspace() else ""
        # Then no text of a turn has it.
        self.has_header = self.special.pattern.search(self.context) is not None
        # Rows report a template that rejects these turns, or starts a response with thoughts.
        if generates and is_written:
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
        # A sampled response has the text in front of the token that ends it.
        turn = response_turn(
            response if is_message(response) else response.removesuffix(self.after)
        )
        for further in ([QUESTION], []):
            try:
                whole = render_turns(self.tokenizer, [*turns, turn, *further])
                return self._response_in(whole, prompt, turn)
            except TurnsRejected as error:
                rejected = error
        raise rejected

    def responses(self, turns: Sequence[Turn], places: Sequence[int]) -> list[Written]:
        """Return the responses of a dialogue as they are written behind their prompts.

        Each response is read from the rendering of the whole dialogue. If the template writes
        earlier turns in another way, the dialogue up to the response is rendered instead.
        """
        if not places:
            return []
        # The dialogue up to its last response, and a further question.
        whole = rendered_or_empty(self.tokenizer, [*turns[: places[-1] + 1], QUESTION])
        if self.has_header and not has_messages(turns):
            found = self._found(whole, turns, places)
            if found is not None:
                return found
        written: list[Written] = []
        # Where the response before ends in this rendering; None if it does not have it.
        stop: int | None = None
        for place in places:
            prompt = self.prompt(turns[:place])
            between = None
            if stop is not None and stop <= len(prompt) and whole.startswith(prompt):
                between = prompt[stop:]
            try:
                text = self._response_in(whole, prompt, turns[place])
                stop = len(prompt) + len(text)
            except TurnsRejected:
                text = self.response(prompt, turns[:place], recorded_response(turns[place]))
                stop = None
            written.append(Written(prompt, text, between))
        return written

    def _found(
        self, whole: str, turns: Sequence[Turn], places: Sequence[int]
    ) -> list[Written] | None:
        """Return the responses of a dialogue of texts as its rendering as a whole has them.

        This saves the rendering of each prompt. The header of a response has a special token, so
        that no text of a turn has it. The text between header and end of a turn must be its
        content, and the first, second, fourth ... and the last prompt must be as rendered alone.

        Returns:
            None if the rendering differs: the template treats earlier turns in another way.
        """
        written: list[Written] = []
        # The ends of the last response, and of the last one in `places`.
        stop = before = 0
        for number, turn in enumerate(turns[: places[-1] + 1]):
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
                if is_compared and self.prompt(turns[:number]) != prompt:
                    return None
                written.append(Written(prompt, text, whole[before:start] if written else None))
                before = stop
        return written

    def _response_in(self, whole: str, prompt: str, response: Turn) -> str:
        """Return the text of a response in the rendering of a dialogue, behind its prompt.

        Raises:
            TurnsRejected: The rendering does not continue the prompt by the response.
        """
        stop = whole.find(self.end, len(prompt)) if whole.startswith(prompt) else -1
        if stop < 0:
            raise self._mismatch(prompt, whole, message_of(response)["content"])
        text = whole[len(prompt) : stop]
        self._require_whole(prompt, text, response)
        return text

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


def _squeezed(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())
