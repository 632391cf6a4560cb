"""Settings without an effect: no spec has them, and a recipe that sets one is a mistake."""

import pytest

from snakechat.config.recipes import ConfigError
from snakechat.config.sections import judge_settings
from snakechat.jobs.rules import RULES
from snakechat.workflow.manifest import digest
from support.configs import load

GRPO = {"algorithm": "grpo", "num_generations": 4}
LORA = {"lora_rank": 4}
DISTILL = {"algorithm": "distill", "teacher": "dpo/tiny"}
CRITIC = {
    **{"critic_learning_rate": 0.1, "critic_lr_schedule": "cosine", "critic_warmup_steps": 3},
    **{"critic_lora_rank": 4, "critic_lora_alpha": 8, "critic_lora_learning_rate": 0.2},
    **{"value_clip_range": 0.3, "gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": False},
}
KL = {"kl_in": "loss", "kl_estimator": "k3", "kl_target": 3.0, "kl_horizon": 9}
SCORES = {"standardize_scores": "none", "score_clip": 2.0, "missing_eos_penalty": 3.0}

# The stage, settings of a recipe, and further ones that have no effect with these.
WITHOUT_EFFECT = [
    (
        "sft",
        {},
        {"lora_alpha": 32, "lora_learning_rate": 0.1, "train_base": "embeddings_and_norms"},
    ),
    ("sft", {**LORA, "lora_learning_rate": 0.1}, {"learning_rate": 0.5}),
    ("dpo", {"loss": "ipo"}, {"label_smoothing": 0.1, "margin": 1.0, "desirable_weight": 2.0}),
    ("dpo", {"loss": "simpo"}, {"length_normalized": True, "undesirable_weight": 2.0}),
    ("rlhf", GRPO, CRITIC),
    ("rlhf", {"num_generations": 2}, {"scale_by_std": False, "drop_uniform_groups": True}),
    ("rlhf", {"lr_schedule": "constant"}, {"min_lr_ratio": 0.5}),
    ("rlhf", {}, {"ptx_coef": 2, "importance_sampling_cap": 3.0}),
    ("rlhf", {}, {"kl_horizon": 20, "eval_prompts": 4}),
    ("rlhf", {"kl_coef": 0}, KL),
    ("rlhf", {"missing_eos_penalty": 0}, {"overlong_buffer": 4}),
    ("rlhf", DISTILL, {**CRITIC, **KL, **SCORES, "kl_coef": 0.5, "kl_estimator": "k1"}),
]


def descriptions(changes, stage="rlhf", name="tiny"):
    """Return what a training and its evaluation are made from."""
    config = load(changes)
    return [RULES[f"{verb}_{stage}"].describe(config, name) for verb in ("train", "evaluate")]


def recipe(stage, settings, **preset):
    """Return a recipe, of which a preset may have some settings."""
    base = {"actor": "sft/tiny"} if stage == "rlhf" else {"model": "tiny"}
    mine = {**base, "datasets": ["toy"], **settings} | ({"preset": "mine"} if preset else {})
    return {stage: {"recipes": {"mine": mine}, "presets": {"mine": preset}}}


@pytest.mark.parametrize(("stage", "settings", "further"), WITHOUT_EFFECT)
def test_a_preset_may_have_settings_without_effect_and_a_recipe_may_not(stage, settings, further):
    plain = descriptions(recipe(stage, settings), stage, "mine")
    assert descriptions(recipe(stage, settings, **further), stage, "mine") == plain
    for key, value in further.items():
        place = f"config: {stage}.recipes.mine.{key}: "
        with pytest.raises(ConfigError, match=f"^{place}.* has no effect with.*: remove it"):
            load(recipe(stage, {**settings, key: value}))


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("sft", {**LORA, "train_base": "embeddings_and_norms", "lora_learning_rate": 0.1}),
        ("dpo", {"loss": "kto", "desirable_weight": 2.0, "length_normalized": True}),
        ("rlhf", CRITIC),
        ("rlhf", {**KL, "kl_coef": 0.2}),
        ("rlhf", {**GRPO, **SCORES, "scale_by_std": False, "overlong_buffer": 2}),
    ],
)
def test_settings_with_an_effect_are_in_the_spec(stage, settings):
    changes = recipe(stage, settings)
    used = descriptions(changes, stage, "mine")[0].settings
    assert used.items() >= settings.items()


