"""Several processes: what they tell each other, train together, and how they end."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT
from snakechat.training.metrics import MetricsLogger
from snakechat.workflow import distributed as ranks
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.errors import describe_environment_error

# Those of tests/support/worker.py.
PROMPTS = [list(range(3, 3 + length)) for length in (5, 2, 7, 3, 4)]
WORKER = ROOT / "tests/support/worker.py"


def launch(number, program, *arguments, folder=None):
    """Start a program in so many processes. Its output is text."""
    command = [sys.executable, ROOT / "scripts/launch.py", "--standalone", "--shutdown-timeout=60"]
    return subprocess.Popen(
        [*map(str, command), f"--nproc-per-node={number}", str(program), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """What one process and two found: by their number, a list with the figures of each."""
    found = {}
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("figures")
        process = launch(number, WORKER, folder)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-5000:]
        assert "Warning" not in output
        found[number] = [torch.load(folder / f"{rank}.pt") for rank in range(number)]
    return found


@pytest.fixture
def together(figures):
    """The figures of the first of two processes."""
    return figures[2][0]


def assert_close(found, expected, tolerance=1e-6):
    assert found == pytest.approx(expected, rel=0, abs=tolerance)


def test_what_two_processes_tell_each_other(figures):
    for process in figures[2]:
        assert process["told"][0] == {
            "total": [2.0, 1.0],
            "largest": [10, True, 0.0],
            "first": [True, 7, 0.1],
        }


def test_one_process_tells_itself():
    tensor = torch.tensor([1.0, 2.0])
    assert ranks.all_reduce_sum(tensor) is tensor
    assert (ranks.rank(), ranks.world_size()) == (0, 1)
    assert (ranks.all_reduce_max(3), ranks.broadcast_from_first(False)) == (3, False)
    ranks.barrier()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_losses_and_norms_are_those_of_plain_training(stage, number, figures):
    # Gradients are clipped in each step, at .5.
    first = figures[number][0]
    found, plain = first[f"stage {stage}"][0], first["plain"]
    assert min(plain["norms"]) > 1.5
    assert_close(found["losses"], plain["losses"])
    assert_close(found["norms"], plain["norms"])


CASES = [f"stage {stage}" for stage in range(4)]
CASES += ["optimizer 1", "optimizer 2", "optimizer 3", "parameters 3", "bf16 whole"]
CASES += [
    "bf16 none",
    "bf16 optimizer",
    "checkpointing 0",
    "checkpointing 3",
    "lora 0",
    "lora 2",
    "lora 3",
]
CASES += ["resumed 0", "resumed 2", "resumed 3"]


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_repeated_bit_by_bit_and_all_processes_have_its_weights(case, figures):
    runs = [process[case] for process in figures[2]]
    for first, second in runs:
        assert first["losses"] == second["losses"]
        assert torch.equal(first["weights"], second["weights"])
        assert torch.equal(first["weights"], runs[0][0]["weights"])


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case, figures):
    alone, together = (figures[number][0][case][0] for number in (1, 2))
    # bf16 is coarse: .004 of a loss of 4 at each pass.
    tolerance = 0.005 if "bf16" in case or case == "resumed 2" else 1e-6
    assert_close(together["losses"], alone["losses"], tolerance)


@pytest.mark.parametrize(
    ("case", "without"),
    [
        ("optimizer 1", "stage 1"),
        ("optimizer 2", "stage 2"),
        ("optimizer 3", "stage 3"),
        ("parameters 3", "stage 3"),
        ("bf16 optimizer", "bf16 none"),
        ("checkpointing 0", "stage 0"),
        ("checkpointing 3", "stage 3"),
    ],
)
def test_what_saves_memory_changes_nothing(case, without, together):
    found, expected = together[case][0], together[without][0]
    assert_close(found["losses"], expected["losses"])
    assert_close(found["norms"], expected["norms"])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_train_at_their_own_rate(stage, together):
    rates = together[f"lora {stage}"][0]["rates"]
    assert rates == [[pytest.approx(0.02 * (1 - step / 6))] for step in range(6)]
    assert_close(together[f"lora {stage}"][0]["losses"], together["lora 0"][0]["losses"])
    losses = together["lora 0"][0]["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("stage", "without"), [(0, "stage 0"), (2, "bf16 none"), (3, "stage 3")])
def test_a_signal_to_one_process_stops_all_and_they_go_on_to_the_same_bits(stage, without, figures):
    for rank, process in enumerate(figures[2]):
        found = process[f"resumed {stage}"][0]
        said = "stopped by SIGTERM after step 4: run the same command again to resume"
        assert found["said"] == (1 if rank else said)
        parts = ["0-of-2", "1-of-2"]
        assert found["saved"] == {"00000003": parts, "00000004": parts}
        assert found["losses"] == process[without][0]["losses"][4:]
        assert torch.equal(found["weights"], process[without][0]["weights"])
    # Each has its own generator back: they drew one number and two a step.
    drawn = [process[f"resumed {stage}"][0]["drawn"] for process in figures[2]]
    assert drawn[0] != drawn[1]


def test_whole_weights_generate_and_training_goes_on(figures):
    responses = [process["generated"][0]["responses"] for process in figures[2]]
    assert all(torch.equal(*pair) for pair in zip(*responses, strict=True))
    alone = figures[1][0]["generated"][0]
    assert all(torch.equal(*pair) for pair in zip(alone["responses"], responses[0], strict=True))
    assert_close(figures[2][0]["generated"][0]["loss"], alone["loss"])


# --- rollouts ------------------------------------------------------------------------------------


def test_each_process_asks_for_its_share_and_all_have_the_responses(figures):
    # As tests/support/worker.py's sampler responses: backwards, and once more without the end.
    expected = [[prompt[::-1][first:] for prompt in PROMPTS] for first in (0, 1)]
    for process in (*figures[1], *figures[2]):
        found = process["asked"][0]
        assert found["responses"] == expected
        for responses, logprobs in zip(expected, found["logprobs"], strict=True):
            assert logprobs.tolist() == [
                [-number / 8 for number in ids] + [0.0] * (8 - len(ids)) for ids in responses
            ]
    assert [process["asked"][0]["asked"] for process in figures[2]] == [[3], [2]]


def test_a_process_without_a_prompt_has_the_responses_too(figures):
    found = [process["asked one"][0] for process in figures[2]]
    assert [one["asked"] for one in found] == [[1], []]
    assert [one["responses"] for one in found] == [[[[7, 6, 5, 4, 3]], [[6, 5, 4, 3]]]] * 2
    assert torch.equal(found[0]["logprobs"], found[1]["logprobs"])


def test_one_process_asks_functions_and_all_have_their_scores(figures):
    found = [process["scored"][0] for process in figures[2]]
    assert found == [{"scores": [1, 2, 3], "calls": calls} for calls in (1, 0)]


LOOKS = [f"{how} {stage}" for how in ("looked at", "bare") for stage in (0, 2, 3)]


@pytest.mark.parametrize("case", LOOKS)
def test_tables_of_two_processes_are_those_of_one(case, figures):
    alone = figures[1][0][case][0]
    runs = [run for process in figures[2] for run in process[case]]
    for run in runs:
        assert run["losses"] == runs[0]["losses"]
        assert_close(run["losses"], alone["losses"])
        tables = ([*one["tables"], *one["bare"]] for one in (run, runs[0], alone))
        for table, own, right in zip(*tables, strict=True):
            assert torch.equal(table, own)
            torch.testing.assert_close(table, right, rtol=0, atol=1e-5)
    # What was looked at is what is trained: its mean is the loss.
    for (logprobs, _), loss in zip(alone["tables"], alone["losses"], strict=True):
        assert logprobs[alone["mask"]].mean().item() == pytest.approx(-loss, abs=1e-6)
        assert not logprobs[~alone["mask"]].any()
    assert alone["losses"][-1] < alone["losses"][0] - 0.01


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_without_adapters_a_policy_stays_what_it_was(stage, figures):
    for process in (*figures[1], *figures[2]):
        found = process[f"bare {stage}"][0]
        first, *others = found["bare"]
        assert all(torch.equal(other, first) for other in others)
        # New adapters change nothing, and then they do.
        assert torch.equal(found["tables"][0][0], first)
        assert (found["tables"][2][0] - first).abs().max() > 0.01


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_averages_are_those_of_a_plain_loop_and_leave_training_alone(stage, number, figures):
    for process in figures[number]:
        found = process[f"averaged {stage}"][0]
        assert found["losses"] == process[f"stage {stage}"][0]["losses"]
        assert torch.equal(found["weights"][-1], process[f"stage {stage}"][0]["weights"])
        expected, *weights = found["weights"]
        for new, average in zip(weights, found["averages"], strict=True):
            expected = 0.75 * expected + 0.25 * new
            torch.testing.assert_close(average, expected, rtol=0, atol=1e-6)
        assert (average - new).abs().max() > 1e-3


def test_only_the_first_process_logs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    job = SimpleNamespace(result=tmp_path, log_folder=tmp_path / "logs", spec={"rule": "train_sft"})
    with MetricsLogger(job, 2) as logger:
        logger.log(1, ["loss"], loss=0.5)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


# --- a whole program ------------------------------------------------------------------------

PROGRAM = '''
"""A job of four steps in several processes, in which something may go wrong."""

import atexit
import os
import signal
import time

import torch
from torch import distributed

from snakechat.workflow import distributed as ranks
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run
from snakechat.training.metrics import StepLog
from snakechat.training.checkpointing import Resumable


class Sum:
    """What each process counts for itself."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main(job):
    distributed.init_process_group("gloo")
    atexit.register(distributed.destroy_process_group)
    what, last = job.placement["what"], ranks.rank() == ranks.world_size() - 1
    if what == "abort at the end":
        atexit.register(os.abort)
    if what == "mistake":
        raise InputError("all is wrong")
    part = Sum()
    training = Resumable(job, part=part)
    with StepLog(job, 4) as logger:
        for step, _ in training.steps(range(4)):
            part.value += step * (ranks.rank() + 1)
            if step == 2 and last:
                if what == "mistake of one":
                    raise InputError("one is wrong")
                if what == "memory of one":
                    torch.empty(1 << 50)
                if what == "one killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            if what == "wait" and step == 2:
                print("waiting", flush=True)
                time.sleep(3)
            ranks.barrier()
            logger.log(step, [], loss=ranks.all_reduce_sum(torch.tensor(float(part.value))).item())
    if what == "late" and last:
        time.sleep(2)
        (job.result / "late").write_text("all the same")


