"""Settings of reinforcement learning from human feedback (RLHF)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from snakechat.config.training_settings import (
    LORA_CONDITION,
    UNREAD,
    Conditional,
    LrSchedule,
    Template,
    TrainingSettings,
    learning_rate_has_effect,
)
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

# Algorithms whose advantages compare the responses to a prompt.
COMPARING = ("rloo", "grpo")

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
    ptx_coef: Positive = UNREAD
    # Weight of each function (snakechat/config/reward_function_settings.py).
    reward_functions: dict[Name, float | WeightedFunction]

    max_prompt_length: Count
    max_response_length: Count
    rollout_batch_size: Count
    num_generations: Count
    generation_backend: Literal["hf", "vllm"]
    temperature: Positive
    eval_prompts: Count = UNREAD
    importance_sampling_cap: Positive = UNREAD
    overlong_buffer: NonNegativeInt = 0

    actor_learning_rate: Positive
    critic_learning_rate: Positive = UNREAD
    critic_lr_schedule: Annotated[LrSchedule, Written(LrSchedule | None)] = UNREAD
    critic_warmup_steps: NonNegativeInt = 0
    critic_lora_rank: NonNegativeInt = 0
    critic_lora_alpha: Positive = UNREAD
    critic_lora_learning_rate: Positive | None = None
    ema_decay: DecayRate

    ppo_epochs: Count
    clip_range: Positive
    clip_range_high: Positive | None = None
    importance_sampling_level: Literal["token", "sequence"]
    loss_aggregation: Literal["token_mean", "sequence_mean", "max_length"]
    scale_by_std: bool = UNREAD
    drop_uniform_groups: bool = False
    value_clip_range: NonNegative = UNREAD
    gamma: Fraction = UNREAD
    gae_lambda: Fraction = UNREAD
    whiten_rewards: bool = UNREAD
    whiten_advantages: bool = UNREAD
    max_approx_kl: Positive | None

    # With null, the algorithm determines them.
    kl_in: Annotated[Literal["rewards", "loss"], Written(Literal["rewards", "loss"] | None)] = (
        "rewards"
    )
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"], Written(Literal["k1", "k2", "k3"] | None)
    ] = "k1"
    kl_coef: NonNegative = 0.0
    kl_target: Positive | None = None
    kl_horizon: Positive = UNREAD

    standardize_scores: Literal["none", "first", "running"] = "none"
    score_clip: Positive | None = None
    missing_eos_penalty: NonNegative = 0.0
    log_responses_steps: Count

    # Not keys of a recipe: models and judges determine them. Templates of the actor, and of the
    # models of `reward` by reference.
    template: Template
    reward_templates: dict[str, Template]
    # Those of `reward`, by name (snakechat/config/llm_judges.py).
    llm_judges: dict[str, dict[str, Any]]


def _of_algorithms(*keys: str, algorithms: tuple[str, ...]) -> Conditional:
    """Return the condition of settings that only some algorithms use."""
    return Conditional(
        keys,
        lambda settings: settings["algorithm"] in algorithms,
        f"with algorithm: {{algorithm}}, only with {' and '.join(algorithms)}",
    )


def _schedules(settings: Mapping[str, Any]) -> set[str]:
    """Return the learning-rate schedules of actor and critic."""
    critics = {settings["critic_lr_schedule"]} if settings["algorithm"] == "ppo" else set()
    return {settings["lr_schedule"], *critics}


RLHF_CONDITIONS = (
    LORA_CONDITION,
    _of_algorithms(
        *("critic_learning_rate", "critic_lr_schedule", "critic_warmup_steps"),
        *("critic_lora_rank", "critic_lora_alpha", "critic_lora_learning_rate"),
        *("value_clip_range", "gamma", "gae_lambda", "whiten_rewards", "whiten_advantages"),
        algorithms=("ppo",),
    ),
    _of_algorithms("scale_by_std", algorithms=("grpo",)),
    _of_algorithms("drop_uniform_groups", algorithms=COMPARING),
    # The rewards of distillation have no part of the scores, and are the KL themselves.
    _of_algorithms(
        *("kl_in", "kl_estimator", "kl_coef", "kl_target", "kl_horizon"),
        *("standardize_scores", "score_clip", "missing_eos_penalty", "overlong_buffer"),
        algorithms=("ppo", *COMPARING),
    ),
    Conditional(
        ("critic_lora_alpha", "critic_lora_learning_rate"),
        lambda settings: settings["critic_lora_rank"] > 0,
        "without critic_lora_rank",
    ),
    Conditional(
        ("min_lr_ratio",),
        lambda settings: "cosine" in _schedules(settings),
        "with lr_schedule: {lr_schedule}",
    ),
    Conditional(
        # kl_target multiplies kl_coef.
        ("kl_in", "kl_estimator", "kl_target", "kl_horizon"),
        lambda settings: settings["kl_coef"] > 0,
        "with kl_coef: {kl_coef}",
    ),
    Conditional(
        ("kl_horizon",), lambda settings: settings["kl_target"] is not None, "without kl_target"
    ),
    Conditional(
        ("overlong_buffer",),
        lambda settings: settings["missing_eos_penalty"] > 0,
        "with missing_eos_penalty: {missing_eos_penalty}",
    ),
    Conditional(("ptx_coef",), lambda settings: settings["ptx"] is not None, "without ptx"),
    Conditional(
        ("importance_sampling_cap",),
        lambda settings: settings["generation_backend"] == "vllm",
        "with generation_backend: {generation_backend}",
    ),
    Conditional(
        ("eval_prompts",), lambda settings: settings["eval_steps"] > 0, "without eval_steps"
    ),
    Conditional(
        ("actor_learning_rate",),
        learning_rate_has_effect,
        "with lora_learning_rate: adapters have it",
    ),
)
