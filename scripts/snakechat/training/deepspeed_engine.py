"""ZeRO stages 1 to 3 and offload. The only module that imports DeepSpeed.

It uses private attributes of DeepSpeed, whose version requirements.in pins.
"""

import collections
import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from snakechat.config.settings import TrainingSettings
from snakechat.modeling.loading import take_stored_weight
from snakechat.modeling.models import whole_shape
from snakechat.training.engine import STATE_LOCK, Engine, FrozenModel, M
from snakechat.training.rungs import samples_whole
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import all_reduce_max, rank, world_size

# DeepSpeed chooses its accelerator when it is imported. snakechat.modeling.models, which the engine
# imports, sets DS_ACCELERATOR on machines without a GPU.
import deepspeed  # isort: skip

# DeepSpeed calls functions of torch by deprecated names, which users cannot change.
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)

# Elements that DeepSpeed sends together, that stage 3 keeps if they are used again before this many
# others, and that it gathers ahead: its defaults (zero/config.py, 0.19). Stage 3 takes at most
# 1/GATHERED_PARTS and 1/PREFETCHED_PARTS of the weights, so that it never holds most of a small
# model.
BUCKET, REUSED, PREFETCHED = 500_000_000, 1_000_000_000, 50_000_000
GATHERED_PARTS, PREFETCHED_PARTS = 16, 32

# Attributes of DeepSpeed's dynamic loss scaler that change during training.
LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def adopt_process_group() -> None:
    """Have DeepSpeed use the process group of torch."""
    backend = torch.distributed.get_backend()
    if backend == "gloo":
        # DeepSpeed would compile a shared-memory operator instead of using gloo.
        deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    deepspeed.init_distributed(backend, verbose=False)


