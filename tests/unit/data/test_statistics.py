"""Statistics of a few rows, counted by hand."""

from snakechat.data.statistics import count_shared, dataset_statistics, fingerprint
from support.dialogues import make_record


def test_a_few_records_are_counted_as_by_hand():
    records = [
        ("Why?", " Because.", " No."),
        ("Why?", " Because.", " No."),
        ("How?", " So.", None),
        (" Why?\n", " Thus.", " Certainly not."),
    ]
    assert dataset_statistics(make_record(*texts) for texts in records) == {
        "rows": 4,
        # The prompts of the second and the fourth were there before.
        "repeated_prompts": 2,
        # Two of three pairs.
        "chosen_longer_share": 0.6667,
    }
    assert dataset_statistics([make_record("How?", None, " No.")]) == {
        "rows": 1,
        "repeated_prompts": 0,
    }


def test_fingerprints_ignore_whitespace_around_texts_only():
    assert fingerprint(" \n Why not?\t") == fingerprint("Why not?")
    texts = ["", "Why not?", "Why  not?", "why not?", "Why not", "为什么不呢?", "Why not?\0"]
    assert len({fingerprint(text) for text in texts}) == len(texts)


def test_fingerprints_are_the_same_in_every_process_and_fit_into_64_bits():
    # blake2b of no bytes, 8 bytes long.
    assert fingerprint("  ") == 0xE4A6A0577479B2B4
    assert all(0 <= fingerprint(str(number)) < 1 << 64 for number in range(1000))


def test_shared_counts_rows_and_not_prompts():
    assert count_shared([1, 1, 2, 3], [1, 3, 4]) == 3
    assert count_shared([1, 3, 4], [1, 1, 2, 3]) == 2
    assert count_shared([1, 2], [3]) == 0
    assert count_shared([], [1]) == count_shared([1], []) == 0
