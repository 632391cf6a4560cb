"""Hints in errors about keys that the config does not have."""

import pytest

from snakechat.config.errors import ConfigError
from snakechat.config.hints import DEEPSPEED_CHAT, NAMES_ELSEWHERE, WITHOUT_KEY
from snakechat.config.schema import SETTINGS, check_schema, placement_schema, recipe_schema
from support.configs import load

# The flags of each step's main.py, except --help and the flags of the launcher.
SHARED_FLAGS = """
    data_path data_split data_output_path model_name_or_path per_device_train_batch_size
    per_device_eval_batch_size max_seq_len learning_rate weight_decay num_train_epochs
    gradient_accumulation_steps lr_scheduler_type num_warmup_steps output_dir seed local_rank
    gradient_checkpointing dropout offload dtype zero_stage lora_dim lora_module_name
    only_optimize_lora lora_learning_rate compute_fp32_loss enable_tensorboard tensorboard_path
    add_eot_token deepspeed deepspeed_config
"""
DEEPSPEED_CHAT_FLAGS = {
    "sft": f"{SHARED_FLAGS} sft_only_data_path eot_token print_loss",
    "reward": f"{SHARED_FLAGS} num_padding_at_beginning eval_interval eval_iters",
    "dpo": f"""{SHARED_FLAGS} beta label_smoothing offload_reference_model eval_interval eval_iters
        print_loss""",
    "rlhf": """
        data_path data_split data_output_path unsupervised_dataset_name
        unsupervised_dataset_config_name unsup_coef actor_model_name_or_path
        critic_model_name_or_path num_padding_at_beginning per_device_generation_batch_size
        per_device_training_batch_size generation_batches ppo_epochs max_prompt_seq_len
        max_answer_seq_len actor_learning_rate critic_learning_rate actor_weight_decay
        critic_weight_decay num_train_epochs lr_scheduler_type num_warmup_steps
        gradient_accumulation_steps output_dir seed preprocessing_num_workers local_rank
        enable_hybrid_engine unpin_actor_parameters release_inference_cache inference_tp_size
        tp_gather_partition_size offload offload_reference_model offload_reward_model dtype
        actor_zero_stage critic_zero_stage actor_gradient_checkpointing
        critic_gradient_checkpointing actor_dropout critic_dropout actor_lora_dim
        actor_lora_module_name critic_lora_dim critic_lora_module_name only_optimize_lora
        actor_lora_learning_rate critic_lora_learning_rate enable_ema enable_mixed_precision_lora
        compute_fp32_loss enable_tensorboard tensorboard_path add_eot_token align_overflow
        print_answers print_answers_interval enable_test_mode test_stop_step deepspeed
        deepspeed_config kl_ctl clip_reward_value cliprange cliprange_value gamma lam
    """,
}


@pytest.mark.parametrize(
    ("place", "key", "hint"),
    [
        ("sft", "num_train_epochs", " (it is epochs here)"),
        ("rlhf", "beta", " (it is kl_coef here)"),
        ("rlhf", "--actor-lora-dim", " (it is lora_rank here)"),
        ("sft", "gradient_accumulation_steps", " (it is a factor of global_batch_size here)"),
        ("dpo", "offload", " (it is placement.offload here)"),
        ("rlhf", "offload_reference_model", " (it is placement.offload_frozen here)"),
        ("dpo", "learning_rat", " (did you mean learning_rate?)"),
        ("dpo", "unheard_of", ""),
    ],
)
def test_an_unknown_key_of_a_recipe(place, key, hint):
    with pytest.raises(ConfigError) as error:
        load({place: {"recipes": {"tiny": {key: 1}}}})
    assert str(error.value) == (
        f"config: {place}.recipes.tiny: Additional properties are not allowed"
        f" ('{key}' was unexpected){hint}"
    )


def test_a_section_with_few_keys_lists_them():
    with pytest.raises(ConfigError, match=r"\(available: defaults, recipes, presets\)$"):
        load({"sft": {"mine": {"epochs": 1}}})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("ppo_epochs", " (it is ppo_epochs of a recipe of rlhf)"),
        ("actor_zero_stage", " (it is placement.zero_stage of a recipe of sft, reward, dpo, rlhf"),
        ("seedd", " (did you mean seed?)"),
    ],
)
def test_a_key_of_recipes_at_the_top_level(key, hint):
    with pytest.raises(ConfigError) as error:
        load({key: 1})
    assert hint in str(error.value)


def test_hints_name_keys_that_exist():
    keys = {key for stage in SETTINGS for key in recipe_schema(stage)["properties"]}
    keys |= {f"placement.{key}" for key in placement_schema("rlhf")["properties"]}
    for names in (*NAMES_ELSEWHERE.values(), *DEEPSPEED_CHAT.values()):
        assert keys.issuperset(names)


def hint_about(stage, key):
    """The hint in the error about a key of a recipe."""
    with pytest.raises(ConfigError) as error:
        check_schema({key: 1}, recipe_schema(stage))
    return str(error.value).partition("was unexpected)")[2]


@pytest.mark.parametrize("stage", DEEPSPEED_CHAT_FLAGS)
def test_each_flag_of_deepspeed_chat_is_a_key_or_has_a_hint(stage):
    keys = recipe_schema(stage)["properties"]
    for flag in DEEPSPEED_CHAT_FLAGS[stage].split():
        if flag not in keys:
            hint = hint_about(stage, flag)
            assert hint.startswith(" (it is ") or hint == f" ({WITHOUT_KEY[flag]})", (flag, hint)


@pytest.mark.parametrize("section", ["datasets", "models"])
def test_an_unknown_path_of_a_recipe_names_the_section_that_needs_an_entry(section):
    key = {"datasets": {"datasets": ["my/folder"]}, "models": {"model": "my/folder"}}[section]
    with pytest.raises(ConfigError, match=f": {section} needs an entry with the path of your"):
        load({"sft": {"recipes": {"tiny": key}}})
