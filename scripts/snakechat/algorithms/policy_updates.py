"""Updates of actor and critic on the experience of a step.

The critic's loss is the mean over the response tokens of a minibatch (the responses of an optimizer
step); loss_aggregation defines the weights of the tokens in the policy's loss.
"""

import math

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms import policy_gradient
from snakechat.algorithms.experience import Experience
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import RlhfSettings
from snakechat.modeling.batching import Examples, global_batches
from snakechat.training.engine import Ema, Engine
from snakechat.workflow.processes import all_reduce_sum

# Metrics of an update by name. None: not available, for example in an fp16 step that was skipped.
Metrics = dict[str, float | None]

POLICY_METRICS = ("loss", "kl", "ratio", "approxkl", "clipfrac_low", "clipfrac_high")


class Updater:
    """Runs the updates of a step.

    Args:
        critic: Engine of the critic, or None.
        ema: Average of the actor's weights, or None.
        ptx: Examples whose language modeling loss is added to the policy loss, or None.
    """

    def __init__(
        self,
        settings: RlhfSettings,
        actor: Engine,
        critic: Engine | None,
        ema: Ema | None,
        ptx: Examples | None,
    ) -> None:
        self.settings, self.actor, self.critic = settings, actor, critic
        self.ema, self.ptx = ema, ptx

    def update(self, step: int, rollouts: Rollouts, experience: Experience) -> list[Metrics]:
        """Update actor and critic on each minibatch, ppo_epochs times; return metrics per update.

        Stops after an update whose approxkl exceeds max_approx_kl.
        """
        settings, updates = self.settings, []
        minibatches = global_batches(
            rollouts.num_prompts,
            minibatch_prompts(settings),
            settings.ppo_epochs,
            settings.seed + step,
        )
        for number, rows in enumerate(minibatches):
            metrics = self.update_minibatch(step, number, rows, rollouts, experience)
            updates.append(metrics)
            approx_kl = metrics.get("policy/approxkl") or 0.0
            if approx_kl > (settings.max_approx_kl or math.inf):
                break
        return updates

    def update_minibatch(
        self,
        step: int,
        number: int,
        rows: np.ndarray,
        rollouts: Rollouts,
        experience: Experience,
    ) -> Metrics:
        """Update actor and critic on the responses to the given prompts; return metrics.

        number: Number of the update in its step.
        """
        settings = self.settings
        engines: dict[str, Engine] = {}
        metrics: Metrics = {}
        if step > settings.critic_warmup_steps:
            engines["policy"] = self.actor
            text = sample_text(self.ptx, settings, step, number) if self.ptx else None
            used = informative_rows(rows, experience) if settings.drop_uniform_groups else rows
            metrics |= policy_gradients(self.actor, rollouts, used, experience, settings, text)
        if self.critic:
            engines["value"] = self.critic
            metrics |= value_gradients(self.critic, rollouts, rows, experience, settings)
        for name, engine in engines.items():
            metrics[f"{name}/learning_rate"] = engine.learning_rate
        for engine in engines.values():
            engine.step()
        if self.ema and "policy" in engines:
            self.ema.update()
        for name, engine in engines.items():
            metrics |= {f"{name}/{key}": value for key, value in engine.metrics.items()}
        return metrics


def minibatch_prompts(settings: RlhfSettings) -> int:
    """Return the number of prompts of an update."""
    return settings.global_batch_size // settings.num_generations


def informative_rows(rows: np.ndarray, experience: Experience) -> np.ndarray:
    """Return the prompts whose responses differ in their scores; all prompts if there are none.

    The others have no advantages, and only dilute the mean of a loss (dynamic sampling of DAPO, Yu
    et al. 2025, eq. 11, without sampling further prompts).
    """
    informative = rows[~experience.is_uniform.cpu().numpy()[rows]]
    return informative if len(informative) else rows


