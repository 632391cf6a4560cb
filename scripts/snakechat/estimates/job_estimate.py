"""What a planned job needs: GPU memory, time and disk. Nothing is run.

Memory is the peak of a process: what it holds at all times, and what the largest moment adds. A
trained weight takes 16 bytes, which the processes divide as ZeRO does; activations come from
snakechat/estimates/activation_memory.py. Time is the operations of all passes over all rows, and
reading memory for each sampled token. Disk is the weights that are saved. Units are bytes and
seconds; gpu_memory, the bytes of a GPU, is 0 on CPUs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from snakechat.config.references import model_names
from snakechat.config.rlhf import RlhfSettings, evaluated_in_update
from snakechat.estimates.activation_memory import (
    POLICY,
    SCORE,
    SFT,
    BatchShape,
    ModelSpec,
    activation_peak,
    load_config,
    measure_size,
)
from snakechat.estimates.flops import Gpu, flops_per_token
from snakechat.estimates.inputs import TokenCounts, model_config, token_counts
from snakechat.jobs.planner import Plan
from snakechat.jobs.rules import RULES
from snakechat.jobs.stale_causes import job_name
from snakechat.modeling.generation import MEMORY_FRACTION, default_generate_tokens
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.training.rungs import (
    Rung,
    is_open,
    possible_rungs,
    samples_whole,
    training_bytes,
)
from snakechat.workflow.processes import Placement, stage_used

GIB = 1 << 30
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

# Bytes by component: weights, of models or parts of them that are not trained; training: weights,
# gradients and optimizer states of the others; activations; cache: keys and values; vllm.
Memory = Counter[str]


class Run(NamedTuple):
    """What a job runs of a model.

    stage: The ZeRO stage at which the processes partition it.
    forwards: Forward passes over each row, besides training.
    epochs: Passes over each row that train it; 0 for a frozen model.
    samples: Whether it samples the responses of the workload.
    """

    model: ModelSpec
    stage: int
    forwards: int = 0
    epochs: int = 0
    samples: bool = False


class Workload(NamedTuple):
    """What a job runs. Numbers of rows and responses are nan if they are unknown.

    runs: Its models, those that are trained first.
    rows: Rows of all passes.
    length: Mean tokens of a row.
    attended: Mean length of the sequences in which attention is computed.
    largest: Its largest micro-batch.
    responses: Responses of each model that samples, in all processes.
    sampled: The largest batch of responses.
    vllm_ranks: Processes of a vLLM engine that samples; 0 if the model itself does.
    ema: Whether it keeps a moving average of the first model.
    one_at_a_time: Whether it has one of its models in memory at a time.
    notes: Assumptions, for the user.
    """

    runs: list[Run]
    rows: float
    length: float
    attended: float
    largest: BatchShape
    responses: float = 0
    sampled: BatchShape = BatchShape(1, 1, 1)
    vllm_ranks: int = 0
    ema: bool = False
    one_at_a_time: bool = False
    notes: Sequence[str] = ()

    @property
    def flops(self) -> float:
        """Operations of forward and backward passes, and of what checkpointing recomputes."""
        passes = [
            (
                measure_size(run.model)._asdict(),
                run.forwards + run.epochs * run.model.activation_checkpointing,
                run.epochs,
            )
            for run in self.runs
        ]
        return self.rows * self.length * flops_per_token(passes, self.attended)


# --- what a job runs ----------------------------------------------------------------------------


class PlannedSizes:
    """A job, with the sizes of the models and tokens that its program reads."""

    def __init__(
        self, spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float
    ) -> None:
        self.settings, self.inputs = spec["settings"], spec["inputs"]
        self.rule, self.work = spec["rule"], RULES[spec["rule"]].work
        self.placement, self.plan, self.gpu_memory = placement, plan, gpu_memory

    def workload(
        self, runs: list[Run], rows: float, tokens: TokenCounts, targets: int, **others: Any
    ) -> Workload:
        """Return the workload of models that read rows, each with so many targets."""
        settings, placement = self.settings, self.placement
        sequences = max(1, placement.micro_batch_tokens // tokens.longest)
        # Other kernels than SDPA compute in 16 bits on a GPU (modeling/attention.py).
        has_mask = settings.get("dtype") == "fp32" or placement.attn_implementation != "auto"
        fewer = [key for key in ("train_only", "lora_target_modules") if settings.get(key)]
        return Workload(
            runs,
            rows,
            length=tokens.prompt + tokens.responses,
            # The responses of a row share its prompt, and do not attend to each other.
            attended=tokens.prompt + tokens.responses / tokens.num_responses,
            largest=BatchShape(sequences, tokens.longest, targets, has_mask),
            notes=[*tokens.notes, *(f"not counted: {key} trains fewer weights" for key in fewer)],
            **others,
        )

    def run(
        self, key: str, loss: str, forwards: int, trained: str | None = None, dtype: str = ""
    ) -> Run:
        """Return the run of the model of an input.

        Args:
            key: Name of the input.
            loss: What the forward pass computes (SFT, POLICY or SCORE).
            forwards: Forward passes over each row, besides training.
            trained: Prefix of the settings of a model that is trained: "" or "critic_".
            dtype: Defaults to the recipe's.
        """
        settings, placement = self.settings, self.placement
        dtype = dtype or settings.get("dtype", "fp32")
        model = ModelSpec(model_config(self.inputs[key]["path"], self.plan), loss, dtype)
        if trained is None:
            partitions = placement.evaluates_partitioned
            if self.work == "training":
                partitions = placement.is_partitioned
            return Run(model, 3 if partitions(dtype) else 0, forwards)
        model = model._replace(
            lora_rank=settings.get(f"{trained}lora_rank", 0),
            train_base="none" if trained else settings.get("train_base", "none"),
            activation_checkpointing=placement.activation_checkpointing,
        )
        stage = getattr(placement, f"{trained}zero_stage")
        stage = stage_used(placement.zero_stage if stage is None else stage, dtype)
        return Run(model, stage, forwards, epochs=settings.get("ppo_epochs", 1))

    def tokens(self, split: str) -> TokenCounts:
        """Return the counts of a split of the job's tokens."""
        return token_counts(self.inputs["tokens"]["path"], split, self.plan)

    def with_responses(self, prompts: TokenCounts) -> TokenCounts:
        """Return the counts of prompts with all their responses, of the maximum length."""
        count, limit = (self.settings[key] for key in ("num_generations", "max_response_length"))
        longest = prompts.longest + count * limit
        return prompts._replace(responses=count * limit, longest=longest, num_responses=count)

    def sampling(
        self, model: ModelSpec, prompts: TokenCounts, responses: float, at_a_time: float
    ) -> dict[str, Any]:
        """Return the values of a workload with responses of a model to prompts.

        at_a_time: Responses that are sampled at a time; nan if their number is unknown.
        """
        placement, limit = self.placement, self.settings["max_response_length"]
        length, ranks = prompts.longest + limit, 0
        max_tokens = placement.generate_tokens or default_generate_tokens(
            load_config(model),
            model.width,
            placement.micro_batch_tokens,
            MEMORY_FRACTION * self.gpu_memory,
        )
        sequences = max(max_tokens // length, 1)
        if self.settings.get("generation_backend") == "vllm":
            ranks, sequences = placement.vllm_tensor_parallel_size, VLLM_MAX_SEQUENCES
        own = at_a_time * max(ranks, 1) / placement.num_processes
        if not math.isnan(own):
            # Batches of equal size.
            sequences = math.ceil(own / max(math.ceil(own / sequences), 1)) or 1
        sampled = BatchShape(sequences, length, limit)
        return {"responses": responses, "sampled": sampled, "vllm_ranks": ranks}


def _training(job: PlannedSizes) -> Workload:
    """SFT, a reward model, or DPO."""
    tokens, loss = job.tokens("train"), RULES[job.rule].loss
    targets = tokens.longest - 1 if loss == SFT else tokens.longest // 2
    runs = [job.run("model", loss, 0, trained="")]
    return job.workload(runs, _trained_rows(job, tokens), tokens, targets)


def _rlhf(job: PlannedSizes) -> Workload:
    """RLHF: the actor, its critic, which may start from any reward model, and what scores."""
    settings, prompts = RlhfSettings(**job.settings), job.tokens("train")
    tokens, scorers = job.with_responses(prompts), model_names(settings.reward)
    rows, count = _trained_rows(job, prompts), settings.num_generations
    # Without its adapters, the actor is the reference model; a teacher is another one.
    reference = "teacher" if settings.algorithm == "distill" else "actor"
    is_lora = settings.lora_rank > 0 and settings.train_base == "none"
    is_apart = reference == "teacher" or not is_lora
    forwards = (not evaluated_in_update(settings)) + (not is_apart)
    actor = job.run("actor", POLICY, forwards, trained="")
    at_a_time = settings.rollout_batch_size * count
    sampling = job.sampling(actor.model, prompts, rows * count, at_a_time)
    runs = [actor._replace(samples=True)]
    if settings.algorithm == "ppo":
        runs.append(job.run([*scorers, "actor"][0], SCORE, 1, trained="critic_"))
    runs += [job.run(key, SCORE, 1) for key in scorers]
    if is_apart:
        runs.append(job.run(reference, POLICY, 1))
    note = f"assumed: responses of {settings.max_response_length} tokens, the limit"
    tokens = tokens._replace(notes=[*tokens.notes, note])
    has_ema = settings.ema_decay > 0
    return job.workload(runs, rows, tokens, int(tokens.responses), ema=has_ema, **sampling)


def _trained_rows(job: PlannedSizes, tokens: TokenCounts) -> float:
    """Return the rows of all steps of a training; nan if their number is unknown."""
    settings, rows = job.settings, tokens.num_rows * job.settings["epochs"]
    batch = settings.get("rollout_batch_size", settings["global_batch_size"])
    return min(rows, (settings["max_steps"] or math.inf) * batch)


def _evaluation(job: PlannedSizes) -> Workload | None:
    """Passes over rows by one model after the other, which may sample first; None without models.

    A model that is compared with others evaluates its own responses. The first model and the
    scorers evaluate the responses of all models: a second pass for each.
    """
    settings, inputs = job.settings, job.inputs
    is_compared, scores_alone = "num_prompts" in settings, "responses" in inputs
    samples = "max_response_length" in settings and not scores_alone
    splits = ["eval"] if job.rule.startswith("evaluate_") else ["train", *(["eval"] * samples)]
    found = [job.tokens(split) for split in splits]
    rows = sum(counts.num_rows for counts in found)
    if is_compared:
        rows = min(settings["num_prompts"], rows)
    tokens = prompts = max(found, key=lambda counts: counts.longest)
    keys = [] if scores_alone else [key for key in inputs if MODEL.match(key)]
    runs = [job.run(key, RULES[job.rule].loss, 2 if is_compared else 1) for key in keys]
    sampling = {}
    if samples:
        number = rows * settings["num_generations"]
        sampling = job.sampling(runs[0].model, prompts, number, number)
        runs = [run._replace(samples=True) for run in runs]
    if is_compared or scores_alone:
        tokens, dtype = job.with_responses(prompts), "fp32" if is_compared else ""
        scorers = [n for each in ("reward", "judge") for n in model_names(settings.get(each))]
        runs += [job.run(key, SCORE, max(len(keys), 1), dtype=dtype) for key in scorers]
    if not runs:
        return None
    sampling["one_at_a_time"] = not scores_alone
    return job.workload(runs, rows, tokens, tokens.longest - 1, **sampling)


def job_workload(
    spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float
) -> Workload | None:
    """Return the workload of a job; None if the job needs no GPU, or has few prompts.

    Raises:
        InputError: The Hub does not have the config of its model, or cannot be asked.
    """
    work = RULES[spec["rule"]].work
    if work is None or "tokens" not in spec["inputs"]:
        return None
    job = PlannedSizes(spec, placement, plan, gpu_memory)
    if work != "training":
        return _evaluation(job)
    return _rlhf(job) if job.rule == "train_rlhf" else _training(job)


# --- memory -------------------------------------------------------------------------------------


def peak_memory(workload: Workload, placement: Placement, gpu_memory: float) -> tuple[str, Memory]:
    """Return the moment of peak memory of a process, and its memory."""
    groups = [[run] for run in workload.runs] if workload.one_at_a_time else [workload.runs]
    moments: list[tuple[str, Memory]] = []
    for runs in groups:
        resident = _resident(runs, workload.ema, placement)
        for run in runs:
            added = Memory(activations=activation_peak(run.model, workload.largest, run.epochs > 0))
            if run.stage == 3:
                # A whole layer is gathered.
                size = measure_size(run.model)
                added["weights"] = run.model.width * max(size.layer, size.largest)
            elif runs[0].epochs and not run.epochs and placement.offload_frozen:
                added["weights"] = run.model.weight_bytes
            moments.append(("training" if run.epochs else "scoring", resident + added))
        if runs[0].samples:
            added, model = Memory(), runs[0].model
            if workload.vllm_ranks:
                added["vllm"] = int(GPU_MEMORY_FRACTION * gpu_memory)
            else:
                # By default, keys and values take what is free.
                tokens = placement.generate_tokens or 0
                added["cache"] = tokens * model.width * measure_size(model).kv
                if runs[0].stage == 3 and samples_whole(model.weight_bytes, gpu_memory):
                    added["weights"] = model.weight_bytes
            moments.append(("sampling", resident + added))
    return max(moments, key=lambda moment: moment[1].total())


def _resident(runs: list[Run], ema: bool, placement: Placement) -> Memory:
    """Return what a process holds of models at all times. Offloaded tensors are on the CPU."""
    found, processes = Memory(), placement.num_processes
    offloads_all = placement.offload == "parameters"
    offloads_frozen = placement.offload_frozen if runs[0].epochs else offloads_all
    for run in runs:
        size, width = measure_size(run.model), run.model.width
        divided = processes if run.stage == 3 else 1
        if run.epochs and not offloads_all:
            # With adapters, few of the weights are trained.
            per_weight = training_bytes(run.stage, processes, run.model.dtype)
            if placement.offload == "optimizer":
                per_weight = width / divided
            found["training"] += int(per_weight * size.trained)
            found["weights"] += width * (size.weights - size.trained) // divided
        elif not run.epochs and not offloads_frozen:
            found["weights"] += width * size.weights // divided
    if ema:
        divided = processes if runs[0].stage else 1
        found["training"] += 4 * measure_size(runs[0].model).trained // divided
    return found


# --- time ---------------------------------------------------------------------------------------


def total_seconds(workload: Workload, gpu: Gpu, num_gpus: int) -> float:
    """Return the seconds of a job on a number of GPUs; nan if the number of rows is unknown.

    Each sampled token reads all weights, and the keys and values so far, half of the response on
    average (Pope et al. 2022, section 2.1). The processes of a vLLM engine divide them.
    """
    seconds = workload.flops / (FLOPS_UTILIZATION * num_gpus * gpu.flops)
    shape, ranks = workload.sampled, max(workload.vllm_ranks, 1)
    num_batches = -(-workload.responses * ranks // (shape.sequences * num_gpus))
    for model in (run.model for run in workload.runs if run.samples):
        cached = shape.sequences * (shape.length - shape.targets / 2)
        read = model.weight_bytes + model.width * measure_size(model).kv * cached
        per_token = read / ranks / (gpu.bandwidth * BANDWIDTH_UTILIZATION) + SECONDS_PER_TOKEN
        seconds += num_batches * shape.targets * per_token
    return seconds


# --- a job --------------------------------------------------------------------------------------


class JobEstimate:
    """The estimate of a stale job. Numbers are nan where they are unknown, or not needed on a CPU.

    Where a placement has `auto`, it is that of the first rung (snakechat/training/rungs.py) that
    fits by the estimate of memory. A training tries the rungs, and estimates nothing.

    Attributes:
        memory: Bytes of a GPU by component at peak memory; empty for a job without models.
        moment: The moment of peak memory.
        seconds: Time of the whole job.
        disk: Bytes of the trained model.
        checkpoint: Bytes of a training state: master weights and moments of trained weights.
        warnings: Why the job does not fit, or takes longer.
        notes: Assumptions.
    """

    def __init__(self, path: str, plan: Plan, gpu: Gpu) -> None:
        self.spec, self.placement, self.gpu = plan.jobs[path].spec, plan.jobs[path].placement, gpu
        self.moment, self.memory = "", Memory()
        self.seconds, self.disk, self.checkpoint, self.num_gpus = math.nan, math.nan, 0, 0
        self.warnings, self.notes = list[str](), list[str]()
        self.workload: Workload | None = None
        if "command" in self.spec["settings"]:
            self.notes.append("unknown: run.json has the time and the memory after the first run")
            return
        self.workload = workload = self._placed(plan)
        if not workload:
            return
        self.notes += workload.notes
        if trained := [run.model for run in workload.runs if run.epochs]:
            saved = self.spec["settings"].get("save_dtype") or trained[0].dtype
            self.disk = (1 + workload.ema) * trained[0]._replace(dtype=saved).weight_bytes
            self.checkpoint = sum(12 * measure_size(model).trained for model in trained)
        self.num_gpus = self.placement.nodes * self.placement.gpus_per_node
        if self.num_gpus:
            self.seconds = total_seconds(workload, gpu, self.num_gpus)
            self.warnings += self._lacks(workload)

    def __str__(self) -> str:
        return job_name(self.spec)

    def _placed(self, plan: Plan) -> Workload | None:
        """Set the placement and its memory; return its workload."""
        rungs: list[Rung | None] = [None]
        if is_open(self.placement) and RULES[self.spec["rule"]].work == "training":
            rungs = [*possible_rungs(self.placement, self.spec["settings"]["dtype"])]
        memory = self.gpu.memory if self.placement.gpus_per_node else 0
        for rung in rungs:
            self.placement = rung.of(self.placement) if rung else self.placement
            workload = job_workload(self.spec, self.placement, plan, memory)
            if workload is None or not memory:
                return workload
            self.moment, self.memory = peak_memory(workload, self.placement, memory)
            if self.memory.total() <= USABLE_MEMORY * memory:
                break
        if rung:
            self.notes.append(f"{rung}, if a training finds the same")
        return workload

    def _lacks(self, workload: Workload) -> Iterator[str]:
        """Yield what a GPU lacks."""
        memory, first, ranks = self.gpu.memory, workload.runs[0], workload.vllm_ranks
        if self.memory.total() > USABLE_MEMORY * memory:
            [(largest, size)] = self.memory.most_common(1)
            yield (
                f"does not fit: {format_bytes(self.memory.total())} at {self.moment}"
                f" ({largest}: {format_bytes(size)}), a GPU has"
                f" {format_bytes(USABLE_MEMORY * memory)}"
            )
        if first.epochs and not self.gpu.has_bf16 and first.model.dtype == "bf16":
            yield "the GPU has no arithmetic in bf16: set dtype: fp16"
        weights = first.model.weight_bytes
        if weights > ranks * GPU_MEMORY_FRACTION * memory > 0:
            yield (
                "does not fit: vllm needs more for weights than the"
                f" {GPU_MEMORY_FRACTION:.0%} of a GPU that it uses: set vllm_tensor_parallel_size"
            )
        gathers = first.epochs and first.stage == 3 and not samples_whole(weights, memory)
        if first.samples and gathers and not ranks:
            yield (
                "each token gathers all weights from all GPUs, whose time is not counted: set"
                " generation_backend: vllm with vllm_tensor_parallel_size"
            )


def format_bytes(number: float) -> str:
    """Format bytes in GiB, small numbers in MiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):,.1f} MiB"
