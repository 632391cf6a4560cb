"""LoRA (Hu et al. 2021), by peft: adapters put into a model, merged into its weights, and as files.

The model stays a transformers model: adapters take the places of its linear layers.
"""

import contextlib

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D


def add_lora(model, rank, alpha, train_base="none"):
    """Put adapters on all linear layers of the transformer's blocks; returns the model.

    They alone are trained, and the score head where there is one. train_base
    "embeddings_and_norms": so is all that has no adapter, and the biases of what has one.
    """
    layers = linear_layers(model)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[name.rpartition(".")[2] for name in layers],
        # GPT-2's Conv1D is a linear layer whose weights stand the other way round.
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
    )
    inject_adapter_in_model(config, model)
    if train_base == "embeddings_and_norms":
        for name, weight in model.named_parameters():
            weight.requires_grad_(not name.endswith(".base_layer.weight"))
    if hasattr(model, "score"):
        model.score.requires_grad_()
    return model


@contextlib.contextmanager
def disable_adapters(model):
    """While it lasts, the model is the one that the adapters were put into."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    yield
    for layer in layers:
        layer.enable_adapters(True)


def linear_layers(model):
    """The linear layers of the transformer's blocks, by their names inside a list of blocks.

    Neither the output layer nor a score head is among them, nor what stands around the blocks.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {
        name: layer
        for blocks in lists
        for name, layer in blocks.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }


def merged_weights(model):
    """The weights of the model without adapters that does the same, by name. The model stays.

    The sums are fp32: 16 bits would round a small update away.
    """
    weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            first, second = (
                part["default"].weight.detach().float() for part in (layer.lora_A, layer.lora_B)
            )
            update = layer.scaling["default"] * (second @ first)
            weight = layer.base_layer.weight.detach().float()
            weights[f"{name}.weight"] = (
                weight + (update.T if layer.fan_in_fan_out else update)
            ).cpu()
    return weights


def save_adapter(model, folder):
    """Write what was trained as peft's files, where adapters and a score head are all of it."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    has_head = hasattr(model, "score")
    if not all(".lora_" in name or (has_head and name == "score.weight") for name in trained):
        return
    config = model.peft_config["default"]
    config.task_type = "SEQ_CLS" if has_head else "CAUSAL_LM"
    config.modules_to_save = ["score"] if has_head else None
    config.base_model_name_or_path = model.config.name_or_path
    config.inference_mode = True
    # peft writes sets in any order.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    weights = {
        f"base_model.model.{name.replace('.default.', '.')}": weight.detach().cpu().contiguous()
        for name, weight in trained.items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
