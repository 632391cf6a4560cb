"""Settings make exactly the results stale that depend on them."""

import shutil

import pytest

from support.setting_values import (
    BOUNDS,
    PLACEMENT,
    REWARD,
    SHARES,
    STAGES,
    is_stated,
)
from support.staleness import (
    CONFIG,
    COPIED,
    FAR,
    FETCHED,
    IMPORTED,
    MINE,
    NEAR,
    QUICK,
    RECIPES,
    SCHEMA,
    SFT_TRAINED,
    SPLIT,
    TAUGHT,
    TOKENIZED,
    TOKENIZERS,
    Row,
    config,
    few_rows,
    merged,
    move_the_model,
    nested,
    replaced,
    rows,
    setting,
    stale,
    tiny_rlhf,
    write_config,
)


def place_of(name):
    """Return the path of the key that determines a setting of the tiny recipe."""
    return name.replace(".", ".recipes.tiny." if is_stated(name) else ".defaults.")


# Another value of each key of the config of the tiny model.
INIT = {
    "model_type": "gpt2",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "max_position_embeddings": 256,
    "dropout": 0.1,
    "init_std": 0.05,
}

SWAPPED_COLUMNS = {"prompt": "prompt", "chosen": "rejected", "rejected": "chosen"}
GENERATED = {
    "path": None,
    "format": None,
    "follow_links": None,
    "generate": "shop",
    "rows": 50,
    "eval_rows": 10,
}


def mine(rules, **settings):
    """A row with settings of the local dataset."""
    return Row(setting("datasets.mine", settings), rules, (MINE,))


def far(rules, **settings):
    """A row with settings of the dataset from the hub."""
    return Row(setting("datasets.far", settings), rules, (FAR,))


def other_model(folder):
    move_the_model(folder)
    replaced("elsewhere/config.json", ("{", '{"key": 1,'))(folder)


def other_tokenizer(folder):
    shutil.copytree(folder / "tokenizer", folder / "elsewhere")
    replaced("elsewhere/tokenizer.json", ("<unk>", "<UNK>"))(folder)
    write_config(folder, nested("models.copied.tokenizer.path", "elsewhere"))


PROMPT_PAGES = {"prompt_eval", "rw_eval"}
# Other values of what a judge is asked.
JUDGE = {"model": "wiser", "rubric": "Be brief.", "scale": [1, 5], "parameters": {"seed": 1}}
METRICS = {"sft": "after.perplexity", "reward": "loss", "dpo": "loss", "rlhf": "rlhf.length"}
DPO_SWEEP = {"stage": "dpo", "recipe": "tiny", "over": {"beta": [0.2]}}

# The rules that run models, whose specs have `deterministic` where it is true.
RUNS_MODELS = {f"{verb}_{stage}" for verb in ("train", "evaluate") for stage in RECIPES}
RUNS_MODELS -= {"train_generations", "evaluate_generations"}
RUNS_MODELS |= {"compute_reference", "generate_responses", "score_responses"}
RUNS_MODELS |= {"rw_eval", "prompt_eval", "compare_zero"}

