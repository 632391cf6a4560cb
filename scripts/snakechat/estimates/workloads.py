"""The workload of each kind of job, from its spec: what it trains, evaluates and samples."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from snakechat.config.references import input_names
from snakechat.estimates.activation_memory import (
    POLICY,
    SCORE,
    SFT,
    BatchShape,
    ModelSpec,
    load_config,
)
from snakechat.estimates.compute_time import forward_flops, training_flops
from snakechat.estimates.inputs import TokenCounts, model_config, token_counts
from snakechat.estimates.memory import (
    BYTES_PER_ELEMENT,
    USABLE_MEMORY,
    Generation,
    LoadedModel,
    Workload,
    cache_bytes,
    num_processes,
    peak_memory,
    vllm_memory,
)
from snakechat.evaluation.comparisons import compared_inputs, initial_model
from snakechat.jobs.plan import Plan
from snakechat.jobs.rules import RULES
from snakechat.modeling.key_value_cache import MEMORY_FRACTION, default_generate_tokens
from snakechat.training.zero_stages import stage_used
from snakechat.workflow.placement import Placement

# Assumed limit of the responses that vLLM samples at a time: max_num_seqs is 256 on most GPUs.
VLLM_MAX_SEQUENCES = 256


class JobSizes:
    """A job, with the models and tokens that its program reads.

    gpu_memory: Bytes of a GPU; 0 on CPUs.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        placement: Placement,
        plan: Plan,
        gpu_memory: float = 0,
    ) -> None:
        self.rule, self.settings, self.inputs = spec["rule"], spec["settings"], spec["inputs"]
        self.loss = RULES[self.rule].loss
        self.spec, self.placement, self.plan = spec, placement, plan
        self.gpu_memory = gpu_memory

    def model(
        self, key: str, loss: str, dtype: str | None = None, lora: str | None = None
    ) -> ModelSpec:
        """Return the model of an input.

        Args:
            key: Name of the input.
            loss: What the forward pass computes (SFT, POLICY or SCORE).
            dtype: Defaults to that of the recipe.
            lora: Prefix of the settings of its adapters; None for a model that is not trained.
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

    def scorers(self, *keys: str) -> list[str]:
        """Return the inputs with models of `reward` or `judge` (keys), in their given order."""
        return [name for key in keys for name in input_names(key, self.settings[key])]

    def critic_origin(self) -> str:
        """Return the input that a critic is assumed to start from: any reward model."""
        return next(iter(self.scorers("reward")), "actor")

    def tokens(self, split: str = "train") -> TokenCounts:
        """Return the counts of a split of the job's tokens."""
        return token_counts(self.inputs["tokens"]["path"], split, self.plan)

    def rows_trained(self, tokens: TokenCounts) -> float:
        """Return the rows of all steps, at most; nan if the number of rows is unknown."""
        rows, settings = tokens.num_rows * self.settings["epochs"], self.settings
        if settings["max_steps"] is None:
            return rows
        batch_size = settings.get("rollout_batch_size", settings["global_batch_size"])
        return min(rows, settings["max_steps"] * batch_size)

    def micro_batch(
        self, length: int, num_targets: int, max_tokens: int | None = None
    ) -> BatchShape:
        """Return the largest micro-batch of sequences of a length, each with so many targets.

        max_tokens: Limit of its tokens; defaults to micro_batch_tokens.
        """
        sequences = max(1, (max_tokens or self.placement.micro_batch_tokens) // length)
        on_gpu = self.placement.gpus_per_node > 0
        dense_mask = not on_gpu or self.has_dense_mask()
        return BatchShape(sequences, length, num_targets, on_gpu, dense_mask)

    def has_dense_mask(self) -> bool:
        """Return whether packed sequences have a dense mask on a GPU (modeling/attention.py)."""
        is_auto = self.placement.attn_implementation == "auto"
        return not is_auto or self.settings.get("dtype") == "fp32"

    def generation(
        self,
        model: ModelSpec,
        prompts: TokenCounts,
        num_responses: float,
        at_a_time: float | None = None,
    ) -> Generation:
        """Return the responses that a model samples to prompts.

        Args:
            num_responses: In all processes; nan if it is unknown.
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
            # As many as have space in vLLM's cache; another one starts when one ends.
            space = vllm_memory(model, self.gpu_memory, vllm_ranks)["cache"] * vllm_ranks
            num_cached = int(space // cache_bytes(model, shape._replace(sequences=1)))
            shape = shape._replace(sequences=max(min(num_cached, VLLM_MAX_SEQUENCES), 1))
        num_engines = num_processes(self.placement) / max(vllm_ranks, 1)
        own = (num_responses if at_a_time is None else at_a_time) / num_engines
        if own < shape.sequences:
            shape = shape._replace(sequences=max(math.ceil(own), 1))
        return Generation(model, num_responses, shape, vllm_ranks)


def with_responses(prompts: TokenCounts, settings: Mapping[str, Any]) -> TokenCounts:
    """Return the counts of prompts with all their responses, which have the maximum length."""
    responses = settings["num_generations"] * settings["max_response_length"]
    return prompts._replace(responses=responses, longest=prompts.longest + responses)


# --- training -----------------------------------------------------------------------------------


def train_on_rows(job: JobSizes) -> Workload:
    """Return the workload of SFT (loss SFT), a reward model (SCORE) or DPO (POLICY)."""
    tokens, model = job.tokens(), job.model("model", job.loss, lora="lora")
    flops = job.rows_trained(tokens) * training_flops(model, tokens.per_row)
    num_targets = tokens.longest - 1 if job.loss == SFT else tokens.longest // 2
    return Workload(
        trained=[LoadedModel(model, stage_used(job.placement.zero_stage, model.dtype))],
        frozen=[],
        largest=job.micro_batch(tokens.longest, num_targets),
        flops=flops,
        notes=tuple(tokens.notes),
    )


def train_rlhf(job: JobSizes) -> Workload:
    """Return the workload of PPO, RLOO, GRPO or distillation."""
    settings, prompts, placement = job.settings, job.tokens(), job.placement
    tokens = with_responses(prompts, settings)
    is_distilled = settings["algorithm"] == "distill"
    actor = job.model("actor", POLICY, lora="lora")
    reference = job.model("teacher" if is_distilled else "actor", POLICY)
    models, stages = [actor], [placement.zero_stage]
    if settings["algorithm"] == "ppo":
        models.append(job.model(job.critic_origin(), SCORE, lora="critic_lora"))
        critic_stage = placement.critic_zero_stage
        stages.append(placement.zero_stage if critic_stage is None else critic_stage)
    rewards = [job.model(name, SCORE) for name in job.scorers("reward")]
    # Without its adapters, the actor is the reference model; a teacher is another one.
    has_reference = is_distilled or actor.lora_rank == 0 or actor.train_base != "none"
    flops = sum(settings["ppo_epochs"] * training_flops(model, tokens.per_row) for model in models)
    # Generation runs the actor on each prompt once more.
    flops += forward_flops(actor, prompts.prompt)
    flops += sum(forward_flops(model, tokens.per_row) for model in [*models, reference, *rewards])
    num_prompts = job.rows_trained(prompts)
    num_generations = settings["num_generations"]
    return Workload(
        trained=[
            LoadedModel(model, stage_used(stage, model.dtype))
            for model, stage in zip(models, stages, strict=True)
        ],
        frozen=[*rewards, *([reference] if has_reference else [])],
        largest=job.micro_batch(tokens.longest, int(tokens.responses)),
        flops=num_prompts * flops,
        generations=(
            job.generation(
                actor,
                prompts,
                num_prompts * num_generations,
                at_a_time=settings["rollout_batch_size"] * num_generations,
            ),
        ),
        ema=settings["ema_decay"] > 0,
        notes=(
            *prompts.notes,
            f"assumed: responses of {settings['max_response_length']} tokens, the limit",
        ),
    )


# --- evaluation and sampling --------------------------------------------------------------------


def forward_passes(job: JobSizes, models: list[ModelSpec], tokens: TokenCounts) -> Workload:
    """Return the workload of a pass over rows by one model after the other."""
    flops = sum(forward_flops(model, tokens.per_row) for model in models)
    return Workload(
        trained=[],
        frozen=models,
        one_at_a_time=True,
        largest=job.micro_batch(tokens.longest, tokens.longest - 1),
        flops=tokens.num_rows * flops,
        notes=tuple(tokens.notes),
    )


def evaluate_training_rows(job: JobSizes) -> Workload:
    """Return the workload of the log-probabilities of DPO's reference model."""
    return forward_passes(job, [job.model("model", job.loss)], job.tokens())


def evaluate_rows(job: JobSizes) -> Workload:
    """Return the workload of evaluating a model, and its base model if any, on held-out rows."""
    dtype = job.settings.get("dtype", "fp32")
    models = [job.model(key, job.loss, dtype) for key in ("base", "model") if key in job.inputs]
    return forward_passes(job, models, job.tokens("eval"))


def score_responses(job: JobSizes) -> Workload | None:
    """Return the workload of scoring generated responses; None if only functions score them."""
    scorers = [job.model(key, SCORE) for key in job.scorers("reward")]
    if not scorers:
        return None
    workload = forward_passes(job, scorers, with_responses(job.tokens(), job.settings))
    return workload._replace(one_at_a_time=False)


def generate_responses(job: JobSizes) -> Workload:
    """Return the workload of sampling responses to the prompts of both splits."""
    splits, model = (job.tokens("train"), job.tokens("eval")), job.model("model", POLICY)
    prompts = max(splits, key=lambda tokens: tokens.longest)
    prompts = prompts._replace(num_rows=sum(tokens.num_rows for tokens in splits))
    generation = job.generation(model, prompts, prompts.num_rows * job.settings["num_generations"])
    return forward_passes(job, [model], prompts)._replace(
        largest=generation.shape._replace(sequences=1), generations=(generation,)
    )


def evaluate_rlhf(job: JobSizes) -> Workload:
    """Return the workload of the comparison of a chat model with its initial model."""
    settings, prompts = job.settings, job.tokens("eval")
    num_prompts = min(settings["num_prompts"], prompts.num_rows)
    tokens = with_responses(prompts._replace(num_rows=num_prompts), settings)
    models = [job.model(key, POLICY) for key in compared_inputs(job.inputs)]
    initial = job.model(initial_model(job.inputs), POLICY)
    scorers = [job.model(key, SCORE, dtype="fp32") for key in job.scorers("reward", "judge")]
    # Each model evaluates its own responses twice, to find its most probable tokens and to read
    # their log-probabilities; the initial model and the scorers evaluate those of all.
    of_all = [initial, *scorers] * len(models)
    flops = sum(forward_flops(model, tokens.per_row) for model in [*models, *models, *of_all])
    num_responses = num_prompts * settings["num_generations"]
    return forward_passes(job, [*models, *scorers], tokens)._replace(
        flops=num_prompts * flops,
        generations=tuple(job.generation(model, prompts, num_responses) for model in models),
    )


# The functions that the table of rules names (snakechat.jobs.rules).
WORKLOADS: dict[str, Callable[[JobSizes], Workload | None]] = {
    describe.__name__: describe
    for describe in (
        *(train_on_rows, train_rlhf, evaluate_training_rows, evaluate_rows, evaluate_rlhf),
        *(generate_responses, score_responses),
    )
}


def job_workload(
    spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float = 0
) -> Workload | None:
    """Return the workload of a job; None if the job needs no GPU.

    gpu_memory: Bytes of a GPU; 0 on CPUs.

    Raises:
        InputError: The size of its model is unknown.
    """
    name = RULES[spec["rule"]].workload
    if name is None:
        return None
    describe = WORKLOADS[name]
    workload = describe(JobSizes(spec, placement, plan, gpu_memory))
    if workload and workload.generations and gpu_memory and placement.generate_tokens is None:
        _, memory = peak_memory(workload, placement, gpu_memory)
        if sum(memory.values()) > gpu_memory * USABLE_MEMORY:
            # A batch that samples is smaller where less memory is free.
            smallest = replace(placement, generate_tokens=placement.micro_batch_tokens)
            return describe(JobSizes(spec, smallest, plan, gpu_memory))
    return workload
