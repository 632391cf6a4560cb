"""Split a dataset's rows among the phases: PHASE.train.npy and PHASE.eval.npy with row numbers.

If the dataset has no eval split, a tenth of its training rows is held out, and PHASE.eval.npy has
row numbers of train.parquet too. Rows that the dataset excludes are removed after the split, so
that all other rows stay in their phases. stats.json has the number of rows of each phase, and how
many of them have a prompt that occurs in another phase.
"""

import json
from itertools import permutations
from typing import Any

import numpy as np

from snakechat.data.phase_splits import (
    PHASES,
    SPLITS,
    limited_phases,
    removed_rows,
    split_rows,
)
from snakechat.data.ragged_arrays import save_array
from snakechat.data.records import fingerprint, read_texts
from snakechat.workflow.job import Job, run


def main(job: Job) -> None:
    """Split both splits, train and eval, in the same proportions."""
    settings = job.settings
    weights = [settings.weights[phase] for phase in PHASES]

    paths = {path.stem: path for path in sorted(job.inputs["records"].glob("*.parquet"))}
    prompts: dict[str, np.ndarray] = {
        # A text that is no dialogue has no prompt.
        split: np.array(
            [fingerprint(prompt or chosen or "") for prompt, chosen, _ in read_texts(path)],
            np.uint64,
        )
        for split, path in paths.items()
    }
    groups = prompts
    if settings.by == "row":
        groups = {split: np.arange(len(found)) for split, found in prompts.items()}
    removed = removed_rows(job, vars(settings), paths, job.spec["name"])
    rows = {split: np.arange(len(fingerprints)) for split, fingerprints in prompts.items()}
    if "eval" not in prompts:
        rows["train"], rows["eval"] = split_rows(groups["train"], [9, 1], settings.seed)
        for each in (prompts, groups, removed):
            each["eval"] = each["train"]

    stats: dict[str, dict[str, Any]] = {}
    phase_prompts = {}
    for split in SPLITS:
        # max_rows limits the rows to train on: evaluations with and without it are comparable.
        max_rows = settings.max_rows if split == "train" else None
        places = split_rows(groups[split][rows[split]], weights, settings.seed)
        divided = [rows[split][indices] for indices in places]
        phases = limited_phases(divided, removed[split], weights, max_rows or len(rows[split]))
        for phase, drawn in zip(PHASES, phases, strict=True):
            name = f"{phase}.{split}"
            numbers = np.sort(drawn)
            save_array(job.result / f"{name}.npy", numbers)
            phase_prompts[name] = prompts[split][numbers]
            stats[name] = {"rows": len(numbers)}
    for name, other in permutations(phase_prompts, 2):
        if overlap := int(np.isin(phase_prompts[name], phase_prompts[other]).sum()):
            stats[name].setdefault("rows_whose_prompt_is_in", {})[other] = overlap
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")
    sizes = ", ".join(f"{name} {counts['rows']:,}" for name, counts in stats.items())
    print(f"{job.spec['name']}: {sizes}")


if __name__ == "__main__":
    run(main)
