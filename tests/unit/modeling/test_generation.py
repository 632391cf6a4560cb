"""Sampled responses: where they end, their order, the distribution they come from, and the passes
that make them.
"""

import copy
import inspect
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from conftest import INIT
from snakechat.modeling import generation as generate
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import draw, make_sampler, pad_left, sample_responses
from snakechat.modeling.models import make_causal
from support.families import FAMILIES

PROMPTS = [[0, 9, 8, 7, 6, 5, 40, 41], [0, 21], [0, 30, 31, 32], [0, 50, 51], [0, 60, 61, 62, 63]]
MAX_TOKENS = 8192


@pytest.fixture(scope="module")
def model(tokenizer):
    # Wide apart weights: its distributions are sharp enough to be told from others.
    return make_causal({**INIT, "init_std": 0.2}, tokenizer, 1).eval()


@pytest.fixture(scope="module")
def ending(model, tokenizer):
    """The same model, with eos made likely: 6 added to its logit at every position."""
    model = copy.deepcopy(model)
    eos = model.get_output_embeddings().weight[tokenizer.eos_token_id].detach()
    with torch.no_grad():
        model.model.decoder.final_layer_norm.bias += 6.0 * eos / eos.square().sum()
    return model


@pytest.mark.parametrize("kind", [list, lambda ids: np.array(ids, dtype=np.uint16)])
def test_prompts_are_padded_so_that_all_end_together(kind):
    # A pad id that belongs to a prompt counts.
    prompts = [kind(ids) for ids in ([8], [5, 65535, 7], [1, 1])]
    input_ids, attention_mask = pad_left(prompts, 1, torch.device("cpu"))
    assert input_ids.tolist() == [[1, 1, 8], [5, 65535, 7], [1, 1, 1]]
    assert attention_mask.tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]
    assert input_ids.dtype == attention_mask.dtype == torch.int64


def sample_several(
    model, tokenizer, prompts, samples, seed=0, temperature=1.0, length=8, max_tokens=MAX_TOKENS
):
    torch.manual_seed(seed)
    return sample_responses(model, prompts, tokenizer, length, temperature, max_tokens, samples)


def sample(model, tokenizer, prompts, **options):
    [responses] = sample_several(model, tokenizer, prompts, 1, **options)
    return responses


def test_responses_end_at_the_first_eos_or_at_the_limit(ending, tokenizer):
    responses = sample(ending, tokenizer, PROMPTS * 10)
    eos = tokenizer.eos_token_id
    ended = [response for response in responses if response[-1] == eos]
    cut = [response for response in responses if response[-1] != eos]
    # Both kinds occur.
    assert ended
    assert cut
    assert all(1 <= len(response) <= 8 for response in ended)
    assert all(response.count(eos) == 1 for response in ended)
    assert all(len(response) == 8 and eos not in response for response in cut)
    # Short ones among long ones: what fills the batch up is gone.
    assert min(map(len, ended)) < 8


def test_a_limit_of_one_gives_one_token(model, tokenizer):
    assert [len(response) for response in sample(model, tokenizer, PROMPTS, length=1)] == [1] * 5


def test_same_seed_same_responses(model, tokenizer):
    assert sample(model, tokenizer, PROMPTS, seed=4) == sample(model, tokenizer, PROMPTS, seed=4)
    assert sample(model, tokenizer, PROMPTS, seed=4) != sample(model, tokenizer, PROMPTS, seed=5)


