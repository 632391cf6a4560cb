"""Edits make exactly the results stale that depend on them: one row for each kind of edit."""

import shutil

import yaml

from snakechat.config.loading import project_files
from snakechat.config.recipes import STAGES
from snakechat.workflow.pins import LOCK, read_lock
from support.staleness import (
    CONFIG,
    COPIED,
    FAR,
    FETCHED,
    IMPORTED,
    MINE,
    NEAR,
    OURS,
    QUICK,
    RECIPES,
    SPLIT,
    TINY,
    TOKENIZED,
    TOKENIZERS,
    Row,
    config,
    fresh,
    lines,
    merged,
    nested,
    replaced,
    rows,
    setting,
    stale,
    write_config,
)

# --- settings -----------------------------------------------------------------------------------

# The rules that build another dataset, SFT model or reward model for the first time.
DATASET = {"import_dataset", "split_dataset"}
SFT = {"train_sft", "evaluate_sft"}
REWARD = {"train_reward", "evaluate_reward"}
PROMPT_RULES = {"prompt_eval", "rw_eval"}
PAGES = {"draw_report", "draw_page"}
# The rules that run models.
RUNS_MODELS = {f"{verb}_{stage}" for verb in ("train", "evaluate") for stage in STAGES}
RUNS_MODELS |= {"compute_reference", "generate_responses", "score_responses"}
RUNS_MODELS |= PROMPT_RULES

NEW_REWARD = REWARD | stale("train_rlhf")
JUDGED = {"train_reward", *stale("evaluate_rlhf")}

GENERATED = "{path: null, format: null, generate: shop, rows: 50, eval_rows: 10}"
LONG_RESPONSES = "{length_bounds: {weight: 1, arguments: {max_characters: 40}}}"


def other_tokenizer(folder):
    shutil.copytree(folder / "tokenizer", folder / "elsewhere")
    replaced("elsewhere/tokenizer.json", ("<unk>", "<UNK>"))(folder)
    write_config(folder, nested("models.copied.tokenizer.path", "elsewhere"))


