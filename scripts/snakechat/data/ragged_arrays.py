"""Token ids on disk: ragged arrays, read by memory map.

A ragged array NAME consists of two files. NAME.ids.npy holds the ids of all rows, concatenated, in
the smallest unsigned type that fits the vocabulary; NAME.offsets.npy (int64, rows + 1) holds the
bounds of the rows: row i is ids[offsets[i]:offsets[i + 1]]. There is no padding on disk.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

# Positions of the two files in the lists of RaggedWriter.
IDS, OFFSETS = 0, 1


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
    """Return the file with the tokens of each response before truncation: int32 [A, n]."""
    return folder / f"{split}.whole_lengths.npy"


class RaggedWriter:
    """Write a ragged array batch by batch; a context manager.

    Args:
        folder: Folder of the array's files.
        name: Name of the array.
        vocab_size: Size of the vocabulary, which determines the type of the ids.
    """

    def __init__(self, folder: str | Path, name: str, vocab_size: int) -> None:
        self.paths = [Path(folder, f"{name}.{kind}.npy") for kind in ("ids", "offsets")]
        self.dtypes = [np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32), np.dtype("i8")]
        self.lengths = [0, 0]
        self.files: list[BinaryIO] = []

    def __enter__(self) -> Self:
        self.files = [path.open("wb") for path in self.paths]
        self._write_headers()
        self._append(OFFSETS, np.zeros(1, np.int64))
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Headers have a fixed size: numpy pads them for any number of rows.
        self._write_headers()
        for file in self.files:
            file.close()

    def _write_headers(self) -> None:
        for file, dtype, length in zip(self.files, self.dtypes, self.lengths, strict=True):
            header = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, header)

    def _append(self, which: int, values: np.ndarray) -> None:
        # Not ndarray.tofile: see save_array.
        self.files[which].write(values.data)
        self.lengths[which] += len(values)

    def write(self, rows: Sequence[Sequence[int]]) -> None:
        """Append rows, each a list of ids."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        self._append(OFFSETS, self.lengths[IDS] + np.cumsum(lengths))
        ids = chain.from_iterable(rows)
        self._append(IDS, np.fromiter(ids, self.dtypes[IDS], int(lengths.sum())))


class Ragged:
    """A ragged array on disk. array[i] holds the ids of row i, a view of the mapped file."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.ids = np.load(Path(folder, f"{name}.ids.npy"), mmap_mode="r", allow_pickle=False)
        self.offsets = np.load(
            Path(folder, f"{name}.offsets.npy"), mmap_mode="r", allow_pickle=False
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
