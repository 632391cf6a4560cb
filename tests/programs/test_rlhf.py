"""RLHF as a whole, in this process, on the tokens and models of the quick build."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_trainers import PLACEMENT

import train_rlhf
from snakechat.algorithms import reward_functions as rewards
from snakechat.algorithms import sanity_checks as gates
from snakechat.modeling.generation import HfSampler
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import manifest_path, result_files

# DeepSpeed calls functions of torch that are about to be renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# Two steps of two updates each, over the 240 prompts of the quick build.
SHORT = {
    "epochs": 1,
    "rollout_batch_size": 120,
    "global_batch_size": 60,
    "ppo_epochs": 1,
    "max_response_length": 8,
    "dtype": "fp32",
    "lora_rank": 0,
    "log_responses_steps": 2,
}
IN_EACH_STEP = {
    "objective/scores",
    "objective/kl",
    "objective/kl_coef",
    "objective/rlhf_reward",
    "objective/entropy",
    "response/length",
    "response/length_p95",
    "response/ended_by_eos",
    "policy/loss",
    "policy/kl",
    "policy/ratio",
    "policy/approxkl",
    "policy/clipfrac",
    "policy/grad_norm",
    "policy/first_ratio",
    "policy/first_approxkl",
    "policy/first_clipfrac",
}
OF_THE_CRITIC = {"value/loss", "value/clipfrac", "value/grad_norm", "value/explained_var"}
# Two responses to each of half as many prompts.
IN_PAIRS = {"num_generations": 2, "rollout_batch_size": 60, "max_response_length": 6}


@pytest.fixture(scope="module", autouse=True)
def road(quick, tmp_path_factory, group):
    """A copy of the quick build to work in."""
    folder = Path.cwd()
    copy = quick.copy(tmp_path_factory.mktemp("road") / "work")
    os.chdir(copy.folder)
    yield copy
    os.chdir(folder)


@pytest.fixture
def train(road):
    """A function that trains the tiny recipe with other settings, and gives the job."""
    jobs = []

    def train(placement=(), without=(), name="mine", **settings):
        spec = road.spec_of("output/rlhf/tiny")
        spec["settings"] |= SHORT | settings
        spec["name"], spec["path"] = name, f"output/rlhf/{name}"
        spec["inputs"] |= {"ptx": spec["inputs"]["tokens.sft"]}
        spec["inputs"] = {key: job for key, job in spec["inputs"].items() if key not in without}
        manifests = {key: manifest_path(job["path"]) for key, job in spec["inputs"].items()}
        job = Job(spec, manifests, PLACEMENT | dict(placement), SimpleNamespace)
        jobs.append(job)
        shutil.rmtree(job.result, ignore_errors=True)
        job.result.mkdir(parents=True)
        train_rlhf.main(job)
        job.metrics = lines_of(job.result / "metrics.jsonl")
        return job

    yield train
    for job in jobs:
        for folder in (job.result, job.states, job.log_folder):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A folder of reward functions."""
    monkeypatch.setattr(rewards, "FOLDER", tmp_path)
    return tmp_path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(job, name):
    return [line[name] for line in job.metrics if name in line]


def weights_of(job, folder="."):
    weights = load_file(job.result / folder / "model.safetensors")
    return torch.cat([weights[name].flatten().float() for name in sorted(weights)])


def sft_weights(road):
    weights = load_file(road.folder / "output/sft/tiny/model.safetensors")
    return torch.cat([weights[name].flatten().float() for name in sorted(weights)])


@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "grpo"])
@pytest.mark.parametrize("kl_in", ["rewards", "loss"])
def test_an_algorithm_trains_from_the_policy_that_responded(algorithm, kl_in, train):
    several = IN_PAIRS if algorithm != "ppo" else {}
    job = train(algorithm=algorithm, kl_in=kl_in, **several)
    of_critic = OF_THE_CRITIC if algorithm == "ppo" else set()
    for line in job.metrics:
        assert line.keys() == IN_EACH_STEP | of_critic | {"step"}
        assert line["policy/first_ratio"] == pytest.approx(1, abs=1e-5)
        assert line["policy/first_approxkl"] == pytest.approx(0, abs=1e-6)
        assert line["policy/first_clipfrac"] == 0
        assert 1 <= line["response/length"] <= line["response/length_p95"] <= 8
    assert len(job.metrics) == (2 if algorithm == "ppo" else 4)
    kl = values(job, "objective/kl")
    assert kl[0] == pytest.approx(0, abs=1e-5)
    # By now the actor is another one than its reference.
    assert abs(kl[-1]) > 1e-4


def test_times_are_beside_the_log_and_not_in_the_result(train):
    job = train()
    times = lines_of(job.log_folder / "times.jsonl")
    assert [line["step"] for line in times] == [1, 2]
    for line in times:
        assert line["responses"] == 120
        assert line["tokens"] == pytest.approx(
            120 * job.metrics[line["step"] - 1]["response/length"], abs=0.5
        )
        assert min(line[part] for part in ("generate", "score", "train")) > 0
    assert job.record["seconds_by_section"].keys() == {"generate", "score", "train"}


