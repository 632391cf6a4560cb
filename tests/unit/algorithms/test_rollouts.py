"""Rollouts: values of models at each token against plain forward passes; distributed sampling."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snakechat.algorithms import rollouts as module
from snakechat.algorithms.rollouts import Rollouts, sample_on_all_ranks
from snakechat.modeling import models
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.models import Acceleration, make_causal
from snakechat.modeling.saving import save_model
from support.chat_templates import as_chatml
from support.families import FAMILIES, spread

CPU = torch.device("cpu")
EOS = 2
TEMPERATURE = 0.7
# Lengths of five prompts, and of the three responses to each. Every third response of all ends.
PROMPT_LENGTHS = [7, 1, 4, 2, 10]
LENGTHS = [[3, 1, 6, 2, 4], [1, 5, 2, 3, 3], [4, 4, 1, 1, 2]]
random = np.random.default_rng(1)
# As tokens come from disk.
PROMPTS = [random.integers(10, 300, length).astype(np.uint16) for length in PROMPT_LENGTHS]
RESPONSES = [[random.integers(10, 300, length).tolist() for length in row] for row in LENGTHS]
ENDED = [number % 3 == 0 for number in range(15)]
for number, ended in enumerate(ENDED):
    if ended:
        RESPONSES[number // 5][number % 5][-1] = EOS
# All first responses, then all second ones, then all third ones: (prompt, response).
PAIRS = [
    (prompt, response) for row in RESPONSES for prompt, response in zip(PROMPTS, row, strict=True)
]


@pytest.fixture(autouse=True)
def micro_batch_tokens(monkeypatch):
    """A limit of tokens with which there are several micro-batches of several rows."""
    monkeypatch.setattr(models, "_acceleration", Acceleration(micro_batch_tokens=40))


def make(prompts=PROMPTS, responses=RESPONSES, tokenizer=None, sampler_logprobs=None):
    return Rollouts(prompts, responses, tokenizer, [EOS], TEMPERATURE, CPU, sampler_logprobs)


@pytest.fixture(scope="module", params=["opt", "bloom"])
def family(request, tokenizer, tmp_path_factory):
    """A policy and a scorer of a family, which supports packing or does not (BLOOM)."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(make_causal(FAMILIES[request.param], tokenizer, 1), tokenizer, folder)
    policy = Policy(spread(load_causal(folder, "fp32", tokenizer)))
    scorer = Scorer(spread(load_scorer(folder, "fp32", tokenizer, new_head=True)))
    assert policy.supports_packing == scorer.supports_packing == (request.param != "bloom")
    return SimpleNamespace(policy=policy, scorer=scorer)


def token_distributions(policy):
    """Yield each response and the distributions of its tokens, from one forward pass each."""
    for prompt, response in PAIRS:
        ids = torch.tensor([[*prompt.tolist(), *response]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        yield torch.distributions.Categorical(logits=logits / TEMPERATURE), torch.tensor(response)


def assert_table(table, rows):
    """Assert that a table has the given rows, padded with zeros."""
    assert table.shape == (15, 6) and table.dtype == torch.float32
    for actual, row in zip(table, rows, strict=True):
        torch.testing.assert_close(actual[: len(row)], row, rtol=1e-4, atol=2e-5)
        assert actual[len(row) :].tolist() == [0.0] * (6 - len(row))


def test_logprobs_and_entropies_equal_those_of_one_forward_pass_per_response(family):
    rollouts = make()
    assert len([*rollouts.micro_batches(np.arange(5), family.policy.supports_packing)]) > 1
    logprobs, entropies = rollouts.logprobs_and_entropies(family.policy)
    drawn = list(token_distributions(family.policy))
    assert_table(logprobs, [source.log_prob(response) for source, response in drawn])
    assert_table(entropies, [source.entropy() for source, _ in drawn])
    torch.testing.assert_close(rollouts.logprobs(family.policy), logprobs)
    assert not logprobs.requires_grad


def test_values_of_all_ranks_are_those_of_the_states_before_each_token(family, monkeypatch):
    rows = []
    for prompt, response in PAIRS:
        ids = torch.tensor([[*prompt.tolist(), *response]])
        with torch.no_grad():
            hidden = family.scorer.model.base_model(input_ids=ids)[0][0, len(prompt) - 1 : -1]
            rows.append(family.scorer.model.score(hidden)[:, 0])
    monkeypatch.setattr(module, "all_reduce_sum", lambda tables: tables)
    # More ranks than prompts: the micro-batches of some do not count.
    monkeypatch.setenv("WORLD_SIZE", "6")
    shares = []
    for rank in range(6):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(make().values(family.scorer))
    assert_table(sum(shares), rows)


def test_texts_lose_the_token_that_ends_a_response_and_no_other(tokenizer):
    chatml = as_chatml(tokenizer)
    end, start = chatml.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    pie = chatml(" pie", add_special_tokens=False).input_ids
    responses = [[[*pie, end]], [pie], [[*pie, start, *pie, end]]]
    rollouts = Rollouts([pie], responses, chatml, [end], 1.0, CPU)
    assert rollouts.response_texts() == [" pie", " pie", " pie<|im_start|> pie"]


class Sampler:
    """Responds to the prompt [k] with k tokens k - 1, and with 2k tokens 2k - 1."""

    has_copy, num_ranks, num_generations, max_response_length = True, 2, 2, 6

    def sample(self, prompts, own_rows):
        numbers = [int(prompts[row][0]) for row in own_rows]
        responses = [[[f * n - 1] * (f * n) for n in numbers] for f in (1, 2)]
        logprobs = [[[-0.5 * f * n] * (f * n) for n in numbers] for f in (1, 2)]
        return responses, logprobs


def test_responses_and_logprobs_of_all_ranks_add_up(monkeypatch):
    """Of two samplers with two ranks each, which have the same responses."""
    prompts = [np.array([number]) for number in (3, 1, 2)]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(module, "share_random_numbers", lambda: None)
    shares = []
    monkeypatch.setattr(module, "all_reduce_sum", lambda of: shares.append(of) or of)
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        sample_on_all_ranks(Sampler(), prompts)
    # Ids and log-probabilities alternate.
    sums = [sum(shares[::2]), sum(shares[1::2])]
    monkeypatch.setattr(module, "all_reduce_sum", lambda _: sums.pop(0))
    responses, logprobs = sample_on_all_ranks(Sampler(), prompts)
    # Token id 0 is not padding.
    assert responses == [[[2] * 3, [0], [1] * 2], [[5] * 6, [1] * 2, [3] * 4]]
    assert logprobs.tolist() == [
        [[-1.5] * 3 + [0] * 3, [-0.5] + [0] * 5, [-1] * 2 + [0] * 4],
        [[-3] * 6, [-1] * 2 + [0] * 4, [-2] * 4 + [0] * 2],
    ]
