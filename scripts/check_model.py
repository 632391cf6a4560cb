"""Check a model that a command wrote: python scripts/check_model.py KIND NAME OUTPUT INPUT LOGS.

KIND is causal or classifier, NAME the result in messages, OUTPUT the folder of the model, INPUT the
model that it was trained from, LOGS the folder of TensorBoard events. They become metrics.jsonl in
OUTPUT, unless the command has written one.

A program of its own: what it accepts changes no result, so that no command runs again because our
code has changed.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer
from snakechat.modeling.loading import check_loadable
from snakechat.workflow.errors import InputError, one_line_errors

METRICS = "metrics.jsonl"
# Metrics of TRL by the names that pages have for them.
NAMES = {
    "rewards/accuracies": "accuracy",
    "rewards/chosen": "chosen_score",
    "rewards/rejected": "rejected_score",
}


@one_line_errors()
def main() -> None:
    kind, name, *folders = sys.argv[1:]
    output, source, logs = map(Path, folders)
    try:
        check_folder(output, source, kind == "classifier")
        write_metrics(output / METRICS, logs)
    except InputError as error:
        raise InputError(f"{name}: {str(error).replace(str(output), '{output}')}") from None


def check_folder(output: Path, source: Path, is_classifier: bool) -> None:
    """Check that a folder has a model of a kind with the tokenizer of another one.

    Raises:
        InputError: It has not.
    """
    names = {path.name for path in output.iterdir()}
    if "adapter_config.json" in names and "config.json" not in names:
        raise InputError(
            f"{output} has adapters of peft without their base model: save"
            " model.merge_and_unload() instead"
        )
    if "config.json" not in names:
        raise InputError(f"{output} has no config.json: expected what save_pretrained writes")
    if "tokenizer_config.json" not in names:
        raise InputError(f"{output} has no tokenizer: save the one of {{model}} there")
    own, before = load_tokenizer(output), load_tokenizer(source)
    if not is_same_tokenizer(own, before):
        raise InputError(f"{output} has another tokenizer than {{model}}: save that one")
    if before.chat_template not in (None, own.chat_template):
        raise InputError(f"{output} has another chat template than {{model}}: save its tokenizer")
    try:
        check_loadable(output, own, is_classifier)
    # transformers raises exceptions of many classes for invalid folders.
    except Exception as error:
        reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
        raise InputError(reason if str(output) in reason else f"{output}: {reason}") from None


def write_metrics(path: Path, logs: Path) -> None:
    """Check metrics.jsonl of a command; write it from events of TensorBoard if it does not exist.

    Raises:
        InputError: A line is not a JSON object with the number of a step.
    """
    if not path.exists():
        lines = [json.dumps(line) + "\n" for line in event_lines(logs)]
        path.write_text("".join(lines))
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            is_valid = isinstance(line, dict) and isinstance(line.get("step"), int)
        except ValueError:
            is_valid = False
        if not is_valid:
            raise InputError(
                f"{METRICS} of the command, line {number}: expected an object with the integer"
                ' "step" and numbers by name'
            )


def event_lines(logs: Path) -> Iterator[dict[str, float]]:
    """Yield the steps in the events of TensorBoard in a folder, with their scalars by name."""
    # It takes a second.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: dict[int, dict[str, float]] = {}
    for folder in sorted({path.parent for path in logs.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            key = tag.removeprefix("train/")
            key = f"eval_{key.removeprefix('eval/')}" if key.startswith("eval/") else key
            prefix = "eval_" if key.startswith("eval_") else ""
            key = prefix + NAMES.get(key.removeprefix(prefix), key.removeprefix(prefix))
            for event in events.Scalars(tag):
                if math.isfinite(event.value):
                    steps.setdefault(event.step, {})[key] = event.value
    for step in sorted(steps):
        yield {"step": step, **steps[step]}


if __name__ == "__main__":
    main()
