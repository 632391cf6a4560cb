"""The workflow around its jobs: what it rejects."""

import json
import shutil


def test_code_or_inputs_that_changed_after_planning_are_an_error(quick, tmp_path):
    """On a cluster a job may wait for hours between its planning and its start."""
    copy = quick.copy(tmp_path / "copy")

    def error_of(stage):
        result = f"output/eval/{stage}/tiny"
        (copy.folder / "spec.json").write_text(json.dumps(copy.spec_of(result)))
        # Otherwise it is kept.
        shutil.rmtree((copy.folder / result).resolve())
        program = f"scripts/evaluate_{stage}.py"
        process = copy.run("python", "scripts/launch.py", program, "--spec", "spec.json")
        assert process.returncode == 1
        return process.stdout

    program = copy.folder / "scripts/evaluate_reward.py"
    program.write_text(program.read_text().replace("pairwise_loss(*scores)", "0"))
    assert error_of("reward") == (
        "error: evaluate_reward.py changed since this build was planned: start it again\n"
    )
    weights = copy.folder / "output/sft/tiny/model.safetensors"
    folder = weights.resolve().parent.relative_to(copy.folder.resolve())
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert error_of("sft") == (
        f"error: {folder}: model.safetensors has other content: start the build again, which"
        " makes it again\n"
    )