SETTINGS = {
    "seed": Row(setting("seed", 1235), stale("import_dataset")),
    "template": Row(setting("template", "chat"), stale(*TOKENIZERS)),
    "deterministic": Row(setting("deterministic", True), stale(*RUNS_MODELS)),
    "on_bad_row": Row(setting("on_bad_row", "skip"), IMPORTED, (MINE,)),
    "split.by": Row(setting("split.by", "prompt"), stale("split_dataset")),
    "split.weights.sft": Row(setting("split.weights.sft", 3), stale("split_dataset")),
    "split.weights.reward": Row(setting("split.weights.reward", 3), stale("split_dataset")),
    "split.weights.rlhf": Row(setting("split.weights.rlhf", 3), stale("split_dataset")),
    "datasets.path": mine(IMPORTED, path="another"),
    "datasets.hub": far({"import_dataset"}, hub="lab/other"),
    "datasets.revision": far({"import_dataset"}, revision="v2"),
    "datasets.format": mine(IMPORTED, format="instruct"),
    "datasets.columns": mine(IMPORTED, columns=SWAPPED_COLUMNS),
    "datasets.keep": mine(IMPORTED, keep=["chosen"]),
    "datasets.remove": mine(IMPORTED, remove="[.]"),
    "datasets.train": mine(IMPORTED, train="train-1.jsonl", eval="test.jsonl"),
    "datasets.eval": mine(IMPORTED, train="train-**.jsonl", eval="more.jsonl"),
    "datasets.on_bad_row": mine(IMPORTED, on_bad_row="skip"),
    "datasets.split": mine(SPLIT, split=["sft", "rlhf"]),
    "datasets.split.sft": mine(SPLIT, split={**SHARES, "sft": 3}),
    "datasets.split.reward": mine(SPLIT, split={**SHARES, "reward": 3}),
    "datasets.split.rlhf": mine(SPLIT, split={**SHARES, "rlhf": 3}),
    "datasets.max_rows": mine(SPLIT, max_rows=20),
    "datasets.exclude": mine(SPLIT, exclude=[{"pattern": "0001", "because": "a request"}]),
    # A licence changes no bytes of data, and no training. TINY has no source with a licence.
    "datasets.license": mine(set(), license="cc-by-nc-4.0"),
    "models.license": Row(setting("models.far.license", "mit"), set(), (MINE,)),
    # Which files are read is decided by their digests.
    "datasets.follow_links": far(set(), follow_links=True),
    "datasets.generate": mine(IMPORTED, **GENERATED),
    "datasets.rows": Row(setting("datasets.toy.rows", 601), stale("import_dataset")),
    "datasets.eval_rows": Row(setting("datasets.toy.eval_rows", 101), stale("import_dataset")),
    "datasets.seed": Row(setting("datasets.toy.seed", 5), stale("import_dataset")),
    "models.hub": Row(setting("models.far.hub", "lab/other"), FETCHED, (MINE,)),
    "models.path": Row(other_model, {"fetch_model"}, (NEAR,)),
    "models.revision": Row(setting("models.far.revision", "v2"), FETCHED, (MINE,)),
    "models.template": Row(setting("models.tiny.template", "chat"), stale(*TOKENIZERS)),
    "models.template_arguments": Row(
        setting("models.far.template_arguments", {"enable_thinking": False}), FETCHED, (MINE,)
    ),
    "models.tokenizer.train_on": Row(
        setting("models.tiny.tokenizer.train_on", "other"), {"import_dataset", *stale("init_model")}
    ),
    "models.tokenizer.vocab_size": Row(
        setting("models.tiny.tokenizer.vocab_size", 500), stale("init_model")
    ),
    "models.tokenizer.path": Row(other_tokenizer, {"init_model"}, (COPIED,)),
    **{
        f"models.init.{key}": Row(setting(f"models.tiny.init.{key}", value), stale("init_model"))
        for key, value in INIT.items()
    },
    **{name: Row(setting(place_of(name), value), rules) for name, (value, rules) in STAGES.items()},
    **{
        f"{stage}.seed": Row(setting(f"{stage}.recipes.tiny.seed", 5), stale(f"tokenize_{stage}"))
        for stage in RECIPES
    },
    # With as many responses as it needs; test_rl_settings_count changes the algorithm alone.
    "rlhf.algorithm": Row(tiny_rlhf(algorithm="rloo", num_generations=2), stale("train_rlhf")),
    # Built together with the first recipe that learns from it.
    "sft.teacher": Row(setting("sft.recipes.mine.teacher", None), {"train_sft"}, (MINE,)),
    "sft.teacher_top_k": Row(setting("sft.recipes.mine.teacher_top_k", 8), TAUGHT, (MINE,)),
    "rlhf.teacher": Row(tiny_rlhf(algorithm="distill", teacher="dpo/tiny"), stale("train_rlhf")),
    "dpo.margin": Row(
        setting("dpo.recipes.tiny", {"loss": "simpo", "margin": 0.5}), stale("train_dpo")
    ),
    # KTO also reads responses to other prompts, and single responses.
    **{
        f"dpo.{key}": Row(
            setting("dpo.recipes.tiny", {"loss": "kto", key: 2.0}), stale("tokenize_dpo")
        )
        for key in ("desirable_weight", "undesirable_weight")
    },
    # With the evaluations that they compare.
    **{
        f"{stage}.{key}": Row(
            setting(f"{stage}.recipes.tiny", {"eval_steps": 3, key: value}),
            SFT_TRAINED if stage == "sft" else stale(f"train_{stage}"),
        )
        for stage in ("sft", "reward", "dpo", "rlhf")
        for key, value in {"save_strategy": "best", "early_stopping_patience": 2}.items()
    },
    "rlhf.eval_prompts": Row(tiny_rlhf(eval_steps=3, eval_prompts=64), stale("train_rlhf")),
    "rlhf.drop_uniform_groups": Row(
        tiny_rlhf(algorithm="rloo", num_generations=2, drop_uniform_groups=True),
        stale("train_rlhf"),
    ),
    **{
        f"{stage}.reward_functions.{key}": Row(
            setting(
                f"{stage}.recipes.tiny.reward_functions.length_bounds",
                {"weight": 1, "arguments": {}, **change},
            ),
            stale(rule),
        )
        for stage, rule in {"rlhf": "train_rlhf", "generations": "score_responses"}.items()
        for key, change in {"weight": {"weight": 2}, "arguments": {"arguments": BOUNDS}}.items()
    },
    "rlhf.preset": Row(tiny_rlhf(preset="deepspeed_chat"), stale("train_rlhf")),
    **{
        f"{stage}.preset": Row(
            setting(f"{stage}.recipes.tiny.preset", "modern"),
            SFT_TRAINED if stage == "sft" else stale(f"train_{stage}"),
        )
        for stage in ("sft", "reward", "dpo")
    },
    "rlhf.compare_with": Row(
        tiny_rlhf(compare_with=["dpo/tiny"]), stale("evaluate_rlhf", "prompt_eval")
    ),
    "rlhf.judge": Row(
        tiny_rlhf(judge="reward/other"),
        {"tokenize_reward", "train_reward", *stale("evaluate_rlhf")},
    ),
    "rlhf.ptx": Row(tiny_rlhf(ptx="other"), {"tokenize_sft", *stale("train_rlhf")}),
    "evaluation.num_prompts": Row(setting("evaluation.num_prompts", 21), stale("evaluate_rlhf")),
    "evaluation.num_generations": Row(
        setting("evaluation.num_generations", 3), stale("evaluate_rlhf")
    ),
    "evaluation.temperature": Row(setting("evaluation.temperature", 0.9), stale("evaluate_rlhf")),
    "evaluation.bootstrap_resamples": Row(
        setting("evaluation.bootstrap_resamples", 101), stale("evaluate_rlhf")
    ),
    "language": Row(
        setting("language", "zh"),
        {"draw_report", "compare_runs", *PROMPT_PAGES},
    ),
    "datasets.generations": Row(
        setting("datasets.picked.generations", "other"), stale("tokenize_generations")
    ),
    **{
        f"datasets.{key}": Row(
            setting("datasets.picked", {"select": "best_and_worst", key: value}),
            {"select_responses"},
        )
        for key, value in {"select": "best_and_worst", "min_score": -9.0, "min_margin": 0.5}.items()
    },
    # Sweeps make other recipes than those that were built.
    "sweeps.stage": Row(setting("sweeps.mine", DPO_SWEEP), set()),
    "sweeps.recipe": Row(setting("sweeps.tiny-kl.recipe", "tiny-rloo"), set()),
    "sweeps.over": Row(setting("sweeps.tiny-kl.over.kl_coef", [0.3]), set()),
    # The tiny recipe of DPO has a gate. Models that others start from need not pass theirs.
    **{
        f"{stage}.gate.{key}": Row(
            setting(f"{stage}.recipes.tiny.gate", {"metric": metric, "max": 9, key: value}),
            {"check_gate"} if stage in ("dpo", "rlhf") else set(),
        )
        for stage, metric in METRICS.items()
        for key, value in {"metric": metric, "min": -1, "max": 8}.items()
    },
    # It labels a dataset.
    **{
        f"llm_judges.{key}": Row(setting("llm_judges.wise", {key: value}), {"label_pairs"})
        for key, value in JUDGE.items()
    },
    "datasets.label": Row(
        setting("datasets.labelled.label", "other"), {"import_dataset", "label_pairs"}
    ),
    "datasets.llm_judge": Row(setting("datasets.labelled.llm_judge", "kind"), {"label_pairs"}),
    "evaluation.llm_judge": Row(setting("evaluation.llm_judge", "wise"), stale("evaluate_rlhf")),
    "evaluation.llm_judge_prompts": Row(
        setting("evaluation.llm_judge_prompts", 5), stale("evaluate_rlhf")
    ),
    # Without its own key, the tiny model uses the common one.
    "prompt_sets": Row(replaced("config.yaml", ("    prompt_sets: [toy]\n", "")), PROMPT_PAGES),
    "models.prompt_sets": Row(setting("models.tiny.prompt_sets", ["toy", "en"]), PROMPT_PAGES),
    **{
        f"prompt_eval.{key}": Row(setting(f"prompt_eval.{key}", value), {"prompt_eval"})
        for key, value in {"max_response_length": 9, "temperature": 0.5}.items()
    },
    "zero.steps": Row(setting("zero.steps", 3), stale("compare_zero")),
}


