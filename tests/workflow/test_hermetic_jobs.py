"""A program that was edited to cheat, as a job: the kernel denies what does not count."""

import json
import re

import pytest

from snakechat.workflow.kernel_limits import landlock_version

pytestmark = pytest.mark.slow

# What the program tries, in the folder of the build. `records` is its input, `older` another
# version of that, and `work` the folder with its lock and its unfinished result. What does not
# depend on the paths of a job is tried in tests/unit/workflow/test_hermetic.py.
ATTEMPTS = (
    # Files that do not count.
    "open('output/models/tiny/config.json')",
    "open(older / 'train.parquet')",
    "open(os.environ['SNAKECHAT_BUILD'])",
    "open(code / 'train_sft.py')",
    "open(code.parent / 'rewards/exact_match.py')",
    "open(code.parent / 'requirements.txt')",
    "open('scripts/split_dataset.py')",
    "open(next(Path('output/specs/import_dataset').iterdir()))",
    "open(private)",
    "__import__('train_sft')",
    # What others made, and the build itself.
    "os.remove(records / 'train.parquet')",
    "os.rename(job.result, records)",
    "job.place.mkdir()",
    "open(work / 'lock', 'w')",
    "open(work / 'limits.json', 'w')",
    "open('output/logs/import_dataset/toy.log', 'w')",
    "os.symlink(job.result, 'output/data/mine')",
    "os.remove('output/data/toy')",
    "open('.snakemake/mine', 'w')",
)
CHEAT = """
def cheat(job):
    import os, sys
    from pathlib import Path

    private, older, attempts = {private!r}, Path({older!r}), {attempts!r}
    records, code = job.inputs["records"], Path(__file__).parent
    work = job.result.parent
    (job.result / "x").write_text("x")
    for attempt in attempts:
        try:
            eval(attempt, {{**globals(), **locals()}})
            print("ALLOWED", attempt)
        except OSError as error:
            print("DENIED", attempt, error)
    (job.result / "x").unlink()
    # As all programs of the tests are, this one is a fork of a process that has imported torch.
    print("FORKED", "torch" in sys.modules)


def main(job: Job) -> None:
    cheat(job)
"""


def test_an_edited_program_reaches_nothing_that_does_not_count(sources, tmp_path):
    if landlock_version() < 4:
        pytest.skip("this kernel has no Landlock with ports")
    private = tmp_path / "private"
    private.write_text("secret")
    options = ("--config", "hermetic=require")
    sources.build("output/data/toy", *options, "seed=7")
    older = (sources.folder / "output/data/toy/manifest.json").resolve().parent
    sources.build("output/data/toy", "output/models/tiny", *options)
    program = sources.folder / "scripts/split_dataset.py"
    cheat = CHEAT.format(private=str(private), older=str(older), attempts=ATTEMPTS)
    text = program.read_text()
    program.write_text(text.replace("def main(job: Job) -> None:\n", cheat.lstrip(), 1))
    sources.build("output/split/toy", *options)
    log = (sources.folder / "output/logs/split_dataset/toy.log").read_text()
    assert re.findall("^ALLOWED .*", log, re.MULTILINE) == []
    assert len(re.findall("^DENIED ", log, re.MULTILINE)) == len(ATTEMPTS)
    assert "FORKED True\n" in log
    record = json.loads((sources.folder / "output/split/toy/run.json").read_text())
    assert record["hermetic"] == landlock_version()
    assert private.read_text() == "secret"
