"""Generation: ends, order and distribution of responses, and the forward passes behind them."""

import copy
import gc
import itertools
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import LoraLayer

from conftest import INIT
from snakechat.modeling import decoding, generation
from snakechat.modeling.decoding import sample_tokens
from snakechat.modeling.generation import Sampler
from snakechat.modeling.loading import add_lora
from snakechat.modeling.models import Acceleration, accelerated, acceleration, make_causal
from snakechat.workflow.errors import InputError
from support.families import FAMILIES, WINDOWS, spread
from support.passes import sample_responses

PROMPTS = [[0, 9, 8, 7, 6, 5, 40, 41], [0, 21], [0, 30, 31, 32], [0, 50, 51], [0, 60, 61, 62, 63]]
MICRO_BATCH_TOKENS = 8192
# Of the tokenizer.
EOS = 2


@pytest.fixture(scope="module")
def model(tokenizer):
    # Large weights make sharp distributions, which differ measurably between temperatures.
    return make_causal({**INIT, "init_std": 0.2}, tokenizer, 1).eval()


@pytest.fixture(scope="module")
def ending(model):
    """The same model with a likely eos: 6 added to its logit at every position."""
    model = copy.deepcopy(model)
    eos = model.get_output_embeddings().weight[EOS].detach()
    with torch.no_grad():
        model.model.decoder.final_layer_norm.bias += 6.0 * eos / eos.square().sum()
    return model


def sample(
    model,
    prompts=PROMPTS,
    num_generations=1,
    stops=(EOS,),
    temperature=1.0,
    max_response_length=8,
    micro_batch_tokens=MICRO_BATCH_TOKENS,
):
    torch.manual_seed(0)
    sampler = Sampler(stops, max_response_length, temperature, num_generations)
    with accelerated(replace(acceleration(), micro_batch_tokens=micro_batch_tokens)):
        return sample_responses(model, prompts, sampler)


def test_responses_end_at_the_first_stop_id_or_at_the_limit(ending):
    [free] = sample(ending, stops=[299])
    # Tokens that were sampled first and second somewhere.
    stops = [EOS, free[0][1], free[1][2]]
    [responses] = sample(ending, PROMPTS * 4, stops=stops)
    # Several of them, and the limit.
    assert len({response[-1] for response in responses} & set(stops)) > 1
    assert {response[-1] for response in responses} - set(stops)
    for response in responses:
        assert not set(response[:-1]) & set(stops)
        assert response[-1] in stops or len(response) == 8
    # Their order only determines the padding.
    assert sample(ending, PROMPTS * 4, stops=stops[::-1]) == [responses]


