"""What a planned job has to do: models, passes, tokens, from its spec and what is there already.

plan, everywhere: a Plan.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from snakechat.data.tokens import Ragged
from snakechat.planning import estimates as estimate
from snakechat.planning.changes import job_name
from snakechat.planning.estimates import Trained
from snakechat.planning.footprint import POLICY, SCORE, SFT, Layout, Model, size_of
from snakechat.planning.known_models import MODELS, ROWS
from snakechat.workflow.errors import InputError

# Where nothing is known of a row's length: its share of the limit.
ASSUMED_SHARE = 0.5
# Responses of a row, by the rule that makes its tokens.
FIELDS = {
    "tokenize_sft": ("prompt", "chosen"),
    "tokenize_reward": ("prompt", "chosen", "rejected"),
    "tokenize_dpo": ("prompt", "chosen", "rejected"),
    "tokenize_rlhf": ("prompt",),
}
PHASES = {"tokenize_dpo": "reward"}


class Plan(NamedTuple):
    """All jobs of a plan (plan.Planned) by their results' paths, and the paths of those stale."""

    jobs: dict
    stale: set


class Workload(NamedTuple):
    """A job's work on GPUs.

    trained, frozen, largest, sampled, average: as in estimate.memory. flops: operations of training
    and of passes without gradients; None where the rows are unknown. responded: (model, rows that it
    samples) of each. notes: what was assumed.
    """

    trained: list
    frozen: list
    largest: Layout
    flops: float | None
    sampled: Layout | None = None
    responded: tuple = ()
    average: bool = False
    notes: tuple = ()

    def memory(self, placement, zero=estimate.DEFAULT):
        """The fullest moment: its name, and bytes of a GPU by part."""
        if self.trained:
            return estimate.memory(
                self.trained,
                self.frozen,
                placement,
                self.largest,
                self.sampled,
                self.average,
                zero,
            )
        return estimate.asked_memory(self.frozen, self.largest, self.sampled)

    def host_memory(self, placement):
        """Bytes of a node's own memory, beside what a GPU has."""
        return estimate.host_memory(self.trained, self.frozen, placement)

    def weights(self):
        """How many weights there are in the job's models, and how many are trained."""
        models = [entry.model for entry in self.trained] + self.frozen
        return sum(size_of(model).weights for model in models), sum(
            size_of(entry.model).trained for entry in self.trained
        )

    def result_bytes(self):
        """Bytes of the trained model's folder, of an average's too; None where none is made."""
        if not self.trained:
            return None
        return (2 if self.average else 1) * estimate.saved_bytes(self.trained[0].model)

    def state_bytes(self):
        """Bytes of a state that the job can go on from."""
        return estimate.state_bytes(self.trained)

    def seconds(self, gpu, gpus):
        """Seconds on so many GPUs; None where it is unknown how many rows there are."""
        if self.flops is None:
            return None
        sampling = (
            estimate.sampling_seconds(model, rows, self.sampled, gpu, gpus)
            for model, rows in self.responded
        )
        return estimate.seconds_of(self.flops, gpu, gpus) + sum(sampling)


class Rows(NamedTuple):
    """Rows of a job: how many (None: unknown), mean tokens of a row's prompt and of its responses
    together, tokens of the longest row, and what was assumed.
    """

    number: float | None
    prompt: float
    responses: float
    longest: int
    notes: list

    @property
    def tokens(self):
        """Mean tokens of a row."""
        return self.prompt + self.responses


def workload_of(spec, placement, plan):
    """The Workload of a job; None for one that needs no GPU.

    Raises InputError where nothing tells the shapes of its model.
    """
    describe = DESCRIBED.get(spec["rule"])
    return describe(Described(spec, placement, plan)) if describe else None


