"""What a command may write: a model of the stage, with the tokenizer that it started from."""

import json
import shutil

import pytest
from torch.utils.tensorboard import SummaryWriter

from snakechat.modeling.command_outputs import check_output, write_metrics
from snakechat.workflow.errors import InputError


@pytest.fixture
def output(folder, tmp_path):
    """A copy of the model."""
    return shutil.copytree(folder, tmp_path / "output")


def test_a_copy_of_the_model_is_a_language_model(output, folder):
    check_output(output, folder, is_classifier=False)
    with pytest.raises(InputError, match="expected a sequence classifier with one label"):
        check_output(output, folder, is_classifier=True)


# A file, its new text or None, and the error.
@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("config.json", None, "has no config.json: save model and tokenizer; of peft's adapters"),
        ("config.json", {"num_hidden_layers": 1}, "weights are not in the model"),
        (
            "tokenizer.json",
            {"normalizer": {"type": "Lowercase"}},
            "has another tokenizer or chat template than {model}",
        ),
        ("model.safetensors", b"damaged", ""),
    ],
)
def test_another_folder_is_one_line(file, edit, message, output, folder):
    path = output / file
    if edit is None:
        path.unlink()
    elif isinstance(edit, bytes):
        path.write_bytes(edit)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(InputError) as error:
        check_output(output, folder, is_classifier=False)
    assert message in str(error.value)
    assert "{output}" in str(error.value) and str(output) not in str(error.value)


def test_events_of_tensorboard_become_metrics_by_the_names_of_pages(tmp_path):
    with SummaryWriter(tmp_path / "logs") as writer:
        for step in (1, 2):
            writer.add_scalar("train/rewards/accuracies", step / 4, step)
            writer.add_scalar("train/mine", step, step)
        writer.add_scalar("eval/rewards/accuracies", 0.5, 2)
        writer.add_scalar("eval/loss", float("nan"), 2)
    write_metrics(tmp_path / "metrics.jsonl", tmp_path / "logs")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "accuracy": 0.25, "mine": 1},
        {"step": 2, "accuracy": 0.5, "mine": 2, "eval_accuracy": 0.5},
    ]


def test_metrics_of_the_command_stay_and_are_checked(tmp_path):
    path = tmp_path / "metrics.jsonl"
    # U+2028 ends no line.
    path.write_text('{"step": 1, "sample": "a\u2028b"}\n')
    write_metrics(path, tmp_path)
    assert path.read_text() == '{"step": 1, "sample": "a\u2028b"}\n'
    path.write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(InputError, match="line 2: expected an object with an integer"):
        write_metrics(path, tmp_path)
    write_metrics(tmp_path / "other.jsonl", tmp_path)
    assert (tmp_path / "other.jsonl").read_text() == ""
