"""What is told of stale results: what changed, in words, and what that makes stale in turn."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import yaml
from explain import StaleJob, find_causes, lost_files

from conftest import ROOT, edited
from snakechat.planning.changes import changed_settings, config_key, flat, yaml_line
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.digests import digest

TARGET = "output/rlhf/tiny"
STAGES = ("sft", "reward", "dpo", "rlhf")


def ask(workflow, *targets, options=()):
    """What explain.py prints of targets, which must go well."""
    process = run(workflow, *targets, options=options)
    assert process.returncode == 0, process.stdout
    return process.stdout


def run(workflow, *targets, options=()):
    """The finished process of explain.py."""
    command = ("python", "scripts/explain.py", *targets, "--", *workflow.options, *options)
    return workflow.run(*command)


@pytest.fixture(scope="module")
def built(quick, tmp_path_factory):
    """A copy of the quick build. Tests that edit its sources put them back."""
    return quick.copy(tmp_path_factory.mktemp("why") / "work")


@pytest.fixture
def copy(quick, tmp_path):
    """A copy of the quick build whose results may be damaged."""
    return quick.copy(tmp_path / "copy")


def test_what_is_up_to_date_takes_one_line(built):
    assert ask(built, TARGET) == "output/rlhf/tiny is up to date\n"
    several = ask(built, TARGET, "output/eval/sft/tiny.manifest.json")
    assert several == "output/rlhf/tiny, output/eval/sft/tiny.manifest.json are up to date\n"
    assert ask(built) == "all that was built is up to date\n"


def test_a_setting_is_told_with_both_values_and_with_what_it_makes_stale(built):
    learning_rate = ("learning_rate: 4.0e-3", "learning_rate: 1.0e-5")
    with edited(built.folder / "config.yaml", learning_rate):
        assert ask(built, TARGET) == (
            "train_sft tiny: sft.learning_rate 0.004 -> 1e-05\n"
            "  makes stale: evaluate_sft tiny, train_reward tiny, evaluate_reward tiny,"
            " train_rlhf tiny, evaluate_rlhf tiny, draw_report tiny\n"
        )


def test_swapped_values_are_both_told(built):
    swapped = ("gamma: 1.0", "gamma: 0.95"), ("gae_lambda: 0.95", "gae_lambda: 1.0")
    with edited(built.folder / "config.yaml", *swapped):
        assert ask(built, TARGET) == (
            "train_rlhf tiny:\n"
            "  rlhf.gae_lambda 0.95 -> 1.0\n"
            "  rlhf.gamma 1.0 -> 0.95\n"
            "  makes stale: evaluate_rlhf tiny, draw_report tiny\n"
        )


def test_two_changes_are_told_apart_although_one_makes_the_other_stale(built):
    limit = ("max_prompt_length: 48", "max_prompt_length: 47")
    prompts = ("  temperature: 1.0\n  # Resamp", "  temperature: 0.5\n  # Resamp")
    with edited(built.folder / "config.yaml", limit, prompts):
        assert ask(built, TARGET) == (
            "tokenize_rlhf tiny: rlhf.max_prompt_length 48 -> 47\n"
            "  the same for: train_rlhf tiny\n"
            "  makes stale: evaluate_rlhf tiny, draw_report tiny\n"
            "evaluate_rlhf tiny: evaluation.temperature 1.0 -> 0.5\n"
            "  makes stale: draw_report tiny\n"
        )


def test_an_edited_module_is_told_of_exactly_the_programs_that_import_it(built):
    module = built.folder / "scripts/snakechat/training/engine.py"
    with edited(module, ('_per_gpu": 1', '_per_gpu": int(1)')):
        heading, same, stale = ask(built, TARGET).splitlines()
        planned = built.planned()
    first, _, cause = heading.partition(": ")
    assert cause == "module snakechat/training/engine.py changed"
    roots = rules([first, *names_behind("the same for", same)])
    programs = {rule: code_digests(ROOT / f"scripts/{rule}.py") for rule in planned}
    assert roots == {
        rule for rule, code in programs.items() if "snakechat/training/engine.py" in code
    }
    assert rules(names_behind("makes stale", stale)) == planned - roots != set()


def names_behind(words, line):
    """Names of the jobs in a line."""
    before, _, names = line.partition(": ")
    assert before == f"  {words}"
    return names.split(", ")


def rules(names):
    """Their rules; each has one job in the tiny recipe."""
    assert len({name.split()[0] for name in names}) == len(names)
    return {name.split()[0] for name in names}


def test_an_edited_program_and_the_import_of_another_module_are_told(built):
    changes = ('"ties"', '"draws"'), ("import torch\n", "import torch\nimport snakechat.data.toy\n")
    with edited(built.folder / "scripts/evaluate_reward.py", *changes):
        assert ask(built, "output/report/tiny.manifest.json") == (
            "evaluate_reward tiny:\n"
            "  program evaluate_reward.py changed\n"
            "  module snakechat/data/toy.py is imported now\n"
            "  makes stale: draw_report tiny\n"
        )


def test_requirements_are_told_once_for_all_jobs(built):
    with edited(built.folder / "requirements.txt", ("peft==0.21.2", "peft==0.21.1")):
        heading, same = ask(built, TARGET).splitlines()
        planned = built.planned()
    assert heading == "import_dataset toy: pinned requirements changed"
    assert rules(names_behind("the same for", same)) == planned - {"import_dataset"}


def test_another_base_model_is_told_where_a_recipe_names_it_and_where_it_is_read(built):
    options = ("--config", "sft={recipes: {tiny: {model: opt-125m}}}")
    heads = [
        line for line in ask(built, TARGET, options=options).splitlines() if "stale" not in line
    ]
    assert heads == [
        "fetch_model opt-125m: never built yet",
        "tokenize_reward tiny: reads fetch_model opt-125m instead of init_model tiny",
        "  the same for: tokenize_rlhf tiny, tokenize_sft tiny",
        "train_sft tiny: sft.model tiny -> opt-125m",
    ]


def test_another_input_is_not_told_where_a_setting_tells_it(built):
    options = ("--config", "reward={recipes: {tiny: {model: tiny}}}")
    assert ask(built, TARGET, options=options) == (
        "train_reward tiny: reward.model sft/tiny -> tiny\n"
        "  makes stale: evaluate_reward tiny, train_rlhf tiny, evaluate_rlhf tiny,"
        " draw_report tiny\n"
    )


LOSSES = {
    "a file": (
        lambda result: (result / "metrics.json").unlink(),
        "output/eval/reward/tiny/metrics.json is missing",
    ),
    "some bytes": (
        lambda result: (result / "metrics.json").write_text("{}"),
        "output/eval/reward/tiny/metrics.json has another size ({:,} -> 2 bytes)",
    ),
    "the folder": (shutil.rmtree, "output/eval/reward/tiny is gone"),
    "the manifest": (
        lambda result: result.with_name("tiny.manifest.json").unlink(),
        "output/eval/reward/tiny.manifest.json is gone",
    ),
    "the text of the manifest": (
        lambda result: result.with_name("tiny.manifest.json").write_text("{"),
        "output/eval/reward/tiny.manifest.json cannot be read",
    ),
    "the folder and the manifest": (
        lambda result: (shutil.rmtree(result), result.with_name("tiny.manifest.json").unlink()),
        "output/eval/reward/tiny is gone",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_lost_of_a_result_is_told(copy, loss, monkeypatch):
    lose, expected = LOSSES[loss]
    path = "output/eval/reward/tiny"
    job = StaleJob(copy.spec_of(path), None, "none")
    size = (copy.folder / path / "metrics.json").stat().st_size
    lose(copy.folder / path)
    monkeypatch.chdir(copy.folder)
    find_causes(job, {})
    assert job.causes == [expected.format(size)]


def test_jobs_behind_a_lost_file_are_only_in_doubt(copy):
    (copy.folder / "output/tokens/rlhf/tiny/stats.json").unlink()
    assert ask(copy, TARGET) == (
        "tokenize_rlhf tiny: output/tokens/rlhf/tiny/stats.json is missing\n"
        "  puts in doubt: train_rlhf tiny, evaluate_rlhf tiny, draw_report tiny"
        " (kept if it comes out as before)\n"
    )


def test_changes_since_a_rerun_that_failed_are_told_from_the_copy_in_the_folder(copy):
    # Snakemake takes the manifest away before it runs a job.
    (copy.folder / "output/rlhf/tiny.manifest.json").unlink()
    with edited(copy.folder / "config.yaml", ("gae_lambda: 0.95", "gae_lambda: 0.9")):
        assert ask(copy, TARGET) == (
            "train_rlhf tiny:\n"
            "  output/rlhf/tiny.manifest.json is gone\n"
            "  rlhf.gae_lambda 0.95 -> 0.9\n"
            "  makes stale: evaluate_rlhf tiny, draw_report tiny\n"
        )


def rewrite(path, **changes):
    """Change entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_input_of_other_content_is_told(copy):
    # As a library that is not pinned might have left it, of the same spec.
    rewrite(copy.folder / "output/tokens/rlhf/tiny.manifest.json", facts={"dropped": 7})
    assert ask(copy, TARGET) == (
        "train_rlhf tiny: tokenize_rlhf tiny was built again, to other content\n"
        "  puts in doubt: evaluate_rlhf tiny, draw_report tiny (kept if it comes out as before)\n"
    )


