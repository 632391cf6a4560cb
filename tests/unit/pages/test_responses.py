"""Pages of the prompts of users: responses of each model, scored pairs."""

from types import SimpleNamespace

from snakechat.pages.page import write_page
from snakechat.pages.responses import response_page, score_page
from snakechat.training.metric_logs import write_json, write_json_lines
from support.pages import texts_in

PROMPTS = ["I need a hat.", "Where is a\nplum?"]
SETTINGS = {"temperature": 1.0, "seed": 1, "max_response_length": 12}


def drawn(folder, page, stage, **files):
    """Return the page of a result with files: lines of NAME.jsonl, or the content of NAME.json."""
    for name, content in files.items():
        if isinstance(content, list):
            write_json_lines(folder / f"{name}.jsonl", content)
        else:
            write_json(folder / f"{name}.json", content)
    job = SimpleNamespace(
        settings=SimpleNamespace(stage=stage, name="tiny"),
        inputs={"results": folder},
        spec={"inputs": {"results": {"path": "results"}}},
        lineage={"results": {"settings": SETTINGS}},
    )
    write_page(folder / "page.html", "en", page(job))
    return (folder / "page.html").read_text(encoding="utf-8")


def test_each_prompt_has_a_table_with_a_row_for_each_model(tmp_path):
    lines = [
        {"set": "ours", "prompt": prompt, "model": model, "decoder": decoder}
        | {"text": f" {model} {decoder}\x07 ", "ended": decoder == "greedy"}
        for prompt in PROMPTS
        for model in ("base", "sft")
        for decoder in ("greedy", "sampled")
    ]
    page = drawn(tmp_path, response_page, "sft", responses=lines)
    assert texts_in(page, "caption") == PROMPTS
    assert texts_in(page, "th") == 2 * ["model", "greedy", "sampled", "base", "sft"]
    cells = [
        text
        for model in ("base", "sft")
        for text in (f"{model} greedy\\x07", f"{model} sampled\\x07 […]")
    ]
    assert texts_in(page, "td") == 2 * cells
    assert "A response has at most 12 tokens" in page


def test_a_margin_is_better_or_worse_unless_it_is_rounding(tmp_path):
    pairs = [(2.0, 1.0), (1.0, 1.0), (0.5, 2.5), (595.00001, 595.0)]
    lines = [
        {"set": "toy", "prompt": "A plum?", "chosen": "At the <market>.", "rejected": "No."}
        | {"chosen_score": chosen, "rejected_score": rejected, "margin": chosen - rejected}
        | {"base_margin": 0.25}
        for chosen, rejected in pairs
    ]
    metrics = {"pairs": 4, "accuracy": 0.5, "ties": 0.25, "base": {"accuracy": 1.0}}
    page = drawn(tmp_path, score_page, "reward", scores=lines, metrics=metrics)
    cells = texts_in(page, "td")
    rows = [cells[start : start + 7] for start in range(0, len(cells), 7)]
    assert [row[5] for row in rows] == ["+1.00▲", "0", "\N{MINUS SIGN}2.00▼", "+1.00e-05"]
    assert rows[0][6] == "0.250" and rows[0][1] == "At the <market>." and "<market>" not in page
    for shown in ("50.0", "accuracy of base", "100.0", "25.0"):
        assert shown in page
