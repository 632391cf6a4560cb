"""Modelfiles: models for Ollama, whose chat templates are Go templates.

Ollama does not run the chat template of a GGUF file. The Go template here writes what the chat
template writes around each turn, which example conversations show.
"""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from snakechat.data.gguf_vocabulary import adds_bos
from snakechat.data.special_tokens import end_of_turn_id, render_chat

# Texts of the example conversations.
SYSTEM, QUESTIONS, ANSWERS = "Be kind.", ("One?", "Two?", "Three?"), ("Four.", "Five.")
# Turns of the conversations that the Go template has to write as the chat template does.
ONE_TURN = [("user", QUESTIONS[0])]
THREE_TURNS = [*ONE_TURN, ("assistant", ANSWERS[0]), ("user", QUESTIONS[1])]
FIVE_TURNS = [*THREE_TURNS, ("assistant", ANSWERS[1]), ("user", QUESTIONS[2])]

# Sampling as in training and in chat.py; by default, Ollama penalizes repetition.
PARAMETERS = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


class TurnTexts(NamedTuple):
    """What a chat template writes around the text of each turn.

    Attributes:
        start: In front of a conversation without a system turn.
        system: Before and behind a system turn, with what starts the conversation; None if the
            chat template rejects one.
        user: Before and behind a turn of the user.
        assistant: Before and behind a response.
        end: In front of the next response.
    """

    start: str
    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    end: str

    def render(self, turns: Sequence[tuple[str, str]]) -> str:
        """Return the text of turns as `go_template` writes it, up to the next response."""
        around = {"system": self.system, "user": self.user, "assistant": self.assistant}
        has_system = self.system and any(role == "system" for role, _ in turns)
        texts = ["" if has_system else self.start]
        for role, text in turns:
            if pair := around[role]:
                texts += [pair[0], text, pair[1]]
        return "".join([*texts, self.end])

    def go_template(self) -> str:
        """Return the template of Ollama."""
        around = {"system": self.system, "user": self.user, "assistant": self.assistant}
        start = self.start
        if start and self.system:
            start = f"{{{{ if not .System }}}}{start}{{{{ end }}}}"
        branches = [
            f'if eq .Role "{role}" }}}}{pair[0]}{{{{ .Content }}}}{pair[1]}'
            for role, pair in around.items()
            if pair
        ]
        turns = "{{ else ".join(["", *branches]).removeprefix("{{ else ")
        return f"{start}{{{{ range .Messages }}}}{{{{ {turns}{{{{ end }}}}{{{{ end }}}}{self.end}"


def modelfile(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], model: str) -> str | None:
    """Return the Modelfile of a model; None if no Go template writes what its chat template writes.

    Args:
        stops: Ids of the tokens that end a response.
        model: Name of the GGUF file in the same folder.
    """
    texts = turn_texts(tokenizer)
    if texts is None:
        return None
    template = texts.go_template()
    stop_texts = [str(tokenizer.convert_ids_to_tokens(number)) for number in stops]
    if '"""' in template or any('"' in text for text in stop_texts):
        return None
    lines = [
        "# ollama create NAME --file Modelfile",
        f"FROM ./{model}",
        f'TEMPLATE """{template}"""',
        *(f'PARAMETER stop "{text}"' for text in stop_texts),
        *(f"PARAMETER {key} {value}" for key, value in PARAMETERS.items()),
    ]
    return "\n".join(lines) + "\n"


def turn_texts(tokenizer: PreTrainedTokenizerBase) -> TurnTexts | None:
    """Return what the chat template writes around turns; None if it depends on more than the role.

    The texts omit bos if the server prepends it to the prompt.
    """
    bos = str(tokenizer.bos_token) if adds_bos(tokenizer) else ""

    def render(turns: Sequence[tuple[str, str]]) -> str | None:
        text = render_chat(tokenizer, list(turns), prompt=True)
        return None if text is None else text.removeprefix(bos)

    one, three = render(ONE_TURN), render(THREE_TURNS)
    with_system = render([("system", SYSTEM), *ONE_TURN])
    if one is None or three is None:
        return None
    before, after = split(one, QUESTIONS[0])
    _, rest = split(three, QUESTIONS[0])
    to_answer, rest = split(rest, ANSWERS[0])
    to_question, _ = split(rest, QUESTIONS[1])
    starts = [before, to_question]
    around_system = None
    if with_system is not None and SYSTEM in with_system:
        around_system = split(with_system, SYSTEM)
        starts.append(split(around_system[1], QUESTIONS[0])[0])
    # What ends a turn belongs to that turn.
    _, end, start = common_suffix(starts).rpartition(end_of_turn(tokenizer))
    user = start.lstrip() if end else start, common_prefix([after, to_answer])
    texts = TurnTexts(
        start=before.removesuffix(user[0]),
        system=around_system and (around_system[0], starts[2].removesuffix(user[0])),
        user=user,
        assistant=(to_answer.removeprefix(user[1]), to_question.removesuffix(user[0])),
        end=after.removeprefix(user[1]),
    )
    conversations = [ONE_TURN, THREE_TURNS, FIVE_TURNS]
    if around_system:
        conversations += [[("system", SYSTEM), *turns] for turns in conversations]
    agree = all(texts.render(turns) == render(turns) for turns in conversations)
    # Two opening braces start an action of Go's templates.
    return texts if agree and "{{" not in texts.render(THREE_TURNS) else None


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the token that ends a turn."""
    return str(tokenizer.convert_ids_to_tokens(end_of_turn_id(tokenizer)))


def split(text: str, part: str) -> tuple[str, str]:
    """Return the text before and behind the first occurrence of a part."""
    before, _, after = text.partition(part)
    return before, after


def common_prefix(texts: Sequence[str]) -> str:
    """Return the longest text that all texts start with."""
    length = 0
    for characters in zip(*texts, strict=False):
        if len(set(characters)) > 1:
            break
        length += 1
    return texts[0][:length]


def common_suffix(texts: Sequence[str]) -> str:
    """Return the longest text that all texts end with."""
    return common_prefix([text[::-1] for text in texts])[::-1]
