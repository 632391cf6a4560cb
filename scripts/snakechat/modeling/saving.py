"""Save models as folders that from_pretrained loads."""

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from snakechat.data.special_tokens import end_of_turn_id
from snakechat.modeling.lora import save_adapter
from snakechat.modeling.models import SPECIAL_IDS, Gather, Master, no_gather
from snakechat.modeling.weight_writing import write_weights
from snakechat.workflow.distributed import rank


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    gather: Gather = no_gather,
    master: Master | None = None,
) -> None:
    """Write a folder that from_pretrained loads: safetensors, config, tokenizer.

    Adapters are merged, in the model's dtype. The subfolder adapter also has them separately, if
    nothing else but a score head was trained. All processes call this function; only the first one
    writes, and it has one whole weight at a time.

    Args:
        master: Returns the fp32 values of weights in training, which are then saved in fp32.
    """
    if rank() == 0:
        if model.can_generate():
            ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
            model.generation_config = GenerationConfig(
                do_sample=True, **ids | {"eos_token_id": _stop_ids_to_save(model, tokenizer)}
            )
        # Without weights: the configs only.
        model.save_pretrained(folder, state_dict={})
        if master:
            _set_saved_dtype(folder / CONFIG_NAME)
        tokenizer.save_pretrained(folder)
    write_weights(model, folder, gather, master)
    if hasattr(model, "peft_config"):
        save_adapter(model, folder / "adapter", gather, master)


def _set_saved_dtype(path: Path) -> None:
    """Set the dtype in config.json to float32, in the format of transformers."""
    config = json.loads(path.read_text(encoding="utf-8"))
    text = json.dumps(config | {"dtype": "float32"}, indent=2, sort_keys=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def _stop_ids_to_save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int | list[int]:
    """Return the ids that end a response, for generation_config.json: the model's and others."""
    generation: Any = model.generation_config
    loaded = generation.eos_token_id
    ids = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    ids += loaded if isinstance(loaded, list) else [] if loaded is None else [loaded]
    ids = list(dict.fromkeys(ids))
    return ids if len(ids) > 1 else ids[0]
