"""Keys of former versions: each one is an error that names its successor."""

from typing import Any

from snakechat.config.errors import ConfigError

# By place: "" is the top level; STAGE stands for the defaults, the presets, the recipes and the
# sweeps of a stage, models.NAME for each model.
RENAMED_KEYS = {
    "": {"evaluate": "evaluation", "prompts": "prompt_sets"},
    "models.NAME": {"prompts": "prompt_sets"},
    "evaluation": {
        "prompts": "num_prompts",
        "samples": "num_generations",
        "bootstrap": "bootstrap_resamples",
        "endpoint": "llm_judge",
    },
    "sft": {"keep": "save_strategy", "patience": "early_stopping_patience"},
    "rlhf": {
        "samples": "num_generations",
        "max_importance": "importance_sampling_cap",
        "beside": "compare_with",
        "sample_steps": "log_responses_steps",
        "generate": "generation_backend",
    },
}


GATE = "use gate: {metric: accuracy, min: 0.65} (docs/en/evaluation.md)"
# Keys of the sections of the stages that have no successor, and what to do.
REMOVED_KEYS = {
    "truncation_side": "delete it: a row keeps its last user turn (docs/en/datasets.md)",
    "expect": GATE,
    "not_worse_than": GATE,
}


def check_renamed_keys(values: dict[str, Any]) -> None:
    """Raise ConfigError for the first key that was renamed or removed."""
    _check(values, "", RENAMED_KEYS[""])
    _check(values.get("evaluation"), "evaluation.", RENAMED_KEYS["evaluation"])
    for name, model in _items(values.get("models")):
        _check(model, f"models.{name}.", RENAMED_KEYS["models.NAME"])
    for stage in ("sft", "reward", "dpo", "rlhf"):
        section, renamed = values.get(stage), RENAMED_KEYS.get(stage, {})
        for group, recipes in _items(section):
            if group == "defaults":
                _check(recipes, f"{stage}.defaults.", renamed)
            else:
                for name, recipe in _items(recipes):
                    _check(recipe, f"{stage}.{group}.{name}.", renamed)
    for name, sweep in _items(values.get("sweeps")):
        settings = dict(_items(sweep))
        renamed = RENAMED_KEYS.get(str(settings.get("stage")), {})
        _check(settings.get("over"), f"sweeps.{name}.over.", renamed)


def _items(mapping: Any) -> list[tuple[str, Any]]:
    """Return the items of a mapping; none of anything else, which the schema rejects later."""
    return list(mapping.items()) if isinstance(mapping, dict) else []


def _check(mapping: Any, place: str, renamed: dict[str, str]) -> None:
    for key, _ in _items(mapping):
        if key in renamed:
            raise ConfigError(f"config: {place}{key} was renamed: use {renamed[key]}")
        if key in REMOVED_KEYS:
            raise ConfigError(f"config: {place}{key} was removed: {REMOVED_KEYS[key]}")
