"""What run.json says about GPUs."""

from types import SimpleNamespace

import torch

from snakechat.training import gpu_record


def test_the_record_has_the_versions_that_are_known(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 5)))
    assert gpu_record.gpu_record() == {"gpu": "NVIDIA A100", "cuda": "12.8", "nccl": "2.27.5"}
