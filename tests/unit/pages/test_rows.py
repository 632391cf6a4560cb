"""Rows as they are trained, by token; pages of the prompts of users."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import draw_page
import show_rows
from snakechat.data.ragged_arrays import open_ragged, save_array, whole_lengths_path
from snakechat.pages import metrics
from snakechat.pages.page import Token, Tokens
from snakechat.pages.rows import row_reader
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import write_json, write_json_lines
from support.pages import texts_in


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
    stats = {"train": {"rows": 1, "truncated": {"end of response": 1}, "dropped": {}}}
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    return tmp_path, texts, ids


def text_of(tokens):
    return "".join(token.text for token in tokens.tokens)


def test_tokens_have_the_text_of_the_row_and_say_what_counts(phase, tokenizer):
    folder, texts, ids = phase
    row = row_reader(folder, "train", folder / "model")(0)
    assert text_of(row["prompt"]) == texts["prompt"]
    assert text_of(row["chosen"]) == texts["chosen"] + tokenizer.eos_token
    assert not any(token.counts for token in row["prompt"].tokens)
    assert all(token.counts for token in row["chosen"].tokens)
    assert [token.is_special for token in row["chosen"].tokens][-2:] == [False, True]
    assert row["chosen"].kept == "" and row["rejected"].kept.endswith(
        f"of {len(ids['rejected']) + 5} tokens"
    )
    whole = row_reader(folder, "train", folder / "model", whole=True)(0)
    assert all(token.counts for token in whole["prompt"].tokens)
    # train_on: all_turns chooses the turns that count.
    with open_ragged(folder, "train.trained", len(tokenizer)) as write_rows:
        write_rows([[0] * (len(ids["chosen"]) - 1) + [1]])
    row = row_reader(folder, "train", folder / "model")(0)
    assert [token.text for token in row["chosen"].tokens if token.counts] == [tokenizer.eos_token]


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
    page = (tmp_path / "page.html").read_text()
    assert summary in page and "<i>" not in page
    assert '<span class="token counts special">&lt;/s&gt;</span>' in page
    for number in ("1", "-1"):
        monkeypatch.setattr(sys, "argv", ["", str(folder), "--row", number])
        with pytest.raises(SystemExit):
            show_rows.main()
        assert f"{folder} has the train rows 0 to 0" in capsys.readouterr().err
    with pytest.raises(InputError, match="expected the eval split of a tokenized phase"):
        row_reader(folder, "eval", folder / "model")
    # Marks do not let through control characters.
    row = Tokens([Token("\x1b[2J", True, False)])
    assert "\x1b" not in "".join(show_rows.marked(row, show_rows.BRACKETS))


# --- prompts of users -----------------------------------------------------------------------------

PROMPTS = ["I need a hat.", "Where is a\nplum?"]
SETTINGS = {"temperature": 1.0, "seed": 1, "max_response_length": 12}


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """A function that draws a page of files: lines of NAME.jsonl, or the content of NAME.json."""
    # Restored at the end.
    monkeypatch.setattr(metrics, "_language", "en")

    def drawn(page, stage, language="en", **files):
        for name, content in files.items():
            if isinstance(content, list):
                write_json_lines(tmp_path / f"{name}.jsonl", content)
            else:
                write_json(tmp_path / f"{name}.json", content)
        settings = {"page": page, "stage": stage, "name": "tiny", "language": language}
        job = SimpleNamespace(
            settings=SimpleNamespace(**settings),
            inputs={"results": tmp_path},
            result=tmp_path,
            spec={"inputs": {"results": {"path": "results"}}},
            lineage={"results": {"settings": SETTINGS}},
        )
        draw_page.main(job)
        return (tmp_path / f"{page}.html").read_text(encoding="utf-8")

    return drawn


def test_each_prompt_has_a_table_with_a_row_for_each_model(draw):
    lines = [
        {"set": "ours", "prompt": prompt, "model": model, "decoder": decoder}
        | {"text": f" {model} {decoder}\x07 ", "ended": decoder == "greedy"}
        for prompt in PROMPTS
        for model in ("base", "sft")
        for decoder in ("greedy", "sampled")
    ]
    page = draw("prompt_eval", "sft", responses=lines)
    assert texts_in(page, "caption") == PROMPTS
    assert texts_in(page, "th") == 2 * ["model", "greedy", "sampled", "base", "sft"]
    cells = [
        text
        for model in ("base", "sft")
        for text in (f"{model} greedy\\x07", f"{model} sampled\\x07 […]")
    ]
    assert texts_in(page, "td") == 2 * cells
    assert "A response has at most 12 tokens" in page
    page = draw("prompt_eval", "sft", "zh", responses=lines)
    assert '<html lang="zh">' in page and texts_in(page, "th")[:3] == ["模型", "贪心解码", "采样"]
