"""Filters of rows: lengths, words, languages, rows of evaluation sets, duplicates.

Each filter is called with the records in their order and names a reason to remove one. A row that
one filter removes is not shown to the next ones, so that a removed row never counts as the first of
several duplicates.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import py3langid
from rensa import RMinHash, RMinHashLSH

from snakechat.data.dialogues import MARKER
from snakechat.data.formats import Record
from snakechat.data.records import read_records, record_digest
from snakechat.data.statistics import fingerprint
from snakechat.workflow.errors import InputError

# Returns why a record is removed, as the digest of a row or the name of a dataset or language
# ("" if there is nothing to say); None if it stays.
Filter = Callable[[Record], str | None]

# Chinese and Japanese are written without spaces: each character is a token.
TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_]+")
# Tokens of a shingle of MinHash, and of an n-gram that a row shares with an evaluation set (Brown
# et al., Language Models are Few-Shot Learners, 2020, appendix C).
SHINGLE, NGRAM = 3, 13
# The standard error of an estimated similarity of 0.8 is 0.025.
PERMUTATIONS, SEED = 256, 42
# The share of the pairs at the threshold that are compared.
MIN_RECALL = 0.99
# A language is recognized in so many characters, and not in shorter texts.
LANGUAGE_CHARACTERS, MIN_LANGUAGE_CHARACTERS = 2000, 40


def tokens_of(*texts: str | None) -> list[str]:
    """Return the words of texts in one spelling, without the markers of turns."""
    words: list[str] = []
    for text in texts:
        if text is not None:
            plain = unicodedata.normalize("NFKC", MARKER.sub(" ", text)).casefold()
            words += TOKEN.findall(plain)
    return words


def ngrams(tokens: list[str], length: int) -> set[str]:
    """Return the sequences of so many tokens; the whole of a shorter text."""
    if not tokens:
        return set()
    starts = range(max(len(tokens) - length, 0) + 1)
    return {" ".join(tokens[start : start + length]) for start in starts}


def make_filters(
    settings: Mapping[str, Any], words: Path | None, evaluation_sets: Mapping[str, Path]
) -> dict[str, Filter]:
    """Return the filters of a dataset by name, in the order in which rows meet them.

    Args:
        settings: `filters` of the dataset.
        words: The file of words.
        evaluation_sets: The folders of the records of each evaluation set.

    Raises:
        InputError: The file of words has none, or a language is not known.
    """
    filters: dict[str, Filter] = {}
    if "characters" in settings:
        filters["characters"] = character_filter(settings["characters"])
    if words is not None:
        filters["words"] = word_filter(words)
    if "languages" in settings:
        filters["languages"] = language_filter(settings["languages"])
    if evaluation_sets:
        filters["decontaminate"] = overlap_filter(evaluation_sets)
    if settings.get("exact_duplicates"):
        filters["exact_duplicates"] = exact_filter()
    if "near_duplicates" in settings:
        filters["near_duplicates"] = near_filter(settings["near_duplicates"])
    return filters


def character_filter(bounds: Mapping[str, tuple[int, int]]) -> Filter:
    """Return the filter of rows whose prompt, or one of whose responses, is too short or long."""
    unbounded = (0, float("inf"))
    low_prompt, high_prompt = bounds.get("prompt", unbounded)
    low, high = bounds.get("response", unbounded)

    def reason(record: Record) -> str | None:
        prompt, *responses = record
        fits = low_prompt <= len(prompt) <= high_prompt
        fits &= all(low <= len(text) <= high for text in responses if text is not None)
        return None if fits else ""

    return reason


def word_filter(path: Path) -> Filter:
    """Return the filter of rows with one of the words or phrases in a file, one per line.

    Raises:
        InputError: The file is not text or has no words.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected a text file with a word per line") from None
    phrases = {tuple(tokens_of(line.partition("#")[0])) for line in lines} - {()}
    if not phrases:
        raise InputError(f"{path}: expected a word per line, found none")
    lengths = sorted({len(phrase) for phrase in phrases})

    def reason(record: Record) -> str | None:
        for text in record:
            tokens = tokens_of(text)
            for length in lengths:
                starts = range(len(tokens) - length + 1)
                if any(tuple(tokens[start : start + length]) in phrases for start in starts):
                    return ""
        return None

    return reason