def zero_config(module: torch.nn.Module, dtype: str, stage: int, offload: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a module."""
    bucket, reused, prefetched = BUCKET, REUSED, PREFETCHED
    if stage == 3:
        num_weights = sum(whole_shape(weight).numel() for weight in module.parameters())
        gathered = -(-num_weights // GATHERED_PARTS)
        bucket, reused = min(bucket, gathered), min(reused, gathered)
        prefetched = min(prefetched, -(-num_weights // PREFETCHED_PARTS))
    offloaded = {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}
    return {
        # Nominal batch sizes: the argument `last` of backward() ends a step.
        "train_batch_size": world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 16, "loss_scale_window": 100},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "stage3_max_live_parameters": reused,
            "stage3_max_reuse_distance": reused,
            "stage3_prefetch_bucket_size": prefetched,
            **{f"offload_{part}": {"device": "cpu"} for part in offloaded[offload]},
        },
        "steps_per_print": 1 << 40,
    }


def partition_weights(module: torch.nn.Module, config: Mapping[str, Any]) -> None:
    """Read this process's partition of the deferred weights of a module.

    DeepSpeed partitions the others when it initializes the module. It would also partition these,
    from a whole model in each process.
    """
    # With a module, it replaces torch's linear function by one that needs less memory.
    init = deepspeed.zero.Init(module=torch.nn.Module(), config_dict_or_path=dict(config))
    for weight in module.parameters():
        shape, stored = weight.shape, take_stored_weight(weight)
        if stored is None:
            continue
        init._convert_to_deepspeed_param(weight)
        length = -(-shape.numel() // world_size())
        start = rank() * length
        # The memory of elements that are not written is not allocated.
        weight.data = torch.empty(shape, dtype=weight.dtype)
        part = weight.data.view(-1)[start : start + length]
        part.copy_(stored.view(-1)[start : start + len(part)])
        cast(Any, weight).partition()
    module.to(deepspeed.get_accelerator().current_device_name())
    # DeepSpeed gathers the weights of a module that is called, and must know of the others.
    for weight in getattr(module, "external_parameters", list)():
        deepspeed.zero.register_external_parameter(module, weight)


@contextlib.contextmanager
def sampling_partitioned(engine: Any, model: torch.nn.Module) -> Iterator[None]:
    """Context in which a process may call the model of a ZeRO 3 engine any number of times.

    The processes gather the whole model. Of a large one, they gather each layer when it is called,
    in all processes at once: every process waits for the others before each call. At the end, a
    process repeats calls with a token that nobody reads until all others have ended.
    """
    weights = list(model.parameters())
    size = sum(whole_shape(weight).numel() * weight.element_size() for weight in weights)
    memory = torch.cuda.mem_get_info()[1] if weights[0].is_cuda else 0
    if samples_whole(size, memory):
        with deepspeed.zero.unwrap_model_for_generation(engine):
            yield
        return
    # Of an engine without optimizer, DeepSpeed stores it in the place of the optimizer.
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)

    def start(*_: Any) -> None:
        # DeepSpeed does this when the whole module is called.
        offload.get_param_coordinator().reset_step()

    def wait(*_: Any) -> None:
        all_reduce_max(True)

    hooks = [model.register_forward_pre_hook(hook) for hook in (wait, start)]
    yield
    hooks[0].remove()
    ids = torch.zeros(
        1, 1, dtype=torch.int64, device=deepspeed.get_accelerator().current_device_name()
    )
    with torch.no_grad():
        while all_reduce_max(False):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=1)
    hooks[1].remove()
    offload.partition_all_parameters()


class PartitionedModel(FrozenModel[M]):
    """A frozen module of which each process has a partition."""

    def __init__(self, module: M, dtype: str, offload: bool) -> None:
        adopt_process_group()
        self.module, self.offloaded = module.requires_grad_(False).eval(), []
        config = zero_config(module, dtype, 3, "parameters" if offload else "none")
        partition_weights(module, config)
        self.engine, *_ = deepspeed.initialize(model=module, config=config)

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        return sampling_partitioned(self.engine, self.module.model)

    def gathered(self, weights: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        return deepspeed.zero.GatheredParameters(weights)

    def __exit__(self, *_: object) -> None:
        self.engine.destroy()
        # DeepSpeed keeps references to the module.
        for weight in self.module.parameters():
            for tensor in (weight, cast(Any, weight).ds_tensor):
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        del self.module


class DeepSpeedEngine(Engine[M]):
    """Training at ZeRO stages 1 to 3: the processes partition the optimizer state."""

    def __init__(
        self,
        module: M,
        settings: TrainingSettings,
        learning_rate: float,
        num_steps: int,
        stage: int,
        offload: str,
    ) -> None:
        self.fp16, self.stage = settings.dtype == "fp16", stage
        if self.fp16 and not deepspeed.get_accelerator().is_fp16_supported():
            raise InputError(
                "dtype: fp16: this device has no arithmetic in fp16: set dtype to bf16 or fp32"
            )
        adopt_process_group()
        super().__init__(module, settings, learning_rate, num_steps)
        config = zero_config(module, settings.dtype, stage, offload)
        if stage == 3:
            partition_weights(module, config)
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            config=config
            | {
                "gradient_clipping": self.max_grad_norm,
                "data_types": {"grad_accum_dtype": "fp32"},
                "communication_data_type": "fp32",
                # torch's Adam runs on CPUs and GPUs and needs no compiler.
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        self.master_weights = getattr(self.engine.optimizer, name)

    def _prepare_weights(self, *_: object) -> None:
        """DeepSpeed prepares them, when it initializes the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A direct call of the module would accumulate gradients incorrectly under ZeRO 3.
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over processes; losses here add up.
        self.engine.backward(self.loss_factor * loss * world_size(), scale_wrt_gas=False)
        if not last:
            self.engine.step()

    def step(self) -> None:
        STATE_LOCK.begin()
        self.engine.step()
        # Unless gradients overflowed in fp16.
        was_applied = self.engine.was_step_applied()
        self.grad_norm = float(self.engine.get_global_grad_norm()) if was_applied else None

    @property
    def metrics(self) -> dict[str, float | None]:
        if not self.fp16:
            return super().metrics
        scale, skipped = self.engine.optimizer.loss_scale, self.engine.skipped_steps
        return super().metrics | {"loss_scale": scale, "skipped_steps": skipped}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"skipped_steps": self.engine.skipped_steps}
        if self.fp16:
            scaler = self.engine.optimizer.loss_scaler
            state["loss_scaler"] = {name: getattr(scaler, name) for name in LOSS_SCALER_STATE}
        return state

    def _load_values(self, state: Mapping[str, Any]) -> None:
        super()._load_values(state)
        self.engine.skipped_steps = state["skipped_steps"]
        if self.fp16:
            vars(self.engine.optimizer.loss_scaler).update(state["loss_scaler"])

    def update_weights(self) -> None:
        if self.stage == 3:
            for index in range(len(self.master_weights)):
                self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        else:
            self.engine.optimizer.update_lp_params()

    def gathered(self, weights: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        return deepspeed.zero.GatheredParameters(weights, enabled=self.stage == 3)

    def master(self, weight: torch.Tensor) -> torch.Tensor:
        exact = deepspeed.utils.safe_get_full_fp32_param(weight)
        return weight.detach().float() if exact is None else exact

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        partitioned = sampling_partitioned(self.engine, self.module.model)
        with super().sampling(), partitioned if self.stage == 3 else contextlib.nullcontext():
            yield
