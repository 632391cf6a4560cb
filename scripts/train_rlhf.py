"""Train a chat model on the reward model's scores by PPO.

Each step: (1) sample a response to each prompt, (2) score it, (3) take the log-probabilities of
actor and reference and the values of the critic, (4) make rewards, advantages and returns of them,
(5) update actor and critic. Mathematics: rlhf/ppo.py. Reference: the SFT model, frozen. Critic: the
reward model to begin with.
"""

import numpy as np
import torch

from rlhf import ppo, ranks
from rlhf.batches import Examples, global_batches, num_steps
from rlhf.card import write_card
from rlhf.engine import make_engine, start
from rlhf.generate import sample_responses
from rlhf.job import InputError, run
from rlhf.lora import add_lora
from rlhf.metrics import StepLog
from rlhf.models import check_length, load_causal, load_scorer, save_model, size_of
from rlhf.passes import Policy, Scorer, answer_scores
from rlhf.resume import Resumable
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Data, models, loop, save."""
    settings, placement = job.settings, job.placement
    if ranks.world_size() > 1:
        raise InputError("PPO runs in one process: set nodes and gpus_per_node to 1")
    device = start(placement)
    torch.manual_seed(settings.seed)

    prompts = Ragged(job.inputs["tokens"], "train.prompt")
    tokenizer = load_tokenizer(job.inputs["actor"])
    if tokenizer.get_vocab() != load_tokenizer(job.inputs["reward"]).get_vocab():
        raise InputError(
            f"{job.inputs['actor']} and {job.inputs['reward']} have different tokenizers:"
            " a reward model can only score tokens that it knows"
        )

    actor = load_causal(job.inputs["actor"], settings.dtype, tokenizer)
    if settings.lora_rank:
        actor = add_lora(actor, settings.lora_rank, settings.lora_alpha, settings.train_base)
    actor = Policy(actor).to(device)
    critic = Scorer(load_scorer(job.inputs["reward"], settings.dtype, tokenizer)).to(device)
    ref = Policy(load_causal(job.inputs["actor"], settings.dtype, tokenizer)).to(device)
    reward = Scorer(load_scorer(job.inputs["reward"], settings.dtype, tokenizer)).to(device)
    job.record["models"] = {"actor": size_of(actor.model), "critic": size_of(critic.model)}

    for module in (actor, critic):
        check_length(module.model, settings.max_prompt_length + settings.max_response_length)

    steps = num_steps(len(prompts), settings.rollout_batch_size, settings.epochs)
    updates = sum(
        num_steps(len(rows), settings.global_batch_size, settings.ppo_epochs)
        for rows in global_batches(len(prompts), settings.rollout_batch_size, settings.epochs, 0)
    )
    actor_engine = make_engine(actor, settings, settings.actor_learning_rate, updates, placement)
    critic_engine = make_engine(critic, settings, settings.critic_learning_rate, updates, placement)
    rollouts = Rollouts(settings, placement, tokenizer, device)

    batches = global_batches(
        len(prompts), settings.rollout_batch_size, settings.epochs, settings.seed
    )
    training = Resumable(
        job, actor=actor_engine, critic=critic_engine, standardizer=critic.standardizer
    )
    with StepLog(job, steps) as log:
        for step, rows in training.steps(batches):
            # 1. Responses.
            with actor_engine.whole_weights():
                rollouts.sample(actor.model, [prompts[row] for row in rows])

            # 2. Scores.
            scores = rollouts.scores(reward)
            if step == 1 and settings.standardize_scores:
                critic.standardizer.fit(scores)
            clipped = critic.standardizer(scores).clamp(-settings.score_clip, settings.score_clip)

            # 3. Log-probabilities and values of each token of the responses.
            with torch.no_grad():
                logprobs, entropies = rollouts.logprobs(actor, entropies=True)
                ref_logprobs = rollouts.logprobs(ref)
                values = rollouts.values(critic)

            # 4. Rewards, advantages, returns.
            mask = rollouts.response_mask
            rewards = ppo.token_rewards(clipped, logprobs, ref_logprobs, mask, settings.kl_coef)
            advantages, returns = ppo.gae(
                rewards, values, mask, settings.gamma, settings.gae_lambda
            )
            if settings.whiten_advantages:
                advantages = ppo.whiten(advantages, mask)

            # 5. Updates.
            experience = (logprobs, values, advantages, returns)
            minibatches = global_batches(
                len(rows), settings.global_batch_size, settings.ppo_epochs, settings.seed + step
            )
            updated = [
                update(rollouts, experience, minibatch, actor_engine, critic_engine, settings)
                for minibatch in minibatches
            ]

            kl = ((logprobs - ref_logprobs) * mask).sum(dim=1)
            figures = {
                "objective/scores": scores.mean().item(),
                "objective/kl": kl.mean().item(),
                "objective/rlhf_reward": rewards.sum(dim=1).mean().item(),
                "objective/entropy": ppo.masked_mean(entropies, mask).item(),
                "value/explained_variance": ppo.explained_variance(values, returns, mask),
                "response/length": mask.sum(dim=1).float().mean().item(),
                "response/ended_by_eos": float(np.mean(rollouts.ended)),
            }
            for name, engine in (("policy", actor_engine), ("value", critic_engine)):
                figures |= {f"{name}/{key}": value for key, value in engine.figures.items()}
            for name in updated[0]:
                figures[name] = float(np.mean([u[name] for u in updated]))
            # Before the first update of a step the ratio is 1 and nothing is clipped.
            for name in ("ratio", "approx_kl", "clip_fraction"):
                figures[f"policy/first_{name}"] = updated[0][f"policy/{name}"]
            log.write(step, ["objective/scores", "objective/kl"], rows, **figures)

    with actor_engine.whole_weights():
        save_model(actor.model, tokenizer, job.result)
    write_card(job)


def update(rollouts, experience, rows, actor_engine, critic_engine, settings):
    """One optimizer step of actor and critic on some rollouts; returns means over their tokens.

    experience: old log-probabilities, old values, advantages and returns of all rollouts [B, R].
    """
    num_tokens = int(rollouts.response_mask[rows].sum())
    sums = dict.fromkeys(("policy/loss", "value/loss"), 0.0)
    sums |= dict.fromkeys(("policy/ratio", "policy/approx_kl", "policy/clip_fraction"), 0.0)
    for part, mask in rollouts.passes(rows, actor_engine.module.packs):
        old_logprobs, old_values, advantages, returns = (x[part.rows][mask] for x in experience)

        logprobs = actor_engine(part.grid, settings.temperature)
        losses = ppo.policy_loss(logprobs, old_logprobs, advantages, settings.clip_range)
        policy_loss = losses.sum() / num_tokens
        actor_engine.backward(policy_loss, part.last)

        values = critic_engine(part.grid, part.grid.before)
        losses = ppo.value_loss(values, old_values, returns, settings.value_clip_range)
        value_loss = losses.sum() / num_tokens
        critic_engine.backward(value_loss, part.last)

        sums["policy/loss"] += policy_loss.item()
        sums["value/loss"] += value_loss.item()
        statistics = ppo.ratio_statistics(logprobs.detach(), old_logprobs, settings.clip_range)
        for name, value in statistics.items():
            sums[f"policy/{name}"] += value / num_tokens
    return sums


class Rollouts:
    """The prompts and responses of a step, and what the models say of them: tensors [B, R]."""

    def __init__(self, settings, placement, tokenizer, device):
        self.settings = settings
        self.max_tokens = placement["micro_batch_tokens"]
        self.tokenizer = tokenizer
        self.device = device

    def sample(self, model, prompts):
        """Have the actor answer the prompts."""
        settings = self.settings
        responses = sample_responses(
            model,
            prompts,
            self.tokenizer,
            settings.max_response_length,
            settings.temperature,
            self.max_tokens,
        )
        self.examples = Examples(prompts, responses)
        self.ended = [response[-1] == self.tokenizer.eos_token_id for response in responses]
        [lengths] = self.examples.answer_lengths
        places = torch.arange(lengths.max())
        self.response_mask = (places < torch.from_numpy(lengths)[:, None]).to(self.device)

    def passes(self, rows, packs):
        """The passes over some rows, each with the response_mask [b, R] of its rows."""
        for part in self.examples.passes(rows, self.max_tokens, packs, self.device):
            yield part, self.response_mask[part.rows]

    def scores(self, reward):
        """The reward model's score of each response [B]."""
        [scores] = answer_scores(reward, self.examples, self.max_tokens)
        return torch.from_numpy(scores).float().to(self.device)

    def logprobs(self, policy, entropies=False):
        """Log-probability of each response token [B, R]; with entropies, a pair of such tables."""
        temperature = self.settings.temperature
        if entropies:
            return self.tables(policy, lambda grid: policy(grid, temperature, entropies=True))
        return self.tables(policy, lambda grid: (policy(grid, temperature),))[0]

    def values(self, critic):
        """The critic's value before each response token [B, R]."""
        return self.tables(critic, lambda grid: (critic(grid, grid.before),))[0]

    def tables(self, module, look):
        """What a function of a grid finds at the response tokens, as tables [B, R]."""
        rows = np.arange(len(self.examples))
        parts = [
            (part.rows, mask, look(part.grid)) for part, mask in self.passes(rows, module.packs)
        ]
        tables = [torch.zeros(self.response_mask.shape, device=self.device) for _ in parts[0][2]]
        for group, mask, found in parts:
            for table, values in zip(tables, found, strict=True):
                table[group] = table[group].masked_scatter(mask, values)
        return tables


if __name__ == "__main__":
    run(main)
