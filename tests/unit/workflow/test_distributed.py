"""Jobs of several processes: what they publish, how they report errors, and how they stop."""

import itertools
import json
import signal
import time
from types import SimpleNamespace

import pytest

from conftest import ROOT
from support.launching import launch
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
from snakechat.training.engine import STATE_LOCK
from snakechat.workflow.processes import barrier, rank, world_size
from snakechat.workflow.job import run


def main(job):
    if world_size() > 1:
        distributed.init_process_group("gloo")
        atexit.register(distributed.destroy_process_group)
    event, is_last_rank = os.environ["EVENT"], rank() == world_size() - 1
    if event == "write late, abort":
        # As threads of process groups do that outlive them.
        atexit.register(os.abort)
    with Checkpointer(job) as checkpointer:
        for step, _ in checkpointer.steps(range(4)):
            # As the update of an engine.
            STATE_LOCK.begin()
            if step == 2 and is_last_rank and event == "out of memory of one rank":
                torch.empty(1 << 50)
            if event == "pause" and step == 2:
                print("pausing", flush=True)
                time.sleep(3)
            barrier()
            checkpointer.keep(step)
            if event == "evaluate" and step == 2:
                # The other ranks wait for the last one.
                if is_last_rank:
                    print("pausing", flush=True)
                    time.sleep(60)
                barrier()
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
        options += ["--placement", json.dumps({"gpus_per_node": number})]
        variables = {"EVENT": event, "CUDA_VISIBLE_DEVICES": ""}
        return launch(None, program, *options, folder=tmp_path, **variables)

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


@pytest.mark.parametrize("event", ["pause", "evaluate"])
def test_a_stopped_job_resumes_with_the_same_number_of_processes_only(job, event):
    process = job.start(2, event)
    list(itertools.takewhile(lambda line: "pausing" not in line, process.stdout))
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    lines = [line for line in output.splitlines() if "stopped" in line]
    assert process.returncode == 128 + signal.SIGTERM
    assert lines == ["stopped by SIGTERM after step 2: run the same command again to resume"]
    code, [line] = job.run(1, "none")
    assert code == 1
    assert "2 processes" in line and "set nodes and gpus_per_node back" in line
    assert job.run(2, "none") == (0, ["resuming after step 2"])
