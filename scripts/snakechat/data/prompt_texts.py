"""Turns of the prompts of RLHF, and the cells that reward functions read (SPLIT.texts.parquet).

A reward model with another tokenizer and reward functions read text. The file has a row for each
row of the ragged array of prompts: `prompt`, its turns, and kept_NAME for each column that a
dataset of the blend keeps, with cells in JSON; null where a dataset does not have the column.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.dialogues import Turn, render_prompt
from snakechat.data.records import KEPT, TURNS, turns_of

PROMPT = "prompt"


def texts_path(folder: Path, split: str) -> Path:
    """Return the file with the texts of a split."""
    return folder / f"{split}.texts.parquet"


@contextmanager
def open_prompt_texts(
    folder: Path, split: str, kept: Sequence[str]
) -> Iterator[Callable[[dict[str, list[Any]], Sequence[bool]], None]]:
    """Open the texts of a split for writing; yield a function that appends records.

    The function takes a batch of records, and for each of them whether it is valid. Invalid ones
    are skipped.

    kept: Names of the columns that datasets keep.
    """
    columns = [(PROMPT, TURNS), *((f"{KEPT}{name}", pa.string()) for name in kept)]
    schema = pa.schema(columns)
    with pq.ParquetWriter(texts_path(folder, split), schema, compression="zstd") as file:

        def write(records: dict[str, list[Any]], is_valid: Sequence[bool]) -> None:
            nothing = [None] * len(is_valid)
            table = pa.table({name: records.get(name, nothing) for name in schema.names}, schema)
            file.write_table(table.filter(list(is_valid)))

        yield write


class PromptTexts:
    """The texts of a split, by row number. They are read when the first one is needed."""

    def __init__(self, folder: Path, split: str) -> None:
        self.path = texts_path(folder, split)

    @cached_property
    def table(self) -> pa.Table:
        """All texts. A table needs less memory than a list of Python texts."""
        return pq.read_table(self.path)

    def prompts(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return the texts of prompts, as the template `dialogue` renders them."""
        return list(map(render_prompt, self.turns(rows)))

    def turns(self, rows: Sequence[int] | np.ndarray) -> list[list[Turn]]:
        """Return the turns of prompts."""
        return list(map(turns_of, self._cells(PROMPT, rows)))

    def columns(self, rows: Sequence[int] | np.ndarray) -> dict[str, list[Any]]:
        """Return the kept cells of prompts by column; None where a dataset has no such column."""
        return {
            name.removeprefix(KEPT): [text and json.loads(text) for text in self._cells(name, rows)]
            for name in self.table.column_names
            if name.startswith(KEPT)
        }

    def _cells(self, name: str, rows: Sequence[int] | np.ndarray) -> list[Any]:
        cells: list[Any] = self.table.column(name).take(pa.array(rows, pa.int64())).to_pylist()
        return cells
