"""Split a dataset's rows among the phases: PHASE.train.npy and PHASE.eval.npy with row numbers.

If the dataset has no eval split, a tenth of its training rows is held out, and PHASE.eval.npy has
row numbers of train.parquet too. Rows that the dataset excludes are removed after the split, so
that all other rows stay in their phases.
"""

import numpy as np
import pyarrow.parquet as pq

from snakechat.data.dialogues import SPLITS
from snakechat.data.ragged_arrays import save_array
from snakechat.data.records import (
    PHASES,
    fingerprint,
    limited_phases,
    read_texts,
    removed_rows,
    split_rows,
)
from snakechat.workflow.job import Job, run


def main(job: Job) -> None:
    """Split both splits, train and eval, in the same proportions."""
    settings = job.settings
    weights = [settings.weights[phase] for phase in PHASES]

    paths = {path.stem: path for path in sorted(job.inputs["records"].glob("*.parquet"))}
    rows = {split: np.arange(pq.read_metadata(path).num_rows) for split, path in paths.items()}
    groups = dict(rows)
    if settings.by == "prompt":
        for split, path in paths.items():
            # A text that is not a dialogue has no prompt.
            prompts = (prompt or chosen or "" for prompt, chosen, _ in read_texts(path))
            groups[split] = np.array([*map(fingerprint, prompts)], np.uint64)
    removed = removed_rows(job, vars(settings), paths)
    if "eval" not in groups:
        rows["train"], rows["eval"] = split_rows(groups["train"], [9, 1], settings.seed)
        groups["eval"], removed["eval"] = groups["train"], removed["train"]

    sizes = []
    for split in SPLITS:
        places = split_rows(groups[split][rows[split]], weights, settings.seed)
        divided = [rows[split][indices] for indices in places]
        # max_rows limits the rows to train on: evaluations with and without it are comparable.
        limit = (split == "train" and settings.max_rows) or len(rows[split])
        phases = limited_phases(divided, removed[split], weights, limit)
        for phase, drawn in zip(PHASES, phases, strict=True):
            save_array(job.result / f"{phase}.{split}.npy", np.sort(drawn))
            sizes.append(f"{phase}.{split} {len(drawn):,}")
    print(f"{job.spec['name']}: {', '.join(sizes)}")


if __name__ == "__main__":
    run(main)
