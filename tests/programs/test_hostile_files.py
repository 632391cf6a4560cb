"""Damaged and hostile files: an import ends in one line or in rows, in bounded time and memory.

SNAKECHAT_FUZZ_CASES=600 runs more files than the suite does, and prints the longest import and the
largest memory.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from support.damaged_files import damaged_file

CASES = int(os.environ.get("SNAKECHAT_FUZZ_CASES", 24))
# They may run in parallel.
SHARDS = 2
MAX_SECONDS, MAX_MB = 10, 1000

# One import for each file, in a process that has imported the libraries.
IMPORTS = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import import_dataset
from snakechat.workflow.errors import InputError

FORMATS = {"plain": {"prompt": "prompt", "chosen": "chosen"}, "prompt": {"prompt": "prompt"},
    "vicuna": {"prompt": "prompt", "chosen": "chosen"},
    "messages": {"messages": "chosen"}}
FORMATS["scored"] = dict.fromkeys(["prompt", "first", "second"], "prompt")
FORMATS["scored"] |= dict.fromkeys(["first_score", "second_score"], "chosen")

def one(path, result, number):
    name = list(FORMATS)[number % len(FORMATS)]
    settings = SimpleNamespace(on_bad_row="skip", format=name, columns=FORMATS[name])
    job = SimpleNamespace(settings=settings, spec={"name": "fuzz"}, facts={}, result=Path(result))
    try:
        import_dataset.import_split(job, "train", {Path(path).name: Path(path)})
    except InputError as error:
        return str(error)
    return job.facts

for line in sys.stdin:
    number, path, result = json.loads(line)
    # The peak of the memory of the children that have ended; each case has a process of its own.
    child = os.fork()
    if child == 0:
        os.dup2(os.open(result + "/log", os.O_WRONLY | os.O_CREAT), 2)
        outcome = one(path, result, number)
        Path(result, "outcome").write_text(json.dumps(outcome))
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    print(json.dumps([os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss]), flush=True)
"""


class Importer:
    """Imports files one by one and measures time and memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.longest, self.largest = folder, (0.0, ""), (0.0, "")
        self.process = subprocess.Popen(
            [sys.executable, "-c", IMPORTS, ROOT / "scripts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def check(self, seed: int) -> str:
        """Import the file of a seed; return "rows" or "error"."""
        folder = self.folder / str(seed)
        folder.mkdir()
        path = damaged_file(folder, seed)
        self.process.stdin.write(json.dumps([seed, str(path), str(folder)]) + "\n")
        self.process.stdin.flush()
        # Seconds of the CPU, which do not depend on what else the machine does.
        code, seconds, kilobytes = json.loads(self.process.stdout.readline())
        megabytes = kilobytes * 1024 / 1e6
        case = f"seed {seed} ({path.name}, {path.stat().st_size} bytes)"
        self.longest = max(self.longest, (seconds, case))
        self.largest = max(self.largest, (megabytes, case))
        log = (folder / "log").read_text()
        outcome = json.loads((folder / "outcome").read_text()) if code == 0 else ""
        shutil.rmtree(folder)
        assert code == 0 and "Traceback" not in log, f"{case}: {code} {log[-2000:]}"
        assert seconds < MAX_SECONDS, f"{case}: {seconds:.1f} s"
        assert megabytes < MAX_MB, f"{case}: {megabytes:.0f} MB"
        if isinstance(outcome, dict):
            return "rows"
        assert len(outcome) < 25_000 and outcome.isprintable(), f"{case}: {outcome[:500]}"
        assert path.name in outcome or outcome.startswith("datasets.fuzz: "), f"{case}: {outcome}"
        return "error"


@pytest.fixture
def importer(tmp_path):
    importer = Importer(tmp_path)
    yield importer
    importer.process.stdin.close()
    importer.process.wait()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_hostile_files_end_in_rows_or_in_one_line(importer, capsys, shard):
    failures = []
    seeds = range(shard, CASES, SHARDS)
    outcomes = [outcome_of(importer, seed, failures) for seed in seeds]
    with capsys.disabled():
        if CASES > 100:
            counts = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
            print(f"\n{len(outcomes)} files: {counts}")
            print("longest: {:.1f} s, {}".format(*importer.longest))
            print("largest: {:.0f} MB, {}".format(*importer.largest))
    assert not failures, "\n".join(failures)
    assert set(outcomes) == {"rows", "error"}


def outcome_of(importer, seed, failures):
    """Return the outcome of a seed; note a failure, so that the other files are tested too."""
    try:
        return importer.check(seed)
    except AssertionError as error:
        failures.append(str(error))
        return "failure"
