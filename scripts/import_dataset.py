"""Bring a dataset of any source into records: train.parquet and eval.parquet."""

import random
from pathlib import Path

from rlhf.job import InputError, check_file, run
from rlhf.records import phase_of_rows, read_source, write_records
from rlhf.toy import make_rows


def main(job):
    """Generate, or read each file of the source; hold out a tenth where no eval part is named."""
    settings = job.settings
    if hasattr(settings, "generate"):
        try:
            train, held_out = make_rows(
                settings.rows, settings.eval_rows, random.Random(settings.seed)
            )
        except ValueError as error:
            raise InputError(str(error)) from None
    else:
        files = hub_files(job) if hasattr(settings, "hub") else local_files(job)
        parts = {
            part: [row for path in paths for row in read_source(path, settings.format)]
            for part, paths in files.items()
        }
        train, held_out = parts["train"], parts.get("eval")
        if held_out is None:
            kept, tenth = phase_of_rows(len(train), [9, 1], settings.seed)
            train, held_out = [train[row] for row in kept], [train[row] for row in tenth]
    write_records(job.result / "train.parquet", train)
    write_records(job.result / "eval.parquet", held_out)
    print(f"{job.spec['name']}: {len(train)} rows to train on, {len(held_out)} to evaluate on")


def local_files(job):
    """Paths of a local source by part, each checked against the digest that was planned."""
    files = {}
    for name, planned in job.spec["files"].items():
        part, _, relative = name.partition("/")
        path = Path(job.placement["source"], relative)
        check_file(path, planned)
        files.setdefault(part, []).append(path)
    return files


def hub_files(job):
    """Paths of a hub source by part. The commit behind the revision goes into source.txt."""
    # Only here: the import takes a second that other sources need not pay.
    from rlhf.hub import fetch

    settings = job.settings
    globs = {part: getattr(settings, part) for part in ("train", "eval") if hasattr(settings, part)}
    folder, commit = fetch(settings.hub, "dataset", settings.revision, list(globs.values()))
    files = {part: sorted(folder.glob(glob)) for part, glob in globs.items()}
    for part, glob in globs.items():
        if not files[part]:
            raise InputError(f"{settings.hub}: no {part} file matches {glob!r}")
    (job.result / "source.txt").write_text(f"{settings.hub} {commit}\n")
    return files


if __name__ == "__main__":
    run(main)
