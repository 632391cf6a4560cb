"""Gradients and optimizer steps; the only module that knows DeepSpeed.

A training step is made of passes: each gives a loss that is already divided by the whole step's
count, over all processes, so that gradients add up to the same sum however the rows are shared
among passes and processes. All processes make the same number of passes.
"""

import atexit
import collections
import contextlib
import os
import socket
import warnings
from functools import partial

import torch
from torch import nn
from transformers import get_scheduler

from snakechat.modeling.models import DTYPES, choose_device
from snakechat.training.zero_stages import stage_used
from snakechat.workflow.distributed import world_size
from snakechat.workflow.job import InputError

# After snakechat.modeling.models, which tells DeepSpeed of the CPU: it looks for an accelerator when imported.
import deepspeed  # isort: skip
import deepspeed.ops  # isort: skip
from deepspeed.accelerator import get_accelerator  # isort: skip

# DeepSpeed calls them by the old names: nothing that a user could change.
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)

# What DeepSpeed is told of each placement.offload.
OFFLOAD = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}

# Elements of a gradient that are added at once, and those whose squares are: a CPU's sum of many
# more in fp32 is wrong by a percent.
COLLECTED = 1 << 20
SQUARED = 1 << 17

# What changes in the scaler of fp16's losses.
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def start(placement):
    """Join the group of the job's processes; returns the device that this one trains on."""
    nodes, gpus = placement["nodes"], placement["gpus_per_node"]
    processes, asked = world_size(), nodes * max(gpus, 1)
    if processes != asked:
        raise InputError(
            f"placement asks for {asked} processes (nodes: {nodes}, gpus_per_node: {gpus}), and"
            f" {processes} started: start it by scripts/launch.py, or set nodes and gpus_per_node"
            " to what is there"
        )
    device = choose_device(placement)
    if device.type == "cpu":
        # DeepSpeed would compile a shared-memory operator in place of gloo.
        deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    elif gpus > torch.cuda.device_count():
        raise InputError(
            f"placement asks for {gpus} GPUs a node and torch finds {torch.cuda.device_count()}:"
            " set gpus_per_node to what is there"
        )
    if "RANK" not in os.environ:
        # No launcher: a group of one, at a port that nobody has.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", verbose=False)
    # Threads of gloo that outlive it end the process by SIGABRT now and then.
    atexit.register(leave_group)
    return device


def leave_group():
    """Part from the group, where that has not been done."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_engine(module, settings, learning_rate, num_steps, placement):
    """The engine that trains a module: at ZeRO stage 0 torch alone, at others DeepSpeed.

    Raises InputError where the device cannot train in the recipe's dtype.
    """
    if settings.dtype == "fp16" and not get_accelerator().is_fp16_supported():
        raise InputError("dtype: fp16 needs a GPU: set dtype to bf16 or fp32")
    if placement["activation_checkpointing"]:
        module.model.activation_checkpointing_enable({"use_reentrant": False})
    # Layers keep what they compute, or do not, by this alone: there is no dropout.
    module.train()
    stage = stage_used(placement["zero_stage"], settings.dtype)
    if stage == 0:
        return WholeEngine(module, settings, learning_rate, num_steps)
    return ShardedEngine(module, settings, learning_rate, num_steps, stage, placement["offload"])


def take_steps(*engines, together=False):
    """A step of each engine. together: of none where gradients of one are too large for fp16."""
    # Of all: its processes ask each other.
    overflows = [together and engine.overflows() for engine in engines]
    for engine, overflow in zip(engines, overflows, strict=True):
        if any(overflows) and not overflow:
            engine.skip()
        else:
            engine.step()


class Frozen:
    """A module that is asked and never trained. rests: it is in the CPU's memory between times."""

    def __init__(self, module, device, rests):
        self.module, self.device, self.rests = module.requires_grad_(False).eval(), device, rests
        self.module.to("cpu" if rests else device)

    @contextlib.contextmanager
    def at_work(self):
        """While it lasts, the module is on its device."""
        yield self.module.to(self.device)
        if self.rests:
            self.module.to("cpu")


def _groups(module, settings, learning_rate):
    """The weights to train, by rate and decay: matrices shrink, biases and norms do not."""
    adapters_rate = getattr(settings, "lora_learning_rate", None)
    groups = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            adapter = adapters_rate is not None and "lora_" in name
            groups.setdefault((adapter, weight.ndim < 2), []).append(weight)
    return [
        {
            "params": groups[adapter, small],
            "lr": adapters_rate if adapter else learning_rate,
            "weight_decay": 0.0 if small else settings.weight_decay,
        }
        for adapter, small in sorted(groups)
    ]


