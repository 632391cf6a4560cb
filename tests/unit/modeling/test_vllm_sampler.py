"""Generation by vLLM: its arguments and its outputs.

vLLM is not installed. A stub generates with transformers in its place, and accepts exactly the
arguments that we use. `make test-vllm` trains with vLLM itself (tests/programs/test_vllm.py), on a
CPU: only the stub sleeps, like vLLM on a GPU.
"""

import contextlib
import gc
import os
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from snakechat.modeling.generation import HfSampler, make_sampler
from snakechat.modeling.lora import add_lora
from snakechat.modeling.vllm_sampler import CPU_OPTIONS
from snakechat.workflow.errors import InputError

PROMPTS = [[0, 9, 8, 7], [0, 21], [0, 30, 31]]
# eos, and the end of a turn.
STOPS = (2, 44)
# Documented arguments of vllm.LLM and vllm.SamplingParams.
ENGINE = {"model", "dtype", "max_model_len", "gpu_memory_utilization", "tensor_parallel_size"}
ENGINE |= {"distributed_executor_backend", "skip_tokenizer_init", "generation_config"}
ENGINE |= {"logprobs_mode", "enable_sleep_mode", "seed"}
SAMPLING = {"n", "temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "logprobs"}
SAMPLING |= {"detokenize", "seed"}


class EngineCore:
    """Stub of what an engine runs in; an engine that is deleted would end the process group."""

    def shutdown(self):
        """End the engine."""


class Llm:
    """Stub of vllm.LLM with its own copy of the model in a folder."""

    def __init__(self, **options):
        assert set(options) - CPU_OPTIONS.keys() == ENGINE
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.options, self.events = options, []
        self.llm_engine = SimpleNamespace(engine_core=EngineCore())
        self.missing = set()
        self.asleep = set()
        self.model = AutoModelForCausalLM.from_pretrained(options["model"]).eval()
        # vLLM also seeds torch's generator in its process.
        torch.manual_seed(0)

    def sleep(self, level):
        """Discard the cache, and at level 2 the weights."""
        assert self.options["enable_sleep_mode"] and level == 2 and not self.asleep
        self.events.append("sleep")
        self.asleep = {"weights", "kv_cache"}
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(torch.nan)
        self.missing = set(self.model.state_dict())

    def wake_up(self, tags):
        """Allocate memory again."""
        assert {*tags} <= self.asleep
        self.events.append(f"wake up {' '.join(tags)}")
        self.asleep -= {*tags}

    def collective_rpc(self, method, kwargs):
        """Copy weights, which have the names of the folder's weights."""
        assert method == "reload_weights" and "weights" not in self.asleep
        own = self.model.state_dict()
        for name, weight in kwargs.pop("weights_iterator"):
            own[name].copy_(weight)
            self.missing.discard(name)
            self.events.append(name)
        assert not kwargs

    def reset_prefix_cache(self):
        """Clear the prefix cache."""
        assert not self.asleep
        self.events.append("reset")

    def generate(self, prompts, params, use_tqdm):
        """Sample the responses to each prompt."""
        assert not use_tqdm and not self.asleep and not self.missing
        self.params = params
        return [
            SimpleNamespace(
                outputs=[
                    self.response(prompt["prompt_token_ids"], param, number)
                    for number in range(param.n)
                ]
            )
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def response(self, prompt, params, number):
        """One response, with the log-probabilities of its tokens after temperature."""
        random = torch.Generator().manual_seed(params.seed + number)
        ids, logprobs = list(prompt), []
        while len(logprobs) < params.max_tokens and (
            not logprobs or ids[-1] not in params.stop_token_ids
        ):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1] / params.temperature
            token = int(torch.multinomial(logits.softmax(0), 1, generator=random))
            logprobs.append({token: SimpleNamespace(logprob=logits.log_softmax(0)[token].item())})
            ids.append(token)
        return SimpleNamespace(token_ids=tuple(ids[len(prompt) :]), logprobs=logprobs)


def sampling_params(**options):
    assert set(options) == SAMPLING
    return SimpleNamespace(**options)


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = Llm, sampling_params
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
    """Models that say that they are on a GPU."""
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))


@pytest.fixture
def sampler(folder, tokenizer):
    return make_sampler(SETTINGS, STOPS, 8192, folder)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.usefixtures("gpu")
