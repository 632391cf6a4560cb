"""The results chapter of a report: what was run, and the metrics on held-out rows and prompts."""

from collections.abc import Iterator, Mapping
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.formatting import format_share, format_significant
from snakechat.reporting.interpretation import pair_remarks
from snakechat.reporting.intervals import proportion_interval
from snakechat.reporting.labels import MODELS, PAIRS, PERPLEXITIES, RESPONSES, WIN_CRITERIA
from snakechat.reporting.page_parts import (
    Card,
    Section,
    Table,
    difference_cell,
    format_interval,
    format_metric,
    mark_best,
    metric_cell,
)
from snakechat.reporting.plots import Estimated, Panel, draw_estimates, draw_trade_off
from snakechat.reporting.translations import Translate

Metrics = dict[str, Any]
# Metrics of responses that have a figure.
PLOTTED = (
    *("score", "judge_score", "success", "kl_to_sft", "kl_to_dpo", "kl_to_base"),
    *("length", "ended_by_eos"),
)


def headline(stage: str, metrics: Metrics, translate: Translate) -> list[Card]:
    """Return the main results of a recipe in large print."""
    return list(HEADLINES[stage](metrics, translate))


def sft_headline(metrics: Metrics, translate: Translate) -> Iterator[Card]:
    """Yield the perplexity of responses: of all rows, and of each dataset if there are several."""
    key = "response_perplexity"
    of_datasets = {"": metrics, **metrics.get("by_dataset", {})}
    for dataset, of in of_datasets.items():
        label = translate(PERPLEXITIES[key])
        if dataset:
            label = translate("{metric} on {dataset}", metric=label, dataset=dataset)
        note = translate(
            "before training: {value}; {rows} held-out rows",
            value=format_significant(of["before"][key]),
            rows=format_significant(of["rows"]),
        )
        interval = format_interval(key, of["intervals_95"]["after"].get(key))
        note = ", ".join(filter(None, (interval, note)))
        yield Card(label, format_significant(of["after"][key]), note)


def pair_headline(metrics: Metrics, translate: Translate) -> Iterator[Card]:
    """Yield the accuracy of a reward model or a DPO model."""
    pairs, accuracy = metrics["pairs"], metrics["accuracy"]
    held_out = translate("{count} held-out pairs", count=format_significant(pairs))
    interval = format_interval("accuracy", proportion_interval(accuracy, pairs))
    yield Card(translate(PAIRS["accuracy"]), format_share(accuracy), f"{interval}, {held_out}")
    keys = ("longer_wins_accuracy", "calibration_error", "loss")
    for key in keys:
        yield Card(translate(PAIRS[key]), format_metric(key, metrics[key]))


def rlhf_headline(metrics: Metrics, translate: Translate) -> Iterator[Card]:
    """Yield win rates of RLHF, differences from the model that it started from, and n."""
    initial = initial_model(metrics)
    name = translate(MODELS[initial])
    for key, criterion in reversed(WIN_CRITERIA.items()):
        if won := metrics["wins"]["rlhf"][initial].get(key):
            label = translate(
                "win rate of RLHF against {initial}, {criterion}",
                initial=name,
                criterion=translate(criterion),
            )
            yield Card(
                label, format_share(won["mean"]), format_interval("wins.", won["interval_95"])
            )
    for key in ("success", "score"):
        if difference := metrics.get(f"{key}_difference"):
            change = format_metric(key, difference["mean"], signed=True)
            interval = format_interval(key, difference["interval_95"], signed=True)
            values = translate(
                "{before} with {initial}, {after} with RLHF",
                before=format_metric(key, metrics[initial][key]),
                initial=name,
                after=format_metric(key, metrics["rlhf"][key]),
            )
            label = translate(
                "change from {initial} to RLHF: {metric}",
                initial=name,
                metric=translate(RESPONSES[key]),
            )
            yield Card(label, change, f"{interval}; {values}")
    kl = f"kl_to_{initial}"
    yield Card(
        translate(RESPONSES[kl]),
        format_significant(metrics["rlhf"][kl]),
        format_interval(kl, metrics["intervals_95"]["rlhf"][kl]),
    )
    yield Card(
        translate("held-out prompts"),
        format_significant(metrics["num_prompts"]),
        translate(
            "{count} responses of each model to each prompt",
            count=format_significant(metrics["num_generations"]),
        ),
    )