def greedy(model, prompt, length=8, eos=None):
    """The likeliest token at each place, from plain forward passes without padding or cache."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] != eos):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# So cold that the likeliest token is all there is, and as cold as can be. 60 tokens hold three of
# the longest prompts with their responses: two passes and more.
@pytest.mark.parametrize("temperature", [1e-3, 0])
@pytest.mark.parametrize("max_tokens", [MAX_TOKENS, 60, 1])
def test_responses_stand_in_the_order_of_their_prompts(model, tokenizer, max_tokens, temperature):
    options = {"temperature": temperature, "max_tokens": max_tokens}
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert sample(model, tokenizer, PROMPTS, **options) == expected
    assert sample_several(model, tokenizer, PROMPTS, 3, **options) == [expected] * 3
    assert len(set(map(tuple, expected))) == len(PROMPTS)


def test_neither_top_k_nor_top_p_of_the_models_own_settings_count(model, tokenizer):
    model = copy.deepcopy(model)
    model.generation_config.top_k, model.generation_config.top_p = 1, 0.01
    first_tokens = {ids[0] for ids in sample(model, tokenizer, [PROMPTS[0]] * 64, length=1)}
    assert len(first_tokens) > 1


def logprobs_of(model, responses, temperature):
    """Log-probabilities of all response tokens, row after row, by a pass as in training."""
    policy, rows = Policy(model), np.arange(len(PROMPTS))
    [part] = Examples(PROMPTS, responses).passes(rows, MAX_TOKENS, policy.packs, model.device)
    with torch.no_grad():
        found = policy(part.grid, temperature).split(part.grid.lengths.tolist())
    return torch.cat([found[part.rows.index(row)] for row in rows])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_under_generation_are_those_of_a_pass(ending, tokenizer, temperature):
    # Generation pads on the left and keeps a cache, training packs and does not.
    input_ids, attention_mask = pad_left(PROMPTS, tokenizer.pad_token_id, ending.device)
    torch.manual_seed(0)
    generated = ending.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows, eos = generated.sequences[:, input_ids.shape[1] :].tolist(), tokenizer.eos_token_id
    responses = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in rows]
    tables = torch.stack(generated.scores, dim=1).log_softmax(dim=-1)
    expected = [
        tables[row, place, token]
        for row, response in enumerate(responses)
        for place, token in enumerate(response)
    ]
    logprobs = logprobs_of(ending, responses, temperature)
    torch.testing.assert_close(logprobs, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_responses_come_from_the_distribution_that_a_pass_gives(model, tokenizer, temperature):
    # The mean of log p(token) is minus the entropy, if tokens come from p and nothing else: another
    # temperature, or rare tokens left out, would move it. The long prompt makes padding.
    repeats = 2000
    prompts = [PROMPTS[0]] + [PROMPTS[1]] * repeats
    responses = sample(
        model, tokenizer, prompts, temperature=temperature, length=1, max_tokens=1 << 20
    )
    tokens = torch.tensor([response[0] for response in responses[1:]])
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1]])).logits[0, -1] / temperature
    table = torch.log_softmax(logits, dim=-1)
    entropy = -(table.exp() * table).sum()
    deviation = (table.exp() * (table + entropy) ** 2).sum().sqrt()
    difference = table[tokens].mean() + entropy
    assert difference.abs() < 4 * deviation / repeats**0.5
    # Sharp enough to tell these temperatures from each other.
    assert 4 * deviation / repeats**0.5 < 0.2


# Every family of models, rows that leave the pass.


class Ids(NamedTuple):
    """What is asked of a tokenizer here."""

    eos_token_id: int
    pad_token_id: int


WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
KINDS = {name: (name, {}) for name in FAMILIES} | {
    f"{name}, window": (name, WINDOW) for name in ("mistral", "qwen2", "qwen3")
}


@pytest.fixture(params=KINDS)
def member(request, tokenizer):
    """A model of each family, with weights wide apart; some again with windows that slide."""
    family, changes = KINDS[request.param]
    model = make_causal({**FAMILIES[family], **changes}, tokenizer, 1).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
                weight *= 2 / weight.shape[1] ** 0.5
    return model


@pytest.mark.parametrize("samples", [1, 3])
def test_each_family_gives_what_plain_passes_give(member, tokenizer, samples):
    whole = [greedy(member, prompt, 12) for prompt in PROMPTS]
    # The token that ends a response is one that comes in some, at different places.
    places = {eos: [ids.index(eos) for ids in whole if eos in ids] for ids in whole for eos in ids}
    eos = max(places, key=lambda eos: (len(set(places[eos])), len(places[eos]) < len(whole)))
    expected = [greedy(member, prompt, 12, eos) for prompt in PROMPTS]
    assert len(set(map(len, expected))) > 1
    ids = Ids(eos, tokenizer.pad_token_id)
    options = {"temperature": 0, "length": 12}
    assert sample_several(member, ids, PROMPTS, samples, **options) == [expected] * samples


def test_16_bit_weights_sample(ending, tokenizer):
    model = copy.deepcopy(ending).to(torch.bfloat16)
    found = sample_several(model, tokenizer, PROMPTS, 8)
    lengths = {len(response) for responses in found for response in responses}
    assert min(lengths) < 8 == max(lengths)


@pytest.mark.parametrize("samples", [1, 4])
def test_a_response_does_not_depend_on_the_rows_beside_it(ending, tokenizer, samples, monkeypatch):
    # All together or each prompt alone; ended rows leave at once, or never.
    found = []
    for max_tokens in (MAX_TOKENS, 1):
        for share in (1, 0.5, 0):
            monkeypatch.setattr(generate, "STILL_OPEN", share)
            options = {"length": 24, "max_tokens": max_tokens}
            found.append(sample_several(ending, tokenizer, PROMPTS * 4, samples, **options))
    assert all(responses == found[0] for responses in found)
    assert len({len(response) for responses in found[0] for response in responses}) > 8


def passes_of(model, monkeypatch, work):
    """input_ids and number of logits of each pass that a model makes meanwhile."""
    seen, forward = [], model.forward

    def watched(*arguments, **named):
        output = forward(*arguments, **named)
        seen.append((tuple(named["input_ids"].shape), tuple(output.logits.shape)))
        return output

    # Its signature tells whether it takes position_ids.
    watched.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(model, "forward", watched)
    work()
    return seen


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_prompt_is_read_once_and_ended_rows_leave(ending, tokenizer, share, monkeypatch):
    found, share = [], share or generate.STILL_OPEN
    monkeypatch.setattr(generate, "STILL_OPEN", share)
    seen = passes_of(
        ending,
        monkeypatch,
        lambda: found.extend(sample_several(ending, tokenizer, PROMPTS, 8, length=24)),
    )
    # Logits of the last position alone.
    assert seen[0] == ((5, 8), (5, 1, 300))
    lengths = [len(response) for responses in found for response in responses]
    assert len(seen) == max(lengths)
    for place, (inputs, logits) in enumerate(seen[1:], start=1):
        still = sum(length > place for length in lengths)
        assert inputs[1] == logits[1] == 1
        # Of no use is only what is too little to be taken out.
        assert still <= inputs[0] < still / share
    assert len({inputs for inputs, _ in seen}) > 4


@pytest.mark.parametrize(("samples", "max_tokens"), [(1, 48), (3, 144), (2, 60)])
def test_no_pass_has_more_tokens_than_it_may(model, tokenizer, samples, max_tokens, monkeypatch):
    seen = passes_of(
        model,
        monkeypatch,
        lambda: sample_several(model, tokenizer, PROMPTS, samples, max_tokens=max_tokens),
    )
    prompts = [inputs for inputs, _ in seen if inputs[1] > 1]
    assert sum(rows for rows, _ in prompts) == len(PROMPTS)
    assert len(prompts) > 1
    assert all(rows * samples * (width + 8) <= max_tokens for rows, width in prompts)
    # As many as go in: three of 8 tokens and 8 more, or each its own.
    if max_tokens // samples == 48:
        assert prompts[0] == (3, 8)


def test_samples_of_a_prompt_are_drawn_apart(model, tokenizer):
    found = sample_several(model, tokenizer, PROMPTS, 4)
    assert len({tuple(response) for responses in found for response in responses}) == 20


# Draws.


def test_a_token_is_where_the_distribution_passes_the_chance():
    # 1/2, 1/8, 0, 3/8: the third token never comes.
    logits = torch.tensor([[0.5, 0.125, 0.0, 0.375]]).log()
    chances = torch.tensor([[0.0, 0.49, 0.5, 0.62, 0.63, 0.9999999999]], dtype=torch.float64)
    assert draw(logits, chances, 1.0).tolist() == [[0, 0, 1, 1, 3, 3]]
    # At temperature 1/2 probabilities are as their squares: 16, 1, 0, 9 of 26.
    chances = torch.tensor([[15.9, 16.1, 17.1]], dtype=torch.float64) / 26
    assert draw(logits, chances, 0.5).tolist() == [[0, 1, 3]]
    assert draw(logits, chances, 0).tolist() == [[0, 0, 0]]


def test_no_chance_leads_to_a_token_that_cannot_be():
    logits = torch.full((1, 100), -math.inf)
    logits[0, [3, 70]] = 0.0
    chances = torch.tensor([[0, 0.5 - 2**-53, 0.5, 1 - 2**-53]], dtype=torch.float64)
    assert draw(logits, chances, 1.0).tolist() == [[3, 3, 70, 70]]


def test_rare_tokens_among_many_are_drawn():
    # The last of 50,000 tokens has 1e-9 of the whole, less than fp32 has room for beside 1.
    logits = torch.zeros(1, 50_000)
    logits[0, -1] = math.log(1e-9 * 50_000)
    chances = torch.tensor([[1 - 2e-9, 1 - 0.5e-9]], dtype=torch.float64)
    assert draw(logits, chances, 1.0).tolist() == [[49_998, 49_999]]


# Samplers.


def test_the_sampler_of_hf_samples_as_settings_say_and_with_the_weights_of_now(model, tokenizer):
    settings = SimpleNamespace(generation_backend="hf", num_generations=2, temperature=0.7, max_response_length=6)
    sampler = make_sampler(settings, tokenizer, 48, "unused")
    model = copy.deepcopy(model)
    for _ in range(2):
        sampler.update(model)
        torch.manual_seed(0)
        responses, logprobs = sampler.sample(PROMPTS)
        options = {"temperature": 0.7, "length": 6, "max_tokens": 48}
        assert responses == sample_several(model, tokenizer, PROMPTS, 2, **options)
        assert logprobs is None
        with torch.no_grad():
            model.get_output_embeddings().weight.neg_()
    assert responses != sampler.sample(PROMPTS)[0]
    sampler.close()
