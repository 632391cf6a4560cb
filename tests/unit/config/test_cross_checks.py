"""Mistakes in the config: one line that names the key, before anything is planned."""

import json
import shutil

import pytest

from conftest import ROOT
from snakechat.config.schema import ConfigError
from support.configs import load, tiny

MY_TOKENIZER = {"train_on": "mine", "vocab_size": 300}
TEXTS = {"datasets": {"texts": {"path": "x", "format": "text"}}}
JUDGE = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind."}


def with_dataset(stage="sft", **settings):
    """Return a dataset and a recipe that uses it."""
    recipe = {"model": "tiny", "datasets": ["mine"]}
    dataset = {"path": "mine", "format": "plain", **settings}
    return {"datasets": {"mine": dataset}, stage: {"recipes": {"mine": recipe}}}


REWARD_FUNCTIONS = {
    "broken": b"def score(prompts, responses):\n    return (\n",
    "lost": b"from snakechat.shop import is_right\n",
    "reward": b"def score(prompts, responses):\n    return []\n",
    "scaled": b"def score(prompts, responses, scale=1):\n    return []\n",
    "needs": b"def score(prompts, responses, solution, *, bonus, level=1):\n    return []\n",
}

GENERATED = {"generations": "tiny", "select": "best", "split": {"sft": 1, "reward": 1, "rlhf": 1}}
OF_MINE = {"datasets": ["mine"]}

