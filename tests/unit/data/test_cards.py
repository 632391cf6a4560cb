"""Metadata of the cards of datasets and models."""

import pytest

from snakechat.data.cards import MAX_BYTES, card_facts

UNKNOWN = {"licence": None}


@pytest.mark.parametrize(
    ("card", "facts"),
    [
        ("---\nlicense: cc-by-4.0\n---\n# Mine", {"licence": "cc-by-4.0"}),
        ("---\nlicense: other\nlicense_name: qwen-research\n---\n", {"licence": "qwen-research"}),
        ("# Mine", UNKNOWN),
        ("---\nlicense: [mit, opt]\n---\n", UNKNOWN),
        ("---\nlicense: [mit\n---\n", UNKNOWN),
        ("---\nlicense: 'mit | [x](http://x)'\n---\n", UNKNOWN),
        ("---\nlicense: mit\n", UNKNOWN),
        ("---\nx: " + "[" * 100_000 + "\n---\n", UNKNOWN),
        ("---\nlanguage: en\n---\n", UNKNOWN | {"languages": ["en"]}),
        ("---\nlanguage: [zh-Hant, false, '<b>']\n---\n", UNKNOWN | {"languages": ["zh-Hant"]}),
        ("# " + "x" * MAX_BYTES, UNKNOWN),
    ],
)
def test_facts_are_words_of_the_metadata(tmp_path, card, facts):
    assert card_facts(tmp_path) == UNKNOWN
    (tmp_path / "README.md").write_bytes(card.encode())
    assert card_facts(tmp_path) == facts


def test_a_card_that_is_no_text_declares_nothing(tmp_path):
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert card_facts(tmp_path) == UNKNOWN
