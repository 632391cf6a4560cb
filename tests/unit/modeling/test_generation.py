"""Generation: ends, order and distribution of responses, and the forward passes behind them."""

import copy
import inspect
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import INIT
from snakechat.modeling import acceleration, fixed_decoding, generation
from snakechat.modeling.acceleration import Acceleration
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import make_sampler, sample_responses
from snakechat.modeling.models import make_causal
from snakechat.workflow.errors import InputError
from support.families import FAMILIES, WINDOWS

PROMPTS = [[0, 9, 8, 7, 6, 5, 40, 41], [0, 21], [0, 30, 31, 32], [0, 50, 51], [0, 60, 61, 62, 63]]
MICRO_BATCH_TOKENS = 8192


@pytest.fixture(scope="module")
def model(tokenizer):
    # Large weights make sharp distributions, which differ measurably between temperatures.
    return make_causal({**INIT, "init_std": 0.2}, tokenizer, 1).eval()


@pytest.fixture(scope="module")
def ending(model, tokenizer):
    """The same model with a likely eos: 6 added to its logit at every position."""
    model = copy.deepcopy(model)
    eos = model.get_output_embeddings().weight[tokenizer.eos_token_id].detach()
    with torch.no_grad():
        model.model.decoder.final_layer_norm.bias += 6.0 * eos / eos.square().sum()
    return model


def sample_several(
    model,
    tokenizer,
    prompts,
    num_generations,
    seed=0,
    temperature=1.0,
    length=8,
    micro_batch_tokens=MICRO_BATCH_TOKENS,
):
    torch.manual_seed(seed)
    stop_ids = tokenizer if isinstance(tokenizer, list) else [tokenizer.eos_token_id]
    return sample_responses(
        model, prompts, stop_ids, length, temperature, micro_batch_tokens, num_generations
    )


def sample(model, tokenizer, prompts, **options):
    [responses] = sample_several(model, tokenizer, prompts, 1, **options)
    return responses


def test_responses_end_at_the_first_stop_id_or_at_the_limit(ending, tokenizer):
    eos = tokenizer.eos_token_id
    [free] = sample_several(ending, [299], PROMPTS, 1)
    # Tokens that were sampled first and second somewhere.
    stops = [eos, free[0][1], free[1][2]]
    responses = sample(ending, stops, PROMPTS * 4)
    # Several of them, and the limit.
    assert len({response[-1] for response in responses} & set(stops)) > 1
    assert {response[-1] for response in responses} - set(stops)
    for response in responses:
        assert not set(response[:-1]) & set(stops)
        assert response[-1] in stops or len(response) == 8
    # Their order only determines the padding.
    assert sample(ending, stops[::-1], PROMPTS * 4) == responses


