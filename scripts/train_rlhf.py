"""Train a chat model on the reward model's scores by PPO.

Each step: (1) sample a response to each prompt, (2) score it, (3) take the log-probabilities of
actor and reference and the values of the critic, (4) make rewards, advantages and returns of them,
(5) update actor and critic. Mathematics: rlhf/ppo.py. Reference: the SFT model, frozen. Critic: the
reward model to begin with.
"""

import numpy as np
import torch

from rlhf import ppo
from rlhf.batches import global_batches, micro_batches, num_steps, pad, span_mask
from rlhf.card import write_card
from rlhf.engine import Engine, start
from rlhf.generate import sample_responses
from rlhf.job import InputError, run
from rlhf.metrics import StepLog
from rlhf.models import add_lora, load_causal, load_scorer, save_model
from rlhf.passes import Policy, Scorer, score_last_tokens
from rlhf.resume import Resumable
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Data, models, loop, save."""
    settings, placement = job.settings, job.placement
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
        actor = add_lora(actor, settings.lora_rank, settings.lora_alpha)
    actor = Policy(actor).to(device)
    critic = Scorer(load_scorer(job.inputs["reward"], settings.dtype, tokenizer)).to(device)
    ref = Policy(load_causal(job.inputs["actor"], settings.dtype, tokenizer)).to(device).eval()
    reward = Scorer(load_scorer(job.inputs["reward"], settings.dtype, tokenizer)).to(device).eval()

    steps = num_steps(len(prompts), settings.rollout_batch_size, settings.epochs)
    updates = sum(
        num_steps(len(rows), settings.global_batch_size, settings.ppo_epochs)
        for rows in global_batches(len(prompts), settings.rollout_batch_size, settings.epochs, 0)
    )
    actor_engine = Engine(actor, settings, settings.actor_learning_rate, updates, placement)
    critic_engine = Engine(critic, settings, settings.critic_learning_rate, updates, placement)
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
            rollouts.sample(actor.causal, [prompts[row] for row in rows])

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
            for name in updated[0]:
                figures[name] = float(np.mean([u[name] for u in updated]))
            # Before the first update of a step the ratio is 1 and nothing is clipped.
            for name in ("ratio", "approx_kl", "clip_fraction"):
                figures[f"policy/first_{name}"] = updated[0][f"policy/{name}"]
            log.write(step, ["objective/scores", "objective/kl"], **figures)

    save_model(actor.model, tokenizer, job.result)
    write_card(job)


def update(rollouts, experience, rows, actor_engine, critic_engine, settings):
    """One optimizer step of actor and critic on some rollouts; returns means over their tokens.

    experience: old log-probabilities, old values, advantages and returns of all rollouts [B, R].
    """
    num_tokens = int(rollouts.response_mask[rows].sum())
    sums = dict.fromkeys(("policy/loss", "value/loss"), 0.0)
    sums |= dict.fromkeys(("policy/ratio", "policy/approx_kl", "policy/clip_fraction"), 0.0)
    passes = list(rollouts.passes(rows))
    for number, (group, batch) in enumerate(passes, start=1):
        input_ids, attention_mask, tokens, states, mask = batch
        old_logprobs, old_values, advantages, returns = (x[group][mask] for x in experience)
        last = number == len(passes)

        logprobs = actor_engine(input_ids, attention_mask, tokens, settings.temperature)
        losses = ppo.policy_loss(logprobs, old_logprobs, advantages, settings.clip_range)
        policy_loss = losses.sum() / num_tokens
        actor_engine.backward(policy_loss, last)

        values = critic_engine(input_ids, attention_mask, states)
        losses = ppo.value_loss(values, old_values, returns, settings.value_clip_range)
        value_loss = losses.sum() / num_tokens
        critic_engine.backward(value_loss, last)

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

    def sample(self, causal, prompts):
        """Have the actor answer the prompts."""
        settings = self.settings
        responses = sample_responses(
            causal,
            prompts,
            self.tokenizer,
            settings.max_response_length,
            settings.temperature,
            self.max_tokens,
        )
        self.starts = [len(prompt) for prompt in prompts]
        self.sequences = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
        self.ended = [response[-1] == self.tokenizer.eos_token_id for response in responses]
        lengths = [len(response) for response in responses]
        self.response_mask = span_mask([0] * len(lengths), lengths, max(lengths), self.device)

    def passes(self, rows=None):
        """Rows of each pass, and its tensors.

        The tensors: input_ids, attention_mask, the response tokens, the states before them (all
        [b, T]) and response_mask [b, R].
        """
        rows = range(len(self.sequences)) if rows is None else rows
        lengths = [len(self.sequences[row]) for row in rows]
        for group in micro_batches(rows, lengths, self.max_tokens):
            sequences = [self.sequences[row] for row in group]
            input_ids, attention_mask = pad(sequences, self.tokenizer.pad_token_id, self.device)
            starts, ends = [self.starts[row] for row in group], [len(s) for s in sequences]
            width = input_ids.shape[1]
            tokens = span_mask(starts, ends, width, self.device)
            before = [start - 1 for start in starts], [end - 1 for end in ends]
            states = span_mask(*before, width, self.device)
            yield group, (input_ids, attention_mask, tokens, states, self.response_mask[group])

    def scores(self, reward):
        """The reward model's score of each response [B]."""
        pad_id = self.tokenizer.pad_token_id
        return score_last_tokens(reward, self.sequences, pad_id, self.max_tokens)

    def logprobs(self, policy, entropies=False):
        """Log-probability of each response token [B, R]; with entropies, a pair of such tables."""
        temperature = self.settings.temperature

        def look(input_ids, attention_mask, tokens, states):
            found = policy(input_ids, attention_mask, tokens, temperature, entropies)
            return found if entropies else (found,)

        tables = self.tables(look)
        return tables if entropies else tables[0]

    def values(self, critic):
        """The critic's value before each response token [B, R]."""
        return self.tables(lambda ids, mask, tokens, states: (critic(ids, mask, states),))[0]

    def tables(self, look):
        """What a function finds at the response tokens, pass by pass, as tables [B, R]."""
        parts = [(group, mask, look(*batch)) for group, (*batch, mask) in self.passes()]
        tables = [torch.zeros(self.response_mask.shape, device=self.device) for _ in parts[0][2]]
        for group, mask, found in parts:
            for table, values in zip(tables, found, strict=True):
                table[group] = table[group].masked_scatter(mask, values)
        return tables


if __name__ == "__main__":
    run(main)
