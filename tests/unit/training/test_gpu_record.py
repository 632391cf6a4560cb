"""What run.json says about GPUs."""

from types import SimpleNamespace

import pytest
import torch

from snakechat.training import gpu_record

PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


@pytest.mark.parametrize(
    ("text", "version"), [(PROPRIETARY, "535.183.01"), (OPEN, "570.86.15"), ("", None)]
)
def test_the_version_of_the_driver(text, version, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_record, "DRIVER", tmp_path / "version")
    assert gpu_record.driver_version() is None
    gpu_record.DRIVER.write_text(text)
    assert gpu_record.driver_version() == version


def test_the_record_has_the_versions_that_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_record, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 5)))
    assert gpu_record.gpu_record() == {"gpu": "NVIDIA A100", "cuda": "12.8", "nccl": "2.27.5"}
