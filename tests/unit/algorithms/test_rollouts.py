"""Rollouts of a step: what models say of each token, against plain passes; who responses what."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from snakechat.algorithms import rollouts as module
from snakechat.algorithms.rollouts import Rollouts, ask
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.models import load_causal, load_scorer, make_causal, save_model
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


def make(max_tokens=40, prompts=PROMPTS, responses=RESPONSES, tokenizer=None):
    tokenizer = tokenizer or SimpleNamespace(eos_token_id=EOS)
    return Rollouts(prompts, responses, tokenizer, TEMPERATURE, max_tokens, CPU)


@pytest.fixture(scope="module", params=["opt", "llama", "bloom"])
def family(request, tokenizer, tmp_path_factory):
    """A policy and a scorer of a family: lines of several rows, or one line for each response."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(make_causal(FAMILIES[request.param], tokenizer, 1), tokenizer, folder)
    policy = Policy(spread(load_causal(folder, "fp32", tokenizer)))
    scorer = Scorer(spread(load_scorer(folder, "fp32", tokenizer, new_head=True)))
    assert policy.supports_packing == scorer.supports_packing == (request.param != "bloom")
    return SimpleNamespace(policy=policy, scorer=scorer)


def tokens_drawn(policy):
    """For each response, what each of its tokens was drawn from, by a plain pass of its own."""
    for prompt, response in PAIRS:
        ids = torch.tensor([[*prompt.tolist(), *response]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        yield torch.distributions.Categorical(logits=logits / TEMPERATURE), torch.tensor(response)


def assert_table(table, rows):
    """A table has these rows [length of each response], and zeros behind their ends."""
    assert table.shape == (15, 6) and table.dtype == torch.float32
    for found, row in zip(table, rows, strict=True):
        torch.testing.assert_close(found[: len(row)], row, rtol=1e-4, atol=2e-5)
        assert found[len(row) :].tolist() == [0.0] * (6 - len(row))


def num_passes(rollouts, packs):
    return len(list(rollouts.micro_batches(np.arange(5), packs)))


# Several passes of several rows; one row a pass; all rows in one.
@pytest.mark.parametrize("max_tokens", [40, 1, 10_000])
def test_logprobs_and_entropies_are_those_of_a_plain_pass_for_each_response(max_tokens, family):
    rollouts = make(max_tokens)
    passes = num_passes(rollouts, family.policy.supports_packing)
    assert passes == {1: 5, 10_000: 1}.get(max_tokens, passes) and (max_tokens != 40 or passes > 1)
    logprobs, entropies = rollouts.logprobs_and_entropies(family.policy)
    drawn = list(tokens_drawn(family.policy))
    assert_table(logprobs, [source.log_prob(response) for source, response in drawn])
    assert_table(entropies, [source.entropy() for source, _ in drawn])
    assert torch.equal(rollouts.logprobs(family.policy), logprobs)
    assert not logprobs.requires_grad


@pytest.mark.parametrize("max_tokens", [40, 10_000])
def test_values_are_those_before_each_token(max_tokens, family):
    rows = []
    for prompt, response in PAIRS:
        ids = torch.tensor([[*prompt.tolist(), *response]])
        with torch.no_grad():
            hidden = family.scorer.model.base_model(input_ids=ids)[0][0, len(prompt) - 1 : -1]
            rows.append(family.scorer.model.score(hidden)[:, 0])
    assert_table(make(max_tokens).values(family.scorer), rows)


def test_scores_are_the_reward_models_at_the_last_tokens(scorer_folder, tokenizer):
    # Not read by us: transformers' own model and its own place of the score.
    plain = AutoModelForSequenceClassification.from_pretrained(scorer_folder).eval()
    right = []
    for prompt, response in PAIRS:
        with torch.no_grad():
            right.append(
                plain(input_ids=torch.tensor([[*prompt.tolist(), *response]])).logits[0, 0]
            )
    scorer = Scorer(load_scorer(scorer_folder, "fp32", tokenizer))
    scores = make().scores(scorer)
    torch.testing.assert_close(scores, torch.stack(right))
    # Apart, so that another order could not pass.
    assert scores.sort().values.diff().min() > 1e-4


def test_the_mask_is_true_on_the_tokens_of_each_response():
    rollouts = make()
    lengths = [3, 1, 6, 2, 4, 1, 5, 2, 3, 3, 4, 4, 1, 1, 2]
    assert rollouts.lengths.tolist() == lengths
    assert rollouts.response_mask.tolist() == [
        [place < length for place in range(6)] for length in lengths
    ]
    assert rollouts.ended.tolist() == ENDED


def test_a_response_has_ended_if_its_last_token_is_eos():
    responses = [[[EOS], [EOS, 11], [11, EOS], [11]]]
    assert make(prompts=PROMPTS[:4], responses=responses).ended.tolist() == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [3, 1], [4]])
def test_num_tokens_are_those_of_all_responses_to_some_prompts(rows):
    sums = [3 + 1 + 4, 1 + 5 + 4, 6 + 2 + 1, 2 + 3 + 1, 4 + 3 + 2]
    assert make().num_tokens(np.array(rows)) == sum(sums[row] for row in rows)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [3, 1], [4]])
