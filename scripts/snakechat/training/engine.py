"""Gradients and optimizer steps of models that are trained, and models that are frozen.

An optimizer step accumulates the gradients of one or more micro-batches. The loss of a micro-batch
is a sum that is already divided by the count of the whole step over all processes, so the gradients
do not depend on how rows are distributed over micro-batches and processes. All processes run the
same number of micro-batches.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from snakechat.config.settings import OptimizerSettings, TrainingSettings
from snakechat.modeling.forward import Wrapper
from snakechat.modeling.models import DTYPES
from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.processes import world_size

M = TypeVar("M", bound=Wrapper)

# On a CPU, elements of a gradient that are added at a time, and whose squares are summed at a time:
# the fp32 sum of many more has an error of about a percent. A GPU takes all at once.
ACCUMULATION_CHUNK, NORM_CHUNK = 1 << 20, 1 << 17


def parameter_groups(
    module: torch.nn.Module, settings: TrainingSettings, learning_rate: float
) -> list[dict[str, Any]]:
    """Group the trainable weights by learning rate and weight decay.

    Biases and norms (fewer than two dimensions) have no weight decay. LoRA adapters have the rate
    lora_learning_rate, if it is set.
    """
    lora_learning_rate = settings.lora_learning_rate
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            is_adapter = lora_learning_rate is not None and "lora_" in name
            groups.setdefault((is_adapter, weight.ndim < 2), []).append(weight)
    return [
        {
            "params": groups[is_adapter, is_vector],
            "lr": lora_learning_rate if is_adapter else learning_rate,
            "weight_decay": 0.0 if is_vector else settings.weight_decay,
        }
        for is_adapter, is_vector in sorted(groups)
    ]


class StateLock:
    """Held while the state of a training changes, so that another thread can save it whole.

    `begin` holds it until `end`, however often it is called.
    """

    def __init__(self) -> None:
        self.lock, self.is_changing = threading.Lock(), False

    def begin(self) -> None:
        if not self.is_changing:
            self.lock.acquire()
            self.is_changing = True

    def end(self) -> None:
        if self.is_changing:
            self.is_changing = False
            self.lock.release()


# Of the training of this process: held from an optimizer step until the state is whole again.
STATE_LOCK = StateLock()


class Engine(Generic[M]):
    """A module in training in plain torch (ZeRO stage 0): forward passes, gradients, updates.

    Each process has all weights and the whole optimizer state, and all processes sum their
    gradients once a step. The weights of a parameter group, their fp32 masters and their gradients
    are one flat tensor each. Gradients accumulate in fp32 in every dtype: 16 bits would lose small
    micro-batches.

    Attributes:
        master_weights: The fp32 tensors that the optimizer updates in this process.
        loss_factor: Of all losses; 0 in a trial.
        grad_norm: Gradient norm of the last step over all weights, before clipping; None if the
            step was skipped.
    """

    stage = 0
    master_weights: Any

    def __init__(
        self, module: M, settings: TrainingSettings, learning_rate: float, num_steps: int
    ) -> None:
        self.module = module
        self.grad_norm: float | None = None
        self.loss_factor, self.max_grad_norm = 1.0, settings.max_grad_norm
        groups = parameter_groups(module, settings, learning_rate)
        self._prepare_weights(groups, DTYPES[settings.dtype])
        if num_steps < settings.warmup_steps:
            warn(
                f"{num_steps} optimizer steps are fewer than warmup_steps"
                f" ({settings.warmup_steps}): the learning rate does not reach its peak"
            )
        self.optimizer = torch.optim.AdamW(groups, betas=settings.adam_betas, fused=True)
        factor = partial(learning_rate_factor, settings=settings, num_steps=num_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def _prepare_weights(self, groups: list[dict[str, Any]], dtype: torch.dtype) -> None:
        """Make the weights, masters and gradients of each parameter group flat tensors."""
        # Parameters only: buffers such as the angles of rotary positions stay in fp32.
        for weight in self.module.parameters():
            weight.data = weight.data.to(dtype)
        group_sizes = [sum(weight.numel() for weight in group["params"]) for group in groups]
        self.gradients = torch.zeros(sum(group_sizes), device=groups[0]["params"][0].device)
        self.master_weights, self.weights = [], []
        # The part of the master weights of each weight, by the weight's id.
        self.masters: dict[int, torch.Tensor] = {}
        for group, gradients in zip(groups, self.gradients.split(group_sizes), strict=True):
            weights = group["params"]
            exact = torch.cat([weight.detach().flatten() for weight in weights]).float()
            # In fp32, weights and masters share memory.
            master, flat = torch.nn.Parameter(exact), exact.to(dtype)
            master.grad = gradients
            sizes = [weight.numel() for weight in weights]
            parts = (flat.split(sizes), gradients.split(sizes), exact.split(sizes))
            for weight, values, gradient, own in zip(weights, *parts, strict=True):
                self.masters[id(weight)] = own.view_as(weight)
                weight.data = values.view_as(weight)
                weight.register_post_accumulate_grad_hook(partial(_accumulate, gradient))
            self.master_weights.append(master)
            self.weights.append(flat)
            group["params"] = [master]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the module."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch; with last, reduce them over all processes."""
        (self.loss_factor * loss).backward()
        if last and world_size() > 1:
            torch.distributed.all_reduce(self.gradients)

    def step(self) -> None:
        """Update the weights, unless fp16 gradients overflowed."""
        STATE_LOCK.begin()
        self.grad_norm = torch.nn.utils.get_total_norm(_chunks(self.gradients, NORM_CHUNK)).item()
        if self.grad_norm > self.max_grad_norm:
            self.gradients *= self.max_grad_norm / self.grad_norm
        self.optimizer.step()
        self.scheduler.step()
        self.gradients.zero_()
        self.update_weights()

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Context in which steps take the memory of a training, and change nothing.

        It precedes the first step. Its losses are multiplied by 0, and learning rates are 0.
        """
        values = {k: value for k, value in self.state_dict().items() if not torch.is_tensor(value)}
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.loss_factor = 0.0
        # Allocates the moments of Adam at stage 0.
        self.optimizer.step()
        yield
        self.loss_factor = 1.0
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self._load_values(values)
        self.grad_norm = None
        STATE_LOCK.end()

    def update_weights(self) -> None:
        """Copy the master weights into the module."""
        for weights, master in zip(self.weights, self.master_weights, strict=True):
            if weights.data_ptr() != master.data_ptr():
                weights.copy_(master.detach())

    def gathered(self, weights: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which each process has whole weights; all enter it with the same."""
        return contextlib.nullcontext()

    def master(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the whole fp32 value of a weight, of which the weight is the rounded one.

        All processes call it together. A weight that is not trained must be gathered.
        """
        return self.masters.get(id(weight), weight.detach()).float()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the coming step."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the last step."""
        return {"grad_norm": self.grad_norm}

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Context in which this process may call the model any number of times.

        All processes enter and leave it together. Inside, only calls of the model communicate.
        """
        # With activation checkpointing, a module in training mode generates without a KV cache.
        self.module.eval()
        yield
        self.module.train()

    def state_dict(self) -> dict[str, Any]:
        """Return what steps change: weights and moments of this process, and learning rates."""
        state = {
            "zero_stage": self.stage,
            "steps": self.scheduler.last_epoch,
            "learning_rates": [group["lr"] for group in self.optimizer.param_groups],
        }
        for index, master in enumerate(self.master_weights):
            tensors = {"weights": master.data, **self.optimizer.state[master]}
            state |= {f"{index}.{name}": tensor for name, tensor in tensors.items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state; raise InputError if another ZeRO stage saved it."""
        if state_dict["zero_stage"] != self.stage:
            raise InputError(
                f"the saved state has ZeRO stage {state_dict['zero_stage']}, this run has stage"
                f" {self.stage}: set zero_stage: {state_dict['zero_stage']}, or delete the"
                " folder .KEY/state of the job in the store"
            )
        for index, master in enumerate(self.master_weights):
            own = [key for key in state_dict if key.startswith(f"{index}.")]
            tensors = {key.partition(".")[2]: state_dict[key] for key in own}
            master.data.copy_(tensors.pop("weights"))
            moments = {name: tensor.to(master.device) for name, tensor in tensors.items()}
            self.optimizer.state[master].update(moments)
        self._load_values(state_dict)
        self.update_weights()

    def _load_values(self, state: Mapping[str, Any]) -> None:
        """Restore what a state has besides tensors."""
        for group, rate in zip(self.optimizer.param_groups, state["learning_rates"], strict=True):
            group["lr"] = rate
        self.scheduler.last_epoch = state["steps"]


def learning_rate_factor(step: int, settings: OptimizerSettings, num_steps: int) -> float:
    """Return the share of the peak learning rate after a number of steps."""
    warmup, left = settings.warmup_steps, max(num_steps - settings.warmup_steps, 1)
    if step < warmup:
        return step / warmup
    if settings.lr_schedule == "constant":
        return 1.0
    if settings.lr_schedule == "linear":
        return max((num_steps - step) / left, 0.0)
    progress = (step - warmup) / left
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return cosine * (1 - settings.min_lr_ratio) + settings.min_lr_ratio


def _accumulate(gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """Add the gradient of a micro-batch to the sum of a step, fp32 [elements], and free it."""
    assert weight.grad is not None
    # In chunks: on a CPU, torch copies 16-bit numbers to fp32 before it adds them.
    totals = _chunks(gradient, ACCUMULATION_CHUNK)
    for total, added in zip(
        totals, _chunks(weight.grad.flatten(), ACCUMULATION_CHUNK), strict=True
    ):
        total += added
    weight.grad = None


def _chunks(flat: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Split a tensor into chunks of a size; not on a GPU, which launches a kernel for each."""
    return [flat] if flat.is_cuda else flat.split(size)


class Ema:
    """Exponential moving average of the weights in training.

    average = decay * average + (1 - decay) * weight, in fp32, of all weights that are trained.

    The averages are partitioned over processes in the same way as the master weights.
    """

    def __init__(self, engine: Engine[Any], decay: float) -> None:
        self.engine, self.decay = engine, decay
        self.averages = [master.detach().clone() for master in engine.master_weights]

    def update(self) -> None:
        """Update the averages with the weights after a step."""
        for average, master in zip(self.averages, self.engine.master_weights, strict=True):
            average.lerp_(master.detach(), 1 - self.decay)

    @contextlib.contextmanager
    def average_weights(self) -> Iterator[None]:
        """Replace the weights of the module by their averages within the context."""
        STATE_LOCK.begin()
        self._swap()
        yield
        self._swap()
        STATE_LOCK.end()

    def _swap(self) -> None:
        for average, master in zip(self.averages, self.engine.master_weights, strict=True):
            weights = master.detach().clone()
            master.data.copy_(average)
            average.copy_(weights)
        self.engine.update_weights()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(index): average for index, average in enumerate(self.averages)}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        for index, average in enumerate(self.averages):
            average.copy_(state_dict[str(index)])


class FrozenModel(contextlib.AbstractContextManager["FrozenModel[M]"], Generic[M]):
    """A module that is evaluated and never trained; a context closes it at its end.

    offload: Keep the module in CPU memory while it is not in use.
    """

    def __init__(self, module: M, device: torch.device, offload: bool) -> None:
        self.module, self.device = module.requires_grad_(False).eval(), device
        # The weights in CPU memory, from which they are copied to the device for each use. Pinned
        # memory is copied without a pass through other memory.
        self.offloaded: list[tuple[torch.Tensor, torch.Tensor]] = []
        if offload and device.type == "cuda":
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = tensor.data.cpu().pin_memory()
                self.offloaded.append((tensor, tensor.data))
        else:
            module.to(device)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[M]:
        """Yield the module, on its device within the context."""
        for tensor, kept in self.offloaded:
            tensor.data = kept.to(self.device, non_blocking=True)
        yield self.module
        for tensor, kept in self.offloaded:
            tensor.data = kept

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Return a context as Engine.sampling does."""
        return contextlib.nullcontext()

    def gathered(self, weights: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return a context as Engine.gathered does."""
        return contextlib.nullcontext()

    def __exit__(self, *_: object) -> None:
        """Free the weights. The model cannot be used any more."""
        self.offloaded.clear()
        del self.module
