"""What options of Snakemake say."""

import shlex
from pathlib import Path

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_cli import (
    config_options,
    parse_options,
    read_config,
)


def test_options_are_read_as_snakemake_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("seed: 1\nsft: {defaults: {epochs: 1, lora_rank: 4}}\n")
    (tmp_path / "b.yaml").write_text("sft: {defaults: {epochs: 2}}\n")
    words = shlex.split("x y --configfile a.yaml b.yaml --config seed=3 'dpo={recipes: {}}'")
    options, config = parse_options([*words, "--directory", "there", "--cores", "2", "-n"])
    assert options.targets == ["x", "y"] and options.directory == Path("there")
    assert read_config(options.configfile, config) == {
        "seed": 3,
        "sft": {"defaults": {"epochs": 2, "lora_rank": 4}},
        "dpo": {"recipes": {}},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--force", "--force has no effect here"),
        ("--confg a", "unrecognized arguments: --confg"),
        ("--config seed", "Config entries have to be defined as name=value pairs"),
    ],
)
def test_other_options_are_errors_of_one_line(words, message):
    with pytest.raises(InputError, match=message):
        parse_options(shlex.split(words))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["output/sft/tiny", "--config", "seed=2", "language=zh", "-n", "--configfile=a.yaml"],
            ["--config", "seed=2", "language=zh", "--configfile=a.yaml"],
        ),
        (["-C", "seed=2", "-n"], ["-C", "seed=2"]),
    ],
)
def test_options_of_the_config_are_kept(arguments, expected, monkeypatch):
    assert config_options(arguments) == expected
    monkeypatch.setattr("sys.argv", ["snakemake", *arguments])
    assert config_options() == expected
