"""DeepSpeed: the only module that knows it.

A training step is made of passes: each gives a loss that is already divided by the whole step's
count, so that gradients add up to the same sum however the rows are shared among passes.
"""

import collections
import os
import socket

import torch
from transformers import get_scheduler

from rlhf.job import InputError
from rlhf.models import choose_device

# After rlhf.models, which tells DeepSpeed of the CPU: it looks for an accelerator when imported.
import deepspeed  # isort: skip
import deepspeed.ops  # isort: skip


def start(placement):
    """Join the (one-process) group that DeepSpeed wants; returns the device to train on."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    asked = placement["nodes"] * max(placement["gpus_per_node"], 1)
    if max(processes, asked) > 1:
        raise InputError(
            f"placement asks for {asked} processes, WORLD_SIZE is {processes}: training in several"
            " processes is not supported yet; set nodes: 1 and gpus_per_node: 1 (or 0)"
        )
    device = choose_device(placement)
    if device.type == "cpu":
        # DeepSpeed would compile a shared-memory operator that a single process has no use for.
        deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", verbose=False)
    return device


class Engine:
    """A module in training: passes, gradients and optimizer steps through DeepSpeed."""

    def __init__(self, module, settings, learning_rate, num_steps, placement):
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        decayed = [weight for weight in weights if weight.ndim > 1]
        others = [weight for weight in weights if weight.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=learning_rate,
            betas=tuple(settings.adam_betas),
        )
        names = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}
        scheduler = get_scheduler(
            names.get(settings.lr_schedule, settings.lr_schedule),
            optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=(
                {"min_lr_rate": settings.min_lr_ratio} if settings.lr_schedule == "cosine" else {}
            ),
        )
        bf16 = settings.dtype == "bf16"
        # Small passes must not drown in a bf16 sum, which only stages 2 and 3 keep in fp32 exactly.
        # Stage 0 would also start with an optimizer step of no gradient.
        self.stage = max(placement["zero_stage"], 2 if bf16 else 0)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config={
                # One row, one process: what a step consists of is told by backward's `last`.
                "train_batch_size": 1,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": settings.max_grad_norm,
                "bf16": {"enabled": bf16},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": self.stage},
                "steps_per_print": 1 << 40,
            },
        )
        self.module = module

    def __call__(self, *arguments, **named):
        # Through DeepSpeed and not straight to the module: ZeRO 3 would add gradients up wrongly.
        return self.engine(*arguments, **named)

    def backward(self, loss, last):
        """Add a pass's gradients; after the last pass of a step, update the weights."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)
        self.engine.step()

    @property
    def learning_rate(self):
        """The rate of the coming step."""
        return self.engine.get_lr()[0]

    @property
    def _masters(self):
        """The fp32 tensors that the optimizer updates in this process."""
        if self.stage == 0:
            return [weight for group in self.optimizer.param_groups for weight in group["params"]]
        if self.stage == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return self.engine.optimizer.single_partition_of_fp32_groups

    def state(self):
        """What steps have changed: weights and moments of this process, and the rates."""
        state = {
            "zero_stage": self.stage,
            "steps": self.scheduler.last_epoch,
            "learning_rates": [group["lr"] for group in self.optimizer.param_groups],
        }
        for index, master in enumerate(self._masters):
            state[f"{index}.weights"] = master.data
            for name, value in self.optimizer.state[master].items():
                state[f"{index}.{name}"] = value
        return state

    def restore(self, state):
        """Put a state back. Raises InputError if it was cut up by another ZeRO stage."""
        if state["zero_stage"] != self.stage:
            raise InputError(
                f"the saved state is one of ZeRO stage {state['zero_stage']}, this run is of stage"
                f" {self.stage}: set zero_stage back, or delete the state in output/state"
            )
        for index, master in enumerate(self._masters):
            saved = {
                name.removeprefix(f"{index}."): value
                for name, value in state.items()
                if name.startswith(f"{index}.")
            }
            master.data.copy_(saved.pop("weights"))
            # The count of steps stays on the CPU, where AdamW wants it.
            self.optimizer.state[master] = {
                name: value.to(master.device) if value.ndim else value
                for name, value in saved.items()
            }
        for group, rate in zip(self.optimizer.param_groups, state["learning_rates"], strict=True):
            group["lr"] = rate
        self.scheduler.last_epoch = state["steps"]
        if self.stage == 3:
            for index in range(len(self._masters)):
                self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        elif self.stage:
            self.engine.optimizer.update_lp_params()