class Engine:
    """A module in training: passes, gradients and optimizer steps.

    masters: the fp32 tensors that the optimizer updates in this process. grad_norm: of the last
    step, over all weights and before it was clipped; None if it was skipped.
    """

    def __init__(self, module, groups, settings, num_steps, stage):
        self.module, self.stage, self.grad_norm = module, stage, None
        self.max_grad_norm = settings.max_grad_norm
        self.optimizer = torch.optim.AdamW(groups, betas=tuple(settings.adam_betas), fused=True)
        names = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}
        self.scheduler = get_scheduler(
            names.get(settings.lr_schedule, settings.lr_schedule),
            self.optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=(
                {"min_lr_rate": settings.min_lr_ratio} if settings.lr_schedule == "cosine" else {}
            ),
        )

    @property
    def learning_rate(self):
        """The rate of the coming step."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def figures(self):
        """Of the last step, for its log."""
        return {"grad_norm": self.grad_norm}

    @contextlib.contextmanager
    def whole_weights(self):
        """While it lasts, all weights are complete in each process: to save, or to generate."""
        # Layers that keep nothing for a backward pass would generate without a cache.
        self.module.eval()
        with self.gathered():
            yield
        self.module.train()

    def state(self):
        """What steps have changed: weights and moments of this process, and the rates."""
        state = {
            "zero_stage": self.stage,
            "steps": self.scheduler.last_epoch,
            "learning_rates": [group["lr"] for group in self.optimizer.param_groups],
        }
        for index, master in enumerate(self.masters):
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
        for index, master in enumerate(self.masters):
            saved = {
                name.removeprefix(f"{index}."): value
                for name, value in state.items()
                if name.startswith(f"{index}.")
            }
            master.data.copy_(saved.pop("weights"))
            self.optimizer.state[master] = {
                name: value.to(master.device) for name, value in saved.items()
            }
        for group, rate in zip(self.optimizer.param_groups, state["learning_rates"], strict=True):
            group["lr"] = rate
        self.scheduler.last_epoch = state["steps"]
        self.update_weights()


class WholeEngine(Engine):
    """ZeRO stage 0: each process has all weights and all of the optimizer, and sends the others its
    gradients once a step.

    Weights of a group, their masters and their gradients lie in one tensor each. Gradients add up
    in fp32, whatever the weights are in: small passes must not drown in a sum of 16 bits.
    """

    def __init__(self, module, settings, learning_rate, num_steps):
        dtype = DTYPES[settings.dtype]
        # Not the module as a whole: in 16 bits, angles of rotary positions would be wrong.
        for weight in module.parameters():
            weight.data = weight.data.to(dtype)
        groups = _groups(module, settings, learning_rate)
        sizes = [sum(weight.numel() for weight in group["params"]) for group in groups]
        device = groups[0]["params"][0].device
        self.gradients = torch.zeros(sum(sizes), device=device)
        self.masters, self.weights = [], []
        for group, gradients in zip(groups, self.gradients.split(sizes), strict=True):
            weights = group["params"]
            flat = torch.cat([weight.detach().flatten() for weight in weights])
            master = nn.Parameter(flat.float())
            master.grad = gradients
            # In fp32 they are one and the same.
            flat = master.detach().to(dtype)
            places = [weight.numel() for weight in weights]
            for weight, values, gradient in zip(
                weights, flat.split(places), gradients.split(places), strict=True
            ):
                weight.data = values.view_as(weight)
                weight.register_post_accumulate_grad_hook(partial(_collect, gradient))
            self.masters.append(master)
            self.weights.append(flat)
            group["params"] = [master]
        super().__init__(module, groups, settings, num_steps, stage=0)

    def __call__(self, *arguments, **named):
        return self.module(*arguments, **named)

    def backward(self, loss, last):
        """Add a pass's gradients; after the last pass of a step, those of all processes."""
        loss.backward()
        if last and world_size() > 1:
            torch.distributed.all_reduce(self.gradients)

    def step(self):
        """Update the weights by the gradients of the passes."""
        self.grad_norm = nn.utils.get_total_norm(self.gradients.split(SQUARED)).item()
        if self.grad_norm > self.max_grad_norm:
            self.gradients *= self.max_grad_norm / self.grad_norm
        self.optimizer.step()
        self.scheduler.step()
        self.gradients.zero_()
        self.update_weights()

    def update_weights(self):
        """Have the module compute with what the optimizer has."""
        for weights, master in zip(self.weights, self.masters, strict=True):
            if weights.data_ptr() != master.data_ptr():
                weights.copy_(master.detach())

    def overflows(self):
        """Never: here nothing is trained in fp16."""
        return False

    def gathered(self):
        """All weights are here at all times."""
        return contextlib.nullcontext()


