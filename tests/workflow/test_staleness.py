"""Edits make exactly the results stale that depend on them: one row for each kind of edit."""

import os
import shutil
import time

import pytest
import yaml

from snakechat.config.loading import project_files
from snakechat.config.recipes import STAGES
from snakechat.workflow.pins import LOCK, read_lock
from support.staleness import (
    CONFIG,
    FAR,
    FETCHED,
    IMPORTED,
    MINE,
    NEAR,
    OURS,
    QUICK,
    RECIPES,
    SPLIT,
    STUB,
    TINY,
    TOKENIZED,
    TOKENIZERS,
    Row,
    lines,
    merged,
    nested,
    readers,
    replaced,
    setting,
    stale,
    write_config,
)

# The rules that build another dataset, SFT model or reward model for the first time.
DATASET = {"import_dataset", "split_dataset"}
SFT = {"train_sft", "evaluate_sft"}
REWARD = {"train_reward", "evaluate_reward"}
PROMPTS = {"prompt_eval", "rw_eval"}
PAGES = {"draw_report", "draw_page"}
# The rules that run models.
RUNS_MODELS = {f"{verb}_{stage}" for verb in ("train", "evaluate") for stage in STAGES}
RUNS_MODELS |= {"compute_reference", "generate_responses", "score_responses", *PROMPTS}
GENERATED = "{path: null, format: null, generate: shop, rows: 50, eval_rows: 10}"
LONG_RESPONSES = "{length_bounds: {weight: 1, arguments: {max_characters: 40}}}"
# Where and how jobs run, what is the same, and other keys that specs leave out.
PLACE = "{deployment: multi_node, threads: 3, environment: {NCCL_SOCKET_IFNAME: eth1}}"
ACCESS = "{url: 'http://elsewhere/v1', key_env: KEY, concurrency: 2}"

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
    ("datasets.picked.generations", "twin", set()),
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
    (
        "rlhf.recipes.tiny.reward",
        "{reward/other: 0.5, reward/tiny: 1}",
        REWARD | stale("train_rlhf"),
    ),
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
    ("rlhf.recipes.tiny.judge", "reward/other", {"train_reward", *stale("evaluate_rlhf")}),
    ("llm_judges.wise.rubric", "Be brief.", {"label_pairs"}),
    ("llm_judges.wise", ACCESS, set()),
    ("dpo.recipes.tiny.gate", "{metric: loss, max: 9}", {"check_gate"}),
    # Models that others start from need not pass their gates.
    ("sft.recipes.tiny.gate", "{metric: after.perplexity, max: 9}", set()),
    ("models.tiny.prompt_sets", "[toy, en]", stale(*PROMPTS)),
    ("prompt_eval.temperature", "0.5", stale("prompt_eval")),
    # Variables by which libraries compute in another way; variables of networks change nothing.
    ("sft.recipes.tiny.placement.environment", "{MKL_CBWR: COMPATIBLE}", stale("train_sft")),
    ("rlhf.recipes.tiny.placement", PLACE, set()),
    ("deployment", "multi_node", set()),
    ("store", "elsewhere", set()),
    ("rlhf.recipes.tiny", yaml.safe_dump({**CONFIG["rlhf"]["defaults"], **RECIPES["rlhf"]}), set()),
]
# The same of the model that is trained on the local dataset, and of that dataset.
OF_MINE = [
    ("on_bad_row", "skip", IMPORTED),
    ("datasets.mine.keep", "[chosen]", IMPORTED),
    ("datasets.mine.max_rows", "20", SPLIT),
    ("datasets.mine.exclude", f"['{'0' * 32}']", SPLIT),
    ("datasets.mine", GENERATED, IMPORTED),
    # The same files, whatever selects them and whatever they are a copy of.
    ("datasets.mine", "{train: train-**.jsonl, eval: test.jsonl}", set()),
    ("datasets.mine", "{hub: lab/mine, revision: main}", set()),
    ("models.far.revision", "v2", FETCHED),
    ("models.far.template", "chat", TOKENIZED),
    ("models.far.template_arguments", "{enable_thinking: false}", FETCHED),
]
OF_FAR = [("datasets.far", "{train: a.jsonl, eval: b.jsonl}", {"import_dataset"})]
ROWS = {
    f"{path}: {value[:40]}": Row(setting(path, yaml.safe_load(value)), rules, targets)
    for settings, targets in ((OF_TINY, TINY), (OF_MINE, (MINE,)), (OF_FAR, (FAR,)))
    for path, value, rules in settings
}

# --- names ----------------------------------------------------------------------------------------


