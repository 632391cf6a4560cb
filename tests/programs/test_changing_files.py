"""External files that are replaced and put back while a job reads them."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import fetch_model
import import_dataset
from snakechat.data import prompt_sets
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.placement import SERIAL
from snakechat.workflow.run_options import RunOptions


def job_of(tmp_path, source, files, **settings):
    """A job that reads files of a folder; files: paths by the names that the spec has for them."""
    spec = {"rule": "any", "name": "mine", "path": str(tmp_path / "result")}
    spec["settings"] = {"card": {}, **settings}
    spec |= {"inputs": {}, "files": {name: file_digest(path) for name, path in files.items()}}
    options = RunOptions(source=str(source), store=str(tmp_path / "store"))
    job = Job(spec, {}, SERIAL, options, SimpleNamespace)
    job.result.mkdir(parents=True)
    # Files that have just been written are compared by their digests in addition.
    time.sleep(0.02)
    return job


def swapping(read, path, content):
    """Return a function that reads while a file has another content, and then puts it back."""

    def swapped(*arguments, **options):
        aside = path.with_name("aside")
        path.rename(aside)
        path.write_bytes(content)
        found = read(*arguments, **options)
        # A generator reads when it is iterated over.
        found = iter(list(found)) if hasattr(found, "__next__") else found
        path.unlink()
        aside.rename(path)
        return found

    return swapped


def check_that_it_fails(main, job, path, content):
    """Check that a job fails in one line, and that the file is as it was."""
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"changed while it was read: start the build") as error:
        main(job)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert path.read_bytes() == before != content


def row(text):
    return json.dumps({"prompt": "a", "chosen": text, "rejected": "c"}).encode() + b"\n"


def test_rows_of_a_file_that_was_swapped_are_not_imported(tmp_path, monkeypatch):
    path = tmp_path / "data/pairs.jsonl"
    path.parent.mkdir()
    path.write_bytes(row("planned"))
    settings = {"format": "plain", "on_bad_row": "fail", "keep": {}}
    settings["columns"] = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    job = job_of(tmp_path, path.parent, {"train/pairs.jsonl": path}, **settings)
    other = row("swapped")
    read = swapping(import_dataset.read_rows, path, other)
    monkeypatch.setattr(import_dataset, "read_rows", read)
    check_that_it_fails(import_dataset.main, job, path, other)


def test_a_model_that_was_swapped_is_not_fetched(folder, tmp_path, monkeypatch):
    path = folder / "config.json"
    files = {file.name: file for file in folder.iterdir()}
    job = job_of(tmp_path, folder, files)
    other = path.read_bytes() + b"\n"
    copy = swapping(fetch_model.copy_model, path, other)
    monkeypatch.setattr(fetch_model, "copy_model", copy)
    check_that_it_fails(fetch_model.main, job, path, other)


def test_prompts_that_were_swapped_are_not_used(tmp_path, monkeypatch):
    path = tmp_path / "prompts/mine.yaml"
    path.parent.mkdir()
    path.write_text("- Hi?\n")
    job = job_of(tmp_path, tmp_path, {"prompts/mine.yaml": path}, prompt_sets=["mine"])
    read = type(path).read_text
    monkeypatch.setattr(type(path), "read_text", swapping(read, path, b"- Ho?\n"))

    def read_prompts(job):
        files = job.spec["files"]
        prompt_sets.read_prompts(["mine"], files, Path(job.options.source))

    check_that_it_fails(read_prompts, job, path, b"- Ho?\n")