def test_an_input_that_was_built_anew_is_told_with_what_had_changed(copy, monkeypatch):
    monkeypatch.chdir(copy.folder)
    # A reward model from an SFT model that learnt from longer rows.
    tokens, sft, reward = map(
        copy.spec_of, ("output/tokens/sft/tiny", "output/sft/tiny", "output/reward/tiny")
    )
    now = StaleJob(json.loads(json.dumps(reward)), None, "none")
    tokens["settings"]["max_length"] = 95
    sft["inputs"]["tokens"]["spec"] = write_spec(tokens)
    assert causes_since(now, reward, sft) == [
        "tokenize_sft tiny was built anew since: sft.max_length 95 -> 96"
    ]
    # And that learnt at another rate.
    sft["settings"]["learning_rate"] = 0.1
    assert causes_since(now, reward, sft) == [
        "train_sft tiny was built anew since: sft.learning_rate 0.1 -> 0.004"
    ]
    # The spec files of old builds may be cleared away.
    shutil.rmtree("output/specs")
    find_causes(now, {})
    assert now.causes == ["train_sft tiny was built anew since"]


def causes_since(now, reward, sft):
    """What is told of a reward model if it was made from an SFT model of this spec."""
    reward["inputs"]["model"]["spec"] = write_spec(sft)
    rewrite(Path("output/reward/tiny.manifest.json"), spec=reward)
    find_causes(now, {})
    return now.causes


