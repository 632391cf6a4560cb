"""Start and end of the process group in which the processes of a job train."""

import atexit
import os
from datetime import timedelta

import torch

from snakechat.modeling.models import choose_device
from snakechat.workflow.distributed import world_size
from snakechat.workflow.errors import InputError
from snakechat.workflow.placement import Placement

# Other processes wait while the first one writes a large model, scores responses with slow reward
# functions or asks LLM judges. The launcher ends all of them if one dies, so that a long timeout
# costs nothing; DeepSpeed's default of 10 minutes ended jobs after their last step.
TIMEOUT = timedelta(hours=12)


def init_process_group(placement: Placement) -> torch.device:
    """Join the process group of the job and return the device that this process trains on.

    The group is left when the program ends.

    Raises:
        InputError: The number of processes or GPUs differs from the one in the placement.
    """
    nodes, gpus_per_node = placement.nodes, placement.gpus_per_node
    started, expected = world_size(), placement.num_processes
    if started != expected:
        raise InputError(
            f"placement: expected {expected} processes (nodes: {nodes}, gpus_per_node:"
            f" {gpus_per_node}), {started} started: start the job with scripts/launch.py, or set"
            " nodes and gpus_per_node to the available hardware"
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
        store = torch.distributed.HashStore() if is_alone else None
        rank, size = (0, 1) if is_alone else (-1, -1)
        torch.distributed.init_process_group(backend, None, TIMEOUT, size, rank, store)
    # Threads of gloo that outlive the group occasionally end the process with SIGABRT.
    atexit.register(leave_process_group)
    return device


def leave_process_group() -> None:
    """Destroy the process group, if it exists."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
