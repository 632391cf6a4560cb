"""The pages of a report: results, responses and costs."""

import json
import re

import pytest

from snakechat.reporting.costs import cost_sections, read_runs, run_cells, total_cost
from snakechat.reporting.data_plots import prompt_section
from snakechat.reporting.interpretation import pair_remarks, rlhf_remarks
from snakechat.reporting.recipe_rows import recipe_table
from snakechat.reporting.response_examples import write_responses
from snakechat.reporting.results import (
    difference_table,
    headline,
    pair_section,
    response_table,
    win_rates_by_length,
    win_table,
)
from support.specs import EMPTY_RUN


def english(text, **values):
    return text.format(**values)


def text_of(cell):
    """The text of a cell, with spaces and signs of a typewriter."""
    text = cell if isinstance(cell, str) else " ".join(filter(None, cell)) if cell else ""
    return text.replace("\xa0", " ").replace("\u2212", "-")


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


def test_the_headline_has_results_intervals_and_n():
    cards = [tuple(map(text_of, card)) for card in headline("rlhf", METRICS, english)]
    assert cards == [
        ("win rate of RLHF against SFT, by the judge", "50.0 %", "[37.5 %, 62.5 %]"),
        ("win rate of RLHF against SFT, by score", "75.0 %", "[62.5 %, 87.5 %]"),
        (
            "change from SFT to RLHF: score",
            "+2.00",
            "[+1.50, +2.50]; 1.00 with SFT, 3.00 with RLHF",
        ),
        ("KL to the SFT model (nats per response)", "0.250", "[-0.250, 0.750]"),
        ("held-out prompts", "1,000", "2 responses of each model to each prompt"),
    ]
    card, *_ = headline("reward", REWARD | {"loss": 0.1}, english)
    assert text_of(card.value) == "96.8 %"
    assert text_of(card.note) == "[94.5 %, 98.1 %], 400 held-out pairs"


def test_the_headline_of_sft_is_the_perplexity_of_responses_by_dataset():
    def perplexities(rows, after, interval):
        return {
            "rows": rows,
            "before": {"perplexity": 523.1, "response_perplexity": 568.0},
            "after": {"perplexity": 1.42, "response_perplexity": after},
            "intervals_95": {"before": {}, "after": {"response_perplexity": interval}},
        }

    sft = perplexities(200, 1.29, [1.25, 1.33])
    note = "[1.25, 1.33], before training: 568; 200 held-out rows"
    assert headline("sft", sft, english) == [("perplexity of responses", "1.29", note)]
    one = perplexities(1, 1.5, [1.5, 1.5])
    del one["intervals_95"]["after"]["response_perplexity"]
    cards = headline("sft", sft | {"by_dataset": {"a": sft, "b": one}}, english)
    assert [card.label for card in cards] == [
        "perplexity of responses",
        "perplexity of responses on a",
        "perplexity of responses on b",
    ]
    assert cards[2].note == "before training: 568; 1 held-out rows"


def test_the_models_of_a_recipe_come_in_the_order_of_training():
    table = response_table(METRICS, "title", english)
    assert table.head == ["", "base", "SFT", "RLHF", "dpo/tiny"]
    rows = {label: list(map(text_of, cells)) for label, *cells in table.rows}
    assert rows["score"][2:] == ["3.00 [2.50, 3.50] best", "2.00 [1.50, 2.50]"]
    # Metrics that were not computed have no row; neither direction of a length is better.
    assert "correct" not in rows
    assert rows["response length (tokens)"][0] == "30.0 [29.5, 30.5]"


def test_differences_that_exclude_zero_are_better_or_worse():
    metrics = METRICS | {"dpo/tiny_score_difference": {"mean": -1.0, "interval_95": [-2, -0.5]}}
    metrics |= {"base_score_difference": {"mean": -1.0, "interval_95": [-2, 0.5]}}
    table = difference_table(metrics, english)
    assert list(map(text_of, table.head)) == ["", "base - SFT", "RLHF - SFT", "dpo/tiny - SFT"]
    assert [text_of(cell) for cell in table.rows[0]] == [
        "score",
        "-1.00 [-2, +0.500]",
        "+2.00 [+1.50, +2.50] better",
        "-1.00 [-2, -0.500] worse",
    ]


def test_win_rates_of_each_pair_of_models():
    table = win_table(METRICS, english)
    assert [row[0] for row in table.rows] == [
        "SFT against base, by score",
        "RLHF against SFT, by score",
        "RLHF against SFT, by the judge",
        "RLHF against base, by score",
        "dpo/tiny against SFT, by score",
    ]
    cells = ["75.0 % [62.5 %, 87.5 %]", "50.0 %", "100.0 %", ""]
    assert [text_of(cell) for cell in table.rows[1][1:]] == cells
    assert len(table.head) == len(table.rows[1])


