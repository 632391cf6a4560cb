"""The sections of a report: results, remarks, responses, data, costs, throughput."""

import json

import pytest

from snakechat.estimates import flops
from snakechat.pages import trainings
from snakechat.pages.metrics import label_of, read_benchmarks
from snakechat.pages.report import (
    benchmark_change,
    benchmark_sections,
    headline,
    job_section,
    remarks_on,
    response_sections,
    result_section,
    row_section,
)
from snakechat.pages.trainings import Training, read_training, run_table, throughput
from snakechat.workflow.manifest import read_run_record, sealed_json
from support.pages import text_of
from support.specs import EMPTY_RUN


def rows_of(table):
    """The texts of the cells of a table, by the first one of a row."""
    return {label: list(map(text_of, cells)) for label, *cells in table.rows}


def responses_of(score, length):
    """Metrics of the responses of a model."""
    return {"score": score, "length": length, "ended_by_eos": 1.0, "kl_to_sft": 0.25}


def change(mean, low, high):
    """A difference of a metric."""
    return {"mean": mean, "interval_95": [low, high]}


def wins(mean, **more):
    """Win rate of a model."""
    return change(mean, mean - 0.125, mean + 0.125) | {"longer": 0.5, **more}


MODELS = {
    "rlhf": responses_of(3.0, 20.0),
    "base": responses_of(0.0, 30.0),
    "sft": responses_of(1.0, 10.0),
    "dpo/tiny": responses_of(1.75, 12.0),
}
METRICS = {
    **MODELS,
    "num_prompts": 1000,
    "num_generations": 2,
    "intervals_95": {
        model: {name: [value - 0.5, value + 0.5] for name, value in metrics.items()}
        for model, metrics in MODELS.items()
    },
    "score_difference": change(2.0, 1.5, 2.5),
    "wins": {
        "sft": {"base": {"score": wins(0.625)}},
        "rlhf": {
            "sft": {"judge_score": wins(0.5), "score": wins(0.75, when_longer=1.0)},
            "base": {"score": wins(0.875)},
        },
        "dpo/tiny": {"sft": {"score": wins(0.25)}},
    },
}
# --- results --------------------------------------------------------------------------------


def test_the_headline_has_results_intervals_and_n():
    assert {name: text_of(cell) for name, cell in headline("rlhf", METRICS).items()} == {
        "win rate of RLHF against SFT, by the judge": "50.0 % [37.5 %, 62.5 %]",
        "win rate of RLHF against SFT, by score": "75.0 % [62.5 %, 87.5 %]",
        "change from SFT to RLHF: score": "+2.00 [+1.50, +2.50] better",
        "KL to the SFT model (nats per response)": "0.250 [-0.250, 0.750]",
        "held-out prompts": "1,000",
    }


def test_models_come_in_the_order_of_training_with_their_differences():
    metrics = METRICS | {"dpo/tiny_score_difference": change(-1.0, -2, -0.5)}
    metrics |= {"base_score_difference": change(-1.0, -2, 0.5)}
    differences, table, wins = result_section("rlhf", metrics).tables
    heads = ["base - SFT", "RLHF - SFT", "dpo/tiny - SFT"]
    assert list(map(text_of, differences.head))[1:] == heads
    changes = ["-1.00 [-2, +0.500]", "+2.00 [+1.50, +2.50] better", "-1.00 [-2, -0.500] worse"]
    assert rows_of(differences)["score"] == changes
    # Mere rounding is not a change.
    rounding = METRICS | {"score_difference": change(5e-5, 4e-5, 6e-5)}
    assert "better" not in rows_of(result_section("rlhf", rounding).tables[0])["score"][1]
    assert table.head == ["", "base", "SFT", "RLHF", "dpo/tiny"]
    rows = rows_of(table)
    assert rows["score"][2:] == ["3.00 [2.50, 3.50]", "1.75 [1.25, 2.25]"]
    # Metrics that were not computed have no row; neither direction of a length is better.
    assert "correct" not in rows
    assert rows["response length (tokens)"][0] == "30.0 [29.5, 30.5]"
    rates = rows_of(wins)
    assert [*rates] == [
        "win rate of SFT against base, by score",
        "win rate of RLHF against SFT, by score",
        "win rate of RLHF against SFT, by the judge",
        "win rate of RLHF against base, by score",
        "win rate of dpo/tiny against SFT, by score",
    ]
    cells = ["75.0 % [62.5 %, 87.5 %]", "50.0 %", "100.0 %", ""]
    assert rates["win rate of RLHF against SFT, by score"] == cells
    assert len(wins.head) == len(wins.rows[1])
    # The name of a model may have dots.
    label = label_of("wins.dpo/gsm8k-qwen2.5.sft.score")
    assert label == "win rate of dpo/gsm8k-qwen2.5 against SFT, by score"


