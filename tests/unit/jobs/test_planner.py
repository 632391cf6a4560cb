"""What targets consist of, and which results are made."""

import pytest

from snakechat.jobs.data_jobs import Description
from snakechat.jobs.planner import jobs_of_target, stale_results, with_upstream
from snakechat.jobs.rules import Rule
from snakechat.workflow.errors import InputError
from support.configs import load
from support.specs import specs_of_rules

# --- targets ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config():
    return load({"datasets": {"best": {"generations": "tiny", "select": "best"}}})


FOLDER_JOBS = [("train_sft", "tiny"), ("evaluate_sft", "tiny"), ("draw_report", "sft/tiny")]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("output/sft/tiny", FOLDER_JOBS),
        ("./output/rlhf/../sft/tiny", FOLDER_JOBS),
        ("output/sft/tiny.manifest.json", [("train_sft", "tiny")]),
        ("output/eval/rlhf/tiny/metrics.json", [("evaluate_rlhf", "tiny")]),
        ("output/tokens/sft/tiny", [("tokenize_sft", "tiny")]),
        ("output/report/rlhf/tiny/report.html", [("draw_report", "rlhf/tiny")]),
        # Rules of one folder.
        ("output/data/best", [("select_responses", "best")]),
        ("output/models/tiny", [("init_model", "tiny")]),
        # Its description names the entries that there are.
        ("output/benchmark/none/sft/tiny", [("run_benchmark", "none/sft/tiny")]),
    ],
)
def test_a_target_is_a_folder_a_result_or_a_file_of_it(config, target, expected):
    assert jobs_of_target(config, target) == expected


@pytest.mark.parametrize("target", ["sft/tiny", "output/sft", "output/none/tiny", ""])
def test_another_target_is_an_error(config, target):
    with pytest.raises(InputError, match=f"^{target} is not a result: name one"):
        jobs_of_target(config, target)


# --- stale results ----------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Specs of rules a to d, which nothing has built: b and c read a, and d reads both."""
    monkeypatch.chdir(tmp_path)
    readers = {"a": "", "b": "a", "c": "a", "d": "bc"}

    def rule(name):
        inputs = {upstream: (upstream, "x") for upstream in readers[name]}
        return Rule(lambda config, job: Description({}, inputs), name, program="make")

    return specs_of_rules(tmp_path, ["make"], {name: rule(name) for name in readers})


def test_jobs_follow_their_upstream_jobs(chain):
    jobs = with_upstream(chain, [("d", "x"), ("b", "x")])
    assert jobs == [("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")]


@pytest.mark.parametrize(
    ("missing", "stale", "made"),
    [
        ("", "", ""),
        ("abcd", "", "abcd"),
        # What nothing that is made reads stays missing.
        ("ab", "", ""),
        # c is up to date, and runs because a, which b reads, is made.
        ("abd", "", "abcd"),
        ("b", "d", "bd"),
        ("d", "c", "cd"),
    ],
)
def test_results_are_made_if_stale_or_wanted_or_read_by_those(
    chain, monkeypatch, missing, stale, made
):
    class Decided:
        def __init__(self, specs):
            self.stale = {f"output/{name}/x": {} for name in stale}

        def decide(self, rule, name):
            pass

        def result(self, rule, name):
            return None if rule in missing + stale else f"the result of {rule}"

    monkeypatch.setattr("snakechat.jobs.planner.Staleness", Decided)
    jobs = with_upstream(chain, [("d", "x")])
    found = stale_results(chain, jobs, [("d", "x")])
    assert "".join(sorted(path.split("/")[1] for path in found)) == made
