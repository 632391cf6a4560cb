"""Devices of the tests. make test-gpu selects those of a GPU; make test runs the others."""

import pytest
import torch

ON_GPU = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)], scope="module")
def device(request):
    """The CPU, and the first GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none")
    return torch.device(request.param)