def test_accuracies_have_intervals_before_and_after_training_and_of_each_dataset(monkeypatch):
    metrics = {"pairs": 400, "accuracy": 0.9675, "calibration_error": 0.25}
    metrics |= {"intervals_95": {"accuracy": [0.945, 0.981]}}
    metrics |= {"by_dataset": {"a": {"accuracy": 1.0, "intervals_95": {"accuracy": [0.963, 1]}}}}
    steps = [{"step": 0, "eval_accuracy": 0.5}, {"step": 1, "loss": 0.6}]
    files = {"metrics.json": json.dumps(metrics)}
    monkeypatch.setattr(trainings, "read_version_file", lambda _, name: files[name])
    entry = {"settings": {}, "facts": {}}
    for first in (0, 1):
        files["metrics.jsonl"] = "\n".join(map(json.dumps, steps[first:]))
        read = read_training("reward", "a", entry, "folder", "evaluation").metrics
        [table] = result_section("reward", read).tables
        assert table.head == ["", *["before training"][first:], "all pairs", "a"]
        accuracies = ["50.0 %", "96.8 % [94.5 %, 98.1 %]", "100.0 % [96.3 %, 100.0 %]"]
        assert rows_of(table)["accuracy"] == accuracies[first:]
        assert rows_of(table)["expected calibration error"] == ["", "25.0 %", ""][first:]


# --- remarks --------------------------------------------------------------------------------

FALL = change(-1.0, -2.0, -0.5)
FACTS = {"saved_step": 9, "changed_weights": 0.1}


@pytest.mark.parametrize(
    ("metrics", "facts", "text"),
    [
        ({}, {}, None),
        ({"judge_score_difference": FALL}, {}, "another metric falls (score by the judge)"),
        ({"score_difference": FALL, "judge_score_difference": FALL}, {}, None),
        ({"contamination": {"sft/toy": 4, "rlhf/toy": 0}}, {}, "4 of the 1,000 evaluated prompts"),
        ({}, FACTS, None),
        ({}, FACTS | {"unchanged_because": "learning_rate"}, ": the learning rate was 0"),
        ({}, FACTS | {"unchanged_because": "rounding"}, "10.0\xa0% of the trained weights differ"),
    ],
)
def test_results_that_call_for_caution_have_a_remark(metrics, facts, text):
    remarks = list(remarks_on(trained("rlhf", metrics=METRICS | metrics, facts=facts)))
    assert len(remarks) == (text is not None) and all(text in remark for remark in remarks)


# --- data -----------------------------------------------------------------------------------


def test_rows_are_counted_with_those_that_were_truncated_or_dropped():
    quantiles = dict.fromkeys(("p1", "p10", "p50", "p90", "p99"), 5)
    lengths = {"prompt": {"mean": 4.5, **quantiles, "p100": 9, "sum": 450}}
    train = {"rows": 100, "truncated": {"prompt": 3}, "dropped": {"empty": 2}, "tokens": lengths}
    datasets = {"toy": {"rows": 100, "repeated_prompts": 82}}
    datasets, phases, tokens = row_section([trained(train=train)], datasets).tables
    assert rows_of(datasets)["toy"] == ["100", "82.0 %"]
    assert phases.head == ["", "rows", "truncated: prompt", "dropped: empty"]
    assert rows_of(phases)["sft.train"] == ["100", "3", "2"]
    assert rows_of(tokens)["sft.train: prompt"] == ["4.5", *"55555", "9"]


# --- responses ------------------------------------------------------------------------------


def lines_of(**responses):
    """Lines of responses.jsonl, from (prompt, response, score) of each response by model."""
    return [
        {"model": model, "prompt": prompt, "response": response, "score": score}
        for model, of_model in responses.items()
        for prompt, response, score in of_model
    ]


