"""The equations of PPO, RLOO and GRPO, as pure functions of tensors.

Shapes: B responses, R tokens of the longest one. Tensors are [B, R] and zero outside response_mask
(bool, true on sampled tokens including eos) unless a docstring states otherwise. Group functions
take A responses to each of n prompts: [A, n].

Sources: Schulman et al. 2017 (PPO), Schulman et al. 2016 (GAE), Ziegler et al. 2019 (KL reward),
Ahmadian et al. 2024 (RLOO), Shao et al. 2024 (GRPO).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

# Count, mean and sum of squared deviations of a sample.
Moments = tuple[int, float, float]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x where mask is true."""
    return (x * mask).sum() / mask.sum()


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
) -> Tensor:
    """Return -kl_coef * (logprob - ref_logprob) at each token, plus the score [B] at the last one.

    Ziegler et al. 2019, eq. 2, with the KL term distributed over the tokens.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * response_mask
    last = response_mask.sum(dim=1) - 1
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    return rewards


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of each token: ref / policy - 1 - log(ref / policy). Any shape.

    Schulman 2020 ("Approximating KL divergence"); the penalty of GRPO (Shao et al. 2024, eq. 4). It
    is never negative, and its mean over tokens that the policy sampled is KL(policy || ref). The
    mean of its gradient, however, is the gradient of KL(ref || policy).
    """
    log_ratio = ref_logprobs - logprobs
    # exp(x) - 1 cancels all digits of a small x, and then the sign of the result.
    return torch.expm1(log_ratio) - log_ratio


def adapted_kl_coef(
    kl_coef: float, kl: float, target: float, horizon: float, num_responses: int
) -> float:
    """Return the next kl_coef, which moves kl towards target. Both are in nats per response.

    kl_coef * (1 + clip(kl / target - 1, -.2, .2) * num_responses / horizon): Ziegler et al. 2019,
    section 2.2, where num_responses / horizon is K_beta. kl is the mean over num_responses; more
    than horizon of them count as horizon, so that the coefficient stays positive.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(num_responses / horizon, 1))


def moments(values: Tensor) -> Moments:
    """Return the moments of the values of a tensor of any shape, computed in float64."""
    values = values.double()
    mean = values.mean()
    return values.numel(), mean.item(), (values - mean).square().sum().item()


def merged_moments(first: Moments, second: Moments) -> Moments:
    """Return the moments of the union of two samples (Chan et al. 1979).

    The moments of an empty sample are (0, 0.0, 0.0).
    """
    (n, first_mean, first_squares), (m, second_mean, second_squares) = first, second
    count, distance = n + m, second_mean - first_mean
    mean = first_mean + distance * m / count
    return count, mean, first_squares + second_squares + distance**2 * n * m / count


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (Schulman et al. 2016, eq. 16).

    A_t = delta_t + gamma * gae_lambda * A_t+1, delta_t = reward_t + gamma * value_t+1 - value_t.
    values[b, t] is the value of the state before token t; the state after the last token has value
    0. The return is advantage + value.
    """
    values = values * response_mask
    next_values = functional.pad(values[:, 1:], (0, 1))
    advantages = list(((rewards + gamma * next_values - values) * response_mask).unbind(dim=1))
    # The recurrence is the only sequential part: one kernel for each token.
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] = torch.add(advantages[t], advantages[t + 1], alpha=gamma * gae_lambda)
    stacked = torch.stack(advantages, dim=1)
    return stacked, stacked + values


def rloo_advantages(scores: Tensor) -> Tensor:
    """Return advantages [A, n] of scores [A, n]: score - mean score of the other responses, A > 1.

    REINFORCE leave-one-out (Kool et al. 2019; for language models Ahmadian et al. 2024). The
    baseline of a response does not depend on it, so that the gradient is unbiased.
    """
    others = (scores.sum(dim=0) - scores) / (len(scores) - 1)
    return scores - others


def grpo_advantages(scores: Tensor) -> Tensor:
    """Return advantages [A, n] of scores [A, n]: (score - mean) / (std + 1e-4) per prompt, A > 1.

    Shao et al. 2024, section 4.1.2. The paper does not define the standard deviation: as in TRL it
    is the one of a sample (divided by A - 1), and 1e-4 is TRL's constant. Prompts whose responses
    have equal scores have advantages of exactly 0.
    """
    # Relative to the first response, equal scores are exactly 0, so that the division by 1e-4
    # amplifies no rounding error.
    scores = scores - scores[0]
    return (scores - scores.mean(dim=0)) / (scores.std(dim=0, correction=1) + 1e-4)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Return x scaled to mean 0 and variance 1 over all masked tokens; 0 outside the mask.

    x must hold all rollouts of a step over all ranks. A single rank or micro-batch would be shifted
    and scaled by the rows that it happens to contain.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


@torch.no_grad()
def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """Return min(policy / sampler, cap), the weight of each token's loss. Any shape, no gradient.

    Corrects for tokens that another engine sampled, whose probabilities differ slightly from the
    trainer's. Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"), unbiased where the cap is not reached.
    """
    return torch.exp(logprobs - sampler_logprobs).clamp(max=cap)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_range: float
) -> Tensor:
    """Return the clipped surrogate loss of each token (Schulman et al. 2017, eq. 7, negated).

    Any shape.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Return half the squared error of each token. Any shape.

    A positive clip_range takes the maximum of it and of the error of the value clipped to
    old_value +- clip_range, as in the PPO2 code of OpenAI Baselines (2017).
    """
    loss = (values - returns) ** 2
    if clip_range > 0:
        clipped = old_values + torch.clamp(values - old_values, -clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - returns) ** 2)
    return 0.5 * loss


@torch.no_grad()
def ratio_statistics(
    logprobs: Tensor, old_logprobs: Tensor, clip_range: float
) -> dict[str, Tensor]:
    """Return sums over tokens: ratio, approxkl (k3, Schulman 2020) and clipfrac (clipped tokens).

    Inputs of any shape; the sums are scalar tensors, which do not synchronize with a GPU. Before
    the first update, each ratio is 1 and the other statistics are 0.
    """
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    return {
        "ratio": ratio.sum(),
        "approxkl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "clipfrac": ((ratio - 1).abs() > clip_range).sum(dtype=torch.float32),
    }


def value_statistics(values: Tensor, old_values: Tensor, clip_range: float) -> dict[str, Tensor]:
    """Return the sum over tokens of clipfrac: values that moved by more than clip_range.

    Inputs of any shape; the sum is a scalar tensor. As in value_loss, a clip_range of 0 clips none.
    """
    limit = clip_range if clip_range > 0 else math.inf
    return {"clipfrac": ((values - old_values).abs() > limit).sum(dtype=torch.float32)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the masked tokens."""
    error, target = (returns - values)[mask], returns[mask]
    return (1 - error.var(correction=0) / (target.var(correction=0) + 1e-8)).item()
