"""Bring a dataset of any source into records: train.parquet, eval.parquet where the source has such
a part, and stats.json.
"""

import json
import random
import re
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from snakechat.data.dataset_files import split_files
from snakechat.data.formats import BadRow, DroppedRow, record_of
from snakechat.data.records import RecordWriter, read_records
from snakechat.data.sources import count_rows, read_rows
from snakechat.data.statistics import DatasetStatistics
from snakechat.data.toy import make_rows
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run
from snakechat.workflow.manifest import check_external_file


def main(job):
    """Generate, or read each file of the source; then look at what came of it."""
    if hasattr(job.settings, "generate"):
        generate(job)
    else:
        files = hub_files(job) if hasattr(job.settings, "hub") else local_files(job)
        for part, paths in files.items():
            import_part(job, part, paths)
    stats = {}
    for path in sorted(job.result.glob("*.parquet")):
        look = DatasetStatistics()
        for record in read_records(path):
            look.add(*record)
        stats[path.stem] = look.summary() | {"dropped": job.facts["dropped"][path.stem]}
        print(f"{job.spec['name']}: {stats[path.stem]['rows']:,} rows of part {path.stem}")
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")


def generate(job):
    """The toy's rows."""
    settings = job.settings
    try:
        parts = make_rows(settings.rows, settings.eval_rows, random.Random(settings.seed))
    except ValueError as error:
        raise InputError(str(error)) from None
    for part, rows in zip(("train", "eval"), parts, strict=True):
        with RecordWriter(job.result / f"{part}.parquet") as writer:
            for row in rows:
                writer.write((row["prompt"], row["chosen"], row["rejected"]))
    job.facts["dropped"] = {"train": {}, "eval": {}}


def local_files(job):
    """{part: {name: path}} of a local source, each checked against the digest that was planned."""
    files = {}
    for name, planned in job.spec["files"].items():
        part, _, relative = name.partition("/")
        path = Path(job.placement["source"], relative)
        check_external_file(path, planned)
        files.setdefault(part, {})[relative] = path
    return files


def hub_files(job):
    """{part: {name: path}} of a hub source. The commit of its revision goes into the manifest."""
    # Only here: the import takes a second that other sources need not pay.
    from snakechat.data.hub import fetch, licence_of
    from snakechat.data.model_files import CARD

    settings = job.settings
    globs = {part: getattr(settings, part) for part in ("train", "eval") if hasattr(settings, part)}

    def choose(paths):
        try:
            parts = split_files([path for path in paths if path != CARD], globs)
            found = sorted(path for names in parts.values() for path in names)
            return [*found, CARD] if CARD in paths else found
        except InputError as error:
            raise InputError(f"{settings.hub}: {error}") from None

    folder, paths, commit = fetch(settings.hub, "dataset", settings.revision, choose)
    job.facts |= {"commit": commit, "licence": licence_of(folder)}
    parts = split_files([path for path in paths if path != CARD], globs)
    return {part: {path: folder / path for path in found} for part, found in parts.items()}


def import_part(job, part, paths):
    """Write PART.parquet from source files; count what is read and dropped, list the bad rows."""
    settings, dropped, read = job.settings, Counter(), Counter()
    columns = settings.columns
    remove = re.compile(settings.remove) if hasattr(settings, "remove") else None
    with RecordWriter(job.result / f"{part}.parquet") as writer:
        for name, number, row in with_progress(part, paths, columns):
            read[f"{part}/{name}"] += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                prompt, *responses = record_of(row, settings.format, columns)
            except BadRow as error:
                if settings.on_bad_row == "fail":
                    raise InputError(f"{paths[name]}: row {number}: {error}") from None
                dropped["bad row"] += 1
                with (job.result / "bad_rows.jsonl").open("a") as file:
                    bad = {"file": name, "row": number, "reason": str(error)}
                    file.write(json.dumps(bad) + "\n")
            except DroppedRow as reason:
                dropped[str(reason)] += 1
            else:
                if remove:
                    responses = [response and remove.sub("", response) for response in responses]
                writer.write((prompt, *responses))
    job.facts.setdefault("source_rows", {}).update(read)
    job.facts.setdefault("dropped", {})[part] = dict(sorted(dropped.items()))
    if not writer:
        raise InputError(f"{job.spec['name']}: no row of part {part} is left: {dict(dropped)}")


def with_progress(part, paths, columns):
    """Yield (name, number, row) of all files, with a bar over their rows."""
    counts = [count_rows(path) for path in paths.values()]
    total = None if None in counts else sum(counts)
    with tqdm(total=total, desc=f"import {part}", unit="row", mininterval=2) as bar:
        for name, path in paths.items():
            for number, row in read_rows(path, columns.values()):
                yield name, number, row
                bar.update()


if __name__ == "__main__":
    run(main)
