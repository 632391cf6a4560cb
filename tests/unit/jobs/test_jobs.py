"""Settings, inputs, files and default targets of jobs, from the shipped config."""

import os

import pytest

from conftest import ROOT
from snakechat.jobs.data_jobs import dataset_files
from snakechat.jobs.model_jobs import models_of, phases_of_datasets
from snakechat.jobs.planner import FIRST_TARGET, default_targets
from snakechat.jobs.rules import RULES
from snakechat.jobs.staleness import Jobs
from snakechat.workflow.errors import InputError
from support import configs


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A function that returns the shipped config with changes; its root has no other files."""
    monkeypatch.chdir(tmp_path)
    for name in ("rewards", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return lambda changes=(): configs.load(changes, tmp_path)


def settings_of(config, rule, name):
    """Return the settings of a job."""
    return RULES[rule].describe(config, *name.split("/")).settings


def inputs_of(config, rule, name):
    """Return the inputs of a job."""
    return RULES[rule].describe(config, *name.split("/")).inputs


# --- settings and inputs -------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "batches_count"), [("fp32", False), ("bf16", True)])
def test_batches_are_settings_of_a_reference_in_16_bits(load, dtype, batches_count):
    def settings(**changes):
        tiny = configs.tiny("dpo", dtype=dtype, **changes)
        return settings_of(load(tiny), "compute_reference", "tiny")

    for of_batches in ({"max_steps": 7}, {"seed": 7}):
        assert (settings(**of_batches) != settings()) == batches_count
    assert settings(learning_rate=7.0) == settings()


def test_tokenization_drops_rejected_rows_of_datasets_that_skip_bad_rows(load):
    blend = configs.tiny("sft", datasets=["toy", "rm-static"])
    skips = {"on_bad_row": "skip"}
    for change, skipped in (({}, None), (skips, [2]), ({"datasets": {"rm-static": skips}}, [2])):
        settings = settings_of(load(blend | change), "tokenize_sft", "tiny")
        assert settings.get("skip_rejected") == skipped


def test_a_tokenizer_is_trained_without_excluded_rows(load):
    excluded = [32 * "0"]
    config = load({"datasets": {"toy": {"exclude": excluded}}})
    assert settings_of(config, "init_model", "tiny")["tokenizer"]["exclude"] == excluded


def test_a_model_is_compared_with_those_that_it_is_made_from(load):
    config = load(configs.tiny("rlhf", actor="dpo/tiny", compare_with=["sft/tiny"]))
    assert models_of(config, "rlhf", "tiny") == {
        "base": ("init_model", "tiny"),
        "sft": ("train_sft", "tiny"),
        "dpo": ("train_dpo", "tiny"),
        "compare_with.sft/tiny": ("train_sft", "tiny"),
        "rlhf": ("train_rlhf", "tiny"),
    }
    assert inputs_of(config, "train_rlhf", "tiny")["actor"] == ("train_dpo", "tiny")
    assert inputs_of(config, "draw_report", "rlhf/tiny")["evaluate_dpo"] == ("evaluate_dpo", "tiny")


def test_an_evaluation_knows_the_data_of_all_rounds_of_teachers_and_of_reward_models(load):
    other = {"model": "tiny", "datasets": ["toy-judge"]}
    mine = {"actor": "sft/other", "datasets": ["toy-judge"], "algorithm": "distill"}
    mine |= {"teacher": "rlhf/tiny", "reward": None}
    config = load(
        {
            "sft": {"recipes": {"other": other}},
            "datasets": {"toy-judge": {"split": ["sft", "reward", "rlhf"]}},
            "reward": {"recipes": {"tiny": {"model": "sft/other"}}},
            "rlhf": {"recipes": {"mine": mine, "tiny": {"actor": "dpo/tiny-iterative"}}},
        }
    )
    rounds = {f"toy-round-{number}": ["reward"] for number in (1, 2, 3)}
    of_tiny = {"toy": ["reward", "rlhf", "sft"], "toy-judge": ["sft"], **rounds}
    assert phases_of_datasets(config, "tiny") == of_tiny
    assert phases_of_datasets(config, "mine") == of_tiny | {"toy-judge": ["rlhf", "sft"]}
    inputs = inputs_of(config, "evaluate_rlhf", "tiny")
    assert inputs["records.toy-round-1"] == ("select_responses", "toy-round-1")


def test_several_reward_models_keep_their_order_and_weights(load):
    rewards = {"reward/tiny": 1, "models/judge": 0.5, "reward/judge": 2}
    models = {"judge": {"path": "judge", "template": "chat"}}
    config = load({"models": models, **configs.tiny("rlhf", reward=rewards)})
    settings = settings_of(config, "train_rlhf", "tiny")
    assert settings["reward"] == [("reward.1", 1), ("reward.2", 0.5), ("reward.3", 2)]
    assert settings["reward_templates"] == {"reward.2": "chat"}
    inputs = inputs_of(config, "train_rlhf", "tiny")
    assert inputs["reward.1"] == ("train_reward", "tiny")
    assert inputs["reward.2"] == ("fetch_model", "judge")
    assert "reward" not in inputs
    # The report shows the first one.
    assert inputs_of(config, "draw_report", "rlhf/tiny")["train_reward"] == ("train_reward", "tiny")


def test_an_rlhf_evaluation_has_judge_and_exact_check_only_where_they_apply(load):
    for name, judge, check in (("tiny", ("train_reward", "judge"), "shop"), ("1.3b", None, None)):
        description = RULES["evaluate_rlhf"].describe(load(), name)
        assert description.inputs.get("judge") == judge
        assert description.settings["exact_check"] == check


# --- files ---------------------------------------------------------------------------------------


def write_files(folder, *names):
    """Write files of one empty row."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def local(load, path="mine", **settings):
    """Return a config whose dataset `local` has a path."""
    return load({"datasets": {"local": {"path": path, **settings}}})