def language_filter(languages: Iterable[str]) -> Filter:
    """Return the filter of rows in other languages than these; short rows stay.

    Raises:
        InputError: A language is not known.
    """
    allowed = set(languages)
    known = {language for language, _ in py3langid.rank("")}
    if unknown := sorted(allowed - known):
        raise InputError(
            f"filters.languages: {unknown[0]} is not known, expected codes of ISO 639-1, such as"
            f" en, zh (known: {', '.join(sorted(known))})"
        )

    def reason(record: Record) -> str | None:
        text = MARKER.sub(" ", " ".join(filter(None, record)))[:LANGUAGE_CHARACTERS]
        if len(text.strip()) < MIN_LANGUAGE_CHARACTERS:
            return None
        language, _ = py3langid.classify(text)
        return None if language in allowed else str(language)

    return reason


def overlap_filter(evaluation_sets: Mapping[str, Path]) -> Filter:
    """Return the filter of rows that share a prompt or 13 successive words with evaluation sets."""
    sets = {name: evaluation_ngrams(folder) for name, folder in evaluation_sets.items()}

    def reason(record: Record) -> str | None:
        prompt = tokens_of(record[0])
        found = {fingerprint(" ".join(prompt))}
        found.update(map(fingerprint, ngrams(tokens_of(*record), NGRAM)))
        return next((name for name, known in sets.items() if not known.isdisjoint(found)), None)

    return reason


def evaluation_ngrams(folder: Path) -> set[int]:
    """Return fingerprints of the prompts of records, and of 13 successive words of a row."""
    known: set[int] = set()
    for path in sorted(folder.glob("*.parquet")):
        for record in read_records(path):
            prompt, words = tokens_of(record[0]), tokens_of(*record)
            if prompt:
                known.add(fingerprint(" ".join(prompt)))
            if len(words) >= NGRAM:
                known.update(map(fingerprint, ngrams(words, NGRAM)))
    return known


def exact_filter() -> Filter:
    """Return the filter of rows with the texts of an earlier row."""
    known: set[bytes] = set()

    def reason(record: Record) -> str | None:
        digest = record_digest(record)
        if digest in known:
            return digest.hex()
        known.add(digest)
        return None

    return reason


def near_filter(threshold: float) -> Filter:
    """Return the filter of rows that are similar to an earlier row that stays.

    Similarity is the Jaccard index of the sets of three successive words (Broder, On the
    resemblance and containment of documents, 1997), estimated by MinHash.
    """
    index = RMinHashLSH(threshold, PERMUTATIONS, bands_for(threshold))
    kept: list[tuple[RMinHash, bytes]] = []

    def reason(record: Record) -> str | None:
        shingles = ngrams(tokens_of(*record), SHINGLE)
        if not shingles:
            return None
        [minhash] = RMinHash.from_token_sets([sorted(shingles)], PERMUTATIONS, SEED)
        for number in sorted(index.query(minhash)):
            other, digest = kept[number]
            if minhash.jaccard(other) >= threshold:
                return digest.hex()
        index.insert(len(kept), minhash)
        kept.append((minhash, record_digest(record)))
        return None

    return reason


def bands_for(threshold: float) -> int:
    """Return into how many bands MinHashes are divided.

    Two rows are compared if they agree in a whole band. More bands compare more pairs: the fewest
    that compare nearly all pairs at the threshold.
    """
    rows = PERMUTATIONS
    while rows > 1:
        bands = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= MIN_RECALL:
            return bands
        rows //= 2
    return PERMUTATIONS
