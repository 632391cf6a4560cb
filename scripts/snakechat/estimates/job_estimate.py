"""What a planned job needs: GPU memory, time and disk. Nothing is run.

Memory is the peak of a process (snakechat/estimates/memory.py). Time is the operations of all
passes over all rows, and reading memory for each sampled token. Disk is the weights that are saved.
Units are bytes and seconds; gpu_memory, the bytes of a GPU, is 0 on CPUs.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from snakechat.config.rlhf import RlhfSettings, evaluated_in_update, model_names
from snakechat.data.hub import fetch
from snakechat.data.ragged_arrays import optional_ragged
from snakechat.estimates.flops import Gpu, flops_per_token
from snakechat.estimates.memory import (
    POLICY,
    SCORE,
    SFT,
    BatchShape,
    Memory,
    ModelSpec,
    Run,
    Workload,
    load_config,
    measure_size,
    peak_memory,
)
from snakechat.jobs.staleness import PlannedJob
from snakechat.modeling.generation import MEMORY_FRACTION, default_generate_tokens
from snakechat.modeling.vllm_sampler import GPU_MEMORY_FRACTION
from snakechat.training.rungs import Rung, is_open, possible_rungs, samples_whole
from snakechat.workflow.processes import stage_used
from snakechat.workflow.store import format_size

GIB = 1 << 30
# Assumptions: the fraction of a GPU's memory for tensors, since CUDA and fragmentation take the
# rest; the fractions of the peak FLOPs that passes reach, and of the bandwidth that sampling
# reaches; the time of a sampled token besides reading memory; responses that vLLM samples at a
# time, its max_num_seqs on most GPUs; the mean length of a row that is not tokenized yet, as a
# fraction of its limit.
USABLE_MEMORY = 0.93
FLOPS_UTILIZATION = 0.4
BANDWIDTH_UTILIZATION = 0.5
SECONDS_PER_TOKEN = 5e-4
VLLM_MAX_SEQUENCES = 256
ASSUMED_LENGTH = 0.5
# Rows of each split of datasets of the Hub.
DATASET_ROWS: dict[str, dict[str, int]] = yaml.safe_load(
    (Path(__file__).parent / "tables" / "dataset_rows.yaml").read_text("utf-8")
)

# Inputs with models that are evaluated, apart from those that score.
MODEL = re.compile(r"(base|model|sft|dpo|rlhf)\Z|compare_with[.]")


# --- what a job reads, which may not exist yet --------------------------------------------------


class TokenCounts(NamedTuple):
    """Rows and tokens that a job reads.

    num_rows: Number of rows; nan if it is unknown.
    prompt, responses: Mean tokens of a row's prompt, and of all its responses together.
    longest: Tokens of the longest row.
    notes: Assumptions, for the user.
    num_responses: Responses of a row, at least 1.
    """

    num_rows: float
    prompt: float
    responses: float
    longest: int
    notes: list[str]
    num_responses: int = 1


def token_counts(job: PlannedJob, split: str) -> TokenCounts:
    """Return the counts of a split (train or eval) of the result of a job that tokenizes.

    Before the tokens exist, the datasets give the number of rows, and rows are assumed to be half
    as long as their limit.
    """
    settings, name = job.description.settings, f"{job.rule} {job.name}"
    fields, number = settings["fields"], max(len(settings["fields"]) - 1, 1)
    arrays = [optional_ragged(Path(job.path), f"{split}.{field}") for field in fields]
    # Neither missing nor empty.
    if all(arrays):
        lengths = [array.lengths for array in arrays if array]
        prompt, *responses = (of_field.mean() for of_field in lengths)
        stale = [f"assumed: rows are as long as in the stale result of {name}"]
        return TokenCounts(
            num_rows=len(lengths[0]),
            prompt=prompt,
            responses=sum(responses),
            longest=int(np.sum(lengths, axis=0).max()),
            notes=stale if job.is_stale else [],
            num_responses=number,
        )
    limit = settings.get("max_length") or settings["max_prompt_length"]
    num_rows, notes = count_rows(job, split)
    mean = ASSUMED_LENGTH * limit
    notes.append(f"assumed until {name} is built: {mean:g} tokens per row, half of the limit")
    # Half of a sequence is the prompt; the limit holds for each sequence of prompt and response.
    prompt = mean / min(len(fields), 2)
    return TokenCounts(num_rows, prompt, number * (mean - prompt), number * limit, notes, number)


def count_rows(job: PlannedJob, split: str) -> tuple[float, list[str]]:
    """Return the number of rows of a job's datasets (nan: unknown), and the assumptions."""
    settings, total, notes = job.description.settings, 0.0, []
    phase = settings["phase"]
    for number, weight in enumerate(settings["weights"], start=1):
        records, rows = (job.inputs[f"{key}.{number}"] for key in ("records", "rows"))
        file = Path(rows.path, f"{phase}.{split}.npy")
        if file.exists():
            total += weight * len(np.load(file, mmap_mode="r", allow_pickle=False))
            continue
        source, division = records.description.settings, rows.description.settings
        if "generate" in source:
            listed = {"train": source["rows"] - source["eval_rows"], "eval": source["eval_rows"]}
        elif listed := DATASET_ROWS.get(source.get("hub", ""), {}):
            notes.append(f"assumed: {rows.name} has as many rows as the Hub listed in 2023 or 2024")
        else:
            notes.append(f"unknown until {rows.name} is split: number of rows")
        num_rows = listed.get(split, math.nan)
        if division["max_rows"] and split == "train":
            num_rows = min(num_rows, division["max_rows"])
        total += weight * num_rows * division["weights"][phase] / sum(division["weights"].values())
    return total, notes


