"""Ragged arrays on disk."""

import resource

import numpy as np
import pytest

from snakechat.data.tokens import Ragged, RaggedWriter, save_array


def write(folder, *pieces, vocab_size=300):
    with RaggedWriter(folder, "ids", vocab_size) as writer:
        for piece in pieces:
            writer.write(piece)
    return Ragged(folder, "ids")


def test_ragged_rows_are_read_as_written(tmp_path):
    rows = [[], [3, 1, 4], [], [], [1], [5, 9, 2, 6], []]
    ragged = write(tmp_path, rows)
    assert len(ragged) == 7
    assert [ragged[row].tolist() for row in range(7)] == rows
    assert ragged.lengths.tolist() == [0, 3, 0, 0, 1, 4, 0]


@pytest.mark.parametrize("pieces", [[], [[]], [[], []]], ids=str)
def test_ragged_array_without_rows(tmp_path, pieces):
    ragged = write(tmp_path, *pieces)
    assert len(ragged) == 0
    assert ragged.lengths.tolist() == []


def test_rows_without_tokens(tmp_path):
    ragged = write(tmp_path, [[], []], [[]])
    assert ragged.lengths.tolist() == [0, 0, 0]
    assert ragged[2].tolist() == []


def test_batches_are_read_as_one_array(tmp_path):
    pieces = [[[1, 2], []], [], [[3]], [[], []], [[4, 5, 6]]]
    ragged = write(tmp_path, *pieces)
    rows = [row for piece in pieces for row in piece]
    assert [ragged[row].tolist() for row in range(len(ragged))] == rows


def test_batches_do_not_change_the_files(tmp_path):
    rows = [[number % 300] * (number % 7) for number in range(1000)]
    folders = [tmp_path / name for name in ("whole", "pieces")]
    for folder, size in zip(folders, (1000, 13), strict=True):
        folder.mkdir()
        write(folder, *(rows[start : start + size] for start in range(0, 1000, size)))
    for name in ("ids.ids.npy", "ids.offsets.npy"):
        whole, pieces = ((folder / name).read_bytes() for folder in folders)
        assert whole == pieces


# From the first piece on the header would say 9 tokens; in the end the number has six digits.
@pytest.mark.parametrize("tokens", [0, 9, 10, 99, 100, 123456])
def test_headers_have_the_number_of_tokens(tmp_path, tokens):
    write(tmp_path, [[7] * min(tokens, 9)], [[8] * (tokens - min(tokens, 9))])
    ids = np.load(tmp_path / "ids.ids.npy", allow_pickle=False)
    offsets = np.load(tmp_path / "ids.offsets.npy", allow_pickle=False)
    assert ids.tolist() == [7] * min(tokens, 9) + [8] * (tokens - min(tokens, 9))
    assert offsets.tolist() == [0, min(tokens, 9), tokens]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(512, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_ids_have_the_smallest_type_for_the_vocabulary(tmp_path, vocab_size, dtype):
    ragged = write(tmp_path, [[0, vocab_size - 1]], vocab_size=vocab_size)
    assert ragged.ids.dtype == dtype
    assert ragged[0].tolist() == [0, vocab_size - 1]


def test_id_that_exceeds_the_type_is_an_error(tmp_path):
    with pytest.raises(OverflowError):
        write(tmp_path, [[65536]], vocab_size=300)


def test_rows_are_views_of_the_file_that_cannot_be_written(tmp_path):
    ragged = write(tmp_path, [[1, 2], [3]])
    assert isinstance(ragged.ids, np.memmap)
    assert np.shares_memory(ragged[1], ragged.ids)
    with pytest.raises(ValueError, match="read-only"):
        ragged[1][0] = 7


def test_token_has_two_bytes_and_row_eight(tmp_path):
    rows = [[1], [2] * 1000, [], [3] * 99]
    write(tmp_path, rows)
    # Each file has a header of 128 bytes, and offsets are one more than rows.
    assert (tmp_path / "ids.ids.npy").stat().st_size == 128 + 2 * 1100
    assert (tmp_path / "ids.offsets.npy").stat().st_size == 128 + 8 * 5


@pytest.mark.parametrize("shape", [(100,), (10, 10)])
def test_an_array_is_saved_as_by_numpy_and_a_full_disk_is_an_error(tmp_path, shape):
    array = np.arange(np.prod(shape)).reshape(shape)[..., : shape[-1] // 2]
    save_array(tmp_path / "ours.npy", array)
    np.save(tmp_path / "theirs.npy", array)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        with pytest.raises(OSError):
            save_array(tmp_path / "full.npy", array)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
