"""Convert a dataset to records: train.parquet, eval.parquet if the source has an eval split, and
stats.json.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from snakechat.data.cells import BadRow, DroppedRow
from snakechat.data.dataset_files import split_files
from snakechat.data.dialogues import SPLITS, UNMARKED, as_text, is_message
from snakechat.data.formats import column_paths, kept_cells, record_of, with_instructions
from snakechat.data.hub import card_facts, card_metadata, fetch
from snakechat.data.records import COLUMNS, texts_of, write_records
from snakechat.data.sources import read_rows
from snakechat.data.toy import all_prompts, make_rows
from snakechat.workflow.errors import InputError, ProgressLines, warn
from snakechat.workflow.job import READING, Job, run
from snakechat.workflow.processes import limited_memory

# Additional memory that reading may use.
MAX_MEMORY_BYTES = 800 << 20


def main(job: Job) -> None:
    """Generate the toy, or import the files of each split.

    A file may be made to exhaust the memory. scripts/launch.py names one that ended this process.
    """
    settings, note = job.settings, job.states / READING
    if hasattr(settings, "generate"):
        if settings.eval_rows >= (most := len(all_prompts())):
            raise InputError(
                f"datasets.{job.spec['name']}: eval_rows is {settings.eval_rows}, but the toy has"
                f" {most} prompts for both splits"
            )
        toy = make_rows(settings.rows, settings.eval_rows, settings.seed)
        columns = dict(zip(COLUMNS, COLUMNS, strict=True))
        records = ([record_of(row, "plain", columns) for row in rows] for rows in toy)
        write_records(job, dict(zip(SPLITS, records, strict=True)))
        return
    splits = {split: converted(job, split, files) for split, files in source_files(job).items()}
    try:
        with limited_memory(MAX_MEMORY_BYTES):
            write_records(job, splits, kept=list(settings.keep))
    except MemoryError:
        raise InputError(
            f"{note.read_text()}: reading takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
        ) from None
    note.unlink(missing_ok=True)


def source_files(job: Job) -> dict[str, dict[str, Path]]:
    """Return {split: {name: path}} of the files to import; record what the card declares."""
    settings = vars(job.settings)
    if "hub" in settings:

        def choose(paths: list[str], folder: Path) -> dict[str, list[str]]:
            place = f"datasets.{job.spec['name']}: {settings['hub']}"
            return split_files(paths, settings, card_metadata(folder).get("configs"), place)

        folder, splits = fetch(settings["hub"], "dataset", settings["revision"], choose)
        job.facts |= {"commit": folder.name, **card_facts(folder)}
    else:
        # Names of files are SPLIT/PATH.
        groups = groupby(job.spec["files"], lambda name: name.partition("/")[0])
        splits = {
            split: [name.removeprefix(f"{split}/") for name in names] for split, names in groups
        }
        folder = Path(job.options.source)
        job.facts |= settings["card"]
    return {split: {path: folder / path for path in splits[split]} for split in splits}


def converted(job: Job, split: str, files: Mapping[str, Path]) -> Iterator[tuple[Any, ...] | str]:
    """Yield the record of each row with its kept cells, or the reason why it is dropped.

    Bad rows are listed in bad_rows.jsonl.
    """
    settings, read, is_marked = job.settings, 0, None
    used = [*column_paths(settings.columns), *settings.keep.values()]
    progress = ProgressLines(f"import {split}", "rows", None)
    for name, path in files.items():
        (job.states / READING).write_text(str(path))
        for number, row in read_rows(path, used):
            read += 1
            progress.update(read)
            try:
                record = converted_row(row, vars(settings))
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
                is_marked = is_marked or any(role != UNMARKED for role, _ in record[0])
                yield record
    if settings.format == "plain" and is_marked is False:
        warn(
            f"datasets.{job.spec['name']}: no prompt of the {split} split has a marker such as"
            ' "\\n\\nHuman:" (format: plain): set format: instruct if prompts are questions'
        )


def converted_row(row: dict[str, Any] | BadRow, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the record of a row of a source, followed by its cells for reward functions.

    Raises BadRow and DroppedRow as record_of; a row with text that is not Unicode is bad, too.
    """
    if isinstance(row, BadRow):
        raise row
    try:
        record = record_of(row, settings["format"], settings["columns"])
        kept = kept_cells(row, settings["keep"].values())
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
    prompt, *responses = record
    if remove := settings.get("remove"):
        # A call of tools stays as it is.
        responses = [
            text and (text if is_message(text) else as_text(re.sub(remove, "", text)))
            for text in responses
        ]
    template, system = settings.get("prompt_template"), settings.get("system")
    return with_instructions(prompt, template, system), *responses, *kept


if __name__ == "__main__":
    run(main)
