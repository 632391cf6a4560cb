"""Write what a training was like into a page of Markdown, with its curves beside it.

It tells times, memory and machine (NAME.run.json), so that no two builds have the same page.
"""

import json

from snakechat.planning.flops import peak_flops, rlhf_flops, training_flops
from snakechat.reporting.plots import CURVES, draw_curves, panels_of
from snakechat.reporting.translations import as_cell, as_number, as_time, teller
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run

# Of a step of RLHF.
PARTS = {"generate": "sampling responses", "score": "scoring them", "train": "learning from them"}
# Steps of the table.
ROWS = 10


def main(job):
    """The page and its picture."""
    say = teller(job.settings.language)
    training = Training(job)
    curves = {key: say(label) for key, label in CURVES[training.stage].items()}
    panels = panels_of(training.steps, curves, say("held-out rows"))
    draw_curves(job.result / "loss.svg", panels, say("step"), as_text=True)
    sections = {
        "What came of it": OUTCOMES[training.stage](training.figures, say),
        "The run": [["", ""], *how_it_went(training, say)],
        "Data and batches": [["", ""], *data_and_batches(training, say)],
        "Weights": weights(training.models, say),
        "Steps": steps_told(training.steps, curves, say),
        "Settings": settings_told(training.settings),
        "Placement": settings_told(training.run["placement"]),
        "Environment": [["", ""], *environment(training.run, say)],
    }
    page = [
        f"# {say('Training record')}: {training.stage}/{training.name}",
        f"{training.run['started'][:16]} UTC, `{job.inputs['training']}`, spec"
        f" `{training.run['spec'][:16]}`",
        f"![{say('Curves')}](loss.svg)",
    ]
    for title, rows in sections.items():
        page += [f"## {say(title)}", table(rows)]
    page.append(say(NOTE))
    (job.result / "record.md").write_text("\n\n".join(page) + "\n")


NOTE = (
    "Operations are counted as by Chowdhery et al. 2022 (PaLM), appendix B: for a token, 6 for each"
    " weight (4 where it is not trained) and 12 · layers · hidden size · mean length of a sequence"
    " for attention; RLHF adds forward passes (2, and a third of attention). Padding and what is"
    " computed twice to save memory do not count. Peaks of GPUs are those of 16-bit numbers in"
    " NVIDIA's data sheets, without sparsity. Rates are those of the median step: without saving,"
    " loading and evaluation."
)


class Training:
    """A training that is done: settings, run, steps, data, and what evaluation says of it."""

    def __init__(self, job):
        folder = job.inputs["training"]
        entry = job.lineage[str(folder)]
        self.stage, self.name, self.settings = folder.parts[1], entry["name"], entry["settings"]
        self.run = run_record(folder, entry["spec"])
        self.models = self.run["models"]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.steps = [json.loads(line) for line in lines]
        self.figures = json.loads((job.inputs["evaluation"] / "metrics.json").read_text())
        self.data = json.loads((job.inputs["tokens"] / "stats.json").read_text())

    @property
    def processes(self):
        """How many processes trained together."""
        where = self.run["placement"]
        return where["nodes"] * max(where["gpus_per_node"], 1)

    @property
    def batch_size(self):
        """Rows of a step; of RLHF, prompts."""
        return self.settings["rollout_batch_size" if self.stage == "rlhf" else "global_batch_size"]

    @property
    def lengths(self):
        """Mean tokens of the prompt of a row and of each of its responses."""
        facts = self.data["train"]
        found = {name: tokens["sum"] / facts["rows"] for name, tokens in facts["tokens"].items()}
        if self.stage == "rlhf":
            responses = [line["response/length"] for line in self.steps]
            found["response"] = sum(responses) / len(responses)
        return found

    @property
    def row_length(self):
        """Mean tokens of a row, each once: no padding, and the prompt of all its responses once."""
        lengths = dict(self.lengths)
        if self.stage == "rlhf":
            lengths["response"] *= self.settings["num_generations"]
        return sum(lengths.values())

    @property
    def flops_a_token(self):
        """Operations for a token that is trained on."""
        lengths = dict(self.lengths)
        prompt = lengths.pop("prompt")
        # No response of a row sees another one.
        length = prompt + sum(lengths.values()) / len(lengths)
        if self.stage == "rlhf":
            return rlhf_flops(self.models, length, self.settings["ppo_epochs"])
        return training_flops(self.models["model"], length)


