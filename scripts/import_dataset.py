"""Convert a dataset to records: train.parquet, eval.parquet if the source has an eval split, and
stats.json.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from snakechat.data.cells import BadRow, DroppedRow
from snakechat.data.dataset_files import split_files
from snakechat.data.dialogues import SPLITS, UNMARKED, as_text, is_message, parse_prompt
from snakechat.data.formats import (
    Columns,
    Record,
    column_paths,
    kept_cells,
    record_of,
    with_instructions,
)
from snakechat.data.hub import card_configs, card_facts, fetch
from snakechat.data.model_files import CARD
from snakechat.data.records import texts_of, write_records
from snakechat.data.sources import read_rows
from snakechat.data.toy import make_rows
from snakechat.workflow.errors import InputError, ProgressLines, warn
from snakechat.workflow.job import READING, Job, run
from snakechat.workflow.processes import limited_memory

# Additional memory that reading may use.
MAX_MEMORY_BYTES = 800 << 20


def main(job: Job) -> None:
    """Generate the toy, or import the files of each split.

    A file may be made to exhaust the memory or to crash a parser, of which several are C++
    programs. scripts/launch.py names the file whose reading ended this process.
    """
    settings = job.settings
    if hasattr(settings, "generate"):
        try:
            toy = make_rows(settings.rows, settings.eval_rows, random.Random(settings.seed))
        except ValueError as error:
            raise InputError(f"datasets.{job.spec['name']}: {error}") from None
        records = (
            [(parse_prompt(row["prompt"]), row["chosen"], row["rejected"]) for row in rows]
            for rows in toy
        )
        write_records(job, dict(zip(SPLITS, records, strict=True)))
        return
    files, note = source_files(job), job.states / READING
    splits = {split: converted(job, split, files[split]) for split in files}
    try:
        with limited_memory(MAX_MEMORY_BYTES):
            write_records(job, splits, kept=list(job.settings.keep))
    except MemoryError:
        raise InputError(
            f"{note.read_text()}: reading takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
        ) from None
    note.unlink(missing_ok=True)


def source_files(job: Job) -> dict[str, dict[str, Path]]:
    """Return {split: {name: path}} of the files to import; record what the card declares."""
    if hasattr(job.settings, "hub"):
        return hub_files(job)
    job.facts |= job.settings.card
    splits: dict[str, dict[str, Path]] = {}
    for name in job.spec["files"]:
        split, _, relative = name.partition("/")
        splits.setdefault(split, {})[relative] = Path(job.options.source, relative)
    return splits


def hub_files(job: Job) -> dict[str, dict[str, Path]]:
    """Return {split: {name: path}} of a hub source; record its commit and the facts of its card."""
    settings = job.settings
    keys = ("train", "eval", "name", "split")
    selection = {key: getattr(settings, key) for key in keys if hasattr(settings, key)}
    splits: dict[str, list[str]] = {}

    def choose(paths: list[str], download: Callable[[str], Path]) -> list[str]:
        cards = [path for path in paths if path == CARD]
        configs = card_configs(download(CARD).parent) if cards else None
        try:
            found, remark = split_files(paths, selection, configs)
        except InputError as error:
            raise InputError(f"hub dataset {settings.hub}: {error}") from None
        if remark:
            warn(f"datasets.{job.spec['name']}: {settings.hub}: {remark}")
        splits.update(found)
        return [*sorted(path for files in splits.values() for path in files), *cards]

    folder, _, commit = fetch(settings.hub, "dataset", settings.revision, choose)
    job.facts |= {"commit": commit, **card_facts(folder)}
    return {split: {path: folder / path for path in files} for split, files in splits.items()}


def converted(job: Job, split: str, files: Mapping[str, Path]) -> Iterator[tuple[Any, ...] | str]:
    """Yield the record of each row with its kept cells, or the reason why it is dropped.

    Bad rows are listed in bad_rows.jsonl.
    """
    settings, read, written, is_marked = job.settings, 0, 0, False
    remove = re.compile(settings.remove) if hasattr(settings, "remove") else None
    template = getattr(settings, "prompt_template", None)
    system = getattr(settings, "system", None)
    used = [*column_paths(settings.columns), *settings.keep.values()]
    progress = ProgressLines(f"import {split}", "rows", None)
    for name, path in files.items():
        # scripts/launch.py reads it.
        (job.states / READING).write_text(str(path))
        for number, row in read_rows(path, used):
            read += 1
            progress.update(read)
            try:
                (prompt, chosen, rejected), kept = record_and_cells(
                    row, settings.format, settings.columns, settings.keep.values()
                )
            except BadRow as error:
                if settings.on_bad_row == "fail":
                    raise InputError(f"{path}: row {number}: {error}") from None
                with (job.result / "bad_rows.jsonl").open("a") as file:
                    entry = {"file": name, "row": number, "reason": str(error)}
                    file.write(json.dumps(entry) + "\n")
                yield "bad row"
            except DroppedRow as reason:
                yield str(reason)
            else:
                if remove:
                    chosen, rejected = (
                        # A call of tools stays as it is.
                        text and (text if is_message(text) else as_text(remove.sub("", text)))
                        for text in (chosen, rejected)
                    )
                prompt = with_instructions(prompt, template, system)
                written += 1
                is_marked |= any(role != UNMARKED for role, _ in prompt)
                yield prompt, chosen, rejected, *kept
    if settings.format == "plain" and written and not is_marked:
        warn(
            f"datasets.{job.spec['name']}: no prompt of the {split} split has a marker such as"
            ' "\\n\\nHuman:" (format: plain): set format: instruct if prompts are questions'
        )


def record_and_cells(
    row: dict[str, Any] | BadRow, format: str, columns: Columns, keep: Iterable[str]
) -> tuple[Record, list[str]]:
    """Return the record of a row of a source, and its cells for reward functions.

    Raises:
        BadRow: As record_of, or the row is bad, nested too deeply, or has text that is not Unicode.
        DroppedRow: As record_of.
    """
    if isinstance(row, BadRow):
        raise row
    try:
        record, kept = record_of(row, format, columns), kept_cells(row, keep)
        # Of bytes that are not UTF-8, and of halves of an emoji, surrogates are left.
        for text in (*texts_of(record), *kept):
            (text or "").encode()
    except RecursionError:
        raise BadRow("nested too deeply") from None
    except UnicodeEncodeError as error:
        piece = error.object[error.start : error.start + 20]
        raise BadRow(
            f"text that is not UTF-8: {piece!r}: save the file as text in UTF-8, or correct the row"
        ) from None
    return record, kept


if __name__ == "__main__":
    run(main)
