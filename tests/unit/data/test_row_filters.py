"""Filters of rows."""

import random

import pytest

from snakechat.data.records import RecordWriter, record_digest
from snakechat.data.row_filters import bands_for, make_filters, near_filter, tokens_of
from snakechat.workflow.errors import InputError

ENGLISH = "The quick brown fox jumps over the lazy dog and runs away into the forest."
FRENCH = "Le renard brun saute par-dessus le chien paresseux et part dans la forêt."
CHINESE = "敏捷的棕色狐狸跳过了那只懒惰的狗。" * 3


def row(prompt, chosen=" Yes.", rejected=None):
    return f"\n\nHuman: {prompt}\n\nAssistant:", chosen, rejected


def removed(records, settings, words=None, evaluation_sets=()):
    """Return {row number: (filter, reason)} of the rows that filters remove."""
    filters = make_filters(settings, words, dict(evaluation_sets))
    found = {}
    for number, record in enumerate(records):
        for name, reason in filters.items():
            if (because := reason(record)) is not None:
                found[number] = (name, because)
                break
    return found


def test_bounds_of_characters():
    records = [("abc", "x", None), ("abcd", "x", None), ("abc", "x", "xyz"), ("abc", None, None)]
    assert removed(records, {"characters": {"prompt": [0, 3]}}) == {1: ("characters", "")}
    assert removed(records, {"characters": {"response": [1, 2]}}) == {2: ("characters", "")}


def test_words_are_whole_words_and_phrases(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("# names\nSecret\nred  herring  # a phrase\n坏蛋\n")
    records = [
        row("A SECRET?"),
        row("secretary"),
        row("Hi", "A red\nherring."),
        row("Hi", "Red fish."),
        row("他是坏蛋吗"),
        row("坏的蛋"),
    ]
    assert removed(records, {}, path).keys() == {0, 2, 4}
    path.write_text("# none\n")
    with pytest.raises(InputError, match=r"words.txt: expected a word per line, found none"):
        make_filters({}, path, {})


def test_languages():
    records = [row(ENGLISH), row(FRENCH), row(CHINESE, CHINESE), row("Bonjour")]
    found = removed(records, {"languages": ["en"]})
    assert found == {1: ("languages", "fr"), 2: ("languages", "zh")}
    assert removed(records, {"languages": ["en", "fr", "zh"]}) == {}
    with pytest.raises(InputError, match=r"filters.languages: xx is not known"):
        make_filters({"languages": ["xx"]}, None, {})


def test_rows_of_evaluation_sets(tmp_path):
    words = [f"w{number}" for number in range(40)]
    with RecordWriter(tmp_path / "train.parquet") as writer:
        writer.write(row("Name a fruit.", " Plum."))
        writer.write(row("Long", " ".join(words[:20])))
    records = [
        row("name a FRUIT", " Apple."),
        row("Name a fruit please.", " Plum."),
        # Thirteen words, and twelve of them.
        row("x " + " ".join(words[3:16])),
        row("x " + " ".join(words[3:15])),
        row("x", " ".join(words[20:])),
    ]
    found = removed(records, {}, evaluation_sets={"bench": tmp_path})
    assert found == {0: ("decontaminate", "bench"), 2: ("decontaminate", "bench")}


def test_exact_duplicates_name_the_first_row():
    records = [row("a"), row("b"), row("a"), row("a", " No."), row("a")]
    first = record_digest(records[0]).hex()
    found = removed(records, {"exact_duplicates": True})
    assert found == {2: ("exact_duplicates", first), 4: ("exact_duplicates", first)}
    assert removed(records, {"exact_duplicates": False}) == {}


def test_a_removed_row_is_not_the_first_of_duplicates():
    records = [("long prompt", "x", None), ("long prompt", "x", None)]
    settings = {"characters": {"prompt": [0, 5]}, "exact_duplicates": True}
    assert {name for name, _ in removed(records, settings).values()} == {"characters"}


def text_of(rng, number=120):
    return " ".join(f"w{rng.randrange(3000)}" for _ in range(number))


def jaccard(first, second):
    """The similarity that the filter estimates."""
    sets = []
    for record in (first, second):
        tokens = tokens_of(*record)
        sets.append({tuple(tokens[start : start + 3]) for start in range(len(tokens) - 2)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def planted(rng, originals=400):
    """Return rows of which every second one has a near duplicate, and the numbers of these."""
    records = [row(text_of(rng), text_of(rng)) for _ in range(originals)]
    copies = set()
    for number in range(0, originals, 2):
        words = records[number][1].split()
        for place in rng.sample(range(len(words)), 3):
            words[place] = "changed"
        copies.add(len(records))
        records.append((records[number][0], " ".join(words), None))
        # Half of the words are others: similar, and no duplicate.
        words[:60] = text_of(rng, 60).split()
        records.append((records[number][0], " ".join(words), None))
    return records, copies


def test_planted_near_duplicates_are_found_and_no_others():
    records, copies = planted(random.Random(1))
    assert all(jaccard(records[0], record) < 0.7 for record in records[1:400])
    found = removed(records, {"near_duplicates": 0.8}).keys()
    assert found == copies


def test_spelling_does_not_hide_near_duplicates():
    first = row("Where, exactly, is the “plum” sold today?", " At the market, near the harbour.")
    second = row("where exactly is the plum sold TODAY", " at the market near the harbour")
    near = near_filter(0.9)
    assert (near(first), near(second)) == (None, record_digest(first).hex())
    assert near(row("", "…")) is None


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.7, 0.8, 0.9, 0.95, 1])
def test_nearly_all_pairs_at_the_threshold_are_compared(threshold):
    bands = bands_for(threshold)
    assert 256 % bands == 0
    assert 1 - (1 - threshold ** (256 // bands)) ** bands >= 0.99