def run_record(folder, spec):
    """NAME.run.json of a result. Raises InputError where it is not of the run that made it."""
    path = folder.with_name(f"{folder.name}.run.json")
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        raise InputError(f"{path} cannot be read, which says how {folder} was made") from None
    if record["spec"] != spec:
        raise InputError(f"{path} tells of another run than the one that made {folder}")
    return record


# --- what came of it --------------------------------------------------------------------------


def of_sft(figures, say):
    """Perplexities of held-out rows."""
    both = figures["before"], figures["after"]
    names = {"perplexity": "perplexity", "response_perplexity": "perplexity of responses"}
    rows = [[say(label), *(each[key] for each in both)] for key, label in names.items()]
    head = f"{say('held-out rows')}: {figures['rows']:,}"
    return [[head, say("before"), say("after")], *rows]


def of_pairs(figures, say):
    """What held-out pairs say of a reward model, or of a chat model's implicit rewards."""
    names = {
        "accuracy": "accuracy (share)",
        "ties": "ties (share)",
        "longer_wins_accuracy": "accuracy of “the longer one”",
        "loss": "loss (nats per pair)",
        "chosen_score": "score of chosen responses",
        "rejected_score": "score of rejected responses",
        "calibration_error": "expected calibration error",
    }
    head = f"{say('held-out pairs')}: {figures['pairs']:,}"
    rows = [[say(label), figures[key]] for key, label in names.items()]
    rows += [
        [f"{say('accuracy (share)')}: {dataset}", of["accuracy"]]
        for dataset, of in figures.get("of", {}).items()
    ]
    return [[head, say("after")], *rows]


MODELS = {"base": "base", "sft": "SFT", "rlhf": "RLHF", "ema": "EMA"}
# What responses win by.
JUDGED = {
    "score": "wins over SFT by score",
    "judge_score": "wins over SFT by the judge",
    "endpoint": "wins over SFT by the endpoint",
}


def of_rlhf(figures, say):
    """What responses to held-out prompts are like, of each model that was asked."""
    names = {
        "score": "score",
        "judge_score": "score of the judge",
        "success": "exactly right (share)",
        "greedy_success": "exactly right, greedy (share)",
        "length": "response length (tokens)",
        "ended_by_eos": "ended by eos (share)",
        "distinct_1": "tokens of a response that differ (share)",
        "distinct_2": "pairs of tokens that differ (share)",
        "repetition": "phrases of four tokens that came before (share)",
        "kl_to_sft": "KL to SFT (nats per response)",
    }
    asked = figures["intervals_95"]
    # The models of the recipe; behind them those beside it.
    models = [key for key in MODELS if key in asked] + [key for key in asked if key not in MODELS]
    rows = [
        [say(label), *(figures[model][key] for model in models), difference(figures, key)]
        for key, label in names.items()
        if key in figures["rlhf"]
    ]
    for key, label in JUDGED.items():
        if key in figures["wins"]["rlhf"]["sft"]:
            won = [figures["wins"].get(model, {}).get("sft", {}).get(key) for model in models]
            rows.append([say(label), *(with_interval(each) if each else "" for each in won), ""])
    head = f"{say('held-out prompts')}: {figures['prompts']:,}"
    labels = [MODELS.get(model, model) for model in models]
    return [[head, *labels, say("RLHF - SFT (95 % interval)")], *rows]


def difference(figures, key):
    """A difference of the two models with its interval, where it was taken."""
    found = figures.get(f"{key}_difference")
    return "" if found is None else with_interval(found)


def with_interval(found):
    """A mean and its interval."""
    low, high = map(as_number, found["interval_95"])
    return f"{as_number(found['mean'])} ({low} … {high})"


OUTCOMES = {"sft": of_sft, "reward": of_pairs, "dpo": of_pairs, "rlhf": of_rlhf}


# --- how it went ------------------------------------------------------------------------------


