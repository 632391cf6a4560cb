"""explain.py on a small build: the changes that it reports, and the downstream jobs."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from conftest import ROOT, edited
from explain import StaleJob, find_causes, replaced_versions
from snakechat.planning.changes import DERIVED, config_key, flatten
from snakechat.planning.stale_causes import rebuild_causes, rebuilt_inputs
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import read_manifest

TARGET = "output/rlhf/tiny"


STAGES = ("sft", "reward", "dpo", "rlhf")


def explain(workflow, *targets, options=()):
    """Return what explain.py prints; it must succeed."""
    process = run(workflow, *targets, options=options)
    assert process.returncode == 0, process.stdout
    return process.stdout


def run(workflow, *targets, options=()):
    """Return the finished process of explain.py."""
    return workflow.run("python", "scripts/explain.py", *targets, *workflow.options, *options)


@pytest.fixture(scope="module")
def built(quick, tmp_path_factory):
    """A copy of the quick build. Tests that edit its sources restore them."""
    return quick.copy(tmp_path_factory.mktemp("explain") / "work")


@pytest.fixture
def copy(quick, tmp_path):
    """A copy of the quick build whose results may be damaged."""
    return quick.copy(tmp_path / "copy")


def test_results_that_are_up_to_date_take_one_line(built):
    assert explain(built, TARGET) == "output/rlhf/tiny is up to date\n"
    several = explain(built, TARGET, "output/eval/sft/tiny.manifest.json")
    assert several == "output/rlhf/tiny, output/eval/sft/tiny.manifest.json are up to date\n"
    assert explain(built) == "all results are up to date\n"


def test_a_changed_setting_is_printed_with_both_values_and_the_downstream_jobs(built):
    learning_rate = ("learning_rate: 4.0e-3", "learning_rate: 1.0e-5")
    with edited(built.folder / "config.yaml", learning_rate):
        assert explain(built, TARGET) == (
            "train_sft tiny is stale: sft.learning_rate changed from 0.004 to 1e-05\n"
            "  makes stale if the content changes: evaluate_sft tiny, train_reward tiny,"
            " evaluate_reward tiny, train_rlhf tiny, evaluate_rlhf tiny, draw_report rlhf/tiny\n"
        )


def test_two_changes_are_separate_although_one_makes_the_job_of_the_other_stale(built):
    limit = ("max_prompt_length: 48", "max_prompt_length: 47")
    prompts = ("  temperature: 1.0\n  # Bootstrap", "  temperature: 0.5\n  # Bootstrap")
    with edited(built.folder / "config.yaml", limit, prompts):
        assert explain(built, TARGET) == (
            "tokenize_rlhf tiny is stale: rlhf.max_prompt_length changed from 48 to 47\n"
            "  the same applies to: train_rlhf tiny\n"
            "  makes stale if the content changes: evaluate_rlhf tiny, draw_report rlhf/tiny\n"
            "evaluate_rlhf tiny is stale: evaluation.temperature changed from 1.0 to 0.5\n"
            "  makes stale if the content changes: draw_report rlhf/tiny\n"
        )


def test_an_edited_module_makes_exactly_the_programs_stale_that_import_it(built):
    module = built.folder / "scripts/snakechat/training/deepspeed_engine.py"
    with edited(module, ('_per_gpu": 1', '_per_gpu": int(1)')):
        heading, same, stale = explain(built, TARGET).splitlines()
        planned = built.planned()
    first, _, cause = heading.partition(" is stale: ")
    assert cause == "module snakechat/training/deepspeed_engine.py changed"
    roots = rules([first, *names_after("the same applies to", same)])
    programs = {rule: code_digests(ROOT / f"scripts/{rule}.py") for rule in planned}
    assert roots == {
        rule for rule, code in programs.items() if "snakechat/training/deepspeed_engine.py" in code
    }
    assert (
        rules(names_after("makes stale if the content changes", stale)) == planned - roots != set()
    )


def names_after(label, line):
    """Return the names of the jobs in a line that begins with a label."""
    before, _, names = line.partition(": ")
    assert before == f"  {label}"
    return names.split(", ")


def rules(names):
    """Return the rules of jobs; each rule has one job in the tiny recipe."""
    assert len({name.split()[0] for name in names}) == len(names)
    return {name.split()[0] for name in names}


def test_a_changed_library_is_printed_once_for_all_jobs_that_use_it(built):
    with edited(built.folder / "requirements.txt", ("\npeft==0.21.2 ", "\npeft==0.21.1 ")):
        heading, same, stale = explain(built, TARGET).splitlines()
        planned = built.planned()
    assert heading == "train_sft tiny is stale: library peft changed from 0.21.2 to 0.21.1"
    roots = rules(names_after("the same applies to", same)) | {"train_sft"}
    # Its context for empty weights is used where models are loaded.
    stages = ("sft", "reward", "rlhf")
    assert roots == {f"{verb}_{stage}" for verb in ("train", "evaluate") for stage in stages}
    downstream = rules(names_after("makes stale if the content changes", stale))
    assert downstream == planned - roots


DAMAGES = {
    "some bytes": (
        lambda result: (result / "metrics.json").write_text("{}"),
        "output/eval/reward/tiny/metrics.json changed size ({:,} -> 2 bytes)",
    ),
    "the folder": (
        lambda result: shutil.rmtree(result.resolve()),
        "output/eval/reward/tiny is missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_a_result_is_its_cause(copy, damage, monkeypatch):
    apply, expected = DAMAGES[damage]
    path = "output/eval/reward/tiny"
    job = StaleJob(copy.spec_of(path), "")
    size = (copy.folder / path / "metrics.json").stat().st_size
    apply(copy.folder / path)
    monkeypatch.chdir(copy.folder)
    find_causes(job, {})
    assert job.causes == [expected.format(size)]


def rewrite(path, **changes):
    """Change entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def rebuilt(built, tmp_path):
    """A function that rebuilds the tokens of the RLHF prompts in a copy, with these properties."""

    def rebuild(files=(), **settings):
        folder = built.copy(tmp_path / "copy").folder
        manifest = folder / "output/tokens/rlhf/tiny.manifest.json"
        content = json.loads(manifest.read_text())
        content["spec"]["settings"].update(settings)
        for name in files:
            content["files"][name]["sha256"] = "0" * 64
        manifest.write_text(json.dumps(content))
        write_spec(folder, content["spec"])
        return folder

    return rebuild


