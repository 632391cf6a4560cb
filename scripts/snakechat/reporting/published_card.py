"""The model card that is uploaded: the one of the build, with its evaluation and no local paths."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, ModelCard

from snakechat.config.expectations import INITIAL
from snakechat.data.hub_upload import is_hub_license
from snakechat.reporting.figures import Figure
from snakechat.reporting.gates import insert_section
from snakechat.reporting.labels import PAIRS, PERPLEXITIES, RESPONSES, WIN_RATES
from snakechat.reporting.verdicts import figure_of
from snakechat.workflow.errors import InputError
from snakechat.workflow.lineage import Lineage

HEADING = "## Evaluation\n"
TASKS = {"reward": "text-classification"}
# A path from the root of a file system, up to its last component. Addresses are none: a colon or a
# slash is before their slashes.
ABSOLUTE = re.compile(r"(?<![\w:/.~])/(?:[^\s/'\"`,{}|=]+/)+")


class Result(NamedTuple):
    """A figure of an evaluation.

    Attributes:
        kind: Short name of the metric.
        label: Its name for people, in English.
        figure: Its value and interval.
    """

    kind: str
    label: str
    figure: Figure


def evaluation_results(stage: str, metrics: Mapping[str, Any]) -> list[Result]:
    """Return the figures of a model of a stage, given the metrics.json of its evaluation."""
    return [
        Result(kind, label, figure)
        for path, kind, label in _metrics_of(stage)
        if (figure := figure_of(stage, metrics, path)) and math.isfinite(figure.value)
    ]


def _metrics_of(stage: str) -> Iterator[tuple[str, str, str]]:
    """Yield path in metrics.json, kind and label of each metric that a card has."""
    if stage == "sft":
        yield from ((f"after.{key}", key, label) for key, label in PERPLEXITIES.items())
    elif stage != "rlhf":
        yield from ((key, key, label) for key, label in PAIRS.items())
    else:
        yield from ((f"rlhf.{key}", key, label) for key, label in RESPONSES.items())
        for initial in INITIAL:
            for key, label in WIN_RATES[initial].items():
                yield f"wins.rlhf.{initial}.{key}", "win_rate", label


def evaluated_datasets(lineage: Lineage, settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the datasets of an evaluation: name in the config and repository, or name, of each.

    settings: Those of the evaluation and of the training; the first that names datasets counts.
    """
    entries = next(filter(None, (of.get("datasets") for of in settings)), ())
    names = [entry if isinstance(entry, str) else entry[0] for entry in entries]
    imports = {name: lineage.get(f"output/data/{name}", {"settings": {}}) for name in names}
    return {name: imports[name]["settings"].get("hub", name) for name in names}


def published_card(
    card: str,
    repository: str,
    path: str,
    results: Sequence[Result],
    datasets: Mapping[str, str],
    license: str | None,
) -> str:
    """Return the card of a model in a repository.

    Args:
        card: The card of the build, which a person may have edited.
        repository: OWNER/NAME.
        path: The path of the model: output/STAGE/NAME.
        results: The figures of its evaluation.
        datasets: The datasets whose held-out rows it was evaluated on.
        license: The licence, if the card names none.

    Raises:
        InputError: The metadata of the card is not valid YAML.
    """
    text = card.replace(f'from_pretrained("{path}")', f'from_pretrained("{repository}")')
    lines = [_line(result) for result in results]
    rows = f"On held-out rows of {', '.join(datasets)}.\n\n"
    table = "| metric | value | 95 % interval |\n|---|---|---|\n"
    section = rows + table + "".join(lines) if lines else ""
    text = insert_section(without_paths(text), HEADING, section)
    try:
        published = ModelCard(text, ignore_metadata_errors=False)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}/README.md: its metadata cannot be read: {reason}") from None
    data: Any = published.data
    stage = path.split("/")[1]
    data.license = data.license or license
    if data.license and not is_hub_license(data.license):
        data.license, data.license_name = "other", data.license
    data.pipeline_tag = TASKS.get(stage, "text-generation")
    if results:
        data.model_name = repository.rpartition("/")[2]
        data.eval_results = [
            EvalResult(
                task_type=data.pipeline_tag,
                dataset_type=next(iter(datasets.values())) if len(datasets) == 1 else "mixed",
                dataset_name=f"held-out rows of {', '.join(datasets)}",
                metric_type=result.kind,
                metric_name=result.label,
                metric_value=float(f"{result.figure.value:.6g}"),
            )
            for result in results
        ]
    return str(published)


def _line(result: Result) -> str:
    """Return the row of a result in the table of a card."""
    interval = result.figure.interval
    bounds = "" if interval is None else " to ".join(f"{bound:.4g}" for bound in interval)
    return f"| {result.label} | {result.figure.value:.4g} | {bounds} |\n"


def without_paths(text: str) -> str:
    """Return a text in which absolute paths are names of files, or relative to this folder."""
    for folder in private_folders():
        text = text.replace(folder, "")
    return ABSOLUTE.sub("", text)


def private_folders() -> list[str]:
    """Return the working directory and the home directory as they may appear in files."""
    found = {
        path
        for folder in (Path.cwd(), Path.home())
        for path in (folder, folder.resolve())
        if len(path.parts) > 1
    }
    # The longest first: one may be inside of another.
    return [f"{path}/" for path in sorted(found, key=lambda path: -len(str(path)))]
