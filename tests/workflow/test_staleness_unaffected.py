"""Edits that change no result make nothing stale."""

import yaml

from support.setting_values import (
    ACCESS,
    PLACE,
    PLACEMENT,
    SHARES,
    STAGES,
    is_stated,
)
from support.staleness import (
    CONFIG,
    RECIPES,
    Row,
    backwards,
    config,
    few_rows,
    fresh,
    nested,
    replaced,
    rows,
    setting,
)


def reformat_the_config(folder):
    text = yaml.safe_dump(backwards(CONFIG), sort_keys=False, default_flow_style=False)
    (folder / "config.yaml").write_text(text)


def placement(*names):
    """Change settings of PLACEMENT."""
    places = {name: name.replace(".placement", ".recipes.tiny.placement") for name in names}
    return config(*(nested(places[name], PLACEMENT[name]) for name in names))


PLACES = {stage: [name for name in PLACEMENT if name.startswith(f"{stage}.")] for stage in RECIPES}
OVERRIDDEN = [
    nested(name.replace(".", ".defaults."), value)
    for name, (value, _) in STAGES.items()
    if is_stated(name)
]
STATED = [
    nested(f"{stage}.recipes.tiny", {**CONFIG[stage]["defaults"], **RECIPES[stage]})
    for stage in RECIPES
]
USUAL_COLUMNS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}


FRESH = {
    "comments in the config": fresh(replaced("config.yaml", ("# All settings", "# The settings"))),
    "order and style of the config": fresh(reformat_the_config),
    "spelling of values": fresh(
        replaced(
            "config.yaml",
            ("seed: 1234", "seed: 0x4D2"),
            ("weights: {sft: 2,", "weights: {sft: 2.0,"),
            ("init_std: 0.06", "init_std: 6.0e-2"),
            ("lora_alpha: 1", "lora_alpha: 1.0"),
            ("gamma: 1.0", "gamma: 1"),
            ("actor_learning_rate: 1.0e-3", "actor_learning_rate: .001"),
            ("whiten_advantages: true", "whiten_advantages: True"),
            ("dtype: bf16", 'dtype: "bf16"'),
        )
    ),
    "save_steps": fresh(placement("save_steps")),
    "another store and image": fresh(placement("shared_store", "store_max_size", "container")),
    "deployment": fresh(placement("deployment")),
    "the keys of a deployment": fresh(config(nested("deployments.cpu", PLACE))),
    "another deployment": fresh(setting("deployments.new", CONFIG["deployments"]["cpu"])),
    "the name of a deployment as placement": fresh(
        config(*(nested(f"{stage}.recipes.tiny.placement", "multi_node") for stage in RECIPES))
    ),
    "placement of sft": fresh(placement(*PLACES["sft"])),
    "placement of reward": fresh(placement(*PLACES["reward"])),
    "placement of dpo": fresh(placement(*PLACES["dpo"])),
    "placement of rlhf": fresh(placement(*PLACES["rlhf"])),
    "defaults that the recipes override": fresh(config(*OVERRIDDEN)),
    "defaults stated in the recipes": fresh(config(*STATED)),
    "where and how a judge is asked": fresh(
        config(*(nested(f"llm_judges.wise.{key}", value) for key, value in ACCESS.items()))
    ),
    "a judge that nothing asks": fresh(setting("llm_judges.kind.rubric", "Be brief.")),
    "another recipe": fresh(setting("sft.recipes.350m.epochs", 3)),
    "another dataset": fresh(setting("datasets.local.path", "elsewhere")),
    "another model": fresh(setting("models.opt-125m.revision", "v2")),
    "a new recipe": fresh(setting("rlhf.recipes.new", RECIPES["rlhf"])),
    "a preset that the recipe does not use": fresh(
        setting("rlhf.presets.deepspeed_chat.kl_coef", 0.3)
    ),
    "a preset with the values of the recipe": fresh(
        config(
            nested("rlhf.presets.mine", {"kl_coef": 0.15, "gae_lambda": 0.95}),
            nested("rlhf.recipes.tiny.preset", "mine"),
        )
    ),
    "a preset whose values the recipe overrides": fresh(
        config(
            nested("rlhf.presets.mine", {"kl_coef": 0.3, "ppo_epochs": 1}),
            nested("rlhf.recipes.tiny.preset", "mine"),
        )
    ),
    "the common seed as seed of the recipe": fresh(
        config(*(nested(f"{stage}.recipes.tiny.seed", CONFIG["seed"]) for stage in RECIPES))
    ),
    "the common seed as seed of the dataset": fresh(setting("datasets.toy.seed", CONFIG["seed"])),
    "a weight of one": fresh(setting("sft.recipes.tiny.datasets", [{"toy": 1.0}])),
    "the common split as split of the dataset": fresh(setting("datasets.toy.split", SHARES)),
    "the common template as template of the model": fresh(setting("models.tiny.template", "auto")),
    "the common template as template of a fetched model": fresh(
        setting("models.far.template", "auto")
    ),
    "the common on_bad_row as that of the dataset": fresh(
        setting("datasets.mine.on_bad_row", "fail")
    ),
    "on_bad_row for generated datasets": Row(setting("on_bad_row", "skip"), set()),
    "the usual columns": fresh(setting("datasets.mine.columns", USUAL_COLUMNS)),
    "globs of the same files": fresh(
        setting("datasets.mine", {"train": "train-**.jsonl", "eval": "test.jsonl"})
    ),
    "the origin of a local dataset": fresh(
        setting("datasets.mine", {"hub": "lab/mine", "revision": "main"})
    ),
    "the origin of a local model": fresh(
        setting("models.near", {"hub": "lab/near", "revision": "main"})
    ),
}


def test_every_placement_is_changed():
    cpu = CONFIG["deployments"]["cpu"]
    assert all(PLACE[key] != value for key, value in cpu.items())
    for stage, names in PLACES.items():
        assert RECIPES[stage]["placement"] == {"deployment": "cpu"} != names
        assert {name.rpartition(".")[2] for name in names} >= PLACE.keys() | {"deployment"}
    common = PLACEMENT.keys() & CONFIG.keys()
    assert common == {
        "save_steps",
        "deployment",
        "shared_store",
        "store_max_size",
        "container",
    }
    assert all(PLACEMENT[name] != CONFIG[name] for name in common)


@rows(FRESH)
def test_an_edit_that_changes_no_result_makes_nothing_stale(plans, row):
    assert plans(row) == row.rules


@few_rows(FRESH)
def test_a_dry_run_plans_nothing(dry_runs, row):
    assert dry_runs(row) == row.rules
