"""The workloads of jobs that train models."""

from snakechat.planning.activation_memory import POLICY, SCORE, SFT
from snakechat.planning.compute_time import forward_flops, training_flops
from snakechat.planning.job_sizes import JobSizes, with_responses
from snakechat.planning.workload import LoadedModel, Workload
from snakechat.training.zero_stages import stage_used


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
