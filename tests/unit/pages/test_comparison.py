"""Comparisons by hand: groups of seeds, their names, results, differences, training logs."""

import pytest

from snakechat.pages.comparison import (
    Group,
    comparable_settings,
    group_by_settings,
    result_tables,
    setting_differences,
    setting_table,
)
from snakechat.pages.metrics import result_paths
from snakechat.pages.trainings import Training, read_log
from support.pages import text_of


def a_run(name, seed, metrics=(), **compared):
    """A training with settings besides its seed; without any, a training log."""
    settings = {} if seed is None else {"seed": seed}
    return Training("sft", name, settings, {}, [], dict(metrics), {}, compared=compared)


def seeds_of(name, metric, values):
    """A group with a value of a metric for each seed."""
    return Group(name, [a_run(name, seed, {metric: of}) for seed, of in enumerate(values)])


def texts_of(table):
    """The texts of the cells of a table."""
    return [[*map(text_of, row)] for row in table.rows]


def grouped(*runs, **options):
    """The names of the runs of each group."""
    groups = group_by_settings(runs, **options)
    return {group.name: [run.name for run in group.runs] for group in groups}


def test_runs_that_differ_only_in_their_seed_are_one_group_of_a_name_without_it():
    runs = a_run("a", 1, kl=1), a_run("b", 1, kl=2), a_run("a2", 2, kl=1), a_run("a3", 3, kl=1)
    assert grouped(*runs) == {"a": ["a", "a2", "a3"], "b": ["b"]}
    seeds = [a_run(f"mine-beta-{b}-seed-{s}", s, beta=b) for b in (1, 2) for s in (1, 2)]
    assert [*grouped(*seeds)] == ["mine-beta-1", "mine-beta-2"]
    assert [*grouped(*seeds[1:])] == ["mine-beta-1-seed-2", "mine-beta-2"]
    # Names stay distinct.
    assert "mine-beta-1-seed-1" in grouped(*seeds, a_run("mine-beta-1", 1, beta=3))


def test_curves_of_seeds_have_the_steps_that_all_of_them_have():
    # The second seed stopped early.
    runs = [
        a_run("a", 1)._replace(steps=[{"step": n, "loss": loss} for n, loss in enumerate(of, 1)])
        for of in ([1.0, 4.0], [3.0])
    ]
    assert Group("a", runs).points("loss") == [(1, 1.0), (1, 3.0)]
    assert Group("a", runs[:1]).points("loss") == [(1, 1.0), (2, 4.0)]


METRICS = {
    "sft": {"score": 1.0},
    "rlhf": {"score": 2.0, "success": 0.5, "length": 10.0},
    "intervals_95": {"rlhf": {"score": [1.5, 2.5]}},
    "wins": {"rlhf": {"sft": {"score": {"mean": 0.75, "interval_95": [0.5, 1.0], "longer": 1}}}},
}
MORE = {**METRICS, "rlhf": {"score": 4.0, "success": 0.75, "length": 10.0}}


def test_a_result_has_its_own_interval_or_that_of_its_seeds():
    groups = [
        Group("a", [a_run("a", 1, METRICS)]),
        Group("b", [a_run("b", 1, METRICS), a_run("b2", 2, MORE)]),
        Group("c", [a_run("c", 1, {"rlhf": {"length": 3.0}, "sft": {}})]),
    ]
    [table] = result_tables(groups, result_paths("rlhf", ["sft"]))
    assert table.head == ["", "a", "b", "c"]
    wins = "75.0 % [50.0 %, 100.0 %]"
    # 2 and 4: mean 3, standard deviation 1.414, divided by the root of 2, times 12.706. Equal
    # values of seeds say nothing about the variance.
    assert texts_of(table) == [
        ["score of SFT", "1.00", "1.00 n = 2", ""],
        ["score", "2.00 [1.50, 2.50]", "3.00 [-9.71, 15.7] n = 2", ""],
        ["correct", "50.0 %", "62.5 % [0.0 %, 100.0 %] n = 2", ""],
        ["response length (tokens)", "10.0", "10.0 n = 2", "3.00"],
        ["win rate of RLHF against SFT, by score", wins, f"{wins} n = 2", ""],
    ]
    assert result_paths("sft")[:2] == ["before.response_perplexity", "after.response_perplexity"]


ROUNDED = [595.001, 595.002, 595.003], [595.021, 595.022, 595.023]


@pytest.mark.parametrize(
    ("values", "others", "text"),
    [
        # Both standard errors are 1 / sqrt(3). The difference has sqrt(2/3), and t with four
        # degrees of freedom is 2.776.
        ([1, 2, 3], [11, 12, 13], "+10.0 [+7.73, +12.3] n = 3 worse"),
        ([1, 2, 3], [2, 3, 4], "+1.00 [-1.27, +3.27] n = 3"),
        ([1, 2, 3], [9], None),
        # Rounding, as between ZeRO stages: apart, but in the fifth digit.
        (*ROUNDED, "+0.0200 [+0.0177, +0.0223] n = 3"),
    ],
)
def test_a_difference_has_welchs_interval_and_a_mark_unless_it_is_noise(values, others, text):
    groups = [seeds_of("a", "loss", values), seeds_of("b", "loss", others)]
    found = [texts_of(table)[0][1] for table in result_tables(groups, ["loss"])[:-1]]
    assert found == ([text] if text else [])


# --- settings that differ ------------------------------------------------------------------


