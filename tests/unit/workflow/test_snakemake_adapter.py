"""Which versions of Snakemake and which paths a build accepts."""

from pathlib import Path

import pytest

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_adapter import check_path, check_version


@pytest.mark.parametrize("version", ["8.30.0", "90.1"])
def test_other_versions_than_9_are_rejected(version):
    check_version("9.27.1")
    with pytest.raises(InputError, match=f"Snakemake {version} is installed"):
        check_version(version)


@pytest.mark.parametrize("name", ["a{", "b}"])
def test_braces_in_the_path_of_a_project_are_rejected(name):
    check_path(Path("/my project/$(x)"))
    with pytest.raises(InputError, match="braces in a path"):
        check_path(Path("/work", name))
