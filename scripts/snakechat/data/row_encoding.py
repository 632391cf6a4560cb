"""Rows as ids: prompts and responses within a number of tokens, and all turns of a dialogue."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from snakechat.data.dialogues import (
    UNMARKED,
    Turn,
    is_empty,
    is_trained,
    recorded_response,
    response_turn,
)
from snakechat.data.encoder import Encoder
from snakechat.data.truncation import fitting_prompt

# Why a row is dropped whose last user turn leaves no room for a response.
TOO_LONG = "last user turn too long"

# What was cut of a row.
OLDER_TURNS = "older turns"

# Ids of each field of a row, the tokens of its responses before truncation, and what was cut of it,
# "" if nothing; or why the row is dropped.
EncodedRow = tuple[Any, ...] | str
# What a record becomes: several rows where each turn is trained.
Encoded = EncodedRow | list[EncodedRow]
Ids = list[int]


def encode_responses(
    encoder: Encoder,
    settings: SimpleNamespace,
    prompts: Sequence[list[Turn]],
    *responses: Sequence[str | None],
) -> Iterator[Encoded]:
    """Encode prompts and responses to at most settings.max_length tokens together.

    Both responses of a pair follow the same prompt, which makes room for the longer one. A response
    that is None has no tokens. Texts that are no dialogues have no turns.
    """
    if not any(prompts):
        yield from _encode_texts(encoder, settings.max_length, responses[0])
        return
    pairs = zip(*(_encode_present(encoder, texts) for texts in responses), strict=True)
    for turns, whole, row in zip(prompts, encoder.prompts(prompts), pairs, strict=True):
        yield _fitting_row(encoder, turns, whole, list(row), settings.max_length)


def _encode_texts(
    encoder: Encoder, limit: int, texts: Sequence[str | None]
) -> Iterator[list[EncodedRow]]:
    """Encode each text to rows of at most `limit` tokens: a first token, and those to be learned.

    A row starts with the last token of the row before, so that each token is learned once.
    """
    for ids in encoder.texts([text or "" for text in texts]):
        rows: list[EncodedRow] = []
        for start in range(0, len(ids) - 1, limit - 1):
            first, *others = ids[start : start + limit]
            rows.append(([first], others, [len(others)], ""))
        yield rows


def _fitting_row(
    encoder: Encoder, turns: Sequence[Turn], whole: Ids, responses: list[Ids], limit: int
) -> EncodedRow:
    """Return a prompt and its responses, truncated to a number of tokens.

    whole: The ids of the prompt, before the truncation.
    """
    whole_lengths = list(map(len, responses))
    longest = max(whole_lengths)
    fits = len(whole) + longest <= limit
    prompt = whole if fits else fitting_prompt(encoder, turns, longest, limit)
    if prompt is None:
        return TOO_LONG
    ids = [response[: limit - len(prompt)] for response in responses]
    # The texts differ after the truncation, or in characters that have the same ids.
    if len(ids) == 2 and ids[0] == ids[1]:
        return "equal responses"
    cuts = {OLDER_TURNS: prompt != whole, "end of response": ids != responses}
    cut = " and ".join(name for name, is_cut in cuts.items() if is_cut)
    return prompt, *ids, whole_lengths, cut


def encode_turns(
    encoder: Encoder,
    settings: SimpleNamespace,
    prompts: Sequence[list[Turn]],
    responses: Sequence[str],
) -> Iterator[list[EncodedRow]]:
    """Encode dialogues to rows in which all turns of the assistant are trained.

    Each turn follows the prompt that it has when the model responds. One whose prompt continues the
    row before, which a template that leaves out earlier thoughts does not write, shares its tokens.
    Another one starts a row, as does one that does not fit into settings.max_length tokens.
    """
    dialogues = [
        [*turns, response_turn(response)]
        for turns, response in zip(prompts, responses, strict=True)
    ]
    places = [_trained_places(dialogue) for dialogue in dialogues]
    pairs = [*zip(dialogues, places, strict=True)]
    heads = encoder.prompts([turns[:place] for turns, ends in pairs for place in ends])
    bodies = encoder.responses(
        [recorded_response(turns[place]) for turns, ends in pairs for place in ends]
    )
    encoded = iter([*zip(heads, bodies, strict=True)])
    for turns, ends in pairs:
        rows: list[EncodedRow] = []
        for place, (prompt, response) in zip(ends, encoded, strict=False):
            row = rows[-1] if rows else TOO_LONG
            fits = len(prompt) + len(response) <= settings.max_length
            if fits and (joined := join_turns(row, prompt, response)):
                rows[-1] = joined
                continue
            row = _fitting_row(encoder, turns[:place], prompt, [response], settings.max_length)
            if not isinstance(row, str):
                prompt, response, *rest = row
                row = prompt, response, [1] * len(response), *rest
            rows.append(row)
        yield rows


def _trained_places(dialogue: list[Turn]) -> list[int]:
    """Return the numbers of the turns that are trained: responses to a user."""
    first = next((n for n, (role, _) in enumerate(dialogue) if role in ("user", UNMARKED)), 0)
    return [
        number
        for number, turn in enumerate(dialogue)
        if number > first and is_trained(turn) and turn[1].strip()
    ]


def join_turns(row: EncodedRow, prompt: Ids, response: Ids) -> EncodedRow | None:
    """Return a row with another response, or None if its prompt does not continue the row.

    Args:
        row: The ids of a prompt and a response; a mark for each token of the response, 1 where it
            is trained; [their number]; and what was cut of it.
        prompt: The ids of the whole dialogue up to the other response.
    """
    if isinstance(row, str):
        return None
    first, chosen, marks, _, cut = row
    whole = [*first, *chosen]
    if cut or prompt[: len(whole)] != whole:
        return None
    between = prompt[len(whole) :]
    chosen = [*chosen, *between, *response]
    return first, chosen, [*marks, *[0] * len(between), *[1] * len(response)], [len(chosen)], cut


def _encode_present(encoder: Encoder, texts: Sequence[str | None]) -> list[list[int]]:
    """Return the ids of each response, none of a response that is None."""
    encoded = encoder.responses([text or "" for text in texts])
    return [[] if text is None else ids for text, ids in zip(texts, encoded, strict=True)]


def encode_prompts(
    encoder: Encoder, settings: SimpleNamespace, prompts: Sequence[list[Turn]]
) -> Iterator[EncodedRow]:
    """Encode prompts; those of more than settings.max_prompt_length tokens are dropped.

    They are not truncated, because that would change the question.
    """
    for ids in encoder.prompts(prompts):
        yield (ids, [], "") if len(ids) <= settings.max_prompt_length else "prompt too long"


def drop_reason(
    encoder: Encoder, turns: list[Turn], *responses: str | None, unpaired: bool = False
) -> str | None:
    """Return why a row is dropped before it is encoded, or None if it is kept.

    unpaired: one of the responses suffices.
    """
    texts = [response for response in responses if response is not None]
    if len(texts) < (min(1, len(responses)) if unpaired else len(responses)):
        return "no chosen response" if responses[0] is None else "no rejected response"
    if turns and is_empty(turns):
        return "empty prompt"
    stripped = [text.strip() for text in texts]
    if not all(stripped):
        return "empty response"
    if len(set(stripped)) < len(stripped):
        return "equal responses"
    texts += [text for _, text in turns]
    if turns and any(map(encoder.has_special_token, texts)):
        return "special token in text"
    return None
