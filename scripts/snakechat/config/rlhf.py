"""Settings of reinforcement learning from human feedback (RLHF), and of generated responses.

Recipes take their defaults from config.yaml. A default here is what a program gets where the key
has no effect.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import model_validator

from snakechat.config.references import Reward, RewardFunctions
from snakechat.config.settings import (
    ABSENT,
    Count,
    DecayRate,
    Dtype,
    Fraction,
    LearningRate,
    LrSchedule,
    NonNegative,
    NonNegativeInt,
    Positive,
    ReadIf,
    Seed,
    Settings,
    Template,
    TrainingSettings,
    only_with,
)

# Algorithms whose advantages compare the responses to a prompt.
COMPARING = ("rloo", "grpo")
OF_PPO = only_with("algorithm", "ppo")
# The rewards of distillation have no part of the scores, and are the KL themselves.
OF_SCORES = only_with("algorithm", "ppo", *COMPARING)
# The schedule of the actor, or of the critic.
WITH_COSINE = ReadIf(
    lambda s: "cosine" in (s["lr_schedule"], s["algorithm"] == "ppo" and s["critic_lr_schedule"]),
    "without lr_schedule: cosine",
)


class SampledSettings(Settings):
    """Settings of sampled responses, which something scores."""

    # The first one may initialize the critic.
    reward: Reward
    reward_functions: RewardFunctions

    max_prompt_length: Count
    max_response_length: Count
    num_generations: Count
    generation_backend: Literal["hf", "vllm"]
    temperature: Positive

    # Not keys of a recipe: models and judges determine them. Templates of the models of `reward`
    # that other trainings saved, by input.
    reward_templates: dict[str, Template] = ABSENT
    # The settings of the judges in `reward`, by name.
    llm_judges: dict[str, dict[str, Any]] = ABSENT


class RlhfSettings(TrainingSettings, SampledSettings):
    """Settings of `train_rlhf`."""

    algorithm: Literal["ppo", "rloo", "grpo", "distill"]
    ptx_coef: Annotated[Positive, only_with("ptx")] = ABSENT

    rollout_batch_size: Count
    eval_prompts: Annotated[Count, only_with("eval_steps")] = ABSENT
    importance_sampling_cap: Annotated[Positive, only_with("generation_backend", "vllm")] = ABSENT
    overlong_buffer: Annotated[NonNegativeInt, only_with("missing_eos_penalty"), OF_SCORES] = 0

    actor_learning_rate: LearningRate
    critic_learning_rate: Annotated[Positive, OF_PPO] = ABSENT
    min_lr_ratio: Annotated[Fraction, WITH_COSINE] = 0.0
    # With null, it is lr_schedule.
    critic_lr_schedule: Annotated[LrSchedule, OF_PPO] = ABSENT
    critic_warmup_steps: Annotated[NonNegativeInt, OF_PPO] = 0
    critic_lora_rank: Annotated[NonNegativeInt, OF_PPO] = 0
    critic_lora_alpha: Annotated[Positive, only_with("critic_lora_rank"), OF_PPO] = ABSENT
    critic_lora_learning_rate: Annotated[Positive | None, only_with("critic_lora_rank"), OF_PPO] = (
        None
    )
    ema_decay: DecayRate

    ppo_epochs: Count
    clip_range: Positive
    clip_range_high: Positive | None = None
    importance_sampling_level: Literal["token", "sequence"]
    loss_aggregation: Literal["token_mean", "sequence_mean", "max_length"]
    scale_by_std: Annotated[bool, only_with("algorithm", "grpo")] = ABSENT
    drop_uniform_groups: Annotated[bool, only_with("algorithm", *COMPARING)] = False
    value_clip_range: Annotated[NonNegative, OF_PPO] = ABSENT
    gamma: Annotated[Fraction, OF_PPO] = ABSENT
    gae_lambda: Annotated[Fraction, OF_PPO] = ABSENT
    whiten_advantages: Annotated[bool, OF_PPO] = ABSENT

    # With null, the algorithm determines them.
    kl_in: Annotated[Literal["rewards", "loss"], only_with("kl_coef"), OF_SCORES] = "rewards"
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], only_with("kl_coef"), OF_SCORES] = "k1"
    kl_coef: Annotated[NonNegative, OF_SCORES] = 0.0
    kl_target: Annotated[Positive | None, only_with("kl_coef"), OF_SCORES] = None
    kl_horizon: Annotated[Positive, only_with("kl_target"), only_with("kl_coef"), OF_SCORES] = (
        ABSENT
    )

    standardize_scores: Annotated[Literal["none", "first"], OF_SCORES] = "none"
    score_clip: Annotated[Positive | None, OF_SCORES] = None
    missing_eos_penalty: Annotated[NonNegative, OF_SCORES] = 0.0
    log_responses_steps: Count

    @model_validator(mode="before")
    @classmethod
    def _replace_nulls(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace null by what the other settings determine. A spec has no null there.

        PPO has the KL penalty in the rewards (Ziegler et al. 2019); algorithms that compare
        responses have it in the loss (Shao et al. 2024), where it does not change the comparison.
        There, k2 is the estimator whose gradient is the gradient of the KL.
        """
        values = dict(values)
        if values.get("kl_in", "") is None:
            values["kl_in"] = "rewards" if values["algorithm"] == "ppo" else "loss"
        if values.get("kl_estimator", "") is None:
            values["kl_estimator"] = "k1" if values["kl_in"] == "rewards" else "k2"
        if values.get("critic_lr_schedule", "") is None:
            values["critic_lr_schedule"] = values["lr_schedule"]
        return values

    def problems(self) -> dict[str, bool]:
        algorithm, generations, batch = self.algorithm, self.num_generations, self.global_batch_size
        longest, buffer = self.max_response_length, self.overlong_buffer
        is_k1_in_loss = (self.kl_in, self.kl_estimator) == ("loss", "k1")
        return super().problems() | {
            "kl_estimator: k1 has no effect in the loss, because the mean of its gradient is 0: use"
            " k2 or k3": is_k1_in_loss and algorithm != "distill",
            f"overlong_buffer: {buffer} is more than max_response_length ({longest})": (
                buffer > longest
            ),
            f"num_generations: {algorithm} compares responses to the same prompt and needs at least"
            f" 2, not {generations}": algorithm in COMPARING and generations < 2,
            f"global_batch_size: {batch} is not a multiple of num_generations ({generations}): set"
            " a multiple of it, because all responses to a prompt are in the same batch": (
                batch % generations > 0
            ),
        }


def evaluated_in_update(
    settings: RlhfSettings, num_responses: int | None = None, step: float = math.inf
) -> bool:
    """Return whether the update of a step evaluates the actor's log-probabilities by itself.

    A step of a single update trains the policy that sampled: a forward pass before it would compute
    the same. Rewards and importance weights that need them are made before the update.

    Args:
        num_responses: Number of responses of the step. Default: all of a whole step.
        step: Its number; by default any after the warmup of the critic.
    """
    number = num_responses or settings.rollout_batch_size * settings.num_generations
    return (
        step > settings.critic_warmup_steps
        and settings.ppo_epochs == 1
        and settings.global_batch_size >= number
        and not settings.drop_uniform_groups
        and settings.algorithm != "distill"
        # vLLM's log-probabilities differ by rounding, which importance weights correct.
        and settings.generation_backend == "hf"
        and (settings.kl_in == "loss" or settings.kl_coef == 0)
    )


class GenerationSettings(SampledSettings):
    """Settings of `generate_responses` and `score_responses`."""

    seed: Seed
    dtype: Dtype
