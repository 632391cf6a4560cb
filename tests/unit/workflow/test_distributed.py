"""Jobs of several processes: what they publish, how they report errors, and how they stop."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from conftest import ROOT
from support.launching import LAUNCHER, launch, run
from support.sources import code_digests

pytestmark = pytest.mark.slow


PROGRAM = '''
"""A job of four steps in several processes, with the event EVENT."""

import atexit
import os
import time

import torch
from torch import distributed

from snakechat.training.checkpointing import Checkpointer
from snakechat.workflow.processes import barrier, rank, world_size
from snakechat.workflow.job import run


def main(job):
    distributed.init_process_group("gloo")
    atexit.register(distributed.destroy_process_group)
    event, is_last_rank = os.environ["EVENT"], rank() == world_size() - 1
    if event == "write late, abort":
        # As threads of process groups do that outlive them.
        atexit.register(os.abort)
    with Checkpointer(job) as checkpointer:
        for step, _ in checkpointer.steps(range(4)):
            # As the update of an engine.
            checkpointer.lock.begin()
            if step == 2 and is_last_rank and event == "out of memory of one rank":
                torch.empty(1 << 50)
            if event == "pause" and step == 2:
                print("pausing", flush=True)
                time.sleep(3)
            barrier()
            checkpointer.keep(step)
    if event == "write late, abort" and is_last_rank:
        time.sleep(2)
        (job.result / "late").write_text("text")


if __name__ == "__main__":
    run(main)
'''


@pytest.fixture
def job(tmp_path):
    """The program with its spec: functions that start it, and the path of its result."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "snakechat").symlink_to(ROOT / "scripts/snakechat")
    (tmp_path / "requirements.txt").symlink_to(ROOT / "requirements.txt")
    program = scripts / "train_sft.py"
    program.write_text(PROGRAM)
    spec = {"rule": "train_sft", "name": "tiny", "path": "output/sft/tiny"}
    spec |= {"inputs": {}, "settings": {}, "files": {}, "requirements": {}}
    spec["code"] = code_digests(program)
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    def start(number, event):
        """Start the program in a number of processes."""
        options = ["--spec", "spec.json", "--options", json.dumps({"save_steps": 10})]
        options += ["--placement", json.dumps({"micro_batch_tokens": 64})]
        return launch(number, program, *options, folder=tmp_path, EVENT=event)

    def end(number, event):
        """Run the program; return its exit code and its lines, without those about the progress."""
        process = start(number, event)
        output, _ = process.communicate(timeout=120)
        lines = [line for line in output.splitlines() if line and "train_sft tiny: " not in line]
        return process.returncode, lines

    return SimpleNamespace(start=start, run=end, target=tmp_path / "output/sft/tiny")


def test_a_result_is_published_once_the_last_rank_has_finished_whatever_its_interpreter_does(job):
    assert job.run(2, "write late, abort") == (0, [])
    assert "late" in json.loads((job.target / "manifest.json").read_text())["files"]


def test_an_error_is_printed_once_and_ends_all_ranks(job):
    code, lines = job.run(2, "out of memory of one rank")
    assert code == 1
    other = "error: output/sft/tiny: another process of this job has ended"
    [line] = (printed for printed in lines if printed != other)
    assert line.startswith("error: output/sft/tiny: out of memory: ")
    assert not job.target.exists()


# Rank 0 ends when the pipe's other end has ended.
KILLED_FIRST = """
import os, signal, sys

with open(sys.argv[1], "r" if os.environ["RANK"] == "0" else "w") as pipe:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.read()
os._exit(1)
"""


def test_of_ranks_that_end_at_once_the_killed_one_is_reported(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    program = tmp_path / "program.py"
    program.write_text(KILLED_FIRST)
    code, output = run(2, program, tmp_path / "pipe")
    assert output == "error: process 1 of the job was ended by SIGKILL\n"
    assert code == 128 + signal.SIGKILL


def test_a_stopped_job_resumes_with_the_same_number_of_processes_only(job):
    process = job.start(2, "pause")
    list(itertools.takewhile(lambda line: "pausing" not in line, process.stdout))
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    lines = [line for line in process.stdout.read().splitlines() if "stopped" in line]
    assert process.wait() == 128 + signal.SIGTERM
    assert lines == ["stopped by SIGTERM after step 2: run the same command again to resume"]
    code, [line] = job.run(1, "none")
    assert code == 1
    assert "2 processes" in line and "set nodes and gpus_per_node back" in line
    assert job.run(2, "none") == (0, ["resuming after step 2"])


def test_an_abort_of_the_launcher_at_its_end_changes_no_exit_code(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit(3)\n")
    start = "import atexit, os, runpy, sys; atexit.register(os.abort); sys.argv = sys.argv[1:]"
    start += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", start, LAUNCHER, "--standalone", "--nproc-per-node=2", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 3