def test_the_engine_sleeps_between_samples_and_gets_weights_by_block(sampler, model, rank):
    weights = list(model.state_dict())
    if rank:
        model = add_lora(model, rank, 4)
    gathered = []

    @contextlib.contextmanager
    def gather(weights):
        gathered.append(len(weights))
        yield

    torch.manual_seed(1)
    sampler.update(model, gather)
    first = sampler.sample(PROMPTS)
    assert sampler.llm.events == [*weights, "reset"]
    assert not sampler.llm.options.keys() & CPU_OPTIONS.keys()
    # 16 weights of each block, and the adapters of its 6 layers.
    assert gathered == [1] * 4 + [16 + 6 * rank] * 2 + [1]
    sampler.llm.events.clear()
    sampler.sleep()
    sampler.update(model, gather)
    ends = ["wake up kv_cache", "reset"]
    assert sampler.llm.events == ["sleep", "wake up weights", *weights, *ends]
    torch.manual_seed(1)
    sampler.update(model, gather)
    assert sampler.sample(PROMPTS) == first


@pytest.mark.usefixtures("gpu")
def test_a_closed_engine_sleeps_and_exists_until_the_process_ends(folder, model):
    sampler = make_sampler(SETTINGS, STOPS, 8192, folder)
    sampler.close()
    sampler.update(model)
    events, engine = sampler.llm.events, weakref.ref(sampler.llm.llm_engine.engine_core)
    sampler.close()
    sampler.close()
    assert events[-1] == "sleep"
    del sampler
    gc.collect()
    assert engine()


def test_processes_of_an_engine_use_the_seeds_of_the_first_one(folder, model, monkeypatch):
    groups = []
    monkeypatch.setattr(
        torch.distributed, "new_subgroups", lambda size: (groups.append(size) or "own group", [])
    )

    def broadcast(seeds, group, group_src):
        assert (group, group_src) == ("own group", 0)
        seeds.copy_(torch.arange(len(seeds)) + 7)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    sampler = make_sampler(SETTINGS, STOPS, 8192, folder, 2)
    assert sampler.num_ranks == 2
    for _ in range(2):
        sampler.update(model)
        sampler.sample(PROMPTS)
        assert [params.seed for params in sampler.llm.params] == [7, 8, 9]
    assert groups == [2]
    assert sampler.llm.options["tensor_parallel_size"] == 2
    # vLLM needs the same one in all processes.
    assert sampler.llm.options["seed"] == 0


def test_responses_and_logprobs_are_ordered_by_generation_and_prompt(sampler, model, tokenizer):
    with torch.no_grad():
        head = model.get_output_embeddings().weight[tokenizer.eos_token_id]
        model.model.decoder.final_layer_norm.bias += 4.0 * head / head.square().sum()
    sampler.update(model)
    torch.manual_seed(0)
    responses, logprobs = sampler.sample(PROMPTS * 4)
    assert [len(rows) for rows in (*responses, *logprobs)] == [12] * 4
    ends = set()
    for generation, token_logprobs in zip(responses, logprobs, strict=True):
        for prompt, ids, values in zip(PROMPTS * 4, generation, token_logprobs, strict=True):
            assert len(ids) == len(values)
            ends.add(ids[-1] in STOPS)
            assert not set(ids[:-1]) & set(STOPS)
            with torch.no_grad():
                logits = model.eval()(torch.tensor([prompt + ids])).logits[0]
            table = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(dim=-1)
            expected = table[range(len(ids)), ids]
            torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-4, atol=1e-4)
    # Some responses end, others are truncated.
    assert ends == {True, False}


def test_seeds_differ_by_prompt_and_step_and_are_reproducible(sampler, model):
    def steps():
        seeds = []
        for _ in range(2):
            sampler.update(model)
            sampler.sample(PROMPTS)
            seeds.append([params.seed for params in sampler.llm.params])
        return seeds

    # The first call starts the engine, which seeds torch's generator.
    torch.manual_seed(5)
    first = steps()
    torch.manual_seed(5)
    assert steps() == first
    assert len({seed for step in first for seed in step}) == 6
    # A run that resumes after its first step restores the generator's state.
    torch.manual_seed(5)
    sampler.sample(PROMPTS)
    state = torch.get_rng_state()
    sampler.close()
    torch.manual_seed(9)
    torch.set_rng_state(state)
    assert steps()[0] == first[1]


def test_without_vllm_the_error_names_the_alternative(folder, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        InputError,
        match=r"install it \(docs/en/gpu.md\), or set generation_backend: hf",
    ):
        make_sampler(SETTINGS, STOPS, 8192, folder)
    # The other backend does not import it.
    settings = SimpleNamespace(generation_backend="hf")
    assert isinstance(make_sampler(settings, STOPS, 8192, folder), HfSampler)
