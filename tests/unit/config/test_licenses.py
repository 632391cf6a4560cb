"""Conflicts of licences are reported while planning."""

import json

import pytest

from snakechat.config.errors import ConfigError
from snakechat.config.licenses import LicenseCheck
from snakechat.workflow import errors
from support.configs import load

TRAINING = ("train_sft", "mine")
# The base model, its reward model and its data, by the jobs that fetch them.
SOURCES = {"datasets": "import_dataset", "models": "fetch_model"}


class Specs:
    """Specs of a training that reads sources through a job between them."""

    def __init__(self, sources):
        self.sources = sources

    def result(self, rule, name):
        return f"output/{rule.removeprefix('train_')}/{name}"

    def spec(self, rule, name):
        inputs = {"train_sft": [("tokenize_sft", "mine")], "tokenize_sft": self.sources}
        folder = {"import_dataset": "data", "fetch_model": "models"}.get(rule, rule)
        spec = {
            "path": f"output/{folder}/{name}",
            "settings": {"hub": f"lab/{name}"},
            "inputs": {
                f"{number}": {"rule": upstream, "name": name}
                for number, (upstream, name) in enumerate(inputs.get(rule, ()))
            },
        }
        return spec, ""


@pytest.fixture(autouse=True)
def build(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    errors.warn.cache_clear()


def check_of(licenses="warn", **sources):
    """Return the check of a config with these sources, as {name: (section, settings)}."""
    entries = {"datasets": {}, "models": {}}
    for name, (section, settings) in sources.items():
        form = {"format": "plain"} if section == "datasets" else {}
        entries[section][name] = {"hub": f"lab/{name}", **form, **settings}
    names = [(SOURCES[section], name) for name, (section, _) in sources.items()]
    return LicenseCheck(load({"licenses": licenses, **entries}), Specs(names))


def warnings(capsys, check):
    check.check(*TRAINING)
    return capsys.readouterr().err.splitlines()


CONFLICTS = {
    "data without commercial use": (
        {"a": ("datasets", {"license": "CC-BY-NC-4.0"}), "b": ("models", {"license": "mit"})},
        "No commercial use: data/a (cc-by-nc-4.0).",
    ),
    "share-alike data for a model with conditions of use": (
        {"a": ("datasets", {"license": "cc-by-sa-4.0"}), "b": ("models", {"license": "gemma"})},
        "data/a (cc-by-sa-4.0) requires derived works under the same licence, which models/b"
        " (gemma) does not allow.",
    ),
    "a model that asks for its name": (
        {"a": ("datasets", {"license": "mit"}), "b": ("models", {"license": "llama3.1"})},
        "The name of a published model has to start with “Llama”: models/b (llama3.1).",
    ),
}


@pytest.mark.parametrize(("sources", "text"), CONFLICTS.values(), ids=CONFLICTS)
def test_a_conflict_is_a_warning_or_an_error(capsys, sources, text):
    line = f"warning: licences of output/sft/mine: {text}"
    assert warnings(capsys, check_of(**sources)) == [line]
    with pytest.raises(ConfigError) as error:
        check_of("strict", **sources).check(*TRAINING)
    assert str(error.value) == f"config: licenses: strict, and output/sft/mine: {text}"


def test_a_conflict_of_many_recipes_is_one_line(capsys):
    check = check_of(a=("datasets", {"license": "cc-by-nc-4.0"}))
    for name in ("mine", "other"):
        check.check("train_sft", name)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_repository_is_unknown_once_its_card_says_nothing(capsys, tmp_path):
    check = check_of(a=("datasets", {}))
    assert warnings(capsys, check) == []
    with pytest.raises(ConfigError, match="licence of data/a is not known: set `license`"):
        check_of("strict", a=("datasets", {})).check(*TRAINING)
    spec = {"path": "output/data/a", "settings": {"hub": "lab/a"}, "inputs": {}}
    manifest = {"spec": spec, "inputs": {}, "lineage": {}, "files": {}}
    (tmp_path / "output/data").mkdir(parents=True)
    for facts, lines in (({"licence": "mit"}, 0), ({"licence": None}, 1)):
        text = json.dumps({**manifest, "facts": facts})
        (tmp_path / "output/data/a.manifest.json").write_text(text)
        assert len(warnings(capsys, check_of(a=("datasets", {})))) == lines


def test_the_card_in_a_local_folder_counts_before_it_is_imported(capsys, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-nd-4.0\n---\n")
    check = check_of(a=("datasets", {"path": str(tmp_path)}))
    [line] = warnings(capsys, check)
    assert line.endswith("No derived works: data/a (cc-by-nd-4.0).")
    declared = {"path": str(tmp_path), "license": "mit"}
    assert warnings(capsys, check_of(a=("datasets", declared))) == []


def test_only_licences_of_the_sources_of_a_job_count_for_it():
    check = check_of(a=("datasets", {"license": "MIT"}), b=("models", {"license": "odc-by"}))
    check.specs.sources = [("import_dataset", "a")]
    assert check.declared_for({"train_sft": TRAINING}) == {"output/data/a": "mit"}