def model_config(job: PlannedJob) -> str:
    """Return the config of the model of a job, as JSON.

    A trained model has the config of its base model. Before a download, the Hub has the config.
    Raises InputError if the Hub is unavailable.
    """
    settings = job.description.settings
    if job.rule == "init_model":
        return json.dumps(settings["init"] | {"vocab_size": settings["tokenizer"]["vocab_size"]})
    if job.rule == "fetch_model":
        for folder in (job.path, job.options.source):
            if folder and Path(folder, "config.json").exists():
                return Path(folder, "config.json").read_text()
        return hub_config(settings["hub"], settings["revision"])
    return model_config(job.inputs["actor" if job.rule == "train_rlhf" else "model"])


@cache
def hub_config(name: str, revision: str) -> str:
    """Return the config of a model of the Hub, the only file of it that is downloaded."""
    print(f"reading config.json of {name} from the Hub", file=sys.stderr, flush=True)
    folder, _ = fetch(name, "model", revision, lambda *_: {"": ["config.json"]})
    return Path(folder, "config.json").read_text()


# --- time ----------------------------------------------------------------------------------------


def total_flops(workload: Workload) -> float:
    """Return the operations of all passes, with what activation checkpointing recomputes."""
    passes = [
        (measure_size(model), forwards + epochs * model.activation_checkpointing, epochs)
        for model, _, forwards, epochs, _ in workload.runs
    ]
    return workload.rows * workload.length * flops_per_token(passes, workload.attended)


