"""Rows of datasets, and their records."""

import pytest
import yaml

from conftest import ROOT
from snakechat.data.cells import BadRow, DroppedRow
from snakechat.data.formats import columns_of, record_of
from snakechat.data.records import texts_of

DATASETS = yaml.safe_load((ROOT / "config.yaml").read_text())["datasets"]


def read(row, format, **columns):
    """Return the texts of a row's record, with the default columns unless others are given."""
    return texts_of(record_of(row, format, columns_of(format, columns or None)))


def bad(row, format, **columns):
    with pytest.raises(BadRow) as error:
        read(row, format, **columns)
    assert "\n" not in str(error.value)
    return str(error.value)


def dropped(row, format, **columns):
    with pytest.raises(DroppedRow) as reason:
        read(row, format, **columns)
    return str(reason.value)


def question(text):
    return f"\n\nHuman: {text}\n\nAssistant:"


def messages(*turns):
    """Return turns as messages with role and content."""
    return [{"role": role, "content": text} for role, text in turns]


DIALOGUE = "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: Name a fruit."
PLAIN = {
    "prompt": f"{DIALOGUE}\n\nAssistant:",
    "chosen": " An apple.",
    "rejected": " A stone.",
}
QUESTION = [("user", "Hello."), ("assistant", "Hi."), ("user", "Name a fruit.")]
PLAIN_RECORD = (f"{DIALOGUE}\n\nAssistant:", " An apple.", " A stone.")
ULTRAFEEDBACK = {
    "prompt": "Name a fruit.",
    "chosen": messages(*QUESTION, ("assistant", "An apple.")),
    "rejected": messages(*QUESTION, ("assistant", "A stone.")),
    "score_chosen": 7.0,
}
