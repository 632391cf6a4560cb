"""Share a dataset's rows among the phases: PHASE.train.npy and PHASE.eval.npy, row numbers."""

import numpy as np

from rlhf.job import run
from rlhf.records import PHASES, phase_of_rows, read_records


def main(job):
    """The same cut for the part to train on and the part to evaluate on."""
    settings = job.settings
    weights = [settings.weights[phase] for phase in PHASES]
    for part in ("train", "eval"):
        rows = read_records(job.inputs["records"] / f"{part}.parquet")
        if settings.by == "row":
            units = [[row] for row in range(len(rows))]
        else:
            by_prompt = {}
            for number, row in enumerate(rows):
                by_prompt.setdefault(row["prompt"], []).append(number)
            units = list(by_prompt.values())
        shares = phase_of_rows(len(units), weights, settings.seed)
        for phase, chosen in zip(PHASES, shares, strict=True):
            numbers = np.array([row for unit in chosen for row in units[unit]], dtype=np.int64)
            np.save(job.result / f"{phase}.{part}.npy", numbers)
            print(f"{job.spec['name']}: {len(numbers)} rows to {part} {phase}")


if __name__ == "__main__":
    run(main)
