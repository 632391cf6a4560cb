"""ZeRO stages 1 to 3 and offload. The only module that imports DeepSpeed.

It uses private attributes of DeepSpeed, so it warns about versions that it was not tested with.
"""

import collections
import contextlib
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from snakechat.config.common import TrainingSettings
from snakechat.training.engine import Engine, parameter_groups
from snakechat.workflow.distributed import world_size
from snakechat.workflow.errors import InputError

# DeepSpeed chooses its accelerator when it is imported. snakechat.modeling.models, which the engine
# imports, sets DS_ACCELERATOR on machines without a GPU.
import deepspeed  # isort: skip
import deepspeed.ops  # isort: skip
from deepspeed.accelerator import get_accelerator  # isort: skip

TESTED_VERSION = "0.19.8"
if deepspeed.__version__ != TESTED_VERSION:
    warnings.warn(
        f"DeepSpeed {deepspeed.__version__} is installed, Snakechat was tested with"
        f" {TESTED_VERSION}: install the versions in requirements.txt",
        stacklevel=2,
    )

# DeepSpeed calls functions of torch by deprecated names, which users cannot change.
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)

# The ZeRO configuration of each value of placement.offload.
OFFLOAD: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}

# Attributes of DeepSpeed's dynamic loss scaler that change during training.
LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def init_distributed(device: torch.device) -> None:
    """Initialize the process group of torch and DeepSpeed for a type of device."""
    if device.type == "cpu":
        # DeepSpeed would compile a shared-memory operator instead of using gloo.
        deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", verbose=False)


class DeepSpeedEngine(Engine):
    """Training at ZeRO stages 1 to 3: the processes partition the optimizer state.

    Raises:
        InputError: The device cannot train in the dtype of the recipe.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: TrainingSettings,
        learning_rate: float,
        num_steps: int,
        stage: int,
        offload: str,
    ) -> None:
        self.fp16 = settings.dtype == "fp16"
        if self.fp16 and not get_accelerator().is_fp16_supported():
            raise InputError("dtype: fp16 requires a GPU: set dtype to bf16 or fp32")
        groups = parameter_groups(module, settings, learning_rate)
        super().__init__(module, groups, settings, num_steps, stage)
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            config={
                # Nominal batch sizes: the argument `last` of backward() ends a step.
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
                # torch's Adam runs on CPUs and GPUs and needs no compiler.
                "zero_force_ds_cpu_optimizer": False,
                "steps_per_print": 1 << 40,
            },
        )
        # Whether the gradients of the coming step overflow; None: not determined yet.
        self._overflow: bool | None = None
        if self.fp16:
            self._detect_overflow = self.engine.optimizer.has_overflow
            self.engine.optimizer.has_overflow = lambda *_, **__: self.overflows()
        if stage == 3 and hasattr(module, "external_parameters"):
            for weight in cast(Any, module).external_parameters():
                deepspeed.zero.register_external_parameter(module, weight)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A direct call of the module would accumulate gradients incorrectly under ZeRO 3.
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over processes; losses here add up.
        self.engine.backward(loss * world_size(), scale_wrt_gas=False)
        if not last:
            self.engine.step()

    def step(self) -> None:
        skipped_steps = self.skipped_steps
        self.engine.step()
        self._overflow = None
        was_skipped = self.skipped_steps > skipped_steps
        self.grad_norm = None if was_skipped else float(self.engine.get_global_grad_norm())

    def overflows(self) -> bool:
        if self.fp16 and self._overflow is None:
            self._overflow = self._detect_overflow()
        return bool(self._overflow)

    def skip(self) -> None:
        """Skip the coming step as if its gradients overflowed, but keep the loss scale."""
        scaler = self.engine.optimizer.loss_scaler
        scale = {name: getattr(scaler, name) for name in LOSS_SCALER_STATE}
        self._overflow = True
        self.step()
        vars(scaler).update(scale)

    @property
    def metrics(self) -> dict[str, float | None]:
        metrics = super().metrics
        if self.fp16:
            metrics |= {"loss_scale": self.loss_scale, "skipped_steps": self.skipped_steps}
        return metrics

    @property
    def skipped_steps(self) -> int:
        """Number of steps so far that were skipped because gradients overflowed in fp16."""
        return self.engine.skipped_steps

    @property
    def loss_scale(self) -> float:
        """Factor that keeps the gradients of fp16 losses from underflowing."""
        return self.engine.optimizer.loss_scale

    @property
    def master_weights(self) -> list[torch.Tensor]:
        if self.stage == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return self.engine.optimizer.single_partition_of_fp32_groups

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"skipped_steps": self.skipped_steps}
        if self.fp16:
            scaler = self.engine.optimizer.loss_scaler
            state["loss_scaler"] = {name: getattr(scaler, name) for name in LOSS_SCALER_STATE}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.engine.skipped_steps = state["skipped_steps"]
        if self.fp16:
            vars(self.engine.optimizer.loss_scaler).update(state["loss_scaler"])

    def update_weights(self) -> None:
        if self.stage < 3:
            self.engine.optimizer.update_lp_params()
            return
        for index in range(len(self.master_weights)):
            self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(index)

    def _gather(self) -> AbstractContextManager[Any]:
        if self.stage == 3:
            return deepspeed.zero.unwrap_model_for_generation(self.engine)
        return contextlib.nullcontext()
