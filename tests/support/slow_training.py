"""A training of two processes, for tests/unit/training/test_processes.py.

    slow_training.py FOLDER

With SLOW in the environment, the first process takes a minute in the evaluation after step 4, while
the other one waits for it. A file FOLDER/waiting says that it has begun.
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from snakechat.training import trainer  # noqa: E402
from snakechat.training.evaluations import Evaluations  # noqa: E402
from snakechat.workflow import processes  # noqa: E402
from support.engines import engine_for, network, rows, squared_error  # noqa: E402

STEPS, SLOW_STEP = 6, 4
SETTINGS = {"eval_steps": 2, "early_stopping_patience": 0, "save_strategy": "best", "keep_steps": 0}
SETTINGS |= {"dtype": "fp32", "seed": 1}


def main(folder):
    rank, number = processes.rank(), processes.world_size()
    job = SimpleNamespace(
        spec={"rule": "train_sft", "name": "slow"},
        settings=SimpleNamespace(**SETTINGS),
        placement=processes.Placement(nodes=number),
        options=processes.RunOptions(save_steps=100),
        inputs={"model": None},
        states=folder / "states",
        result=folder / "result",
        log_folder=folder / "logs",
        facts={},
        record={},
    )
    job.result.mkdir(parents=True, exist_ok=True)
    training = trainer.Training(job)
    engine = engine_for(network())
    # Its weights are not those of a model in a folder.
    engine.module.model, trainer.record_changed_weights = None, lambda *_: None
    torch.manual_seed(rank)
    inputs, targets = rows(8)

    def evaluate():
        if rank == 0 and "SLOW" in os.environ and engine.scheduler.last_epoch == SLOW_STEP:
            (folder / "waiting").touch()
            time.sleep(60)
        processes.barrier()
        return {"loss": squared_error(engine.module(inputs), targets, 8).item()}

    def save(target):
        target.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            torch.save(engine.module.state_dict(), target / "model.pt")

    def take_step(step, _):
        draws, own = torch.rand(1), slice(rank, None, number)
        with training.timer("train"):
            loss = squared_error(engine(inputs[own]), targets[own], 8) + 0 * draws.sum()
            engine.backward(loss, last=True)
            engine.step()
        loss = processes.all_reduce_sum(loss.detach()).item()
        return trainer.Step({"loss": loss, "draws": draws.item()}, ["loss"], 8)

    evaluations = Evaluations(job, STEPS, evaluate, save)
    batches = [np.arange(8)] * STEPS
    training.take_steps(batches, take_step, None, evaluations, {"policy": engine})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
