"""The mathematics of RLHF: tensors in, tensors out.

Shapes: B responses, R tokens of the longest. Everything is [B, R] and zero outside response_mask
(bool, true on the tokens that were sampled, eos included) unless said otherwise. A responses to
each of n prompts: [A, n].
Sources: Schulman et al. 2017 (PPO), Schulman et al. 2016 (GAE), Ziegler et al. 2019 (KL reward),
Ahmadian et al. 2024 (RLOO), Shao et al. 2024 (GRPO).
"""

import math

import torch
from torch.nn import functional


def masked_mean(x, mask):
    """Mean of x where mask is true."""
    return (x * mask).sum() / mask.sum()


def token_rewards(scores, logprobs, ref_logprobs, response_mask, kl_coef):
    """Rewards: -kl_coef * (logprob - ref_logprob) at each token, plus the score at the last one.

    scores: [B]. Ziegler et al. 2019, eq. 2, with the KL shared among the tokens.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * response_mask
    last = response_mask.sum(dim=1) - 1
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    return rewards


def kl_penalty(logprobs, ref_logprobs):
    """k3 of each token: ref / policy - 1 - log(ref / policy) (Schulman 2020). Any shape.

    Never negative; over tokens that the policy samples its mean is KL(policy || ref). The mean of
    its gradient is not that KL's, but KL(ref || policy)'s. GRPO's (Shao et al. 2024, eq. 4).
    """
    log_ratio = ref_logprobs - logprobs
    # exp - 1 loses all digits of small ratios, and then the sign.
    return torch.expm1(log_ratio) - log_ratio


def adapted_kl_coef(kl_coef, kl, target, horizon, rollouts):
    """The next kl_coef, steered so that kl comes to target: both nats a response. Floats.

    kl_coef * (1 + clip(kl / target - 1, -.2, .2) * rollouts / horizon): Ziegler et al. 2019,
    section 2.2, where rollouts / horizon is K_beta; kl is the mean over so many rollouts. More of
    them than the horizon count as a whole one, so that the next one stays above 0.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(rollouts / horizon, 1))


def moments(values):
    """Count, mean and sum of squared deviations of the values of a tensor of any shape. Floats."""
    values = values.double()
    mean = values.mean()
    return values.numel(), mean.item(), (values - mean).square().sum().item()


def merged_moments(first, second):
    """Moments of two samples together, from the moments of each (Chan et al. 1979).

    The mean of the two is weighted by count; the squared deviations grow by the square of the
    distance of the two means * n * m / (n + m). No values yet: (0, 0.0, 0.0).
    """
    (n, first_mean, first_squares), (m, second_mean, second_squares) = first, second
    count, distance = n + m, second_mean - first_mean
    mean = first_mean + distance * m / count
    return count, mean, first_squares + second_squares + distance**2 * n * m / count


def gae(rewards, values, response_mask, gamma, gae_lambda):
    """Advantages and returns (Schulman et al. 2016, eq. 16); the state after the last token is 0.

    A_t = delta_t + gamma * gae_lambda * A_t+1, delta_t = reward_t + gamma * value_t+1 - value_t;
    values[b, t] is the value before token t.
    """
    values = values * response_mask
    next_values = functional.pad(values[:, 1:], (0, 1))
    advantages = list(((rewards + gamma * next_values - values) * response_mask).unbind(dim=1))
    # Only this goes token by token, and by one kernel each.
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] = torch.add(advantages[t], advantages[t + 1], alpha=gamma * gae_lambda)
    advantages = torch.stack(advantages, dim=1)
    return advantages, advantages + values


def rloo_advantages(scores):
    """Advantages [A, n] of scores [A, n]: score - mean of the other responses' scores, A > 1.

    "Leave one out": what a response is compared with does not depend on it, so the gradient stays
    unbiased (Kool et al. 2019; for language models Ahmadian et al. 2024).
    """
    others = (scores.sum(dim=0) - scores) / (len(scores) - 1)
    return scores - others


def grpo_advantages(scores):
    """Advantages [A, n] of scores [A, n]: (score - mean) / (deviation + 1e-4) of a prompt, A > 1.

    Shao et al. 2024, section 4.1.2, which leaves open which deviation; here as in TRL the one of
    a sample (over A - 1), and TRL's 1e-4. Prompts whose responses score alike have advantages of 0.
    """
    # From the first one on: equal scores are then 0 exactly, which no rounding blows up by 1e4.
    scores = scores - scores[0]
    return (scores - scores.mean(dim=0)) / (scores.std(dim=0, correction=1) + 1e-4)


def whiten(x, mask):
    """x with mean 0 and deviation 1 over all masked tokens; 0 outside.

    x holds all rollouts of a step, the global batch: those of a rank or a micro-batch alone would
    be shifted and scaled by what they happen to stand with.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


@torch.no_grad()
def importance_weights(logprobs, sampler_logprobs, cap):
    """min(policy / sampler, cap) of each token, to multiply its loss by. Any shape, no gradient.

    For tokens that another engine sampled, whose probabilities are not quite the trainer's.
    Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"): unbiased where the cap is not reached.
    """
    return torch.exp(logprobs - sampler_logprobs).clamp(max=cap)


def policy_loss(logprobs, old_logprobs, advantages, clip_range):
    """Clipped surrogate loss of each token (Schulman et al. 2017, eq. 7, negated). Any shape."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def value_loss(values, old_values, returns, clip_range):
    """Half the squared error of each token; with clip_range > 0 no smaller than the clipped one's.

    Any shape. Clipping as in the PPO2 code of OpenAI baselines (2017).
    """
    loss = (values - returns) ** 2
    if clip_range > 0:
        clipped = old_values + torch.clamp(values - old_values, -clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - returns) ** 2)
    return 0.5 * loss


@torch.no_grad()
def ratio_statistics(logprobs, old_logprobs, clip_range):
    """Sums over tokens of: ratio, approximate KL (ratio - 1 - log ratio, Schulman 2020), clipped.

    Any shape; each sum is a tensor of no dimension, so that a GPU need not be waited for. All are
    0 beside a ratio of 1 before the first update.
    """
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    return {
        "ratio": ratio.sum(),
        "approxkl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "clipfrac": ((ratio - 1).abs() > clip_range).sum(dtype=torch.float32),
    }


def value_statistics(values, old_values, clip_range):
    """Sum over tokens of: clipped, those whose value moved by more than clip_range.

    Any shape; a tensor of no dimension. A clip_range of 0 clips none, as in value_loss.
    """
    farthest = clip_range if clip_range > 0 else math.inf
    return {"clipfrac": ((values - old_values).abs() > farthest).sum(dtype=torch.float32)}


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns) over the masked tokens."""
    error, target = (returns - values)[mask], returns[mask]
    return (1 - error.var(correction=0) / (target.var(correction=0) + 1e-8)).item()
