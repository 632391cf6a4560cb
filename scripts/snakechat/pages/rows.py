"""Rows as they are trained, by token, as tables of a page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from snakechat.data.ragged_arrays import Ragged, optional_ragged, whole_lengths_path
from snakechat.pages.metrics import translate
from snakechat.pages.page import Table, Token, Tokens
from snakechat.workflow.errors import InputError

# Responses of tokenized rows.
RESPONSES = ("chosen", "rejected")
# The text of a token may depend on as many tokens before it: on bytes of one character, say.
CONTEXT = 8


def row_reader(
    folder: Path, split: str, tokenizer: Path, whole: bool = False
) -> Callable[[int], dict[str, Tokens]]:
    """Return a function of the number of a row that returns its prompt and responses, by field.

    Args:
        folder: Result of the job that tokenized the phase.
        split: train or eval.
        tokenizer: A folder with the tokenizer.json that the rows have their ids from.
        whole: Whether the loss counts the tokens of prompts, too (train_on: all_tokens).

    Raises:
        InputError: A file is missing.
    """
    file = tokenizer / "tokenizer.json"
    names = [name for name in RESPONSES if (folder / f"{split}.{name}.ids.npy").exists()]
    if not file.exists() or not (folder / f"{split}.prompt.ids.npy").exists():
        raise InputError(
            f"{folder if file.exists() else file}: expected the {split} split of a tokenized phase"
            " with its tokenizer, such as output/tokens/sft/NAME: build it first"
        )
    reader = Tokenizer.from_file(str(file))
    fields = {name: Ragged(folder, f"{split}.{name}") for name in ("prompt", *names)}
    # Of recipes with train_on: all_turns.
    trained = optional_ragged(folder, f"{split}.trained")
    lengths = whole_lengths_path(folder, split)
    whole_lengths = np.load(lengths, mmap_mode="r") if lengths.exists() else []

    def row(number: int) -> dict[str, Tokens]:
        found = {}
        totals = {name: of[number] for name, of in zip(names, whole_lengths, strict=False)}
        for name, of_field in fields.items():
            ids = of_field[number].tolist()
            counts = [name in RESPONSES or whole] * len(ids)
            if name == "chosen" and trained is not None:
                counts = trained[number].astype(bool).tolist()
            is_cut = totals.get(name, 0) > len(ids)
            kept = translate("kept_tokens", kept=len(ids), total=totals[name]) if is_cut else ""
            found[name] = Tokens([*_tokens(reader, ids, counts)], kept)
        return found

    return row


def _tokens(tokenizer: Tokenizer, ids: list[int], counts: Sequence[bool]) -> Iterator[Token]:
    """Yield the tokens of a text; tokens that end in the middle of a character are joined."""
    added = tokenizer.get_added_tokens_decoder()
    start = 0
    for end in range(1, len(ids) + 1):
        context, whole = (
            tokenizer.decode(ids[max(start - CONTEXT, 0) : stop], skip_special_tokens=False)
            for stop in (start, end)
        )
        text = whole[len(context) :]
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(ids):
            is_special = ids[start] in added and added[ids[start]].special
            yield Token(text, any(counts[start:end]), is_special)
            start = end


def row_tables(read_row: Callable[[int], dict[str, Tokens]], numbers: Iterable[int]) -> list[Table]:
    """Return a table of each of some rows, with a line for its prompt and each response."""
    note = translate("rows_note")
    return [
        Table(translate("row", number=number), [], [*read_row(number).items()], note)
        for number in numbers
    ]
