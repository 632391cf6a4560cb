"""Share a dataset's rows among the phases: PHASE.train.npy and PHASE.eval.npy, row numbers.

Without an eval part, a tenth of the rows to train on is held out, and PHASE.eval.npy numbers rows
of train.parquet too. stats.json says how many rows each phase has, and how many of them have a
prompt that stands in another phase as well.
"""

import json
from itertools import permutations

import numpy as np

from snakechat.data.phase_splits import PHASES, split_groups, split_rows
from snakechat.data.records import read_records
from snakechat.data.statistics import fingerprint, count_shared
from snakechat.workflow.job import run


def main(job):
    """The same cut for the part to train on and the part to evaluate on."""
    settings = job.settings
    weights = [settings.weights[phase] for phase in PHASES]

    def share(prompts, weights, max_rows=None):
        if settings.by == "row":
            return split_rows(len(prompts), weights, settings.seed, max_rows)
        return split_groups(prompts, weights, settings.seed, max_rows)

    prompts = {
        path.stem: np.array([fingerprint(prompt) for prompt, _, _ in read_records(path)], np.uint64)
        for path in job.inputs["records"].glob("*.parquet")
    }
    rows = {part: np.arange(len(found)) for part, found in prompts.items()}
    if "eval" not in prompts:
        rows["train"], rows["eval"] = share(prompts["train"], [9, 1])
        prompts["eval"] = prompts["train"]

    stats, phases = {}, {}
    for part in ("train", "eval"):
        cut = share(prompts[part][rows[part]], weights, settings.max_rows)
        for phase, places in zip(PHASES, cut, strict=True):
            numbers = np.sort(rows[part][places])
            np.save(job.result / f"{phase}.{part}.npy", numbers)
            phases[f"{phase}.{part}"] = prompts[part][numbers]
            stats[f"{phase}.{part}"] = {"rows": len(numbers)}
    for one, other in permutations(phases, 2):
        if overlap := count_shared(phases[one], phases[other]):
            stats[one].setdefault("rows_whose_prompt_is_in", {})[other] = overlap
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")
    sizes = ", ".join(f"{phase} {facts['rows']:,}" for phase, facts in stats.items())
    print(f"{job.spec['name']}: {sizes}")


if __name__ == "__main__":
    run(main)
