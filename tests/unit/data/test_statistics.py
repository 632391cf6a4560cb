"""Statistics of a few rows, counted by hand, and of real datasets."""

import pytest

from snakechat.data.statistics import DatasetStatistics, count_shared, fingerprint
from support.dialogues import make_record

PAIR = ("\n\nHuman: Why?\n\nAssistant:", " Because.", " No.")


def summary(*records):
    statistics = DatasetStatistics()
    for texts in records:
        statistics.add(*make_record(*texts))
    return statistics.summary()


def test_a_few_records_are_counted_as_by_hand():
    assert summary(
        ("Why?", " Because.", " No."),
        ("Why?", " Because.", " No."),
        ("How?", " So.", None),
        (" Why?\n", " Thus.", " Certainly not."),
    ) == {
        "rows": 4,
        "pairs": 3,
        # Lengths in characters, including whitespace.
        "characters": {
            "prompt": {
                **{"p0": 4, "p1": 4, "p10": 4, "p50": 4, "p90": 6, "p99": 6, "p100": 6},
                "mean": 4.5,
            },
            "chosen": {
                **{"p0": 4, "p1": 4, "p10": 4, "p50": 9, "p90": 9, "p99": 9, "p100": 9},
                # (9 + 9 + 4 + 6) / 4
                "mean": 7.0,
            },
            "rejected": {
                **{"p0": 4, "p1": 4, "p10": 4, "p50": 4, "p90": 15, "p99": 15, "p100": 15},
                # (4 + 4 + 15) / 3
                "mean": 7.7,
            },
        },
        # Of the four prompts, the second and the fourth were there before.
        "repeated_prompts": 2,
        "repeated_rows": 1,
        "empty_prompt": 0,
        "empty_response": 0,
        "equal_responses": 0,
        "turns_in_response": 0,
        # Two of three pairs.
        "chosen_longer_share": 0.6667,
    }


@pytest.mark.parametrize(
    ("record", "counted"),
    [
        (PAIR, set()),
        (("", " a", " b"), {"empty_prompt"}),
        (("Why?", " a", " \n"), {"empty_response"}),
        (("Why?", " ", None), {"empty_response"}),
        # One row, though both of its responses are empty; and these are equal.
        (("Why?", " ", "\n"), {"empty_response", "equal_responses"}),
        (("Why?", " a", "a\n"), {"equal_responses"}),
        (("Why?", " a", " b\n\nAssistant: c"), {"turns_in_response"}),
        (("Why?", " a\n\nSystem: b", None), {"turns_in_response"}),
        # A marker follows an empty line.
        (("Why?", " a\nHuman: b", " The Human: b"), set()),
    ],
)
def test_odd_rows_are_counted_once_each(record, counted):
    found = summary(record, PAIR)
    names = ("empty_prompt", "empty_response", "equal_responses", "turns_in_response")
    assert {name for name in names if found[name]} == counted
    assert all(found[name] in (0, 1) for name in names)


def test_rows_with_texts_in_other_columns_differ():
    found = summary(("a", "b", "c"), ("a", "c", "b"), ("a", "b", None), ("a", "bc", None))
    assert found["repeated_rows"] == 0
    assert found["repeated_prompts"] == 3


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
