"""The files of a model: incomplete downloads."""

import pytest
import torch
from safetensors.torch import save_file

from snakechat.data.model_files import check_files
from snakechat.workflow.errors import InputError

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 548105171\n"


@pytest.fixture
def folder(tmp_path):
    """The files of a model with a tokenizer of two files."""
    for name in ("config.json", "vocab.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "merges.txt").write_text("a b")
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    return tmp_path


def message_of(folder):
    with pytest.raises(InputError) as error:
        check_files(folder)
    return str(error.value)


def test_complete_files(folder):
    check_files(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    (folder / "tokenizer.model").write_bytes(b"x")
    check_files(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "vocab.json", "config.json"])
def test_a_pointer_of_git_lfs(folder, name):
    (folder / name).write_text(POINTER)
    assert message_of(folder) == (
        f"{name} is a Git LFS pointer instead of the file: run git lfs pull in its repository"
    )


def test_truncated_weights_of_torch(folder):
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    check_files(folder)
    path.write_bytes(path.read_bytes()[:2000])
    assert message_of(folder) == "pytorch_model.bin is truncated: download it again"


@pytest.mark.parametrize("name", ["config.json", "vocab.json"])
def test_a_page_of_a_server_or_a_part_instead_of_json(folder, name):
    (folder / name).write_text('{"a": "' if name == "vocab.json" else "<!doctype html>")
    assert message_of(folder).startswith(f"{name} is damaged (")
    assert message_of(folder).endswith("): download it again")


def test_a_missing_tokenizer(folder):
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    assert message_of(folder).startswith("the tokenizer is missing: add tokenizer.json, ")