def test_win_rates_by_length_include_sft_as_a_tie_with_itself():
    assert win_rates_by_length(METRICS, "score", english) == {
        "base": None,
        "SFT": ((10, [9.5, 10.5]), (0.5, None)),
        "RLHF": ((20, [19.5, 20.5]), (0.75, [0.625, 0.875])),
        "dpo/tiny": ((12, [11.5, 12.5]), (0.25, [0.125, 0.375])),
    }


def test_accuracies_have_intervals_and_each_of_several_datasets_its_row():
    section = pair_section("reward", REWARD, english)
    [table] = section.tables
    assert (section.title, table.caption) == ("Reward model", "400 held-out pairs")
    rows = {label: text_of(cell) for label, cell in table.rows}
    assert list(rows) == [
        "accuracy",
        "accuracy of choosing the longer response",
        "ties",
        "expected calibration error",
        "accuracy on a",
    ]
    assert rows["accuracy"] == "96.8 % [94.5 %, 98.1 %]"


# --- remarks --------------------------------------------------------------------------------


def remarks_of(**changes):
    """Remarks on METRICS with changed metrics of models."""
    metrics = {name: dict(value) if name in MODELS else value for name, value in METRICS.items()}
    for key, value in changes.items():
        if isinstance(metrics.get(key), dict) and key in MODELS:
            metrics[key] |= value
        else:
            metrics[key] = value
    return list(rlhf_remarks(metrics, english))


def test_unsurprising_results_have_no_remarks():
    assert remarks_of(rlhf={"length": 10.0}) == []
    pairs = REWARD | {"longer_wins_accuracy": 0.5}
    assert list(pair_remarks(pairs, english)) == []


def test_a_base_model_with_a_higher_score_is_explained():
    changes = {"rlhf": {"length": 10.0}, "base": {"score": 1.5, "ended_by_eos": 0.04}}
    first, second = remarks_of(
        **changes, base_score_difference={"mean": 0.5, "interval_95": [0.1, 0.9]}
    )
    assert first.startswith("The base model scores higher (1.50) than SFT (1.00).")
    assert text_of(second).startswith("Only 4.0 % of the base model's responses end by themselves")
    # A difference that may be 0 needs no explanation.
    difference = {"mean": 0.5, "interval_95": [-0.1, 1.1]}
    assert remarks_of(**changes, base_score_difference=difference) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rlhf": {"length": 16.0}}, "1.60 times as long"),
        ({"rlhf": {"length": 10.0, "ended_by_eos": 0.5}}, "50.0 % of the RLHF responses end"),
        ({"rlhf": {"length": 10.0, "kl_to_sft": 30.0}}, "30.0 nats per response away"),
        (
            {
                "rlhf": {"length": 10.0},
                "judge_score_difference": {"mean": -1.0, "interval_95": [-2.0, -0.5]},
            },
            "score by the judge falls",
        ),
        (
            {
                "rlhf": {"length": 10.0},
                "contamination": {"sft/toy": {"exact": 3, "normalized": 4}},
            },
            "4 of the 1,000 evaluated prompts also occur in training data",
        ),
    ],
)
def test_results_that_call_for_caution_have_a_remark(changes, text):
    [remark] = remarks_of(**changes)
    assert text in text_of(remark)


def test_pairs_that_length_alone_ranks_have_a_remark():
    [remark] = pair_remarks(REWARD | {"longer_wins_accuracy": 0.96}, english)
    assert "Choosing the longer response is about as accurate (96.0 %)" in text_of(remark)
    [remark] = pair_remarks(REWARD | {"ties": 0.25}, english)
    assert "25.0 % of the pairs are ties" in text_of(remark)


def test_an_accuracy_whose_interval_contains_one_half_is_not_distinguishable_from_guessing():
    [remark] = pair_remarks(REWARD | {"pairs": 32, "accuracy": 18 / 32}, english)
    # Wilson's interval of 18 of 32.
    assert text_of(remark).startswith(
        "The accuracy on all pairs is not distinguishable from guessing: its 95 % interval, 39.3 %"
        " to 71.8 %"
    )
    [remark] = pair_remarks(REWARD | {"by_dataset": {"a": {"pairs": 20, "accuracy": 0.4}}}, english)
    assert "accuracy on a is not distinguishable" in text_of(remark)


def test_margins_below_their_rounding_error_have_a_remark():
    [remark] = pair_remarks(REWARD | {"within_noise": 0.5}, english)
    assert "margins of 50.0 % of the pairs are not larger than their rounding error" in text_of(
        remark
    )


