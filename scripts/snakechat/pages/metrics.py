"""Metrics and other values on pages: their names, in the language of the program, and their text.

Metrics have their keys in metrics.jsonl (steps of a training) or metrics.json (evaluations).
"""

import json
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from snakechat.evaluation.comparisons import INITIAL_MODELS

# Literal paths, by which code digests find the tables that a program reads.
TABLES = Path(__file__).parent / "tables"
TEXTS: dict[str, dict[str, str]] = yaml.safe_load((TABLES / "texts.yaml").read_text("utf-8"))
# English name, Chinese name and, of metrics, form and better direction, by group and key.
NAMES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (TABLES / "metrics.yaml").read_text("utf-8")
)
# Significant digits of a number, and the most that an interval asks for.
DIGITS, MAX_DIGITS = 3, 8
# The key of the metrics of benchmarks in the metrics of an evaluation.
BENCHMARKS = "benchmarks"
# Metrics of each stage: of its curves, of its evaluation, and its main results.
STAGES: dict[str, dict[str, Any]] = yaml.safe_load((TABLES / "stages.yaml").read_text("utf-8"))
_BY_KEY = {
    key.rpartition("/")[2]: names
    for kind in ("curves", "results")
    for stage in STAGES.values()
    for key, names in NAMES[stage[kind]].items()
}
# Values whose relative distance is less are equal: ZeRO stages, threads and GPUs round differently.
ROUNDING = 1e-4

_language = "en"


def set_language(language: str) -> None:
    """Have translate() and name_of() return texts in a language (en or zh) from now on."""
    global _language
    _language = language


def translate(key: str, /, **values: object) -> str:
    """Return a text of TEXTS in the language of the program, with values in its {placeholders}.

    key: A literal, so that the test finds it.
    """
    return TEXTS[key][_language].format(**values)


def name_of(group: str, key: str) -> str:
    """Return the name of a key of NAMES in the language of the program; others are their names."""
    return str(NAMES[group].get(key, {_language: key})[_language])


def format_number(value: float, signed: bool = False, digits: int = DIGITS) -> str:
    """Format a number with significant digits and a real minus sign; integers keep all digits.

    signed: Give positive numbers a plus sign, as differences have.
    """
    sign = "+" if signed and value else ""
    if isinstance(value, int):
        text = f"{value:{sign},}"
    elif not value or not math.isfinite(value):
        text = f"{value:g}"
    elif 1e-4 <= abs(value) < 1e7:
        # Rounding may add a digit: 0.9996 is 1.00.
        rounded = float(f"{value:.{digits - 1}e}")
        magnitude = math.floor(math.log10(abs(rounded)))
        text = f"{rounded:{sign},.{max(digits - 1 - magnitude, 0)}f}"
    else:
        text = f"{value:{sign}.{digits - 1}e}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if value < 0 else text


def as_text(value: Any) -> str:
    """Return a setting as text: strings as they are, all others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def format_share(value: float, signed: bool = False) -> str:
    """Format a fraction in percent, or a difference (signed) in percentage points."""
    unit = "pp" if signed else "%"
    text = f"{100 * value:{'+' if signed and value else ''}.1f}\N{NO-BREAK SPACE}{unit}"
    return text.replace("-", "\N{MINUS SIGN}")


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss; less than a minute as seconds with one decimal."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


# How the forms in NAMES are written. Its group `units` has further forms. Without a form,
# format_number writes floats, and as_text any other value.
FORMS: dict[str, Callable[[Any], str]] = {
    "share": format_share,
    "duration": format_duration,
    "integer": "{:,.0f}".format,
    "models": lambda models: "; ".join(
        translate("model_size", name=name, **of) for name, of in models.items()
    ),
    "time": lambda text: text[:16].replace("T", " "),
}


def run_value(key: str, value: Any) -> str:
    """Return a value of run.json or of facts as text; None is empty."""
    if value is None:
        return ""
    form = NAMES["run"].get(key, {}).get("form", "")
    if form in NAMES["units"]:
        size = float(NAMES["units"][form]["size"])
        return name_of("units", form).format(format_number(value / size))
    other = format_number if isinstance(value, float) else as_text
    return FORMS.get(form, other)(value)


# --- jobs -----------------------------------------------------------------------------------------


def describe_origin(job: Mapping[str, Any]) -> str:
    """Describe the external source of a job of a lineage, or what generated it; "" of others."""
    settings, files, license = job["settings"], job["files"], job["facts"].get("licence")
    suffix = translate("licence", license=license) if license else ""
    if "hub" in settings:
        # The commit, because a revision may be a branch.
        return f"{settings['hub']} @ {job['facts'].get('commit', settings['revision'])}{suffix}"
    if files["number"]:
        return translate("files", number=files["number"], digest=files["digest"][:16]) + suffix
    if "generate" in settings:
        return translate("generated", generator=settings["generate"], seed=settings["seed"])
    return translate("random_weights", seed=settings["seed"]) if "init" in settings else ""


def rebuild_command(path: str, run: Mapping[str, Any]) -> str:
    """Return the command that builds a result as its run did."""
    return shlex.join(["snakemake", "--cores", "1", path, *run["options"].get("snakemake", ())])


# --- metrics --------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A number of an evaluation.

    Attributes:
        value: The number.
        interval: Its 95 % interval, if it has one.
        n: Of how many seeds it is the mean.
        scale: Of a difference, the size of the values that differ, 0 if it is unknown; otherwise
            None.
    """

    value: float
    interval: Sequence[float] | None = None
    n: int = 1
    scale: float | None = None

    @property
    def direction(self) -> int:
        """1 if a difference is above 0, -1 if below; 0 for mere rounding, or if 0 is possible."""
        if self.scale is None or abs(self.value) <= ROUNDING * self.scale:
            return 0
        low, high = self.interval or (0, 0)
        return (low > 0) - (high < 0)


