"""What a planned job needs: GPU memory, time and disk. Nothing is run.

WORKLOADS has what each kind of job runs. Memory is that of the moment with the highest peak: what a
process holds at all times, and what the moment adds. A trained weight takes 16 bytes, which the
processes divide as ZeRO does; activations come from snakechat/estimates/activation_memory.py. Time
is the operations of all passes over all rows, and reading memory for each sampled token. Units are
bytes and seconds.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from snakechat.config.references import input_names
from snakechat.estimates import flops
from snakechat.estimates.activation_memory import (
    POLICY,
    SCORE,
    SFT,
    BatchShape,
    ModelSpec,
    inference_peak,
    load_config,
    measure_size,
    training_peaks,
)
from snakechat.estimates.flops import Gpu
from snakechat.estimates.inputs import TokenCounts, model_config, token_counts
from snakechat.jobs.planner import Plan
from snakechat.jobs.rules import RULES
from snakechat.jobs.stale_causes import job_name
from snakechat.modeling.key_value_cache import MEMORY_FRACTION, default_generate_tokens
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.training.rungs import is_open, possible_rungs
from snakechat.training.zero_stages import (
    evaluates_partitioned,
    is_partitioned,
    samples_whole,
    stage_used,
    training_bytes,
)
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest, read_run_record
from snakechat.workflow.placement import Placement

GIB = 1 << 30
BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
# weights: of models, or parts of them, that are not trained. training: weights, gradients and
# optimizer states of the others.
COMPONENTS = ("weights", "training", "activations", "cache")
# Assumptions: the fraction of a GPU's memory for tensors, since CUDA and fragmentation take the
# rest; the fractions of the peak FLOPs that passes reach, and of the bandwidth that sampling
# reaches; the time of a sampled token besides reading memory; responses that vLLM samples at a
# time, its max_num_seqs on most GPUs.
USABLE_MEMORY = 0.93
FLOPS_UTILIZATION = 0.4
BANDWIDTH_UTILIZATION = 0.5
SECONDS_PER_TOKEN = 5e-4
VLLM_MAX_SEQUENCES = 256

# Inputs with models that are evaluated, apart from those that score.
MODEL = re.compile(r"(base|model|sft|dpo|rlhf)\Z|compare_with[.]")

# Bytes by component, of those that are not 0.
Memory = dict[str, float]


class Sampling(NamedTuple):
    """Responses that a model samples.

    number: Of all processes; nan if it is unknown.
    shape: The largest batch.
    vllm_ranks: Processes of a vLLM engine that samples; 0 if the model itself does.
    """

    number: float
    shape: BatchShape
    vllm_ranks: int = 0


class Run(NamedTuple):
    """What a job runs of a model.

    stage: The ZeRO stage at which the processes partition it.
    forwards: Forward passes over each row, besides training.
    epochs: Passes over each row that train it; 0 for a frozen model.
    """

    model: ModelSpec
    stage: int
    forwards: int = 0
    epochs: int = 0
    sampling: Sampling | None = None


class Workload(NamedTuple):
    """What a job runs.

    runs: Its models, those that are trained first.
    rows: Rows of all passes; nan if their number is unknown.
    length: Mean tokens of a row.
    largest: Its largest micro-batch.
    ema: Whether it keeps a moving average of the first model.
    one_at_a_time: Whether it has one of its models in memory at a time.
    notes: Assumptions, for the user.
    """

    runs: list[Run]
    rows: float
    length: float
    largest: BatchShape
    ema: bool = False
    one_at_a_time: bool = False
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Operations of forward and backward passes; nan if the number of rows is unknown.

        Includes what activation checkpointing recomputes: it takes time.
        """
        total = 0.0
        for run in self.runs:
            size = measure_size(run.model)._asdict()
            forwards = run.forwards + (run.epochs if run.model.activation_checkpointing else 0)
            total += forwards * flops.forward_flops(size, self.length)
            total += run.epochs * flops.training_flops(size, self.length)
        return self.rows * self.length * total


