"""One process of a group of 64 that does not exist: what it holds at each ZeRO stage.

    fake_ranks.py

Collective operations do nothing (torch's fake process group), so that losses are meaningless.
Prints JSON: of each stage, the master weights of this process as a fraction of all weights.
"""

import collections
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

RANKS = 64
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", OMP_NUM_THREADS="1")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from gpu.worker import SETTINGS, make_examples, make_policy, train_step  # noqa: E402
from snakechat.modeling.partitions import whole_shape  # noqa: E402
from snakechat.training.engine import make_engine  # noqa: E402


def fraction_held(stage):
    """Train two steps; return the share of the weights that this process updates."""
    device = torch.device("cpu")
    policy = make_policy(device)
    num_weights = sum(whole_shape(weight).numel() for weight in policy.parameters())
    placement = {"nodes": RANKS, "gpus_per_node": 0, "zero_stage": stage, "offload": "none"}
    placement["activation_checkpointing"] = True
    settings = SimpleNamespace(**SETTINGS, dtype="bf16")
    engine = make_engine(policy, settings, 1e-3, 2, placement)
    for step in range(2):
        train_step(engine, make_examples(), step, device)
    return sum(master.numel() for master in engine.master_weights) / num_weights


def main():
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
    deepspeed.init_distributed("gloo", verbose=False)
    held = {stage: fraction_held(stage) for stage in (0, 2, 3)}
    print(json.dumps(held))


if __name__ == "__main__":
    main()
