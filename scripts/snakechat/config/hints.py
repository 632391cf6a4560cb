"""Hints for keys that the config does not have: names of TRL, transformers and verl, and typos."""

import difflib
from collections.abc import Collection

# Our keys by the names that other libraries have for them. Which one a section has depends on the
# stage. docs/en/migration.md explains the differences.
NAMES_ELSEWHERE = {
    "adam_beta1": ("adam_betas",),
    "adam_beta2": ("adam_betas",),
    "assistant_only_loss": ("train_on_prompt",),
    "beta": ("kl_coef",),
    "bf16": ("dtype",),
    "clip_ratio": ("clip_range",),
    "clip_ratio_high": ("clip_range_high",),
    "cliprange": ("clip_range",),
    "cliprange_value": ("value_clip_range",),
    "completion_only_loss": ("train_on_prompt",),
    "dataset_name": ("datasets",),
    "epsilon": ("clip_range",),
    "epsilon_high": ("clip_range_high",),
    "fp16": ("dtype",),
    "gradient_accumulation_steps": ("global_batch_size",),
    "gradient_checkpointing": ("placement.activation_checkpointing",),
    "kl_loss_coef": ("kl_coef",),
    "lam": ("gae_lambda",),
    "learning_rate": ("actor_learning_rate",),
    "kl_penalty": ("kl_estimator",),
    "load_best_model_at_end": ("save_strategy",),
    "logging_steps": ("log_responses_steps",),
    "loss_agg_mode": ("loss_aggregation",),
    "loss_type": ("loss_aggregation", "loss"),
    "lora_r": ("lora_rank",),
    "lr": ("learning_rate", "actor_learning_rate"),
    "lr_scheduler_type": ("lr_schedule",),
    "max_completion_length": ("max_response_length",),
    "max_new_tokens": ("max_response_length",),
    "max_seq_length": ("max_length",),
    "model": ("actor",),
    "model_name_or_path": ("model", "actor"),
    "norm_adv_by_std_in_grpo": ("scale_by_std",),
    "num_iterations": ("ppo_epochs",),
    "num_ppo_epochs": ("ppo_epochs",),
    "num_train_epochs": ("epochs",),
    "per_device_train_batch_size": ("global_batch_size",),
    "ppo_mini_batch_size": ("global_batch_size",),
    "response_length": ("max_response_length",),
    "reward_funcs": ("reward_functions",),
    "reward_model_path": ("reward",),
    "reward_weights": ("reward_functions",),
    "rpo_alpha": ("sft_coef",),
    "scale_rewards": ("scale_by_std",),
    "simpo_gamma": ("margin",),
    "total_epochs": ("epochs",),
    "train_batch_size": ("rollout_batch_size", "global_batch_size"),
    "use_vllm": ("generation_backend",),
    "warmup_ratio": ("warmup_steps",),
}
# Similarity of two names that counts as a typo, from 0 to 1.
SIMILARITY = 0.6
# A section with at most this number of keys lists them.
FEW_KEYS = 8


def key_hint(key: str, allowed: Collection[str]) -> str:
    """Return a hint for an unknown key, in parentheses; an empty text if there is none.

    Args:
        key: The key.
        allowed: The keys that the section may have.
    """
    for name in NAMES_ELSEWHERE.get(key, ()):
        if name.partition(".")[0] in allowed:
            return f" (it is {name} here)"
    similar = nearest(key, allowed)
    if similar is not None:
        return f" (did you mean {similar}?)"
    return f" (available: {', '.join(allowed)})" if len(allowed) <= FEW_KEYS else ""


def available(name: str, names: Collection[str]) -> str:
    """Return the names that exist, in parentheses, for an error about one that does not."""
    similar = nearest(name, names)
    guess = "" if similar is None else f"did you mean {similar}? "
    return f"({guess}available: {', '.join(sorted(names)) or 'none'})"


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the most similar one of some names, if any is similar."""
    similar = difflib.get_close_matches(name, names, 1, SIMILARITY)
    return similar[0] if similar else None