def lineage(**jobs):
    """The lineage of a training, the first of jobs: their settings, and the jobs they read."""
    return {
        name: {
            "rule": name.partition("__")[0],
            "settings": settings,
            "files": {"number": settings.get("rows", 0), "digest": "0123456789abcdef"},
            "inputs": dict(enumerate(inputs)),
        }
        for name, (settings, *inputs) in jobs.items()
    }


def differences(*lineages):
    """The differences between trainings, the first jobs of lineages."""
    return setting_differences([comparable_settings(of, next(iter(of))) for of in lineages])


def rlhf(actor, actor_epochs, reward_epochs=1):
    """RLHF from sft/ACTOR with a reward model, which was trained from sft/tiny."""
    actor = f"train_sft__{actor}"
    seed = {"seed": actor_epochs}
    jobs = {
        "train_rlhf": (seed, actor, "train_reward", "tokenize_rlhf"),
        "train_reward": ({"epochs": reward_epochs}, "train_sft__tiny"),
        "train_sft__tiny": ({"epochs": 1}, "init_model"),
        actor: ({"epochs": actor_epochs}, "init_model"),
        "tokenize_rlhf": ({"weights": [actor_epochs], **seed},),
        "init_model": ({"seed": 1},),
    }
    return lineage(**jobs)


def on_dataset(name, rows):
    """DPO on a dataset."""
    dataset = f"import_dataset__{name}"
    tokens = {"tokenize_dpo": ({}, dataset), dataset: ({"rows": rows},)}
    return lineage(train_dpo=({}, "tokenize_dpo"), **tokens)


@pytest.mark.parametrize(
    ("lineages", "found"),
    [
        # Earlier jobs are matched by rule, and equal changes of several are one row.
        ([rlhf("mine", 3), rlhf("tiny", 1)], {"train_sft: epochs": [[3, 1], 1]}),
        ([rlhf("tiny", 1), rlhf("tiny", 2, reward_epochs=2)], {"train_sft: epochs": [1, 2]}),
        # The name of a dataset alone is not a difference.
        (
            [on_dataset("d", 0), on_dataset("e", 1)],
            {"dataset: rows": [0, 1], "dataset: files": ["", "0123456789ab"]},
        ),
        # Other rules make base models, too.
        (
            [
                lineage(train_sft=({}, rule), **{rule: ({key: "x"},)})
                for rule, key in (("init_model", "init"), ("fetch_model", "hub"))
            ],
            {"model: init": ["x", ""], "model: hub": ["", "x"]},
        ),
    ],
)
def test_settings_that_differ_are_those_of_the_training_and_of_jobs_before_it(lineages, found):
    assert differences(*lineages) == found


def test_a_log_has_no_settings_that_differ():
    logs = [a_run(name, None) for name in ("log", "log-2")]
    groups = group_by_settings([a_run("a", 1, kl=1, lr=1), a_run("b", 1, kl=2, lr=1), *logs])
    table = setting_table(groups)
    assert table.head == ["", "a", "b", "log", "log-2"]
    assert texts_of(table) == [["kl", "1", "2", "", ""], ["seed", "1", "1", "", ""]]


# --- training logs of DeepSpeed-Chat --------------------------------------------------------------

TIMER = "worker-0: [INFO] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=171.5,"
TIMER += " CurrSamplesPerSec=170.25, MemAllocated=4.3GB, MaxMemAllocated=22.5GB\n"
OLD = "chosen_last_scores (higher is better) : 2.75, acc (higher is better) : 0.5\n"
NEW = "chosen_last_scores (higher is better) : 2.25, rejected_last_scores (lower is better) : -1.5,"
NEW += " acc (higher is better) : 0.75\n"
RECORD = {"rows_per_second": 171.5, "peak_gpu_memory_mb": 22.5 * 1024}
STEP = "|E2E latency={0}s |CurSamplesPerSec=17.0 |AvgSamplesPerSec=16.5\nAverage reward score: {0}"
DPO = "chosen: 0.0, rejected: -1e-3, loss: 0.75\nchosen: -31.5, rejected: -34.0, loss: 0.5\n"


def scored(chosen, rejected, **others):
    return {"chosen_score": chosen, "rejected_score": rejected, **others}


OF_REWARD = {"before": {"chosen_score": 2.75, "accuracy": 0.5}}
OF_REWARD |= scored(2.25, -1.5, accuracy=0.75)
OF_DPO = {"before": scored(0.0, -0.001, loss=0.75), **scored(-31.5, -34.0, loss=0.5)}
SCORES = (3, 4, 8)
OF_RLHF = [{"step": n, "objective/scores": of} for n, of in enumerate(SCORES, 1)]
MEASURED = {"seconds_per_step": 4.0, "rows_per_second": 16.5}


@pytest.mark.parametrize(
    ("stage", "text", "steps", "metrics", "run"),
    [
        (
            "sft",
            f"worker-0: ppl: 4998.5, loss: 8.5\n{TIMER}ppl: 2.125, loss: 0.75\nppl: 2.0\n",
            [],
            {"before": {"perplexity": 4998.5}, "after": {"perplexity": 2.0}},
            RECORD,
        ),
        ("reward", OLD + TIMER + NEW, [], OF_REWARD, RECORD),
        ("dpo", DPO, [], OF_DPO, {}),
        ("rlhf", "\n".join(map(STEP.format, SCORES)), OF_RLHF, {}, MEASURED),
    ],
)
def test_a_log_has_results_or_a_curve_and_measurements(stage, text, steps, metrics, run, tmp_path):
    (tmp_path / "training.log").write_text(text)
    training = read_log(tmp_path / "training.log", "mine", stage)
    assert (training.steps, training.metrics, training.run) == (steps, metrics, run)
