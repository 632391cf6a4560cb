"""scripts/watch.py shows a training before, while and after it runs, and after it failed."""

import fcntl
import json
import os
import platform
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time

import pytest

RESULT = "output/rlhf/tiny"


@pytest.fixture
def copy(quick, tmp_path):
    """A copy of the quick build."""
    return quick.copy(tmp_path / "copy")


def run(workflow, *arguments, **environment):
    """Run the program without a terminal; return the finished process."""
    return subprocess.run(
        [sys.executable, "scripts/watch.py", *arguments],
        cwd=workflow.folder,
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
    )


def frame(workflow, *arguments, **environment):
    """The frame that the program prints."""
    process = run(workflow, *(arguments or (RESULT, "--once")), **environment)
    assert process.returncode == 0 and process.stderr == "", process.stderr
    return process.stdout


def ended_process():
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def start_again(workflow, process, steps=3):
    """Make the training one that has done some steps, in a process."""
    folder = workflow.folder / "output/rlhf"
    growing = folder / ".tiny.tmp"
    (folder / "tiny").rename(growing)
    (growing / "manifest.json").unlink()
    (folder / "tiny.manifest.json").unlink()
    (folder / ".tiny.lock").write_text(f"process {process} on {platform.node()}\n")
    metrics = growing / "metrics.jsonl"
    first = json.loads(metrics.read_text().splitlines()[0])
    lines = [json.dumps({**first, "step": step}) + "\n" for step in range(1, 5)]
    metrics.write_text("".join(lines[:steps]))
    log = workflow.folder / "output/logs/train_rlhf/tiny.log"
    log.write_text("note: a\n\rtrain_rlhf:  5%|▌ | 2/40 [00:06<01:58,  3.30s/step, kl=0.018]")
    return metrics, lines


def test_a_finished_training_shows_its_last_values_and_all_jobs(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.folder.rglob("*")}
    shown = frame(copy)
    lines = (copy.folder / RESULT / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert "rlhf/tiny  ✓ finished" in shown and f"step {last['step']}" in shown
    assert f"{last['response/ended_by_eos'] * 100:.1f}\xa0%  ended by EOS" in shown
    jobs = json.loads((copy.folder / "output/report/rlhf/tiny.manifest.json").read_text())
    assert f"{len(jobs['lineage']) + 1} of {len(jobs['lineage']) + 1} finished" in shown
    # It is no terminal: one frame, without --once too.
    assert frame(copy, RESULT) == shown
    after = {path: path.stat().st_mtime_ns for path in copy.folder.rglob("*")}
    after = {path: time for path, time in after.items() if "__pycache__" not in path.parts}
    assert {path: time for path, time in before.items() if path in after} == after


def test_a_running_training_shows_its_progress_and_the_queue(copy, tmp_path):
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, H100, 87, 41210, 81559, 62, 512.3'\n")
    tool.chmod(0o755)
    start_again(copy, os.getpid())
    shown = frame(copy, PATH=f"{tool.parent}:{os.environ['PATH']}")
    assert "▶ running  step 3 of 40 · 01:58 left · " in shown and "tokens/s · last step" in shown
    assert re.search(r"▶ running +train_rlhf +tiny", shown)
    # They were made from an earlier result.
    assert re.search(r"… waits +evaluate_rlhf +tiny", shown)
    assert re.search(r"… waits +draw_report +rlhf/tiny", shown)
    assert re.search(r"GPU 0 H100 +87 %.*40.2 of 79.6 GiB +62 °C +512 W", shown)
    if shutil.which("ps"):
        assert f"process {os.getpid()}: " in shown


def test_a_line_that_is_being_written_or_damaged_is_no_step(copy):
    metrics, _ = start_again(copy, os.getpid())
    with metrics.open("a") as file:
        file.write('[1]\n{"step": "x"}\n\0\0\0\n{"step": 4, "objective/sco')
    assert "step 3 of 40" in frame(copy)


@pytest.mark.parametrize("is_growing", [True, False])
def test_a_failed_training_shows_its_error(copy, is_growing):
    start_again(copy, ended_process())
    assert "output/logs/train_rlhf/tiny.log" in frame(copy)
    if not is_growing:
        # It failed before its first step.
        shutil.rmtree(copy.folder / "output/rlhf/.tiny.tmp")
    log = copy.folder / "output/logs/train_rlhf/tiny.log"
    with log.open("a") as file:
        file.write("\rtrain_rlhf: 9%| 3/40\nerror: step 4: loss is nan \x1b[2J\nlater\n")
    shown = frame(copy)
    assert "✗ failed" in shown and "error: step 4: loss is nan \\x1b[2J" in shown
    assert ("step 3 of 40" in shown) == is_growing


def test_before_a_build_and_before_its_turn_a_training_waits(copy):
    shutil.rmtree(copy.folder / "output/rlhf")
    assert re.search("rlhf/tiny  … waits.*… waits +train_rlhf", frame(copy), re.DOTALL)
    shutil.rmtree(copy.folder / "output")
    assert "snakemake --cores 1 output/rlhf/tiny" in frame(copy)


def test_responses_cannot_control_the_terminal(copy):
    hostile = "\x1b]0;title\x07\x1b[2J[red]\x9b31m\u202e"
    line = {"step": 9999, "prompt": hostile, "response": hostile, "score": 0.5}
    with (copy.folder / RESULT / "responses.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps({**line, "response": "a" * 10_000}) + "\n")
    shown = frame(copy)
    assert "responses of step 9,999" in shown and "\\x1b[2J[red]\\x9b31m\\u202e" in shown
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
    assert "a" * 50 in shown and shown.count("a" * 50) < 10


@pytest.mark.parametrize("columns", [12, 40, 200])
def test_a_frame_fits_the_width_of_the_terminal(copy, columns):
    start_again(copy, os.getpid())
    shown = frame(copy, COLUMNS=str(columns))
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize(
    "path", ["output/none/tiny", "other/rlhf/tiny", "rlhf", "/", "output/eval"]
)
def test_a_path_that_is_no_training_is_one_line(copy, path):
    process = run(copy, path)
    assert process.returncode == 1 and process.stdout == ""
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1


def test_a_terminal_follows_a_training_until_it_has_finished(copy):
    manifest = (copy.folder / f"{RESULT}.manifest.json").read_text()
    metrics, lines = start_again(copy, os.getpid(), steps=1)
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "scripts/watch.py", RESULT],
        cwd=copy.folder,
        env={**os.environ, "TERM": "xterm"},
        stdout=terminal,
        stderr=terminal,
        stdin=terminal,
    )
    os.close(terminal)
    shown = ""

    def read_until(text):
        nonlocal shown
        end = time.monotonic() + 30
        while text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown):
            assert time.monotonic() < end, shown
            if select.select([screen], [], [], 1)[0]:
                shown += os.read(screen, 1 << 16).decode(errors="replace")

    try:
        read_until("step 1 of 40")
        with metrics.open("a") as file:
            file.write(lines[1])
        read_until("step 2 of 40")
        # The job publishes its result.
        metrics.parent.rename(copy.folder / RESULT)
        (copy.folder / f"{RESULT}.manifest.json").write_text(manifest)
        read_until("finished")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
