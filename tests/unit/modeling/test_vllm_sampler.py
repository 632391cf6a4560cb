"""What vLLM is asked for, and what becomes of its responses.

vLLM itself needs a GPU and is not here: a small module in its place responses by plain passes of
transformers. It knows only the names that its documentation has, and checks what it is called with;
whether vLLM does what it says is not tested.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from snakechat.modeling.generation import HfSampler, make_sampler
from snakechat.modeling.lora import add_lora
from snakechat.workflow.errors import InputError

PROMPTS = [[0, 9, 8, 7], [0, 21], [0, 30, 31]]
# As vLLM's documentation names them.
ENGINE = {"model", "dtype", "max_model_len", "gpu_memory_utilization", "tensor_parallel_size"}
ENGINE |= {"distributed_executor_backend", "skip_tokenizer_init", "generation_config"}
ENGINE |= {"logprobs_mode"}
SAMPLING = {"n", "temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "logprobs"}
SAMPLING |= {"detokenize", "seed"}


class Llm:
    """Responses as vllm.LLM does, from its own copy of the model in a folder."""

    def __init__(self, **options):
        assert set(options) == ENGINE
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.options, self.events = options, []
        self.model = AutoModelForCausalLM.from_pretrained(options["model"]).eval()
        # So does the engine in the process that makes it.
        torch.manual_seed(0)

    def apply_model(self, function):
        """Call a function with the model of each worker."""
        copy = SimpleNamespace(load_weights=self.load_weights)
        assert function(copy) is None

    def load_weights(self, weights):
        """Copy weights, told by their names in the folder; returns the names."""
        self.events.append("weights")
        own = self.model.state_dict()
        names = set()
        for name, weight in weights:
            own[name].copy_(weight)
            names.add(name)
        assert names == set(own)
        return names

    def reset_prefix_cache(self):
        """Forget prompts."""
        self.events.append("reset")

    def generate(self, prompts, params, use_tqdm):
        """A response of drawn tokens for each prompt and sample."""
        assert not use_tqdm
        self.asked = params
        return [
            SimpleNamespace(
                outputs=[
                    self.response(prompt["prompt_token_ids"], way, sample)
                    for sample in range(way.n)
                ]
            )
            for prompt, way in zip(prompts, params, strict=True)
        ]

    def response(self, prompt, way, sample):
        """One response, with log-probabilities after temperature of the tokens in it."""
        random = torch.Generator().manual_seed(way.seed + sample)
        ids, logprobs = list(prompt), []
        while len(logprobs) < way.max_tokens and (not logprobs or ids[-1] != way.stop_token_ids[0]):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1] / way.temperature
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
def sampler(folder, tokenizer):
    return make_sampler(SETTINGS, tokenizer, 8192, folder)


def test_an_engine_is_asked_for_as_training_needs_it(sampler, model, folder):
    sampler.update(model)
    options = sampler.llm.options
    assert options["model"] == str(folder)
    assert options["dtype"] == "float32"
    assert options["max_model_len"] == 16
    assert 0 < options["gpu_memory_utilization"] < 0.5
    assert options["tensor_parallel_size"] == 1
    assert options["distributed_executor_backend"] == "external_launcher"
    assert options["skip_tokenizer_init"] is True
    assert options["generation_config"] == "vllm"
    assert options["logprobs_mode"] == "processed_logprobs"


def test_nothing_is_cut_off_and_eos_stops(sampler, model, tokenizer):
    sampler.update(model)
    sampler.sample(PROMPTS)
    for way in sampler.llm.asked:
        assert (way.n, way.temperature, way.max_tokens) == (2, 0.7, 6)
        assert (way.top_p, way.top_k) == (1.0, -1)
        assert way.stop_token_ids == [tokenizer.eos_token_id]
        assert way.logprobs == 0
        assert way.detokenize is False


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_are_those_of_now_with_adapters_merged(sampler, model, rank):
    if rank:
        model = add_lora(model, rank, 4)
    sampler.update(model)
    engine = sampler.llm
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn_like(weight)
    stale = engine.model(torch.tensor(PROMPTS[:1])).logits
    sampler.update(model)
    assert sampler.llm is engine
    now, expected = (m(torch.tensor(PROMPTS[:1])).logits for m in (engine.model, model.eval()))
    torch.testing.assert_close(now, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(now, stale, atol=1e-3)
    # What the cache has of prompts belongs to the weights before.
    assert engine.events == ["weights", "reset"] * 2


def test_responses_and_logprobs_stand_by_sample_and_prompt(sampler, model, tokenizer):
    with torch.no_grad():
        head = model.get_output_embeddings().weight[tokenizer.eos_token_id]
        model.model.decoder.final_layer_norm.bias += 4.0 * head / head.square().sum()
    sampler.update(model)
    torch.manual_seed(0)
    responses, logprobs = sampler.sample(PROMPTS * 4)
    assert [len(found) for found in (*responses, *logprobs)] == [12] * 4
    ends = set()
    for sample, told in zip(responses, logprobs, strict=True):
        for prompt, ids, values in zip(PROMPTS * 4, sample, told, strict=True):
            assert len(ids) == len(values)
            ends.add(ids[-1] == tokenizer.eos_token_id)
            assert ids.count(tokenizer.eos_token_id) == (ids[-1] == tokenizer.eos_token_id)
            with torch.no_grad():
                logits = model.eval()(torch.tensor([prompt + ids])).logits[0]
            table = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(dim=-1)
            expected = table[range(len(ids)), ids]
            torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-4, atol=1e-4)
    # Some responses end and others are cut.
    assert ends == {True, False}


def test_chances_are_others_for_each_prompt_and_step_and_the_same_for_a_seed(sampler, model):
    def steps():
        found = []
        for _ in range(2):
            sampler.update(model)
            sampler.sample(PROMPTS)
            found.append([way.seed for way in sampler.llm.asked])
        return found

    # The first time the engine is made, which seeds torch's generator for itself.
    torch.manual_seed(5)
    first = steps()
    torch.manual_seed(5)
    assert steps() == first
    torch.manual_seed(6)
    other = steps()
    assert len({seed for step in first + other for seed in step}) == 12
    # A run that goes on after its first step has the generator's state of then.
    torch.manual_seed(5)
    sampler.sample(PROMPTS)
    state = torch.get_rng_state()
    sampler.close()
    torch.manual_seed(9)
    torch.set_rng_state(state)
    assert steps()[0] == first[1]


def test_without_vllm_one_line_says_what_to_do(folder, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"generation_backend: vllm.*pip install vllm, or set generation_backend: hf"):
        make_sampler(SETTINGS, tokenizer, 8192, folder)
    # The other way does not ask for it.
    settings = SimpleNamespace(generation_backend="hf")
    assert isinstance(make_sampler(settings, tokenizer, 8192, folder), HfSampler)


def test_a_model_that_vllm_refuses_is_an_error_of_one_line(sampler, model, vllm, folder):
    def refuse(**_):
        raise ValueError("Model architectures are not supported\nfor now")

    vllm.LLM = refuse
    with pytest.raises(InputError) as refused:
        sampler.update(model)
    assert str(refused.value) == (
        f"{folder}: vllm: Model architectures are not supported: set generation_backend: hf"
    )