def test_responses_of_some_steps_are_kept_to_be_read(train):
    job = train(**IN_PAIRS)
    samples = lines_of(job.result / "responses.jsonl")
    # Two responses to the first eight prompts of steps 1, 2 and 4.
    assert [line["step"] for line in samples] == [1] * 16 + [2] * 16 + [4] * 16
    assert all(line["prompt"].startswith("\n\nHuman: ") for line in samples)
    first = samples[:16]
    assert [line["prompt"] for line in first[:8]] == [line["prompt"] for line in first[8:]]
    assert len({line["score"] for line in samples}) > 16
    assert {line["kl"] for line in first} == {0.0}


def test_the_reference_of_adapters_is_the_model_below_them(train, monkeypatch):
    loaded = []
    load = train_rlhf.load_causal
    monkeypatch.setattr(train_rlhf, "load_causal", lambda *a: loaded.append(a[0]) or load(*a))
    job = train(lora_rank=4, actor_learning_rate=0.01)
    assert len(loaded) == 1
    kl = values(job, "objective/kl")
    assert kl[0] == 0.0 != kl[1]
    assert (job.result / "adapter/adapter_model.safetensors").exists()


def test_a_reference_is_loaded_where_more_than_adapters_is_trained(train, monkeypatch):
    loaded = []
    load = train_rlhf.load_causal
    monkeypatch.setattr(train_rlhf, "load_causal", lambda *a: loaded.append(a[0]) or load(*a))
    job = train(lora_rank=4, train_base="embeddings_and_norms")
    assert len(loaded) == 2
    assert values(job, "objective/kl")[0] == pytest.approx(0, abs=1e-5)


def test_the_average_is_kept_beside_the_last_weights(train, road):
    job = train(ema_decay=0.75)
    last, average, first = weights_of(job), weights_of(job, "ema"), sft_weights(road)
    assert not torch.equal(average, last)
    # Four updates: no further from the start than the last weights, and not there any more.
    assert 0 < (average - first).norm() < (last - first).norm()
    assert (job.result / "ema/tokenizer.json").exists()


def test_text_is_learnt_beside(train):
    settings = {"actor_learning_rate": 0.01, "warmup_steps": 0, "ptx": "tiny"}
    losses = {coef: values(train(ptx_coef=coef, **settings), "ptx/loss") for coef in (1e-9, 27.8)}
    # So weak that the responses alone are learnt from, and so strong that the text is.
    assert losses[27.8][-1] < losses[1e-9][-1] - 0.3


def test_kl_coef_is_steered(train):
    # A target that no KL reaches: a fifth lower for each horizon of responses.
    job = train(kl_target=1e6, kl_horizon=120)
    first, second = values(job, "objective/kl_coef")
    assert second == pytest.approx(0.8 * first)


def test_the_critic_alone_is_trained_at_first(train, road):
    job = train(critic_warmup_steps=2)
    assert torch.equal(weights_of(job), sft_weights(road))
    assert not values(job, "policy/loss")
    assert len(values(job, "value/loss")) == 2


def test_updates_of_a_step_stop_when_the_policy_has_moved_too_far(train):
    moved = values(train(ppo_epochs=4, actor_learning_rate=0.01, warmup_steps=0), "policy/approxkl")
    job = train(ppo_epochs=4, actor_learning_rate=0.01, warmup_steps=0, max_approx_kl=1e-6)
    # After the second update, which sees what the first has done.
    assert max(values(job, "policy/approxkl")) < min(moved)


def test_in_fp16_actor_and_critic_can_leave_out_the_same_steps(train, halves):
    fp16 = {"dtype": "fp16", "rollout_batch_size": 60, "max_response_length": 4}
    skipped = [
        [values(job, f"{part}/skipped_steps") for part in ("policy", "value")]
        for job in (train(**fp16), train(**fp16, align_overflow=True))
    ]
    assert skipped[0][0] != skipped[0][1]
    assert skipped[1][0] == skipped[1][1]


def test_scores_of_a_function_are_learnt_without_a_reward_model(train, functions, monkeypatch):
    # How responses end does not count here.
    monkeypatch.setattr(gates, "NEVER_ENDS", 10**6)
    (functions / "twelve.py").write_text(
        "def score(prompts, responses):\n    return [-abs(len(a) - 12) for a in responses]\n"
    )
    settings = {"reward": None, "reward_functions": {"twelve": 1.0}}
    settings |= {"epochs": 8, "actor_learning_rate": 0.01, "warmup_steps": 0, "kl_coef": 0.0}
    for algorithm in ("ppo", "grpo"):
        several = IN_PAIRS if algorithm == "grpo" else {}
        job = train(without=("reward",), algorithm=algorithm, **settings, **several)
        scores = values(job, "objective/scores")
        assert np.mean(scores[-2:]) > np.mean(scores[:2]) + 2


