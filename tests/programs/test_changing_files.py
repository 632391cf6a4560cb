"""External files that are replaced and put back while a job reads them."""

import time
from types import SimpleNamespace

import pytest

import fetch_model
import import_dataset
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.placement import SERIAL
from snakechat.workflow.run_options import RunOptions


# What reads the files, and where they are in a spec.
@pytest.mark.parametrize(
    ("program", "read", "place"),
    [(import_dataset, "import_split", "train/"), (fetch_model, "copy_model", "")],
)
def test_files_that_were_swapped_are_not_used(folder, tmp_path, monkeypatch, program, read, place):
    spec = {"rule": "any", "name": "mine", "path": str(tmp_path / "result"), "inputs": {}}
    spec["files"] = {f"{place}{path.name}": file_digest(path) for path in folder.iterdir()}
    spec["settings"] = {"card": {}}
    job = Job(spec, {}, SERIAL, RunOptions(source=str(folder)), SimpleNamespace)
    job.result = tmp_path / "made"
    job.result.mkdir()
    # Files that have just been written are compared by their digests in addition.
    time.sleep(0.02)
    path = folder / "config.json"

    def swap(*_):
        path.rename(path.with_name("aside"))
        path.write_text("{}")
        path.unlink()
        path.with_name("aside").rename(path)

    monkeypatch.setattr(program, read, swap)
    with pytest.raises(InputError, match=f"{path} changed while it was read: start the build"):
        program.main(job)