HEADLINES = {
    "sft": sft_headline,
    "reward": pair_headline,
    "dpo": pair_headline,
    "rlhf": rlhf_headline,
}


def result_sections(stage: str, metrics: Metrics, translate: Translate) -> list[Section]:
    """Return the sections of the results of a stage, from its metrics.json."""
    if stage == "sft":
        return [sft_section(metrics, translate)]
    if stage == "rlhf":
        return [win_section(metrics, translate), response_section(metrics, translate)]
    return [pair_section(stage, metrics, translate)]


def sft_section(metrics: Metrics, translate: Translate) -> Section:
    """Return the section of the perplexities on held-out rows."""
    caption = translate("{count} held-out rows", count=format_significant(metrics["rows"]))
    moments = {"before": translate("before training"), "after": translate("after training")}
    rows = []
    for key, label in PERPLEXITIES.items():
        for dataset, of in {"": metrics, **metrics.get("by_dataset", {})}.items():
            name = translate(label)
            if dataset:
                name = translate("{metric} on {dataset}", metric=name, dataset=dataset)
            cells = (
                metric_cell(key, of[when][key], of["intervals_95"][when].get(key))
                for when in moments
            )
            rows.append([name, *cells])
    note = translate("In brackets: 95 % intervals over rows.")
    table = Table(caption, ["", *moments.values()], rows, note)
    return Section(translate("SFT model"), shown_tables=[table])


def pair_section(stage: str, metrics: Metrics, translate: Translate) -> Section:
    """Return the section of a reward model or a DPO model on held-out pairs."""
    pairs = metrics["pairs"]
    rows = [
        [translate(PAIRS[key]), pair_cell(key, metrics[key], pairs)]
        for key in PAIRS
        if key in metrics
    ]
    accuracies: dict[str, Estimated | None] = {
        translate("all pairs"): with_interval(metrics["accuracy"], pairs),
        translate("choosing the longer response"): with_interval(
            metrics["longer_wins_accuracy"], pairs
        ),
    }
    for dataset, of in metrics.get("by_dataset", {}).items():
        label = translate("accuracy on {dataset}", dataset=dataset)
        rows.append([label, pair_cell("accuracy", of["accuracy"], of["pairs"])])
        accuracies[dataset] = with_interval(of["accuracy"], of["pairs"])
    title = {"dpo": translate("DPO model"), "reward": translate("Reward model")}[stage]
    label = translate("accuracy on held-out pairs")
    svg = draw_estimates(label, accuracies, reference=0.5, percent=True)
    caption = translate(
        "Bars are 95 % intervals (Wilson) for {count} pairs. The dashed line is the accuracy of"
        " guessing.",
        count=format_significant(pairs),
    )
    held_out = translate("{count} held-out pairs", count=format_significant(pairs))
    return Section(
        title,
        remarks=list(pair_remarks(metrics, translate)),
        panels=[Panel(label, svg, caption)],
        tables=[Table(held_out, [], rows)],
    )


def with_interval(fraction: float, count: int) -> Estimated:
    """Return a fraction of independent pairs with its interval."""
    return fraction, proportion_interval(fraction, count)


def pair_cell(key: str, value: float, pairs: int) -> Any:
    """Return the cell of a metric of pairs; fractions of pairs have an interval."""
    is_proportion = key in ("accuracy", "longer_wins_accuracy", "ties", "within_noise")
    return metric_cell(key, value, proportion_interval(value, pairs) if is_proportion else None)