if __name__ == "__main__":
    run(main)
'''


@pytest.fixture
def job(tmp_path):
    """A function that starts the program in so many processes, and gives what it says."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "snakechat").symlink_to(ROOT / "scripts/snakechat")
    (tmp_path / "requirements.txt").symlink_to(ROOT / "requirements.txt")
    program = scripts / "train_sft.py"
    program.write_text(PROGRAM)
    spec = {"rule": "train_sft", "name": "tiny", "path": "output/sft/tiny"}
    spec |= {"inputs": {}, "settings": {}, "code": code_digests(program)}
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    def begin(number, what):
        placement = {"save_steps": 10, "what": what, "micro_batch_tokens": 64, "zero_stage": 0}
        options = ("--spec", "spec.json", "--placement", json.dumps(placement))
        return launch(number, program, *options, folder=tmp_path)

    def go(number, what):
        process = begin(number, what)
        output, _ = process.communicate(timeout=120)
        lines = [line for line in output.splitlines() if line and "train_sft: " not in line]
        return process.returncode, lines

    return SimpleNamespace(begin=begin, go=go, target=tmp_path / "output/sft/tiny")


def test_several_processes_make_one_result(job):
    assert job.go(2, "nothing") == (0, [])
    lines = (job.target / "metrics.jsonl").read_text().splitlines()
    # 1, 3, 6 and 10 of the first; twice that of the second.
    assert [json.loads(line)["loss"] for line in lines] == [3.0, 9.0, 18.0, 30.0]
    manifest = job.target.with_name("tiny.manifest.json")
    manifest.unlink()
    before = (job.target / "manifest.json").stat().st_mtime_ns
    assert job.go(2, "nothing") == (0, [])
    assert manifest.exists()
    assert (job.target / "manifest.json").stat().st_mtime_ns == before


def test_nothing_is_published_before_the_last_process_is_done(job):
    assert job.go(2, "late") == (0, [])
    assert (job.target / "late").exists()
    assert "late" in json.loads((job.target / "manifest.json").read_text())["files"]


def test_what_goes_wrong_when_all_is_done_ends_nothing(job):
    # As threads of a group that outlive it, which something holds on to.
    assert job.go(2, "abort at the end") == (0, [])
    assert (job.target / "manifest.json").exists()


def test_a_lone_process_needs_no_others(job):
    assert job.go(1, "nothing") == (0, [])
    code, lines = job.go(1, "mistake")
    # What is complete is not begun anew.
    assert (code, lines) == (0, [])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory_is_told_with_what_needs_it(error):
    placement = {"micro_batch_tokens": 8192, "offload": "none", "nodes": 1}
    assert describe_environment_error(error, "output/sft/a", placement) == (
        "output/sft/a: out of memory: placement has micro_batch_tokens: 8192, offload: none;"
        " fewer micro_batch_tokens need less"
    )
    assert describe_environment_error(error, "output/data/a", {}) == "output/data/a: out of memory"


def test_other_errors_keep_their_stack():
    assert describe_environment_error(RuntimeError("shapes differ"), "output/sft/a", {}) is None


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("mistake", "error: all is wrong"),
        ("mistake of one", "error: one is wrong"),
        (
            "memory of one",
            "error: output/sft/tiny: out of memory: placement has micro_batch_tokens: 64,"
            " zero_stage: 0; fewer micro_batch_tokens need less",
        ),
    ],
)
def test_what_is_wrong_is_said_once_and_ends_all(what, line, job):
    code, lines = job.go(2, what)
    assert code == 1
    others = "error: output/sft/tiny: another process of this job has ended"
    assert [said for said in lines if said != others] == [line]
    assert not job.target.exists()


def test_a_process_that_is_killed_ends_all(job):
    code, lines = job.go(2, "one killed")
    assert code == 1
    assert [line for line in lines if "has ended" not in line] == [
        "error: process 1 of the job was ended by SIGKILL"
    ]
    assert not job.target.exists()


def test_stopped_by_the_cluster_they_go_on_in_the_same_number_only(job):
    process = job.begin(2, "wait")
    said = list(itertools.takewhile(lambda line: "waiting" not in line, process.stdout))
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    said = [line for line in process.stdout.read().splitlines() if "stopped" in line]
    assert process.wait() == 128 + signal.SIGTERM
    assert said == ["stopped by SIGTERM after step 2: run the same command again to resume"]
    code, lines = job.go(1, "nothing")
    assert code == 1
    assert len(lines) == 1
    assert "is a state of 2 processes, this run has 1: set nodes and gpus_per_node back" in lines[0]
    assert job.go(2, "nothing") == (0, ["resuming after step 2"])
    lines = (job.target / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [3.0, 9.0, 18.0, 30.0]