def settings_of(schema, config):
    """Return the settings that a schema names, and those that it allows and a config has.

    The names of recipes, presets, datasets and models are omitted: sft.epochs, models.init.dropout.
    """

    def walk(node, values, path):
        if "oneOf" in node:
            return set().union(*(walk(option, values, path) for option in node["oneOf"]))
        found = set()
        # One of several types: {NAME: weight}, or the name of one model.
        mappings = [value for value in values if isinstance(value, dict)]
        for key, inner in node.get("properties", {}).items():
            below = path if key in ("defaults", "presets", "recipes") else [*path, key]
            found |= walk(inner, [value[key] for value in mappings if key in value], below)
        others = node.get("additionalProperties", node.get("type") == "object")
        if isinstance(others, dict):
            found |= walk(others, [inner for value in mappings for inner in value.values()], path)
        elif others:
            found |= {".".join([*path, key]) for value in values for key in value}
        return found or {".".join(path)}

    return walk(schema, [config], [])


def test_every_setting_has_a_row_and_every_row_a_setting():
    assert settings_of(SCHEMA, CONFIG) == SETTINGS.keys() | PLACEMENT.keys()


@pytest.mark.parametrize(
    ("place", "name"),
    [("properties", "new"), ("properties.evaluation.properties", "evaluation.new")],
)
def test_a_new_setting_is_missed(place, name):
    schema = merged(SCHEMA, nested(f"{place}.new", {"type": "number"}))
    assert settings_of(schema, CONFIG) - settings_of(SCHEMA, CONFIG) == {name}
    assert name not in SETTINGS


