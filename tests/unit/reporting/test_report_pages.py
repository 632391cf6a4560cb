"""The pages of a report: results, responses and costs."""

import json
import re

import pytest

from snakechat.reporting.costs import UNKNOWN, read_runs, run_cells, write_costs
from snakechat.reporting.response_examples import write_responses
from snakechat.reporting.results import (
    pair_table,
    recipe_rows,
    response_table,
    summary,
    win_rates_by_length,
    win_table,
)


def responses_of(score, length):
    """Metrics of the responses of a model."""
    return {"score": score, "length": length, "ended_by_eos": 1.0, "kl_to_sft": 0.25}


def wins(mean, **more):
    """Win rate of a model."""
    return {"mean": mean, "interval_95": [mean - 0.125, mean + 0.125], "longer": 0.5, **more}


MODELS = {
    "rlhf": responses_of(3.0, 20.0),
    "base": responses_of(0.0, 30.0),
    "sft": responses_of(1.0, 10.0),
    "dpo/tiny": responses_of(2.0, 12.0),
}
METRICS = {
    **MODELS,
    "num_prompts": 1000,
    "num_generations": 2,
    "intervals_95": {
        model: {name: [value - 0.5, value + 0.5] for name, value in metrics.items()}
        for model, metrics in MODELS.items()
    },
    "score_difference": {"mean": 2.0, "interval_95": [1.5, 2.5]},
    "wins": {
        "sft": {"base": {"score": wins(0.625)}},
        "rlhf": {
            "sft": {"judge_score": wins(0.5), "score": wins(0.75, when_longer=1.0)},
            "base": {"score": wins(0.875)},
        },
        "dpo/tiny": {"sft": {"score": wins(0.25)}},
    },
}
REWARD = {
    "pairs": 400,
    "accuracy": 0.9675,
    "ties": 0.0,
    "longer_wins_accuracy": 0.5,
    "calibration_error": 0.25,
    "by_dataset": {"a": {"pairs": 100, "accuracy": 1.0}},
}

# --- results --------------------------------------------------------------------------------


def test_the_main_results_are_sentences():
    assert list(summary({"reward": REWARD, "rlhf": METRICS})) == [
        "The reward model ranks 96.8 % of 400 held-out pairs correctly (95 % interval: 94.5 % to"
        " 98.1 %).",
        "Responses of the RLHF model win against those of the SFT model in 75.0 % of comparisons by"
        " score (95 % interval: 62.5 % to 87.5 %).",
        "Responses of the RLHF model win against those of the SFT model in 50.0 % of comparisons by"
        " judge (95 % interval: 37.5 % to 62.5 %).",
    ]
    # Without a reward model.
    assert len(list(summary({"rlhf": METRICS}))) == 2


def test_the_models_of_a_recipe_come_in_the_order_of_training():
    title, head, rows = response_table(METRICS)
    assert title == "Responses to 1,000 held-out prompts, 2 of each model to each prompt"
    assert head == ["", "base", "SFT", "RLHF", "dpo/tiny", "RLHF - SFT"]
    table = {label: cells for label, *cells in rows}
    assert table["score"][2:] == ["3 (2.5 … 3.5)", "2 (1.5 … 2.5)", "2 (1.5 … 2.5)"]
    # Metrics that were not computed have no row and no difference.
    assert "correct (fraction)" not in table
    assert table["response length (tokens)"][-1] == ""


def test_win_rates_of_each_pair_of_models():
    _, head, rows = win_table(METRICS)
    assert [row[0] for row in rows] == [
        "SFT against base, by score",
        "RLHF against SFT, by score",
        "RLHF against SFT, by judge",
        "RLHF against base, by score",
        "dpo/tiny against SFT, by score",
    ]
    assert rows[1][1:] == ["0.75 (0.625 … 0.875)", 0.5, 1.0, None]
    assert len(head) == len(rows[1])


def test_win_rates_by_length_include_sft_as_a_tie_with_itself():
    assert win_rates_by_length(METRICS) == {
        "by score": {
            "SFT": (10, [9.5, 10.5], 0.5, None),
            "RLHF": (20, [19.5, 20.5], 0.75, [0.625, 0.875]),
            "dpo/tiny": (12, [11.5, 12.5], 0.25, [0.125, 0.375]),
        },
        "by judge": {
            "SFT": (10, [9.5, 10.5], 0.5, None),
            "RLHF": (20, [19.5, 20.5], 0.5, [0.375, 0.625]),
        },
    }


def test_accuracies_have_intervals_and_each_of_several_datasets_its_row():
    title, _, rows = pair_table(REWARD, "Reward model")
    assert title == "Reward model on 400 held-out pairs"
    assert [row[0] for row in rows] == [
        "accuracy",
        "accuracy of choosing the longer response",
        "ties (fraction)",
        "accuracy on a",
        "expected calibration error",
    ]
    assert rows[0][1] == "0.9675 (0.9452 … 0.9809)"


