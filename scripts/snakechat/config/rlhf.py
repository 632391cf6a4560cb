"""Settings of reinforcement learning from human feedback (RLHF)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from snakechat.config.training_settings import LrSchedule, Template, TrainingSettings
from snakechat.workflow.value_types import (
    Count,
    DecayRate,
    Fraction,
    Keyword,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    Written,
)

# Weighted models: {NAME: weight}.
WeightedModels = Annotated[dict[str, float], Keyword("min_length", 1)]


class WeightedFunction(TypedDict):
    """A reward function with arguments, which it receives by keyword."""

    weight: float
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RlhfSettings(TrainingSettings):
    """Settings of `train_rlhf`."""

    algorithm: Literal["ppo", "rloo", "grpo", "distill"]
    # References (snakechat/config/references.py).
    actor: str
    # With `distill` alone.
    teacher: str | None
    # Of several reward models, a program receives pairs: the first one may initialize the critic.
    reward: Annotated[str | list[tuple[str, float]] | None, Written(str | WeightedModels | None)]
    # A recipe of stage sft.
    ptx: str | None
    ptx_coef: Positive
    # Weight of each function (snakechat/config/reward_function_settings.py).
    reward_functions: dict[Name, float | WeightedFunction]

    max_prompt_length: Count
    max_response_length: Count
    rollout_batch_size: Count
    num_generations: Count
    generation_backend: Literal["hf", "vllm"]
    temperature: Positive
    # Without eval_steps, a program receives 0.
    eval_prompts: Annotated[NonNegativeInt, Written(Count)]
    importance_sampling_cap: Positive
    overlong_buffer: NonNegativeInt

    actor_learning_rate: Positive
    critic_learning_rate: Positive
    critic_lr_schedule: Annotated[LrSchedule, Written(LrSchedule | None)]
    critic_warmup_steps: NonNegativeInt
    critic_lora_rank: NonNegativeInt
    critic_lora_alpha: Positive
    critic_lora_learning_rate: Positive | None
    ema_decay: DecayRate

    ppo_epochs: Count
    clip_range: Positive
    clip_range_high: Positive | None
    importance_sampling_level: Literal["token", "sequence"]
    loss_aggregation: Literal["token_mean", "sequence_mean", "max_length"]
    scale_by_std: bool
    drop_uniform_groups: bool
    value_clip_range: NonNegative
    gamma: Fraction
    gae_lambda: Fraction
    whiten_rewards: bool
    whiten_advantages: bool
    max_approx_kl: Positive | None

    # With null, the algorithm determines them.
    kl_in: Annotated[Literal["rewards", "loss"], Written(Literal["rewards", "loss"] | None)]
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Written(Literal["k1", "k2", "k3"] | None)]
    kl_coef: NonNegative
    kl_target: Positive | None
    kl_horizon: Positive

    standardize_scores: Literal["none", "first", "running"]
    score_clip: Positive | None
    missing_eos_penalty: NonNegative
    log_responses_steps: Count

    # Not keys of a recipe: models and judges determine them. Templates of the actor, and of the
    # models of `reward` by reference.
    template: Template
    reward_templates: dict[str, Template]
    # Those of `reward`, by name (snakechat/config/llm_judges.py).
    llm_judges: dict[str, dict[str, Any]]
