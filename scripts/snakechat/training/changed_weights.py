"""Which share of the weights a training changed, as far as their saved data type shows it."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from snakechat.modeling.deferred_weights import weight_files
from snakechat.modeling.models import DTYPES
from snakechat.modeling.weight_writing import saved_weights, weights_in_files
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import warn
from snakechat.workflow.job import Job

# Adam moves all weights by about the same distance, the sum of the learning rates of the steps at
# most. In 16 bits, a weight takes its new value only if the distance is more than half of that to
# its neighbours, and otherwise loses its whole update. If a share c of the weights changes, the
# others hold 1 - c of the squared length of the update: below one half, rounding discards more of
# the update than it keeps.
MIN_CHANGED = 0.5


def record_changed_weights(job: Job[Any], model: PreTrainedModel, base: Path) -> None:
    """Record in job.facts, and print, which share of the trained weights is saved with a new value.

    Facts: saved_step, changed_weights, and unchanged_because if few weights changed: learning_rate
    (0 in all steps until the saved one) or rounding. The first process reads the files of both
    models; the others do nothing.

    Args:
        job: The training job, whose result is saved.
        model: The trained model.
        base: The folder of the model that the training started from.
    """
    if rank() > 0:
        return
    dtype, facts = job.settings.dtype, job.facts
    steps = [json.loads(line) for line in (job.result / "metrics.jsonl").read_text().splitlines()]
    saved_step = facts.setdefault("saved_step", steps[-1]["step"])
    share = changed_share(model, base, job.result, dtype)
    if share is None:
        return
    facts["changed_weights"] = share
    print(f"{share:.1%} of the trained weights differ from those of {base}")
    rates = [
        line.get("learning_rate", line.get("policy/learning_rate", 0))
        for line in steps
        if line["step"] <= saved_step
    ]
    if not any(rates):
        facts["unchanged_because"] = "learning_rate"
        warn(
            f"the saved model is from step {saved_step}, and the learning rate was 0 until then:"
            " train more steps, or set fewer warmup_steps"
        )
    elif share < MIN_CHANGED and job.settings.save_dtype is None and dtype != "fp32":
        facts["unchanged_because"] = "rounding"
        warn(
            f"{share:.1%} of the trained weights have changed in {dtype}, expected at least"
            f" {MIN_CHANGED:.0%}: rounding has discarded most of the training: set save_dtype:"
            " fp32, or train longer or with a larger learning rate"
        )


def changed_share(model: PreTrainedModel, base: Path, saved: Path, dtype: str) -> float | None:
    """Return which share of the trained weights has another value in a saved model.

    Args:
        model: The model in training, which says which weights are trained.
        base: The folder that it was loaded from, in any dtype.
        saved: The folder that it was saved in.
        dtype: The dtype that it was loaded in.

    Returns:
        None if the folders have no trained weight with the same name and shape.
    """
    in_files, sources = weights_in_files(model, saved_weights(model))
    before, after = weight_files(base), weight_files(saved)
    changed = total = 0
    for name, shape in in_files.items():
        source = sources.get(id(shape))
        if source is None or not source.is_trained or name not in before or name not in after:
            continue
        old, new = (_read(files[name], name) for files in (before, after))
        if old.shape == new.shape:
            changed += int((old.to(DTYPES[dtype]).to(new.dtype) != new).sum())
            total += new.numel()
    return changed / total if total else None


def _read(path: Path, name: str) -> Any:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)
