"""Licences that the config declares."""

from snakechat.config.licenses import declared_licenses
from support.configs import load


def test_declared_licences_are_those_of_imports_and_fetches():
    config = load(
        {
            "datasets": {
                "a": {"hub": "lab/a", "format": "plain", "license": "MIT"},
                "b": {"hub": "lab/b", "format": "plain"},
            },
            "models": {"c": {"hub": "lab/c", "license": "odc-by"}},
        }
    )
    assert declared_licenses(config) == {"output/data/a": "mit", "output/models/c": "odc-by"}
