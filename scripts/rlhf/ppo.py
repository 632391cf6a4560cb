"""The mathematics of PPO: tensors in, tensors out.

Shapes: B responses, R tokens of the longest. Everything is [B, R] and zero outside response_mask
(bool, true on the tokens that were sampled, eos included) unless said otherwise.
Sources: Schulman et al. 2017 (PPO), Schulman et al. 2016 (GAE), Ziegler et al. 2019 (KL reward).
"""

import torch


def masked_mean(x, mask):
    """Mean of x where mask is true."""
    return (x * mask).sum() / mask.sum()


def token_rewards(scores, logprobs, ref_logprobs, response_mask, kl_coef):
    """Rewards: -kl_coef * (logprob - ref_logprob) at each token, plus the score at the last one.

    scores: [B]. Ziegler et al. 2019, eq. 2, with the KL shared among the tokens.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * response_mask
    last = response_mask.sum(dim=1) - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def gae(rewards, values, response_mask, gamma, gae_lambda):
    """Advantages and returns (Schulman et al. 2016, eq. 16); the state after the last token is 0.

    values[b, t] is the value before token t.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = (delta + gamma * gae_lambda * next_advantage) * response_mask[:, t]
        next_value, next_advantage = values[:, t] * response_mask[:, t], advantages[:, t]
    return advantages, (advantages + values) * response_mask


def whiten(x, mask):
    """x with mean 0 and deviation 1 over all masked tokens; 0 outside."""
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


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


def ratio_statistics(logprobs, old_logprobs, clip_range):
    """Sums over tokens of: ratio, approximate KL (ratio - 1 - log ratio, Schulman 2020), clipped.

    Any shape. All are 0 beside a ratio of 1 before the first update.
    """
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    return {
        "ratio": ratio.sum().item(),
        "approx_kl": (ratio - 1 - log_ratio).sum().item(),
        "clip_fraction": ((ratio - 1).abs() > clip_range).sum().item(),
    }


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns) over the masked tokens."""
    error, target = (returns - values)[mask], returns[mask]
    return (1 - error.var(correction=0) / (target.var(correction=0) + 1e-8)).item()
