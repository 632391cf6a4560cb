"""Write the weights of a model as safetensors, one weight at a time.

The files are those that transformers' save_pretrained writes, byte for byte, which would need all
weights of a file in memory.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from snakechat.modeling.lora import adapted_layers, adapter_weights, base_weights, merge
from snakechat.modeling.partitions import Gather, Master, no_gather, whole_shape
from snakechat.workflow.distributed import rank

# The size of a file, as in transformers' save_pretrained.
MAX_FILE_SIZE: int | str = "50GB"
# The dtypes of safetensors in the order in which a file has them.
DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SavedWeight(NamedTuple):
    """A weight of the saved model: the tensor of the model, or a layer whose adapter is merged."""

    weight: torch.Tensor
    layer: LoraLayer | None

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors of the model that the weight is computed from."""
        return [self.weight, *(adapter_weights(self.layer) if self.layer else ())]

    @property
    def is_trained(self) -> bool:
        """Whether training changes the weight."""
        return any(source.requires_grad for source in self.sources)

    def value(self, master: Master | None = None) -> torch.Tensor:
        """Return the weight, whose sources must be gathered.

        master: Returns the fp32 values of weights. All processes then call this function.
        """
        if self.layer is not None:
            return merge(self.layer, master)
        return master(self.weight) if master and self.is_float else self.weight.detach()

    @property
    def is_float(self) -> bool:
        """Whether it is a weight and no buffer of integers."""
        return self.weight.is_floating_point()


def saved_weights(model: PreTrainedModel) -> dict[str, SavedWeight]:
    """Return the weights of the equivalent model without adapters, by their names in the model.

    Of the names of a tied weight, only the one that from_pretrained reads is included.
    """
    layers, state = adapted_layers(model), base_weights(model)
    tied = {
        name
        for name, source in model.all_tied_weights_keys.items()
        if state.get(name) is state.get(source)
    }
    return {
        name: SavedWeight(weight, layers.get(name))
        for name, weight in state.items()
        if name not in tied and name not in (model._keys_to_ignore_on_save or ())
    }


def write_weights(
    model: PreTrainedModel,
    folder: Path,
    gather: Gather = no_gather,
    master: Master | None = None,
) -> None:
    """Write the weights of the equivalent model without adapters; only the first process writes.

    Memory holds one merged weight at a time, unless transformers computes the weights in the files
    from several ones of the model; then it holds all of them.

    Args:
        master: Returns the fp32 values of weights, which are then written.
    """
    weights = saved_weights(model)
    in_files, sources = weights_in_files(model, weights, torch.float32 if master else None)
    if any(id(shape) not in sources for shape in in_files.values()):
        with gather([source for saved in weights.values() for source in saved.sources]):
            if rank() == 0 or master:
                values = {name: saved.value(master) for name, saved in weights.items()}
            if rank() == 0:
                model.save_pretrained(folder, state_dict=values)
        return
    split = split_torch_state_dict_into_shards(
        in_files, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_FILE_SIZE
    )
    for file, names in split.filename_to_tensors.items():
        order = file_order({name: in_files[name] for name in names})
        with write_file(folder / file, {name: in_files[name] for name in order}) as write:
            for name in order:
                saved = sources[id(in_files[name])]
                with gather(saved.sources):
                    if rank() == 0 or master:
                        write(saved.value(master))
    if split.is_sharded and rank() == 0:
        write_index(folder, in_files, split.tensor_to_filename, split.metadata)


def weights_in_files(
    model: PreTrainedModel, weights: Mapping[str, SavedWeight], dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], dict[int, SavedWeight]]:
    """Return the shapes of the weights in the files of a model, by their names there.

    Args:
        weights: saved_weights of the model.
        dtype: The dtype in the files; defaults to that of each weight.

    Returns:
        The shapes, as tensors without memory, and the weight of each one by the id of its shape.
        A weight that transformers computes from several ones has none.
    """
    shapes = {
        name: torch.empty(
            whole_shape(saved.weight),
            dtype=dtype if dtype and saved.is_float else saved.weight.dtype,
            device="meta",
        )
        for name, saved in weights.items()
    }
    sources = {id(shape): weights[name] for name, shape in shapes.items()}
    return revert_weight_conversion(model, shapes), sources


def write_index(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    files: Mapping[str, str],
    metadata: Mapping[str, Any],
) -> None:
    """Write the index of several files.

    Args:
        weights: all weights of the files by name.
        files: the name of each weight's file.
        metadata: metadata besides the number of parameters.
    """
    total = sum(weight.numel() for weight in weights.values())
    index = {"metadata": {"total_parameters": total, **metadata}, "weight_map": files}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text)


def file_order(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of weights in the order in which a file has them."""
    dtypes = list(DTYPE_NAMES)
    return sorted(weights, key=lambda name: (dtypes.index(weights[name].dtype), name))


@contextlib.contextmanager
def write_file(
    path: Path, shapes: dict[str, torch.Tensor]
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Yield a function that appends the next weight to a file; it does nothing on other ranks.

    The format: the length of the header in 8 bytes, the header in JSON, the weights.

    Args:
        shapes: tensors with the shapes and dtypes, in the order in which the weights are written.
    """
    if rank() > 0:
        yield lambda value: None
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + shape.numel() * shape.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[shape.dtype],
            "shape": list(shape.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    # The weights of the model may be mapped from the file that this one replaces.
    unfinished = path.with_name(f"{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)

        def write(value: torch.Tensor) -> None:
            file.write(_tensor_bytes(value))

        yield write
    unfinished.rename(path)


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor as safetensors stores them, on a little-endian machine."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy().data
