"""Fetch a base model or reward model, and its tokenizer: from the hub or a folder.

The result has safetensors. transformers maps weights of the source into memory, so that a copy of a
model of any size needs little memory.
"""

import functools
import json
import pickle
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

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

# A file of all weights, or the index of several files, in the order in which transformers prefers
# them.
SOURCES = (
    (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME),
    (WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
)


def main(job: Job) -> None:
    """Fetch the model. The weights are copied without loading them.

    Those in PyTorch's format are read as tensors only, never unpickled as other objects.
    """
    if hasattr(job.settings, "hub"):
        hub, revision = job.settings.hub, job.settings.revision
        folder, names, commit = fetch(hub, "model", revision, lambda found, _: model_files(found))
        source = f"hub model {hub} at {commit}"
        job.facts |= {"commit": commit, **card_facts(folder)}
    else:
        folder, names = Path(job.options.source), list(job.spec["files"])
        source = f"model in {folder}"
        job.facts |= job.settings.card
    try:
        with tempfile.TemporaryDirectory() as links:
            # A folder with only these files: the libraries would read other ones, too.
            files = Path(links)
            for name in names:
                (files / Path(name).name).symlink_to((folder / name).resolve())
            check_files(files)
            arguments = getattr(job.settings, "template_arguments", {})
            load_tokenizer(files, arguments).save_pretrained(job.result)
            copy_model(files, job.result)
    # The libraries raise exceptions of many classes for invalid files.
    except Exception as error:
        # The first line of some names a field alone.
        reason = " ".join(" ".join(f"{error}".strip().split("\n")[:2]).split())
        reason = reason or type(error).__name__
        raise InputError(f"{source}: {reason}") from None


def copy_model(source: Path, folder: Path) -> None:
    """Copy a causal language model or a reward model as safetensors, in the dtype of its files.

    Of several dtypes, it is the one that has all of their values. Weights that the model does not
    have are not copied.

    Raises:
        InputError: the weights do not match the config: transformers would initialize missing ones
            at random; a file is missing or damaged, or has pickled objects other than tensors,
            which are never loaded; files of two formats have other weights; or the model is a
            classifier that cannot score responses.
    """
    keys = read_model_config(source) or {}
    of_classifier = is_classifier(keys)
    if problem := model_problem(keys, of_classifier):
        raise InputError(f"the model {problem}")
    auto_class = AutoModelForSequenceClassification if of_classifier else AutoModelForCausalLM
    tensors, *others = map(_tensors, _weight_files(source))
    for other in others:
        _require_equal(tensors, other)
    config = load_pretrained(AutoConfig, source)
    # Kernels of the Hub are code that nobody has checked. Jobs choose their own implementation.
    config._attn_implementation = None
    dtype = _common_dtype(tensors.values())
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
    others = (each for each in floats if each.dtype != narrow)
    if all(torch.equal(each, each.to(narrow).to(each.dtype)) for each in others):
        return narrow
    # All weights are then in memory.
    return functools.reduce(torch.promote_types, dtypes)


def _weight_files(folder: Path) -> list[list[Path]]:
    """Return the files of the weights in each format, first the one that transformers loads."""
    formats = []
    for single, index in SOURCES:
        if (folder / single).exists():
            formats.append([folder / single])
        elif (folder / index).exists():
            names = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
            for name in names:
                # Files outside the folder do not belong to the model.
                if Path(name).name != name or not (folder / name).is_file():
                    raise InputError(
                        f"{index} names {name}, which the folder does not have: add the file"
                    )
            formats.append([folder / name for name in names])
    if formats:
        return formats
    expected = " or ".join(name for names in SOURCES for name in names)
    raise InputError(f"the folder has no weights: expected {expected}")


def _require_equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Raise InputError if files of two formats have different weights, apart from their dtypes.

    Either may lack the second name of a tied weight.
    """
    for name in sorted(tensors.keys() & others.keys()):
        pair = tensors[name], others[name]
        dtype = min((each.dtype for each in pair), key=lambda dtype: dtype.itemsize)
        if not torch.equal(*(each.to(dtype) for each in pair)):
            raise InputError(
                f"{SAFE_WEIGHTS_NAME} and {WEIGHTS_NAME} have different weights ({name}): delete"
                " the files of the one that you do not mean"
            )


def _tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of some files, which are mapped into memory.

    Only files in the format of torch before 1.6 are read whole: they cannot be mapped.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
            else:
                is_mapped = zipfile.is_zipfile(path)
                tensors |= torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
        except (SafetensorError, pickle.UnpicklingError):
            # torch's message recommends to load such objects anyway.
            raise InputError(
                f"{path.name} is damaged or has pickled objects other than tensors: download it"
                " again, or use a repository with safetensors"
            ) from None
    return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    run(main)
