"""The equations of policy gradients: rewards, advantages, and the losses of policy and critic.

Pure functions of tensors. Shapes: B responses, R tokens of the longest one; A responses to each of
n prompts. Tensors are [B, R] and zero outside response_mask (bool, true on sampled tokens including
eos) unless a docstring states otherwise.

Sources: Schulman et al. 2017 (PPO), Schulman et al. 2016 (GAE), Ziegler et al. 2019 (KL reward),
Shao et al. 2024 (GRPO), Liu et al. 2025 (Dr. GRPO), Yu et al. 2025 (DAPO), Zheng et al. 2025
(GSPO).
"""

import torch
from torch import Tensor

# Count, mean and sum of squared deviations of a sample.
Moments = tuple[int, float, float]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x where mask is true."""
    return (x * mask).sum() / mask.sum()


def token_rewards(
    scores: Tensor, penalties: Tensor, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """Return -kl_coef * penalty at each token, plus the score [B] at the last one.

    Ziegler et al. 2019, eq. 2, with the KL term distributed over the tokens (kl_penalty).
    """
    rewards = -kl_coef * penalties * response_mask
    last = response_mask.sum(dim=1) - 1
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    return rewards


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(policy || ref) at each token. Any shape.

    Schulman 2020, "Approximating KL divergence", with x = log(policy / ref):

    - k1: x. Its mean over tokens that the policy sampled is the KL; the mean of its gradient is 0,
      so that it serves in rewards only.
    - k2: x^2 / 2. Its mean is close to the KL; the mean of its gradient is the gradient of the KL.
    - k3: exp(-x) - 1 + x, the penalty of GRPO (Shao et al. 2024, eq. 4). It is never negative, and
      its mean is the KL. The mean of its gradient, however, is the gradient of KL(ref || policy).
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    # exp(x) - 1 cancels all digits of a small x, and then the sign of the result.
    return torch.expm1(-log_ratio) + log_ratio


def weighted_kl_penalty(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: str
) -> Tensor:
    """Return kl_penalty times the ratio policy / old policy, which has no gradient. Any shape.

    The means of the penalty and of its gradient over tokens that the old policy sampled are then
    the means over tokens of the policy. The ratio is 1 in the first update.
    """
    ratios = torch.exp(logprobs.detach() - old_logprobs)
    return ratios * kl_penalty(logprobs, ref_logprobs, estimator)


def added_moments(moments: Moments, values: Tensor) -> Moments:
    """Return the moments of a sample and further values, in float64 (Chan et al. 1979).

    The moments of an empty sample are (0, 0.0, 0.0). values: A tensor of any shape.
    """
    values = values.double()
    n, mean, squares = moments
    m, own_mean = values.numel(), values.mean().item()
    own_squares = (values - values.mean()).square().sum().item()
    if n == 0:
        return m, own_mean, own_squares
    count, distance = n + m, own_mean - mean
    total = squares + own_squares + distance**2 * n * m / count
    return count, mean + distance * m / count, total


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (Schulman et al. 2016, eq. 16).

    A_t = delta_t + gamma * gae_lambda * A_t+1, delta_t = reward_t + gamma * value_t+1 - value_t.
    values[b, t] is the value of the state before token t; the state after the last token has value
    0. The return is advantage + value.
    """
    values = values * response_mask
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    advantages = list(((rewards + gamma * next_values - values) * response_mask).unbind(dim=1))
    # The recurrence is the only sequential part: one kernel for each token.
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] = torch.add(advantages[t], advantages[t + 1], alpha=gamma * gae_lambda)
    stacked = torch.stack(advantages, dim=1)
    return stacked, stacked + values


def rloo_advantages(scores: Tensor) -> Tensor:
    """Return advantages [A, n] of scores [A, n]: score - mean score of the other responses, A > 1.

    REINFORCE leave-one-out (Kool et al. 2019; for language models Ahmadian et al. 2024). The
    baseline of a response does not depend on it, so that the gradient is unbiased. Equal scores of
    a prompt, and NaN, which is not compared with the others, have advantages of exactly 0.
    """
    scores, judged, counts = _relative_scores(scores)
    others = (scores.sum(dim=0) - scores) / (counts - 1).clamp(min=1)
    return (scores - others) * (judged & (counts > 1))