def how_it_went(training, say):
    """Yield rows of times, throughput and memory."""
    run = training.run
    yield say("steps"), run["steps"]
    if run["resumed_after_step"]:
        yield (
            say("went on after step (times and memory are told of the rest)"),
            (run["resumed_after_step"]),
        )
    yield say("time in all"), as_time(run["seconds"])
    yield say("of it, saving states"), as_time(run["saving_seconds"])
    if "seconds_per_step" in run:
        yield from throughput(training, say)
    yield say("peak memory of the first process (MB)"), run["peak_memory_mb"]
    if "gpu" in run:
        yield say("peak memory of its GPU (MB)"), run["peak_gpu_memory_mb"]
    # RLHF has two optimizers, which skip steps each by itself.
    if training.settings["dtype"] == "fp16" and training.stage != "rlhf":
        yield say("steps left out, too large for fp16"), len(skipped_steps(training.steps))


def throughput(training, say):
    """Yield rows of what a step of median length gets done."""
    seconds = training.run["seconds_per_step"]
    rows = min(training.batch_size, training.data["train"]["rows"]) / seconds
    flops = rows * training.row_length * training.flops_a_token
    yield say("seconds a step, median"), seconds
    for part, label in PARTS.items():
        if "seconds_by_section" in training.run:
            yield f"{say('of it')}: {say(label)}", training.run["seconds_by_section"][part]
    yield say("prompts a second" if training.stage == "rlhf" else "rows a second"), rows
    yield say("tokens a second"), rows * training.row_length
    yield say("TFLOP/s, all processes"), flops / 1e12
    peak = peak_flops(training.run.get("gpu", ""))
    if peak and training.settings["dtype"] != "fp32":
        yield say("share of the GPUs' peak (MFU)"), flops / (training.processes * peak)


def skipped_steps(steps):
    """Steps whose gradients fp16 could not hold: they have no norm. Step 0 is none."""
    return [line["step"] for line in steps if line["step"] and "grad_norm" not in line]


def data_and_batches(training, say):
    """Yield rows of how much data there is and how it makes steps."""
    settings, facts = training.settings, training.data
    for part, what in (("train", "rows to train on"), ("eval", "rows held out")):
        yield say(what), facts[part]["rows"]
        yield say("of them, cut"), facts[part]["cut"]
        yield say("dropped before"), sum(facts[part]["dropped"].values())
        for name, lengths in facts[part]["tokens"].items():
            yield f"{say('tokens of')} {name}", lengths["sum"]
    number = -(-facts["train"]["rows"] // training.batch_size)
    yield say("datasets"), ", ".join(name for name, _ in settings["datasets"])
    yield say("rows of a step"), training.batch_size
    yield say("steps of an epoch"), number
    yield say("epochs"), settings["epochs"]
    yield say("steps planned"), number * settings["epochs"]
    yield say("mean tokens of a row"), training.row_length
    yield say("tokens of a pass, at most"), training.run["placement"]["micro_batch_tokens"]
    yield say("processes"), training.processes
    if any("tokens" in line for line in training.steps):
        yield say("tokens learnt"), sum(line.get("tokens", 0) for line in training.steps)


def weights(models, say):
    """The table of the sizes of what was trained."""
    rows = [
        [say(name), size["weights"], size["trained"], size["layers"], size["hidden_size"]]
        for name, size in models.items()
    ]
    return [["", *map(say, ("weights", "trained", "layers", "hidden size"))], *rows]


def steps_told(steps, curves, say):
    """The table of about ten steps, the first and the last among them."""
    told = [line for line in steps if all(key in line for key in curves)]
    last = len(told) - 1
    chosen = sorted({round(number * last / (ROWS - 1)) for number in range(ROWS)})
    rows = [[told[place]["step"], *(told[place][key] for key in curves)] for place in chosen]
    return [[say("step"), *curves.values()], *rows]


def settings_told(settings):
    """The table of settings, by their names in the config."""
    return [["", ""], *([f"`{key}`", json.dumps(settings[key])] for key in sorted(settings))]


def environment(run, say):
    """Yield rows of where it ran and with what."""
    yield say("host"), run["host"]
    yield say("system"), run["platform"]
    yield "CPU", run["cpu"]
    yield say("cores"), run["cpus"]
    if "gpu" in run:
        yield "GPU", run["gpu"]
    yield say("threads"), run["threads"]
    yield "Python", run["python"]
    yield from sorted(run["versions"].items())


def table(rows):
    """Rows of cells as Markdown, the head first."""
    lines = ["| " + " | ".join(map(as_cell, row)) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
