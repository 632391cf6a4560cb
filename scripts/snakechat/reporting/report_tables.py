"""The parts of a report that are words and tables: results, responses, costs.

Pages of HTML, each complete in one file. What models and rows of data say stands there as text.
"""

import json
import math
from pathlib import Path

from snakechat.reporting.model_card import origin_of
from snakechat.reporting.pages import write_page
from snakechat.reporting.translations import as_number, as_time
from snakechat.workflow.lineage import lineage_columns

MODELS = {"base": "base", "sft": "SFT", "dpo": "DPO", "rlhf": "RLHF", "ema": "average (EMA)"}
# What is told of responses, and what it is called.
FIGURES = {
    "score": "score",
    "judge_score": "score of the judge",
    "success": "exactly right (share)",
    "greedy_success": "exactly right, greedy (share)",
    "kl_to_sft": "KL to SFT (nats per response)",
    "length": "length (tokens)",
    "ended_by_eos": "ended by eos (share)",
    "distinct_2": "pairs of tokens that differ (share)",
    "repetition": "phrases of four tokens that came before (share)",
}
# What a response wins by.
WON_BY = {"score": "score", "judge_score": "score of the judge", "endpoint": "endpoint"}
# Prompts whose responses are shown: the first ones, and those where RLHF lost most.
FIRST, LOST = 10, 3

TABLES = """{% for title, head, rows in tables %}
<table>
<caption>{{ title }}</caption>
<colgroup><col style="width: 15em"></colgroup>
{% if head %}
<thead><tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
{% endif %}
{% for row in rows %}
<tr><th>{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
"""


def write_tables(path, title, sentences, tables):
    """Write a page of tables: (title, head, rows) of each; a head may be empty."""
    write_page(path, TABLES, "en", title, sentences, tables=tables)


def models_in(figures):
    """Names of the models that were asked, in the order of the road; then those beside."""
    asked = figures["intervals_95"]
    return [name for name in MODELS if name in asked] + [n for n in asked if n not in MODELS]


def called(model):
    """What a model is called."""
    return MODELS.get(model, model)


def with_interval(value, interval):
    """A figure, and its interval where it has one."""
    if interval is None:
        return as_number(value)
    low, high = map(as_number, interval)
    return f"{as_number(value)} ({low} … {high})"