def causes_of(folder, path, monkeypatch):
    """Return the causes of a stale result, whose spec is unchanged."""
    monkeypatch.chdir(folder)
    job = StaleJob(read_manifest(Path(f"{path}.manifest.json"))["spec"], "")
    find_causes(job, {})
    return job.causes


def write_spec(folder, spec):
    """Write a spec file as planning does."""
    name = f"{spec['name']}-{digest(spec)[:16]}.json"
    (folder / "output/specs" / spec["rule"] / name).write_text(json.dumps(spec))


def test_an_input_with_other_content_is_reported(rebuilt, monkeypatch):
    # As another machine might have made it from the same spec.
    folder = rebuilt(["stats.json"])
    causes = causes_of(folder, "output/rlhf/tiny", monkeypatch)
    assert causes == ["tokenize_rlhf tiny was rebuilt with other content"]


def test_a_rebuilt_input_is_reported_with_the_change_that_caused_it(rebuilt, monkeypatch):
    folder = rebuilt(["stats.json"], max_prompt_length=95)
    causes = causes_of(folder, "output/rlhf/tiny", monkeypatch)
    assert causes == [
        "tokenize_rlhf tiny was rebuilt: rlhf.max_prompt_length changed from 48 to 95"
    ]
    # Users may delete the spec files of old builds.
    shutil.rmtree(folder / "output/specs")
    causes = causes_of(folder, "output/rlhf/tiny", monkeypatch)
    assert causes == ["tokenize_rlhf tiny was rebuilt"]


def test_a_change_further_upstream_is_reported_as_the_cause(built):
    old = json.loads((built.folder / "output/rlhf/tiny.manifest.json").read_text())["lineage"]
    new = json.loads(json.dumps(old))
    for path in ("output/models/tiny", "output/sft/tiny"):
        new[path]["content"] = "0"
    causes = rebuild_causes("output/sft/tiny", old, new)
    assert causes == ["init_model tiny was rebuilt with other content"]


def test_an_input_that_was_rebuilt_with_the_same_content_makes_nothing_stale(rebuilt, monkeypatch):
    monkeypatch.chdir(rebuilt(max_prompt_length=95))
    manifest = read_manifest(Path("output/rlhf/tiny.manifest.json"))
    assert rebuilt_inputs(manifest, manifest["spec"], {}) == []
    assert replaced_versions(["output/rlhf/tiny"]) == [
        "tokenize_rlhf tiny was rebuilt with the same content:"
        " rlhf.max_prompt_length changed from 48 to 95"
    ]


