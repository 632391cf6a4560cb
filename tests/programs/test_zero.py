"""The comparison of ZeRO stages: its runs and its table."""

import json

import pytest

import compare_zero
from snakechat.reporting.formatting import format_cell
from snakechat.workflow.errors import InputError
from snakechat.workflow.placement import SERIAL, placement_of
from snakechat.workflow.run_options import RunOptions

PAGE = "output/zero/sft/tiny.md"


# --- by hand --------------------------------------------------------------------------------


def test_a_placement_at_each_stage():
    def offload_at(stage, offload):
        placement = placement_of({"offload": offload, "zero_stage": 3, "critic_zero_stage": 2})
        placement = compare_zero.placement_at_stage(placement, stage)
        assert (placement.zero_stage, placement.critic_zero_stage) == (stage, None)
        return placement.offload

    assert [offload_at(stage, "none") for stage in range(4)] == ["none"] * 4
    assert [offload_at(stage, "optimizer") for stage in range(4)] == ["none"] + ["optimizer"] * 3
    assert [offload_at(stage, "parameters") for stage in range(4)] == [
        "none",
        "optimizer",
        "optimizer",
        "parameters",
    ]


def train(tmp_path, script):
    """A run whose program is a shell script."""
    spec = {"rule": "train_sft", "name": "tiny@zero-0", "path": str(tmp_path / "stage-0")}
    return compare_zero.train(spec, SERIAL, RunOptions(), ["sh", "-c", script])


@pytest.mark.parametrize(
    "script",
    [
        'echo "error: output/sft/tiny: out of memory: placement has ..." ; exit 1',
        'echo "error: process 1 of the job was ended by SIGKILL"; exit 1',
        "kill -9 $$",
    ],
)
def test_a_stage_without_enough_memory_is_reported(tmp_path, script):
    assert train(tmp_path, script) == {"failed": "out of memory"}


def test_any_other_error_ends_the_comparison(tmp_path):
    with pytest.raises(InputError, match=r"^tiny@zero-0: it is broken$"):
        train(tmp_path, 'echo some; echo "error: it is broken" >&2; exit 1')


# --- a build --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(quick, tmp_path_factory):
    """The quick build with the comparison of its SFT."""
    copy = quick.copy(tmp_path_factory.mktemp("compared") / "work")
    copy.build(PAGE)
    return copy


def steps_at(workflow, stage):
    path = workflow.folder / f"output/zero/sft/tiny/stage-{stage}.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["step"]]


def test_all_stages_take_the_same_steps(compared):
    runs = json.loads((compared.folder / "output/zero/sft/tiny/run.json").read_text())
    assert list(runs["stages"]) == ["0", "1", "2", "3"]
    for stage in range(4):
        run = runs["stages"][str(stage)]
        assert run["placement"]["zero_stage"] == stage and run["steps"] == 2
        assert [line["step"] for line in steps_at(compared, stage)] == [1, 2]
    # Stages sum in different orders.
    for stage in (1, 2, 3):
        for ours, other in zip(steps_at(compared, stage), steps_at(compared, 0), strict=True):
            assert ours["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_the_result_has_the_table_and_no_scratch_files(compared):
    folder = compared.folder / "output/zero/sft/tiny"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "manifest.json",
        "run.json",
        "zero.md",
        *(f"stage-{n}.jsonl" for n in range(4)),
    }
    assert "seconds" not in (folder / "manifest.json").read_text()
    assert not list((compared.folder / "output/state").glob("*/*"))
    page = (compared.folder / PAGE).read_text()
    assert page == (folder / "zero.md").read_text()
    _, _, *rows = [line.strip("| ").split(" | ") for line in page.splitlines()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][1] == format_cell(steps_at(compared, 0)[0]["loss"])
