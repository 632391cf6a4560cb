"""Time, memory, precision and recall of the filters of rows, on data with planted duplicates.

    python tests/benchmarks/filters.py [--rows 100000]

Of ten rows, one is a copy of an earlier row with some words changed, and one is an exact copy. The
texts have 150 words of a Zipf distribution, so that unrelated rows share frequent words. A near
duplicate is a row whose Jaccard index of the sets of three successive words, computed exactly, with
the row that it was copied from is at least 0.8. Each filter runs alone. Prints JSON.
"""

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.data.records import RecordWriter, read_records  # noqa: E402
from snakechat.data.row_filters import SHINGLE, make_filters, ngrams, tokens_of  # noqa: E402

THRESHOLD = 0.8
WORDS = 150
FILTERS = {
    "none": {},
    "characters": {"characters": {"prompt": [1, 10_000], "response": [1, 10_000]}},
    "words": {},
    "languages": {"languages": ["en"]},
    "decontaminate": {},
    "exact_duplicates": {"exact_duplicates": True},
    "near_duplicates": {"near_duplicates": THRESHOLD},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        truth = write_rows(Path(folder), rows)
        results = {"rows": rows, "words_per_row": WORDS}
        for name, settings in FILTERS.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(run, (Path(folder), name, settings))
            removed = set(found.pop("removed"))
            if name == "near_duplicates":
                similarities = truth["similarities"]
                copies = {row for row, value in similarities.items() if value >= THRESHOLD}
                others = [similarities.get(row, 0) for row in removed - copies]
                found["most_similar_of_the_missed"] = max(
                    (similarities[row] for row in copies - removed), default=None
                )
                found["least_similar_of_the_removed"] = min(others, default=None)
                found["precision"] = len(removed & copies) / len(removed)
                found["recall"] = len(removed & copies) / len(copies)
                found["duplicates"] = len(copies)
            if name == "exact_duplicates":
                found["all_found_and_no_others"] = removed == truth["exact"]
            results[name] = found
    print(json.dumps(results, indent=1))


def write_rows(folder, rows):
    """Write the rows and an evaluation set.

    Return the numbers of exact duplicates, and the similarity of each copy to its source by number.
    """
    rng = random.Random(1)
    words = [f"word{number}" for number in range(30_000)]
    weights = [1 / (number + 1) for number in range(len(words))]
    originals, similarities, exact = [], {}, set()
    with RecordWriter(folder / "train.parquet") as writer:
        for number in range(rows):
            kind = number % 10
            if kind in (4, 9):
                source = rng.choice(originals)
                text = list(source)
                if kind == 4:
                    for place in rng.sample(range(WORDS), rng.randrange(1, 15)):
                        text[place] = rng.choice(words)
                else:
                    exact.add(number)
                similarities[number] = round(similarity(source, text), 4)
            else:
                text = rng.choices(words, weights, k=WORDS)
                originals.append(text)
            writer.write((" ".join(text[:50]), " ".join(text[50:]), None))
    (folder / "bench").mkdir()
    with RecordWriter(folder / "bench/train.parquet") as writer:
        for _ in range(1000):
            writer.write((" ".join(rng.choices(words, k=WORDS)), None, None))
    (folder / "words.txt").write_text("".join(f"forbidden{number}\n" for number in range(1000)))
    return {"exact": exact, "similarities": similarities}


def similarity(first, second):
    """Return the Jaccard index of two lists of words."""
    first, second = (ngrams(tokens_of(" ".join(text)), SHINGLE) for text in (first, second))
    return len(first & second) / len(first | second)


def run(folder, name, settings):
    """Run one filter on all rows in a new process."""
    words = folder / "words.txt" if name == "words" else None
    sets = {"bench": folder / "bench"} if name == "decontaminate" else {}
    filters = list(make_filters(settings, words, sets).values())
    before, removed = time.perf_counter(), []
    for number, record in enumerate(read_records(folder / "train.parquet")):
        if any(reason(record) is not None for reason in filters):
            removed.append(number)
    return {
        "seconds": round(time.perf_counter() - before, 1),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "removed": removed,
    }


if __name__ == "__main__":
    main()
