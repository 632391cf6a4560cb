"""The files of a model: incomplete downloads."""

import pytest
import torch
from safetensors.torch import save_file

from snakechat.data.model_files import check_files, model_files
from snakechat.workflow.errors import InputError

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 548105171\n"


def test_files_of_a_model_are_selected():
    kept = ["config.json", "generation_config.json", "merges.txt"]
    kept += ["spiece.model", "tokenizer.json", "chat_template.jinja"]
    others = ["tf_model.h5", "onnx/model.safetensors", "adapter/config.json", "training_args.bin"]
    others += ["adapter_config.json", "adapter_model.safetensors", "README.md", "LICENSE.txt"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    torch_files = ["pytorch_model.bin", "pytorch_model-1.bin"]
    for weights, all_formats, selected in (
        ([*shards, *torch_files], False, shards),
        ([*shards, *torch_files], True, [*shards, *torch_files]),
        # PyTorch's format if there are no safetensors.
        (torch_files, False, torch_files),
    ):
        found = model_files([*kept, *others, *weights], all_formats)
        assert sorted(found) == sorted([*kept, *selected])


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        # Before it is read as JSON.
        ("vocab.json", POINTER, "is a Git LFS pointer instead of the file: run"),
        ("config.json", "<!doctype html>", r"is damaged \(.*\): download it again$"),
        ("config.json", None, "is missing: add it from the repository"),
        ("merges.txt", None, "is missing: add it from the repository"),
    ],
)
def test_a_file_that_was_not_downloaded_whole_is_named(tmp_path, name, content, error):
    # The files of a model with a tokenizer of two files.
    for text_file in ("config.json", "vocab.json", "tokenizer_config.json"):
        (tmp_path / text_file).write_text("{}")
    (tmp_path / "merges.txt").write_text("a b")
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.ones(1000)}, tmp_path / "pytorch_model.bin")
    check_files(tmp_path)
    (tmp_path / name).unlink()
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"^{name} {error}"):
        check_files(tmp_path)