def greedy(model, prompt, length=8, eos=None):
    """The most likely tokens, from forward passes without padding or cache."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] != eos):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# Learned positions, ALiBi, rotary positions with a window, and windows of some layers.
MODELS = ("opt", "bloom", "qwen3", "qwen3, window", "gemma3_text")


@pytest.mark.parametrize("family", MODELS)
def test_each_family_generates_what_uncached_passes_predict(family, tokenizer):
    member = spread(make_causal((FAMILIES | WINDOWS)[family], tokenizer, 1)).eval()
    whole = [greedy(member, prompt, 12) for prompt in PROMPTS]
    # As eos, a token that occurs in some of the responses, at different positions.
    positions = {
        eos: [ids.index(eos) for ids in whole if eos in ids] for ids in whole for eos in ids
    }
    eos = max(
        positions, key=lambda eos: (len(set(positions[eos])), len(positions[eos]) < len(whole))
    )
    expected = [greedy(member, prompt, 12, eos) for prompt in PROMPTS]
    assert len(set(map(len, expected))) > 1
    options = {"stops": [eos], "temperature": 0, "max_response_length": 12}
    # 120 tokens hold one or two prompts with three responses each.
    for limit in (MICRO_BATCH_TOKENS, 120, 1):
        assert sample(member, PROMPTS, 3, **options, micro_batch_tokens=limit) == [expected] * 3
    with accelerated(Acceleration(cuda_graphs=True, stop_check_steps=4)):
        assert sample(member, PROMPTS, 3, **options) == [expected] * 3


# Paths of GPUs, compared with the reference path.


@pytest.mark.parametrize(
    ("choices", "temperature", "value"),
    [
        ({}, 0, math.nan),
        ({"stop_check_steps": 8}, 1.0, math.inf),
        ({"cuda_graphs": True}, 1.0, math.nan),
    ],
)
def test_logits_that_are_not_finite_are_an_error(choices, temperature, value, model):
    # The passes of the prompts are right.
    generation.can_be_captured(model)
    steps = itertools.count()

    def corrupt(module, arguments, logits):
        return logits.index_fill(2, torch.tensor([7]), value) if next(steps) > 2 else logits

    hook = model.get_output_embeddings().register_forward_hook(corrupt)
    with accelerated(Acceleration(**choices)), pytest.raises(InputError, match="not finite"):
        sample(model, temperature=temperature, max_response_length=20)
    hook.remove()


def test_a_prompt_is_processed_once_and_ended_rows_leave(ending, monkeypatch):
    monkeypatch.setattr(decoding, "COMPACTION_THRESHOLD", 0.5)
    shapes = []
    hook = ending.register_forward_hook(
        lambda _, args, named, output: shapes.append(
            (named["input_ids"].shape, output.logits.shape)
        ),
        with_kwargs=True,
    )
    generations = sample(ending, PROMPTS, 8, max_response_length=24)
    hook.remove()
    # Only the logits of the last position.
    assert shapes[0] == ((5, 8), (5, 1, 300))
    lengths = [len(response) for responses in generations for response in responses]
    assert len(shapes) == max(lengths)
    for step, (inputs, logits) in enumerate(shapes[1:], start=1):
        unfinished = sum(length > step for length in lengths)
        assert inputs[1] == logits[1] == 1
        assert unfinished <= inputs[0] < 2 * unfinished
    assert len({inputs for inputs, _ in shapes}) > 4


def test_a_kept_decoder_samples_the_same_responses_whatever_shape_batches_have(ending, monkeypatch):
    monkeypatch.setattr(generation.FixedDecoder, "multiple", 8)
    options = {"max_response_length": 12}
    rounds = [(PROMPTS * 4, 1), (PROMPTS[:2], 3), ([[*range(5, 30)]] * 3, 2), (PROMPTS, 4)]
    expected = [sample(ending, prompts, number, **options) for prompts, number in rounds]
    sampler = Sampler([EOS], 12, 1.0)

    def sample_again(prompts, number):
        torch.manual_seed(0)
        sampler.num_generations = number
        return sample_responses(ending, prompts, sampler)

    with accelerated(Acceleration(cuda_graphs=True, stop_check_steps=4)):
        for _ in range(2):
            assert [sample_again(*each) for each in rounds] == expected
        decoder = sampler.decoder
        sample_again(PROMPTS, 1)
        assert sampler.decoder is decoder
        # Graphs read the weights where they were.
        with torch.no_grad():
            weight = next(ending.parameters())
            weight.data = weight.data.clone()
        sample_again(PROMPTS, 1)
        assert sampler.decoder is not decoder
        # A step of fewer rows serves those that have not ended.
        shapes, step = set(), generation.FixedDecoder.step

        def recorded(decoder):
            shapes.add(decoder.state["mask"].shape)
            step(decoder)

        monkeypatch.setattr(generation.FixedDecoder, "step", recorded)
        sample_again(PROMPTS * 4, 1)
        assert len(shapes) > 1


def test_a_decoder_stays_from_the_second_step_on_if_there_is_memory(ending, monkeypatch):
    sampler = Sampler([EOS], 8, 1.0, 2)
    # Python looks for cycles at any time, or late.
    gc.disable()
    with accelerated(Acceleration(cuda_graphs=True, stop_check_steps=4)):
        for allowance, is_kept in ((0, False), (1 << 30, True), (10, False)):
            sampler.allowance = allowance
            sample_responses(ending, PROMPTS, sampler)
            decoder = weakref.ref(sampler.decoder)
            sampler.sleep()
            assert (decoder() is not None) == (sampler.decoder is not None) == is_kept
    gc.enable()
    sampler.decoder = None
    gpu = SimpleNamespace(device=torch.device("cuda"))
    sampler.update(gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30)
    sampler.step_ended()
    assert sampler.allowance == 50


def test_merged_adapters_sample_what_the_adapters_sample_and_the_weights_come_back(ending):
    model = spread(add_lora(copy.deepcopy(ending), 2, 4)).eval()
    expected = sample(model, PROMPTS, 3)
    assert expected != sample(ending, PROMPTS, 3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    passes = []
    [layer, *_] = [each for each in model.modules() if isinstance(each, LoraLayer)]
    layer.lora_A["default"].register_forward_hook(lambda *_: passes.append(1))
    with accelerated(Acceleration(cuda_graphs=True, stop_check_steps=4)):
        assert generation.can_be_captured(model)
        passes.clear()
        assert sample(model, PROMPTS, 3) == expected
    assert not passes
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert sample(model, PROMPTS, 3) == expected
    assert passes


def test_deterministic_batches_do_not_depend_on_the_free_memory(monkeypatch):
    config = SimpleNamespace(num_hidden_layers=28, num_attention_heads=16, head_dim=128)
    config.num_key_value_heads = 8
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=config)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def limits():
        found = set()
        for free in (16.0, 16.5):
            memory = int(free * 2**30), 80 << 30
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, memory=memory: memory)
            found.add(generation.max_batch_tokens(model))
        return found

    assert len(limits()) == 2
    monkeypatch.setenv("SNAKECHAT_DETERMINISTIC", "1")
    assert len(limits()) == 1


# Tokens from logits.


def test_sample_tokens_inverts_the_cumulative_distribution():
    # 1/2, 1/8, 0, 3/8: the third token has probability 0.
    logits = torch.tensor([[0.5, 0.125, 0.0, 0.375]]).log()
    uniforms = torch.tensor([[0.0, 0.49, 0.5, 0.62, 0.63, 0.9999999999]], dtype=torch.float64)
    assert sample_tokens(logits, uniforms, 1.0).tolist() == [[0, 0, 1, 1, 3, 3]]
    # Temperature 1/2 squares and normalizes the probabilities: 16, 1, 0, 9 of 26.
    uniforms = torch.tensor([[15.9, 16.1, 17.1]], dtype=torch.float64) / 26
    assert sample_tokens(logits, uniforms, 0.5).tolist() == [[0, 1, 3]]
    assert sample_tokens(logits, uniforms, 0).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary(value):
    # Elsewhere, the kernels of a GPU would end the process before the error is raised.
    logits = torch.full((2, 100), value)
    logits[1, 5] = 0.0
    tokens = sample_tokens(logits, torch.full((2, 4), 0.7, dtype=torch.float64), 1.0)
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_rare_tokens_of_a_large_vocabulary_are_sampled():
    # The last of 50,000 tokens has probability 1e-9, below the resolution of fp32 near 1.
    logits = torch.zeros(1, 50_000)
    logits[0, -1] = math.log(1e-9 * 50_000)
    uniforms = torch.tensor([[1 - 2e-9, 1 - 0.5e-9]], dtype=torch.float64)
    assert sample_tokens(logits, uniforms, 1.0).tolist() == [[49_998, 49_999]]