def ordered_models(metrics: Metrics) -> list[str]:
    """Return the evaluated models: those of the recipe in the order of training, then others."""
    evaluated = metrics["intervals_95"]
    others = [model for model in evaluated if model not in MODELS]
    return [model for model in MODELS if model in evaluated] + others


def model_label(model: str, translate: Translate) -> str:
    """Return the name of a model on pages."""
    return translate(MODELS[model]) if model in MODELS else model


def win_section(metrics: Metrics, translate: Translate) -> Section:
    """Return the section of win rates, also by length, and of the differences between models."""
    initial = initial_model(metrics)
    name = model_label(initial, translate)
    panels = []
    for key, criterion in WIN_CRITERIA.items():
        if key not in metrics["wins"]["rlhf"][initial]:
            continue
        title = translate(
            "win rate against {initial}, {criterion}", initial=name, criterion=translate(criterion)
        )
        points = win_rates_by_length(metrics, key, translate)
        xlabel, ylabel = translate("mean response length (tokens)"), translate("win rate")
        panels.append(Panel(title, draw_trade_off(title, points, xlabel, ylabel)))
    panels += difference_panels(metrics, translate)
    caption = translate(
        "Bars are 95 % intervals over {count} prompts (percentile bootstrap, Efron 1979). The"
        " dashed line is a tie, or no difference. A model that wins by writing longer responses"
        " is on the right.",
        count=format_significant(metrics["num_prompts"]),
    )
    return Section(
        translate("Against {initial}", initial=name),
        panels=panels,
        legend=[model_label(model, translate) for model in ordered_models(metrics)],
        kind="points",
        caption=caption,
        shown_tables=[difference_table(metrics, translate)],
        tables=[win_table(metrics, translate)],
    )


def win_rates_by_length(
    metrics: Metrics, key: str, translate: Translate
) -> dict[str, tuple[Estimated, Estimated] | None]:
    """Return the mean length of the responses of each model, and its win rate by a criterion."""
    initial = initial_model(metrics)
    points: dict[str, tuple[Estimated, Estimated] | None] = {}
    for model in ordered_models(metrics):
        length = metrics[model]["length"], metrics["intervals_95"][model]["length"]
        won = metrics["wins"].get(model, {}).get(initial, {}).get(key)
        label = model_label(model, translate)
        if won:
            points[label] = length, (won["mean"], won["interval_95"])
        else:
            # The initial model ties with itself.
            points[label] = (length, (0.5, None)) if model == initial else None
    return points


def differences(metrics: Metrics) -> dict[str, dict[str, Any]]:
    """Return {metric: {model: difference from the initial model}} of the models that have one."""
    found: dict[str, dict[str, Any]] = {}
    for key in RESPONSES:
        for model in ordered_models(metrics):
            prefix = "" if model == "rlhf" else f"{model}_"
            if difference := metrics.get(f"{prefix}{key}_difference"):
                found.setdefault(key, {})[model] = difference
    return found


def difference_panels(metrics: Metrics, translate: Translate) -> Iterator[Panel]:
    """Yield a panel of the differences from the initial model for each metric that has some."""
    name = model_label(initial_model(metrics), translate)
    for key, of_models in differences(metrics).items():
        title = translate(
            "difference from {initial}: {metric}", initial=name, metric=translate(RESPONSES[key])
        )
        estimates: dict[str, Estimated | None] = {}
        for model in ordered_models(metrics):
            found = of_models.get(model)
            label = model_label(model, translate)
            estimates[label] = (found["mean"], found["interval_95"]) if found else None
        yield Panel(title, draw_estimates(title, estimates, 0.0, is_percent(key)))


def is_percent(key: str) -> bool:
    """Return whether a metric is shown in percent."""
    return format_metric(key, 0.5).endswith("%")


