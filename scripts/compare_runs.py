"""Draw a page, complete in one file, that compares recipes of a stage: settings, results, curves.

Recipes that are alike but for their seed are one row: mean and interval over the seeds.
"""

import json
import math
import statistics

from markupsafe import Markup

from snakechat.reporting.pages import write_page
from snakechat.reporting.plots import CURVES, draw_curves, points_of
from snakechat.reporting.translations import as_number, teller
from snakechat.workflow.job import run
from snakechat.workflow.lineage import ancestors

# Results of a stage: where they stand in metrics.json, and what they are called.
PAIRS = {
    "accuracy": "accuracy (share)",
    "ties": "ties (share)",
    "loss": "loss (nats per pair)",
    "calibration_error": "expected calibration error",
}
RESULTS = {
    "sft": {
        "after.perplexity": "perplexity",
        "after.response_perplexity": "perplexity of responses",
    },
    "reward": PAIRS,
    "dpo": PAIRS,
    "rlhf": {
        "rlhf.score": "score",
        "rlhf.judge_score": "score of the judge",
        "rlhf.success": "exactly right (share)",
        "rlhf.greedy_success": "exactly right, greedy (share)",
        "wins.rlhf.sft.score": "wins over SFT by score",
        "wins.rlhf.sft.judge_score": "wins over SFT by the judge",
        "rlhf.kl_to_sft": "KL to SFT (nats per response)",
        "rlhf.length": "response length (tokens)",
        "rlhf.ended_by_eos": "ended by eos (share)",
    },
}
# Student's t that 2.5 % of cases pass, by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

BODY = """{% for heading, rows in tables.items() %}
<table>
<caption>{{ heading }}</caption>
{% for row in rows %}
<tr><th>{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{{ picture }}
<p><small>{{ note }}</small></p>
"""


def main(job):
    """The page."""
    say = teller(job.settings.language)
    stage = job.spec["name"].partition("/")[0]
    groups = grouped([Run(job, name) for name in job.settings.recipes])
    picture = job.result / "curves.svg"
    panels = {
        say(label): {group.label: group.points(key) for group in groups}
        for key, label in CURVES[stage].items()
    }
    draw_curves(picture, panels, say("step"), as_text=True)
    _, tag, svg = picture.read_text().partition("<svg")
    write_page(
        job.result / "comparison.html",
        BODY,
        job.settings.language,
        f"{stage}: {job.spec['name'].partition('/')[2]}",
        sentences=[],
        tables={
            say("Settings that differ"): differences(groups, say),
            say("Results"): results(groups, RESULTS[stage], say),
        },
        picture=Markup(tag + svg),
        note=say(NOTE),
    )
    picture.unlink()


NOTE = (
    "Of one run: the figure and, where held-out prompts were drawn anew, its 95 % interval over"
    " prompts. Of several seeds: their mean, and Student's 95 % interval over seeds; curves show"
    " the mean, and the range of the seeds. Settings of jobs before the training have the job's"
    " name in front."
)


class Run:
    """A training and its evaluation: settings (its own, and of what it was made from), steps,
    figures.
    """

    def __init__(self, job, name):
        self.name, folder = name, job.inputs[f"training.{name}"]
        path = str(folder)
        settings = dict(job.lineage[path]["settings"])
        self.seed = settings.pop("seed")
        self.settings = settings
        before = [job.lineage[one] for one in sorted(ancestors(job.lineage, path))]
        rules = [made["rule"] for made in before]
        for made in before:
            # What these were told, trainings were told too.
            if made["rule"].startswith("tokenize"):
                continue
            place = made["rule"]
            if rules.count(place) > 1:
                place += f" {made['name']}"
            self.settings |= {f"{place}: {key}": value for key, value in made["settings"].items()}
            if made["files"]["number"]:
                self.settings[f"{place}: files"] = made["files"]["digest"][:12]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.steps = [json.loads(line) for line in lines]
        figures = job.inputs[f"evaluation.{name}"] / "metrics.json"
        self.figures = json.loads(figures.read_text())

    def result(self, path):
        """A figure (path: keys joined by dots) and its interval, where it has one; or None."""
        found, keys = self.figures, path.split(".")
        for key in keys:
            if key not in found:
                return None
            found = found[key]
        if isinstance(found, dict):
            return found["mean"], found["interval_95"]
        model, name = keys[0], keys[-1]
        return found, self.figures.get("intervals_95", {}).get(model, {}).get(name)


class Group:
    """Runs that are alike but for their seed."""

    def __init__(self, runs):
        self.runs, self.settings = runs, runs[0].settings
        others = len(runs) - 1
        self.label = runs[0].name + (f" + {others}" if others else "")

    def points(self, key):
        """(step, mean, lowest, highest) of a figure, of the steps that all runs have."""
        curves = [dict(points_of(run.steps, key)) for run in self.runs]
        steps = sorted(set(curves[0]).intersection(*curves[1:]))
        values = [[curve[step] for curve in curves] for step in steps]
        return [
            (step, statistics.fmean(found), min(found), max(found))
            for step, found in zip(steps, values, strict=True)
        ]

    def result(self, path):
        """A figure and its interval, over seeds where there are several; None if no run has it."""
        found = [run.result(path) for run in self.runs]
        if None in found:
            return None
        return found[0] if len(found) == 1 else over_seeds([value for value, _ in found])


def grouped(runs):
    """Groups of runs, in the order of their first ones."""
    groups = {}
    for one in runs:
        groups.setdefault(json.dumps(one.settings, sort_keys=True), []).append(one)
    return [Group(members) for members in groups.values()]


def over_seeds(values):
    """Mean and Student's 95 % interval of it."""
    count, mean = len(values), statistics.fmean(values)
    student = STUDENT[min(count - 2, len(STUDENT) - 1)]
    half = student * statistics.stdev(values) / math.sqrt(count)
    return mean, [mean - half, mean + half]


def differences(groups, say):
    """The table of settings that are not the same in all groups, and the seeds."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    told = [
        key
        for key in keys
        if len({json.dumps(group.settings.get(key), sort_keys=True) for group in groups}) > 1
    ]
    rows = [
        [
            key,
            *(json.dumps(group.settings[key]) if key in group.settings else "" for group in groups),
        ]
        for key in told
    ]
    seeds = [", ".join(str(run.seed) for run in group.runs) for group in groups]
    return [["", *(group.label for group in groups)], *rows, [say("seed"), *seeds]]


def results(groups, names, say):
    """The table of results that any group has."""
    rows = []
    for path, label in names.items():
        found = [group.result(path) for group in groups]
        if any(found):
            rows.append(
                [say(label), *("" if each is None else with_interval(*each) for each in found)]
            )
    return [["", *(group.label for group in groups)], *rows]


def with_interval(value, interval):
    """A figure with its interval, where it has one."""
    if interval is None:
        return as_number(value)
    low, high = map(as_number, interval)
    return f"{as_number(value)} ({low} … {high})"


if __name__ == "__main__":
    run(main)
