"""Comparisons of models that were trained without some datasets (`leave_out` of a sweep)."""

from collections.abc import Iterator, Mapping, Sequence

from snakechat.config.ablations import LEAVE_OUT
from snakechat.reporting.comparison import Group, excludes_zero, group_names
from snakechat.reporting.labels import PAIRS, RESPONSES, better_sign, is_fraction
from snakechat.reporting.page_parts import Section, Table, format_metric
from snakechat.reporting.plots import Estimated, Panel, draw_estimates
from snakechat.reporting.translations import Translate

# Metrics that are shown for the held-out rows of each dataset, by stage, with their place in an
# entry of by_dataset in metrics.json.
BY_DATASET = {
    "reward": {"accuracy": PAIRS["accuracy"]},
    "dpo": {"accuracy": PAIRS["accuracy"]},
    "rlhf": {
        "rlhf.judge_score": RESPONSES["judge_score"],
        "rlhf.success": RESPONSES["success"],
    },
}


def is_ablation(groups: Sequence[Group]) -> bool:
    """Return whether groups differ in the datasets that they lack; the first one lacks none."""
    left_out = [run.swept.get(LEAVE_OUT) for group in groups for run in group.runs]
    return left_out[0] == [] and None not in left_out


def dataset_metrics(groups: Sequence[Group], stage: str, translate: Translate) -> dict[str, str]:
    """Return the translated labels of the metrics of single datasets, by path in metrics.json."""
    datasets = groups[0].runs[0].metrics.get("by_dataset", {})
    return {
        f"by_dataset.{dataset}.{key}": translate(
            "{metric}, rows of {dataset}", metric=translate(label), dataset=dataset
        )
        for key, label in BY_DATASET.get(stage, {}).items()
        for dataset in (datasets if len(datasets) > 1 else ())
    }


def common_metrics(groups: Sequence[Group], metrics: Mapping[str, str]) -> dict[str, str]:
    """Return the metrics that all groups share a measure of: not the scores of other reward models.

    metrics: labels by path in metrics.json.
    """
    reward_models = {
        tuple(sorted(job.path for job in run.upstream.get("train_reward", ())))
        for group in groups
        for run in group.runs
    }
    if len(reward_models) == 1:
        return dict(metrics)
    return {path: metrics[path] for path in metrics if path.rpartition(".")[2] != "score"}


def ablation_remarks(
    groups: Sequence[Group], metrics: Mapping[str, str], translate: Translate
) -> Iterator[str]:
    """Yield for each group what its datasets contributed; metrics: as in common_metrics."""
    common = common_metrics(groups, metrics)
    for group in groups[1:]:
        differences = {path: group.difference(groups[0], path) for path in common}
        if not any(differences.values()):
            continue
        datasets = ", ".join(group.runs[0].swept[LEAVE_OUT])
        found = [
            f"{translate(common[path])} {format_metric(path, difference.value, signed=True)}"
            for path, difference in differences.items()
            if difference and excludes_zero(difference)
        ]
        if found:
            yield translate(
                "Without {datasets}, the model differs from that of all data: {metrics}. The 95 %"
                " intervals of these differences exclude 0.",
                datasets=datasets,
                metrics="; ".join(found),
            )
        else:
            yield translate(
                "Without {datasets}, the model does not differ measurably from that of all data:"
                " all 95 % intervals of the differences contain 0.",
                datasets=datasets,
            )
    if len(common) < len(metrics):
        yield translate(
            "Each model has a reward model of its own, which was trained without the same datasets."
            " Scores of different reward models cannot be compared: score and win rates by score"
            " have no differences."
        )
        if not groups[0].values("rlhf.judge_score"):
            yield translate(
                "The setting judge of the recipe scores all models by one reward model, which stays"
                " the same."
            )


def contribution_section(
    groups: Sequence[Group],
    metrics: Mapping[str, str],
    tables: Sequence[Table],
    translate: Translate,
) -> Section:
    """Return the section of the differences from the model of all data: figures and tables.

    metrics: labels by path in metrics.json. Those with a better direction have a figure.
    """
    (first, *names), panels = group_names(groups, translate), []
    for path, label in common_metrics(groups, metrics).items():
        differences = [group.difference(groups[0], path) for group in groups[1:]]
        if better_sign(path) and any(differences):
            title = translate(label)
            # With a row of the model of all data, colours are those of the other figures.
            estimates: dict[str, Estimated | None] = {first: (0.0, None)}
            for name, difference in zip(names, differences, strict=True):
                estimates[name] = difference and (difference.value, difference.interval)
            panels.append(Panel(title, draw_estimates(title, estimates, 0, is_fraction(path))))
    caption = translate(
        "The difference from the model of all data, with its 95 % interval. The dashed line is no"
        " difference."
    )
    title = translate("What the datasets contribute")
    return Section(title, panels=panels, caption=caption, shown_tables=tables)


def ablation_subtitle(translate: Translate) -> str:
    """Return how the models of the page were trained and evaluated."""
    return translate(
        "The dataset is removed from the recipe and from all recipes upstream of it. All models are"
        " evaluated on the held-out rows of all datasets."
    )


def ablation_notes(stage: str, translate: Translate) -> Iterator[str]:
    """Yield what the differences contain, and what their intervals do not."""
    yield translate(
        "A model without a dataset trains for as many epochs on fewer rows, and so for fewer steps:"
        " a difference also contains the effect of less data."
    )
    if stage != "sft":
        yield translate(
            "Seeds are those of the last training: the models before it were trained once for each"
            " column, so that the intervals do not contain the randomness of their training."
        )