# A setting, its value as YAML, and the rules that it makes stale.
OF_TINY = [
    ("seed", "1235", stale("import_dataset")),
    ("template", "chat", stale(*TOKENIZERS)),
    ("deterministic", "true", stale(*RUNS_MODELS)),
    # The toy has no bad rows.
    ("on_bad_row", "skip", set()),
    ("split.weights.reward", "3", stale("split_dataset")),
    ("language", "zh", PAGES),
    # Datasets.
    ("datasets.toy.rows", "601", stale("import_dataset")),
    ("datasets.picked", "{select: best_and_worst, min_margin: 0.5}", {"select_responses"}),
    ("datasets.picked.generations", "other", stale("generate_responses")),
    ("datasets.labelled.max_rows", "10", {"label_pairs"}),
    # Models.
    ("models.tiny.tokenizer.vocab_size", "500", stale("init_model")),
    # Stages.
    ("rlhf.recipes.tiny.gae_lambda", "0.9", stale("train_rlhf")),
    ("reward.recipes.tiny.max_length", "95", stale("tokenize_reward")),
    ("sft.recipes.tiny.model", "other", stale("init_model")),
    ("reward.recipes.tiny.datasets", "[toy, other]", DATASET | stale("tokenize_reward")),
    # It draws rows only where a dataset has a weight with a fraction.
    ("dpo.recipes.tiny.seed", "5", stale("compute_reference")),
    ("dpo.recipes.tiny.dtype", "fp32", stale("compute_reference")),
    # In 16 bits, the reference follows the batches of the training.
    ("dpo.recipes.tiny.epochs", "7", stale("compute_reference")),
    # A loss without a reference model.
    ("dpo.recipes.tiny", "{loss: simpo, margin: 0.5}", stale("train_dpo")),
    # KTO also reads responses to other prompts, and single responses.
    ("dpo.recipes.tiny.loss", "kto", stale("tokenize_dpo")),
    ("rlhf.recipes.tiny.actor", "sft/other", SFT | stale("train_rlhf")),
    ("rlhf.recipes.tiny.reward", "{reward/other: 0.5, reward/tiny: 1}", NEW_REWARD),
    ("rlhf.recipes.tiny.reward", "models/classifier", {"fetch_model", *stale("train_rlhf")}),
    ("rlhf.recipes.tiny", "{algorithm: distill, teacher: dpo/tiny}", stale("train_rlhf")),
    ("rlhf.recipes.tiny.ptx", "tiny", stale("train_rlhf")),
    ("rlhf.recipes.tiny.reward_functions", LONG_RESPONSES, stale("train_rlhf")),
    ("generations.recipes.tiny.model", "tiny", stale("generate_responses")),
    ("generations.recipes.tiny.temperature", "0.9", stale("generate_responses")),
    ("generations.recipes.tiny.reward_functions", "{shop: 1}", stale("score_responses")),
    # Evaluations and pages.
    ("evaluation.num_prompts", "21", stale("evaluate_rlhf")),
    ("evaluation.llm_judge", "wise", stale("evaluate_rlhf")),
    ("rlhf.recipes.tiny.compare_with", "[dpo/tiny]", stale("evaluate_rlhf", "prompt_eval")),
    ("rlhf.recipes.tiny.judge", "reward/other", JUDGED),
    ("llm_judges.wise.rubric", "Be brief.", {"label_pairs"}),
    ("dpo.recipes.tiny.gate", "{metric: loss, max: 9}", {"check_gate"}),
    # Models that others start from need not pass their gates.
    ("sft.recipes.tiny.gate", "{metric: after.perplexity, max: 9}", set()),
    ("models.tiny.prompt_sets", "[toy, en]", stale(*PROMPT_RULES)),
    ("prompt_eval.temperature", "0.5", stale("prompt_eval")),
    # Variables by which libraries compute in another way; those of networks do not.
    ("sft.recipes.tiny.placement.environment", "{MKL_CBWR: COMPATIBLE}", stale("train_sft")),
]
# The same of the model that is trained on the local dataset, and of that dataset.
OF_MINE = [
    ("on_bad_row", "skip", IMPORTED),
    ("datasets.mine.keep", "[chosen]", IMPORTED),
    ("datasets.mine.max_rows", "20", SPLIT),
    ("datasets.mine.exclude", f"['{'0' * 32}']", SPLIT),
    ("datasets.mine", GENERATED, IMPORTED),
    ("models.far.revision", "v2", FETCHED),
    ("models.far.template", "chat", TOKENIZED),
    ("models.far.template_arguments", "{enable_thinking: false}", FETCHED),
]
SETTINGS = {
    f"{path}: {value}": Row(setting(path, yaml.safe_load(value)), rules, targets)
    for settings, targets in ((OF_TINY, TINY), (OF_MINE, (MINE,)))
    for path, value, rules in settings
} | {
    "the files of a dataset of the hub": Row(
        setting("datasets.far", {"train": "a.jsonl", "eval": "b.jsonl"}),
        {"import_dataset"},
        (FAR,),
    ),
    "a tokenizer from a folder": Row(other_tokenizer, {"init_model"}, (COPIED,)),
}


@rows(SETTINGS)
def test_a_setting_makes_exactly_what_depends_on_it_stale(plans, row):
    assert plans(row) == row.rules


# --- settings without effect --------------------------------------------------------------------


def reformat_the_config(folder):
    # With its keys in another order.
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    for file in project_files(folder)[1:]:
        file.write_text("{}\n")


# Where and how jobs run; other keys are no part of specs either.
PLACE = {"deployment": "multi_node", "threads": 3, "environment": {"NCCL_SOCKET_IFNAME": "eth1"}}
ACCESS = {"url": "http://elsewhere/v1", "key_env": "KEY", "concurrency": 2}
STORAGE = {"save_steps": 7, "store": "elsewhere", "store_max_size": "1G", "container": "docker://a"}
UNAFFECTED = {
    "order and style of the config": fresh(reformat_the_config),
    "another store and image": fresh(config(STORAGE)),
    "a deployment for all recipes": fresh(setting("deployment", "multi_node")),
    "placement": fresh(setting("rlhf.recipes.tiny.placement", PLACE)),
    "defaults stated in a recipe": fresh(
        setting("rlhf.recipes.tiny", {**CONFIG["rlhf"]["defaults"], **RECIPES["rlhf"]})
    ),
    "where and how a judge is asked": fresh(setting("llm_judges.wise", ACCESS)),
    "globs of the same files": fresh(
        setting("datasets.mine", {"train": "train-**.jsonl", "eval": "test.jsonl"})
    ),
    "the origin of a local dataset": fresh(
        setting("datasets.mine", {"hub": "lab/mine", "revision": "main"})
    ),
    # A licence changes no bytes of data, and no training.
    "a licence": Row(setting("datasets.mine.license", "mit"), set(), (MINE,)),
}


