"""Token ids on disk: ragged arrays, read by memory map.

A ragged array NAME consists of two files. NAME.ids.npy holds the ids of all rows, concatenated, in
the smallest unsigned type that fits the vocabulary; NAME.offsets.npy (int64, rows + 1) holds the
bounds of the rows: row i is ids[offsets[i]:offsets[i + 1]]. There is no padding on disk.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array in numpy's format, as numpy.save does.

    On a full disk, numpy.save truncates arrays of less than 4 KB without an error, and its error
    for larger ones does not name the cause (numpy 2.4).

    Raises:
        OSError: The file cannot be written.
    """
    values = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
        file.write(values.data)


def whole_lengths_path(folder: Path, split: str) -> Path:
    """Return the file with the tokens of each response before truncation.

    Its array is int32 [A, n] for n rows with A responses each.
    """
    return folder / f"{split}.whole_lengths.npy"


def read_statistics(tokens: Path, split: str) -> dict[str, Any]:
    """Return the statistics of a split of a tokenized phase.

    Among them are the `template` of the rows, the `weights` of datasets, and the rows that are
    `kept_of` each, in the order in which the arrays hold them.
    """
    return dict(json.loads((tokens / "stats.json").read_text())[split])


@contextmanager
def open_ragged(
    folder: str | Path, name: str, vocab_size: int
) -> Iterator[Callable[[Sequence[Sequence[int]]], None]]:
    """Open a ragged array for writing; yield a function that appends rows, each a list of ids."""
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    lengths = [np.zeros(1, np.int64)]
    with Path(folder, f"{name}.ids.npy").open("wb") as file:

        def write_header(length: int) -> None:
            # It has a fixed size: numpy pads it for any number of ids.
            file.seek(0)
            header = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)

        def write(rows: Sequence[Sequence[int]]) -> None:
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            ids = np.fromiter(chain.from_iterable(rows), dtype, int(lengths[-1].sum()))
            # Not ndarray.tofile: see save_array.
            file.write(ids.data)

        write_header(0)
        yield write
        offsets = np.concatenate(lengths).cumsum()
        write_header(int(offsets[-1]))
    save_array(Path(folder, f"{name}.offsets.npy"), offsets)


class Ragged:
    """A ragged array on disk. array[i] holds the ids of row i, a view of the mapped file."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.ids, self.offsets = (
            np.load(Path(folder, f"{name}.{part}.npy"), mmap_mode="r", allow_pickle=False)
            for part in ("ids", "offsets")
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of ids of each row (int64)."""
        return np.diff(self.offsets)


def optional_ragged(folder: Path, name: str) -> Ragged | None:
    """Return a ragged array, or None if the folder has none of this name."""
    return Ragged(folder, name) if Path(folder, f"{name}.ids.npy").exists() else None