def test_a_new_setting_of_a_model_is_missed():
    config = merged(CONFIG, nested("models.tiny.init.new", 1))
    assert settings_of(SCHEMA, config) - settings_of(SCHEMA, CONFIG) == {"models.init.new"}
    assert "models.init.new" not in SETTINGS


def test_rows_of_stages_change_the_tiny_recipe():
    config = merged(CONFIG, QUICK)
    for name, (value, _) in STAGES.items():
        stage, key = name.split(".")
        assert {**config[stage]["defaults"], **RECIPES[stage]}[key] != value, name


@rows(SETTINGS)
def test_a_setting_makes_exactly_what_depends_on_it_stale(plans, row):
    assert plans(row) == row.rules


VALUES = {
    "rows of a dataset taken twice": Row(
        setting("sft.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_sft")
    ),
    "pairs of a dataset taken twice": Row(
        setting("reward.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_reward")
    ),
    "pairs of a dataset taken twice by DPO": Row(
        setting("dpo.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_dpo")
    ),
    "DPO from another SFT model": Row(
        setting("dpo.recipes.tiny.model", "sft/other"),
        {"tokenize_sft", "train_sft", *stale("compute_reference")},
    ),
    # Which is there for the comparison.
    "RLHF from another DPO model": Row(tiny_rlhf(actor="dpo/other"), stale("train_rlhf")),
    "RLHF from a model of models": Row(
        tiny_rlhf(actor="models/near", reward=None, judge=None, reward_functions={"shop": 1}),
        stale("tokenize_rlhf"),
    ),
    "a base model instead of the SFT model as actor": Row(
        tiny_rlhf(actor="models/tiny"), stale("train_rlhf")
    ),
    "a reward model with a weight": Row(
        tiny_rlhf(reward={"reward/tiny": 0.5}), stale("train_rlhf")
    ),
    "an LLM judge instead of a reward model": Row(
        tiny_rlhf(reward="llm_judges/wise"), stale("train_rlhf")
    ),
    "an LLM judge in evaluations": Row(tiny_rlhf(judge="llm_judges/wise"), stale("evaluate_rlhf")),
    "an LLM judge that scores generations": Row(
        setting("generations.recipes.tiny.reward", "llm_judges/wise"), stale("score_responses")
    ),
    "fewer rows of a labelled dataset": Row(
        setting("datasets.labelled.max_rows", 10), {"label_pairs"}
    ),
    # mine.yaml has the keys in their order: the report shows the first one.
    "another reward model in addition": Row(
        tiny_rlhf(reward={"reward/other": 0.5, "reward/tiny": 1}),
        REWARD | stale("train_rlhf"),
    ),
    "a classifier as reward model": Row(
        tiny_rlhf(reward="models/classifier"), {"fetch_model", *stale("train_rlhf")}
    ),
    "a classifier as judge": Row(
        tiny_rlhf(judge={"models/classifier": 2, "reward/tiny": 1}),
        {"fetch_model", *stale("evaluate_rlhf")},
    ),
    "prompts of a dataset taken twice": Row(
        setting("rlhf.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_rlhf")
    ),
    "a value of the recipe instead of the default": Row(
        setting("rlhf.recipes.tiny.gae_lambda", 0.9), stale("train_rlhf")
    ),
    "a split of a generated dataset": Row(
        setting("datasets.toy.split", {**SHARES, "sft": 3}), stale("split_dataset")
    ),
    "fewer rows of a generated dataset": Row(
        setting("datasets.toy.max_rows", 500), stale("split_dataset")
    ),
    "files of a dataset from the hub": far({"import_dataset"}, train="a.jsonl", eval="b.jsonl"),
    "how a dataset from the hub is read": far({"import_dataset"}, remove="[.]"),
    "the template of a model from the hub": Row(
        setting("models.far.template", "chat"), TOKENIZED, (MINE,)
    ),
    "a variable of the template of a model with random weights": Row(
        setting("models.tiny.template_arguments", {"enable_thinking": False}), stale("init_model")
    ),
    "a key that a model's config did not have": Row(
        setting("models.tiny.init.activation_function", "gelu"), stale("init_model")
    ),
    # transformers writes it as it is.
    "an integer in a model's config": Row(
        setting("models.tiny.init.dropout", 0), stale("init_model")
    ),
    # A comparison of sets of values would not notice these.
    "two keys of a recipe swapped": Row(
        config(
            nested("rlhf.recipes.tiny.rollout_batch_size", 64),
            nested("rlhf.recipes.tiny.global_batch_size", 128),
        ),
        stale("train_rlhf"),
    ),
    "two defaults swapped": Row(
        config(nested("rlhf.defaults.gamma", 0.95), nested("rlhf.defaults.gae_lambda", 1.0)),
        stale("train_rlhf"),
    ),
    "two shares of the split swapped": Row(
        config(nested("split.weights.sft", 4), nested("split.weights.reward", 2)),
        stale("split_dataset"),
    ),
    "two keys of the evaluation swapped": Row(
        config(nested("evaluation.num_prompts", 2), nested("evaluation.num_generations", 20)),
        stale("evaluate_rlhf"),
    ),
    "two keys of a model swapped": Row(
        config(nested("models.tiny.init.hidden_size", 256), nested("models.tiny.init.ffn_dim", 64)),
        stale("init_model"),
    ),
    "values of two stages swapped": Row(
        config(
            nested("sft.recipes.tiny.global_batch_size", 32),
            nested("reward.recipes.tiny.global_batch_size", 16),
        ),
        SFT_TRAINED,
    ),
}


@rows(VALUES)
def test_other_forms_of_a_setting_do_so_too(plans, row):
    assert plans(row) == row.rules


@few_rows({**SETTINGS, **VALUES})
def test_a_dry_run_plans_these_rules(dry_runs, row):
    assert dry_runs(row) == row.rules
