"""The workload of each kind of job, from its spec."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from snakechat.evaluation.comparisons import compared_inputs, initial_model
from snakechat.jobs.plan import Plan
from snakechat.planning.activation_memory import POLICY, SCORE, SFT, ModelSpec
from snakechat.planning.compute_time import forward_flops, training_flops
from snakechat.planning.job_sizes import JobSizes, with_responses
from snakechat.planning.memory import USABLE_MEMORY, peak_memory
from snakechat.planning.token_counts import TokenCounts
from snakechat.planning.workload import LoadedModel, Workload
from snakechat.training.zero_stages import stage_used
from snakechat.workflow.placement import Placement

# --- training -----------------------------------------------------------------------------------


def train_on_rows(job: JobSizes, loss: str) -> Workload:
    """Return the workload of SFT (loss SFT), a reward model (SCORE) or DPO (POLICY)."""
    tokens, model = job.tokens(), job.model("model", loss, lora="lora")
    flops = job.rows_trained(tokens) * training_flops(model, tokens.per_row)
    num_targets = tokens.longest - 1 if loss == SFT else tokens.longest // 2
    return Workload(
        trained=[LoadedModel(model, stage_used(job.placement.zero_stage, model.dtype))],
        frozen=[],
        largest=job.micro_batch(tokens.longest, num_targets),
        flops=flops,
        lora_flops=flops if model.lora_rank else 0,
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
    updates = {
        model: settings["ppo_epochs"] * training_flops(model, tokens.per_row) for model in models
    }
    # Generation runs the actor on each prompt once more.
    flops = sum(updates.values()) + forward_flops(actor, prompts.prompt)
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
        lora_flops=num_prompts * sum(updates[model] for model in models if model.lora_rank),
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


def compute_reference(job: JobSizes) -> Workload:
    """Return the workload of the log-probabilities of DPO's reference model."""
    return forward_passes(job, [job.model("model", POLICY)], job.tokens())


def evaluate_rows(job: JobSizes, loss: str, dtype: str | None = None) -> Workload:
    """Return the workload of evaluating a model, and its base model if any, on held-out rows."""
    models = [job.model(key, loss, dtype) for key in ("base", "model") if key in job.inputs]
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


TRAININGS: dict[str, Callable[[JobSizes], Workload]] = {
    "train_sft": partial(train_on_rows, loss=SFT),
    "train_reward": partial(train_on_rows, loss=SCORE),
    "train_dpo": partial(train_on_rows, loss=POLICY),
    "train_rlhf": train_rlhf,
}
# Jobs with prompt sets, which are short, have no estimate.
WORKLOADS: dict[str, Callable[[JobSizes], Workload | None]] = {
    **TRAININGS,
    "generate_responses": generate_responses,
    "score_responses": score_responses,
    "compute_reference": compute_reference,
    "evaluate_sft": partial(evaluate_rows, loss=POLICY),
    "evaluate_reward": partial(evaluate_rows, loss=SCORE, dtype="fp32"),
    "evaluate_dpo": partial(evaluate_rows, loss=POLICY, dtype="fp32"),
    "evaluate_rlhf": evaluate_rlhf,
}


def job_workload(
    spec: Mapping[str, Any], placement: Placement, plan: Plan, gpu_memory: float = 0
) -> Workload | None:
    """Return the workload of a job; None if the job needs no GPU.

    gpu_memory: Bytes of a GPU; 0 on CPUs.

    Raises:
        InputError: The size of its model is unknown.
    """
    describe = WORKLOADS.get(spec["rule"])
    if describe is None:
        return None
    workload = describe(JobSizes(spec, placement, plan, gpu_memory))
    if workload and workload.generations and gpu_memory and placement.generate_tokens is None:
        _, memory = peak_memory(workload, placement, gpu_memory)
        if sum(memory.values()) > gpu_memory * USABLE_MEMORY:
            # A batch that samples is smaller where less memory is free.
            smallest = replace(placement, generate_tokens=placement.micro_batch_tokens)
            return describe(JobSizes(spec, smallest, plan, gpu_memory))
    return workload
