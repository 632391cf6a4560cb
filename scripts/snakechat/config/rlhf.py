"""Settings of reinforcement learning from human feedback (RLHF), and of generated responses.

Both have what scores responses: reward models, LLM judges and reward functions.

Recipes take their defaults from config.yaml. A default here is what a program gets where the key
has no effect.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetPydanticSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from snakechat.config.settings import (
    ABSENT,
    Count,
    DecayRate,
    Dtype,
    Fraction,
    LearningRate,
    LrSchedule,
    Name,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    ReadIf,
    RefersTo,
    Seed,
    Settings,
    Template,
    TrainingSettings,
    only_with,
)
from snakechat.workflow.errors import InputError

# --- what scores responses ------------------------------------------------------------------------

# A reference, or the weights of several; in a spec, whose keys are sorted, ordered pairs.
RewardReferences = str | Mapping[str, float] | Sequence[tuple[str, float]] | None

# The section of LLM judges: models behind an endpoint, which rate or compare responses.
JUDGES = "llm_judges"
# What a reward function may receive by keyword besides arguments and columns of datasets.
MESSAGES = "messages"
# Names of the first two parameters of every reward function, which no column can have.
POSITIONAL = ("prompts", "responses")


def weighted_references(value: RewardReferences) -> dict[str, float]:
    """Return the weight of each reference of `reward` or `judge`."""
    return {value: 1.0} if isinstance(value, str) else dict(value or {})


def input_names(key: str, value: RewardReferences) -> dict[str, str]:
    """Return the job input of each model of `reward` or `judge` (key), by reference.

    The input of a single model has the name of the key; of several models, KEY.NUMBER from 1: names
    of models do not count. An LLM judge has no input.
    """
    names = enumerate(model_names(value), start=1)
    return {name: key if isinstance(value, str) else f"{key}.{number}" for number, name in names}


def _is_judge(text: str) -> bool:
    return text.startswith(f"{JUDGES}/")


def model_names(value: RewardReferences) -> list[str]:
    """Return what `reward` or `judge` has apart from LLM judges: references or input names."""
    return [name for name in weighted_references(value) if not _is_judge(name)]


def judge_names(*values: RewardReferences) -> list[str]:
    """Return the names of the LLM judges among values of `reward` or `judge`."""
    texts = [text for value in values for text in weighted_references(value) if _is_judge(text)]
    return [text.removeprefix(f"{JUDGES}/") for text in dict.fromkeys(texts)]


def in_order(value: RewardReferences) -> RewardReferences:
    """Return weighted references as ordered pairs; one of weight 1 as its name.

    LLM judges come last, by name: another order of them is the same sum.
    """
    weights = weighted_references(value)
    if isinstance(value, str | None) or [*weights.values()] == [1]:
        return next(iter(weights), None)
    return sorted(weights.items(), key=lambda pair: pair[0] if _is_judge(pair[0]) else "")


# A value of `reward` or `judge`.
Reward = Annotated[
    str | list[tuple[str, float]] | None,
    GetPydanticSchema(
        lambda _, handler: handler(
            Annotated[
                str
                | Annotated[dict[str, Number], Field(min_length=1)]
                | SkipJsonSchema[list[tuple[str, Number]]]
                | None,
                AfterValidator(in_order),
            ]
        )
    ),
    RefersTo(("reward", "models", JUDGES)),
]


class WeightedFunction(Settings):
    """A reward function with arguments, which it receives by keyword."""

    weight: Number
    arguments: dict[str, Any] = Field({})


def _without_empty_arguments(
    functions: dict[str, float | WeightedFunction],
) -> dict[str, float | WeightedFunction]:
    """Return a function without arguments as its weight alone."""
    return {
        name: entry if isinstance(entry, float) or entry.arguments else entry.weight
        for name, entry in functions.items()
    }


def weighted_functions(setting: Mapping[str, Any]) -> dict[str, tuple[float, dict[str, Any]]]:
    """Return {NAME: (weight, arguments)} of the key `reward_functions`."""
    functions = {
        name: WeightedFunction.model_validate(
            {"weight": entry} if isinstance(entry, int | float) else entry
        )
        for name, entry in setting.items()
    }
    return {name: (entry.weight, entry.arguments) for name, entry in functions.items()}


def api_key(name: str, key_env: str | None) -> str | None:
    """Return the API key of a judge; None if it needs none.

    Raises:
        InputError: The environment variable is not set, or is not an API key.
    """
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    # Error messages of the client quote a header with other characters.
    if not re.fullmatch("[!-~]+", key):
        raise InputError(
            f"{JUDGES}.{name}.key_env: environment variable {key_env} has no key: export it before"
            " the build"
        )
    return key


# --- settings -------------------------------------------------------------------------------------

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

    # A model of it may initialize the critic.
    reward: Reward
    # The weight of each function, rewards/NAME.py.
    reward_functions: Annotated[
        dict[Name, Number | WeightedFunction], AfterValidator(_without_empty_arguments)
    ]

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

    # With null, the algorithm determines kl_in, and kl_in the estimator (_replace_nulls).
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
        kl_in = values.get("kl_in") or ("rewards" if values.get("algorithm") == "ppo" else "loss")
        determined = {
            "kl_in": kl_in,
            "kl_estimator": "k1" if kl_in == "rewards" else "k2",
            "critic_lr_schedule": values.get("lr_schedule"),
        }
        return {
            key: determined.get(key) if value is None else value for key, value in values.items()
        }

    def problems(self) -> dict[str, bool]:
        algorithm, generations, batch = self.algorithm, self.num_generations, self.global_batch_size
        longest, buffer = self.max_response_length, self.overlong_buffer
        return super().problems() | {
            "kl_estimator: k1 has no effect in the loss, because the mean of its gradient is 0: use"
            " k2 or k3": (
                (self.kl_in, self.kl_estimator) == ("loss", "k1") and algorithm != "distill"
            ),
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
