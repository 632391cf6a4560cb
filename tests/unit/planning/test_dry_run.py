"""Command lines with options of Snakemake, and jobs read from the output of a dry run."""

import argparse
import json
import shlex

import pytest

from snakechat.planning.dry_run import parse_arguments, planned_jobs, upstream_paths


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


def test_an_unknown_option_before_the_separator_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse("x --cores 2 -- --force")
    assert "unrecognized arguments: --cores" in capsys.readouterr().err


def test_jobs_are_read_from_the_commands_in_topological_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(path, *inputs, placement=None):
        entries = {name: {"path": name} for name in inputs}
        spec = {"path": path, "inputs": entries}
        (tmp_path / f"{path}.json").write_text(json.dumps(spec))
        options = f" --placement {shlex.quote(json.dumps(placement))}" if placement else ""
        return (
            f"Shell command: python scripts/{path}.py --spec output/specs/{path}.json{options} 2>&1"
        )

    output = "\n".join(
        [
            "rule c:",
            "Reason: Missing output files: c",
            command("c", "a", "b"),
            "Reason: Updated input files: a",
            command("b", "a", placement={"nodes": 2}),
            "Reason: Missing output files: a",
            command("a", "source"),
            "Reason: none",
            "Shell command: None",
        ]
    )
    jobs = planned_jobs(output, tmp_path)
    assert list(jobs) == ["a", "b", "c"]
    assert jobs["b"].placement == {"nodes": 2} and jobs["c"].placement == {}
    assert jobs["c"].reason == "Missing output files: c"
    assert upstream_paths(jobs["c"].spec, jobs) == ["a", "b"]
    assert upstream_paths(jobs["a"].spec, jobs) == []
