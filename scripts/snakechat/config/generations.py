"""Settings of responses that a model of the build generates for new datasets."""

from typing import Any, Literal

from snakechat.config.references import Reward
from snakechat.config.rlhf import RewardFunctions
from snakechat.config.settings import ABSENT, Count, Positive, Seed, Settings
from snakechat.config.training_settings import Blend, Dtype, Template


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
