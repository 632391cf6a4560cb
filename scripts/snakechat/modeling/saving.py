"""Save models as folders that from_pretrained loads, one file of weights at a time.

The files are those that transformers' save_pretrained writes, which would need all weights in
memory.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from huggingface_hub import get_local_safetensors_metadata, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from snakechat.modeling.loading import adapted_layers, adapter_weights, merge_adapter
from snakechat.modeling.models import SPECIAL_IDS, Gather, Master, no_gather, whole_shape
from snakechat.workflow.processes import rank

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# The first process has the weights of a file of this size in memory.
MAX_FILE_SIZE: int | str = "5GB"


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    gather: Gather = no_gather,
    master: Master | None = None,
) -> None:
    """Write a folder that from_pretrained loads: safetensors, config, tokenizer.

    Adapters are merged, in the model's dtype, or in fp32 with master. The subfolder adapter also
    has them separately, if nothing else but a score head was trained. All processes call this
    function; only the first one writes. write_weights says how many weights they have at a time.
    """
    if rank() == 0:
        if model.can_generate():
            ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
            # load_causal has set all ids that end a response.
            stops = cast(Any, model.generation_config).eos_token_id
            ids["eos_token_id"] = stops[0] if isinstance(stops, list) and len(stops) == 1 else stops
            model.generation_config = GenerationConfig(do_sample=True, **ids)
        # Without weights: the configs only.
        model.save_pretrained(folder, state_dict={})
        tokenizer.save_pretrained(folder)
    write_weights(model, folder, gather, master)
    if master and rank() == 0:
        # transformers has written the model's own dtype, with the weights again if it wrote these.
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        write_json(folder / CONFIG_NAME, config | {"dtype": "float32"})
    if hasattr(model, "peft_config"):
        save_adapter(model, folder / "adapter", gather, master)


def save_adapter(
    model: PreTrainedModel, folder: Path, gather: Gather = no_gather, master: Master | None = None
) -> None:
    """Save the trained weights in peft's format; only the first process writes.

    Writes nothing if weights other than adapters and a score head are trained, which the format
    does not represent.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    has_head = hasattr(model, "score")
    if not all(".lora_" in name or (has_head and name == "score.weight") for name in trained):
        return
    with gather(list(trained.values())):
        values = {name: (master or torch.Tensor.detach)(weight) for name, weight in trained.items()}
        if rank() > 0:
            return
        config: Any = model.peft_config["default"]
        config.task_type = "SEQ_CLS" if has_head else "CAUSAL_LM"
        config.modules_to_save = ["score"] if has_head else None
        config.base_model_name_or_path = model.config.name_or_path
        config.inference_mode = True
        # peft would write the set in an arbitrary order.
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(folder)
        weights = {
            f"base_model.model.{name.replace('.default.', '.')}": weight.cpu().contiguous()
            for name, weight in values.items()
        }
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# --- weights ------------------------------------------------------------------------------------


class SavedWeight(NamedTuple):
    """A weight of the saved model: the tensor of the model, or a layer whose adapter is merged."""

    weight: torch.Tensor
    layer: "LoraLayer | None"

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors of the model that the weight is computed from."""
        return [self.weight, *(adapter_weights(self.layer) if self.layer else ())]

    def value(self, master: Master | None = None) -> torch.Tensor:
        """Return the weight, whose sources must be gathered."""
        if self.layer is not None:
            return merge_adapter(self.layer, master)
        # Training does not count a buffer of integers as a weight.
        is_float = self.weight.is_floating_point()
        return master(self.weight) if master and is_float else self.weight.detach()


def saved_weights(model: PreTrainedModel) -> dict[str, SavedWeight]:
    """Return the weights of the equivalent model without adapters, by their names in the model.

    Of the names of a tied weight, only the one that from_pretrained reads is included.
    """
    layers = adapted_layers(model)
    weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }
    tied = model.all_tied_weights_keys.items()
    left_out = {name for name, source in tied if weights.get(name) is weights.get(source)}
    left_out.update(model._keys_to_ignore_on_save or ())
    return {
        name: SavedWeight(weight, layers.get(name))
        for name, weight in weights.items()
        if name not in left_out
    }


def write_weights(
    model: PreTrainedModel, folder: Path, gather: Gather = no_gather, master: Master | None = None
) -> None:
    """Write the weights of the equivalent model without adapters; only the first process writes.

    It has the weights of one file at a time, and the others one weight. If transformers computes
    the weights in the files from several ones of the model, all processes have all of them.
    """
    weights, is_first = saved_weights(model), rank() == 0
    shapes, sources = weights_in_files(model, weights, torch.float32 if master else None)
    if None in sources.values():
        with gather([source for saved in weights.values() for source in saved.sources]):
            if is_first or master:
                values = {name: saved.value(master) for name, saved in weights.items()}
            if is_first:
                model.save_pretrained(folder, state_dict=values)
        return
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_FILE_SIZE
    )
    for file, names in split.filename_to_tensors.items():
        values = {}
        for name in names:
            saved = cast(SavedWeight, sources[name])
            with gather(saved.sources):
                if is_first or master:
                    value = saved.value(master)
                if is_first:
                    values[name] = value.cpu().contiguous()
        if is_first:
            # Weights may be mapped from the file that this one replaces.
            unfinished = folder / f"{file}.unfinished"
            save_file(values, unfinished, metadata={"format": "pt"})
            unfinished.rename(folder / file)
    if split.is_sharded and is_first:
        metadata = {
            "total_parameters": sum(map(torch.Tensor.numel, shapes.values())),
            **split.metadata,
        }
        write_json(
            folder / SAFE_WEIGHTS_INDEX_NAME,
            {"metadata": metadata, "weight_map": split.tensor_to_filename},
        )


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON in the format of transformers."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def weights_in_files(
    model: PreTrainedModel, weights: Mapping[str, SavedWeight], dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, SavedWeight | None]]:
    """Return the weights in the files of a model by their names there.

    Returns their shapes, as tensors without memory; and the weight of the model that each one is,
    or None for one that transformers computes from several.

    weights: saved_weights of the model. dtype: In the files; defaults to each weight's own.
    """
    shapes = {
        name: torch.empty(
            whole_shape(saved.weight),
            dtype=dtype if dtype and saved.weight.is_floating_point() else saved.weight.dtype,
            device="meta",
        )
        for name, saved in weights.items()
    }
    sources = {id(shape): weights[name] for name, shape in shapes.items()}
    in_files = revert_weight_conversion(model, shapes)
    return in_files, {name: sources.get(id(shape)) for name, shape in in_files.items()}


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each weight of a folder."""
    metadata = get_local_safetensors_metadata(folder)
    return {name: folder / file for name, file in metadata.weight_map.items()}


def count_stored_weights(folder: Path) -> int:
    """Return the number of weights in the safetensors files of a folder."""
    return sum(get_local_safetensors_metadata(folder).parameter_count.values())