def greedy(model, prompt, length=8, eos=None):
    """The most likely tokens, from forward passes without padding or cache."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] != eos):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# A temperature at which only the most likely token has any probability, and 0. 60 tokens hold three
# of the longest prompts with their responses: two batches and more.
@pytest.mark.parametrize(
    ("micro_batch_tokens", "temperature"), [(MICRO_BATCH_TOKENS, 1e-3), (60, 0), (1, 0)]
)
def test_responses_are_in_the_order_of_their_prompts(
    model, tokenizer, micro_batch_tokens, temperature
):
    options = {"temperature": temperature, "micro_batch_tokens": micro_batch_tokens}
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert sample(model, tokenizer, PROMPTS, **options) == expected
    assert sample_several(model, tokenizer, PROMPTS, 3, **options) == [expected] * 3
    assert len(set(map(tuple, expected))) == len(PROMPTS)


def logprobs_of(model, responses, temperature):
    """Log-probabilities of all response tokens, row by row, from a forward pass as in training."""
    policy, rows = Policy(model), np.arange(len(PROMPTS))
    [micro_batch] = Examples(PROMPTS, responses).micro_batches(
        rows, MICRO_BATCH_TOKENS, policy.supports_packing, model.device
    )
    batch = micro_batch.batch
    with torch.no_grad():
        logprobs = policy(batch, temperature).split(batch.target_lengths.tolist())
    return torch.cat([logprobs[micro_batch.rows.index(row)] for row in rows])


# Model families, and rows that leave the batch.


def with_choices(monkeypatch, **choices):
    monkeypatch.setattr(acceleration, "_current", Acceleration(**choices))


# Learned positions, ALiBi, rotary positions with a window, and windows of some layers.
MODELS = {name: (FAMILIES | WINDOWS)[name] for name in ("opt", "bloom", "qwen3, window")}
MODELS["gemma3_text"] = FAMILIES["gemma3_text"]


@pytest.fixture(params=MODELS)
def member(request, tokenizer):
    """A model of each family with large weights, and of some with a sliding window."""
    model = make_causal(MODELS[request.param], tokenizer, 1).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
                weight *= 2 / weight.shape[1] ** 0.5
    return model


def test_each_family_generates_what_uncached_passes_predict(member):
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
    assert sample_several(member, [eos], PROMPTS, 3, temperature=0, length=12) == [expected] * 3


@pytest.mark.parametrize("choices", [{}, {"cuda_graphs": True, "stop_check_steps": 4}])
def test_logprobs_while_sampling_equal_those_of_training(member, choices, tokenizer, monkeypatch):
    # With a cache and padding on the left, and packed.
    eos, tables, sample_tokens = tokenizer.eos_token_id, [], generation.sample_tokens

    def record(logits, uniforms, temperature):
        # No response ends, so that rows stay in their order: that of the prompts' lengths.
        without_eos = logits.clone().index_fill(1, torch.tensor([eos]), -math.inf)
        tokens = sample_tokens(without_eos, uniforms, temperature)
        tables.append(logits.log_softmax(dim=-1).gather(1, tokens))
        return tokens

    for module in (generation, fixed_decoding):
        monkeypatch.setattr(module, "sample_tokens", record)
    with_choices(monkeypatch, **choices)
    responses = sample(member, [eos], PROMPTS, length=12)
    order = sorted(range(len(PROMPTS)), key=lambda row: -len(PROMPTS[row]))
    while_sampling = torch.empty(len(PROMPTS), 12)
    while_sampling[order] = torch.cat(tables, dim=1)
    trained = logprobs_of(member, responses, 1.0).view(len(PROMPTS), 12)
    torch.testing.assert_close(while_sampling, trained, rtol=1e-4, atol=1e-4)


# Paths of GPUs, compared with the reference path.


@pytest.mark.parametrize(
    "choices", [{"stop_check_steps": 100}, {"cuda_graphs": True, "stop_check_steps": 5}]
)
def test_decoding_of_a_gpu_samples_the_same_responses(ending, tokenizer, choices, monkeypatch):
    def run():
        return sample_several(ending, tokenizer, PROMPTS * 4, 3, length=10)

    expected = run()
    lengths = {len(response) for responses in expected for response in responses}
    assert min(lengths) == 1 and max(lengths) == 10
    with_choices(monkeypatch, **choices)
    assert run() == expected


@pytest.mark.parametrize(
    ("choices", "temperature", "value"),
    [
        ({}, 0, math.nan),
        ({"stop_check_steps": 8}, 1.0, math.inf),
        ({"cuda_graphs": True}, 1.0, math.nan),
    ],
)
def test_logits_that_are_not_finite_are_an_error(
    choices, temperature, value, model, tokenizer, monkeypatch
):
    # The passes of the prompts are right.
    steps = itertools.count()

    def corrupt(module, arguments, logits):
        return logits.index_fill(2, torch.tensor([7]), value) if next(steps) > 2 else logits

    with_choices(monkeypatch, **choices)
    hook = model.get_output_embeddings().register_forward_hook(corrupt)
    try:
        with pytest.raises(InputError, match="not finite"):
            sample(model, tokenizer, PROMPTS, temperature=temperature, length=20)
    finally:
        hook.remove()


def test_a_response_does_not_depend_on_the_other_rows_of_its_batch(ending, tokenizer, monkeypatch):
    # All prompts in a batch or each alone; ended rows leave at once, late or never.
    runs = []
    for micro_batch_tokens in (MICRO_BATCH_TOKENS, 1):
        for threshold in (1, 0.5, 0):
            monkeypatch.setattr(generation, "COMPACTION_THRESHOLD", threshold)
            options = {"length": 24, "micro_batch_tokens": micro_batch_tokens}
            generations = sample_several(ending, tokenizer, PROMPTS * 4, 4, **options)
            runs.append([tuple(ids) for responses in generations for ids in responses])
    # The shape of a batch changes the rounding of probabilities, and therefore a token whose random
    # number falls within 1e-6 of a boundary: at most one response in twenty.
    for responses in runs:
        differing = sum(a != b for a, b in zip(responses, runs[0], strict=True))
        assert differing <= len(responses) / 20
    assert len({len(response) for response in runs[0]}) > 8


def forward_shapes(model, monkeypatch, call):
    """Shapes of input_ids and logits of each forward pass of a model during a call."""
    shapes, forward = [], model.forward

    def recorded(*arguments, **named):
        output = forward(*arguments, **named)
        shapes.append((tuple(named["input_ids"].shape), tuple(output.logits.shape)))
        return output

    # generate_tokens reads the signature to find out whether it takes position_ids.
    recorded.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(model, "forward", recorded)
    call()
    return shapes


def test_a_prompt_is_processed_once_and_ended_rows_leave(ending, tokenizer, monkeypatch):
    generations, threshold = [], 0.5
    monkeypatch.setattr(generation, "COMPACTION_THRESHOLD", threshold)
    shapes = forward_shapes(
        ending,
        monkeypatch,
        lambda: generations.extend(sample_several(ending, tokenizer, PROMPTS, 8, length=24)),
    )
    # Only the logits of the last position.
    assert shapes[0] == ((5, 8), (5, 1, 300))
    lengths = [len(response) for responses in generations for response in responses]
    assert len(shapes) == max(lengths)
    for step, (inputs, logits) in enumerate(shapes[1:], start=1):
        unfinished = sum(length > step for length in lengths)
        assert inputs[1] == logits[1] == 1
        assert unfinished <= inputs[0] < unfinished / threshold
    assert len({inputs for inputs, _ in shapes}) > 4


def test_batches_respect_the_token_limit(model, tokenizer, monkeypatch):
    shapes = forward_shapes(
        model,
        monkeypatch,
        lambda: sample_several(model, tokenizer, PROMPTS, 3, micro_batch_tokens=144),
    )
    # Three prompts of 8 tokens, the longest, with three responses of 8 tokens.
    assert [inputs for inputs, _ in shapes if inputs[1] > 1] == [(3, 8), (2, 3)]


# Samplers.


def test_the_hf_sampler_uses_the_settings(model, tokenizer):
    settings = SimpleNamespace(
        generation_backend="hf", num_generations=2, temperature=0.7, max_response_length=6
    )
    sampler = make_sampler(settings, [tokenizer.eos_token_id], 48, "unused")
    sampler.update(model)
    torch.manual_seed(0)
    responses = sampler.sample(PROMPTS)
    options = {"temperature": 0.7, "length": 6, "micro_batch_tokens": 48}
    assert responses == (sample_several(model, tokenizer, PROMPTS, 2, **options), None)