def test_options_of_snakemake_may_follow_the_targets_or_a_separator(built):
    target = "output/eval/sft/tiny.manifest.json"
    expected = explain(built, target, options=("--config", "seed=3"))
    assert "seed changed from" in expected
    assert explain(built, target, "--", options=("--config", "seed=3")) == expected


def test_results_that_were_never_built_are_listed_upstream_first(sources):
    assert explain(sources, "output/sft/125m") == (
        "import_dataset rm-static has never been built\n"
        "  the same applies to: fetch_model opt-125m, split_dataset rm-static, tokenize_sft 125m,"
        " train_sft 125m, evaluate_sft 125m, draw_report sft/125m\n"
    )


def rows(*numbers):
    """Return the text of a jsonl dataset file with one row per number."""
    texts = [{"prompt": f"{n}?", "chosen": f" {n}.", "rejected": " No."} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in texts)


@pytest.fixture
def mine(sources):
    """A workflow that imported and split a local dataset, and nothing else."""
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


def test_changed_files_of_a_dataset_are_listed_with_their_rows(mine):
    target, folder = "output/split/mine.manifest.json", mine.folder / "mine"
    with (folder / "train-1.jsonl").open("a") as file:
        file.write(rows(60))
    stale = "  makes stale if the content changes: split_dataset mine\n"
    assert explain(mine, target) == (
        "import_dataset mine is stale: dataset mine: train/train-1.jsonl changed (40 -> 41 rows)\n"
        f"{stale}"
    )
    (folder / "train-2.jsonl").unlink()
    # A last line without a newline is a row too.
    (folder / "train-3.jsonl").write_text(rows(60, 61, 62).rstrip())
    (folder / "test.jsonl").write_text(rows(*range(70, 80)))
    assert explain(mine, target) == (
        "import_dataset mine is stale:\n"
        "  dataset mine: eval/test.jsonl changed (10 rows)\n"
        "  dataset mine: train/train-1.jsonl changed (40 -> 41 rows)\n"
        "  dataset mine: train/train-2.jsonl was deleted (10 rows)\n"
        f"  dataset mine: train/train-3.jsonl was added (3 rows)\n{stale}"
    )
    # A manifest without row counts, and a file whose rows cannot be counted.
    rewrite(mine.folder / "output/data/mine.manifest.json", facts={})
    (folder / "train-3.jsonl").write_text("")
    assert explain(mine, target) == (
        "import_dataset mine is stale:\n"
        "  dataset mine: eval/test.jsonl changed\n"
        "  dataset mine: train/train-1.jsonl changed\n"
        "  dataset mine: train/train-2.jsonl was deleted\n"
        f"  dataset mine: train/train-3.jsonl was added\n{stale}"
    )


def test_results_are_read_from_the_working_directory_of_snakemake(built, tmp_path):
    shutil.copytree(built.folder / "output", tmp_path / "output", symlinks=True)
    (tmp_path / "output/eval/sft/tiny/metrics.json").unlink()
    target = "output/eval/sft/tiny.manifest.json"
    assert explain(built, target, options=("--directory", str(tmp_path))) == (
        "evaluate_sft tiny is stale: output/eval/sft/tiny/metrics.json is missing\n"
    )


def test_only_specs_and_snapshots_are_written(copy):
    (copy.folder / "output/eval/sft/tiny/metrics.json").unlink()
    (copy.folder / "output/eval/reward/tiny.manifest.json").unlink()

    def files():
        paths = [path for path in copy.folder.rglob("*") if path.is_file()]
        apart = (".snakemake", "__pycache__", "specs", "code")
        return {path: path.read_bytes() for path in paths if not {*apart} & {*path.parts}}

    before = files()
    with edited(copy.folder / "config.yaml", ("learning_rate: 4.0e-3", "learning_rate: 3.0e-3")):
        assert "sft.learning_rate" in explain(copy, TARGET)
    assert files() == before


def test_config_keys_of_all_settings_exist_in_the_config(quick):
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    for path in (quick.folder / "output").rglob("*.manifest.json"):
        spec = json.loads(path.read_text())["spec"]
        for key in flatten(spec["settings"]):
            # max_rows has no key here.
            if key.partition(".")[0] in (*DERIVED, "max_rows"):
                continue
            first, *rest = config_key(spec, key).split(".")
            section = config[first]["defaults"] if first in STAGES else config[first]
            for inner in rest:
                assert inner in section, (spec["rule"], key)
                section = section[inner]
    split = {"rule": "split_dataset", "name": "toy"}
    assert config_key(split, "max_rows") == "datasets.toy.max_rows"