def difference_table(metrics: Metrics, translate: Translate) -> Table:
    """Return the table of the differences of all models from the initial one."""
    initial = initial_model(metrics)
    models = [model for model in ordered_models(metrics) if model != initial]
    rows = []
    for key, of_models in differences(metrics).items():
        cells = [
            difference_cell(key, found["mean"], found["interval_95"]) if found else None
            for found in map(of_models.get, models)
        ]
        rows.append([translate(RESPONSES[key]), *cells])
    name = model_label(initial, translate)
    return Table(
        translate("Differences from {name}", name=name),
        ["", *(f"{model_label(model, translate)} \N{MINUS SIGN} {name}" for model in models)],
        rows,
        translate(
            "Over the same prompts, with 95 % intervals; pp: percentage points. ▲ and ▼ mark"
            " intervals that exclude 0, for the better and for the worse."
        ),
    )


def win_table(metrics: Metrics, translate: Translate) -> Table:
    """Return the table of win rates, and of win rates by which response is the longer one."""
    keys = ("longer", "when_longer", "when_not_longer")
    rows = []
    for model in ordered_models(metrics):
        for other, won in metrics["wins"].get(model, {}).items():
            for key, criterion in WIN_CRITERIA.items():
                if key in won:
                    label = translate(
                        "{model} against {other}, {criterion}",
                        model=model_label(model, translate),
                        other=model_label(other, translate),
                        criterion=translate(criterion),
                    )
                    shares = (metric_cell("wins.", won[key].get(name)) for name in keys)
                    mean = metric_cell("wins.", won[key]["mean"], won[key]["interval_95"])
                    rows.append([label, mean, *shares])
    head = [
        "",
        translate("win rate (a tie is half a win)"),
        translate("longer response"),
        translate("win rate if longer"),
        translate("win rate if not longer"),
    ]
    return Table(translate("Win rates and response lengths"), head, rows)


def response_section(metrics: Metrics, translate: Translate) -> Section:
    """Return the section of the metrics of responses to held-out prompts."""
    models = ordered_models(metrics)
    panels = []
    for key in PLOTTED:
        if key in metrics["rlhf"]:
            title = translate(RESPONSES[key])
            estimates: dict[str, Estimated | None] = {
                model_label(model, translate): (
                    metrics[model][key],
                    metrics["intervals_95"][model][key],
                )
                for model in models
            }
            panels.append(Panel(title, draw_estimates(title, estimates, None, is_percent(key))))
    title = translate(
        "Responses to {prompts} held-out prompts, {count} of each model to each prompt",
        prompts=format_significant(metrics["num_prompts"]),
        count=format_significant(metrics["num_generations"]),
    )
    return Section(
        title,
        panels=panels,
        tables=[response_table(metrics, title, translate)],
    )


def response_table(metrics: Metrics, title: str, translate: Translate) -> Table:
    """Return the table of metrics of responses to held-out prompts, with a column per model."""
    models = ordered_models(metrics)
    rows = []
    for key, label in RESPONSES.items():
        if key in metrics["rlhf"]:
            values = [metrics[model][key] for model in models]
            cells = [
                metric_cell(key, value, metrics["intervals_95"][model][key])
                for value, model in zip(values, models, strict=True)
            ]
            rows.append([translate(label), *mark_best(key, cells, values)])
    by_dataset: Mapping[str, Any] = metrics.get("by_dataset", {})
    if len(by_dataset) > 1 and "score" in metrics["rlhf"]:
        for dataset, means in by_dataset.items():
            label = translate(
                "score on {count} prompts of {dataset}",
                count=format_significant(means["num_prompts"]),
                dataset=dataset,
            )
            rows.append([label, *(metric_cell("score", means[model]["score"]) for model in models)])
    note = translate("★ marks the best value of a row, where one direction is better.")
    return Table(title, ["", *(model_label(model, translate) for model in models)], rows, note)