def total_seconds(workload: Workload, gpu: Gpu, num_gpus: int) -> float:
    """Return the seconds of a job on a number of GPUs; nan if the number of rows is unknown.

    Each sampled token reads all weights, and the keys and values so far, half of the response on
    average (Pope et al. 2022, section 2.1). The processes of a vLLM engine divide them.
    """
    seconds = total_flops(workload) / (FLOPS_UTILIZATION * num_gpus * gpu.flops)
    shape, ranks = workload.sampled, max(workload.vllm_ranks, 1)
    num_batches = -(-workload.responses * ranks // (shape.sequences * num_gpus))
    for model in (run.model for run in workload.runs if run.samples):
        cached = shape.sequences * (shape.length - shape.targets / 2)
        read = model.weight_bytes + model.width * measure_size(model)["kv"] * cached
        per_token = read / ranks / (gpu.bandwidth * BANDWIDTH_UTILIZATION) + SECONDS_PER_TOKEN
        seconds += num_batches * shape.targets * per_token
    return seconds


# --- a job --------------------------------------------------------------------------------------


class JobEstimate:
    """The estimate of a stale job. Numbers are nan where they are unknown, or not needed on a CPU.

    `auto` in a placement stands for the first rung (snakechat/training/rungs.py) that fits by the
    estimate of memory. A training tries the rungs, and estimates nothing.

    Attributes:
        workload: What it runs on a GPU; None for a job without models, or with few prompts.
        memory: Bytes of a GPU by component at peak memory.
        moment: The moment of peak memory.
        seconds: Time of the whole job.
        disk: Bytes of the trained model.
        checkpoint: Bytes of a training state: master weights and moments of trained weights.
        warnings: Why the job does not fit, or takes longer.
        notes: Assumptions.
    """

    workload: Workload | None = None

    def __init__(self, job: PlannedJob, gpu: Gpu) -> None:
        """Raise InputError if the Hub does not have the config of a model, or cannot be asked."""
        self.job, self.placement = job, job.placement
        self.settings, self.inputs = job.description.settings, job.inputs
        self.gpu_memory = gpu.memory if self.placement.gpus_per_node else 0
        self.moment, self.memory = "", Memory()
        self.seconds, self.disk, self.checkpoint, self.num_gpus = math.nan, math.nan, 0, 0
        self.warnings, self.notes = list[str](), list[str]()
        if "command" in self.settings:
            self.notes.append("unknown: run.json has the time and the memory after the first run")
        elif self.job.row.work and "tokens" in self.inputs:
            self._place()
        if not (workload := self.workload):
            return
        self.notes += workload.notes
        if trained := [run.model for run in workload.runs if run.epochs]:
            saved = self.settings.get("save_dtype") or trained[0].dtype
            self.disk = (1 + workload.ema) * trained[0]._replace(dtype=saved).weight_bytes
            self.checkpoint = sum(12 * measure_size(model)["trained"] for model in trained)
        self.num_gpus = self.placement.nodes * self.placement.gpus_per_node
        if self.num_gpus:
            self.seconds = total_seconds(workload, gpu, self.num_gpus)
            self.warnings += self._lacks(workload)

    def __str__(self) -> str:
        return f"{self.job.rule} {self.job.name}"

    def _place(self) -> None:
        """Set the placement, its workload and its memory."""
        rungs: list[Rung | None] = [None]
        if is_open(self.placement) and self.job.row.work == "training":
            rungs = [*possible_rungs(self.placement, self.settings["dtype"])]
        for rung in rungs:
            self.placement = rung.of(self.placement) if rung else self.placement
            self.workload = self._workload()
            if self.workload is None or not self.gpu_memory:
                return
            self.moment, self.memory = peak_memory(self.workload, self.placement, self.gpu_memory)
            if self.memory.total() <= USABLE_MEMORY * self.gpu_memory:
                break
        if rung:
            self.notes.append(f"{rung}, if a training finds the same")

    def _lacks(self, workload: Workload) -> Iterator[str]:
        """Yield what a GPU lacks."""
        needed, usable = self.memory.total(), USABLE_MEMORY * self.gpu_memory
        if needed > usable:
            [(largest, size)] = self.memory.most_common(1)
            yield (
                f"does not fit: {format_size(needed)} at {self.moment} ({largest}:"
                f" {format_size(size)}), a GPU has {format_size(usable)}"
            )
        first, ranks = workload.runs[0], workload.vllm_ranks
        weights = first.model.weight_bytes
        if 0 < ranks * GPU_MEMORY_FRACTION * self.gpu_memory < weights:
            yield (
                f"does not fit: vllm needs more than the {GPU_MEMORY_FRACTION:.0%} of a GPU that"
                " it uses: set vllm_tensor_parallel_size"
            )
        gathers = first.epochs and first.stage == 3 and not samples_whole(weights, self.gpu_memory)
        if first.samples and gathers and not ranks:
            yield (
                "each token gathers all weights from all GPUs, whose time is not counted: set"
                " generation_backend: vllm with vllm_tensor_parallel_size"
            )

    # --- what it runs ---

    def _workload(self) -> Workload | None:
        if self.job.row.work != "training":
            return self._evaluation()
        tokens = token_counts(self.inputs["tokens"], "train")
        if self.job.rule == "train_rlhf":
            return self._rlhf(tokens)
        loss = self.job.row.loss
        targets = tokens.longest - 1 if loss == SFT else tokens.longest // 2
        return self._work([self._run("model", loss, 0, "")], self._rows(tokens), tokens, targets)

    def _rlhf(self, prompts: TokenCounts) -> Workload:
        """RLHF: the actor, its critic, which may start from a reward model, and what scores."""
        settings = RlhfSettings(**self.settings)
        tokens, scorers = self._with_responses(prompts), model_names(settings.reward)
        rows, count = self._rows(prompts), settings.num_generations
        # Without its adapters, the actor is the reference model; a teacher is another one.
        reference = "teacher" if settings.algorithm == "distill" else "actor"
        is_apart = reference == "teacher" or not settings.lora_rank or settings.train_base != "none"
        forwards = (not evaluated_in_update(settings)) + (not is_apart)
        actor = self._run("actor", POLICY, forwards, "")._replace(samples=True)
        sampling = self._sampling(
            actor.model, prompts, rows * count, settings.rollout_batch_size * count
        )
        runs = [actor]
        if settings.algorithm == "ppo":
            runs.append(self._run([*scorers, "actor"][0], SCORE, 1, "critic_"))
        runs += [self._run(key, SCORE, 1) for key in scorers]
        if is_apart:
            runs.append(self._run(reference, POLICY, 1))
        note = f"assumed: responses of {settings.max_response_length} tokens, the limit"
        tokens = tokens._replace(notes=[*tokens.notes, note])
        return self._work(
            runs, rows, tokens, int(tokens.responses), ema=settings.ema_decay > 0, **sampling
        )

    def _evaluation(self) -> Workload | None:
        """Passes over rows by one model after the other, which may sample first.

        A model that is compared with others evaluates its own responses. The first model and the
        scorers evaluate the responses of all models: a second pass for each.
        """
        settings, inputs = self.settings, self.inputs
        is_compared, scores_alone = "num_prompts" in settings, "responses" in inputs
        samples = "max_response_length" in settings and not scores_alone
        splits = (
            ["eval"] if self.job.rule.startswith("evaluate_") else ["train", *(["eval"] * samples)]
        )
        found = [token_counts(inputs["tokens"], split) for split in splits]
        rows = sum(counts.num_rows for counts in found)
        if is_compared:
            rows = min(settings["num_prompts"], rows)
        tokens = prompts = max(found, key=lambda counts: counts.longest)
        keys = [] if scores_alone else [key for key in inputs if MODEL.match(key)]
        runs = [self._run(key, self.job.row.loss, 2 if is_compared else 1) for key in keys]
        sampling = {}
        if samples:
            number = rows * settings["num_generations"]
            sampling = self._sampling(runs[0].model, prompts, number, number)
            runs = [run._replace(samples=True) for run in runs]
        if is_compared or scores_alone:
            tokens, dtype = self._with_responses(prompts), "fp32" if is_compared else ""
            scorers = [n for each in ("reward", "judge") for n in model_names(settings.get(each))]
            runs += [self._run(key, SCORE, max(len(keys), 1), dtype=dtype) for key in scorers]
        if not runs:
            return None
        sampling["one_at_a_time"] = not scores_alone
        return self._work(runs, rows, tokens, tokens.longest - 1, **sampling)

    def _with_responses(self, prompts: TokenCounts) -> TokenCounts:
        """Return the counts of prompts with all their responses, of the maximum length."""
        count, limit = (self.settings[key] for key in ("num_generations", "max_response_length"))
        return prompts._replace(
            responses=count * limit, longest=prompts.longest + count * limit, num_responses=count
        )

    def _rows(self, tokens: TokenCounts) -> float:
        """Return the rows of all steps of a training; nan if their number is unknown."""
        settings, rows = self.settings, tokens.num_rows * self.settings["epochs"]
        batch = settings.get("rollout_batch_size", settings["global_batch_size"])
        return min(rows, (settings["max_steps"] or math.inf) * batch)

    def _run(
        self, key: str, loss: str, forwards: int, trained: str | None = None, dtype: str = ""
    ) -> Run:
        """Return the run of the model of an input.

        Args:
            key: Name of the input.
            loss: What the forward pass computes (SFT, POLICY or SCORE).
            forwards: Forward passes over each row.
            trained: Prefix of the settings of a model that is trained: critic_ for a critic.
            dtype: Defaults to the recipe's.
        """
        settings, placement = self.settings, self.placement
        dtype = dtype or settings.get("dtype", "fp32")
        model = ModelSpec(model_config(self.inputs[key]), loss, dtype)
        if trained is None:
            trains = self.job.row.work == "training"
            partitions = placement.is_partitioned if trains else placement.evaluates_partitioned
            return Run(model, 3 if partitions(dtype) else 0, forwards)
        model = model._replace(
            lora_rank=settings.get(f"{trained}lora_rank", 0),
            train_base="none" if trained else settings.get("train_base", "none"),
            activation_checkpointing=placement.activation_checkpointing,
        )
        stage = getattr(placement, f"{trained}zero_stage")
        stage = stage_used(placement.zero_stage if stage is None else stage, dtype)
        return Run(model, stage, forwards, settings.get("ppo_epochs", 1))

    def _work(
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

    def _sampling(
        self, model: ModelSpec, prompts: TokenCounts, responses: float, at_a_time: float
    ) -> dict[str, Any]:
        """Return the values of a workload with responses of a model to prompts.

        at_a_time: Responses that are sampled at a time; nan if their number is unknown.
        """
        placement, limit = self.placement, self.settings["max_response_length"]
        length, ranks = prompts.longest + limit, 0
        if self.settings.get("generation_backend") == "vllm":
            ranks, sequences = placement.vllm_tensor_parallel_size, VLLM_MAX_SEQUENCES
        else:
            free, tokens = MEMORY_FRACTION * self.gpu_memory, placement.micro_batch_tokens
            default = default_generate_tokens(load_config(model), model.width, tokens, free)
            sequences = max((placement.generate_tokens or default) // length, 1)
        own = at_a_time * max(ranks, 1) / placement.num_processes
        if not math.isnan(own):
            # Batches of equal size.
            sequences = math.ceil(own / max(math.ceil(own / sequences), 1)) or 1
        return {
            "responses": responses,
            "sampled": BatchShape(sequences, length, limit),
            "vllm_ranks": ranks,
        }
