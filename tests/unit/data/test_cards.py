"""Metadata of the cards of datasets and models."""

import time

import pytest

from snakechat.data.hub import card_facts
from snakechat.pages.jobs import source_licenses

UNKNOWN = {"licence": None}


@pytest.mark.parametrize(
    ("card", "facts"),
    [
        # Identifiers of SPDX are converted to identifiers of the Hub.
        (b"---\nlicense: CC-BY-4.0\n---\n# Mine", {"licence": "cc-by-4.0"}),
        (
            b"---\nlicense: other\nlicense_name: qwen-research\n---\n",
            {"licence": "other (qwen-research)"},
        ),
        (b"# Mine", UNKNOWN),
        (b"---\nlicense: [mit\n---\n", UNKNOWN),
        (b"---\nlicense: 'mit | [x](http://x)'\n---\n", UNKNOWN),
        (b"---\nx: " + b"[" * 100_000 + b"\n---\n", UNKNOWN),
        # Numbers and aliases that would take hours.
        (b"---\nx: 1" + b":1" * 400_000 + b"\nlicense: mit\n---\n", UNKNOWN),
        (
            b"---\na: &a [1, 2]\n"
            + b"".join(b"%c: &%c [%b]\n" % (n, n, b"*%c," % (n - 1) * 9) for n in range(98, 120))
            + b"license: mit\n---\n",
            UNKNOWN,
        ),
    ],
)
def test_facts_are_words_of_the_metadata(tmp_path, card, facts):
    assert card_facts(tmp_path) == UNKNOWN
    (tmp_path / "README.md").write_bytes(card)
    assert card_facts(tmp_path) == facts


# Of the first keys, all have the same hash.
EQUAL_HASHES = ", ".join(f"{number * (2**61 - 1)}: 1" for number in range(15_000))


@pytest.mark.parametrize("text", ["!!timestamp x", f"{{{EQUAL_HASHES}}}"])
def test_metadata_that_cannot_be_read_are_none_at_once(tmp_path, text):
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nother: {text}\n---\n")
    start = time.process_time()
    assert card_facts(tmp_path) == {"licence": None}
    assert time.process_time() - start < 2


def test_sources_are_what_the_build_does_not_generate():
    lineage = {
        "output/data/toy": ("import_dataset", {"generate": "shop"}, {}),
        "output/data/far": ("import_dataset", {"hub": "a/b"}, {"licence": "mit"}),
        "output/models/base": ("fetch_model", {"hub": "a/c"}, {"licence": "opt"}),
        "output/models/tiny": ("init_model", {}, {}),
    }
    keys = ("rule", "settings", "facts")
    jobs = {path: dict(zip(keys, job, strict=True)) for path, job in lineage.items()}
    declared = {"output/models/base": "mit", "output/data/other": "mit"}
    expected = {"output/data/far": "mit", "output/models/base": "mit"}
    assert source_licenses(jobs, declared) == expected
