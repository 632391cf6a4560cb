"""Train a chat model on scores of its own responses: by PPO, or without a critic by RLOO or GRPO.

Each step: (1) sample responses to some prompts, (2) score them, (3) take the log-probabilities of
actor and reference and the values of the critic, (4) make rewards, advantages and returns of them,
(5) update actor and critic. Mathematics: snakechat/algorithms/ppo.py. Reference: the SFT model, frozen. Critic: the
reward model to begin with.

Each process of a job makes its share of the responses and of the passes, and knows the whole step.
"""

import contextlib
import json
import math
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from snakechat.algorithms import ppo
from snakechat.algorithms.kl_controller import KLController
from snakechat.algorithms.reward_functions import RewardFunctions
from snakechat.algorithms.rollouts import Rollouts, ask
from snakechat.algorithms.sanity_checks import (
    check_first,
    check_probes,
    check_responses,
    check_tokenizers,
    shared_prompts,
)
from snakechat.algorithms.scoring import Scoring
from snakechat.data.tokenizers import load_tokenizer
from snakechat.data.tokens import Ragged
from snakechat.modeling.batching import Examples, global_batches, num_steps
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.generation import make_sampler
from snakechat.modeling.lora import add_lora, disable_adapters
from snakechat.modeling.models import check_sequence_length, load_causal, load_scorer, save_model, model_size
from snakechat.reporting.model_card import write_card
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.ema import Ema
from snakechat.training.engine import FrozenModel, make_engine, step_engines
from snakechat.training.metrics import StepTimer, MetricsLogger
from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed as ranks
from snakechat.workflow.job import run

# How responses to one prompt are compared where there is no critic.
COMPARED = {"rloo": ppo.rloo_advantages, "grpo": ppo.grpo_advantages}
# Prompts of a step whose responses are kept to be read.
KEPT_PROMPTS = 8