def policy_gradients(
    engine: Engine,
    rollouts: Rollouts,
    rows: np.ndarray,
    experience: Experience,
    settings: RlhfSettings,
    text: Examples | None = None,
) -> dict[str, float]:
    """Accumulate the actor's gradients on the responses to the given prompts; return metrics.

    The loss of a token is importance_weight * clipped surrogate loss (Schulman et al. 2017, eq. 7),
    for kl_in: loss plus kl_coef times the weighted KL penalty (Shao et al. 2024, eq. 3). The
    weights of the tokens follow from loss_aggregation. With importance_sampling_level: sequence,
    all tokens of a response have the mean log ratio of the response.

    An experience with a table of entropies has no log-probabilities of the actor yet
    (evaluated_in_update): both tables are filled in.

    text: Examples whose language modeling loss is added, multiplied by ptx_coef.
    """
    num_tokens = rollouts.num_tokens(rows)
    clip_ranges = settings.clip_range, settings.clip_range_high or settings.clip_range
    trained = rollouts.responses_to(rows)
    weights = torch.zeros(rollouts.num_responses, device=rollouts.device)
    weights[trained] = policy_gradient.token_weights(
        rollouts.lengths[trained], settings.loss_aggregation, settings.max_response_length
    )
    sums = torch.zeros(len(POLICY_METRICS), device=rollouts.device)
    packing = bool(engine.module.supports_packing)
    for micro_batch, responses, tokens in rollouts.micro_batches(rows, packing):
        if experience.entropies is None:
            logprobs = engine(micro_batch.batch, settings.temperature)
            old = experience.select(tokens)
        else:
            logprobs, entropies = engine(
                micro_batch.batch, settings.temperature, return_entropies=True
            )
            old = experience.select(tokens)._replace(logprobs=logprobs.detach())
            if micro_batch.counted:
                for table, values in (
                    (experience.logprobs, logprobs.detach()),
                    (experience.entropies, entropies),
                ):
                    table.view(-1).index_copy_(0, tokens, values)
        log_ratios = logprobs - old.logprobs
        if settings.importance_sampling_level == "sequence":
            log_ratios = policy_gradient.sequence_log_ratios(
                log_ratios, rollouts.lengths[responses]
            )
        losses = old.importance_weights * policy_gradient.policy_loss(
            log_ratios, old.advantages, *clip_ranges
        )
        if settings.kl_in == "loss":
            penalties = policy_gradient.weighted_kl_penalty(
                logprobs, old.logprobs, old.ref_logprobs, settings.kl_estimator
            )
            losses = losses + experience.kl_coef * old.importance_weights * penalties
        token_weights = weights[responses].repeat_interleave(
            rollouts.lengths[responses], output_size=len(tokens)
        )
        loss = micro_batch.counted / num_tokens * (token_weights * losses).sum()
        engine.backward(loss, micro_batch.is_last and text is None)
        statistics = policy_gradient.ratio_statistics(
            log_ratios.detach(), old.advantages, *clip_ranges
        )
        # The same estimate with all settings: k3 has the least variance.
        kl = policy_gradient.kl_penalty(logprobs.detach(), old.ref_logprobs, "k3")
        means = [loss.detach(), kl.sum() / num_tokens]
        means += [statistics[name] / num_tokens for name in POLICY_METRICS[2:]]
        sums += micro_batch.counted * torch.stack(means)
    totals = all_reduce_sum(sums).tolist()
    metrics = {f"policy/{name}": value for name, value in zip(POLICY_METRICS, totals, strict=True)}
    if experience.entropies is not None:
        for table in (experience.logprobs, experience.entropies):
            table.copy_(all_reduce_sum(table))
    if settings.algorithm == "distill":
        metrics["policy/kl_to_teacher"] = metrics.pop("policy/kl")
    if text:
        metrics["ptx/loss"] = text_gradients(engine, text, settings.ptx_coef)
    return metrics


def text_gradients(engine: Engine, text: Examples, coefficient: float) -> float:
    """Accumulate the gradients of coefficient * language modeling loss; return the loss.

    The pretraining mix of InstructGPT (Ouyang et al. 2022, eq. 2). These are the last gradients of
    an optimizer step.
    """
    num_tokens = int(text.num_tokens(with_prompts=True).sum())
    device = next(engine.module.parameters()).device
    loss_sum = torch.zeros((), device=device)
    packing = bool(engine.module.supports_packing)
    rows = np.arange(len(text))
    for micro_batch in text.micro_batches(rows, packing, device, with_prompts=True):
        loss = -micro_batch.counted / num_tokens * engine(micro_batch.batch, return_sum=True)
        engine.backward(coefficient * loss, micro_batch.is_last)
        loss_sum += loss.detach()
    return all_reduce_sum(loss_sum).item()


def value_gradients(
    engine: Engine,
    rollouts: Rollouts,
    rows: np.ndarray,
    experience: Experience,
    settings: RlhfSettings,
) -> dict[str, float]:
    """Accumulate the critic's gradients on the responses to the given prompts; return metrics."""
    num_tokens = rollouts.num_tokens(rows)
    sums = torch.zeros(2, device=rollouts.device)
    packing = bool(engine.module.supports_packing)
    for micro_batch, _, tokens in rollouts.micro_batches(rows, packing):
        old = experience.select(tokens)
        assert old.values is not None and old.returns is not None
        values: Tensor = engine(micro_batch.batch, micro_batch.batch.state_index)
        losses = policy_gradient.value_loss(
            values, old.values, old.returns, settings.value_clip_range
        )
        loss = micro_batch.counted / num_tokens * losses.sum()
        engine.backward(loss, micro_batch.is_last)
        clipped = policy_gradient.num_clipped_values(
            values.detach(), old.values, settings.value_clip_range
        )
        sums += micro_batch.counted * torch.stack([loss.detach(), clipped / num_tokens])
    loss_sum, clipfrac_sum = all_reduce_sum(sums).tolist()
    return {"value/loss": loss_sum, "value/clipfrac": clipfrac_sum}


def sample_text(ptx: Examples, settings: RlhfSettings, step: int, number: int) -> Examples:
    """Draw rows of text for an update of a step, as many as it has responses."""
    generator = np.random.default_rng([settings.seed, step, number])
    rows = generator.choice(len(ptx), min(settings.global_batch_size, len(ptx)), replace=False)
    return ptx.select(rows)