@rows(UNAFFECTED)
def test_a_setting_that_changes_no_result_makes_nothing_stale(plans, row):
    assert plans(row) == row.rules


# --- names ---------------------------------------------------------------------------------------


def renamed(section, old, new, *changes):
    """A change of the config that gives an entry another name, and what names it the new one."""

    def edit(folder):
        entry = merged(CONFIG, QUICK, OURS)
        for key in section.split("."):
            entry = entry[key]
        write_config(folder, nested(f"{section}.{new}", entry[old]), *changes)

    return edit


def of_tiny(key, value, *stages):
    """Changes of the tiny recipes of some stages."""
    return [nested(f"{stage}.recipes.tiny.{key}", value) for stage in stages]


NEW_DATASET = [
    *of_tiny("datasets", ["shop"], *STAGES),
    *of_tiny("datasets", [{"shop": 0.5}], "generations"),
    nested("models.tiny.tokenizer.train_on", "shop"),
    nested("datasets.labelled.label", "shop"),
]
# Pages show names. So do the metrics of RLHF, by dataset and by the models that it is compared
# with, and those of several datasets.
NAMES = {
    "a dataset": Row(
        renamed("datasets", "toy", "shop", *NEW_DATASET), stale("evaluate_rlhf") | PAGES
    ),
    "a model": Row(renamed("models", "tiny", "small", *of_tiny("model", "small", "sft")), PAGES),
    "an SFT model": Row(
        config(
            *of_tiny("model", "sft/twin", "reward", "dpo", "generations"),
            *of_tiny("actor", "sft/twin", "rlhf"),
        ),
        PAGES,
    ),
    "a reward model": Row(
        config(*of_tiny("reward", "reward/twin", "rlhf", "generations")),
        PAGES,
    ),
    "a recipe of generations": Row(setting("datasets.picked.generations", "twin"), set()),
    "a model from the hub": Row(
        renamed("models", "far", "near-by", nested("sft.recipes.mine.model", "near-by")),
        set(),
        (MINE,),
    ),
    "a local dataset whose bad rows are skipped": Row(
        renamed("datasets", "mine", "ours", nested("sft.recipes.mine.datasets", ["ours"])),
        set(),
        (MINE,),
    ),
}


@rows(NAMES)
def test_names_of_models_datasets_and_recipes_make_no_training_stale(plans, row):
    assert plans(row) == row.rules


# --- files outside of the project ---------------------------------------------------------------


def add_a_file(folder):
    (folder / "mine/train-4.jsonl").write_text(lines(99))


def exchange_two_files(folder):
    first, second = folder / "mine/train-1.jsonl", folder / "mine/train-2.jsonl"
    first.rename(folder / "mine/kept")
    second.rename(first)
    (folder / "mine/kept").rename(second)


def edit_behind_a_link(folder):
    (folder / "mine/.one/rows.jsonl").write_text(lines(*range(90, 100)))


def edit_weights(folder):
    path = folder / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def move_the_dataset(folder):
    # Under another name, without times, with a file instead of a link, and next to another file.
    shutil.copytree(folder / "mine", folder / "moved", copy_function=shutil.copyfile)
    shutil.rmtree(folder / "mine")
    (folder / "moved/README.md").write_text("# Mine\n")
    write_config(folder, nested("datasets.mine.path", str(folder / "moved")))


def move_the_model(folder):
    (folder / "model").rename(folder / "elsewhere")
    # Files next to the weights that are not read.
    (folder / "elsewhere/training_args.bin").write_text("old")
    (folder / "elsewhere/onnx").mkdir()
    (folder / "elsewhere/onnx/model.safetensors").write_text("old")
    write_config(folder, nested("models.near.path", "elsewhere"))


