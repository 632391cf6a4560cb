"""Ragged arrays on disk."""

import resource

import numpy as np
import pytest

from snakechat.data.ragged_arrays import Ragged, open_ragged, save_array


def write(folder, *pieces, vocab_size=300):
    with open_ragged(folder, "ids", vocab_size) as write_rows:
        for piece in pieces:
            write_rows(piece)
    return Ragged(folder, "ids")


def test_batches_are_read_as_one_array_of_views_that_cannot_be_written(tmp_path):
    pieces = [[[1, 2], []], [], [[3]], [[], []], [[4, 5, 6]]]
    ragged = write(tmp_path, *pieces)
    rows = [row for piece in pieces for row in piece]
    assert [ragged[row].tolist() for row in range(len(ragged))] == rows
    assert isinstance(ragged.ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        ragged[0][0] = 7


# From the first piece on the header would say 9 tokens; in the end the number has six digits.
@pytest.mark.parametrize("tokens", [0, 10, 123456])
def test_headers_have_the_number_of_tokens(tmp_path, tokens):
    write(tmp_path, [[7] * min(tokens, 9)], [[8] * (tokens - min(tokens, 9))])
    ids = np.load(tmp_path / "ids.ids.npy", allow_pickle=False)
    offsets = np.load(tmp_path / "ids.offsets.npy", allow_pickle=False)
    assert ids.tolist() == [7] * min(tokens, 9) + [8] * (tokens - min(tokens, 9))
    assert offsets.tolist() == [0, min(tokens, 9), tokens]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_ids_have_the_smallest_type_for_the_vocabulary(tmp_path, vocab_size, dtype):
    ragged = write(tmp_path, [[0, vocab_size - 1]], vocab_size=vocab_size)
    assert ragged.ids.dtype == dtype
    assert ragged[0].tolist() == [0, vocab_size - 1]


# numpy.save itself truncates the smaller one.
@pytest.mark.parametrize("number", [100, 5000])
def test_an_array_that_the_disk_cannot_hold_is_an_error(tmp_path, number):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_array(tmp_path / "rows.npy", np.zeros(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
