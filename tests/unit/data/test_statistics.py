"""Statistics of a few rows, counted by hand."""

from snakechat.data.records import dataset_statistics, fingerprint
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
    # blake2b of no bytes, 8 bytes long, in every process.
    assert fingerprint("  ") == 0xE4A6A0577479B2B4
    texts = ["", "Why not?", "Why  not?", "why not?", "Why not", "为什么不呢?", "Why not?\0"]
    assert len({fingerprint(text) for text in texts}) == len(texts)