def test_passes_tell_the_places_of_their_tokens_in_tables(rows, packs, world_size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    rollouts, seen = make(), torch.zeros(15, dtype=torch.int64)
    ids = torch.zeros(15, 6, dtype=torch.int64)
    for table, (_, response) in zip(ids, PAIRS, strict=True):
        table[: len(response)] = torch.tensor(response)
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        for micro_batch, group, mask in rollouts.micro_batches(np.array(rows), packs):
            batch = micro_batch.batch
            tokens = batch.inputs.input_ids.flatten()[batch.target_index]
            assert ids[group][mask].tolist() == tokens.tolist()
            if micro_batch.counted:
                seen[group] += 1
    assert seen.tolist() == 3 * [int(row in rows) for row in range(5)]


def test_texts_are_without_special_tokens_prompts_beside_their_responses(tokenizer):
    assert tokenizer.eos_token_id == EOS
    encode = tokenizer.backend_tokenizer.encode
    prompts = [
        np.array([0, *encode(text, add_special_tokens=False).ids], np.uint16) for text in "ab"
    ]
    responses = [
        [[*encode(text, add_special_tokens=False).ids, EOS] for text in texts]
        for texts in (("c", "d"), ("e", "f"))
    ]
    rollouts = make(prompts=prompts, responses=responses, tokenizer=tokenizer)
    assert rollouts.texts() == (["a", "b", "a", "b"], ["c", "d", "e", "f"])


def test_figures_tell_the_mean_the_95th_percentile_and_how_many_ended():
    # 21 responses of 1 to 21 tokens: 20 of 100 are longer than the 20th.
    responses = [[[11] * length] for length in range(1, 20)] + [[[11] * 19 + [EOS]], [[11] * 21]]
    assert make(prompts=PROMPTS[:1], responses=responses).figures() == {
        "response/length": 11.0,
        "response/length_p95": 20.0,
        "response/ended_by_eos": pytest.approx(1 / 21),
    }


def test_a_samplers_values_become_a_table():
    # As wide as responses may be, where the longest of the step has 6 tokens.
    told = torch.arange(3 * 5 * 9.0).view(3, 5, 9)
    table = make().table(told)
    assert table.shape == (15, 6)
    # The second response to the fourth prompt is the 9th of all.
    assert table[8].tolist() == told[1, 3, :6].tolist()


def test_without_passes_of_its_own_a_process_adds_nothing_to_the_tables(monkeypatch):
    # One prompt and two processes: the second one looks, and does not count.
    policy = nn.Linear(1, 1)
    policy.supports_packing = True
    monkeypatch.setattr(module, "all_reduce_sum", lambda tables: tables)
    monkeypatch.setenv("WORLD_SIZE", "2")
    rollouts, sums = make(prompts=PROMPTS[:1], responses=[row[:1] for row in RESPONSES]), []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        [table] = rollouts.tables(policy, lambda batch: [torch.ones(len(batch.target_index))])
        sums.append(table.sum().item())
    assert sums == [3 + 1 + 4, 0]


# Who responses what.


class Sampler:
    """Responses each prompt of one number by that number so often, and twice that number."""

    def __init__(self, tells=True):
        self.tells, self.asked = tells, []

    def sample(self, prompts):
        self.asked.append(prompts)
        responses = [[sample * prompt for prompt in prompts] for sample in (1, 2)]
        responses = [[[ids[0]] * int(ids[0]) for ids in sample] for sample in responses]
        logprobs = [[[-0.5 * len(ids)] * len(ids) for ids in sample] for sample in responses]
        return responses, logprobs if self.tells else None


def settings(**changes):
    return SimpleNamespace(**{"num_generations": 2, "max_response_length": 6, "generation_backend": "hf", **changes})


ASKED = [np.array([number]) for number in (3, 1, 2)]
TOLD = [[[3] * 3, [1], [2] * 2], [[6] * 6, [2] * 2, [4] * 4]]


@pytest.mark.parametrize("tells", [True, False])
def test_one_process_asks_for_all_responses(tells):
    sampler = Sampler(tells)
    assert ask(sampler, ASKED, settings()) == (TOLD, None)
    assert sampler.asked == [ASKED]


def test_the_logprobs_of_a_sampler_that_tells_them_stand_before_zeros():
    responses, logprobs = ask(Sampler(), ASKED, settings(generation_backend="vllm"))
    assert responses == TOLD
    assert logprobs.tolist() == [
        [[-1.5] * 3 + [0] * 3, [-0.5] + [0] * 5, [-1] * 2 + [0] * 4],
        [[-3] * 6, [-1] * 2 + [0] * 4, [-2] * 4 + [0] * 2],
    ]


def test_the_token_0_is_a_token():
    sampler = SimpleNamespace(sample=lambda prompts: ([[[0, 5, 0, 0]], [[0]]], None))
    assert ask(sampler, ASKED[:1], settings())[0] == [[[0, 5, 0, 0]], [[0]]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_ask_for_shares_that_add_up(world_size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    shares, asked = [], []
    monkeypatch.setattr(module, "all_reduce_sum", lambda tensor: shares.append(tensor) or tensor)
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        sampler = Sampler()
        ask(sampler, ASKED, settings(generation_backend="vllm"))
        asked += [int(prompt[0]) for prompts in sampler.asked for prompt in prompts]
    assert sorted(asked) == [1, 2, 3]
    # Ids and log-probabilities in turn.
    assert [[(ids - 1)[ids > 0].tolist() for ids in row] for row in sum(shares[::2])] == TOLD
    assert torch.equal(sum(shares[1::2]), ask_alone(monkeypatch))


def ask_alone(monkeypatch):
    monkeypatch.undo()
    return ask(Sampler(), ASKED, settings(generation_backend="vllm"))[1]