def main(job):
    """Data, models, loop, save."""
    settings, placement = job.settings, job.placement
    max_tokens = placement["micro_batch_tokens"]
    device = init_process_group(placement)
    torch.manual_seed(settings.seed)

    prompts = Ragged(job.inputs["tokens"], "train.prompt")
    job.facts["shared_prompts"] = shared_prompts(prompts, job.inputs)
    ptx = Examples.read(job.inputs["ptx"], "train", "chosen") if settings.ptx else None

    tokenizer = load_tokenizer(job.inputs["actor"])
    actor, reference = load_actor(job, tokenizer, device)
    reward = load_reward(job, tokenizer, device) if "reward" in job.inputs else None
    scoring = Scoring(settings, reward, RewardFunctions(settings.reward_functions))
    critic = load_critic(job, tokenizer, device) if settings.algorithm == "ppo" else None
    trained = {"actor": actor}
    if critic:
        trained["critic"], critic.normalizer = critic, scoring.critic_units
    for module in trained.values():
        check_sequence_length(module.model, settings.max_prompt_length + settings.max_response_length)
    job.record["models"] = {name: model_size(module.model) for name, module in trained.items()}
    sampler = make_sampler(settings, tokenizer, max_tokens, job.inputs["actor"])

    batches = list(
        global_batches(len(prompts), settings.rollout_batch_size, settings.epochs, settings.seed)
    )
    minibatch_size = settings.global_batch_size // settings.num_generations
    updates = [num_steps(len(rows), minibatch_size, settings.ppo_epochs) for rows in batches]
    rate, actor_updates = settings.actor_learning_rate, sum(updates[settings.critic_warmup_steps :])
    actor_engine = make_engine(actor, settings, rate, actor_updates, placement)
    critic_engine = critic and make_critic_engine(critic, settings, sum(updates), placement)
    ema = Ema(actor_engine, settings.ema_decay) if settings.ema_decay else None
    kl_controller = KLController(settings)
    parts = {"actor": actor_engine, "critic": critic_engine, "ema": ema}
    parts |= {"scoring": scoring, "kl_controller": kl_controller}

    # Models are alike in all processes; what they sample is not.
    torch.manual_seed(settings.seed + ranks.rank())
    timer, unended = StepTimer(device), 0
    training = Checkpointer(job, **{name: part for name, part in parts.items() if part})
    with MetricsLogger(job, len(batches)) as logger:
        for step, rows in training.steps(batches):
            # 1. Responses.
            asked = [prompts[row] for row in rows]
            with timer("generate"), actor_engine.gathered_weights():
                sampler.update(actor.model)
                responses, told = ask(sampler, asked, settings)
            rollouts = Rollouts(
                asked, responses, tokenizer, settings.temperature, max_tokens, device
            )
            mask = rollouts.response_mask
            unended = check_responses(rollouts, unended, step)

            with timer("score"):
                # 2. Scores.
                scores = scoring.scores(rollouts, step, rows)
                final_scores = scoring.final(scores, rollouts.ended)

                # 3. Log-probabilities and values of each token of the responses.
                logprobs, entropies = rollouts.logprobs_and_entropies(actor)
                with reference() as ref:
                    ref_logprobs = rollouts.logprobs(ref)
                values = rollouts.values(critic) if critic else None

            # 4. Rewards, advantages, returns.
            kl_coef = kl_controller.coef
            in_rewards = kl_coef if settings.kl_in == "rewards" else 0.0
            rewards = ppo.token_rewards(final_scores, logprobs, ref_logprobs, mask, in_rewards)
            returns = None
            if critic:
                advantages, returns = ppo.gae(
                    rewards, values, mask, settings.gamma, settings.gae_lambda
                )
            else:
                sums = rewards.sum(dim=1).view(settings.num_generations, -1)
                advantages = COMPARED[settings.algorithm](sums).view(-1, 1) * mask
            if settings.whiten_advantages:
                advantages = ppo.whiten(advantages, mask)
            weights, sampler_figures = torch.ones_like(logprobs), {}
            if told is not None:
                sampled = rollouts.table(told)
                weights = ppo.importance_weights(logprobs, sampled, settings.importance_sampling_cap)
                difference = ppo.masked_mean((logprobs - sampled).abs(), mask)
                sampler_figures["policy/sampler_difference"] = difference.item()

            # 5. Updates.
            experience = Experience(logprobs, ref_logprobs, advantages, weights, values, returns)
            updates = []
            with timer("train"):
                for number, minibatch in enumerate(
                    global_batches(
                        len(rows), minibatch_size, settings.ppo_epochs, settings.seed + step
                    )
                ):
                    engines, found = {}, {}
                    if step > settings.critic_warmup_steps:
                        engines["policy"] = actor_engine
                        text = draw(ptx, settings, step, number) if ptx else None
                        found |= learn_policy(
                            actor_engine, rollouts, minibatch, experience, kl_coef, settings, text
                        )
                        if number == 0:
                            check_first(found, settings.dtype, step)
                    if critic:
                        engines["value"] = critic_engine
                        found |= learn_values(
                            critic_engine, rollouts, minibatch, experience, settings
                        )
                    step_engines(*engines.values(), align_overflow=settings.align_overflow)
                    if ema and "policy" in engines:
                        ema.update()
                    for part, engine in engines.items():
                        found |= {f"{part}/{name}": value for name, value in engine.metrics.items()}
                    updates.append(found)
                    if found.get("policy/approxkl", 0.0) > (settings.max_approx_kl or math.inf):
                        break

            kl = ((logprobs - ref_logprobs) * mask).sum(dim=1)
            kl_controller.update(kl.mean().item(), len(kl))
            figures = {
                "objective/scores": scores.mean().item(),
                "objective/kl": kl.mean().item(),
                "objective/kl_coef": kl_coef,
                "objective/rlhf_reward": rewards.sum(dim=1).mean().item(),
                "objective/entropy": ppo.masked_mean(entropies, mask).item(),
                **rollouts.figures(),
                **sampler_figures,
                **means(updates),
            }
            if critic:
                figures["value/explained_var"] = ppo.explained_variance(values, returns, mask)
            if step > settings.critic_warmup_steps:
                for name in ("ratio", "approxkl", "clipfrac"):
                    figures[f"policy/first_{name}"] = updates[0][f"policy/{name}"]
            logger.log(step, ["objective/scores", "objective/kl"], rows, **figures)
            logger.log_times(step, timer.seconds, int(rollouts.lengths.sum()), responses=len(kl))
            job.record["seconds_by_section"] = timer.medians()
            if step % settings.log_responses_steps == 0 or step == 1:
                keep_samples(job, step, rollouts, scores, kl)
    sampler.close()

    with actor_engine.gathered_weights():
        save_model(actor.model, tokenizer, job.result)
    if ema:
        with ema.average_weights(), actor_engine.gathered_weights():
            save_model(actor.model, tokenizer, job.result / "ema")
    write_card(job)