class Described:
    """A job that is described: what its program reads."""

    def __init__(self, spec, placement, plan):
        self.spec, self.placement, self.plan = spec, placement, plan
        self.settings = spec["settings"]
        self.max_tokens = placement["micro_batch_tokens"]

    def model(self, key, loss, dtype=None, lora="lora"):
        """The Model of an input, with the adapters that the job gives it."""
        settings = self.settings
        return Model(
            config_of(self.spec["inputs"][key], self.plan),
            loss,
            dtype or settings["dtype"],
            settings.get(f"{lora}_rank", 0) if lora else 0,
            settings.get("train_base", "none") if lora == "lora" else "none",
            bool(lora) and self.placement["activation_checkpointing"],
        )

    def rows(self, part="train"):
        """The Rows of the job's tokens."""
        return rows_of(self.spec["inputs"]["tokens"], part, self.plan)

    def largest(self, length, learnt):
        """The Layout of the largest pass over lines of at most so many tokens."""
        lines = max(1, self.max_tokens // length)
        return Layout(lines, length, learnt, self.placement["gpus_per_node"] > 0)


def train_sft(job):
    """Of a fine-tuning."""
    rows, settings = job.rows(), job.settings
    model = job.model("model", SFT)
    return Workload(
        trained=[Trained(model, job.placement["zero_stage"])],
        frozen=[],
        largest=job.largest(rows.longest, rows.longest - 1),
        flops=times(rows.number, settings["epochs"], of_training(model, rows)),
        notes=rows.notes,
    )


def train_pairs(loss):
    """Of a reward model (SCORE) or DPO (POLICY)."""

    def describe(job):
        rows = job.rows()
        model = job.model("model", loss)
        return Workload(
            trained=[Trained(model, job.placement["zero_stage"])],
            frozen=[],
            largest=job.largest(rows.longest, rows.longest // 2),
            flops=times(rows.number, job.settings["epochs"], of_training(model, rows)),
            notes=rows.notes,
        )

    return describe


def compute_reference(job):
    """Of the reference's log-probabilities."""
    rows = job.rows()
    model = job.model("model", POLICY, lora=None)
    return Workload(
        trained=[],
        frozen=[model],
        largest=job.largest(rows.longest, rows.longest // 2),
        flops=times(rows.number, of_scoring(model, rows)),
        notes=rows.notes,
    )


def train_rlhf(job):
    """Of PPO, RLOO or GRPO."""
    settings, prompts, stage = job.settings, job.rows(), job.placement["zero_stage"]
    response, samples = settings["max_response_length"], settings["num_generations"]
    rows = prompts._replace(
        responses=samples * response, longest=prompts.longest + samples * response
    )
    actor = job.model("actor", POLICY)
    trained = [Trained(actor, stage)]
    frozen = [job.model("reward", SCORE, lora=None)] if "reward" in job.spec["inputs"] else []
    reference = job.model("actor", POLICY, lora=None)
    if actor.lora_rank == 0 or actor.train_base != "none":
        frozen.append(reference)
    if settings["algorithm"] == "ppo":
        key = "reward" if "reward" in job.spec["inputs"] else "actor"
        critic = job.model(key, SCORE, lora="critic_lora")
        trained.append(Trained(critic, job.placement.get("critic_zero_stage", stage)))
    asked = [entry.model for entry in trained] + [reference] + frozen[:1]
    passes = [of_scoring(model, rows) for model in asked]
    passes += [settings["ppo_epochs"] * of_training(entry.model, rows) for entry in trained]
    # Each prompt goes through the actor once more before it is responded.
    passes.append(estimate.scored_flops(actor, rows.prompt, rows.prompt))
    number = times(rows.number, settings["epochs"])
    notes = [*prompts.notes, f"assumed: responses of {response} tokens, the limit"]
    return Workload(
        trained=trained,
        frozen=frozen,
        largest=job.largest(rows.longest, samples * response),
        flops=times(number, sum(passes)),
        sampled=sampled(job, prompts, response),
        responded=() if number is None else ((actor, number * samples),),
        average=settings["ema_decay"] > 0,
        notes=notes,
    )


def evaluate_sft(job):
    """Of perplexities: of one model after the other."""
    rows = job.rows("eval")
    models = [job.model("base", POLICY, lora=None), job.model("model", POLICY, lora=None)]
    # With prompts and without, each.
    flops = 2 * sum(of_scoring(model, rows) for model in models)
    largest = job.largest(rows.longest, rows.longest - 1)
    return Workload([], models[:1], largest, times(rows.number, flops), notes=rows.notes)


def evaluate_reward(job):
    """Of scores, in fp32."""
    rows = job.rows("eval")
    model = job.model("model", SCORE, dtype="fp32", lora=None)
    largest = job.largest(rows.longest, rows.longest // 2)
    return Workload(
        [], [model], largest, times(rows.number, of_scoring(model, rows)), notes=rows.notes
    )


def evaluate_dpo(job):
    """Of implicit rewards."""
    rows = job.rows("eval")
    model = job.model("model", POLICY, lora=None)
    largest = job.largest(rows.longest, rows.longest // 2)
    return Workload(
        [], [model], largest, times(rows.number, of_scoring(model, rows)), notes=rows.notes
    )


def evaluate_rlhf(job):
    """Of a chat model and its SFT model, one after the other, and then the scorers."""
    settings, prompts = job.settings, job.rows("eval")
    response, samples = settings["max_response_length"], settings["num_generations"]
    number = min(prompts.number or math.inf, settings["num_prompts"])
    rows = prompts._replace(
        responses=samples * response, longest=prompts.longest + samples * response
    )
    models = [job.model(key, POLICY, lora=None) for key in ("rlhf", "sft")]
    scorers = [
        job.model(key, SCORE, dtype="fp32", lora=None)
        for key in ("reward", "judge")
        if key in job.spec["inputs"]
    ]
    # Each model's responses are rated by both, and scored.
    flops = number * 2 * sum(of_scoring(model, rows) for model in (*models, *scorers))
    return Workload(
        trained=[],
        frozen=models[:1],
        largest=job.largest(rows.longest, samples * response),
        flops=flops,
        sampled=sampled(job, prompts, response),
        responded=[(model, number * samples) for model in models],
        notes=prompts.notes,
    )


DESCRIBED = {
    "train_sft": train_sft,
    "train_reward": train_pairs(SCORE),
    "train_dpo": train_pairs(POLICY),
    "train_rlhf": train_rlhf,
    "compute_reference": compute_reference,
    "evaluate_sft": evaluate_sft,
    "evaluate_reward": evaluate_reward,
    "evaluate_dpo": evaluate_dpo,
    "evaluate_rlhf": evaluate_rlhf,
}


def times(*factors):
    """A product; None where a factor is unknown."""
    return None if None in factors else math.prod(factors)


def of_training(model, rows):
    """Operations of training on a row."""
    return estimate.trained_flops(model, rows.tokens, rows.tokens)


def of_scoring(model, rows):
    """Operations of a pass without gradients over a row."""
    return estimate.scored_flops(model, rows.tokens, rows.tokens)


def sampled(job, prompts, response):
    """The Layout of the largest pass that samples: each sample of a prompt has a line."""
    return job.largest(prompts.longest + response, response)


# --- models -----------------------------------------------------------------------------------


def config_of(entry, plan):
    """The config, as JSON text, of the model that an input is. Raises InputError: it is unknown."""
    path = entry["path"]
    spec = plan.jobs[path].spec
    settings = spec["settings"]
    if spec["rule"] == "init_model":
        size = vocabulary(settings["tokenizer"], plan.jobs[path].placement)
        return json.dumps({**settings["init"], "vocab_size": size})
    if spec["rule"] == "fetch_model":
        # A local folder has it before it is copied.
        for folder in (path, plan.jobs[path].placement.get("source")):
            if folder and Path(folder, "config.json").exists():
                return Path(folder, "config.json").read_text()
        if settings["hub"] not in MODELS:
            raise InputError(
                f"nothing tells the shapes of {settings['hub']}: fetch it first: {path}"
            )
        return json.dumps(MODELS[settings["hub"]])
    key = "actor" if spec["rule"] == "train_rlhf" else "model"
    return config_of(spec["inputs"][key], plan)


def base_model_bytes(spec, plan):
    """Bytes of a base model's folder: in 16 bits where it is fetched; None for any other job."""
    width = {"fetch_model": "bf16", "init_model": "fp32"}.get(spec["rule"])
    return width and estimate.saved_bytes(Model(config_of(spec, plan), SFT, width))


def vocabulary(tokenizer, placement):
    """Tokens of a tokenizer: those it shall be trained to have, or those it has in its folder."""
    if "vocab_size" in tokenizer:
        return tokenizer["vocab_size"]
    there = json.loads(Path(placement["source"], "tokenizer.json").read_text())
    ids = [*there["model"]["vocab"].values(), *(token["id"] for token in there["added_tokens"])]
    return max(ids) + 1


# --- rows -------------------------------------------------------------------------------------


def rows_of(entry, part, plan):
    """The Rows of a part (train or eval) of an input of tokens: of its arrays where they are there.

    Otherwise as many as the splits or the datasets have, of half the limit of a row.
    """
    spec = plan.jobs[entry["path"]].spec
    fields, settings = FIELDS[spec["rule"]], spec["settings"]
    try:
        lengths = [Ragged(entry["path"], f"{part}.{field}").lengths for field in fields]
    except FileNotFoundError:
        lengths = None
    if lengths and len(lengths[0]):
        prompt, *responses = (found.mean() for found in lengths)
        stale = entry["path"] in plan.stale
        notes = [f"assumed: rows are as long as in {job_name(spec)} as it was"] if stale else []
        return Rows(len(lengths[0]), prompt, sum(responses), int(sum(lengths).max()), notes)
    limit = settings.get("max_length") or settings["max_prompt_length"]
    number, notes = numbers_of(spec, part, plan)
    mean = ASSUMED_SHARE * limit
    notes.append(
        f"unknown until {job_name(spec)} is there: tokens of a row; {mean:g} assumed, half of the"
        " limit"
    )
    if len(fields) == 1:
        return Rows(number, mean, 0, limit, notes)
    # Prompt and each response: each sequence has the limit for itself.
    responses = (len(fields) - 1) * mean / 2
    return Rows(number, mean / 2, responses, (len(fields) - 1) * limit, notes)


def numbers_of(spec, part, plan):
    """How many rows a part of a recipe's tokens will have (None: unknown), and why so many."""
    phase = PHASES.get(spec["rule"], spec["rule"].removeprefix("tokenize_"))
    number, notes = 0, []
    for dataset, weight in spec["settings"]["datasets"]:
        found, note = split_rows(spec["inputs"], dataset, phase, part, plan)
        notes += [note] if note else []
        number = None if None in (number, found) else number + weight * found
    return number, notes


def split_rows(inputs, dataset, phase, part, plan):
    """Rows of a phase in a part of a dataset (None: unknown), and what was assumed, or None."""
    try:
        rows = inputs[f"rows.{dataset}"]
        there = np.load(
            Path(rows["path"], f"{phase}.{part}.npy"), mmap_mode="r", allow_pickle=False
        )
        return len(there), None
    except FileNotFoundError:
        pass
    source = plan.jobs[inputs[f"records.{dataset}"]["path"]].spec["settings"]
    split = plan.jobs[rows["path"]].spec["settings"]
    share = split["weights"][phase] / sum(split["weights"].values())
    if "generate" in source:
        eval_rows = source["eval_rows"]
        number = {"train": source["rows"] - eval_rows, "eval": eval_rows}[part]
        note = None
    elif source.get("hub") in ROWS:
        number, note = ROWS[source["hub"]][part], f"assumed: {dataset} has as many rows as in 2023"
    else:
        return None, f"unknown until {dataset} is imported: how many rows it has"
    if split["max_rows"]:
        number = min(number, split["max_rows"])
    return share * number, note
