"""Sampled responses: where they end, their order, and the distribution they come from."""

import copy

import numpy as np
import pytest
import torch

from conftest import INIT
from rlhf.batches import Examples
from rlhf.generate import pad_left, sample_responses
from rlhf.models import make_causal
from rlhf.passes import Policy

PROMPTS = [[0, 9, 8, 7, 6, 5, 40, 41], [0, 21], [0, 30, 31, 32], [0, 50, 51], [0, 60, 61, 62, 63]]
MAX_TOKENS = 8192


@pytest.fixture(scope="module")
def model(tokenizer):
    # Wide apart weights: its distributions are sharp enough to be told from others.
    return make_causal({**INIT, "init_std": 0.2}, tokenizer, 1).eval()


@pytest.fixture(scope="module")
def ending(model, tokenizer):
    """The same model, with eos made likely: 8 added to its logit at every position."""
    model = copy.deepcopy(model)
    eos = model.get_output_embeddings().weight[tokenizer.eos_token_id].detach()
    with torch.no_grad():
        model.model.decoder.final_layer_norm.bias += 8.0 * eos / eos.square().sum()
    return model


@pytest.mark.parametrize("kind", [list, lambda ids: np.array(ids, dtype=np.uint16)])
def test_prompts_are_padded_so_that_all_end_together(kind):
    # A pad id that belongs to a prompt counts.
    prompts = [kind(ids) for ids in ([8], [5, 65535, 7], [1, 1])]
    input_ids, attention_mask = pad_left(prompts, 1, torch.device("cpu"))
    assert input_ids.tolist() == [[1, 1, 8], [5, 65535, 7], [1, 1, 1]]
    assert attention_mask.tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]
    assert input_ids.dtype == attention_mask.dtype == torch.int64


def sample(model, tokenizer, prompts, seed=0, temperature=1.0, length=8, max_tokens=MAX_TOKENS):
    torch.manual_seed(seed)
    return sample_responses(model, prompts, tokenizer, length, temperature, max_tokens)


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


def greedy(model, prompt, length=8):
    """The likeliest token at each place, from plain forward passes without padding or cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# 60 tokens hold three of the longest prompts with their answers: two passes and more.
@pytest.mark.parametrize("max_tokens", [MAX_TOKENS, 60, 1])
def test_responses_stand_in_the_order_of_their_prompts(model, tokenizer, max_tokens):
    # So cold that the likeliest token is all there is.
    responses = sample(model, tokenizer, PROMPTS, temperature=1e-3, max_tokens=max_tokens)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert responses == expected
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