def renamed(section, old, new, *changes):
    """Return an edit that gives an entry another name, and what names it the new one."""
    entry = merged(CONFIG, QUICK, OURS)[section][old]
    return lambda folder: write_config(folder, nested(f"{section}.{new}", entry), *changes)


def of_tiny(key, value, *stages):
    """Return changes of the tiny recipes of some stages."""
    return [nested(f"{stage}.recipes.tiny.{key}", value) for stage in stages]


NEW_DATASET = [
    *of_tiny("datasets", ["shop"], *STAGES),
    *of_tiny("datasets", [{"shop": 0.5}], "generations"),
    nested("models.tiny.tokenizer.train_on", "shop"),
    nested("datasets.labelled.label", "shop"),
]
TWINS = [
    *of_tiny("model", "sft/twin", "reward", "dpo", "generations"),
    *of_tiny("actor", "sft/twin", "rlhf"),
]
NEAR_BY = nested("sft.recipes.mine.model", "near-by")
# Pages show names. So do metrics of several datasets, and the metrics of RLHF, by dataset and by
# the models that it is compared with.
ROWS |= {
    "the name of a dataset": Row(
        renamed("datasets", "toy", "shop", *NEW_DATASET), stale("evaluate_rlhf") | PAGES, TINY
    ),
    "the name of a model": Row(
        renamed("models", "tiny", "small", *of_tiny("model", "small", "sft")), PAGES, TINY
    ),
    "the name of an SFT model": Row(lambda folder: write_config(folder, *TWINS), PAGES, TINY),
    "the name of a reward model": Row(
        lambda folder: write_config(folder, *of_tiny("reward", "reward/twin", "rlhf")), PAGES, TINY
    ),
    "the name of a model from the hub": Row(
        renamed("models", "far", "near-by", NEAR_BY), set(), (MINE,)
    ),
}

# --- files outside of the project -----------------------------------------------------------------


def write(path, text):
    """Return an edit that writes a file."""
    return lambda folder: (folder / path).write_text(text)


def exchange_two_files(folder):
    first, second = folder / "mine/train-1.jsonl", folder / "mine/train-2.jsonl"
    first.rename(folder / "mine/kept")
    second.rename(first)
    (folder / "mine/kept").rename(second)


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


def edit_the_weights(folder):
    path = folder / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


ROWS |= {
    "a new file": Row(write("mine/train-4.jsonl", lines(99)), IMPORTED, (MINE,)),
    "exchanged files": Row(exchange_two_files, IMPORTED, (MINE,)),
    "what a link leads to": Row(
        write("mine/.one/rows.jsonl", lines(*range(90, 100))), IMPORTED, (MINE,)
    ),
    "a row": Row(replaced("mine/train-1.jsonl", " 0007.", " 7777."), IMPORTED, (MINE,)),
    "weights": Row(edit_the_weights, {"fetch_model"}, (NEAR,)),
    "prompts": Row(replaced("prompts/toy.yaml", "Pia", "Max"), stale("prompt_eval"), TINY),
    "pairs": Row(replaced("prompts/pairs/toy.yaml", "Pia", "Max"), stale("rw_eval"), TINY),
    "prompts of another set": Row(replaced("prompts/en.yaml", "basil", "mint")),
    "a moved dataset": Row(move_the_dataset),
    "a moved model": Row(move_the_model),
}

# --- code, pins, and what has no meaning ----------------------------------------------------------


def reformat_the_config(folder):
    # With its keys in another order.
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    for file in project_files(folder)[1:]:
        file.write_text("{}\n")


def add_comments(folder):
    for path in (folder / "scripts").rglob("*.py"):
        text = path.read_text().replace('"""', '"""Again: ', 1)
        path.write_text(f"# A comment.\n{text}\n    # Another.\n")


def add_modules(folder):
    (folder / "scripts/snakechat/unused.py").write_text("NUMBER = 1\n")
    (folder / "scripts/tool.py").write_text("from snakechat import unused\n")
    (folder / "rewards/new.py").write_text("def score(prompts, responses):\n    return [0, 0]\n")


def code(name, *rules):
    """A row with another meaning of a file in scripts/."""

    def edit(folder):
        with (folder / "scripts" / name).open("a") as file:
            # A statement that counts wherever the module is imported.
            file.write("\nassert True\n")

    return Row(edit, stale(*rules), TINY)


def pin(library, *rules):
    """A row with another version of a library in the pins."""
    old = f"\n{library}=={read_lock(LOCK)[0][library]} "
    lock = "requirements-torch.txt" if library == "torch" else "requirements.txt"
    return Row(replaced(lock, old, f"\n{library}==0.0.1 "), stale(*rules), TINY)