CHANGES = (add_a_file, exchange_two_files, edit_behind_a_link)
CONTENTS = {change.__name__: Row(change, IMPORTED, (MINE,)) for change in CHANGES} | {
    "edit_a_row": Row(replaced("mine/train-1.jsonl", (" 0007.", " 7777.")), IMPORTED, (MINE,)),
    "edit_a_model": Row(edit_weights, {"fetch_model"}, (NEAR,)),
    "edit_prompts": Row(replaced("prompts/toy.yaml", ("Pia", "Max")), stale("prompt_eval")),
    "edit_pairs": Row(replaced("prompts/pairs/toy.yaml", ("Pia", "Max")), stale("rw_eval")),
    "edit_prompts_of_another_set": Row(replaced("prompts/en.yaml", ("basil", "mint")), set()),
    "move_the_dataset": fresh(move_the_dataset),
    "move_the_model": fresh(move_the_model),
}


@rows(CONTENTS)
def test_the_content_of_files_counts(plans, row):
    assert plans(row) == row.rules


# --- code and pins ------------------------------------------------------------------------------


def add_comments(folder):
    for path in (folder / "scripts").rglob("*.py"):
        text = path.read_text().replace('"""', '"""Again: ', 1)
        path.write_text(f"# A comment.\n{text}\n    # Another.\n")


def add_a_module(folder):
    (folder / "scripts/snakechat/unused.py").write_text("NUMBER = 1\n")
    (folder / "scripts/tool.py").write_text("from snakechat import unused\n")


def write_reward_functions(folder):
    replaced("rewards/shop.py", ("float(", "-float("))(folder)
    (folder / "rewards/new.py").write_text("def score(prompts, responses):\n    return [0, 0]\n")


def code(name, rules=()):
    """A row with another meaning of a file in scripts/."""

    def edit(folder):
        with (folder / "scripts" / name).open("a") as file:
            # A statement that counts wherever the module is imported.
            file.write("\nassert True\n")

    return Row(edit, set(rules))


def pin(library, rules=()):
    """A row with another version of a library in the pins."""
    old = f"\n{library}=={read_lock(LOCK)[0][library]} "
    lock = "requirements-torch.txt" if library == "torch" else "requirements.txt"
    return Row(replaced(lock, (old, f"\n{library}==0.0.1 ")), set(rules))


# The rules that use a module or a library, and those downstream.
CODE = {
    "a program": code("train_sft.py", stale("train_sft")),
    "a program of several rules": code("tokenize_phase.py", stale(*TOKENIZERS)),
    "a tool": code("explain.py"),
    "what all programs import": code("snakechat/workflow/job.py", stale("import_dataset")),
    "data": code("snakechat/data/ragged_arrays.py", stale("split_dataset")),
    "training": code("snakechat/training/engine.py", stale("train_sft")),
    "preference losses": code(
        "snakechat/algorithms/preference.py", stale("train_reward", "train_dpo", "evaluate_sft")
    ),
    "curves": code("snakechat/pages/trainings.py", PAGES),
    "model cards": code("snakechat/pages/card.py"),
    "torch": pin("torch", stale("init_model", "label_pairs")),
    "what torch requires": pin("sympy", stale("init_model", "label_pairs")),
    "peft": pin("peft", stale("train_sft")),
    "matplotlib": pin("matplotlib", PAGES),
    "snakemake": pin("snakemake"),
}
CODE |= {
    "comments and docstrings": fresh(add_comments),
    "code that nothing uses": fresh(add_a_module),
    "messages of rules": fresh(replaced("rules/sft.smk", ('"Fine-tuning', '"Tuning'))),
    "comments in the pins": fresh(replaced("requirements.txt", ("# Written by", "# By"))),
    "reward functions that the recipe does not name": fresh(write_reward_functions),
}


@rows(CODE)
def test_code_and_pins_make_exactly_the_rules_that_run_them_and_those_downstream_stale(plans, row):
    assert plans(row) == row.rules


ALL = {**SETTINGS, **UNAFFECTED, **NAMES, **CONTENTS, **CODE}


# A few rows, evenly spaced.
@rows(dict(list(ALL.items())[:: len(ALL) // 6]))
def test_a_dry_run_plans_these_rules(dry_runs, row):
    assert dry_runs(row) == row.rules
