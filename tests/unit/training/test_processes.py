"""Training in several processes: ZeRO stages, offloading, resuming, signals, rollouts.

tests/support/worker.py runs every case in two processes, and rollouts in one as well.
"""

import pytest
import torch

from conftest import ROOT
from snakechat.modeling.models import DTYPES
from support import launching

pytestmark = pytest.mark.slow

WORKER = ROOT / "tests/support/worker.py"
ROLLOUT_CASES = ["rollouts lora 0", "rollouts lora 3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each rank returned for each case, as lists by number of processes."""
    found = {}
    for number, names in ((1, ROLLOUT_CASES), (2, [])):
        folder = tmp_path_factory.mktemp("processes")
        code, output = launching.run(number, WORKER, folder, *names)
        assert code == 0, output[-5000:]
        assert "Warning" not in output
        found[number] = [torch.load(folder / f"{rank}.pt") for rank in range(number)]
    return found


def assert_close(values, expected, tolerance=1e-6):
    assert values == pytest.approx(expected, rel=0, abs=tolerance)


def test_all_processes_know_the_value_of_the_first_one(runs):
    assert [rank["first"] for rank in runs[2]] == [[True, 7]] * 2


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_losses_and_norms_equal_those_of_torch_alone(stage, runs):
    # Gradients are clipped at 0.5 in each step.
    run, expected = runs[2][0][f"stage {stage}"], runs[2][0]["torch"]
    assert min(expected["norms"]) > 1.5
    assert_close(run["losses"], expected["losses"])
    assert_close(run["norms"], expected["norms"])


@pytest.mark.parametrize("case", ["offload optimizer 3", "offload parameters 3", "checkpointing 3"])
def test_options_that_save_memory_do_not_change_the_losses(case, runs):
    run, expected = (runs[2][0][name] for name in (case, "stage 3"))
    assert_close(run["losses"], expected["losses"])
    assert_close(run["norms"], expected["norms"])


@pytest.mark.parametrize(
    ("stage", "reference"), [(0, "stage 0"), (1, "stage 1"), (2, "bf16 2"), (3, "bf16 3")]
)
def test_a_signal_to_one_rank_stops_all_and_they_resume_bit_identically(stage, reference, runs):
    for number, rank in enumerate(runs[2]):
        run, expected = rank[f"resumed {stage}"], rank[reference]
        message = "stopped by SIGTERM after step 4: run the same command again to resume"
        assert run["exit_code"] == (1 if number else message)
        files = ["0-of-2", "1-of-2"]
        assert run["saved"] == {"00000003": files, "00000004": files}
        assert run["losses"] == expected["losses"][4:]
        # Those of all processes.
        assert torch.equal(run["weights"], runs[2][0][reference]["weights"])
    # Each rank restores its own generator: rank 0 drew one number per step, rank 1 two.
    first, second = (rank[f"resumed {stage}"]["random_number"] for rank in runs[2])
    assert first != second


# --- rollouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ROLLOUT_CASES)
def test_responses_and_logprobs_of_two_processes_equal_those_of_one(case, runs):
    one, repeats = runs[1][0][case], [rank[case] for rank in runs[2]]
    for run in repeats:
        assert run["responses"] == one["responses"]
        assert run["losses"] == repeats[0]["losses"]
        assert_close(run["losses"], one["losses"])
        tables = ([*each["tables"], *each["base_tables"]] for each in (run, repeats[0], one))
        for table, first, expected in zip(*tables, strict=True):
            assert torch.equal(table, first)
            torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)
    # The mean of the log-probabilities is the negative of the loss.
    for (logprobs, _), loss in zip(one["tables"], one["losses"], strict=True):
        assert logprobs[one["mask"]].mean().item() == pytest.approx(-loss, abs=1e-6)
        assert not logprobs[~one["mask"]].any()
    assert one["losses"][-1] < one["losses"][0] - 0.01


@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 0), ("fp32", 3), ("bf16", 3)])
def test_the_first_process_saves_merged_weights_in_the_dtype_of_training(dtype, stage, runs):
    saved = runs[2][0][f"merged {dtype} {stage}"]["saved"]
    assert {weight.dtype for weight in saved.values()} == {DTYPES[dtype]}
    for rank in runs[2]:
        merged = rank[f"merged {dtype} {stage}"]["merged"]
        assert all(torch.equal(merged[name], weight) for name, weight in saved.items())
    # The master values of the adapters, which the weights in training are rounded from.
    in_fp32 = runs[2][0][f"merged {dtype} {stage}"]["in_fp32"]
    tolerance = 1e-6 if dtype == "fp32" else 0.01
    for name, weight in saved.items():
        assert in_fp32[name].dtype == torch.float32
        torch.testing.assert_close(in_fp32[name], weight.float(), rtol=tolerance, atol=tolerance)
    # All stages train the same model. In bf16, an update may round to the next number.
    tolerance = 1e-5 if dtype == "fp32" else 0.02
    for name, weight in runs[2][0][f"merged {dtype} 3"]["saved"].items():
        torch.testing.assert_close(saved[name], weight, rtol=tolerance, atol=tolerance)