def write_spec(spec):
    """Write a spec file as planning does; returns the spec's digest."""
    path = Path("output/specs", spec["rule"], f"{spec['name']}-{digest(spec)[:16]}.json")
    path.write_text(json.dumps(spec))
    return digest(spec)


def test_a_forced_run_has_snakemakes_reason(built):
    target = "output/eval/sft/tiny.manifest.json"
    assert ask(built, target, options=("--force",)) == (
        "evaluate_sft tiny: Snakemake's reason: Forced execution\n"
    )


def test_what_was_never_built_is_told_in_the_order_of_the_road(sources):
    assert ask(sources, "output/sft/125m") == (
        "import_dataset rm-static: never built yet\n"
        "  the same for: fetch_model opt-125m, split_dataset rm-static, tokenize_sft 125m,"
        " train_sft 125m, evaluate_sft 125m\n"
    )


def rows(*numbers):
    """A jsonl file of a dataset."""
    texts = [{"prompt": f"{n}?", "chosen": f" {n}.", "rejected": " No."} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in texts)


@pytest.fixture
def mine(sources):
    """A workflow that has imported and split a dataset of our own, and nothing else."""
    folder = sources.folder / "mine"
    folder.mkdir()
    (folder / "train-1.jsonl").write_text(rows(*range(40)))
    (folder / "train-2.jsonl").write_text(rows(*range(40, 50)))
    (folder / "test.jsonl").write_text(rows(*range(50, 60)))
    datasets = {"mine": {"path": "mine", "format": "plain"}}
    (sources.folder / "mine.yaml").write_text(yaml.safe_dump({"datasets": datasets}))
    sources.options = ("--configfile", "mine.yaml")
    sources.build("output/split/mine.manifest.json")
    return sources