def files_of(config):
    """Return the names of the files of the dataset `local`."""
    return dataset_files(config, "local")[1].keys()


def test_files_of_a_dataset_are_named_by_split_and_others_are_a_warning(load, tmp_path, capsys):
    write_files(tmp_path, "mine/train.jsonl", "mine/test.jsonl", "mine/README.md")
    assert files_of(local(load)) == {"train/train.jsonl", "eval/test.jsonl"}
    write_files(tmp_path, "mine/more.jsonl", "mine/other.jsonl")
    folder, files = dataset_files(local(load, "mine/test.jsonl"), "local")
    assert files.keys() == {"train/test.jsonl"} and folder.resolve() == tmp_path / "mine"
    assert capsys.readouterr().err == ""
    dataset_files(local(load), "local")
    warning = "warning: datasets.local: mine: not read: more.jsonl and 1 more, of another kind"
    assert capsys.readouterr().err.startswith(warning)


@pytest.mark.parametrize(
    ("path", "settings", "key"),
    [
        ("mine/train.jsonl", {"train": "train.jsonl", "eval": "test.jsonl"}, "eval"),
        ("saved", {"name": "main"}, "name"),
    ],
)
def test_a_selection_that_nothing_reads_is_an_error(load, tmp_path, path, settings, key):
    write_files(tmp_path, "mine/train.jsonl", "mine/test.jsonl", "saved/state.json")
    (tmp_path / "saved/state.json").write_text('{"_data_files": [{"filename": "rows.arrow"}]}')
    with pytest.raises(InputError, match=f"{path}: {key} has no effect on "):
        files_of(local(load, path, **settings))
    # A copy of a repository leaves what selects the repository's files.
    if key == "eval":
        assert files_of(local(load, path, hub="lab/mine", **settings)) == {"train/train.jsonl"}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("nowhere"), "rows.jsonl is a broken link"),
        (os.mkfifo, "rows.jsonl is .*not a regular file"),
        (lambda path: path.with_stem("\udcff").touch(), r"\\udcff.jsonl .* not UTF-8: .* rename"),
        (lambda path: path.symlink_to("../secret"), "rows.jsonl is a link to .*/secret, outside"),
    ],
)
def test_files_that_cannot_be_read_are_errors(load, tmp_path, make, problem):
    write_files(tmp_path, "secret", "mine/kept.jsonl")
    make(tmp_path / "mine/rows.jsonl")
    with pytest.raises(InputError, match=f"^config: datasets.local.path: mine: {problem}"):
        files_of(local(load))


