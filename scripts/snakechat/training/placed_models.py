"""Put the models of a job where its placement says: engines, frozen models and samplers.

With ZeRO 3, the processes of the job partition the weights, so that a model need not fit into one
of them. Each process evaluates its share of the rows, and all get all results. DeepSpeed and vLLM
are imported where they are used.
"""

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from snakechat.config.settings import TrainingSettings
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.generation import Sampler
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import check_sequence_length, checkpoint_activations, choose_device
from snakechat.training.engine import Engine, FrozenModel, M
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import Placement, stage_used, world_size

# Other processes wait while the first one writes a large model, scores responses with slow reward
# functions or asks LLM judges. The launcher ends all of them if one dies, so that a long timeout
# costs nothing; DeepSpeed's default of 10 minutes ended jobs after their last step.
TIMEOUT = timedelta(hours=12)

P = TypeVar("P", Policy, Scorer)


def init_process_group(placement: Placement) -> torch.device:
    """Join the process group until the program ends; return the device of this process.

    Raises InputError if the placement has another number of processes or GPUs.
    """
    gpus_per_node, expected = placement.gpus_per_node, placement.num_processes
    if world_size() != expected:
        raise InputError(
            f"placement: expected {expected} processes (nodes: {placement.nodes}, gpus_per_node:"
            f" {gpus_per_node}), {world_size()} started: start the job with scripts/launch.py, or"
            " set nodes and gpus_per_node to the available hardware"
        )
    device = choose_device(placement)
    if device.type == "cuda" and gpus_per_node > torch.cuda.device_count():
        raise InputError(
            f"placement: gpus_per_node is {gpus_per_node}, torch finds"
            f" {torch.cuda.device_count()} GPUs: set gpus_per_node to the available hardware"
        )
    # Also after an earlier training of the process.
    is_alone = not {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    if is_alone:
        # Libraries read them.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # A process alone needs no port.
        alone = (1, 0, torch.distributed.HashStore()) if is_alone else ()
        torch.distributed.init_process_group(backend, None, TIMEOUT, *alone)
    # Threads of gloo that outlive the group occasionally end the process with SIGABRT.
    atexit.register(leave_process_group)
    return device


def leave_process_group() -> None:
    """Destroy the process group, if it exists."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start_evaluation(placement: Placement, dtype: str) -> torch.device:
    """Return the device of this process, which joins the process group if the job has one."""
    has_group = world_size() > 1 or placement.evaluates_partitioned(dtype)
    return init_process_group(placement) if has_group else choose_device(placement)


def load_model(
    wrapper: type[P],
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    deferred: bool,
    longest: int,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load a model that has positions for the longest sequence, in tokens.

    wrapper: Policy for a causal language model, Scorer for a reward model or a critic.
    deferred, new_head: As for load_scorer.
    """
    if wrapper is Policy:
        model = load_causal(folder, dtype, tokenizer, deferred)
    else:
        model = load_scorer(folder, dtype, tokenizer, new_head, deferred)
    check_sequence_length(model, longest)
    return model


def make_engine(
    module: M,
    settings: TrainingSettings,
    learning_rate: float,
    num_steps: int,
    placement: Placement,
) -> Engine[M]:
    """Create the engine that trains a module: plain torch at ZeRO stage 0, otherwise DeepSpeed.

    Raises InputError if the device cannot train in the dtype of the recipe.
    """
    if placement.activation_checkpointing:
        checkpoint_activations(module.model)
    # The models have no dropout: the mode only decides whether activations are checkpointed.
    module.train()
    stage = stage_used(placement.zero_stage, settings.dtype)
    if stage < 3:
        module.to(choose_device(placement))
    if stage == 0:
        return Engine(module, settings, learning_rate, num_steps)
    from snakechat.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(module, settings, learning_rate, num_steps, stage, placement.offload)


def load_frozen(
    wrapper: type[P],
    folder: Path,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    placement: Placement,
    examples: Examples | None,
    samples: bool = False,
    new_head: bool = False,
    offload: bool | None = None,
    longest: int = 0,
) -> FrozenModel[P]:
    """Return a model that is evaluated and never trained; it is closed at the end of a context.

    The process joins the process group before, if the job has one.

    Args:
        wrapper, new_head, longest: As for load_model.
        examples, samples: As for check_model; None for a model that was checked already.
        offload: Keep the weights in CPU memory while they are not in use; defaults to what the
            placement's `offload` says.
    """
    device = start_evaluation(placement, dtype)
    partitioned = placement.evaluates_partitioned(dtype)
    if offload is None:
        offload = partitioned and placement.offload == "parameters"
    module = wrapper(load_model(wrapper, folder, dtype, tokenizer, partitioned, longest, new_head))
    if partitioned:
        from snakechat.training.deepspeed_engine import PartitionedModel

        frozen: FrozenModel[P] = PartitionedModel(module, dtype, offload)
    else:
        frozen = FrozenModel(module, device, offload)
    if examples is not None:
        with frozen.on_device():
            check_model(module, examples, frozen.sampling, samples)
    return frozen


def make_sampler(
    settings: Any, stop_ids: Sequence[int], folder: Path, placement: Placement
) -> Sampler:
    """Create a sampler; vLLM starts from a model of the same architecture in a folder."""
    if settings.generation_backend == "vllm":
        from snakechat.modeling.vllm_sampler import VllmSampler

        return VllmSampler(settings, stop_ids, folder, placement.vllm_tensor_parallel_size)
    return Sampler(
        stop_ids, settings.max_response_length, settings.temperature, settings.num_generations
    )
