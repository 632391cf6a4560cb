"""Cases of tests, of which `make test` runs a few and `make test-all` all."""

import pytest


def some(names, kept, argument, values=None, indirect=False):
    """Parametrize a test with names, or their values. Those not kept are of exhaustive tests."""
    params = [
        pytest.param(
            values[name] if values else name,
            id=name,
            marks=[] if name in kept else pytest.mark.exhaustive,
        )
        for name in names
    ]
    return pytest.mark.parametrize(argument, params, indirect=indirect)
