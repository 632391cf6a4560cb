"""Rows as they are trained, by token, as tables of a page."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from snakechat.data.ragged_arrays import Ragged, optional_ragged, whole_lengths_path
from snakechat.pages.metrics import translate
from snakechat.pages.page import Table, Token, Tokens
from snakechat.workflow.errors import InputError

RESPONSES = ("chosen", "rejected")
# The text of a token may depend on as many tokens before it: on bytes of one character, say.
CONTEXT = 8


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
        decode: Any = partial(self.tokenizer.decode, skip_special_tokens=False)
        start = 0
        for end in range(1, len(ids) + 1):
            context = list(ids[max(start - CONTEXT, 0) : start])
            text = decode([*context, *ids[start:end]])[len(decode(context)) :]
            if not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(ids):
                yield Token(text, any(counts[start:end]), ids[start] in self.special)
                start = end


def row_tables(rows: TokenizedRows, numbers: Sequence[int]) -> list[Table]:
    """Return a table of each of some rows, with a line for its prompt and each response."""
    note = translate("rows_note")
    return [
        Table(translate("row", number=number), [], [*rows.row(number).items()], note)
        for number in numbers
    ]