def test_first_prompts_and_those_with_the_largest_decrease_are_shown():
    prompts = [f"prompt {number}" for number in range(20)]
    # Two responses to each; RLHF scores higher, except on prompts 15 to 18.
    scores = {prompts[15]: -1, prompts[16]: -4, prompts[17]: -2, prompts[18]: -3}
    sft = [(p, f"sft {p} {s}", 0.0) for p in prompts for s in "ab"]
    rlhf = [(p, f"rlhf {p} {s}", scores.get(p, 1)) for p in prompts for s in "ab"]
    first, decreased = response_sections(lines_of(sft=sft, rlhf=rlhf), 2)
    assert [table.caption for table in first.tables] == prompts[:10]
    assert [table.caption for table in decreased.tables] == [prompts[n] for n in (16, 18, 17)]
    shown = {"SFT": ["sft prompt 3 a", "0"], "RLHF": ["rlhf prompt 3 a", "1"]}
    assert rows_of(first.tables[3]) == shown
    # Without a decrease, the page leaves out their section.
    assert len(response_sections(lines_of(sft=[("p", "a", 1.0)], rlhf=[("p", "c", 1.0)]), 1)) == 1
    # A score that one of the models does not have is not shown.
    lines = [*lines_of(sft=[("p", "a", 1.0)]), {"model": "dpo", "prompt": "p", "response": "c"}]
    [section] = response_sections(lines, 1)
    assert rows_of(section.tables[0]) == {"SFT": ["a"], "DPO": ["c"]}
    # SFT and DPO have no decrease, and the rows themselves have no score.
    [section] = response_sections(
        [{"model": model, "prompt": "p", "response": "a"} for model in ("data", "base", "sft")], 1
    )
    assert [row[0] for row in section.tables[0].rows] == ["held-out response", "base", "SFT"]


# --- costs ----------------------------------------------------------------------------------


def test_costs_are_those_of_the_runs_that_made_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {"seconds": 61, "peak_memory_mb": 1234, "started": "2026-01-02T03:04:05", "host": "here"}
    job = {"spec": "a", "inputs": [], "settings": {}, "facts": {}, "files": {"number": 0}}
    lineage = dict.fromkeys(("data", "rlhf", "sft"), job)
    for name, recorded in (("data", "a"), ("sft", "other")):
        (tmp_path / name).mkdir()
        record = EMPTY_RUN | run | {"spec": recorded}
        (tmp_path / name / "run.json").write_text(sealed_json(record))
    runs = {path: read_run_record(path, job) for path, job in lineage.items()}
    [table] = job_section(lineage, runs).tables
    assert [[row[0], *row[5:]] for row in table.rows[:3]] == [
        ["data", "2026-01-02 03:04", "0:01:01", "1.23\xa0GB", ""],
        *(["rlhf", *"????"], ["sft", *"????"]),
    ]
    assert table.rows[3][6] == "0:01:01"


MODEL = {"weights": 100, "trained": 100, "layers": 2, "hidden_size": 4}
# On two GPUs.
RUN = EMPTY_RUN | {
    "steps": 3,
    "seconds_per_step": 0.5,
    "gpu": "NVIDIA H100 PCIe",
    "models": {"model": MODEL},
    "placement": {"nodes": 1, "gpus_per_node": 2},
}
SETTINGS = {"dtype": "bf16", "global_batch_size": 8}
TRAIN = {"rows": 100, "tokens": {"prompt": {"sum": 300}, "chosen": {"sum": 200}}}


def trained(stage="sft", settings=SETTINGS, run=RUN, steps=(), train=TRAIN, facts=(), metrics=()):
    """A training."""
    name, tokens = f"output/{stage}/a", {"train": train}
    return Training(stage, name, settings, dict(facts), steps, dict(metrics), run, tokens)


def test_throughput_of_a_run():
    # 16 rows a second of 5 tokens.
    found = throughput(trained())
    assert list(found.values()) == [16, 80, 80 * 1080, 80 * 1080 / (2 * 756e12)]
    # The peak rate is one of 16 bits, and of a known GPU.
    for settings, run in ((SETTINGS | {"dtype": "fp32"}, RUN), (SETTINGS, RUN | {"gpu": "x"})):
        assert throughput(trained(settings=settings, run=run))["utilization"] is None
    # The responses of a pair do not attend to each other: 3 tokens of the prompt and 4 of a
    # response, on average.
    train = {"rows": 100, "tokens": TRAIN["tokens"] | {"rejected": {"sum": 600}}}
    found = throughput(trained("dpo", train=train))
    assert found["tokens_per_second"] == 16 * 11
    assert found["flops_per_second"] == 16 * 11 * flops.flops_per_token([(MODEL, 0, 1)], 7)