class Experience(NamedTuple):
    """What updates learn from: tables [B, R]. Without a critic there are no values and returns."""

    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor | None
    returns: torch.Tensor | None

    def at(self, group, mask):
        """The tokens [N] of a pass, whose responses [b] have the mask [b, R]."""
        return Experience(*(table if table is None else table[group][mask] for table in self))


def learn_policy(engine, rollouts, rows, experience, kl_coef, settings, text=None):
    """Gradients of the actor from the responses to some prompts; returns means over tokens.

    text: Examples whose language modelling loss is added, settings.ptx_coef times.
    """
    num_tokens, names = rollouts.num_tokens(rows), ("loss", "kl", "ratio", "approxkl", "clipfrac")
    sums = torch.zeros(len(names), device=rollouts.device)
    for micro_batch, group, mask in rollouts.micro_batches(rows, engine.module.supports_packing):
        old = experience.at(group, mask)
        logprobs = engine(micro_batch.batch, settings.temperature)
        losses = old.weights * ppo.policy_loss(
            logprobs, old.logprobs, old.advantages, settings.clip_range
        )
        penalties = ppo.kl_penalty(logprobs, old.ref_logprobs)
        if settings.kl_in == "loss":
            losses = losses + kl_coef * penalties
        loss = micro_batch.counted / num_tokens * losses.sum()
        engine.backward(loss, micro_batch.is_last and text is None)
        statistics = ppo.ratio_statistics(logprobs.detach(), old.logprobs, settings.clip_range)
        found = [loss.detach(), penalties.detach().sum() / num_tokens]
        found += [statistics[name] / num_tokens for name in names[2:]]
        sums += micro_batch.counted * torch.stack(found)
    means = dict(zip(names, ranks.all_reduce_sum(sums).tolist(), strict=True))
    figures = {f"policy/{name}": value for name, value in means.items()}
    if text:
        figures["ptx/loss"] = learn_text(engine, text, rollouts.max_tokens, settings.ptx_coef)
    return figures


def learn_text(engine, text, max_tokens, coef):
    """A step's last gradients, of coef times the language modelling loss of text; returns that."""
    num_tokens = int(text.num_tokens(with_prompts=True).sum())
    device = next(engine.module.parameters()).device
    loss_sum = torch.zeros((), device=device)
    for micro_batch in text.micro_batches(
        np.arange(len(text)), max_tokens, engine.module.supports_packing, device, with_prompts=True
    ):
        loss = -micro_batch.counted / num_tokens * engine(micro_batch.batch, return_sum=True)
        engine.backward(coef * loss, micro_batch.is_last)
        loss_sum += loss.detach()
    return ranks.all_reduce_sum(loss_sum).item()


def learn_values(engine, rollouts, rows, experience, settings):
    """Gradients of the critic, as learn_policy."""
    num_tokens = rollouts.num_tokens(rows)
    sums = torch.zeros(2, device=rollouts.device)
    for micro_batch, group, mask in rollouts.micro_batches(rows, engine.module.supports_packing):
        old = experience.at(group, mask)
        values = engine(micro_batch.batch, micro_batch.batch.state_index)
        losses = ppo.value_loss(values, old.values, old.returns, settings.value_clip_range)
        loss = micro_batch.counted / num_tokens * losses.sum()
        engine.backward(loss, micro_batch.is_last)
        statistics = ppo.value_statistics(values.detach(), old.values, settings.value_clip_range)
        clipped = statistics["clipfrac"] / num_tokens
        sums += micro_batch.counted * torch.stack([loss.detach(), clipped])
    loss, clipped = ranks.all_reduce_sum(sums).tolist()
    return {"value/loss": loss, "value/clipfrac": clipped}


