"""Draw a page, complete in one file, that compares the ZeRO stages of compare_zero."""

import json

from markupsafe import Markup

from snakechat.planning.flops import sent_elements
from snakechat.reporting.pages import write_page
from snakechat.reporting.plots import draw_curves, points_of
from snakechat.reporting.translations import as_number, teller
from snakechat.training.zero_stages import stage_used
from snakechat.workflow.job import run

# The loss that is compared, of those that there are: where there is a critic RLHF's is its own, as
# the actor's is near 0 by construction.
LOSSES = ("loss", "value/loss", "policy/loss")
# Other figures of steps that are drawn where they are logged, and what they are called.
DRAWN = {"grad_norm": "gradient norm", "objective/scores": "score"}

BODY = """<table>
<tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{{ picture }}
{% for note in notes %}
<p><small>{{ note }}</small></p>
{% endfor %}
"""


def main(job):
    """The page."""
    say = teller(job.settings.language)
    comparison = Comparison(job)
    curves = {comparison.loss: say("loss"), **{key: say(label) for key, label in DRAWN.items()}}
    panels = {
        label: {f"ZeRO {stage}": points_of(steps, key) for stage, steps in comparison.steps.items()}
        for key, label in curves.items()
        if key in comparison.steps[comparison.base][-1]
    }
    picture = job.result / "curves.svg"
    draw_curves(picture, panels, say("step"), as_text=True)
    _, tag, svg = picture.read_text().partition("<svg")
    write_page(
        job.result / "zero.html",
        BODY,
        job.settings.language,
        f"{say('ZeRO stages')}: {comparison.title}",
        sentences(comparison, say),
        head=[say(name) for name in HEAD],
        rows=[row(comparison, stage, say) for stage in comparison.runs],
        picture=Markup(tag + svg),
        notes=notes(comparison, say),
    )
    picture.unlink()


class Comparison:
    """The runs of a recipe by ZeRO stage: run.json of each, and the steps of those that went well.

    base: the stage that others are compared with, the lowest of these.
    """

    def __init__(self, job):
        folder = job.inputs["runs"]
        training = job.lineage[str(folder)]["settings"]["training"]
        record = json.loads(folder.with_name(f"{folder.name}.run.json").read_text())
        self.title = f"{training['rule'].removeprefix('train_')}/{training['name']}"
        self.dtype = training["settings"]["dtype"]
        self.placement = record["placement"]
        self.processes = self.placement["nodes"] * max(self.placement["gpus_per_node"], 1)
        self.runs = {int(stage): run for stage, run in record["stages"].items()}
        self.steps = {
            stage: read_steps(folder / f"stage-{stage}.jsonl")
            for stage, run in self.runs.items()
            if "failed" not in run
        }
        self.base = min(self.steps)
        self.loss = next(name for name in LOSSES if name in self.steps[self.base][0])

    def used(self, stage):
        """The stage that a run of a stage had."""
        return stage_used(stage, self.dtype)

    def losses(self, stage):
        """(step, loss) of each step of a stage."""
        return points_of(self.steps[stage], self.loss)

    def largest_difference(self, stage, key):
        """The largest difference of a figure from the base's, over the steps; None: unknown."""
        base = dict(points_of(self.steps[self.base], key))
        ours = points_of(self.steps[stage], key)
        return max((abs(value - base[step]) for step, value in ours if step in base), default=None)

    def sent(self, stage):
        """Elements that each process sends for a step of one pass."""
        models = self.runs[self.base]["models"].values()
        return sum(sent_elements(model, self.used(stage), self.processes) for model in models)


def read_steps(path):
    """The lines of metrics.jsonl that tell of steps, without what was found before them."""
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if line["step"]]


HEAD = (
    "ZeRO stage",
    "loss of the first step",
    "loss of the last step",
    "largest difference of losses",
    "largest difference of gradient norms",
    "seconds a step, median",
    "peak memory of the first process (MB)",
    "peak memory of its GPU (MB)",
    "elements sent a step",
)


def row(comparison, stage, say):
    """The row of a stage in the table."""
    record = comparison.runs[stage]
    if "failed" in record:
        return [stage, say(record["failed"]), *[""] * (len(HEAD) - 2)]
    losses = comparison.losses(stage)
    cells = [
        losses[0][1],
        losses[-1][1],
        comparison.largest_difference(stage, comparison.loss),
        comparison.largest_difference(stage, "grad_norm"),
        record["seconds_per_step"],
        record["peak_memory_mb"],
        record.get("peak_gpu_memory_mb"),
        comparison.sent(stage),
    ]
    return [stage, *("" if cell is None else as_number(cell) for cell in cells)]


def sentences(comparison, say):
    """What changed from stage to stage, by the figures."""
    differences = {
        stage: comparison.largest_difference(stage, comparison.loss) for stage in comparison.steps
    }
    worst = max(differences, key=differences.get)
    if differences[worst]:
        told = say("Losses differ from those of stage {base} by at most {value} (stage {stage}).")
        value = as_number(differences[worst])
        yield told.format(base=comparison.base, value=value, stage=worst)
    else:
        yield say("Losses are the same at all stages, to the last bit.")
    told = say("A step took from {low} s (stage {first}) to {high} s (stage {last}).")
    yield extremes(comparison, "seconds_per_step", told)
    on_gpu = comparison.placement["gpus_per_node"] > 0
    key = "peak_gpu_memory_mb" if on_gpu else "peak_memory_mb"
    told = say("Peak memory was from {low} MB (stage {first}) to {high} MB (stage {last}).")
    yield extremes(comparison, key, told)


def extremes(comparison, key, told):
    """A sentence about the stages where a figure of the run is smallest and largest."""
    values = {stage: comparison.runs[stage][key] for stage in comparison.steps}
    first, last = min(values, key=values.get), max(values, key=values.get)
    low, high = as_number(values[first]), as_number(values[last])
    return told.format(low=low, first=first, high=high, last=last)


def notes(comparison, say):
    """What has to be known to read the table."""
    where = comparison.placement
    told = say("Nodes: {nodes}, GPUs in each: {gpus}, processes: {processes}, dtype: {dtype}.")
    yield told.format(
        nodes=where["nodes"],
        gpus=where["gpus_per_node"],
        processes=comparison.processes,
        dtype=comparison.dtype,
    )
    for stage in (0, 1):
        if comparison.used(stage) != stage:
            told = say("With {dtype}, stage {stage} runs as stage 2.")
            yield told.format(dtype=comparison.dtype, stage=stage)
    if comparison.processes == 1:
        yield say("One process has nobody to share with: it cuts nothing up, and sends nothing.")
    if where["offload"] != "none":
        yield say("Offload: of the optimizer from stage 1 on, of parameters at stage 3 alone.")
    yield say(SOURCE)


SOURCE = (
    "Elements sent: by each process, in a step of one pass, by formula (Rajbhandari et al. 2020,"
    " ZeRO, section 7): twice the trained weights, and at stage 3 the trained ones once and all"
    " weights twice."
)


if __name__ == "__main__":
    run(main)
