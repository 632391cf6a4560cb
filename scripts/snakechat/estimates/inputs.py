"""What a planned job reads: rows and tokens, and the configs of models, which may not exist yet."""

import json
import math
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from snakechat.data.hub import fetch
from snakechat.data.ragged_arrays import Ragged
from snakechat.jobs.planner import Plan
from snakechat.jobs.stale_causes import job_name

# Assumed mean length of a row, as a fraction of its limit, before it is tokenized.
ASSUMED_LENGTH = 0.5
# Rows of each split of datasets of the Hub.
DATASET_ROWS: dict[str, dict[str, int]] = yaml.safe_load(
    Path(__file__).parent.joinpath("tables", "dataset_rows.yaml").read_text("utf-8")
)


class TokenCounts(NamedTuple):
    """Rows and tokens that a job reads.

    num_rows: Number of rows; nan if it is unknown.
    prompt, responses: Mean tokens of a row's prompt, and of all its responses together.
    longest: Tokens of the longest row.
    notes: Assumptions, for the user.
    num_responses: Responses of a row, at least 1.
    """

    num_rows: float
    prompt: float
    responses: float
    longest: int
    notes: list[str]
    num_responses: int = 1


def token_counts(path: str, split: str, plan: Plan) -> TokenCounts:
    """Return the counts of a split (train or eval) of a folder of tokens.

    Before the tokens exist, the number of rows is that of the datasets, and the length of a row is
    assumed to be half of its limit.
    """
    spec = plan.jobs[path].spec
    settings = spec["settings"]
    fields, number = settings["fields"], max(len(settings["fields"]) - 1, 1)
    try:
        lengths = [Ragged(Path(path), f"{split}.{field}").lengths for field in fields]
    except FileNotFoundError:
        lengths = []
    if lengths and len(lengths[0]):
        prompt, *responses = (field_lengths.mean() for field_lengths in lengths)
        notes = []
        if path in plan.stale:
            notes = [f"assumed: rows are as long as in the stale result of {job_name(spec)}"]
        longest = int(np.sum(lengths, axis=0).max())
        return TokenCounts(len(lengths[0]), prompt, sum(responses), longest, notes, number)
    limit = settings.get("max_length") or settings["max_prompt_length"]
    num_rows, notes = count_rows(spec, split, plan)
    mean = ASSUMED_LENGTH * limit
    notes.append(
        f"assumed until {job_name(spec)} is built: {mean:g} tokens per row, half of the limit"
    )
    # Half of a sequence is the prompt; the limit holds for each sequence of prompt and response.
    prompt = mean / min(len(fields), 2)
    return TokenCounts(num_rows, prompt, number * (mean - prompt), number * limit, notes, number)


def count_rows(spec: Mapping[str, Any], split: str, plan: Plan) -> tuple[float, list[str]]:
    """Return the number of rows of a job's datasets (nan: unknown), and the assumptions."""
    phase = spec["settings"]["phase"]
    total, notes = 0.0, []
    for number, weight in enumerate(spec["settings"]["weights"], start=1):
        records, rows = (spec["inputs"][f"{key}.{number}"] for key in ("records", "rows"))
        file = Path(rows["path"], f"{phase}.{split}.npy")
        if file.exists():
            total += weight * len(np.load(file, mmap_mode="r", allow_pickle=False))
            continue
        source = plan.jobs[records["path"]].spec["settings"]
        division = plan.jobs[rows["path"]].spec["settings"]
        if "generate" in source:
            eval_rows = source["eval_rows"]
            listed = {"train": source["rows"] - eval_rows, "eval": eval_rows}
        elif listed := DATASET_ROWS.get(source.get("hub"), {}):
            notes.append(f"assumed: {rows['name']} has as many rows as the Hub listed in 2024")
        else:
            notes.append(f"unknown until {rows['name']} is split: number of rows")
        num_rows = listed.get(split, math.nan)
        if division["max_rows"] and split == "train":
            num_rows = min(num_rows, division["max_rows"])
        total += weight * num_rows * division["weights"][phase] / sum(division["weights"].values())
    return total, notes


def model_config(path: str, plan: Plan) -> str:
    """Return the config of the model in a result folder, as JSON.

    A trained model has the config of its base model. Before a download, the Hub has the config.

    Raises:
        InputError: The Hub is unavailable.
    """
    spec, source = plan.jobs[path].spec, plan.jobs[path].options.source
    settings = spec["settings"]
    if spec["rule"] == "init_model":
        size = settings["tokenizer"].get("vocab_size")
        if size is None:
            content = json.loads(Path(source, "tokenizer.json").read_text())
            added = [token["id"] for token in content["added_tokens"]]
            size = max(*content["model"]["vocab"].values(), *added) + 1
        return json.dumps({**settings["init"], "vocab_size": size})
    if spec["rule"] == "fetch_model":
        for folder in (path, source):
            if folder and Path(folder, "config.json").exists():
                return Path(folder, "config.json").read_text()
        return hub_config(settings["hub"], settings["revision"])
    key = "actor" if spec["rule"] == "train_rlhf" else "model"
    return model_config(spec["inputs"][key]["path"], plan)


@cache
def hub_config(name: str, revision: str) -> str:
    """Return the config of a model of the Hub, the only file of it that is downloaded."""
    print(f"reading config.json of {name} from the Hub", file=sys.stderr, flush=True)
    folder, _, _ = fetch(name, "model", revision, lambda *_: ["config.json"])
    return Path(folder, "config.json").read_text()