# The rules that use a module or a library; those downstream are stale, too.
PREFERENCE = ("train_reward", "train_dpo", "evaluate_sft")
ROWS |= {
    "a program": code("train_sft.py", "train_sft"),
    "a program of several rules": code("tokenize_phase.py", *TOKENIZERS),
    "a tool": code("explain.py"),
    "what all programs import": code("snakechat/workflow/job.py", "import_dataset"),
    "data": code("snakechat/data/ragged_arrays.py", "split_dataset"),
    "training": code("snakechat/training/engine.py", "train_sft"),
    "preference losses": code("snakechat/algorithms/preference.py", *PREFERENCE),
    "curves": code("snakechat/pages/trainings.py", *PAGES),
    "model cards": code("snakechat/pages/card.py"),
    "torch": pin("torch", "init_model", "label_pairs"),
    "what torch requires": pin("sympy", "init_model", "label_pairs"),
    "peft": pin("peft", "train_sft"),
    "matplotlib": pin("matplotlib", *PAGES),
    "snakemake": pin("snakemake"),
    "order and style of the config": Row(reformat_the_config),
    "comments and docstrings": Row(add_comments),
    "code that nothing uses": Row(add_modules),
    "other reward functions": Row(replaced("rewards/shop.py", "float(", "-float(")),
    "messages of rules": Row(replaced("rules/sft.smk", '"Fine-tuning', '"Tuning')),
    "comments in the pins": Row(replaced("requirements.txt", "# Written by", "# By")),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_edit_makes_exactly_what_depends_on_it_stale(plans, row):
    assert plans(row) == row.rules


# --- plans of Snakemake ---------------------------------------------------------------------------


def touch_everything(folder):
    # Inputs become newer than results, and sources newer than all.
    now = time.time()
    for number, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
        os.utime(path, (now - number, now - number), follow_symlinks=False)


def delete_the_model(folder):
    shutil.rmtree((folder / "output/sft/tiny/manifest.json").resolve().parent)


def delete_the_link(folder):
    (folder / "output/sft/tiny.manifest.json").unlink()
    # Snakemake looks through a missing result, and would compare the times of what is behind it.
    for path in ("tokens/sft/tiny.manifest.json", "data/toy.manifest.json"):
        (folder / "output" / path).touch()


OF_SFT = ("output/sft/tiny",)
# A few rows from above, evenly spaced, and results that are missing, or have other times.
PLANNED = dict(list(ROWS.items())[:: len(ROWS) // 6]) | {
    "everything touched": Row(touch_everything),
    ".snakemake deleted": Row(lambda folder: shutil.rmtree(folder / ".snakemake")),
    # Results whose input is missing stay valid, unless the input itself is a target.
    "a model without its link": Row(delete_the_link, set(), TINY),
    "a deleted model": Row(delete_the_model, {"train_sft", "evaluate_sft", "draw_report"}, OF_SFT),
    # A build links it again, without a job. The report of the SFT model was never made.
    "a requested model without its link": Row(delete_the_link, {"draw_report"}, OF_SFT),
}


@pytest.mark.parametrize("row", PLANNED.values(), ids=PLANNED)
def test_a_dry_run_plans_these_rules(dry_runs, row):
    assert dry_runs(row) == row.rules


# --- builds ---------------------------------------------------------------------------------------

# A refactoring that the digest counts, and the same with other output.
REFACTORED = STUB.replace('"first"', '"fir" + "st"')
CHANGED = STUB.replace('"first"', '"second"')


def runs(workflow):
    """Return each run that made a result, by its rule."""
    paths = (workflow.folder / "output/store").rglob("run.json")
    return {(path.parts[-3], path.stat().st_mtime_ns, path.read_text()) for path in paths}


def test_an_edit_reaches_as_far_as_it_changes_outputs(stubs):
    """The edit of a program of several rules, and of one that reads what they make."""
    rules = TOKENIZERS | {"train_sft"}
    for text, ran in ((REFACTORED, rules), (CHANGED, rules.union(*map(readers, rules)))):
        for program in ("tokenize_phase.py", "train_sft.py"):
            (stubs.folder / "scripts" / program).write_text(text)
        before = runs(stubs)
        stubs.build(*TINY)
        # Pages show what results were made from.
        pages = {reader for rule in ran for reader in readers(rule) & PAGES}
        assert {rule for rule, *_ in runs(stubs) - before} == ran | pages
        assert stubs.planned(*TINY) == set()
