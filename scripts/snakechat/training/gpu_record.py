"""What run.json says about the GPUs of a training: their name, CUDA and NCCL."""

import torch


def gpu_record() -> dict[str, str]:
    """Return the GPU of this process and the versions of its software, as far as they are known."""
    versions = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    if torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in versions.items() if version}