# The key that the error names, and changes to config.yaml. One case for each kind of check.
MISTAKES = [
    # Names that the config does not have, or that are not in the right section.
    ("sft.recipes.tiny.model", tiny("sft", model="tinny")),
    ("reward.recipes.tiny.datasets", tiny("reward", datasets=["toy", "toys"])),
    ("rlhf.recipes.tiny.actor", tiny("rlhf", actor="reward/tiny")),
    ("sft.recipes.tiny.placement", tiny("sft", placement="laptop")),
    ("rlhf.recipes.tiny.reward", tiny("rlhf", reward="llm_judges/wise")),
    # Datasets without what a recipe needs.
    ("datasets.mine.columns", with_dataset(format="scored", columns={"prompt": "q", "first": "a"})),
    ("datasets.mine.keep", with_dataset(keep=["first.answer", "second.answer"])),
    ("sft.recipes.tiny.datasets", tiny("sft", datasets=["toy", {"toy": 2}])),
    ("reward.recipes.mine.datasets", with_dataset("reward", format="messages")),
    (
        "reward.recipes.mine.datasets",
        with_dataset("reward", split={"sft": 1, "reward": 0, "rlhf": 0}),
    ),
    (
        "dpo.recipes.mine.datasets",
        {"datasets": {"mine": GENERATED}, "dpo": {"recipes": {"mine": OF_MINE}}},
    ),
    (
        "models.mine.tokenizer.train_on",
        {
            "models": {"mine": {"init": {"model_type": "opt"}, "tokenizer": MY_TOKENIZER}},
            "datasets": {"mine": GENERATED},
        },
    ),
    # Recipes that depend on themselves.
    ("rlhf.recipes.tiny", tiny("rlhf", algorithm="distill", teacher="rlhf/tiny")),
    (
        "sft.recipes.tiny",
        {
            "llm_judges": {"wise": JUDGE},
            "datasets": {"mine": {"label": "toy-round-1", "llm_judge": "wise"}},
            **tiny("sft", **OF_MINE),
        },
    ),
    # Settings that do not fit each other.
    ("reward.recipes.tiny.save_strategy", tiny("reward", save_strategy="best")),
    ("rlhf.recipes.tiny.compare_with", tiny("rlhf", compare_with=["dpo/1.3b"])),
    ("rlhf.recipes.tiny.ptx", tiny("rlhf", ptx="125m")),
    ("rlhf.recipes.tiny.kl_estimator", tiny("rlhf", kl_in="loss", kl_estimator="k1")),
    ("rlhf.recipes.tiny.global_batch_size", tiny("rlhf", algorithm="grpo", num_generations=3)),
    ("rlhf.recipes.tiny.num_generations", tiny("rlhf", algorithm="grpo", num_generations=1)),
    ("rlhf.recipes.tiny.teacher", tiny("rlhf", algorithm="distill")),
    ("rlhf.recipes.tiny.teacher", tiny("rlhf", teacher="dpo/tiny")),
    ("rlhf.recipes.tiny", tiny("rlhf", reward=None)),
    ("sft.recipes.tiny.placement.zero_stage", tiny("sft", placement={"offload": "optimizer"})),
    (
        "models.opt-125m.template_arguments.tools",
        {"models": {"opt-125m": {"template_arguments": {"tools": "none"}}}},
    ),
    ("rlhf.recipes.tiny.datasets", TEXTS | tiny("rlhf", datasets=["texts"])),
    ("sft.recipes.tiny.datasets", TEXTS | tiny("sft", datasets=["texts"], train_on="response")),
    *(
        ("llm_judges.wise.parameters", {"llm_judges": {"wise": JUDGE | {"parameters": {key: 1}}}})
        for key in ("n", "stream", "messages", "logprobs")
    ),
    ("sft.recipes.tiny.gate", tiny("sft", gate={"metric": "loss", "min": 2, "max": 1})),
    (
        "datasets.mine.min_margin",
        {"datasets": {"mine": {"generations": "tiny", "select": "best", "min_margin": 0.5}}},
    ),
    *(
        ("models.tiny.template_arguments", {"models": {"tiny": settings}, "template": template})
        for settings, template in (
            ({"template_arguments": {"thinking": True}}, "auto"),
            ({"template_arguments": {"thinking": True}, "template": "dialogue"}, "chat"),
        )
    ),
    (
        "rlhf.recipes.tiny-grpo.placement.critic_zero_stage",
        {"rlhf": {"recipes": {"tiny-grpo": {"placement": {"critic_zero_stage": 1}}}}},
    ),
    (
        "rlhf.recipes.tiny.placement.vllm_tensor_parallel_size",
        tiny("rlhf", placement={"vllm_tensor_parallel_size": 2, "gpus_per_node": 2}),
    ),
    *(
        ("llm_judges.wise.scale", {"llm_judges": {"wise": JUDGE | {"scale": scale}}})
        for scale in ([10, 1], [1, 1])
    ),
    *(
        ("llm_judges.wise.url", {"llm_judges": {"wise": JUDGE | {"url": url}}})
        for url in ("https://me:secret@host/v1", "http://[1:2]/v1", "http://host:99999/v1")
    ),
    # Reward functions: unknown, with a syntax error, with an unknown argument, without a column,
    # with the name of the reward model in metrics.
    *(
        ("rlhf.recipes.tiny.reward_functions", tiny("rlhf", reward_functions=functions))
        for functions in (
            {"shopping": 1},
            {"shop": 1, "broken": 1},
            {"needs": {"weight": 1, "arguments": {"bonsu": 2}}},
            {"needs": {"weight": 1, "arguments": {"bonus": 2}}},
            {"reward": 1},
        )
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A project with the invalid reward functions."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    shutil.copytree(ROOT / "rewards", folder / "rewards")
    for name, content in REWARD_FUNCTIONS.items():
        (folder / f"rewards/{name}.py").write_bytes(content)
    return folder


@pytest.mark.parametrize(("key", "changes"), MISTAKES)
def test_mistake_is_reported_in_one_line(root, key, changes):
    with pytest.raises(ConfigError) as error:
        load(changes, root)
    message = str(error.value)
    assert message.startswith((f"config: {key}: ", f"config: {key} "))
    assert "\n" not in message


def test_a_training_may_choose_its_zero_stage_and_checkpointing(root):
    placement = {"zero_stage": "auto", "offload": "optimizer", "compile": True}
    config = load(tiny("sft", placement=placement), root)
    assert config.recipe("sft", "tiny")["placement"].items() >= placement.items()


def test_datasets_of_prompts_and_kept_columns_serve_rlhf(root):
    dataset = {"path": "mine", "format": "prompt", "keep": ["answers.solution"]}
    functions = {"needs": {"weight": 0.5, "arguments": {"bonus": 1}}, "length_bounds": 1}
    # A parameter with a default.
    functions["scaled"] = {"weight": 1, "arguments": {"scale": 2}}
    recipe = {"datasets": ["toy", "mine"], "reward_functions": functions}
    config = load({"datasets": {"mine": dataset}, **tiny("rlhf", **recipe)}, root)
    assert config.split_weights("mine") == {"sft": 0, "reward": 0, "rlhf": 1}


LANGUAGE_MODEL = {"architectures": ["LlamaForCausalLM"]}
# With two labels, the default of transformers.
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
SCORER = CLASSIFIER | {"id2label": {"0": "SCORE"}}


@pytest.mark.parametrize(
    ("keys", "recipe", "problem"),
    [
        (
            LANGUAGE_MODEL,
            {"reward": "models/mine"},
            "is LlamaForCausalLM, expected a sequence classifier with one label: use",
        ),
        (CLASSIFIER, {"reward": "models/mine"}, "has 2 labels, expected 1, the score: use"),
        (SCORER, {"actor": "models/mine"}, "is a sequence classifier, expected a language model"),
        (SCORER, {"reward": {"models/mine": 0.5, "reward/tiny": 1}}, None),
        (LANGUAGE_MODEL, {"actor": "models/mine"}, None),
        # An unreadable file is not a mistake in the config.
        (None, {"reward": "models/mine"}, None),
    ],
)
def test_a_local_model_is_of_the_kind_that_its_use_needs(keys, recipe, problem, tmp_path):
    (tmp_path / "config.json").write_text("{" if keys is None else json.dumps(keys))
    changes = {"models": {"mine": {"path": str(tmp_path)}}, **tiny("rlhf", **recipe)}
    if problem is None:
        load(changes)
        return
    with pytest.raises(
        ConfigError, match=f"^config: rlhf.recipes.tiny.* names .*mine, .*{problem}"
    ):
        load(changes)
