"""Deterministic kernels: of GPUs with `deterministic: true`, of CPUs always."""

import pytest
import torch

from snakechat.modeling.acceleration import choose_device
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.workflow.processes import (
    ENVIRONMENT,
    REQUEST,
    SERIAL,
    missing_kernel,
    request_deterministic_kernels,
)


@pytest.fixture(autouse=True)
def _restored():
    """Restore what choose_device and the tests set for the process."""
    filled, number = torch.utils.deterministic.fill_uninitialized_memory, torch.get_num_threads()
    yield
    torch.set_num_threads(number)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_an_operation_without_a_deterministic_kernel_is_an_error(monkeypatch):
    for name in (*ENVIRONMENT, REQUEST):
        # Deletes them after the test, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    request_deterministic_kernels()
    choose_device(SERIAL)
    # torch has none for it on a CPU either.
    with pytest.raises(RuntimeError) as error:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert missing_kernel(error.value) == "put_"


def test_threads_of_a_cpu_add_gradients_in_the_same_order(model):
    # More numbers than torch leaves to one thread, and prompts whose last state 8 responses share.
    prompts = [[3 + row, 9] for row in range(40)]
    rows = Examples(prompts, *([[20 + i, 5, 6, 2]] * 40 for i in range(8)))
    torch.set_num_threads(2)
    policy = Policy(model)
    batch = rows.collate([[row] for row in range(40)], True, choose_device(SERIAL))
    weights = list(policy.model.parameters())
    first, *others = (torch.autograd.grad(policy(batch).sum(), weights) for _ in range(8))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))