class PlannedSizes:
    """A job, with the sizes of the models and tokens that its program reads.

    gpu_memory: Bytes of a GPU; 0 on CPUs.
    """

    def __init__(
        self, spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float = 0
    ) -> None:
        self.spec, self.placement, self.plan, self.gpu_memory = spec, placement, plan, gpu_memory
        self.settings, self.inputs = spec["settings"], spec["inputs"]
        self.rule = RULES[spec["rule"]]
        self.num_processes = placement.num_processes

    def model(self, key: str, loss: str, dtype: str | None = None, lora: str = "") -> ModelSpec:
        """Return the model of an input.

        Args:
            key: Name of the input.
            loss: What the forward pass computes (SFT, POLICY or SCORE).
            dtype: Defaults to that of the recipe.
            lora: Prefix of the settings of its adapters; empty for a model that is not trained.
        """
        settings = self.settings
        return ModelSpec(
            model_config(self.inputs[key]["path"], self.plan),
            loss,
            dtype or settings["dtype"],
            settings.get(f"{lora}_rank", 0) if lora else 0,
            settings.get("train_base", "none") if lora == "lora" else "none",
            bool(lora) and self.placement.activation_checkpointing,
        )

    def trained(self, key: str, loss: str, lora: str = "lora", stage: int | None = None) -> Run:
        """Return the run that trains a model for an epoch. stage: Defaults to zero_stage."""
        model = self.model(key, loss, lora=lora)
        requested = self.placement.zero_stage if stage is None else stage
        return Run(model, stage_used(requested, model.dtype), epochs=1)

    def frozen(self, model: ModelSpec, forwards: int, sampling: Sampling | None = None) -> Run:
        """Return the run of a model that is evaluated, or samples."""
        partitions = is_partitioned if self.rule.work == "training" else evaluates_partitioned
        stage = 3 if partitions(self.placement, model.dtype) else 0
        return Run(model, stage, forwards, sampling=sampling)

    def scorers(self, *keys: str) -> list[str]:
        """Return the inputs with models of `reward` or `judge` (keys), in their given order."""
        return [name for key in keys for name in input_names(key, self.settings[key])]

    def tokens(self, split: str = "train") -> TokenCounts:
        """Return the counts of a split of the job's tokens."""
        return token_counts(self.inputs["tokens"]["path"], split, self.plan)

    def with_responses(self, prompts: TokenCounts) -> TokenCounts:
        """Return the counts of prompts with all their responses, of the maximum length."""
        responses = self.settings["num_generations"] * self.settings["max_response_length"]
        return prompts._replace(responses=responses, longest=prompts.longest + responses)

    def rows_trained(self, tokens: TokenCounts) -> float:
        """Return the rows of all steps, at most; nan if the number of rows is unknown."""
        rows, settings = tokens.num_rows * self.settings["epochs"], self.settings
        if settings["max_steps"] is None:
            return rows
        batch_size = settings.get("rollout_batch_size", settings["global_batch_size"])
        return min(rows, settings["max_steps"] * batch_size)

    def micro_batch(self, length: int, targets: int, max_tokens: int | None = None) -> BatchShape:
        """Return the largest micro-batch of sequences of a length, each with so many targets.

        max_tokens: Limit of its tokens; defaults to micro_batch_tokens.
        """
        sequences = max(1, (max_tokens or self.placement.micro_batch_tokens) // length)
        on_gpu = self.placement.gpus_per_node > 0
        # Other kernels than SDPA compute in 16 bits on a GPU (modeling/attention.py).
        in_16_bits = self.settings.get("dtype") != "fp32"
        is_auto = self.placement.attn_implementation == "auto"
        has_mask = not (on_gpu and in_16_bits and is_auto)
        return BatchShape(sequences, length, targets, on_gpu, has_mask)

    def sampling(
        self, model: ModelSpec, prompts: TokenCounts, number: float, at_a_time: float | None = None
    ) -> Sampling:
        """Return the responses that a model samples to prompts.

        Args:
            number: Of responses in all processes; nan if it is unknown.
            at_a_time: Those that are sampled at a time; defaults to all.
        """
        response_length = self.settings["max_response_length"]
        limit = self.placement.generate_tokens or default_generate_tokens(
            load_config(model),
            BYTES_PER_ELEMENT[model.dtype],
            self.placement.micro_batch_tokens,
            MEMORY_FRACTION * self.gpu_memory,
        )
        shape = self.micro_batch(prompts.longest + response_length, response_length, limit)
        vllm_ranks = 0
        if self.settings.get("generation_backend") == "vllm":
            vllm_ranks = self.placement.vllm_tensor_parallel_size
            shape = shape._replace(sequences=VLLM_MAX_SEQUENCES)
        num_engines = self.num_processes / max(vllm_ranks, 1)
        own = (number if at_a_time is None else at_a_time) / num_engines
        if own < shape.sequences:
            shape = shape._replace(sequences=max(math.ceil(own), 1))
        return Sampling(number, shape, vllm_ranks)


# --- what each kind of job runs -----------------------------------------------------------------


def _train_on_rows(job: PlannedSizes) -> Workload:
    """SFT, a reward model, or DPO."""
    tokens, loss = job.tokens(), job.rule.loss
    num_targets = tokens.longest - 1 if loss == SFT else tokens.longest // 2
    return Workload(
        [job.trained("model", loss)],
        job.rows_trained(tokens),
        tokens.per_row,
        job.micro_batch(tokens.longest, num_targets),
        notes=tuple(tokens.notes),
    )


def _train_rlhf(job: PlannedSizes) -> Workload:
    """PPO, RLOO, GRPO or distillation. The critic may start from any reward model."""
    settings, prompts = job.settings, job.tokens()
    tokens, rows = job.with_responses(prompts), job.rows_trained(prompts)
    is_distilled = settings["algorithm"] == "distill"
    runs, scorers = [job.trained("actor", POLICY)], job.scorers("reward")
    if settings["algorithm"] == "ppo":
        stage = job.placement.critic_zero_stage
        runs.append(job.trained([*scorers, "actor"][0], SCORE, "critic_lora", stage))
    runs = [run._replace(forwards=1, epochs=settings["ppo_epochs"]) for run in runs]
    actor, count, at_a_time = runs[0], settings["num_generations"], settings["rollout_batch_size"]
    sampling = job.sampling(actor.model, prompts, rows * count, at_a_time * count)
    runs[0] = actor._replace(sampling=sampling)
    runs += [job.frozen(job.model(key, SCORE), 1) for key in scorers]
    # Without its adapters, the actor is the reference model; a teacher is another one.
    if is_distilled or actor.model.lora_rank == 0 or actor.model.train_base != "none":
        runs.append(job.frozen(job.model("teacher" if is_distilled else "actor", POLICY), 1))
    else:
        runs[0] = runs[0]._replace(forwards=2)
    return Workload(
        runs,
        rows,
        tokens.per_row,
        job.micro_batch(tokens.longest, int(tokens.responses)),
        ema=settings["ema_decay"] > 0,
        notes=(
            *prompts.notes,
            f"assumed: responses of {settings['max_response_length']} tokens, the limit",
        ),
    )


def _evaluate(job: PlannedSizes) -> Workload | None:
    """Passes over rows by one model after the other, which may sample first; None without models.

    A model that is compared with others evaluates its own responses twice, to find its most
    probable tokens and to read their log-probabilities. The first model and the scorers evaluate
    those of all: a third pass for each model.
    """
    settings, inputs, rule = job.settings, job.inputs, job.spec["rule"]
    is_compared, scores_alone = "num_prompts" in settings, "responses" in inputs
    samples = "max_response_length" in settings and not scores_alone
    splits = ["eval"] if rule.startswith("evaluate_") else ["train", *(["eval"] * samples)]
    found = [job.tokens(split) for split in splits]
    rows = sum(counts.num_rows for counts in found)
    if is_compared:
        rows = min(settings["num_prompts"], rows)
    prompts = max(found, key=lambda counts: counts.longest)
    tokens = job.with_responses(prompts) if is_compared or scores_alone else prompts

    runs = []
    keys = [] if scores_alone else [key for key in inputs if MODEL.match(key)]
    for key in keys:
        model = job.model(key, job.rule.loss, settings.get("dtype", "fp32"))
        number = rows * settings.get("num_generations", 1)
        sampling = job.sampling(model, prompts, number) if samples else None
        runs.append(job.frozen(model, 3 if is_compared else 1, sampling))
    if is_compared or scores_alone:
        dtype = "fp32" if is_compared else None
        scorers = job.scorers(*(key for key in ("reward", "judge") if key in settings))
        passes = max(len(keys), 1)
        runs += [job.frozen(job.model(key, SCORE, dtype), passes) for key in scorers]
    if not runs:
        return None
    return Workload(
        runs,
        rows,
        tokens.per_row,
        job.micro_batch(tokens.longest, tokens.longest - 1),
        one_at_a_time=not scores_alone,
        notes=tuple(prompts.notes),
    )


def job_workload(
    spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float = 0
) -> Workload | None:
    """Return the workload of a job; None if the job needs no GPU, or has few prompts.

    gpu_memory: Bytes of a GPU; 0 on CPUs.

    Raises:
        InputError: The size of its model is unknown.
    """
    work = RULES[spec["rule"]].work
    if work is None or "tokens" not in spec["inputs"]:
        return None
    train = _train_rlhf if "algorithm" in spec["settings"] else _train_on_rows
    describe: Callable[[PlannedSizes], Workload | None] = train if work == "training" else _evaluate
    return describe(PlannedSizes(spec, placement, plan, gpu_memory))


# --- memory -------------------------------------------------------------------------------------


def peak_memory(
    workload: Workload, placement: Placement, gpu_memory: float = 0
) -> tuple[str, Memory]:
    """Return the moment of a job with the highest peak in a process, and its memory.

    gpu_memory: Bytes of a GPU; 0 on CPUs.
    """
    groups = [[run] for run in workload.runs] if workload.one_at_a_time else [workload.runs]
    moments = [
        (moment, _sum(*resident, *added))
        for runs in groups
        for resident in [_resident(runs, workload.ema, placement)]
        for moment, added in _moments(runs, workload.largest, placement, gpu_memory, resident)
    ]
    return max(moments, key=lambda moment: sum(moment[1].values()))


def _sum(*memories: Memory) -> Memory:
    """Return the sum of memories by component."""
    return {name: sum(memory.get(name, 0) for memory in memories) for name in COMPONENTS}


def _resident(runs: list[Run], ema: bool, placement: Placement) -> list[Memory]:
    """Return what a process holds of models at all times. Offloaded tensors are on the CPU."""
    found: list[Memory] = []
    processes = placement.num_processes
    trains = runs[0].epochs > 0
    offloads_frozen = placement.offload_frozen if trains else placement.offload == "parameters"
    for run in runs:
        size, width = measure_size(run.model), BYTES_PER_ELEMENT[run.model.dtype]
        divided = processes if run.stage == 3 else 1
        if not run.epochs:
            found += [] if offloads_frozen else [{"weights": weight_bytes(run.model) / divided}]
        elif placement.offload != "parameters":
            # With adapters, few of the weights are trained.
            training = training_bytes(run.stage, processes, run.model.dtype) * size.trained
            if placement.offload == "optimizer":
                training = width * size.trained / divided
            frozen = width * (size.weights - size.trained) / divided
            found.append({"weights": frozen, "training": training})
    if ema:
        divided = processes if runs[0].stage else 1
        found.append({"training": 4 * measure_size(runs[0].model).trained / divided})
    return found


def _moments(
    runs: list[Run],
    largest: BatchShape,
    placement: Placement,
    gpu_memory: float,
    resident: list[Memory],
) -> Iterator[tuple[str, list[Memory]]]:
    """Yield the moments of a job whose models are all in memory, and what each one adds."""
    for run in runs:
        if run.epochs:
            activations = max(training_peaks(run.model, largest))
            yield "training", [_layer(run), {"activations": activations}]
            continue
        loaded = _layer(run)
        if runs[0].epochs and placement.offload_frozen and run.stage < 3:
            loaded = {"weights": weight_bytes(run.model)}
        yield "scoring", [loaded, {"activations": inference_peak(run.model, largest)}]
    if sampling := runs[0].sampling:
        free = max(USABLE_MEMORY * gpu_memory - sum(_sum(*resident).values()), 0)
        yield "sampling", _sampling_memory(runs[0], sampling, placement, gpu_memory, free)


def _layer(run: Run) -> Memory:
    """Return the whole weights of a layer, which stage 3 gathers."""
    if run.stage < 3:
        return {}
    size = measure_size(run.model)
    return {"weights": BYTES_PER_ELEMENT[run.model.dtype] * max(size.layer, size.largest)}


def _sampling_memory(
    run: Run, sampling: Sampling, placement: Placement, gpu_memory: float, free: float
) -> list[Memory]:
    """Return what sampling adds: vLLM, or keys, values, gathered weights and activations.

    free: Bytes of the GPU that nothing else uses. Where they are few, batches are smaller.
    """
    model, shape = run.model, sampling.shape
    if sampling.vllm_ranks:
        weights = weight_bytes(model) / sampling.vllm_ranks
        return [{"weights": weights, "cache": max(GPU_MEMORY_FRACTION * gpu_memory - weights, 0)}]
    gathered = _layer(run)
    if run.stage == 3 and samples_whole(weight_bytes(model), gpu_memory):
        gathered = {"weights": weight_bytes(model)}

    def of_batch(shape: BatchShape) -> list[Memory]:
        # Keys and values of all tokens, and of the prompts of the next batch; the pass of the
        # prompts; the last logits of each row, in the dtype and three times in fp32.
        length = shape.length - shape.targets
        prompts = shape._replace(length=length, targets=length)
        width = BYTES_PER_ELEMENT[model.dtype]
        logits = shape.sequences * measure_size(model).vocabulary * (width + 12)
        forward = inference_peak(model._replace(loss=SCORE), prompts)
        cache = cache_bytes(model, shape) * (1 + length / shape.length)
        return [gathered, {"cache": cache, "activations": forward + logits}]

    memory = of_batch(shape)
    if gpu_memory and placement.generate_tokens is None and sum(_sum(*memory).values()) > free:
        sequences = max(placement.micro_batch_tokens // shape.length, 1)
        memory = of_batch(shape._replace(sequences=min(sequences, shape.sequences)))
    return memory


def weight_bytes(model: ModelSpec) -> int:
    """Return the bytes of all weights of a model; of a saved one with LoRA, adapters included."""
    return BYTES_PER_ELEMENT[model.dtype] * measure_size(model).weights


def cache_bytes(model: ModelSpec, shape: BatchShape) -> int:
    """Return the bytes of the keys and values of all tokens of a batch."""
    width = BYTES_PER_ELEMENT[model.dtype]
    return width * measure_size(model).kv * shape.sequences * shape.length


# --- time ---------------------------------------------------------------------------------------


def total_seconds(workload: Workload, gpu: Gpu, num_gpus: int) -> float:
    """Return the seconds of a job on a number of GPUs; nan if the number of rows is unknown.

    Each sampled token reads all weights, and the keys and values so far, half of the response on
    average (Pope et al. 2022, section 2.1). The processes of a vLLM engine divide them.
    """
    seconds = workload.flops / (FLOPS_UTILIZATION * num_gpus * gpu.flops)
    for run in workload.runs:
        if run.sampling:
            number, shape, vllm_ranks = run.sampling
            ranks = max(vllm_ranks, 1)
            cached = shape._replace(length=1)
            mean_length = shape.length - shape.targets / 2
            read = weight_bytes(run.model) + cache_bytes(run.model, cached) * mean_length
            per_token = read / ranks / (gpu.bandwidth * BANDWIDTH_UTILIZATION) + SECONDS_PER_TOKEN
            num_batches = -(-number * ranks // (shape.sequences * num_gpus))
            seconds += num_batches * shape.targets * per_token
    return seconds


# --- a job --------------------------------------------------------------------------------------


class JobEstimate:
    """The estimate of a job. Numbers are nan where they are unknown, or not needed without a GPU.

    Where a placement has `auto`, it is that of the first rung (snakechat/training/rungs.py) that
    fits by the estimate of memory. A training tries the rungs, and estimates nothing.

    Attributes:
        memory: Bytes of a GPU by component at peak memory; empty for a job without models.
        moment: The moment of peak memory.
        seconds: Time of the whole job.
        disk: Bytes of the result.
        checkpoint: Bytes of a training state: master weights and moments of trained weights.
        warnings: Why the job does not fit.
        notes: Assumptions.
    """

    def __init__(self, path: str, plan: Plan, gpu: Gpu) -> None:
        self.spec, self.placement = plan.jobs[path].spec, plan.jobs[path].placement
        self.plan, self.gpu, self.stale = plan, gpu, path in plan.stale
        self.workload: Workload | None = None
        self.moment, self.memory = "", dict[str, float]()
        self.seconds, self.checkpoint = math.nan, 0
        self.disk = math.nan if self.stale else size_on_disk(path)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.num_gpus = 0
        if "command" in self.spec["settings"]:
            if record := read_run_record(path):
                self.seconds = record["seconds"]
            else:
                self.notes.append("unknown: measured by run.json after the first run")
            return
        try:
            self._place()
        except InputError as error:
            self.warnings.append(str(error))
        if not self.workload:
            return
        self.num_gpus = self.placement.nodes * self.placement.gpus_per_node
        if self.num_gpus:
            self.seconds = total_seconds(self.workload, gpu, self.num_gpus)
        if self.stale:
            self.notes += self.workload.notes
            self.disk = result_bytes(self.workload, self.spec["settings"].get("save_dtype"))
            trained = [run.model for run in self.workload.runs if run.epochs]
            self.checkpoint = sum(12 * measure_size(model).trained for model in trained)
            self.warnings = [*self._lacks(self.workload)] if self.num_gpus else []

    def __str__(self) -> str:
        return job_name(self.spec)

    def _place(self) -> None:
        """Set the placement, its workload and its memory."""
        placements = [self.placement]
        has_choice = RULES[self.spec["rule"]].work == "training" and is_open(self.placement)
        if has_choice:
            rungs = possible_rungs(self.placement, self.spec["settings"]["dtype"])
            placements = [rung.of(self.placement) for rung in rungs]
        for placement in placements:
            self.placement = placement
            memory = self.gpu.memory if placement.gpus_per_node else 0
            self.workload = job_workload(self.spec, placement, self.plan, memory)
            if self.workload is None:
                return
            self.moment, self.memory = peak_memory(self.workload, placement, memory)
            if self._fits():
                break
        if has_choice and placement.gpus_per_node:
            self.notes.append(
                f"zero_stage: {placement.zero_stage}, activation_checkpointing:"
                f" {str(placement.activation_checkpointing).lower()}, micro_batch_tokens:"
                f" {placement.micro_batch_tokens}, if a training finds the same"
            )

    def _fits(self) -> bool:
        """Return whether the tensors of a process fit into its GPU."""
        return sum(self.memory.values()) <= USABLE_MEMORY * self.gpu.memory

    def _lacks(self, workload: Workload) -> Iterator[str]:
        """Yield what a GPU lacks."""
        memory, first = self.gpu.memory, workload.runs[0]
        if not self._fits():
            largest = max(self.memory, key=self.memory.__getitem__)
            yield (
                f"does not fit: {format_bytes(sum(self.memory.values()))} at {self.moment}"
                f" ({largest}: {format_bytes(self.memory[largest])}), a GPU has"
                f" {format_bytes(USABLE_MEMORY * memory)}"
            )
        if first.epochs and not self.gpu.has_bf16 and first.model.dtype == "bf16":
            yield "the GPU has no arithmetic in bf16: set dtype: fp16"
        if first.sampling is None:
            return
        ranks = first.sampling.vllm_ranks
        response = cache_bytes(first.model, first.sampling.shape._replace(sequences=1))
        if ranks and weight_bytes(first.model) + response > ranks * GPU_MEMORY_FRACTION * memory:
            yield (
                "does not fit: vllm needs more for weights and a response than the"
                f" {GPU_MEMORY_FRACTION:.0%} of a GPU that it uses: set vllm_tensor_parallel_size"
            )
        is_whole = first.stage < 3 or samples_whole(weight_bytes(first.model), memory)
        if first.epochs and not ranks and not is_whole:
            yield (
                "each token gathers all weights from all GPUs, whose time is not counted: set"
                " generation_backend: vllm with vllm_tensor_parallel_size"
            )


def result_bytes(workload: Workload, save_dtype: str | None) -> float:
    """Return the bytes of the trained model; nan for a job that trains none.

    save_dtype: The dtype of the files. Defaults to the dtype of training.
    """
    first = workload.runs[0]
    if not first.epochs:
        return math.nan
    saved = first.model._replace(dtype=save_dtype or first.model.dtype)
    return (2 if workload.ema else 1) * weight_bytes(saved)


def size_on_disk(path: str) -> float:
    """Return the bytes of an existing result according to its manifest, nan without one."""
    manifest = read_manifest(manifest_path(path))
    if manifest is None:
        return math.nan
    return sum(entry["size"] for entry in manifest["files"].values())


def format_bytes(number: float) -> str:
    """Format bytes in GiB, small numbers in MiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):,.1f} MiB"
