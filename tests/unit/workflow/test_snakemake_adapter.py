"""Which Snakemake a build accepts."""

import pytest
from snakemake.api import SnakemakeApi

from snakechat.workflow.errors import InputError
from snakechat.workflow.snakemake_adapter import REPLACED, REPLACED_ON_KUBERNETES, check_names


@pytest.mark.parametrize("name", REPLACED | REPLACED_ON_KUBERNETES)
def test_a_snakemake_without_a_name_that_is_replaced_is_rejected(name):
    # Its module imports snakemake.workflow, which cannot be the first.
    assert SnakemakeApi
    check_names([name])
    with pytest.raises(InputError, match=f"has no {name}s, and this workflow needs 9.27"):
        check_names([f"{name}s"])


def test_at_most_six_names_of_snakemake_are_replaced():
    assert len(REPLACED | REPLACED_ON_KUBERNETES) <= 6
