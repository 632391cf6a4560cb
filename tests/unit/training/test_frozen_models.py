"""Frozen models: where they are and that they compute no gradients."""

import pytest
import torch
from torch import nn

from snakechat.training.engine import FrozenModel


class RecordingLayer(nn.Linear):
    """A layer that records the devices that it was moved to."""

    def __init__(self):
        super().__init__(2, 1)
        self.train()
        self.devices = []

    def to(self, device):
        self.devices.append(str(device))
        return self


@pytest.mark.parametrize(
    ("offload", "devices"),
    [
        (False, ["cuda:1", "cuda:1", "cuda:1"]),
        # Moved to its device and back, each time.
        (True, ["cpu", "cuda:1", "cpu", "cuda:1", "cpu"]),
    ],
)
def test_an_offloaded_module_is_on_its_device_only_in_use(offload, devices):
    module = RecordingLayer()
    frozen = FrozenModel(module, torch.device("cuda", 1), offload)
    for _ in range(2):
        with frozen.on_device() as moved:
            assert moved is module
            assert module.devices[-1] == "cuda:1"
    assert module.devices == devices