def _collect(gradient, weight):
    """Add what a pass left at a weight to the step's gradient [elements of the weight]."""
    # A part at a time: on a CPU, torch first makes fp32 copies of 16-bit numbers that it adds.
    for whole, part in zip(
        gradient.split(COLLECTED), weight.grad.flatten().split(COLLECTED), strict=True
    ):
        whole += part
    weight.grad = None


class ShardedEngine(Engine):
    """ZeRO stages 1 to 3 and offload: the processes share the optimizer, through DeepSpeed."""

    def __init__(self, module, settings, learning_rate, num_steps, stage, offload):
        groups = _groups(module, settings, learning_rate)
        super().__init__(module, groups, settings, num_steps, stage)
        self.fp16 = settings.dtype == "fp16"
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            config={
                # One row from each process: what makes a step is told by backward's `last`.
                "train_batch_size": world_size(),
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": self.max_grad_norm,
                "bf16": {"enabled": settings.dtype == "bf16"},
                "fp16": {
                    "enabled": self.fp16,
                    "initial_scale_power": 16,
                    "loss_scale_window": 100,
                },
                "data_types": {"grad_accum_dtype": "fp32"},
                "communication_data_type": "fp32",
                "zero_optimization": {"stage": stage, **OFFLOAD[offload]},
                # torch's Adam serves on CPUs and GPUs, and needs no compiler there.
                "zero_force_ds_cpu_optimizer": False,
                "steps_per_print": 1 << 40,
            },
        )
        # Of the coming step; None: not looked for yet.
        self.overflow = None
        if self.fp16:
            self.find_overflow = self.engine.optimizer.has_overflow
            self.engine.optimizer.has_overflow = lambda *_, **__: self.overflows()
        if stage == 3 and hasattr(module, "borrowed_weights"):
            for weight in module.borrowed_weights():
                deepspeed.zero.register_external_parameter(module, weight)

    def __call__(self, *arguments, **named):
        # Through DeepSpeed and not straight to the module: ZeRO 3 would add gradients up wrongly.
        return self.engine(*arguments, **named)

    def backward(self, loss, last):
        """Add a pass's gradients; after the last pass of a step, those of all processes."""
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over the processes, where the sum is wanted.
        self.engine.backward(loss * world_size(), scale_wrt_gas=False)
        if not last:
            self.engine.step()

    def step(self):
        """Update the weights by the gradients of the passes, unless fp16 could not hold them."""
        skipped = self.skipped_steps
        self.engine.step()
        self.overflow = None
        taken = self.skipped_steps == skipped
        self.grad_norm = float(self.engine.get_global_grad_norm()) if taken else None

    def overflows(self):
        """Whether gradients of the coming step are too large for fp16, in any process."""
        if self.fp16 and self.overflow is None:
            self.overflow = self.find_overflow()
        return bool(self.overflow)

    def skip(self):
        """Take the coming step for one that overflows, but leave the loss scale as it is."""
        scaler = self.engine.optimizer.loss_scaler
        scale = {name: getattr(scaler, name) for name in SCALER}
        self.overflow = True
        self.step()
        vars(scaler).update(scale)

    @property
    def figures(self):
        """Of the last step, for its log: in fp16 also what became of the loss scale."""
        found = super().figures
        if self.fp16:
            found |= {"loss_scale": self.loss_scale, "skipped_steps": self.skipped_steps}
        return found

    @property
    def skipped_steps(self):
        """Steps so far whose gradients were too large for fp16: they left the weights alone."""
        return self.engine.skipped_steps

    @property
    def loss_scale(self):
        """What losses are multiplied by before gradients are taken, so that fp16 can tell them."""
        return self.engine.optimizer.loss_scale

    @property
    def masters(self):
        if self.stage == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return self.engine.optimizer.single_partition_of_fp32_groups

    def state(self):
        """What steps have changed, in fp16 the loss scale too."""
        state = super().state() | {"skipped_steps": self.skipped_steps}
        if self.fp16:
            scaler = self.engine.optimizer.loss_scaler
            state["loss_scaler"] = {name: getattr(scaler, name) for name in SCALER}
        return state

    def restore(self, state):
        """Put a state back. Raises InputError if it was cut up by another ZeRO stage."""
        super().restore(state)
        self.engine.skipped_steps = state["skipped_steps"]
        if self.fp16:
            vars(self.engine.optimizer.loss_scaler).update(state["loss_scaler"])

    def update_weights(self):
        """Have the module compute with what the optimizer has."""
        if self.stage < 3:
            self.engine.optimizer.update_lp_params()
            return
        for index in range(len(self.masters)):
            self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(index)

    def gathered(self):
        """All weights, which stage 3 has cut up."""
        if self.stage == 3:
            return deepspeed.zero.unwrap_model_for_generation(self.engine)
        return contextlib.nullcontext()
