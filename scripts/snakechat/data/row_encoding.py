"""Rows as ids: prompts and responses within a number of tokens, and all turns of a dialogue.

A row that exceeds the number keeps its last user turn whole. What does not fit is dropped in this
order: older turns, from the first one and as far as the next user turn, so that roles alternate as
before; then the end of the response, with the token that ends it. The system turn and the tools
stay. They are dropped only where they and the last user turn leave no room for a response.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from snakechat.data.chat_templates import TurnsRejected
from snakechat.data.dialogues import (
    TOOLS,
    UNMARKED,
    Turn,
    is_response,
    is_trained,
    messages_of,
    recorded_response,
    response_turn,
)
from snakechat.data.encoder import Conversation, Encoder, Ids, accepted
from snakechat.data.records import COLUMNS, KEPT, PROMPT, Batch, dataset_name, read_record_batches
from snakechat.workflow.errors import InputError, ProgressLines
from snakechat.workflow.job import Job

# Why a row is dropped whose last user turn leaves no room for a response.
TOO_LONG = "last user turn too long"
REJECTED = "rejected by the chat template"
# What was cut of a row.
SYSTEM, OLDER_TURNS, END = "system turn", "older turns", "end of response"

# Ids of each field of a row, the tokens of its responses before truncation, and what was cut of it,
# "" if nothing; or why the row is dropped.
EncodedRow = tuple[Any, ...] | str
# The rows that a record becomes: one, unless each turn is trained or a text is long.
Rows = list[EncodedRow] | InputError


def encode_batch(encoder: Encoder, settings: Any, batch: Mapping[str, Sequence[Any]]) -> list[Rows]:
    """Return what each record of a batch becomes, or why it cannot be encoded.

    A prompt and its responses have at most settings.max_length tokens together. Both responses of a
    pair follow the same prompt, which makes room for the longer one. A response that is None has no
    tokens. Prompts without responses have at most settings.max_prompt_length tokens, and are not
    truncated: that would change the question.
    """
    records = list(zip(*(batch[name] for name in settings.fields), strict=True))
    reasons = [drop_reason(encoder, *record, unpaired=settings.unpaired) for record in records]
    valid = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
    are_texts = len(settings.fields) > 1 and not any(turns for turns, *_ in records)
    encode = _encode_texts if are_texts else _encode_dialogues
    found = encode(encoder, settings, valid)
    return [[reason] if reason else next(found) for reason in reasons]


def _encode_texts(
    encoder: Encoder, settings: Any, records: Iterable[tuple[Any, ...]]
) -> Iterator[Rows]:
    """Encode texts to rows of at most max_length tokens: a first token, and those to be learned.

    A row starts with the last token of the row before, so that each token is learned once.
    """
    limit = settings.max_length
    for ids in encoder.texts([text for _, text, *_ in records]):
        rows = [ids[start : start + limit] for start in range(0, len(ids) - 1, limit - 1)]
        yield [([first], others, [len(others)], "") for first, *others in rows]


def _encode_dialogues(
    encoder: Encoder, settings: Any, records: Iterable[tuple[Any, ...]]
) -> Iterator[Rows]:
    """Encode records to one row each or, with all_turns, to rows with all of its responses."""
    train_on = getattr(settings, "train_on", None)
    talks = [conversations_of(settings, *record) for record in records]
    encoded = encoder.conversations(chain.from_iterable(talks))
    for talk in talks:
        # All of them, before one is rejected.
        part = list(islice(encoded, len(talk)))
        try:
            if train_on == "all_turns":
                yield _rows_of_turns(encoder, settings.max_length, talk, accepted(part))
                continue
            [(turns, texts)], [(prompt, ids)] = talk, accepted(part)
            untrained = (turn for turn in turns if is_response(turn) and not is_trained(turn))
            if train_on == "all_tokens" and any(untrained):
                yield InputError(
                    "a response with weight 0, which train_on: all_tokens would train: set"
                    " train_on: all_turns, or response"
                )
            elif texts:
                yield [_fitting_row(encoder, turns, texts, prompt, ids, settings.max_length)]
            else:
                is_long = len(prompt) > settings.max_prompt_length
                yield ["prompt too long" if is_long else (prompt, [], "")]
        except TurnsRejected as error:
            yield error


def _fitting_row(
    encoder: Encoder,
    turns: list[Turn],
    texts: Sequence[str | None],
    prompt: Ids,
    responses: list[Ids],
    limit: int,
) -> EncodedRow:
    """Return a prompt and its responses, truncated to a number of tokens.

    Args:
        turns, prompt: The turns and ids of the whole prompt.
        texts, responses: The responses as in records, and their ids.

    Raises:
        TurnsRejected: The template rejects the prompt without its older turns.
    """
    whole_lengths, kept = list(map(len, responses)), turns
    if len(prompt) + max(whole_lengths) > limit:
        fitting = fitting_turns(encoder, turns, max(whole_lengths), limit)
        if fitting is None:
            return TOO_LONG
        kept = fitting
        if kept != turns:
            [(prompt, responses)] = accepted(encoder.conversations([(kept, texts)]))
    ids = [response[: limit - len(prompt)] for response in responses]
    # The texts differ after the truncation, or in characters that have the same ids.
    if len(ids) == 2 and ids[0] == ids[1]:
        return "equal responses"
    num_system, num_kept = (divide_turns(each)[0] for each in (turns, kept))
    cuts = {
        SYSTEM: num_kept < num_system,
        OLDER_TURNS: len(turns) - num_system > len(kept) - num_kept,
        END: ids != responses,
    }
    return prompt, *ids, whole_lengths, " and ".join(name for name, cut in cuts.items() if cut)


def fitting_turns(
    encoder: Encoder, turns: list[Turn], response_length: int, limit: int
) -> list[Turn] | None:
    """Return the turns of the longest prompt that fits; None if none leaves room for a response.

    limit: Maximum number of tokens of prompt and response, of a pair the longer one.
    """
    num_system, starts = divide_turns(turns)
    system, kept = turns[:num_system], turns[starts[-1] :]
    if len(encoder.prompts([kept])[0]) >= limit:
        return None
    # From the newest turns to the oldest ones: no prompt is much longer than the limit.
    for first in reversed(starts):
        longer = [*system, *turns[first:]]
        # Older turns are kept only where the whole response fits.
        room_needed = 1 if first == starts[-1] else response_length
        if len(encoder.prompts([longer])[0]) + room_needed > limit:
            break
        kept = longer
    return kept


def divide_turns(turns: Sequence[Turn]) -> tuple[int, list[int]]:
    """Return the number of system turns and tools at the start, and where others may start."""
    roles = [role for role, _ in turns]
    fixed = ("system", TOOLS)
    num_system = next((n for n, role in enumerate(roles) if role not in fixed), len(roles))
    starts = [n for n in range(num_system, len(roles)) if roles[n] in ("user", UNMARKED)]
    # Without a user turn, the prompt is a whole.
    return (num_system, starts) if starts else (0, [0])


def _rows_of_turns(
    encoder: Encoder,
    limit: int,
    talk: Sequence[Conversation],
    encoded: Iterator[tuple[Ids, list[Ids]]],
) -> list[EncodedRow]:
    """Return the rows of a dialogue in which all turns of the assistant are trained.

    Each turn follows the prompt that it has when the model responds. One whose prompt continues the
    row before, which a template that drops earlier thoughts does not write, shares its tokens.
    Another one starts a row, as does one that does not fit into the limit. After the ids of the
    response, a row has 1 for each of them that is trained, and 0 for the others.
    """
    rows: list[Any] = []
    # The ids of the last row, if it was neither dropped nor cut.
    whole: Ids = []
    for (turns, texts), (prompt, [response]) in zip(talk, encoded, strict=True):
        is_continued = whole and prompt[: len(whole)] == whole
        if is_continued and len(prompt) + len(response) <= limit:
            _, chosen, trained, lengths, _ = rows[-1]
            new = prompt[len(whole) :]
            chosen += [*new, *response]
            trained += [0] * len(new) + [1] * len(response)
            lengths[0] = len(chosen)
            whole = [*prompt, *response]
        else:
            row, whole = _fitting_row(encoder, turns, texts, prompt, [response], limit), []
            if not isinstance(row, str):
                prompt, ids, *rest, cut = row
                row = prompt, ids, [1] * len(ids), *rest, cut
                whole = [] if cut else [*prompt, *ids]
            rows.append(row)
    return rows


def conversations_of(settings: Any, turns: list[Turn], *responses: Any) -> list[Conversation]:
    """Return a prompt with its responses or, with all_turns, each trained response to a user."""
    if getattr(settings, "train_on", None) != "all_turns":
        return [(turns, list(responses))]
    dialogue = [*turns, response_turn(*responses)]
    first = next((n for n, (role, _) in enumerate(dialogue) if role in ("user", UNMARKED)), 0)
    return [
        (dialogue[:place], [recorded_response(turn)])
        for place, turn in enumerate(dialogue)
        if place > first and is_trained(turn) and turn[1].strip()
    ]


def drop_reason(
    encoder: Encoder, turns: list[Turn], *responses: str | None, unpaired: bool = False
) -> str | None:
    """Return why a row is dropped before it is encoded. Unpaired, one response suffices."""
    texts = [response for response in responses if response is not None]
    stripped = [text.strip() for text in texts]
    contents = [message["content"].strip() for message in messages_of(turns)]
    written = [*texts, *(text for _, text in turns)]
    missing = "chosen" if responses[:1] == (None,) else "rejected"
    reasons = {
        f"no {missing} response": len(texts) < (1 if unpaired else len(responses)),
        "empty prompt": turns and not any(contents),
        "empty response": not all(stripped),
        "equal responses": len(set(stripped)) < len(stripped),
        "special token in text": turns and any(map(encoder.has_special_token, written)),
    }
    return next((reason for reason, is_met in reasons.items() if is_met), None)


def phase_rows(job: Job[Any], split: str) -> dict[int, np.ndarray]:
    """Return the row numbers of the phase by the number of the dataset, from 1.

    Training rows are repeated by the weight of their dataset.
    """
    name, seed = f"{job.settings.phase}.{split}.npy", job.settings.seed
    return {
        dataset: weighted_rows(
            np.load(job.inputs[f"rows.{dataset}"] / name), weight if split == "train" else 1, seed
        )
        for dataset, weight in enumerate(job.settings.weights, start=1)
    }


def weighted_rows(rows: np.ndarray, weight: float, seed: int | None) -> np.ndarray:
    """Repeat rows `weight` times: all rows for its integral part, a random subset for the rest.

    The seed may be None if the weight is integral.
    """
    repeats, fraction = divmod(weight, 1)
    subset = np.random.default_rng(seed).permutation(rows)[: round(fraction * len(rows))]
    return np.sort(np.concatenate([np.repeat(rows, int(repeats)), subset]))


def kept_names(job: Job[Any], split: str) -> list[str]:
    """Return the names of the columns that records of RLHF keep for reward functions."""
    if job.settings.fields != [PROMPT]:
        return []
    datasets = range(1, len(job.settings.weights) + 1)
    columns = {c for n in datasets for c in pq.read_schema(records_path(job, n, split)).names}
    return sorted(name.removeprefix(KEPT) for name in columns if name.startswith(KEPT))


def records_path(job: Job[Any], dataset: int, split: str) -> Path:
    """Return the records of a split. Without an eval split, its rows are in train.parquet."""
    path = job.inputs[f"records.{dataset}"] / f"{split}.parquet"
    return path if path.exists() else path.with_stem("train")


def converted_batches(
    job: Job[Any],
    split: str,
    convert: Callable[[Batch], Iterable[list[Any] | InputError]],
    dropped: Counter[str],
) -> Iterator[tuple[int, Batch, list[Any]]]:
    """Yield (dataset, batch of records, the rows that they become) of a phase.

    What a dropped record becomes is its reason.

    Args:
        convert: Returns the rows of each record of a batch, or why it cannot be encoded.
        dropped: Counts the reasons.

    Raises:
        InputError: A record cannot be encoded, and its dataset does not skip such rows; or no row
            is left.
    """
    numbers_of, is_left = phase_rows(job, split), False
    columns = [*COLUMNS, *(f"{KEPT}{name}" for name in kept_names(job, split))]
    names = {dataset: dataset_name(job, f"records.{dataset}") for dataset in numbers_of}
    progress, done = ProgressLines(split, "rows", sum(map(len, numbers_of.values()))), 0
    for dataset, numbers in numbers_of.items():
        path, row_numbers = records_path(job, dataset, split), iter(numbers)
        skips = dataset in getattr(job.settings, "skip_rejected", ())
        for batch in read_record_batches(path, numbers, columns):
            rows: list[Any] = []
            for found, number in zip(convert(batch), row_numbers, strict=False):
                is_rejected = isinstance(found, TurnsRejected)
                if not isinstance(found, InputError):
                    rows += found
                elif is_rejected and skips:
                    rows.append(REJECTED)
                else:
                    hint = "; on_bad_row: skip drops such rows" if is_rejected else ""
                    row = f"dataset {names[dataset]}: {path}: row {number + 1}"
                    raise InputError(f"{row}: {found}{hint}")
            reasons = [row for row in rows if isinstance(row, str)]
            dropped.update(reasons)
            is_left |= len(reasons) < len(rows)
            yield dataset, batch, rows
            done += len(batch[PROMPT])
            progress.update(done)
    if not is_left:
        phase = job.settings.phase
        raise InputError(
            f"{', '.join(names.values())}: the {split} split of phase {phase} has no rows left of"
            f" {done} (dropped: {dict(dropped)}): add rows, or increase split.weights.{phase}"
        )
