"""Rows as they are trained, by token, and responses of models, as tables of a page."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from snakechat.data.ragged_arrays import Ragged, optional_ragged, whole_lengths_path
from snakechat.evaluation.comparisons import initial_model
from snakechat.pages.metrics import (
    Figure,
    label_of,
    name_of,
    read_figure,
    read_json,
    read_json_lines,
    translate,
)
from snakechat.pages.page import Page, Section, Table, Token, Tokens, figure_cell
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job

RESPONSES = ("chosen", "rejected")
# The text of a token may depend on as many tokens before it: on bytes of one character, say.
CONTEXT = 8
# Lines of a .jsonl file.
Lines = Sequence[Mapping[str, Any]]
# Prompts on the page: the first ones, and those where the score decreased most.
FIRST, DECREASED = 10, 3


class TokenizedRows:
    """The rows of a split of a tokenized phase.

    Args:
        folder: Result of the job that tokenized the phase.
        split: train or eval.
        tokenizer: A folder with the tokenizer.json that the rows have their ids from.
        whole: Whether the loss counts the tokens of prompts, too (train_on: all_tokens).

    Raises:
        InputError: A file is missing.
    """

    def __init__(self, folder: Path, split: str, tokenizer: Path, whole: bool = False) -> None:
        file = tokenizer / "tokenizer.json"
        names = [name for name in RESPONSES if (folder / f"{split}.{name}.ids.npy").exists()]
        if not file.exists() or not (folder / f"{split}.prompt.ids.npy").exists():
            missing = folder if file.exists() else file
            raise InputError(
                f"{missing}: expected the {split} split of a tokenized phase with its tokenizer,"
                " such as output/tokens/sft/NAME: build it first"
            )
        self.tokenizer = Tokenizer.from_file(str(file))
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {number for number, token in added.items() if token.special}
        self.fields = {name: Ragged(folder, f"{split}.{name}") for name in ("prompt", *names)}
        # Of recipes with train_on: all_turns.
        self.trained = optional_ragged(folder, f"{split}.trained")
        lengths = whole_lengths_path(folder, split)
        self.whole_lengths = np.load(lengths, mmap_mode="r") if lengths.exists() else None
        self.whole, self.names = whole, names
        self.stats = json.loads((folder / "stats.json").read_text())[split]

    def __len__(self) -> int:
        return len(self.fields["prompt"])

    def row(self, number: int) -> dict[str, Tokens]:
        """Return the tokens of the prompt and of each response of a row, by field."""
        found = {}
        for name, of_field in self.fields.items():
            ids = of_field[number].tolist()
            counts: Sequence[bool] = [name in RESPONSES or self.whole] * len(ids)
            if name == "chosen" and self.trained is not None:
                counts = self.trained[number].astype(bool).tolist()
            kept = ""
            if name in self.names and self.whole_lengths is not None:
                total = int(self.whole_lengths[self.names.index(name)][number])
                if total > len(ids):
                    kept = translate("kept_tokens", kept=len(ids), total=total)
            found[name] = Tokens(list(self._tokens(ids, counts)), kept)
        return found

    def _tokens(self, ids: Sequence[int], counts: Sequence[bool]) -> Iterator[Token]:
        """Yield the tokens of a text; tokens that end in the middle of a character are joined."""
        start = 0
        for end in range(1, len(ids) + 1):
            context = list(ids[max(start - CONTEXT, 0) : start])
            before = self._decode(context)
            text = self._decode([*context, *ids[start:end]])[len(before) :]
            if not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(ids):
                yield Token(text, any(counts[start:end]), ids[start] in self.special)
                start = end

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def row_tables(rows: TokenizedRows, numbers: Sequence[int]) -> list[Table]:
    """Return a table of each of some rows, with a line for its prompt and each response."""
    return [
        Table(
            translate("row", number=number),
            [],
            [[name, tokens] for name, tokens in rows.row(number).items()],
            translate("rows_note"),
        )
        for number in numbers
    ]


# --- responses ------------------------------------------------------------------------------------


def response_sections(lines: Lines, num_generations: int) -> list[Section]:
    """Return sections with the first response of each model to some prompts.

    Args:
        lines: The lines of responses.jsonl; responses to the same prompt follow each other.
        num_generations: Responses of each model to each prompt.
    """
    models: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        models.setdefault(line["model"], []).append(line)
    prompts = [*zip(*(of_model[::num_generations] for of_model in models.values()), strict=True)]
    shown = {translate("first_responses"): prompts[:FIRST]}
    if "rlhf" in models:
        initial = initial_model(models)
        places = [[*models].index(model) for model in (initial, "rlhf")]

        def change(of_prompt: Lines) -> float:
            before, after = (of_prompt[place].get("score", math.nan) for place in places)
            return float(after - before)

        title = translate("worse_responses", initial=name_of("models", initial))
        shown[title] = sorted((of for of in prompts if change(of) < 0), key=change)[:DECREASED]
    return [
        Section(title, tables=[*map(_prompt_table, of_title)])
        for title, of_title in shown.items()
        if of_title
    ]


def _prompt_table(lines: Lines) -> Table:
    """Return the table of the responses to a prompt, one of each model, with their scores."""
    # A response that nothing scores has no score.
    keys = [key for key in ("score", "judge_score") if all(key in line for line in lines)]
    rows = [
        [
            name_of("models", line["model"]),
            line["response"].strip(),
            *(figure_cell(key, Figure(line[key])) for key in keys),
        ]
        for line in lines
    ]
    head = [translate("model"), translate("response"), *map(label_of, keys)]
    return Table(lines[0]["prompt"].strip(), head, rows, has_texts=True)


def response_page(job: Job[Any]) -> Page:
    """Return the page of prompt_eval: a table for each prompt, with a row for each model."""
    # Lines of a set, a prompt and a model follow each other.
    lines = read_json_lines(job.inputs["results"] / "responses.jsonl")
    settings = job.lineage[job.spec["inputs"]["results"]["path"]]["settings"]
    head = [translate("model"), translate("greedy"), translate("sampled")]
    sections = []
    for name, of_set in groupby(lines, itemgetter("set")):
        tables = []
        for prompt, of_prompt in groupby(of_set, itemgetter("prompt")):
            rows = [
                [model, *(line["text"].strip() + " […]" * (not line["ended"]) for line in of_model)]
                for model, of_model in groupby(of_prompt, itemgetter("model"))
            ]
            tables.append(Table(prompt, head, rows, has_texts=True))
        sections.append(Section(name, tables=tables))
    title = f"{job.settings.stage}/{job.settings.name}"
    notes = [translate("prompt_eval_note", **settings)]
    return Page(translate("prompt_eval"), title, sections, notes=notes)


def score_page(job: Job[Any]) -> Page:
    """Return the page of rw_eval: a table for each set, with a row for each pair.

    A positive margin is better, a negative one worse.
    """
    # Lines of a set follow each other.
    lines = read_json_lines(job.inputs["results"] / "scores.jsonl")
    metrics = read_json(job.inputs["results"] / "metrics.json")
    names = ("prompt", "chosen", "score", "rejected", "score", "margin", "base_margin")
    sections = []
    for name, of_set in groupby(lines, itemgetter("set")):
        rows = []
        for number, line in enumerate(of_set, start=1):
            chosen, rejected, base = (
                figure_cell("score", Figure(line[key]))
                for key in ("chosen_score", "rejected_score", "base_margin")
            )
            # Its interval is the number itself: it is marked unless it is rounding.
            margin = Figure(line["margin"], [line["margin"]] * 2, scale=abs(line["chosen_score"]))
            marked = figure_cell("score", margin)._replace(interval="")
            texts = line["prompt"], line["chosen"], chosen, line["rejected"], rejected
            rows.append([str(number), *texts, marked, base])
        table = Table("", ["", *map(translate, names)], rows, has_texts=True)
        sections.append(Section(name, tables=[table]))
    cards = {
        label_of(path): figure_cell(path, figure)
        for path in ("accuracy", "base.accuracy", "ties")
        if (figure := read_figure(metrics, path))
    }
    title = f"{job.settings.stage}/{job.settings.name}"
    return Page(translate("rw_eval"), title, sections, cards)