def share_interval(share, number):
    """95 % interval of a share of so many (Wilson 1927)."""
    z = 1.959964
    middle = share + z * z / (2 * number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return [(middle + sign * half) / (1 + z * z / number) for sign in (-1, 1)]


# --- results ----------------------------------------------------------------------------------


def write_results(path, name, lineage, figures):
    """The results of a run on one page. figures: metrics.json of the evaluations, by stage."""
    sentences = [
        "All figures are of held-out rows and prompts. In brackets: 95 %"
        " intervals, of responses by drawing the prompts anew (Efron 1979), of accuracies Wilson's.",
    ]
    tables = [
        ("What was run", [], what_was_run(name, lineage)),
        *stage_tables(figures),
        response_table(figures["rlhf"]),
        win_table(figures["rlhf"]),
    ]
    write_tables(path, f"{name}: results", sentences, tables)


def what_was_run(name, lineage):
    """Rows of the recipe, its models and its data. lineage: of all jobs before the report."""
    settings = lineage[f"output/rlhf/{name}"]["settings"]
    functions = settings["reward_functions"]
    rows = [
        ["recipe", name],
        ["algorithm", settings["algorithm"]],
        ["seed", settings["seed"]],
        ["SFT model", f"sft/{settings['actor']}"],
        ["reward model", f"reward/{settings['reward']}" if settings["reward"] else "none"],
    ]
    if functions:
        scored = ", ".join(f"{weight} * {function}" for function, weight in functions.items())
        rows.append(["reward functions", scored])
    kinds = {"import_dataset": "data", "init_model": "base model", "fetch_model": "base model"}
    for job in lineage.values():
        if job["rule"] in kinds:
            rows.append([f"{kinds[job['rule']]}: {job['name']}", origin_of(job)])
    return rows


def stage_tables(figures):
    """The tables of what held-out rows say of the SFT model and of the reward model."""
    sft = figures["sft"]
    names = {"perplexity": "perplexity", "response_perplexity": "perplexity of responses"}
    rows = [
        [label, as_number(sft["before"][key]), as_number(sft["after"][key])]
        for key, label in names.items()
    ]
    yield f"SFT, {as_number(sft['rows'])} held-out rows", ["", "before", "after"], rows
    if "reward" in figures:
        yield pair_table(figures["reward"])


def pair_table(reward):
    """The table of what held-out pairs say of the reward model."""
    names = {
        "accuracy": "accuracy (share; a tie is no success)",
        "longer_wins_accuracy": "accuracy of “the longer one” (share)",
        "ties": "ties (share)",
    }
    rows = [
        [label, with_interval(reward[key], share_interval(reward[key], reward["pairs"]))]
        for key, label in names.items()
    ]
    for dataset, of in reward.get("of", {}).items():
        interval = share_interval(of["accuracy"], of["pairs"])
        rows.append([f"accuracy: {dataset}", with_interval(of["accuracy"], interval)])
    rows.append(["expected calibration error", as_number(reward["calibration_error"])])
    return f"Reward model, {as_number(reward['pairs'])} held-out pairs", ["", "after"], rows


def response_table(figures):
    """The table of what responses to held-out prompts are like, a column for each model."""
    models = models_in(figures)
    rows = [
        [
            label,
            *(with_interval(figures[m][key], figures["intervals_95"][m][key]) for m in models),
            difference(figures, key),
        ]
        for key, label in FIGURES.items()
        if key in figures["rlhf"]
    ]
    title = (
        f"Responses to {as_number(figures['num_prompts'])} held-out prompts,"
        f" {figures['num_generations']} of each model to each"
    )
    return title, ["", *map(called, models), "RLHF - SFT"], rows


def difference(figures, key):
    """A difference of the two models with its interval, where it was taken."""
    found = figures.get(f"{key}_difference")
    return with_interval(found["mean"], found["interval_95"]) if found else ""


def win_table(figures):
    """The table of how often models win, and what length has to do with it."""
    rows = []
    for model in models_in(figures):
        for other, won in figures["wins"].get(model, {}).items():
            for key in (key for key in WON_BY if key in won):
                found = won[key]
                cells = [found.get(name) for name in ("longer", "when_longer", "when_not_longer")]
                rate = with_interval(found["mean"], found["interval_95"])
                told = ["" if cell is None else as_number(cell) for cell in cells]
                rows.append(
                    [f"{called(model)} over {called(other)}, by {WON_BY[key]}", rate, *told]
                )
    head = ["", "wins (share; a tie is half)", "longer", "wins when longer", "wins when not"]
    return "Who wins, and by length?", head, rows


def trade_off(figures):
    """Panels of draw_trade_off: how long the responses of models are, and how often they win."""
    panels = {}
    for key, label in WON_BY.items():
        if key not in figures["wins"]["rlhf"]["sft"]:
            continue
        models = panels[f"by {label}"] = {}
        for model in models_in(figures):
            length = figures[model]["length"], figures["intervals_95"][model]["length"]
            won = figures["wins"].get(model, {}).get("sft", {}).get(key)
            if won:
                models[called(model)] = (*length, won["mean"], won["interval_95"])
            elif model == "sft":
                # Against itself.
                models[called(model)] = (*length, 0.5, None)
    return panels


# --- responses ----------------------------------------------------------------------------------

RESPONSES = """{% for heading, questions in parts %}
<h2>{{ heading }}</h2>
{% for prompt, rows in questions %}
<table>
<caption>{{ prompt }}</caption>
<thead><tr><th class="name">model</th><th>response</th>
{% for name in scores %}<th class="number">{{ name }}</th>{% endfor %}</tr></thead>
{% for name, response, found in rows %}
<tr><th>{{ name }}</th><td dir="auto">{{ response }}</td>
{% for score in found %}<td class="number">{{ score }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{% endfor %}
"""


def write_responses(path, name, lines, samples):
    """Responses of all models, side by side: the first one of each to some prompts.

    lines: those of responses.jsonl, of which so many samples stand together.
    """
    responses = {}
    for line in lines:
        responses.setdefault(line["model"], []).append(line)
    responses = {model: found[::samples] for model, found in responses.items()}
    scores = [key for key in ("score", "judge_score") if key in lines[0]]
    falls = [
        after["score"] - before["score"]
        for after, before in zip(responses["rlhf"], responses["sft"], strict=True)
    ]
    lost = [row for row in sorted(range(len(falls)), key=falls.__getitem__) if falls[row] < 0]
    parts = {"The first held-out prompts": range(min(FIRST, len(falls)))}
    if lost:
        parts["Where the score fell most from SFT to RLHF"] = lost[:LOST]

    def scored(line):
        """A response and its scores, as they are shown."""
        return line["response"].strip(), [as_number(line[key]) for key in scores]

    def question(row):
        """A prompt and its responses."""
        told = [(called(model), *scored(found[row])) for model, found in responses.items()]
        return responses["sft"][row]["prompt"].strip(), told

    write_page(
        path,
        RESPONSES,
        "en",
        f"{name}: responses side by side",
        ["The first sampled response of each model. What looks like HTML or a turn is text."],
        scores=[FIGURES[key] for key in scores],
        parts=[(heading, list(map(question, rows))) for heading, rows in parts.items()],
    )


# --- costs ------------------------------------------------------------------------------------


def runs_of(lineage):
    """How each job of a lineage ran (its NAME.run.json), by path; None where that is not known: no
    such file, or of another run than the one that made the result.
    """
    runs = {}
    for column in lineage_columns(lineage):
        for path in column:
            try:
                run = json.loads(Path(f"{path}.run.json").read_text())
            except (OSError, ValueError):
                run = {}
            runs[path] = run if run.get("spec") == lineage[path]["spec"] else None
    return runs


def write_costs(path, name, runs):
    """What each job took, and on which machine and software the run was trained."""
    head = ["", "started (UTC)", "time", "peak memory (MB)", "peak GPU memory (MB)", "steps"]
    head += ["seconds a step, median", "host"]
    rows = [[job.removeprefix("output/"), *cost_cells(run)] for job, run in runs.items()]
    total = sum(run["seconds"] for run in runs.values() if run)
    sentences = [
        f"All jobs together: {as_time(total)}. Of a training that was stopped and went on: the time"
        " since then. Memory is that of the job's first process.",
    ]
    tables = [("Jobs", head, rows)]
    if run := runs[f"output/rlhf/{name}"]:
        versions = [["Python", run["python"]], *sorted(run["versions"].items())]
        machine = [[key, run[key]] for key in ("host", "platform", "cpu", "cpus", "threads")]
        machine += [["gpu", run["gpu"]]] if "gpu" in run else []
        # Without a step, where a training went on at its end.
        if parts := run.get("seconds_by_section"):
            told = [[part, as_number(seconds)] for part, seconds in parts.items()]
            tables.append(("A step of the RLHF training, median seconds of its parts", [], told))
        tables += [
            ("Machine of the RLHF training", [], machine),
            ("Software of the RLHF training", [], versions),
        ]
    write_tables(path, f"{name}: costs and software", sentences, tables)


def cost_cells(run):
    """Cells of how a job ran."""
    if run is None:
        return ["not known", *[""] * 6]
    numbers = [
        run.get(key) for key in ("peak_memory_mb", "peak_gpu_memory_mb", "steps", "seconds_per_step")
    ]
    told = ["" if number is None else as_number(number) for number in numbers]
    return [run["started"][:16].replace("T", " "), as_time(run["seconds"]), *told, run["host"]]
