"""Tokenize the rows of a phase, as the rule of the job requires: SFT, reward, DPO or RLHF.

RLHF also keeps the turns of its prompts (snakechat/data/records.py).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from snakechat.data.chat_templates import TurnsRejected
from snakechat.data.dialogues import is_response, is_trained
from snakechat.data.encoder import Encoder
from snakechat.data.phase_splits import ROW, SPLITS, Batch, batches, phase_rows, records_path
from snakechat.data.ragged_arrays import Ragged, RaggedWriter, save_array, whole_lengths_path
from snakechat.data.records import (
    COLUMNS,
    KEPT,
    kept_columns,
    open_prompt_texts,
    percentiles,
)
from snakechat.data.row_encoding import (
    OLDER_TURNS,
    REJECTED,
    SYSTEM,
    TOO_LONG,
    Encoded,
    drop_reason,
    encode_prompts,
    encode_responses,
    encode_turns,
)
from snakechat.data.tokenizers import load_tokenizer
from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.job import Job, run
from snakechat.workflow.progress_lines import FIRST_LINE, ProgressLines

# Share of dropped rows above which a warning is printed.
MAX_DROPPED = 0.05


class Tokenization(NamedTuple):
    """How the rows of a phase are tokenized.

    Attributes:
        fields: Columns of the records, and names of the ragged arrays.
        encode: Yields an EncodedRow of each row, or a list of several, given an Encoder, the job's
            settings and, for each field, the prompts or responses of the rows.
        keeps_texts: Whether the turns of the prompts are kept too.
        marks: Names of further ragged arrays: of a number for each token of a response.
    """

    fields: tuple[str, ...]
    encode: Callable[..., Iterator[Encoded]]
    keeps_texts: bool = False
    marks: tuple[str, ...] = ()


PROMPTS = Tokenization(("prompt",), encode_prompts, keeps_texts=True)
ALL_TURNS = Tokenization(("prompt", "chosen"), encode_turns, marks=("trained",))


def tokenization_of(settings: Any) -> Tokenization:
    """Return what is written for the fields of a job."""
    if getattr(settings, "train_on", None) == "all_turns":
        return ALL_TURNS
    fields = tuple(settings.fields)
    return PROMPTS if fields == PROMPTS.fields else Tokenization(fields, encode_responses)


def main(job: Job[Any]) -> None:
    """Write a ragged array of each split and text field, and stats.json.

    Raises:
        InputError: A split has no rows.
    """
    tokenization = tokenization_of(job.settings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"], is_result=True)
    encoder = Encoder(tokenizer, job.settings.template)
    stats = {}
    for split in SPLITS:
        stats[split] = _tokenize_split(job, tokenization, encoder, split)
        _print_counts(split, stats[split], job.settings)
    job.facts["dropped"] = {split: stats[split]["dropped"] for split in SPLITS}
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")


def _print_counts(split: str, stats: dict[str, Any], settings: Any) -> None:
    """Print the numbers of kept, truncated and dropped rows of a split."""
    rows, truncated, dropped = (stats[key] for key in ("rows", "truncated", "dropped"))
    print(f"{split}: {rows:,} rows, truncated: {truncated}, dropped: {dropped}")
    total = rows + sum(dropped.values())
    for reason, count in dropped.items():
        if count > MAX_DROPPED * total:
            warn(f"{split}: {count:,} of {total:,} rows are dropped: {reason}")
    without_turns = sum(count for what, count in truncated.items() if OLDER_TURNS in what)
    without_row = dropped.get(TOO_LONG, 0)
    if without_system := sum(count for what, count in truncated.items() if SYSTEM in what):
        warn(
            f"{split}: {without_system:,} of {total:,} rows lost their system turn and tools, which"
            f" leave no room within max_length: {settings.max_length}: they train with the default"
            " system prompt of the chat template, if it has one"
        )
    if without_turns or without_row:
        partial = without_turns + without_row
        warn(
            f"{split}: {partial:,} of {total:,} rows have no whole prompt within max_length:"
            f" {settings.max_length}: {without_turns:,} lost older turns, {without_row:,} are"
            " dropped because of their last user turn"
        )


def _tokenize_split(
    job: Job[Any], tokenization: Tokenization, encoder: Encoder, split: str
) -> dict[str, Any]:
    """Write the ragged arrays of a split. Returns its statistics."""
    fields, rows = tokenization.fields, phase_rows(job, split)
    total = sum(map(len, rows.values()))
    kept: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    truncated: Counter[str] = Counter()
    whole_lengths: list[np.ndarray] = []

    with ExitStack() as stack:
        writers = [
            stack.enter_context(RaggedWriter(job.result, f"{split}.{name}", len(encoder.tokenizer)))
            for name in (*fields, *tokenization.marks)
        ]
        write_texts: Callable[..., None] | None = None
        columns: Sequence[str] = COLUMNS
        if tokenization.keeps_texts:
            paths = [records_path(job, name, split) for name in rows]
            kept_names = sorted({name for path in paths for name in kept_columns(path)})
            write_texts = stack.enter_context(open_prompt_texts(job.result, split, kept_names))
            columns = [*COLUMNS, *(f"{KEPT}{name}" for name in kept_names)]
        progress, done = ProgressLines(split, "rows", total, next_line=FIRST_LINE), 0
        for dataset, batch in batches(job, split, rows, columns):
            place = f"dataset {dataset}: {records_path(job, dataset, split)}"
            if getattr(job.settings, "train_on", None) == "all_tokens":
                _check_weights(batch, place)
            skips = dataset in getattr(job.settings, "skip_rejected", ())
            encoded = _encode_batch(encoder, job.settings, tokenization, batch, place, skips)
            new = [r for row in encoded for r in (row if isinstance(row, list) else [row])]
            valid = [row for row in new if not isinstance(row, str)]
            dropped.update(row for row in new if isinstance(row, str))
            kept[dataset] += len(valid)
            truncated.update(what for *_, what in valid if what)
            lengths = np.array([row[-2] for row in valid], np.int32)
            whole_lengths.append(lengths.reshape(len(valid), len(fields) - 1))
            for writer, *ids in zip(writers, *(row[:-2] for row in valid), strict=True):
                writer.write(ids)
            if write_texts:
                write_texts(batch, [not isinstance(row, str) for row in encoded])
            done += len(encoded)
            progress.update(done)
    if not kept.total():
        phase = job.settings.phase
        raise InputError(
            f"{', '.join(rows)}: the {split} split of phase {phase} has no rows left of {total}"
            f" (dropped: {dict(dropped)}): add rows, or increase split.weights.{phase}"
        )
    if len(fields) > 1:
        save_array(whole_lengths_path(job.result, split), np.concatenate(whole_lengths).T)
    return {
        "rows": kept.total(),
        "rows_of": {name: len(numbers) for name, numbers in rows.items()},
        # The arrays hold the datasets in this order.
        "kept_of": {name: kept[name] for name in rows},
        "dropped": dict(sorted(dropped.items())),
        # By what was cut.
        "truncated": dict(sorted(truncated.items())),
        "tokens": {name: _length_statistics(job, f"{split}.{name}") for name in fields},
    }


def _check_weights(batch: Batch, place: str) -> None:
    """Raise InputError for a response with weight 0, which would be trained within a prompt."""
    for number, turns in zip(batch[ROW], batch["prompt"], strict=True):
        if any(is_response(turn) and not is_trained(turn) for turn in turns):
            raise InputError(
                f"{place}: row {number + 1}: a response with weight 0, which train_on: all_tokens"
                " would train: set train_on: all_turns, or response"
            )


def _length_statistics(job: Job[Any], name: str) -> dict[str, float]:
    lengths = Ragged(job.result, name).lengths
    return {"sum": int(lengths.sum()), **percentiles(lengths)}


def _encode_batch(
    encoder: Encoder,
    settings: Any,
    tokenization: Tokenization,
    batch: Batch,
    place: str,
    skips_rejected: bool,
) -> list[Encoded]:
    """Encode the valid rows of a batch; return the reason for each row that is dropped.

    Args:
        place: What an error calls the dataset and its file.
        skips_rejected: Whether rows whose turns the chat template rejects are dropped.

    Raises:
        InputError: The template rejects a row that is not to be dropped.
    """
    texts = list(zip(*(batch[name] for name in tokenization.fields), strict=True))
    reasons = [drop_reason(encoder, *row, unpaired=settings.unpaired) for row in texts]
    valid = [row for row, reason in zip(texts, reasons, strict=True) if reason is None]

    def encode(rows: Sequence[tuple[Any, ...]]) -> list[Encoded]:
        fields = zip(*rows, strict=True)
        return list(tokenization.encode(encoder, settings, *fields)) if rows else []

    def encode_row(number: int, row: tuple[Any, ...]) -> Encoded:
        try:
            return encode([row])[0]
        except TurnsRejected as error:
            if skips_rejected:
                return REJECTED
            raise InputError(
                f"{place}: row {number + 1}: {error}; on_bad_row: skip drops such rows"
            ) from None

    try:
        encoded = iter(encode(valid))
    except TurnsRejected:
        # One by one, to find the rows that the template rejects.
        return [
            reason or encode_row(number, row)
            for reason, number, row in zip(reasons, batch[ROW], texts, strict=True)
        ]
    return [reason or next(encoded) for reason in reasons]


if __name__ == "__main__":
    run(main)
