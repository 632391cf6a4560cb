"""Generation by vLLM: its arguments and its outputs.

vLLM is not installed. A stub in its place returns scripted responses. `make test-vllm` trains with
vLLM itself (tests/programs/test_vllm.py), on a CPU: only the stub sleeps, like vLLM on a GPU.
"""

import contextlib
import gc
import itertools
import os
import sys
import weakref
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from snakechat.modeling.loading import add_lora
from snakechat.modeling.vllm_sampler import CPU_OPTIONS, merged_weights
from snakechat.training.placed_models import make_sampler
from snakechat.workflow.processes import SERIAL

PROMPTS = [[0, 9, 8, 7], [0, 21], [0, 30, 31]]
# eos, and the end of a turn.
STOPS = (2, 44)


class Llm:
    """Stub of vllm.LLM, whose tokens follow from the seed of a prompt and its length."""

    def __init__(self, **options):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.options, self.events, self.weights = options, [], {}
        # An engine that is deleted would end the process group.
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
        self.asleep = set()
        # vLLM also seeds torch's generator in its process.
        torch.manual_seed(0)

    def sleep(self, level):
        assert self.options["enable_sleep_mode"] and level == 2 and not self.asleep
        self.events.append("sleep")
        self.asleep, self.weights = {"weights", "kv_cache"}, {}

    def wake_up(self, tags):
        assert {*tags} <= self.asleep
        self.events.append(f"wake up {' '.join(tags)}")
        self.asleep -= {*tags}

    def collective_rpc(self, method, kwargs):
        """Copy weights, which are valid until the next one."""
        assert method == "reload_weights" and "weights" not in self.asleep
        self.weights = {name: weight.clone() for name, weight in kwargs.pop("weights_iterator")}
        self.events += self.weights
        assert not kwargs

    def reset_prefix_cache(self):
        assert not self.asleep
        self.events.append("reset")

    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm and not self.asleep and self.weights
        self.params = params
        outputs = []
        for prompt, param in zip(prompts, params, strict=True):
            responses = []
            for number in range(param.n):
                ids = [param.seed % 100, number, len(prompt["prompt_token_ids"])]
                logprobs = [{token: SimpleNamespace(logprob=-token / 8)} for token in ids]
                responses.append(SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs))
            outputs.append(SimpleNamespace(outputs=responses))
        return outputs


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = Llm, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    return module


SETTINGS = SimpleNamespace(
    generation_backend="vllm",
    num_generations=2,
    temperature=0.7,
    dtype="fp32",
    max_prompt_length=10,
    max_response_length=6,
)


@pytest.fixture
def gpu(monkeypatch):
    """Models that say that they are on a GPU, of whose memory other programs use ever more."""
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    free = itertools.count(90, -10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3)


@pytest.fixture
def sampler(folder, tokenizer):
    return make_sampler(SETTINGS, STOPS, folder, SERIAL)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.usefixtures("gpu")
def test_the_engine_sleeps_between_samples_and_gets_one_weight_at_a_time(sampler, model, rank):
    # With the second name of a tied weight: vLLM does not load the layers of a missing name.
    weights = list(model.state_dict())
    assert "lm_head.weight" in weights
    if rank:
        model = add_lora(model, rank, 4)
    gathered = []

    @contextlib.contextmanager
    def gather(weights):
        gathered.append(len(weights))
        yield

    sampler.update(model, gather)
    sampler.sample(PROMPTS, range(3))
    assert sampler.llm.events == [*weights, "reset"]
    merged = dict(merged_weights(model))
    assert all(torch.equal(sampler.llm.weights[name], merged[name]) for name in weights)
    assert not sampler.llm.options.keys() & CPU_OPTIONS.keys()
    # One weight at a time, with the two matrices of its adapter.
    assert len(gathered) == len(weights)
    assert gathered.count(3) == (2 * 6 if rank else 0)
    sampler.llm.events.clear()
    sampler.sleep()
    assert sampler.asleep_bytes == 10
    sampler.update(model, gather)
    ends = ["wake up kv_cache", "reset"]
    assert sampler.llm.events == ["sleep", "wake up weights", *weights, *ends]
    sampler.sample(PROMPTS, range(3))


def test_an_engine_exists_until_the_process_ends(sampler, model):
    sampler.update(model)
    engine = weakref.ref(sampler.llm.llm_engine.engine_core.shutdown)
    sampler.llm = None
    gc.collect()
    assert engine()


def test_processes_of_an_engine_use_the_seeds_of_a_single_process(sampler, folder, model):
    placement = replace(SERIAL, vllm_tensor_parallel_size=2)
    seeds, one_of_two = [], make_sampler(SETTINGS, STOPS, folder, placement)
    for each, rows in ((sampler, [0, 1, 2]), (one_of_two, [2])):
        each.update(model)
        torch.manual_seed(1)
        each.sample(PROMPTS, rows)
        seeds.append([params.seed for params in each.llm.params])
    assert seeds[1] == seeds[0][2:]
    assert one_of_two.num_ranks == one_of_two.llm.options["tensor_parallel_size"] == 2
    # vLLM needs the same one in all processes.
    assert one_of_two.llm.options["seed"] == 0


def test_responses_and_logprobs_are_ordered_by_generation_and_prompt(sampler, model):
    sampler.update(model)
    responses, logprobs = sampler.sample(PROMPTS, range(3))
    seeds = [params.seed % 100 for params in sampler.llm.params]
    assert responses == [
        [[seed, number, len(prompt)] for seed, prompt in zip(seeds, PROMPTS, strict=True)]
        for number in range(2)
    ]
    assert logprobs == [[[-token / 8 for token in ids] for ids in rows] for rows in responses]
    [params, *_] = sampler.llm.params
    assert (params.temperature, params.max_tokens, params.stop_token_ids) == (0.7, 6, [*STOPS])


def test_seeds_differ_by_prompt_and_step_and_are_reproducible(sampler, model):
    def seeds():
        sampler.update(model)
        sampler.sample(PROMPTS, range(3))
        return [params.seed for params in sampler.llm.params]

    # The first call starts the engine, which seeds torch's generator.
    torch.manual_seed(5)
    first, state, second = seeds(), torch.get_rng_state(), seeds()
    assert len({*first, *second}) == 6
    # A run that resumes after its first step restores the generator's state and starts an engine.
    sampler.llm = None
    torch.set_rng_state(state)
    assert seeds() == second
