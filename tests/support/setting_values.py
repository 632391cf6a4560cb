"""Other values of settings than those of the tiny recipes, and the rules that depend on each."""

from support.staleness import (
    CONFIG,
    RECIPES,
    SCHEMA,
    SFT_TRAINED,
    stale,
)

# The rules that build another dataset, SFT model or reward model for the first time.
DATASET = {"import_dataset", "split_dataset"}
SFT = {"tokenize_sft", "train_sft", "evaluate_sft"}
TRAINED_REWARD = {"tokenize_reward", "train_reward"}
REWARD = TRAINED_REWARD | {"evaluate_reward"}

# Another value of each setting of the stages, and the rules that must run after the change.
DATASETS = {"datasets": ["toy", "other"]}
CUT = {"max_length": 95}
DTYPE = {"dtype": "fp32"}
# Settings of RLHF whose values have to fit one another.
RL = {"reward_functions": {"shop": 1}, "num_generations": 2, "rollout_batch_size": 64}
RL |= {"kl_in": "loss", "kl_estimator": "k2"}
BETAS = {"adam_betas": [0.95, 0.9]}
BOUNDS = {"max_characters": 40}
SAMPLING = {"num_generations": 3, "temperature": 0.9, "generation_backend": "vllm"}
SAMPLING |= {"max_response_length": 23, "dtype": "bf16"}
# Settings with a row in SETTINGS.
SPECIAL = ("algorithm", "preset", "drop_uniform_groups", "compare_with", "judge", "ptx", "margin")
SPECIAL += ("desirable_weight", "undesirable_weight", "save_strategy", "early_stopping_patience")
SPECIAL += ("eval_prompts", "gate", "teacher", "teacher_top_k")
STAGES = {
    f"{stage}.{key}": (value, rules)
    for stage, settings, rules in (
        ("sft", {"model": "other"}, stale("init_model")),
        ("sft", DATASETS, DATASET | stale("tokenize_sft")),
        ("sft", CUT, stale("tokenize_sft")),
        ("sft", BETAS | {"max_steps": 5}, SFT_TRAINED),
        ("reward", {"model": "tiny"}, stale("train_reward")),
        ("reward", DATASETS, DATASET | stale("tokenize_reward")),
        ("reward", CUT, stale("tokenize_reward")),
        ("reward", BETAS | {"max_steps": 5}, stale("train_reward")),
        ("dpo", {"model": "tiny"}, stale("compute_reference")),
        ("dpo", DATASETS, DATASET | stale("tokenize_dpo")),
        ("dpo", CUT, stale("tokenize_dpo")),
        ("dpo", DTYPE, stale("compute_reference")),
        # Without a reference model.
        ("dpo", {"loss": "simpo"}, stale("train_dpo")),
        ("dpo", BETAS, stale("train_dpo")),
        # In 16 bits, the reference follows the batches of the training.
        ("dpo", {"max_steps": 5, "epochs": 7, "global_batch_size": 7}, stale("compute_reference")),
        ("rlhf", {"actor": "sft/other"}, SFT | stale("train_rlhf")),
        ("rlhf", {"reward": "reward/other"}, REWARD | stale("train_rlhf")),
        ("rlhf", DATASETS, DATASET | stale("tokenize_rlhf")),
        ("rlhf", {"max_prompt_length": 47}, stale("tokenize_rlhf")),
        ("rlhf", RL | BETAS | {"max_steps": 5}, stale("train_rlhf")),
        ("generations", DATASETS, DATASET | stale("tokenize_generations")),
        ("generations", {"max_prompt_length": 47}, stale("tokenize_generations")),
        ("generations", {"model": "tiny"}, stale("generate_responses")),
        ("generations", SAMPLING, stale("generate_responses")),
        ("generations", {"reward": "reward/other"}, TRAINED_REWARD | stale("score_responses")),
        ("generations", {"reward_functions": {"shop": 1}}, stale("score_responses")),
    )
    for key, value in settings.items()
}


def another_value(schema, value):
    """Return a value that a JSON schema allows, other than the given one."""
    if "enum" in schema:
        return next(choice for choice in schema["enum"] if choice != value)
    if isinstance(value, bool):
        return not value
    if schema["type"] == "integer":
        return value + 1
    return value / 2 if value else 0.25


# All other settings count in training alone.
STAGES |= {
    f"{stage}.{key}": (
        another_value(schema, {**CONFIG[stage]["defaults"], **RECIPES[stage]}[key]),
        SFT_TRAINED if stage == "sft" else stale(f"train_{stage}"),
    )
    for stage in RECIPES
    for key, schema in SCHEMA["properties"][stage]["properties"]["defaults"]["properties"].items()
    if f"{stage}.{key}" not in STAGES and key not in ("placement", "seed", *SPECIAL)
}


def is_stated(name):
    """Return whether the tiny recipe sets a key itself."""
    stage, key = name.split(".")
    return key in RECIPES[stage]


# Weights of the phases, as in config.yaml.
SHARES = {"sft": 2, "reward": 4, "rlhf": 4}
# Other values of where and how a judge is asked.
ACCESS = {
    "url": "http://elsewhere/v1",
    "key_env": "KEY",
    "requests_per_minute": 60,
    "concurrency": 2,
}

# Another value of each setting that determines only where and how a job runs.
PLACE = {
    "nodes": 2,
    "gpus_per_node": 8,
    "zero_stage": 2,
    "offload": "optimizer",
    "activation_checkpointing": True,
    "micro_batch_tokens": 4096,
    "threads": 3,
    "mem_mb": 2000,
    "runtime": 30,
    "generate_tokens": 5000,
    "pad_to_multiple_of": 64,
    "prefetch": True,
    "cuda_graphs": True,
    "attn_implementation": "flex",
    "compile": True,
    "vllm_tensor_parallel_size": 2,
    "environment": {"NCCL_SOCKET_IFNAME": "eth1"},
}
PLACEMENT = {
    "save_steps": 7,
    "shared_store": "elsewhere",
    "store_max_size": "1G",
    "container": "docker://registry.example.com/snakechat",
    "deployment": "multi_node",
    **{f"deployments.{key}": value for key, value in PLACE.items()},
    **{
        f"{stage}.placement.{key}": value
        for stage in RECIPES
        for key, value in {**PLACE, "deployment": "single_node"}.items()
    },
    **{f"llm_judges.{key}": value for key, value in ACCESS.items()},
    "rlhf.placement.critic_zero_stage": 1,
    "rlhf.placement.offload_frozen": True,
}