ALL = {
    "ema_decay": 0.9,
    "kl_target": 1.0,
    "kl_horizon": 1000,
    "standardize_scores": "running",
    "epochs": 2,
    "log_responses_steps": 1,
}
STOPS = """
import os, signal
calls = 0
def score(prompts, responses):
    global calls
    calls += 1
    if calls == {at}:
        {what}
    return [float(len(a)) for a in responses]
"""


def test_a_run_that_was_stopped_ends_in_the_same_bytes(train, functions):
    program = functions / "stops.py"
    settings = ALL | {"reward_functions": {"stops": 0.1}}
    program.write_text(STOPS.format(at=0, what="pass"))
    whole = result_files(train(**settings).result)
    program.write_text(STOPS.format(at=2, what="os.kill(os.getpid(), signal.SIGTERM)"))
    with pytest.raises(SystemExit, match="stopped by SIGTERM after step 2"):
        train(**settings)
    program.write_text(STOPS.format(at=0, what="pass"))
    job = train(**settings)
    assert job.record["resumed_after_step"] == 2
    assert result_files(job.result) == whole
    assert {"ema/model.safetensors", "responses.jsonl"} <= whole.keys()


def test_a_function_that_fails_costs_no_step_before_it(train, functions):
    program = functions / "stops.py"
    settings = ALL | {"reward_functions": {"stops": 0.1}}
    program.write_text(STOPS.format(at=3, what="raise ValueError('no such response')"))
    with pytest.raises(InputError, match=r"rewards/stops.py: line 8: ValueError: no such response"):
        train({"save_steps": 1}, **settings)
    program.write_text(STOPS.format(at=0, what="pass"))
    assert train({"save_steps": 1}, **settings).record["resumed_after_step"] == 2


def test_zero_stages_find_the_same(train):
    first, *others = (
        train({"zero_stage": stage, "critic_zero_stage": critic}, ema_decay=0.9)
        for stage, critic in ((0, 0), (2, 3), (3, 0))
    )
    for job in others:
        for line, expected in zip(job.metrics, first.metrics, strict=True):
            assert line == pytest.approx(expected, rel=1e-3, abs=1e-4)
        for folder in (".", "ema"):
            assert (weights_of(job, folder) - weights_of(first, folder)).abs().max() < 1e-3


def test_models_that_rest_on_the_cpu_score_the_same(train):
    there = train({"offload_frozen": False}).metrics
    assert train({"offload_frozen": True}).metrics == there


def test_an_actor_that_never_ends_is_told(train, monkeypatch):
    monkeypatch.setattr(HfSampler, "sample", responses_of([9, 8, 7]))
    message = r"step 5: none of the last 600 responses ended within max_response_length"
    with pytest.raises(InputError, match=message):
        train(epochs=5)


def test_responses_that_are_all_empty_are_told(train, monkeypatch, road):
    monkeypatch.setattr(HfSampler, "sample", responses_of("eos"))
    with pytest.raises(InputError, match="step 1: all 120 responses are empty"):
        train()


def test_a_sampler_with_other_logprobabilities_is_corrected(train, monkeypatch):
    sample, plain = HfSampler.sample, train()

    def sure(self, prompts):
        """As if each token had been certain."""
        responses, _ = sample(self, prompts)
        return responses, [[[0.0] * len(ids) for ids in found] for found in responses]

    monkeypatch.setattr(HfSampler, "sample", sure)
    monkeypatch.setattr(
        train_rlhf,
        "make_sampler",
        lambda settings, *rest: HfSampler(settings, *rest[:2]),
    )
    job = train(generation_backend="vllm", importance_sampling_cap=2.0)
    for line in job.metrics:
        # The entropy is the mean of -log p.
        assert line["policy/sampler_difference"] == pytest.approx(line["objective/entropy"], 0.1)
    # The same responses, but tokens that are as rare as these hardly count.
    assert job.metrics[0]["objective/scores"] == plain.metrics[0]["objective/scores"]
    assert job.metrics[0]["policy/grad_norm"] < plain.metrics[0]["policy/grad_norm"] / 4


def responses_of(ids):
    """A sampler that always says the same."""

    def sample(self, prompts):
        response = [self.tokenizer.eos_token_id] if ids == "eos" else ids
        return [[response] * len(prompts)] * self.settings.num_generations, None

    return sample


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            "[1.0] * len(responses)",
            "step 1: every response has the same score, 1: there is nothing",
        ),
        ("[float('nan')] * len(responses)", r"rewards/mine.py: score gave nan for the response"),
        ("[1.0]", r"rewards/mine.py: score gave 1 numbers for 120 responses"),
    ],
)
def test_scores_that_teach_nothing_are_told(score, message, train, functions):
    (functions / "mine.py").write_text(f"def score(prompts, responses):\n    return {score}\n")
    with pytest.raises(InputError, match=message):
        train(without=("reward",), reward=None, algorithm="ppo", reward_functions={"mine": 1})


def test_a_prompt_longer_than_the_models_positions_is_told(train):
    with pytest.raises(InputError, match="sequences of up to 5008 tokens, but positions for"):
        train(max_prompt_length=5000)