def test_a_sweep_that_varies_a_setting_without_effect_is_a_mistake():
    def compare(**over):
        sweep = {"stage": "sft", "recipe": "tiny", "over": over}
        return load({"sweeps": {"mine": sweep}}).compared_recipes("sft", "mine")

    # min_lr_ratio belongs to the recipe that the sweep starts from.
    assert len(compare(lr_schedule=["cosine", "linear"])) == 2
    assert len(compare(lora_rank=[4, 8], lora_alpha=[16, 32])) == 4
    with pytest.raises(ConfigError, match=r"mine-lora_rank-0-lora_alpha-16\.lora_alpha: 16 has no"):
        compare(lora_rank=[0, 8], lora_alpha=[16, 32])


JUDGE = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind."}
TWO = {"llm_judges": {"a": JUDGE, "b": JUDGE}}
# Settings of a recipe, and other spellings of these.
SPELLINGS = [
    ("rlhf", {}, {"reward": {"reward/tiny": 1}}),
    ("rlhf", {"dtype": "fp32"}, {"dtype": "fp32", "clip_range_high": 0.2, "save_dtype": "fp32"}),
    ("rlhf", {}, {"kl_in": "rewards", "kl_estimator": "k1", "critic_lr_schedule": "cosine"}),
    ("rlhf", {}, {"datasets": [{"toy": 1}]}),
    (
        "rlhf",
        {"reward_functions": {"shop": 1}},
        {"reward_functions": {"shop": {"weight": 1, "arguments": {}}}},
    ),
    (
        "rlhf",
        {"reward": {"llm_judges/a": 1, "reward/tiny": 1, "llm_judges/b": 2}},
        {"reward": {"reward/tiny": 1, "llm_judges/b": 2, "llm_judges/a": 1}},
    ),
    ("sft", {**LORA, "learning_rate": 0.1}, {**LORA, "lora_learning_rate": 0.1}),
    (
        "sft",
        {**LORA, "lora_target_modules": ["k_proj", "q_proj"]},
        {**LORA, "lora_target_modules": ["q_proj", "k_proj", "q_proj"]},
    ),
    (
        "sft",
        {"weight_decay": 0, "adam_betas": [0, 0.9]},
        {"weight_decay": -0.0, "adam_betas": ["-0e0", 0.9]},
    ),
]
UNCHANGED = {"template": "dialogue", "evaluation": {"llm_judge_prompts": 7}}


@pytest.mark.parametrize(("stage", "settings", "others"), SPELLINGS)
def test_other_spellings_of_a_value_make_the_same_spec(stage, settings, others):
    defaults = {"reward": "reward/tiny"} if stage == "rlhf" else {}
    found = [
        descriptions(recipe(stage, defaults | each) | more, stage, "mine")
        for each, more in ((settings, TWO), (others, TWO | UNCHANGED))
    ]
    assert found[0] == found[1]
    # 0.0 and -0.0 are equal as numbers alone.
    assert len({digest([each.settings for each in both]) for both in found}) == 1


def test_an_evaluation_has_the_judge_that_compares_responses():
    found = descriptions(TWO | {"evaluation": {"llm_judge": "b"}})
    assert [[*each.settings["llm_judges"]] for each in found] == [[], ["b"]]


def test_requests_to_a_judge_have_one_spelling():
    parameters = [{"temperature": zero, "more": {"seeds": [zero, 0.5]}} for zero in (0.0, 0, -0.0)]
    judges = [{**JUDGE, "parameters": each} for each in parameters]
    judges.append({**judges[0], "rubric": f" {JUDGE['rubric']}\n"})
    found = [load({"llm_judges": {"wise": each}}) for each in judges]
    settings = [judge_settings(config.values["llm_judges"], ["wise"]) for config in found]
    assert len(set(map(repr, settings))) == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("offload_frozen", True, "True has no effect outside of rlhf: remove it"),
        ("critic_zero_stage", 2, "2 has no effect without algorithm: ppo: remove it"),
        ("max_mem_mb", 10, r"10 is less than mem_mb \(4000\)"),
    ],
)
def test_keys_of_a_placement_without_effect_are_mistakes(key, value, message):
    changes = recipe("sft", {"placement": {"deployment": "cpu", key: value}})
    with pytest.raises(
        ConfigError, match=rf"^config: sft\.recipes\.mine\.placement\.{key}: {message}"
    ):
        load(changes)