def test_files_of_a_dataset_are_told_by_name_with_their_rows(mine):
    target, folder = "output/split/mine.manifest.json", mine.folder / "mine"
    with (folder / "train-1.jsonl").open("a") as file:
        file.write(rows(60))
    stale = "  makes stale: split_dataset mine\n"
    assert ask(mine, target) == (
        f"import_dataset mine: dataset mine: train/train-1.jsonl changed (40 -> 41 rows)\n{stale}"
    )
    (folder / "train-2.jsonl").unlink()
    # The last line without its end is a row too.
    (folder / "train-3.jsonl").write_text(rows(60, 61, 62).rstrip())
    (folder / "test.jsonl").write_text(rows(*range(70, 80)))
    assert ask(mine, target) == (
        "import_dataset mine:\n"
        "  dataset mine: eval/test.jsonl changed (10 rows)\n"
        "  dataset mine: train/train-1.jsonl changed (40 -> 41 rows)\n"
        "  dataset mine: train/train-2.jsonl is gone (10 rows)\n"
        f"  dataset mine: train/train-3.jsonl is new (3 rows)\n{stale}"
    )
    # Manifests of older imports have no numbers of rows; damaged files have none to be told.
    rewrite(mine.folder / "output/data/mine.manifest.json", facts={})
    (folder / "train-3.jsonl").write_text("")
    assert ask(mine, target) == (
        "import_dataset mine:\n"
        "  dataset mine: eval/test.jsonl changed\n"
        "  dataset mine: train/train-1.jsonl changed\n"
        "  dataset mine: train/train-2.jsonl is gone\n"
        f"  dataset mine: train/train-3.jsonl is new\n{stale}"
    )


@pytest.mark.parametrize(
    ("target", "options", "code", "message"),
    [
        (
            TARGET,
            ("--config", "seed=x"),
            1,
            "error: config: seed: 'x' is not of type 'integer'"
            " (YAML reads 1e-5 as text: write 1.0e-5)\n",
        ),
        (
            "output/sft/nope",
            (),
            1,
            "error: config: sft.recipes has no 'nope' (there: {})\n",
        ),
        (TARGET, ("--nope",), 2, "snakemake: error: unrecognized arguments: --nope\n"),
        (TARGET, ("--lint",), 1, "error: with these options Snakemake prints no plan\n"),
    ],
    ids=["value", "recipe", "option", "other command"],
)
def test_mistakes_are_told_in_a_line_with_snakemakes_code(built, target, options, code, message):
    process = run(built, target, options=options)
    recipes = yaml.safe_load((ROOT / "config.yaml").read_text())["sft"]["recipes"]
    assert process.returncode == code
    assert process.stdout == message.format(", ".join(recipes))


def test_what_makes_snakemake_quiet_hides_nothing(built):
    with edited(built.folder / "config.yaml", ("gae_lambda: 0.95", "gae_lambda: 0.9")):
        told = ask(built, TARGET, options=("--quiet", "rules", "host"))
    assert told.startswith("train_rlhf tiny: rlhf.gae_lambda 0.95 -> 0.9\n")


def test_results_in_another_folder_are_those_that_are_told_of(built, tmp_path):
    shutil.copytree(built.folder / "output", tmp_path / "output")
    (tmp_path / "output/eval/sft/tiny/metrics.json").unlink()
    told = ask(built, "output/eval/sft/tiny.manifest.json", options=("--directory", str(tmp_path)))
    assert told == "evaluate_sft tiny: output/eval/sft/tiny/metrics.json is missing\n"