def test_links_of_the_hubs_cache_are_followed(load, tmp_path):
    write_files(tmp_path, "blobs/0a1b")
    (tmp_path / "snapshots/c0ffee").mkdir(parents=True)
    (tmp_path / "snapshots/c0ffee/rows.jsonl").symlink_to("../../blobs/0a1b")
    assert files_of(local(load, "snapshots/c0ffee")) == {"train/rows.jsonl"}


def test_a_source_of_the_hub_defaults_to_the_main_branch(load, tmp_path):
    write_files(tmp_path, "mine/config.json", "mine/model.safetensors")
    source, main = {"hub": "me/mine"}, {"hub": "me/mine", "revision": "main"}
    models = {"mine": source, "copy": {**source, "path": "mine"}}
    config = load({"models": models, "datasets": {"mine": {**source, "format": "plain"}}})
    assert settings_of(config, "fetch_model", "mine") == main
    assert settings_of(config, "fetch_model", "copy") == {"card": {"licence": None}}
    assert main.items() <= settings_of(config, "import_dataset", "mine").items()


def test_of_a_local_card_only_what_it_declares_counts(load, tmp_path):
    given = {"models": {"opt-125m": {"path": "given"}}}
    config = load({**given, "datasets": {"rm-static": {"path": "given/train.jsonl"}}})
    write_files(tmp_path, *(f"given/{n}" for n in ("config.json", "model.safetensors")))
    write_files(tmp_path, "given/train.jsonl", "given/notes.txt")
    jobs = (("fetch_model", "opt-125m"), ("import_dataset", "rm-static"))

    def described(card):
        (tmp_path / "given/README.md").write_text(card)
        return [RULES[rule].describe(config, name) for rule, name in jobs]

    before = described("---\nlicense: mit\n---\nSmall.\n")
    assert [each.settings["card"] for each in before] == [{"licence": "mit"}] * 2
    assert before[0].files.keys() == {"config.json", "model.safetensors"}
    assert described("---\nlicense: mit\n---\nLarge.\n") == before
    after = described("---\nlicense: apache-2.0\n---\nSmall.\n")
    assert [each.settings["card"] for each in after] == [{"licence": "apache-2.0"}] * 2


# --- default targets -----------------------------------------------------------------------------


def test_results_that_exist_are_the_default_targets(load, tmp_path):
    assert default_targets(Jobs(load(), ROOT)) == [FIRST_TARGET]
    paths = [f"{each}.manifest.json" for each in ("sft/tiny", "reward/tiny", "rlhf/tiny", "sft/x")]
    paths += ["prompt_eval/sft/tiny.html", "compare/rlhf/tiny-kl.html"]
    # No rule makes the first one any more, and the second names a recipe that is gone.
    paths += ["zero/sft/tiny.md", "compare/rlhf/gone-vs-tiny.html"]
    # Without a manifest. The second one is a copy of a user's.
    paths += ["sft/350m/config.json", "sft/copy/config.json"]
    write_files(tmp_path / "output", *paths)
    assert default_targets(Jobs(load(), ROOT)) == [
        # Built with output/rlhf/tiny: sft/tiny and reward/tiny.
        "output/sft/350m",
        "output/rlhf/tiny",
        "output/compare/rlhf/tiny-kl.html",
        "output/prompt_eval/sft/tiny.html",
    ]
