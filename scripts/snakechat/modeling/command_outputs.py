"""Check what a command of a user trained, and get its curves.

A change of this module makes no result stale (WITHOUT_EFFECT in snakechat.workflow.code_digests):
no command runs again because our code has changed.
"""

import json
import math
import operator
import re
from pathlib import Path

from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.workflow.errors import InputError

# Tags of scalars: train/loss and eval/loss of transformers, loss and eval_loss of others.
TAG = re.compile("(?:train/|(eval)[/_])?(.*)")
# Metrics of TRL by the names that pages have for them.
NAMES = {
    "rewards/accuracies": "accuracy",
    "rewards/chosen": "chosen_score",
    "rewards/rejected": "rejected_score",
}


def check_output(output: Path, source: Path, is_classifier: bool) -> None:
    """Raise InputError unless a folder has a model of a kind with the tokenizer of another one."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (output / name).exists():
            raise InputError(
                f"{{output}} has no {name}: save model and tokenizer; of peft's adapters,"
                " model.merge_and_unload()"
            )
    try:
        own, before = load_tokenizer(output), load_tokenizer(source)
        has_template = before.chat_template in (None, own.chat_template)
        is_same = has_template and is_same_tokenizer(own, before)
        if is_same:
            load = load_scorer if is_classifier else load_causal
            load(output, "fp32", own, deferred=True)
    # transformers raises exceptions of many classes for invalid folders.
    except Exception as error:
        reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
        reason = reason.replace(str(output), "{output}")
        raise InputError(reason if "{output}" in reason else f"{{output}}: {reason}") from None
    if not is_same:
        raise InputError(
            "{output} has another tokenizer or chat template than {model}: save its own"
        )


def write_metrics(path: Path, logs: Path) -> None:
    """Write metrics.jsonl of a command from events of TensorBoard if it does not exist.

    Raises InputError if a line is not a JSON object with the number of a step.
    """
    if not path.exists():
        events = read_events(logs)
        lines = [json.dumps({"step": step, **events[step]}) for step in sorted(events)]
        path.write_text("".join(f"{line}\n" for line in lines))
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                operator.index(json.loads(text)["step"])
            except (ValueError, TypeError, LookupError):
                raise InputError(
                    f"{{output}}/metrics.jsonl, line {number}: expected an object with an integer"
                    " step"
                ) from None


def read_events(logs: Path) -> dict[int, dict[str, float]]:
    """Return the scalars in the events of TensorBoard in a folder, by step and name."""
    # It takes a second.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: dict[int, dict[str, float]] = {}
    for folder in sorted({path.parent for path in logs.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            [(prefix, name)] = TAG.findall(tag)[:1]
            key = "_".join(filter(None, [prefix, NAMES.get(name, name)]))
            for event in events.Scalars(tag):
                if math.isfinite(event.value):
                    steps.setdefault(event.step, {})[key] = event.value
    return steps