def means(updates):
    """Means of what updates found, by name: of those that have found it (fp16 leaves some out)."""
    names = dict.fromkeys(name for figures in updates for name in figures)
    values = {name: [figures[name] for figures in updates] for name in names}
    values = {name: [v for v in found if v is not None] for name, found in values.items()}
    return {name: float(np.mean(found)) for name, found in values.items() if found}


def draw(ptx, settings, step, number):
    """Rows of text for an update of a step, as many as it has responses."""
    random = np.random.default_rng([settings.seed, step, number])
    rows = random.choice(len(ptx), min(settings.global_batch_size, len(ptx)), replace=False)
    return ptx.select(rows)


def keep_samples(job, step, rollouts, scores, kl):
    """Add responses to the first prompts of a step to responses.jsonl. The first process does."""
    if ranks.rank() > 0:
        return
    with open(job.result / "responses.jsonl", "a") as file:
        for row, (prompt, response) in enumerate(zip(*rollouts.texts(), strict=True)):
            if row % len(rollouts.examples) < KEPT_PROMPTS:
                line = {"step": step, "prompt": prompt, "response": response}
                line |= {"score": scores[row].item(), "kl": kl[row].item()}
                file.write(json.dumps(line) + "\n")


def load_actor(job, tokenizer, device):
    """The actor, and its reference: a function of no arguments, whose context has a Policy."""
    settings, folder = job.settings, job.inputs["actor"]
    actor = load_causal(folder, settings.dtype, tokenizer)
    if settings.lora_rank:
        actor = add_lora(actor, settings.lora_rank, settings.lora_alpha, settings.train_base)
    actor = Policy(actor).to(device)
    if settings.lora_rank and settings.train_base == "none":
        # Without its adapters it is the SFT model: no second copy.
        return actor, partial(bare, actor)
    ref = Policy(load_causal(folder, settings.dtype, tokenizer))
    return actor, FrozenModel(ref, device, rests(job)).on_device


@contextlib.contextmanager
def bare(actor):
    """The actor without its adapters."""
    with disable_adapters(actor.model):
        yield actor


def load_reward(job, tokenizer, device):
    """The reward model, Frozen, once it has shown that it fits and scores as it did."""
    folder = job.inputs["reward"]
    check_tokenizers(tokenizer, load_tokenizer(folder), (job.inputs["actor"], folder))
    scorer = Scorer(load_scorer(folder, job.settings.dtype, tokenizer))
    reward = FrozenModel(scorer, device, rests(job))
    with reward.on_device():
        max_tokens = job.placement["micro_batch_tokens"]
        check_probes(scorer, folder, job.inputs["tokens.reward"], max_tokens)
    return reward


def rests(job):
    """Whether reference and reward model are in the CPU's memory while they have nothing to do."""
    return job.placement.get("offload_frozen", False)


def load_critic(job, tokenizer, device):
    """The critic: the reward model, or where there is none the actor with a new head."""
    settings = job.settings
    folder = job.inputs.get("reward", job.inputs["actor"])
    model = load_scorer(folder, settings.dtype, tokenizer, new_head="reward" not in job.inputs)
    if settings.critic_lora_rank:
        model = add_lora(model, settings.critic_lora_rank, settings.critic_lora_alpha)
    return Scorer(model).to(device)


def make_critic_engine(critic, settings, num_steps, placement):
    """The engine of the critic, which has a ZeRO stage and a rate of adapters of its own."""
    own = vars(settings) | {"lora_learning_rate": settings.critic_lora_learning_rate}
    stage = placement.get("critic_zero_stage", placement["zero_stage"])
    return make_engine(
        critic,
        SimpleNamespace(**own),
        settings.critic_learning_rate,
        num_steps,
        {**placement, "zero_stage": stage},
    )


if __name__ == "__main__":
    run(main)
