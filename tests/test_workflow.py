"""What is stale, and nothing else: edits to a finished build, and the rules that must run then."""

import json
import os
import shutil
import time

import pytest
import yaml

from conftest import Workflow, edited

# Downstream of a rule in the tiny recipe, whose reward model starts from the SFT model.
AFTER_RLHF = {"evaluate_rlhf", "draw_report"}
AFTER_REWARD = {"evaluate_reward", "train_rlhf"} | AFTER_RLHF
AFTER_SFT = {"evaluate_sft", "train_reward"} | AFTER_REWARD
TOKENIZE = {"tokenize_sft", "tokenize_reward", "tokenize_rlhf"}
AFTER_SPLIT = TOKENIZE | {"train_sft"} | AFTER_SFT
ALL = {"import_dataset", "split_dataset", "init_model"} | AFTER_SPLIT


EDITS = {
    "a comment in a module": ("scripts/rlhf/ppo.py", "import torch\n", "import torch  # maths\n"),
    "a docstring of a module": ("scripts/rlhf/ppo.py", '"""The mathematics', '"""The beauty'),
    "the layout of a module": ("scripts/rlhf/ppo.py", "import torch\n", "import torch\n\n\n\n"),
    "a comment in the pins": ("requirements.txt", "# The one set", "# One set"),
    "a number's spelling": (
        "config.yaml",
        "actor_learning_rate: 1.0e-3",
        "actor_learning_rate: .001",
    ),
    "a placement": (
        "config.yaml",
        "micro_batch_tokens: 8192, threads: 2",
        "micro_batch_tokens: 4096, threads: 2",
    ),
    "another recipe": ("config.yaml", "350m: {}", "350m: {epochs: 3}"),
    "another dataset": ("config.yaml", "local: {path: data", "local: {path: other"),
    "a weight of one": ("config.yaml", "datasets: [toy]", "datasets: [{toy: 1.0}]"),
    "the split of all as a dataset's own": (
        "config.yaml",
        "toy: {generate: shop,",
        "toy: {generate: shop, split: {sft: 2, reward: 4, rlhf: 4},",
    ),
    "what is done with bad rows, where none are read": (
        "config.yaml",
        "on_bad_row: fail",
        "on_bad_row: skip",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edit_that_changes_no_result_makes_nothing_stale(quick, edit):
    path, old, new = EDITS[edit]
    with edited(quick.folder / path, (old, new)):
        assert quick.planned() == set()


STALE = {
    "module of one program": (
        "scripts/rlhf/ppo.py",
        "variance + 1e-8",
        "variance + 1e-7",
        {"train_rlhf"} | AFTER_RLHF,
    ),
    "module of all trainers": (
        "scripts/rlhf/engine.py",
        '"train_batch_size": 1',
        '"train_batch_size": int(1)',
        {"train_sft"} | AFTER_SFT,
    ),
    "module of the tokenizers": (
        "scripts/rlhf/tokens.py",
        "vocab_size <= 1 << 16",
        "vocab_size <= 65536",
        ALL - {"import_dataset", "split_dataset"},
    ),
    "module of the tokenizing": (
        "scripts/rlhf/tokenizing.py",
        '("train", "eval")',
        '["train", "eval"]',
        AFTER_SPLIT,
    ),
    "module of the phases": (
        "scripts/rlhf/phases.py",
        "np.arange(number, dtype=np.int64)",
        "np.arange(0, number, dtype=np.int64)",
        {"split_dataset"} | AFTER_SPLIT,
    ),
    "module of the file kinds": ("scripts/rlhf/sources.py", "1 << 20", "1 << 21", ALL),
    "module of the formats": ("scripts/rlhf/formats.py", '"human"', '"person"', ALL),
    "module of the dialogues": ("scripts/rlhf/dialogues.py", '"Human"', '"User"', ALL),
    "module of the parts": ("scripts/rlhf/parts.py", '"valid", ', "", ALL),
    "module of the records": ("scripts/rlhf/records.py", "4096", "8192", ALL),
    "module of the figures of data": (
        "scripts/rlhf/look.py",
        "digest_size=8",
        "digest_size=7",
        ALL,
    ),
    "program": (
        "scripts/evaluate_reward.py",
        '"margin"',
        '"gap"',
        {"evaluate_reward", "draw_report"},
    ),
    "pin": ("requirements.txt", "peft==0.21.2", "peft==0.21.1", ALL),
    "seed": ("config.yaml", "seed: 1234", "seed: 1235", ALL),
    "sft learning rate": (
        "config.yaml",
        "learning_rate: 4.0e-3",
        "learning_rate: 3.0e-3",
        {"train_sft"} | AFTER_SFT,
    ),
    "reward learning rate": (
        "config.yaml",
        "      learning_rate: 1.0e-3",
        "      learning_rate: 2.0e-3",
        {"train_reward"} | AFTER_REWARD,
    ),
    "prompt limit": (
        "config.yaml",
        "max_prompt_length: 48",
        "max_prompt_length: 47",
        {"tokenize_rlhf", "train_rlhf"} | AFTER_RLHF,
    ),
    "split": ("config.yaml", "by: row", "by: prompt", {"split_dataset"} | AFTER_SPLIT),
    "split of a dataset": (
        "config.yaml",
        "toy: {generate: shop,",
        "toy: {generate: shop, split: {sft: 1, reward: 1, rlhf: 1},",
        {"split_dataset"} | AFTER_SPLIT,
    ),
    "rows of a dataset that are taken": (
        "config.yaml",
        "toy: {generate: shop,",
        "toy: {generate: shop, max_rows: 500,",
        {"split_dataset"} | AFTER_SPLIT,
    ),
    "weight of a dataset": (
        "config.yaml",
        "datasets: [toy]",
        "datasets: [{toy: 2}]",
        {"tokenize_sft", "train_sft"} | AFTER_SFT,
    ),
    "side that is cut": (
        "config.yaml",
        "truncation_side: left",
        "truncation_side: right",
        {"tokenize_sft", "train_sft"} | AFTER_SFT,
    ),
    "template": ("config.yaml", "\ntemplate: dialogue", "\ntemplate: chat", AFTER_SPLIT),
    "default that the recipe uses": (
        "config.yaml",
        "gae_lambda: 0.95",
        "gae_lambda: 0.9",
        {"train_rlhf"} | AFTER_RLHF,
    ),
    "weights of the start": (
        "config.yaml",
        "init_std: 0.06",
        "init_std: 0.05",
        ALL - {"import_dataset", "split_dataset"},
    ),
    "evaluation": (
        "config.yaml",
        "  temperature: 1.0\n  # Resamp",
        "  temperature: 0.9\n  # Resamp",
        AFTER_RLHF,
    ),
}


@pytest.mark.parametrize("edit", STALE)
def test_edit_makes_exactly_what_depends_on_it_stale(quick, edit):
    path, old, new, expected = STALE[edit]
    with edited(quick.folder / path, (old, new)):
        assert quick.planned() == expected
    # After the dry run of the edit, the build is as fresh as before it.
    assert quick.planned() == set()


TOKENS = "output/tokens/sft/mine.manifest.json"
IMPORTED = {"import_dataset", "split_dataset", "tokenize_sft"}


def lines(*numbers):
    """Rows of a dataset, all of the same length."""
    rows = [{"prompt": f"{n:04}?", "chosen": f" {n:04}.", "rejected": " No."} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_config(workflow, recipe=None, everything=None, **dataset):
    """mine.yaml: a dataset of our own and a recipe of it."""
    config = {
        "datasets": {"mine": {"path": "mine", "format": "plain", **dataset}},
        "sft": {"recipes": {"mine": {"model": "tiny", "datasets": ["mine"], **(recipe or {})}}},
        **(everything or {}),
    }
    (workflow.folder / "mine.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def built_mine(quick, tmp_path_factory):
    """The quick build, and the tokens of a dataset of our own beside it."""
    folder = tmp_path_factory.mktemp("mine") / "work"
    shutil.copytree(quick.folder, folder, symlinks=True)
    workflow = Workflow(folder, *quick.options, "mine.yaml")
    source = folder / "mine"
    source.mkdir()
    (source / "train-1.jsonl").write_text(lines(*range(40)))
    (source / "train-2.jsonl").write_text(lines(*range(40, 50)))
    (source / "test.jsonl").write_text(lines(*range(50, 70)))
    for name, first in (("one", 70), ("other", 80)):
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text(lines(*range(first, first + 10)))
    (source / "train-3").symlink_to("../one", target_is_directory=True)
    write_config(workflow)
    workflow.build(TOKENS)
    return workflow


@pytest.fixture
def mine(built_mine):
    """The same. What a test does to the dataset and the config is undone."""
    source, kept = built_mine.folder / "mine", built_mine.folder / "kept"
    shutil.copytree(source, kept, symlinks=True)
    yield built_mine
    shutil.rmtree(source, ignore_errors=True)
    kept.rename(source)
    write_config(built_mine)


def edit_a_row(source):
    path = source / "train-1.jsonl"
    path.write_text(path.read_text().replace(" 0007.", " 7777."))


def replace_a_file_by_an_older_one(source):
    # As cp -p or rsync -t would leave it.
    edit_a_row(source)
    os.utime(source / "train-1.jsonl", (1, 1))


def append_a_row(source):
    with (source / "train-2.jsonl").open("a") as file:
        file.write(lines(99))


def edit_the_part_to_evaluate_on(source):
    (source / "test.jsonl").write_text(lines(*range(60, 70)))


def add_a_file(source):
    (source / "train-4.jsonl").write_text(lines(99))


def remove_a_file(source):
    (source / "train-2.jsonl").unlink()


def retarget_a_link(source):
    (source / "train-3").unlink()
    (source / "train-3").symlink_to("../other", target_is_directory=True)


@pytest.mark.parametrize(
    "change",
    [
        edit_a_row,
        replace_a_file_by_an_older_one,
        append_a_row,
        edit_the_part_to_evaluate_on,
        add_a_file,
        remove_a_file,
        retarget_a_link,
    ],
    ids=lambda change: change.__name__,
)
def test_dataset_of_other_content_is_imported_again(mine, change):
    change(mine.folder / "mine")
    assert mine.planned(TOKENS) == IMPORTED


def test_edit_that_sets_size_and_time_back_is_seen(mine):
    # Whatever is remembered of the file is remembered now.
    assert mine.planned(TOKENS) == set()
    path = mine.folder / "mine/train-1.jsonl"
    before = path.stat()
    edit_a_row(mine.folder / "mine")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert mine.planned(TOKENS) == IMPORTED


def test_dataset_of_the_same_content_is_fresh_wherever_it_lies(mine):
    for path in (mine.folder / "mine").rglob("*"):
        os.utime(path)
    assert mine.planned(TOKENS) == set()
    # Copied under another name, without times, with a file where a link was, and more beside it.
    shutil.copytree(mine.folder / "mine", mine.folder / "moved", copy_function=shutil.copyfile)
    shutil.rmtree(mine.folder / "mine")
    (mine.folder / "moved/README.md").write_text("# Mine\n")
    write_config(mine, path="moved")
    assert mine.planned(TOKENS) == set()
    write_config(mine, path=str(mine.folder / "moved"))
    assert mine.planned(TOKENS) == set()
    shutil.rmtree(mine.folder / "moved")


SETTINGS = {
    "format": ({"format": "instruct"}, IMPORTED),
    "columns": (
        {"columns": {"prompt": "prompt", "chosen": "rejected", "rejected": "chosen"}},
        IMPORTED,
    ),
    "remove": ({"remove": "[.]"}, IMPORTED),
    "on_bad_row": ({"on_bad_row": "skip"}, IMPORTED),
    "files": ({"train": "train-1.jsonl", "eval": "test.jsonl"}, IMPORTED),
    "max_rows": ({"max_rows": 20}, IMPORTED - {"import_dataset"}),
    "split": ({"split": {"sft": 1, "reward": 1, "rlhf": 1}}, IMPORTED - {"import_dataset"}),
    "weight": ({"recipe": {"datasets": [{"mine": 0.5}]}}, {"tokenize_sft"}),
    "side that is cut": ({"recipe": {"truncation_side": "right"}}, {"tokenize_sft"}),
    "template": ({"everything": {"template": "chat"}}, {"tokenize_sft"}),
    "copy of a hub dataset": ({"hub": "somebody/mine", "revision": "main"}, set()),
    "epochs": ({"recipe": {"epochs": 3}}, set()),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_of_a_dataset_makes_only_what_reads_it_stale(mine, setting):
    changes, expected = SETTINGS[setting]
    write_config(mine, **changes)
    assert mine.planned(TOKENS) == expected


def test_swapped_values_are_stale(quick):
    config = quick.folder / "config.yaml"
    apart = ("critic_learning_rate: 1.0e-3", "critic_learning_rate: 2.0e-3")
    with edited(config, apart):
        assert quick.planned() == {"train_rlhf"} | AFTER_RLHF
        apart_specs = set((quick.folder / "output/specs/train_rlhf").iterdir())
    swapped = ("actor_learning_rate: 1.0e-3", "actor_learning_rate: 2.0e-3")
    with edited(config, swapped):
        assert quick.planned() == {"train_rlhf"} | AFTER_RLHF
        assert set((quick.folder / "output/specs/train_rlhf").iterdir()) > apart_specs
    # After the dry runs of the edits, the build is as fresh as before them.
    assert quick.planned() == set()


def test_order_of_keys_does_not_matter(quick):
    config = quick.folder / "config.yaml"
    before = config.read_text()
    backwards = {key: value for key, value in reversed(yaml.safe_load(before).items())}
    config.write_text(yaml.safe_dump(backwards, sort_keys=False))
    try:
        assert quick.planned() == set()
    finally:
        config.write_text(before)


def test_touched_copied_and_without_snakemakes_memory(quick, tmp_path):
    copy = Workflow(tmp_path / "copy", *quick.options)
    # Copies without times, written in another order than they were made in.
    shutil.copytree(quick.folder, copy.folder, copy_function=shutil.copyfile, symlinks=True)
    assert copy.planned() == set()
    now = time.time()
    for number, path in enumerate(sorted(copy.folder.rglob("*"), reverse=True)):
        os.utime(path, (now - number, now - number))
    assert copy.planned() == set()
    shutil.rmtree(copy.folder / ".snakemake")
    assert copy.planned() == set()


def test_clock_that_runs_ahead_hides_nothing(quick, tmp_path):
    copy = Workflow(tmp_path / "copy", *quick.options)
    shutil.copytree(quick.folder, copy.folder, symlinks=True)
    # As a node whose clock is an hour ahead would leave its results.
    ahead = time.time() + 3600
    for path in (copy.folder / "output").rglob("*"):
        os.utime(path, (ahead, ahead))
    with edited(copy.folder / "config.yaml", ("gae_lambda: 0.95", "gae_lambda: 0.9")):
        assert copy.planned() == {"train_rlhf"} | AFTER_RLHF
    assert copy.planned() == set()


def test_lost_and_cut_results_are_stale(quick, tmp_path):
    copy = Workflow(tmp_path / "copy", *quick.options)
    shutil.copytree(quick.folder, copy.folder, symlinks=True)
    metrics = copy.folder / "output/eval/reward/tiny/metrics.json"
    metrics.write_text("")
    assert copy.planned() == {"evaluate_reward", "draw_report"}
    shutil.rmtree(metrics.parent)
    assert copy.planned() == {"evaluate_reward", "draw_report"}
    manifest = copy.folder / "output/rlhf/tiny.manifest.json"
    manifest.unlink()
    assert copy.planned() == {"rlhf", "train_rlhf", "evaluate_reward"} | AFTER_RLHF


def test_failed_job_costs_nothing_and_stays_stale(quick, tmp_path):
    copy = Workflow(tmp_path / "copy", *quick.options)
    shutil.copytree(quick.folder, copy.folder, symlinks=True)
    program = copy.folder / "scripts/evaluate_sft.py"
    result = copy.folder / "output/eval/sft/tiny/metrics.json"
    before = result.read_bytes(), result.stat().st_mtime_ns
    full_disk = ("    figures = {", "    raise OSError(28, 'No space left')\n    figures = {")
    with edited(program, full_disk):
        process = copy.snakemake("output/rlhf/tiny", "--cores", "2")
        assert process.returncode != 0
        assert "error: No space left" in process.stdout and "Traceback" not in process.stdout
        assert (result.read_bytes(), result.stat().st_mtime_ns) == before
        assert copy.planned() == {"evaluate_sft", "draw_report"}
    # The edit is gone, the old result is still there: it is taken up again, not made again.
    copy.build("output/rlhf/tiny")
    assert (result.read_bytes(), result.stat().st_mtime_ns) == before
    assert copy.planned() == set()


def test_code_edited_after_planning_is_refused(quick, tmp_path):
    copy = Workflow(tmp_path / "copy", *quick.options)
    shutil.copytree(quick.folder, copy.folder, symlinks=True)
    # On a cluster a job may wait for hours between its planning and its start.
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(copy.spec_of("output/eval/reward/tiny")))
    program = copy.folder / "scripts/evaluate_reward.py"
    with edited(program, ('"margin"', '"gap"')):
        job = copy.run("python", "scripts/evaluate_reward.py", "--spec", str(spec))
    assert job.returncode == 1
    assert job.stdout == (
        "error: evaluate_reward.py changed since this build was planned: start it again\n"
    )


def test_damaged_input_is_refused(quick, tmp_path):
    copy = Workflow(tmp_path / "copy", *quick.options)
    shutil.copytree(quick.folder, copy.folder, symlinks=True)
    weights = copy.folder / "output/sft/tiny/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(copy.spec_of("output/eval/sft/tiny")))
    job = copy.run("python", "scripts/evaluate_sft.py", "--spec", str(spec))
    assert job.returncode == 1
    assert job.stdout == (
        "error: output/sft/tiny/model.safetensors is not the file that its manifest names:"
        " delete output/sft/tiny and start the build again\n"
    )


def test_an_input_whose_manifest_is_cut_is_refused(quick, tmp_path):
    copy = Workflow(tmp_path / "copy", *quick.options)
    shutil.copytree(quick.folder, copy.folder, symlinks=True)
    manifest = copy.folder / "output/sft/tiny.manifest.json"
    manifest.write_text(manifest.read_text()[:500])
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(copy.spec_of("output/eval/sft/tiny")))
    job = copy.run("python", "scripts/evaluate_sft.py", "--spec", str(spec))
    assert job.returncode == 1
    assert job.stdout == (
        "error: output/sft/tiny.manifest.json cannot be read: delete it and start the build again\n"
    )
    # What its folder still tells is as good: nothing is trained again.
    weights = copy.folder / "output/sft/tiny/model.safetensors"
    made = weights.stat().st_mtime_ns
    assert "train_sft" in copy.planned()
    copy.build("output/sft/tiny")
    assert weights.stat().st_mtime_ns == made


def test_dry_run_is_quick_and_needs_no_torch(sources):
    # A torch that cannot be imported shadows the real one.
    (sources.folder / "torch.py").write_text("raise ImportError('a dry run imports torch')\n")
    started = time.monotonic()
    assert sources.planned() >= ALL
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("name", ["13b", "66b", "llama2-7b"])
def test_large_recipes_plan(sources, name):
    assert sources.planned(f"output/rlhf/{name}") >= {"fetch_model", "train_rlhf", "evaluate_rlhf"}


def test_slurm_profile_plans(sources):
    process = sources.snakemake("-n", "output/rlhf/1.3b", "--profile", "slurm")
    assert process.returncode == 0, process.stdout


def test_lint(sources):
    process = sources.snakemake("--lint")
    assert process.returncode == 0, process.stdout
