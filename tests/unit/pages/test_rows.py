"""Rows as they are trained: tokens as text, those that count in the loss, truncation."""

import json
import sys

import numpy as np
import pytest

import show_rows
from snakechat.data.ragged_arrays import open_ragged, save_array, whole_lengths_path
from snakechat.pages.page import Page, Section, Token, Tokens, write_page
from snakechat.pages.rows import TokenizedRows, row_tables
from snakechat.workflow.errors import InputError


@pytest.fixture
def phase(tokenizer, tmp_path):
    """A tokenized phase of one pair, whose rejected response was truncated, and its tokenizer."""
    tokenizer.save_pretrained(tmp_path / "model")
    texts = {"prompt": "Human: <i>é</i>🙂", "chosen": " A hat.", "rejected": " No!"}
    ids = {
        name: tokenizer(text, add_special_tokens=False).input_ids for name, text in texts.items()
    }
    ids["chosen"].append(tokenizer.eos_token_id)
    for name, row in ids.items():
        with open_ragged(tmp_path, f"train.{name}", len(tokenizer)) as write_rows:
            write_rows([row])
    lengths = [[len(ids["chosen"])], [len(ids["rejected"]) + 5]]
    save_array(whole_lengths_path(tmp_path, "train"), np.array(lengths, np.int32))
    stats = {"train": {"truncated": {"end of response": 1}, "dropped": {}}}
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    return tmp_path, texts, ids


def text_of(tokens):
    return "".join(token.text for token in tokens.tokens)


def test_tokens_have_the_text_of_the_row_and_say_what_counts(phase, tokenizer):
    folder, texts, ids = phase
    row = TokenizedRows(folder, "train", folder / "model").row(0)
    assert text_of(row["prompt"]) == texts["prompt"]
    assert text_of(row["chosen"]) == texts["chosen"] + tokenizer.eos_token
    assert not any(token.counts for token in row["prompt"].tokens)
    assert all(token.counts for token in row["chosen"].tokens)
    assert [token.is_special for token in row["chosen"].tokens][-2:] == [False, True]
    assert row["chosen"].kept == "" and row["rejected"].kept.endswith(
        f"of {len(ids['rejected']) + 5} tokens"
    )
    whole = TokenizedRows(folder, "train", folder / "model", whole=True).row(0)
    assert all(token.counts for token in whole["prompt"].tokens)
    # Turns that count are those of train_on: all_turns.
    with open_ragged(folder, "train.trained", len(tokenizer)) as write_rows:
        write_rows([[0] * (len(ids["chosen"]) - 1) + [1]])
    row = TokenizedRows(folder, "train", folder / "model").row(0)
    assert [token.text for token in row["chosen"].tokens if token.counts] == [tokenizer.eos_token]


def test_text_of_rows_is_escaped_on_a_page(phase, tmp_path):
    folder, _, _ = phase
    rows = TokenizedRows(folder, "train", folder / "model")
    section = Section("rows", tables=row_tables(rows, [0]))
    write_page(tmp_path / "page.html", "en", Page("Rows", "mine", [section]))
    page = (tmp_path / "page.html").read_text()
    assert "<i>" not in page and '<span class="token counts special">&lt;/s&gt;</span>' in page


def test_a_terminal_shows_the_rows_with_marks(phase, monkeypatch, capsys, tmp_path):
    folder, texts, _ = phase
    result = (folder / "model").relative_to(folder.parents[1]).as_posix()
    spec = {"rule": "tokenize_sft", "settings": {"train_on": "all_tokens"}}
    manifest = {"spec": spec, "inputs": {"tokenizer": {"result": result}}}
    manifests = {folder / "manifest.json": manifest}
    monkeypatch.setattr(show_rows, "read_manifest", manifests.get)
    monkeypatch.setattr(sys, "argv", ["show_rows.py", str(folder)])
    show_rows.main()
    printed = capsys.readouterr().out
    summary = "1 rows; train_on: all_tokens; truncated: 1 end of response; dropped: none"
    assert f"train: {summary}\n" in printed
    assert f"prompt:\n⟦{texts['prompt']}⟧\n" in printed
    assert f"chosen:\n⟦{texts['chosen']}⟪</s>⟫⟧\n" in printed
    monkeypatch.setattr(sys, "argv", ["", str(folder), "--page", str(tmp_path / "page.html")])
    show_rows.main()
    assert summary in (tmp_path / "page.html").read_text()
    with pytest.raises(InputError, match="expected the eval split of a tokenized phase"):
        TokenizedRows(folder, "eval", folder / "model")


def test_marks_do_not_let_through_control_characters():
    row = Tokens([Token("\x1b[2J", True, False)])
    assert "\x1b" not in "".join(show_rows.marked(row, show_rows.BRACKETS))