def test_it_takes_little_more_than_a_dry_run_and_needs_no_torch(sources):
    # A torch that cannot be imported shadows the real one.
    (sources.folder / "torch.py").write_text("raise ImportError('why imports torch')\n")
    sources.environment["PYTHONPATH"] = str(sources.folder)
    # Not the time that passes: other tests may run beside this one.
    started = processor_seconds()
    sources.planned("output/rlhf/1.3b")
    planned = processor_seconds()
    assert ask(sources, "output/rlhf/1.3b").startswith(
        "import_dataset rm-static: never built yet\n"
    )
    assert processor_seconds() - planned < 1.5 * (planned - started)


def processor_seconds():
    """What the processes that this one has started, and waited for, have taken."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_nothing_but_specs_is_written(copy):
    (copy.folder / "output/eval/sft/tiny/metrics.json").unlink()
    (copy.folder / "output/eval/reward/tiny.manifest.json").unlink()

    def files():
        paths = [path for path in copy.folder.rglob("*") if path.is_file()]
        apart = (".snakemake", "__pycache__", "specs")
        return {path: path.read_bytes() for path in paths if not {*apart} & {*path.parts}}

    before = files()
    with edited(copy.folder / "config.yaml", ("learning_rate: 4.0e-3", "learning_rate: 3.0e-3")):
        assert "sft.learning_rate" in ask(copy, TARGET)
    assert files() == before


def test_each_setting_of_a_result_is_told_by_its_key_in_the_config(quick):
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    for path in (quick.folder / "output").rglob("*.manifest.json"):
        spec = json.loads(path.read_text())["spec"]
        # exact_check has no key; max_rows has none here.
        for key in flat(spec["settings"]).keys() - {"exact_check", "max_rows"}:
            first, *rest = config_key(spec, key).split(".")
            found = config[first]["defaults"] if first in STAGES else config[first]
            for part in rest:
                assert part in found, (spec["rule"], key)
                found = found[part]
    split = {"rule": "split_dataset", "name": "toy"}
    assert config_key(split, "max_rows") == "datasets.toy.max_rows"


def settings(**values):
    """A spec of train_sft with these settings."""
    return {"rule": "train_sft", "name": "tiny", "settings": values}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": [1.0, 2], "a": 1.0}, []),
        ({"a": 1}, {"a": True}, ["sft.a 1 -> true"]),
        ({"a": "1"}, {"a": 1}, ['sft.a "1" -> 1']),
        ({"a": None}, {}, ["sft.a null -> (not set)"]),
        ({}, {"a": {"b": 0.5, "c": {}}}, ["sft.a.b (not set) -> 0.5", "sft.a.c (not set) -> {}"]),
        ({"betas": [0.9, 0.95]}, {"betas": [0.9]}, ["sft.betas [0.9, 0.95] -> [0.9]"]),
        (
            {"datasets": [["a", 1], ["b", 0.5]]},
            {"datasets": [["a", 2], ["b", 1.0]]},
            ["sft.datasets [a, {b: 0.5}] -> [{a: 2}, b]"],
        ),
    ],
)
def test_settings_are_compared_by_value_and_told_as_yaml(old, new, expected):
    assert changed_settings(settings(**old), settings(**new)) == expected


TEXTS = ["a b", "", "1e-5", "1_000", "0x1f", "1", "true", "No", "null", "none", "-", "~", "a: b"]
TEXTS += ["data/*.json", "sft/tiny", "1.3b", "x_y-2", "\u00fc", "it's"]


@pytest.mark.parametrize("value", TEXTS)
def test_text_is_told_as_yaml_would_read_it(value):
    assert yaml.safe_load(yaml_line(value)) == value
    assert yaml.safe_load(yaml_line([value, {"key": value}])) == [value, {"key": value}]


def test_of_many_files_the_first_five_are_told(tmp_path):
    files = {f"{number:02}": {"size": 1} for number in range(1_234)}
    told = lost_files(tmp_path, files)
    assert told[:5] == [f"{tmp_path}/{number:02} is missing" for number in range(5)]
    assert told[5:] == [f"{tmp_path}: 1,229 more files are missing or have another size"]