def grpo_advantages(scores: Tensor, scale_by_std: bool) -> Tensor:
    """Return advantages [A, n] of scores [A, n]: score - mean score of the prompt, A > 1.

    Equal scores of a prompt, and NaN, have advantages of exactly 0.

    scale_by_std: divide by the standard deviation of the prompt's scores + 1e-4 (Shao et al. 2024,
    section 4.1.2). The paper does not define the standard deviation: as in TRL it is the one of a
    sample (divided by A - 1), and 1e-4 is TRL's constant. Dr. GRPO (Liu et al. 2025) does not
    divide, because the division gives prompts that are nearly always or never solved more weight.
    """
    scores, judged, counts = _relative_scores(scores)
    advantages = (scores - scores.sum(dim=0) / counts.clamp(min=1)) * judged
    if scale_by_std:
        variances = advantages.square().sum(dim=0) / (counts - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt() + 1e-4)
    return advantages


def uniform_groups(scores: Tensor) -> Tensor:
    """Return bool [n]: whether all responses to a prompt have equal scores [A, n], or NaN."""
    return (_relative_scores(scores)[0] == 0).all(dim=0)


def _relative_scores(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores [A, n] minus the first one of the prompt, 0 for NaN.

    Equal scores are then exactly 0: the division by 1e-4 would amplify a rounding error. Also
    returned are which scores are not NaN, bool [A, n], and their number for each prompt [n].
    """
    judged = ~scores.isnan()
    first = scores.gather(0, judged.int().argmax(dim=0, keepdim=True))
    return (scores - first).nan_to_num(), judged, judged.sum(dim=0)


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

    Corrects for tokens that another engine sampled, with slightly different probabilities, by
    truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"), unbiased where the cap is not reached.
    """
    return torch.exp(logprobs - sampler_logprobs).clamp(max=cap)


def sequence_log_ratios(log_ratios: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean log ratio of each response at each of its tokens [N] (Zheng et al. 2025).

    Its exponential is the importance ratio of GSPO, eq. 7. log_ratios [N]: log(policy / old policy)
    of the tokens of several responses, which have lengths [b].
    """
    # Torch would wait for the device to check the lengths.
    means = torch.segment_reduce(log_ratios, "mean", lengths=lengths, unsafe=True)
    return means.repeat_interleave(lengths, output_size=len(log_ratios))


def policy_loss(
    log_ratios: Tensor, advantages: Tensor, clip_range: float, clip_range_high: float
) -> Tensor:
    """Return the clipped surrogate loss of each token (Schulman et al. 2017, eq. 7, negated).

    Any shape. log_ratios are log(policy / old policy). The ratio is clipped to [1 - clip_range,
    1 + clip_range_high]; in PPO, the two ranges are equal (Yu et al. 2025, eq. 10).
    """
    ratio = torch.exp(log_ratios)
    clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def token_weights(lengths: Tensor, aggregation: str, max_length: int) -> Tensor:
    """Return the weight of the tokens of each response [b], relative to the mean over all tokens.

    The loss of a minibatch is the sum of weight * loss of a token, divided by the number of tokens.

    - token_mean: the mean over all tokens (DAPO, Yu et al. 2025, eq. 8).
    - sequence_mean: the mean over responses of the mean over their tokens (GRPO, Shao et al. 2024,
      eq. 3).
    - max_length: the sum over tokens, divided by the number of responses * max_length (Dr. GRPO,
      Liu et al. 2025, which removes the bias of the other two towards long incorrect responses).
    """
    if aggregation == "token_mean":
        return torch.ones(lengths.shape, device=lengths.device)
    mean_length = lengths.float().mean()
    if aggregation == "sequence_mean":
        return mean_length / lengths
    return (mean_length / max_length).expand(lengths.shape)


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
    log_ratios: Tensor, advantages: Tensor, clip_range: float, clip_range_high: float
) -> dict[str, Tensor]:
    """Return sums over tokens of statistics of the ratio, from inputs of any shape.

    - ratio
    - approxkl: the k3 estimate of the KL to the old policy (Schulman 2020).
    - clipfrac_low, clipfrac_high: ratios below the clip range of tokens with negative advantages,
      and ratios above it of tokens with positive ones. policy_loss has no gradient there.

    The sums are scalar tensors, which do not synchronize with a GPU.
    """
    ratio = torch.exp(log_ratios)
    low = (ratio < 1 - clip_range) & (advantages < 0)
    high = (ratio > 1 + clip_range_high) & (advantages > 0)
    return {
        "ratio": ratio.sum(),
        "approxkl": (torch.expm1(log_ratios) - log_ratios).sum(),
        "clipfrac_low": low.sum(dtype=torch.float32),
        "clipfrac_high": high.sum(dtype=torch.float32),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the masked tokens."""
    error, target = (returns - values)[mask], returns[mask]
    return (1 - error.var(correction=0) / (target.var(correction=0) + 1e-8)).item()
