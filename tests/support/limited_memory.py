"""SFT on CPUs that stand for GPUs of little memory, for tests/programs/test_rungs.py.

It is both the launcher and the program that the launcher starts. LIMIT is the memory of a process
in bytes, STOP the step after which it receives SIGTERM, and KILLED_STAGE the ZeRO stage up to which
a process is killed in its trial, as the kernel does it where a node has no memory left.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
LIMIT, STOP = int(os.environ["LIMIT"]), int(os.environ.get("STOP", 0))
KILLED_STAGE = int(os.environ.get("KILLED_STAGE", -1))


def train():
    """Train in a process whose tensors take at most LIMIT bytes."""
    from snakechat.estimates.memory import MemoryTracker
    from snakechat.modeling import models

    choose_device = models.choose_device
    # Before other modules import it.
    models.choose_device = lambda placement: choose_device(
        dataclasses.replace(placement, gpus_per_node=0)
    )
    from snakechat.training import deepspeed_engine

    # Otherwise DeepSpeed's buffers would take most of the memory.
    deepspeed_engine.BUCKET = deepspeed_engine.REUSED = deepspeed_engine.PREFETCHED = 1 << 16
    import train_sft
    from snakechat.config.settings import SftSettings
    from snakechat.training import engine, trainer
    from snakechat.workflow import job

    class Limited(MemoryTracker):
        def __torch_dispatch__(self, *arguments):
            outputs = super().__torch_dispatch__(*arguments)
            if self.bytes > LIMIT:
                raise torch.OutOfMemoryError(f"{self.bytes} of {LIMIT} bytes")
            return outputs

    train_model, trial = trainer.Training.train, engine.Engine.trial

    def stopping_train(self, update, *arguments):
        def update_and_stop(step, rows):
            if step == STOP + 1 and STOP:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return update(step, rows)

        train_model(self, update_and_stop, *arguments)

    def killed_trial(self):
        if self.stage <= KILLED_STAGE and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return trial(self)

    trainer.Training.train, engine.Engine.trial = stopping_train, killed_trial
    with Limited(torch.nn.Module()):
        job.run(train_sft.main, SftSettings)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train()
    else:
        import launch
        from snakechat.workflow import publishing

        publishing.changed_keys = lambda *_: ""
        launch.main()
