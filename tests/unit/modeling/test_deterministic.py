"""Deterministic kernels (`deterministic: true`)."""

import os

import pytest
import torch

from snakechat.modeling.models import choose_device
from snakechat.workflow.deterministic import (
    ENVIRONMENT,
    REQUEST,
    missing_kernel,
    request_deterministic_kernels,
)


@pytest.fixture
def deterministic(monkeypatch):
    """Use deterministic kernels in this test."""
    for name in (*ENVIRONMENT, REQUEST):
        # Deletes them after the test, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    request_deterministic_kernels()
    choose_device({"gpus_per_node": 0})
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_libraries_of_a_gpu_are_configured(deterministic, monkeypatch):
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    # What a cluster sets stays.
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    request_deterministic_kernels()
    assert os.environ["NCCL_ALGO"] == "Ring"


def test_an_operation_without_a_deterministic_kernel_is_an_error(deterministic):
    # torch has none for it on a CPU either.
    with pytest.raises(RuntimeError) as error:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert missing_kernel(error.value) == "put_"


def test_memory_that_is_reserved_is_not_written(deterministic):
    # Processes reserve whole weights and read their partition (ZeRO 3).
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("put_ does not")])
def test_other_errors_name_no_operation(error):
    assert missing_kernel(error) is None