def test_shared_prompts_are_explained():
    statistics = {
        "records.toy": {"train": {"rows": 100, "repeated_prompts": 82}},
        "rows.toy": {
            "sft.train": {"rows": 20, "rows_whose_prompt_is_in": {"rlhf.train": 10}},
            "rlhf.train": {"rows": 80, "rows_whose_prompt_is_in": {"sft.train": 60}},
            # Held-out rows, and what training rows share with them, are not counted.
            "sft.eval": {"rows": 50, "rows_whose_prompt_is_in": {"rlhf.train": 50}},
        },
    }
    statistics["rows.toy"]["sft.train"]["rows_whose_prompt_is_in"]["sft.eval"] = 20
    repeated, shared = map(text_of, prompt_section(statistics, english).remarks)
    assert repeated.startswith("toy: 82.0 % of the rows repeat a prompt")
    assert shared.startswith("toy: 70.0 % of the training rows have a prompt that also occurs")


# --- the recipe -----------------------------------------------------------------------------


def test_the_reward_functions_of_a_recipe_are_listed_with_their_weights():
    settings = {"algorithm": "rloo", "seed": 1234, "actor": "a", "reward": None}
    settings["reward_functions"] = {"length": -0.5, "right": 1}
    lineage = {"output/rlhf/mine": {"rule": "train_rlhf", "name": "mine", "settings": settings}}
    assert recipe_table("output/rlhf/mine", lineage, {}, english).rows[2:] == [
        ["seed", "1234"],
        ["SFT model", "sft/a"],
        ["reward model", "none"],
        ["reward functions", "-0.5 * length, 1 * right"],
    ]


def test_changes_that_a_person_accepted_are_listed():
    change = {"date": "2026-01-02", "because": "same losses", "changes": ["program x.py changed"]}
    job = {"rule": "train_sft", "name": "a", "settings": {"seed": 1}, "accepted": [change]}
    assert recipe_table("output/sft/a", {"output/sft/a": job}, {}, english).rows == [
        ["recipe", "sft/a"],
        ["seed", "1"],
        ["accepted: train_sft a", "2026-01-02: same losses (program x.py changed)"],
    ]


# --- responses ------------------------------------------------------------------------------


def lines_of(responses):
    """Lines of responses.jsonl, from (prompt, response, score) of each response by model."""
    return [
        {"model": model, "prompt": prompt, "response": response, "score": score}
        for model, of_model in responses.items()
        for prompt, response, score in of_model
    ]


PROMPT = r'<caption class="prompt text" dir="auto">(.*?)</caption>'


def page_of(folder, responses, num_generations=1):
    """The page of responses."""
    header = {"eyebrow": "tiny", "title": "Responses", "chapter": 6}
    path = folder / "responses.html"
    write_responses(path, "en", lines_of(responses), num_generations, **header)
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
    shown = re.findall(PROMPT, page)
    assert shown == [f"prompt {number}" for number in (*range(10), 16, 18, 17)]
    assert "rlhf prompt 3 a" in page and "rlhf prompt 3 b" not in page


@pytest.mark.parametrize(("score", "shown"), [(0.0, ["p", "q", "q"]), (1.0, ["p", "q"])])
def test_only_prompts_with_a_lower_score_are_decreases(tmp_path, score, shown):
    responses = {
        "sft": [("p", "a", 1.0), ("q", "b", 1.0)],
        "rlhf": [("p", "c", 1.0), ("q", "d", score)],
    }
    page = page_of(tmp_path, responses)
    assert re.findall(PROMPT, page) == shown
    assert ("decreased most" in page) == (score < 1)


# --- costs ----------------------------------------------------------------------------------


def test_costs_are_those_of_the_runs_that_made_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {"seconds": 61, "peak_memory_mb": 1234, "started": "2026-01-02T03:04:05", "host": "here"}
    run = EMPTY_RUN | run
    lineage = {}
    for name, recorded in (("data", "a"), ("sft", "other"), ("rlhf", None)):
        lineage[name] = {"spec": "a", "inputs": []}
        if recorded:
            (tmp_path / name).mkdir()
            (tmp_path / name / "run.json").write_text(json.dumps(run | {"spec": recorded}))
    runs = read_runs(lineage)
    assert runs == {"data": run | {"spec": "a"}, "sft": None, "rlhf": None}
    cells = ["2026-01-02 03:04", "0:01:01", "1.23\xa0GB", None, None, None, "here"]
    assert run_cells(runs["data"], english) == cells
    assert run_cells(None, english)[0] == "unknown"
    assert total_cost(runs) == "0:01:01"
    [section] = cost_sections(runs, "output/rlhf/tiny", None, english)
    assert [row[0] for row in section.tables[0].rows] == ["data", "rlhf", "sft"]


def test_the_highest_and_the_lowest_score_are_marked(tmp_path):
    page = page_of(
        tmp_path, {"base": [("p", "a", 0.5)], "sft": [("p", "b", -1.0)], "rlhf": [("p", "c", 2.0)]}
    )
    rows = re.findall(r'<tr class="(\w*)"><th scope="row">(\w+)', page)
    assert rows == [("", "base"), ("loser", "SFT"), ("winner", "RLHF")]
