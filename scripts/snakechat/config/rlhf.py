"""Settings of reinforcement learning from human feedback (RLHF), and of generated responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import AfterValidator, model_validator
from typing_extensions import TypedDict

from snakechat.config.references import Reward
from snakechat.config.settings import (
    ABSENT,
    Count,
    DecayRate,
    Fraction,
    Name,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    Seed,
    Settings,
)
from snakechat.config.training_settings import (
    LORA_CONDITION,
    Blend,
    Conditional,
    Dtype,
    LrSchedule,
    Template,
    TrainingSettings,
    learning_rate_has_effect,
)

# Algorithms whose advantages compare the responses to a prompt.
COMPARING = ("rloo", "grpo")


class WeightedFunction(TypedDict):
    """A reward function with arguments, which it receives by keyword."""

    weight: Number
    arguments: NotRequired[dict[str, Any]]


def _without_empty_arguments(
    functions: dict[str, float | WeightedFunction],
) -> dict[str, float | WeightedFunction]:
    """Return a function without arguments as its weight alone."""
    return {
        name: entry if isinstance(entry, float) or entry.get("arguments") else entry["weight"]
        for name, entry in functions.items()
    }


# The weight of each function, rewards/NAME.py.
RewardFunctions = Annotated[
    dict[Name, Number | WeightedFunction], AfterValidator(_without_empty_arguments)
]


def kl_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return kl_in and kl_estimator of a recipe, which may be null there.

    PPO has the KL penalty in the rewards (Ziegler et al. 2019); algorithms that compare responses
    have it in the loss (Shao et al. 2024), where it does not change the comparison. There, k2 is
    the estimator whose gradient is the gradient of the KL.
    """
    kl_in = settings["kl_in"] or ("rewards" if settings["algorithm"] == "ppo" else "loss")
    estimator = settings["kl_estimator"] or ("k1" if kl_in == "rewards" else "k2")
    return {"kl_in": kl_in, "kl_estimator": estimator}


class RlhfSettings(TrainingSettings):
    """Settings of `train_rlhf`."""

    algorithm: Literal["ppo", "rloo", "grpo", "distill"]
    # References (snakechat/config/references.py).
    actor: str
    # With `distill` alone.
    teacher: str | None
    # The first one may initialize the critic.
    reward: Reward
    # A recipe of stage sft.
    ptx: str | None
    ptx_coef: Positive = ABSENT
    reward_functions: RewardFunctions

    max_prompt_length: Count
    max_response_length: Count
    rollout_batch_size: Count
    num_generations: Count
    generation_backend: Literal["hf", "vllm"]
    temperature: Positive
    eval_prompts: Count = ABSENT
    importance_sampling_cap: Positive = ABSENT
    overlong_buffer: NonNegativeInt = 0

    actor_learning_rate: Positive
    critic_learning_rate: Positive = ABSENT
    # With null, it is lr_schedule.
    critic_lr_schedule: LrSchedule = ABSENT
    critic_warmup_steps: NonNegativeInt = 0
    critic_lora_rank: NonNegativeInt = 0
    critic_lora_alpha: Positive = ABSENT
    critic_lora_learning_rate: Positive | None = None
    ema_decay: DecayRate

    ppo_epochs: Count
    clip_range: Positive
    clip_range_high: Positive | None = None
    importance_sampling_level: Literal["token", "sequence"]
    loss_aggregation: Literal["token_mean", "sequence_mean", "max_length"]
    scale_by_std: bool = ABSENT
    drop_uniform_groups: bool = False
    value_clip_range: NonNegative = ABSENT
    gamma: Fraction = ABSENT
    gae_lambda: Fraction = ABSENT
    whiten_rewards: bool = ABSENT
    whiten_advantages: bool = ABSENT
    max_approx_kl: Positive | None

    # With null, the algorithm determines them.
    kl_in: Literal["rewards", "loss"] = "rewards"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_coef: NonNegative = 0.0
    kl_target: Positive | None = None
    kl_horizon: Positive = ABSENT

    standardize_scores: Literal["none", "first", "running"] = "none"
    score_clip: Positive | None = None
    missing_eos_penalty: NonNegative = 0.0
    log_responses_steps: Count

    # Not keys of a recipe: models and judges determine them. Templates of the actor, and of the
    # models of `reward` by reference.
    template: Template = ABSENT
    reward_templates: dict[str, Template] = ABSENT
    # Those of `reward`, by name (snakechat/config/llm_judges.py).
    llm_judges: dict[str, dict[str, Any]] = ABSENT

    @model_validator(mode="before")
    @classmethod
    def _replace_nulls(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace null by what the other settings determine. A spec has no null there."""
        keys = ("kl_in", "kl_estimator", "critic_lr_schedule")
        nulls = [key for key in keys if key in values and values[key] is None]
        if not nulls:
            return values
        determined = {**kl_settings(values), "critic_lr_schedule": values["lr_schedule"]}
        return {**values, **{key: determined[key] for key in nulls}}

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        """Check that the settings fit the algorithm."""
        algorithm, generations = self.algorithm, self.num_generations
        if (algorithm == "distill") != (self.teacher is not None):
            raise ValueError(
                f"teacher: {self.teacher} does not fit algorithm: {algorithm}: distill needs a"
                " teacher, and no other algorithm has one"
            )
        if (self.kl_in, self.kl_estimator) == ("loss", "k1") and algorithm != "distill":
            raise ValueError(
                "kl_estimator: k1 has no effect in the loss, because the mean of its gradient is"
                " 0: use k2 or k3"
            )
        if self.overlong_buffer > self.max_response_length:
            raise ValueError(
                f"overlong_buffer: {self.overlong_buffer} is more than max_response_length"
                f" ({self.max_response_length})"
            )
        if algorithm in COMPARING and generations < 2:
            raise ValueError(
                f"num_generations: {algorithm} compares responses to the same prompt and needs at"
                f" least 2, not {generations}"
            )
        if self.global_batch_size % generations:
            raise ValueError(
                f"global_batch_size: {self.global_batch_size} is not a multiple of num_generations"
                f" ({generations}): set a multiple of it, because all responses to a prompt are in"
                " the same batch"
            )
        return self

    @model_validator(mode="after")
    def _check_scale_of_scores(self) -> Self:
        """Check that compared evaluations have scores on the same scale."""
        for key, unused in (("save_strategy", "last"), ("early_stopping_patience", 0)):
            if getattr(self, key) != unused and self.standardize_scores == "running":
                raise ValueError(
                    f"{key}: {getattr(self, key)} compares scores of different steps, whose scale"
                    " changes with standardize_scores: running: set it to first or none"
                )
        return self


class GenerationSettings(Settings):
    """Settings of `generate_responses` and `score_responses`."""

    # References (snakechat/config/references.py).
    model: str
    reward: Reward
    reward_functions: RewardFunctions
    datasets: Blend
    seed: Seed

    max_prompt_length: Count
    max_response_length: Count
    num_generations: Count
    generation_backend: Literal["hf", "vllm"]
    temperature: Positive
    dtype: Dtype

    # Not keys of a recipe, as in RlhfSettings.
    template: Template = ABSENT
    reward_templates: dict[str, Template] = ABSENT
    llm_judges: dict[str, dict[str, Any]] = ABSENT


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