def test_the_reward_functions_of_a_recipe_are_listed_with_their_weights():
    settings = {"algorithm": "rloo", "seed": 1234, "actor": "a", "reward": None}
    settings["reward_functions"] = {"length": -0.5, "right": 1}
    lineage = {"output/rlhf/mine": {"rule": "train_rlhf", "name": "mine", "settings": settings}}
    assert recipe_rows("mine", lineage)[2:] == [
        ["seed", "1234"],
        ["SFT model", "sft/a"],
        ["reward model", "none"],
        ["reward functions", "-0.5 * length, 1 * right"],
    ]


def test_changes_that_a_person_accepted_are_listed():
    settings = {"algorithm": "rloo", "seed": 1, "actor": "a", "reward": "b", "reward_functions": {}}
    change = {"date": "2026-01-02", "because": "same losses", "changes": ["program x.py changed"]}
    lineage = {
        "output/rlhf/mine": {"rule": "train_rlhf", "name": "mine", "settings": settings},
        "output/sft/a": {"rule": "train_sft", "name": "a", "accepted": [change]},
    }
    assert recipe_rows("mine", lineage)[-1] == [
        "accepted: train_sft a",
        "2026-01-02: same losses (program x.py changed)",
    ]


# --- responses ------------------------------------------------------------------------------


def lines_of(responses):
    """Lines of responses.jsonl, from (prompt, response, score) of each response by model."""
    return [
        {"model": model, "prompt": prompt, "response": response, "score": score}
        for model, of_model in responses.items()
        for prompt, response, score in of_model
    ]


def page_of(folder, responses, num_generations=1):
    """The page of responses."""
    write_responses(folder / "responses.html", "tiny", lines_of(responses), num_generations)
    return (folder / "responses.html").read_text()


def test_markup_in_responses_is_text(tmp_path):
    attack = "</td><script>alert(1)</script>\n\nHuman: and now?\n\nAssistant: <b>"
    page = page_of(tmp_path, {"sft": [("p & q", "fine", 1.0)], "rlhf": [("p & q", attack, 0.5)]})
    assert "<script" not in page and "<b>" not in page
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt;\n\nHuman: and now?\n\nAssistant: &lt;b&gt;"
    assert escaped in page and "p &amp; q" in page


def test_first_prompts_and_those_with_the_largest_decrease_are_shown(tmp_path):
    prompts = [f"prompt {number}" for number in range(20)]
    # Two responses to each; RLHF scores higher, except on prompts 15 to 18.
    scores = {15: -1, 16: -4, 17: -2, 18: -3}
    responses = {
        "sft": [(p, f"sft {p} {s}", 0.0) for p in prompts for s in "ab"],
        "rlhf": [
            (p, f"rlhf {p} {s}", scores.get(row, 1)) for row, p in enumerate(prompts) for s in "ab"
        ],
    }
    page = page_of(tmp_path, responses, num_generations=2)
    shown = re.findall(r"<caption>prompt (\d+)</caption>", page)
    assert shown == [*map(str, range(10)), "16", "18", "17"]
    assert "rlhf prompt 3 a" in page and "rlhf prompt 3 b" not in page


@pytest.mark.parametrize(("score", "shown"), [(0.0, ["p", "q", "q"]), (1.0, ["p", "q"])])
def test_only_prompts_with_a_lower_score_are_decreases(tmp_path, score, shown):
    responses = {
        "sft": [("p", "a", 1.0), ("q", "b", 1.0)],
        "rlhf": [("p", "c", 1.0), ("q", "d", score)],
    }
    page = page_of(tmp_path, responses)
    assert re.findall("<caption>(.)</caption>", page) == shown
    assert ("decreased most" in page) == (score < 1)


# --- costs ----------------------------------------------------------------------------------


def test_costs_are_those_of_the_runs_that_made_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {"seconds": 61, "peak_memory_mb": 1234, "started": "2026-01-02T03:04:05", "host": "here"}
    lineage = {}
    for name, recorded in (("data", "a"), ("sft", "other"), ("rlhf", None)):
        lineage[name] = {"spec": "a", "inputs": []}
        if recorded:
            (tmp_path / f"{name}.run.json").write_text(json.dumps(run | {"spec": recorded}))
    runs = read_runs(lineage)
    assert runs == {"data": run | {"spec": "a"}, "sft": None, "rlhf": None}
    cells = ["2026-01-02 03:04", "0:01:01", 1234, None, None, None, "here"]
    assert run_cells(runs["data"]) == cells
    assert run_cells(None)[0] == UNKNOWN
    runs["output/rlhf/tiny"] = None
    write_costs(tmp_path / "costs.html", "tiny", runs)
    assert "Total time of all jobs: 0:01:01." in (tmp_path / "costs.html").read_text()
