"""Settings of responses that a model of the build generates for new datasets."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from snakechat.config.rlhf import WeightedFunction, WeightedModels
from snakechat.config.training_settings import Blend, Dtype, Template
from snakechat.workflow.value_types import Count, Name, Positive, Seed, Written


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of `generate_responses` and `score_responses`."""

    # References (snakechat/config/references.py).
    model: str
    reward: Annotated[str | list[tuple[str, float]] | None, Written(str | WeightedModels | None)]
    reward_functions: dict[Name, float | WeightedFunction]
    datasets: Blend
    seed: Seed

    max_prompt_length: Count
    max_response_length: Count
    num_generations: Count
    generation_backend: Literal["hf", "vllm"]
    temperature: Positive
    dtype: Dtype

    # Not keys of a recipe, as in RlhfSettings.
    template: Template
    reward_templates: dict[str, Template]
    llm_judges: dict[str, dict[str, Any]]