def label_of(path: str) -> str:
    """Return the label of a metric of an evaluation. path: keys of metrics.json joined by dots."""
    first, _, rest = path.partition(".")
    if first == BENCHMARKS:
        return rest
    label = str(names_of(path)[_language])
    if first == "wins":
        # The name of a model may have dots.
        model, other, _ = (name_of("models", name) for name in rest.rsplit(".", 2))
        return translate("win_rate", model=model, other=other, criterion=label)
    if first == "before":
        return translate("before_training", metric=label)
    if first in INITIAL_MODELS:
        return translate("metric_of", metric=label, model=name_of("models", first))
    return label


def result_paths(stage: str, initials: Collection[str] = ()) -> list[str]:
    """Return the paths of the results of a stage, and of the same of the model before training.

    initials: Of RLHF, the models that trainings have started from.
    """
    starts = [*(f"{initial}." for initial in initials), *STAGES[stage]["starts"]]
    paths = [f"{start}{key}" for key in NAMES[STAGES[stage]["results"]] for start in starts]
    return paths + [f"wins.rlhf.{other}.{key}" for other in initials for key in NAMES["wins"]]


def names_of(path: str) -> dict[str, Any]:
    """Return the entry of a path of metrics.json (with dots) or metrics.jsonl (with slashes)."""
    group = NAMES["wins"] if path.startswith("wins.") else _BY_KEY
    return group.get(path.replace("/", ".").rpartition(".")[2], {})


def is_fraction(path: str) -> bool:
    """Return whether a metric lies between 0 and 1 and is shown in percent."""
    return names_of(path).get("form") == "share"


def read_figures(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Figure]]:
    """Yield (path, figure) of each number of metrics.json; a path is keys joined by dots.

    Intervals are beside the numbers or, by the same keys, at the top.
    """
    intervals = metrics.get("intervals_95", {})
    for key, value in metrics.items():
        path = f"{prefix}{key}"
        if isinstance(value, int | float):
            yield path, Figure(value, intervals.get(key))
        elif isinstance(value, Mapping) and key != "intervals_95":
            if "interval_95" in value:
                scale = 0 if path.endswith("_difference") else None
                yield path, Figure(value["mean"], value["interval_95"], scale=scale)
            inner = {"intervals_95": intervals.get(key, {}), **value}
            yield from read_figures(inner, f"{path}.")


def read_figure(metrics: Mapping[str, Any], path: str) -> Figure | None:
    """Return a number of metrics.json; None if there is none."""
    return dict(read_figures(metrics)).get(path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file."""
    with path.open() as file:
        return [json.loads(line) for line in file]


def read_benchmarks(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return {label of a model: {BENCHMARKS: {name: metrics.json}}} of the inputs of a job."""
    found: dict[str, Any] = {}
    for key, folder in folders.items():
        if key.startswith("benchmark."):
            label, _, name = key.removeprefix("benchmark.").rpartition("/")
            metrics = json.loads((folder / "metrics.json").read_text())
            found.setdefault(label, {BENCHMARKS: {}})[BENCHMARKS][name] = metrics
    return found


def benchmark_paths(metrics: Mapping[str, Any]) -> list[str]:
    """Return the paths of the metrics of benchmarks."""
    return [
        f"{BENCHMARKS}.{name}.{key}"
        for name, of in metrics.get(BENCHMARKS, {}).items()
        for key in of
        if key not in ("intervals_95", "items")
    ]


def numbers_of(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each number in nested dicts and lists, names joined by dots."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict | list):
            yield from numbers_of(value, f"{prefix}{key}.")
        # Equal values have no interval.
        elif value is not None:
            yield f"{prefix}{key}", value
