"""Command lines with options of Snakemake, what targets consist of, and which results are made."""

import argparse
import shlex

import pytest

from conftest import ROOT
from snakechat.config.loading import load_config
from snakechat.config.recipes import Config
from snakechat.jobs.descriptions import Description
from snakechat.jobs.rules import Rule
from snakechat.jobs.specs import Specs
from snakechat.planning.plan import Plan, PlannedJob, upstream_paths
from snakechat.planning.planner import (
    jobs_of_target,
    parse_arguments,
    stale_results,
    with_upstream,
)
from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_command_line import read_config


def parse(line):
    """Return the targets, the kind and the options for Snakemake of a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--kind", choices=("a", "b"), default="a")
    arguments, options = parse_arguments(parser, shlex.split(line))
    return arguments.targets, arguments.kind, options


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ([], "a", [])),
        ("x y", (["x", "y"], "a", [])),
        ("x --kind b", (["x"], "b", [])),
        ("x --configfile mine.yaml", (["x"], "a", ["--configfile", "mine.yaml"])),
        ("--kind b x --config seed=2 a=1", (["x"], "b", ["--config", "seed=2", "a=1"])),
        ("x y --kind=b -c 2 --force", (["x", "y"], "b", ["-c", "2", "--force"])),
        ("--cores 2", ([], "a", ["--cores", "2"])),
        ("x -- --configfile mine.yaml", (["x"], "a", ["--configfile", "mine.yaml"])),
        # After the separator, an option of the program is Snakemake's too.
        ("x -- --kind c", (["x"], "a", ["--kind", "c"])),
        # As for Snakemake, which reads all words after --configfile as files.
        ("--configfile mine.yaml x", ([], "a", ["--configfile", "mine.yaml", "x"])),
    ],
)
def test_options_of_snakemake_begin_at_an_unknown_option_or_a_separator(line, expected):
    assert parse(line) == expected


@pytest.mark.parametrize("line", ["x --kind c", "x --kind c --cores 2", "--cores 2 --kind c"])
def test_a_wrong_value_of_an_own_option_is_an_error(line, capsys):
    with pytest.raises(SystemExit):
        parse(line)
    assert "invalid choice: 'c'" in capsys.readouterr().err


def test_an_own_option_after_those_of_snakemake_is_an_error_with_advice(capsys):
    with pytest.raises(SystemExit):
        parse("x --configfile mine.yaml --kind b")
    assert "write --kind before --configfile" in capsys.readouterr().err


def test_an_unknown_option_before_the_separator_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse("x --cores 2 -- --force")
    assert "unrecognized arguments: --cores" in capsys.readouterr().err


# --- targets ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config():
    values = read_config([ROOT / "config.yaml"], {})
    values["datasets"]["best"] = {"generations": "tiny", "select": "best"}
    return load_config(values, ROOT, ROOT, {})


FOLDER_JOBS = [("train_sft", "tiny"), ("evaluate_sft", "tiny"), ("draw_report", "sft/tiny")]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("output/sft/tiny", FOLDER_JOBS),
        ("./output/rlhf/../sft/tiny", FOLDER_JOBS),
        ("output/sft/tiny.manifest.json", [("train_sft", "tiny")]),
        ("output/eval/rlhf/tiny/metrics.json", [("evaluate_rlhf", "tiny")]),
        ("output/tokens/sft/tiny", [("tokenize_sft", "tiny")]),
        ("output/report/rlhf/tiny/report.html", [("draw_report", "rlhf/tiny")]),
        ("output/data/toy", [("import_dataset", "toy")]),
        ("output/models/tiny", [("init_model", "tiny")]),
        ("output/models/opt-125m", [("fetch_model", "opt-125m")]),
    ],
)
def test_a_target_is_a_folder_a_result_or_a_file_of_it(config, target, expected):
    assert jobs_of_target(config, target) == expected


@pytest.mark.parametrize("target", ["sft/tiny", "output/sft", "output/none/tiny", "train_sft", ""])
def test_another_target_is_an_error(config, target):
    with pytest.raises(InputError, match=f"^{target} is not a result: name one"):
        jobs_of_target(config, target)


# --- stale results ----------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Specs of rules a to d, which nothing has built: b and c read a, and d reads both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/make.py").touch()
    for lock in ("requirements.txt", "requirements-torch.txt"):
        (tmp_path / lock).touch()
    readers = {"a": "", "b": "a", "c": "a", "d": "bc"}

    def rule(name):
        inputs = {upstream: (upstream, "x") for upstream in readers[name]}
        return Rule(lambda config, job: Description({}, inputs), name, "make")

    config = Config({"deterministic": False}, tmp_path, tmp_path)
    return Specs(config, tmp_path, {name: rule(name) for name in readers})


def test_jobs_follow_their_upstream_jobs(chain):
    jobs = with_upstream(chain, [("d", "x"), ("b", "x")])
    assert jobs == [("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")]
    plan = Plan({chain.result(*job): PlannedJob(chain.spec(*job)[0]) for job in jobs}, set())
    assert upstream_paths(plan.jobs["output/d/x"].spec, plan.jobs) == ["output/b/x", "output/c/x"]
    assert upstream_paths(plan.jobs["output/a/x"].spec, plan.jobs) == []
    assert plan.stale_jobs == {}


@pytest.mark.parametrize(
    ("missing", "stale", "made"),
    [
        ("", "", ""),
        ("abcd", "", "abcd"),
        ("d", "", "d"),
        # What nothing that is made reads stays missing.
        ("a", "", ""),
        ("ab", "", ""),
        # c is up to date, and runs because a, which b reads, is made.
        ("abd", "", "abcd"),
        ("b", "d", "bd"),
        ("", "a", "abcd"),
        ("", "c", "cd"),
        ("d", "a", "abcd"),
    ],
)
def test_results_are_made_if_stale_or_wanted_or_read_by_those(
    chain, monkeypatch, missing, stale, made
):
    class Decided:
        def __init__(self, specs):
            self.stale = {f"output/{name}/x": {} for name in stale}

        def decide(self, rule, name):
            pass

        def result(self, rule, name):
            return None if rule in missing + stale else f"the result of {rule}"

    monkeypatch.setattr("snakechat.planning.planner.Staleness", Decided)
    jobs = with_upstream(chain, [("d", "x")])
    found = stale_results(chain, jobs, [("d", "x")])
    assert "".join(sorted(path.split("/")[1] for path in found)) == made
