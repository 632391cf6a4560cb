"""Hints for keys that the config does not have: names of other libraries, and typos."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

# Our keys by their names in TRL, transformers and verl: the first one that the section has. A dot
# separates a key from the section that has it. docs/en/migration.md explains the differences.
NAMES_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "adam_beta1": ("adam_betas",),
    "adam_beta2": ("adam_betas",),
    "assistant_only_loss": ("train_on",),
    "beta": ("kl_coef",),
    "bf16": ("dtype",),
    "clip_ratio": ("clip_range",),
    "clip_ratio_high": ("clip_range_high",),
    "cliprange": ("clip_range",),
    "cliprange_value": ("value_clip_range",),
    "completion_only_loss": ("train_on",),
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
    "teacher_model_name_or_path": ("teacher",),
    "total_epochs": ("epochs",),
    "train_batch_size": ("rollout_batch_size", "global_batch_size"),
    "use_vllm": ("generation_backend",),
    "warmup_ratio": ("warmup_steps",),
}
# The same for the flags of DeepSpeed-Chat's programs for SFT, reward models, DPO and RLHF, and for
# the constants in its ppo_trainer.py. Flags with the name of their key need no hint.
DEEPSPEED_CHAT: dict[str, tuple[str, ...]] = {
    "actor_gradient_checkpointing": ("placement.activation_checkpointing",),
    "actor_lora_dim": ("lora_rank",),
    "actor_lora_learning_rate": ("lora_learning_rate",),
    "actor_model_name_or_path": ("actor",),
    "actor_weight_decay": ("weight_decay",),
    "actor_zero_stage": ("placement.zero_stage",),
    "clip_reward_value": ("score_clip",),
    "critic_gradient_checkpointing": ("placement.activation_checkpointing",),
    "critic_lora_dim": ("critic_lora_rank",),
    "critic_model_name_or_path": ("reward",),
    "critic_weight_decay": ("weight_decay",),
    "critic_zero_stage": ("placement.critic_zero_stage",),
    "data_path": ("datasets",),
    "enable_ema": ("ema_decay",),
    "enable_hybrid_engine": ("generation_backend",),
    "enable_test_mode": ("max_steps",),
    "eval_interval": ("eval_steps",),
    "eval_iters": ("eval_prompts",),
    "generation_batches": ("rollout_batch_size",),
    "inference_tp_size": ("placement.vllm_tensor_parallel_size",),
    "kl_ctl": ("kl_coef",),
    "lora_dim": ("lora_rank",),
    "max_answer_seq_len": ("max_response_length",),
    "max_prompt_seq_len": ("max_prompt_length",),
    "max_seq_len": ("max_length",),
    "num_warmup_steps": ("warmup_steps",),
    "offload": ("placement.offload",),
    "offload_reference_model": ("placement.offload_frozen",),
    "offload_reward_model": ("placement.offload_frozen",),
    "only_optimize_lora": ("train_base",),
    "per_device_eval_batch_size": ("placement.micro_batch_tokens",),
    "per_device_generation_batch_size": ("rollout_batch_size",),
    "per_device_training_batch_size": ("global_batch_size",),
    "print_answers": ("log_responses_steps",),
    "print_answers_interval": ("log_responses_steps",),
    "test_stop_step": ("max_steps",),
    "unsup_coef": ("ptx_coef",),
    "unsupervised_dataset_config_name": ("ptx",),
    "unsupervised_dataset_name": ("ptx",),
    "zero_stage": ("placement.zero_stage",),
}
# Those that are factors of the size of a batch over all processes.
FACTORS = {
    "generation_batches",
    "gradient_accumulation_steps",
    "per_device_generation_batch_size",
    "per_device_train_batch_size",
    "per_device_training_batch_size",
}
NO_DROPOUT = "dropout is always off"
ALL_LAYERS = "adapters cover all linear layers of the transformer blocks"
NO_HYBRID_ENGINE = "the hybrid engine is not supported: generation_backend: vllm samples faster"
TENSORBOARD = "TensorBoard is always on, in output/logs"
TEMPLATE_END = "a response ends as the template ends a turn"
PLACEMENT = "placement has the keys of DeepSpeed"
# What replaces flags of DeepSpeed-Chat without a corresponding key of a recipe.
WITHOUT_KEY = {
    "actor_dropout": NO_DROPOUT,
    "actor_lora_module_name": ALL_LAYERS,
    "add_eot_token": TEMPLATE_END,
    "align_overflow": "a step whose gradients overflow is skipped in the model that it concerns",
    "compute_fp32_loss": "losses are always computed in fp32",
    "critic_dropout": NO_DROPOUT,
    "critic_lora_module_name": ALL_LAYERS,
    "data_output_path": "prepared data is stored below output/store",
    "data_split": "it is split.weights at the top level of the config",
    "deepspeed": PLACEMENT,
    "deepspeed_config": PLACEMENT,
    "dropout": NO_DROPOUT,
    "enable_mixed_precision_lora": "ZeRO++ is not supported",
    "enable_tensorboard": TENSORBOARD,
    "eot_token": TEMPLATE_END,
    "eval_iters": "evaluations use all held-out rows",
    "local_rank": "scripts/launch.py starts the processes",
    "lora_module_name": ALL_LAYERS,
    "num_padding_at_beginning": "padding is never identified by a token",
    "offload_reference_model": "reference log-probabilities are computed once, before training",
    "output_dir": "the target names the result: output/STAGE/RECIPE",
    "preprocessing_num_workers": "the jobs that prepare data choose their processes",
    "print_loss": "the log and metrics.jsonl have the loss of each step",
    "release_inference_cache": NO_HYBRID_ENGINE,
    "sft_only_data_path": "it is split: [sft] of an entry of datasets",
    "tensorboard_path": TENSORBOARD,
    "tp_gather_partition_size": NO_HYBRID_ENGINE,
    "unpin_actor_parameters": NO_HYBRID_ENGINE,
}
# Similarity of two names that counts as a typo, from 0 to 1.
SIMILARITY = 0.6
# A section with at most this number of keys lists them.
FEW_KEYS = 8


def key_hint(key: str, allowed: Mapping[str, Any]) -> str:
    """Return a hint for an unknown key, in parentheses; an empty text if there is none.

    Args:
        key: The key, maybe written as a flag (`--lora-dim`).
        allowed: The schema of each key that the section may have.
    """
    flag = key.lstrip("-").replace("-", "_")
    names = (*NAMES_ELSEWHERE.get(flag, ()), *DEEPSPEED_CHAT.get(flag, ()))
    for name in names:
        if _has_key(allowed, name):
            return f" (it is {'a factor of ' if flag in FACTORS else ''}{name} here)"
    if flag in WITHOUT_KEY:
        return f" ({WITHOUT_KEY[flag]})"
    for name in (flag, *names):
        if stages := [stage for stage in allowed if _has_key(_recipe_keys(allowed[stage]), name)]:
            return f" (it is {name} of a recipe of {', '.join(stages)})"
    similar = nearest(flag, allowed)
    if similar is not None:
        return f" (did you mean {similar}?)"
    return f" (available: {', '.join(allowed)})" if len(allowed) <= FEW_KEYS else ""


def _recipe_keys(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of each key of a recipe, of the schema of a stage; none of another one."""
    recipes = section.get("properties", {}).get("recipes", {}).get("additionalProperties")
    return recipes.get("properties", {}) if isinstance(recipes, Mapping) else {}


def _has_key(allowed: Mapping[str, Any], path: str) -> bool:
    """Return whether a section may have a key, or one of its keys a key: `placement.offload`."""
    key, dot, inner = path.partition(".")
    return key in allowed and (not dot or _has_key(allowed[key].get("properties", {}), inner))


def available(name: str, names: Collection[str]) -> str:
    """Return the names that exist, in parentheses, for an error about one that does not."""
    similar = nearest(name, names)
    guess = "" if similar is None else f"did you mean {similar}? "
    return f"({guess}available: {', '.join(sorted(names)) or 'none'})"


def new_entry(section: str) -> str:
    """Return how a section gets an entry for files; an empty text for other sections."""
    if section not in ("datasets", "models"):
        return ""
    return f": {section} needs an entry with the path of your files, or their name on the Hub (hub)"


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the most similar one of some names, if any is similar."""
    similar = difflib.get_close_matches(name, names, 1, SIMILARITY)
    return similar[0] if similar else None
