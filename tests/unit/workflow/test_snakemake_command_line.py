"""What options of Snakemake say."""

import shlex
from pathlib import Path

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_command_line import (
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


def test_a_config_file_has_one_name_however_it_is_spelled(tmp_path, monkeypatch):
    (tmp_path / "build").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "build")
    spellings = (tmp_path / "run.json", Path("../run.json"), tmp_path / "link/build/../run.json")
    for path in spellings:
        assert config_options([path], {}) == ["--configfile", "../run.json"]


def test_options_of_the_config_can_be_given_again():
    text = "--config seed=2 language=zh deterministic=True 'sft={recipes: {mine: {epochs: 2}}}'"
    words = shlex.split(text)
    values = parse_options(words)[1]
    written = config_options([], values)
    assert written[:3] == ["--config", "seed=2", "language=zh"]
    assert parse_options(written)[1] == values