@pytest.mark.parametrize(("in_update", "passes"), [(False, 3), (True, 2)])
def test_throughput_of_rlhf_counts_all_responses_to_a_prompt(in_update, passes):
    settings = SETTINGS | {"rollout_batch_size": 4, "num_generations": 2, "ppo_epochs": 2}
    models = {"actor": MODEL, "critic": MODEL}
    run = RUN | {"models": models, "evaluated_in_update": in_update}
    train = {"rows": 100, "tokens": {"prompt": {"sum": 300}}}
    steps = [{"response/length": 4.0}, {"response/length": 6.0}]
    found = throughput(trained("rlhf", settings, run, steps, train))
    assert (found["rows_per_second"], found["tokens_per_second"]) == (8, 8 * 13)
    # A pass over sequences of 8 tokens: 200 of the weights and 256 of attention. The actor
    # generates and evaluates, unless its update does; the reference evaluates; critic and reward
    # model score; both models train for two epochs, each as much as three passes.
    assert found["flops_per_second"] == 8 * 13 * (200 + 256) * (passes + 2 + 2 * 2 * 3)


def test_a_run_shows_units_the_saved_step_and_the_loss_scale():
    facts = {"saved_step": 2, "changed_weights": 0.0, "unchanged_because": "rounding"}
    steps = [{"step": 0, "eval_loss": 9.0}, {"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]
    steps += [{"step": 3, "loss": 1.25, "skipped_steps": 1, "loss_scale": 65536.0}]
    rows = rows_of(run_table(trained(steps=steps, facts=facts)))
    expected = {
        "rows per second": "16.0 rows/s",
        "computing rate": "8.64e-08 TFLOP/s",
        "time of a step (median)": "0.500 s/step",
        "step that was saved": "2",
        "last loss scale (fp16)": "65,536",
        "trained weights that differ from the start": "0.0 %",
        "steps skipped for overflow (fp16)": "1",
        "loss: first step, last step, mean": "2.50, 1.25, 2.00",
    }
    assert {label: rows[label] for label in expected} == {k: [v] for k, v in expected.items()}
    assert "unchanged_because" not in rows


# --- benchmarks -----------------------------------------------------------------------------


def test_few_items_of_a_benchmark_that_all_changed_may_be_chance():
    def changed(old, new):
        before, after = (
            {"acc": of[0], "items": {"acc": of}, "intervals_95": {"acc": [of[0], of[0]]}}
            for of in (old, new)
        )
        metrics = ({"benchmarks": {"mine": of}} for of in (before, after))
        return benchmark_change(*metrics, "benchmarks.mine.acc")

    change = changed([0, 0, 0], [1, 1, 1])
    assert change.value == 1 and change.direction == 0
    assert changed([0] * 50, [1] * 50).direction == 1
    # Without limits, equal differences say nothing about the variance.
    change = changed([5, 5], [7, 7])
    assert change.value == 2 and change.interval is None


def test_benchmarks_have_a_column_for_each_model_and_the_change(tmp_path):
    inputs = {"evaluate_rlhf": tmp_path}
    assert benchmark_sections("rlhf", read_benchmarks(inputs)) == []
    for label, value in {"rlhf": 0.75, "compare_with.dpo/tiny": 0.5, "sft": 0.25}.items():
        inputs[f"benchmark.{label}/gsm8k"] = folder = tmp_path / label
        folder.mkdir(parents=True)
        interval = {"acc": [value - 0.03, value + 0.03], "size": None}
        metrics = {"acc": value, "size": 5, "intervals_95": interval}
        (folder / "metrics.json").write_text(json.dumps(metrics))
    [section] = benchmark_sections("rlhf", read_benchmarks(inputs))
    change, values = section.tables
    assert change.head[1] == "RLHF \u2212 SFT"
    # 1.41 times as wide as the intervals of both.
    assert rows_of(change)["gsm8k.acc"] == ["+0.500 [+0.458, +0.542]"]
    assert values.head[1:] == ["SFT", "RLHF", "dpo/tiny"]
    assert rows_of(values)["gsm8k.size"] == ["5", "5", "5"]
