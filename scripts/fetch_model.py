"""Fetch a base model or reward model, and its tokenizer: from the hub or a folder.

The result has safetensors. transformers maps weights of the source into memory, so that a copy of a
model of any size needs little memory.
"""

import functools
import json
import pickle
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_utils import load_state_dict

from snakechat.data.hub import card_facts, fetch
from snakechat.data.model_files import (
    check_files,
    is_classifier,
    load_pretrained,
    model_files,
    model_problem,
    read_model_config,
)
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.loading import check_weights, from_pretrained
from snakechat.modeling.saving import MAX_FILE_SIZE
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run

# A file of all weights, in the order in which transformers prefers them. NAME.index.json is the
# index of several files.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def main(job: Job) -> None:
    """Fetch the model. The weights are copied without loading them.

    Those in PyTorch's format are read as tensors only, never unpickled as other objects.
    """
    if hasattr(job.settings, "hub"):
        hub, revision = job.settings.hub, job.settings.revision
        folder, files = fetch(hub, "model", revision, lambda found, _: {"": model_files(found)})
        names, source = files[""], f"hub model {hub} at {folder.name}"
        job.facts |= {"commit": folder.name, **card_facts(folder)}
    else:
        folder, names = Path(job.options.source), job.spec["files"]
        source = f"model in {folder}"
        job.facts |= job.settings.card
    try:
        with tempfile.TemporaryDirectory() as links:
            # A folder with only these files: the libraries would read other ones, too.
            for name in names:
                Path(links, Path(name).name).symlink_to((folder / name).resolve())
            check_files(Path(links))
            arguments = getattr(job.settings, "template_arguments", {})
            load_tokenizer(links, arguments).save_pretrained(job.result)
            copy_model(Path(links), job.result)
    # The libraries raise exceptions of many classes for invalid files.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{source}: {reason}") from None


def copy_model(source: Path, folder: Path) -> None:
    """Copy a causal language model or a reward model as safetensors, in the dtype of its files.

    Of several dtypes, it is the one that has all of their values. Weights that the model does not
    have are not copied.

    Raises:
        InputError: The weights do not match the config: transformers would initialize missing ones
            at random; a file is missing or damaged, or has pickled objects; files of two formats
            differ; or the model is a classifier that cannot score responses.
    """
    keys = read_model_config(source) or {}
    of_classifier = is_classifier(keys)
    if problem := model_problem(keys, of_classifier):
        raise InputError(f"the model {problem}")
    auto_class = AutoModelForSequenceClassification if of_classifier else AutoModelForCausalLM
    safetensors, others = (_tensors(source, name) for name in WEIGHTS)
    if not (safetensors or others):
        raise InputError(f"the folder has no weights: expected {' or '.join(WEIGHTS)}")
    _require_equal(safetensors, others)
    config = load_pretrained(AutoConfig, source)
    # Kernels of the Hub are code that nobody has checked. Jobs choose their own implementation.
    config._attn_implementation = None
    dtype = _common_dtype((safetensors or others).values())
    model, loading = from_pretrained(auto_class, source, dtype, config)
    check_weights(loading | {"unexpected_keys": set()})
    if of_classifier and not hasattr(model, "score"):
        raise InputError(
            f"{type(model).__name__} has no score at each position: use a classifier of a"
            " decoder-only family"
        )
    # Tools that gather partitions save equal weights in one place, which are not tied.
    used = set[int]()
    for weight in model.parameters():
        if weight.data_ptr() in used:
            weight.data = weight.data.clone()
        used.add(weight.data_ptr())
    model.save_pretrained(folder, max_shard_size=MAX_FILE_SIZE)


def _common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the narrowest dtype of some tensors that has the values of all, or a wider one."""
    # torch promotes no floats of 8 bits. All others have their values.
    floats = [each for each in tensors if each.is_floating_point() and each.itemsize > 1]
    dtypes = [*dict.fromkeys(each.dtype for each in floats)] or [torch.float32]
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    if all(
        each.dtype == narrow or torch.equal(each, each.to(narrow).to(each.dtype)) for each in floats
    ):
        return narrow
    # All weights are then in memory.
    return functools.reduce(torch.promote_types, dtypes)


def _require_equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Raise InputError if files of two formats have different weights, apart from their dtypes.

    Either may lack the second name of a tied weight.
    """
    for name in sorted(tensors.keys() & others.keys()):
        pair = tensors[name], others[name]
        narrow, wide = sorted(pair, key=lambda tensor: tensor.itemsize)
        if not torch.equal(narrow, wide.to(narrow.dtype)):
            raise InputError(
                f"{' and '.join(WEIGHTS)} have different weights ({name}): delete the files of the"
                " one that you do not mean"
            )


def _tensors(folder: Path, single: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one file, or of those that its index names; {} if there is neither.

    They are mapped into memory. Only files in the format of torch before 1.6 are read whole.
    """
    index, tensors = folder / f"{single}.index.json", dict[str, torch.Tensor]()
    names = [single] if (folder / single).exists() else []
    if not names and index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        path = folder / name
        # Files outside the folder do not belong to the model.
        if path.parent != folder or not path.is_file():
            raise InputError(
                f"{index.name} names {name}, which the folder does not have: add the file"
            )
        try:
            tensors |= load_state_dict(path)
        except (SafetensorError, pickle.UnpicklingError):
            # torch's message recommends to load such objects anyway.
            raise InputError(
                f"{name} is damaged or has pickled objects other than tensors: download it again,"
                " or use a repository with safetensors"
            ) from None
    return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    run(main)
