"""The config of the project with changes, as a user puts them on top."""

import copy
from functools import cache
from pathlib import Path

import yaml

from snakechat.config.loading import load_config, project_files, update

# Not of conftest.py, which programs of tests/gpu do not import.
ROOT = Path(__file__).resolve().parents[2]


@cache
def project_values():
    """Return the values of the project's config files."""
    values = {}
    for file in project_files(ROOT):
        update(values, yaml.safe_load(file.read_text()))
    return values


def config_values(changes=()):
    """Return the values of config.yaml with nested changes."""
    values = {}
    for layer in (copy.deepcopy(project_values()), dict(changes)):
        update(values, layer)
    return values


def load(changes=(), root=ROOT, command_line=()):
    """Return the checked config with nested changes."""
    return load_config(config_values(changes), root, root, dict(command_line))


def tiny(stage, **settings):
    """Return settings of a stage's tiny recipe."""
    return {stage: {"recipes": {"tiny": settings}}}
