"""The workloads of jobs that train models."""

from snakechat.planning import compute_time
from snakechat.planning.activation_memory import POLICY, SCORE, SFT
from snakechat.planning.job_sizes import (
    JobSizes,
    forward_flops,
    product,
    training_flops,
    with_responses,
)
from snakechat.planning.memory import TrainedModel
from snakechat.planning.workload import Generation, Workload


def train_sft(job: JobSizes) -> Workload:
    """Return the workload of supervised fine-tuning."""
    tokens, model = job.tokens(), job.model("model", SFT, lora="lora")
    flops = product(job.rows_trained(tokens), training_flops(model, tokens))
    return Workload(
        trained=[TrainedModel(model, job.placement.zero_stage)],
        frozen=[],
        largest=job.micro_batch(tokens.longest, tokens.longest - 1),
        flops=flops,
        lora_flops=flops if model.lora_rank else 0,
        notes=tuple(tokens.notes),
    )


def train_on_pairs(job: JobSizes, loss: str) -> Workload:
    """Return the workload of a reward model (loss SCORE) or of DPO (POLICY)."""
    tokens, model = job.tokens(), job.model("model", loss, lora="lora")
    flops = product(job.rows_trained(tokens), training_flops(model, tokens))
    return Workload(
        trained=[TrainedModel(model, job.placement.zero_stage)],
        frozen=[],
        largest=job.micro_batch(tokens.longest, tokens.longest // 2),
        flops=flops,
        lora_flops=flops if model.lora_rank else 0,
        notes=tuple(tokens.notes),
    )


def train_rlhf(job: JobSizes) -> Workload:
    """Return the workload of PPO, RLOO, GRPO or distillation."""
    settings, prompts, zero_stage = job.settings, job.tokens(), job.placement.zero_stage
    num_generations, response_length = settings["num_generations"], settings["max_response_length"]
    tokens = with_responses(prompts, num_generations, response_length)
    is_distilled = settings["algorithm"] == "distill"
    actor = job.model("actor", POLICY, lora="lora")
    reference = job.model("teacher" if is_distilled else "actor", POLICY)
    trained = [TrainedModel(actor, zero_stage)]
    rewards = [job.model(name, SCORE) for name in job.scorers("reward")]
    frozen = list(rewards)
    # Without its adapters, the actor is the reference model; a teacher is another one.
    if is_distilled or actor.lora_rank == 0 or actor.train_base != "none":
        frozen.append(reference)
    if settings["algorithm"] == "ppo":
        critic = job.model(job.critic_origin(), SCORE, lora="critic_lora")
        critic_stage = job.placement.critic_zero_stage
        trained.append(TrainedModel(critic, zero_stage if critic_stage is None else critic_stage))
    evaluated = [entry.model for entry in trained] + [reference] + rewards
    flops = [forward_flops(model, tokens) for model in evaluated]
    updates = [settings["ppo_epochs"] * training_flops(entry.model, tokens) for entry in trained]
    lora_flops = sum(
        each for each, entry in zip(updates, trained, strict=True) if entry.model.lora_rank
    )
    flops += updates
    # Generation runs the actor on each prompt once more.
    flops.append(compute_time.inference_flops(actor, prompts.prompt, prompts.prompt))
    num_prompts = job.rows_trained(prompts)
    responses = settings["rollout_batch_size"] * num_generations
    shape = job.generation_batch(actor, prompts, response_length, responses)
    generations: tuple[Generation, ...] = ()
    if num_prompts is not None:
        generations = (job.generation(actor, num_prompts * num_generations, shape),)
    return Workload(
        trained=trained,
        frozen=frozen,
        largest=job.micro_batch(tokens.longest, num_generations * response_length),
        flops=product(num_prompts, sum(flops)),
        lora_flops=product(num_prompts, lora_flops),
        generation=shape,
        vllm_ranks=job.vllm_ranks(),
        generations=generations,
        ema=settings["ema_decay"] > 0,
        notes=(*prompts.notes, f"assumed: responses of {response_length} tokens, the limit"),
    )
