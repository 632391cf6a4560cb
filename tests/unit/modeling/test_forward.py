"""The passes of models, against transformers' own forward, one sequence at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification

from snakechat.algorithms.preference import (
    dpo_loss,
    implicit_rewards,
    pairwise_loss,
    per_token_loss,
    since_parting,
)
from snakechat.modeling import batches, logprobs
from snakechat.modeling import forward as passes
from snakechat.modeling.batches import Examples
from snakechat.modeling.forward import (
    Policy,
    Scorer,
    judged,
    padded,
    response_logprobs,
    response_scores,
)
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import load_causal, load_scorer, make_causal, save_model
from support.families import FAMILIES, spread

CPU = torch.device("cpu")
MASKED = [family for family in FAMILIES if family != "bloom"]

# (whether a line holds several rows, tokens of a pass): several rows in a line and lines in a pass;
# both responses of one row behind their prompt; each response in a line by itself.
WAYS = {"packed": (True, 60), "shared": (True, 1), "apart": (False, 70)}
CASES = [(family, way) for family in FAMILIES for way in WAYS if family in MASKED or way == "apart"]
LOSSES = ["sft", "sft with prompts", "last_token", "per_token", "dpo"]

# Lengths of prompt, chosen and rejected response, and how many tokens the responses start with alike.
SHAPES = [(12, 9, 4, 0), (5, 4, 2, 1), (3, 2, 5, 0), (1, 6, 1, 0), (7, 1, 3, 1), (4, 3, 3, 2)]
BETA, SMOOTHING = 0.1, 0.1


def make_rows():
    random = np.random.default_rng(1)
    prompts, chosen, rejected = (
        [random.integers(10, 300, shape[part]).tolist() for shape in SHAPES] for part in range(3)
    )
    for first, second, shape in zip(chosen, rejected, SHAPES, strict=True):
        second[: shape[3]] = first[: shape[3]]
    return prompts, chosen, rejected


PROMPTS, *RESPONSES = make_rows()
PAIRS, ROWS = Examples(PROMPTS, *RESPONSES), Examples(PROMPTS, RESPONSES[0])
# Far from each other, so that a mixed-up order could not pass.
REFERENCE = -torch.arange(2.0 * len(PAIRS)).view(2, -1) * 7


@pytest.fixture(scope="module")
def family(request, tokenizer, tmp_path_factory):
    """A policy and a scorer of a family, and what plain passes say of them, by loss."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(make_causal(FAMILIES[request.param], tokenizer, 1), tokenizer, folder)
    policy = Policy(spread(load_causal(folder, "fp32", tokenizer)))
    scorer = Scorer(spread(load_scorer(folder, "fp32", tokenizer, new_head=True)))
    assert policy.packs == scorer.packs == (request.param in MASKED)
    return SimpleNamespace(policy=policy, scorer=scorer, plain={})


def module_of(family, loss):
    return family.scorer if loss in ("last_token", "per_token") else family.policy


# Each loss as its trainer takes it, over all passes.


def loss_of(module, loss, way):
    packs, max_tokens = WAYS[way]
    examples, with_prompts = ROWS if "sft" in loss else PAIRS, loss == "sft with prompts"
    parts = examples.passes(np.arange(len(examples)), max_tokens, packs, CPU, with_prompts)
    return sum(part_loss(module, loss, part) for part in parts)


def part_loss(module, loss, part):
    grid = part.grid
    if "sft" in loss:
        tokens = ROWS.num_tokens(loss == "sft with prompts").sum()
        return -module(grid, summed=True) / int(tokens)
    if loss == "dpo":
        sums = torch.segment_reduce(module(grid), "sum", lengths=grid.lengths).view(2, -1)
        rewards = implicit_rewards(sums, REFERENCE[:, part.rows], BETA)
        return dpo_loss(*rewards, SMOOTHING).sum() / len(PAIRS)
    if loss == "last_token":
        return pairwise_loss(*module(grid, grid.ends).view(2, -1)).sum() / len(PAIRS)
    tokens = padded(grid.inputs.input_ids.flatten()[grid.tokens], grid.lengths)
    scores = padded(module(grid, grid.tokens), grid.lengths)
    compared = since_parting(tokens, grid.lengths)
    return per_token_loss(*scores.chunk(2), compared).sum() / len(PAIRS)


# The same, written once more: a plain pass for each sequence.


def plain_logprobs(model, prompt, response, with_prompt=False):
    """Log-probability of each token that is learnt, from the logits of transformers' model."""
    ids = torch.tensor([[*prompt, *response]])
    table = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
    found = table[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return found if with_prompt else found[len(prompt) - 1 :]


def plain_scores(model, prompt, response):
    """Score at each token of a response: transformers tells that of the last token alone."""
    ends = range(len(prompt) + 1, len(prompt) + len(response) + 1)
    ids = [*prompt, *response]
    return torch.stack([model(input_ids=torch.tensor([ids[:end]])).logits[0, 0] for end in ends])


def plain_loss(model, loss):
    found = []
    if "sft" in loss:
        for row in zip(PROMPTS, RESPONSES[0], strict=True):
            found.append(plain_logprobs(model, *row, loss == "sft with prompts"))
        return -torch.cat(found).mean()
    for number, (prompt, *responses) in enumerate(zip(PROMPTS, *RESPONSES, strict=True)):
        if loss == "dpo":
            sums = [plain_logprobs(model, prompt, response).sum() for response in responses]
            chosen, rejected = torch.stack(sums) - REFERENCE[:, number]
            margin = BETA * (chosen - rejected)
            right, wrong = softplus(-margin), softplus(margin)
            found.append((1 - SMOOTHING) * right + SMOOTHING * wrong)
            continue
        chosen, rejected = (plain_scores(model, prompt, response) for response in responses)
        if loss == "last_token":
            found.append(softplus(rejected[-1] - chosen[-1]))
            continue
        found.append(
            torch.stack(
                [
                    softplus(rejected[min(t, len(rejected) - 1)] - chosen[min(t, len(chosen) - 1)])
                    for t in range(SHAPES[number][3], max(len(chosen), len(rejected)))
                ]
            ).mean()
        )
    return torch.stack(found).mean()


def gradients(module, loss):
    """Those of all weights that are trained, one after the other."""
    weights = [weight for weight in module.model.parameters() if weight.requires_grad]
    slopes = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([slope.flatten() for slope in slopes])


def expected(family, loss):
    """The plain loss and its gradients."""
    if loss not in family.plain:
        module = module_of(family, loss)
        value = plain_loss(module.model, loss)
        family.plain[loss] = value.detach(), gradients(module, value)
    return family.plain[loss]


def distance(found, right):
    """Norm of the difference, relative."""
    return ((found - right).norm() / right.norm()).item()


def test_the_ways_are_laid_out_differently():
    shapes = {}
    for way, (packs, max_tokens) in WAYS.items():
        parts = PAIRS.passes(np.arange(len(PAIRS)), max_tokens, packs, CPU)
        shapes[way] = [(len(part.rows), *part.grid.inputs.input_ids.shape) for part in parts]
    # (rows, lines, length) of each pass.
    assert any(lines > 1 for _, lines, _ in shapes["packed"])
    assert any(rows > lines for rows, lines, _ in shapes["packed"])
    assert [(rows, lines) for rows, lines, _ in shapes["shared"]] == [(1, 1)] * len(PAIRS)
    assert all(lines == 2 * rows for rows, lines, _ in shapes["apart"])
    assert len(shapes["packed"]) > 1 and len(shapes["apart"]) > 1


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("family", "way"), CASES, indirect=["family"], scope="module")
def test_losses_and_gradients_are_those_of_plain_passes(family, way, loss):
    module = module_of(family, loss)
    value, slopes = expected(family, loss)
    found = loss_of(module, loss, way)
    assert found.item() == pytest.approx(value.item(), rel=1e-5)
    assert distance(gradients(module, found), slopes) < 1e-5


@pytest.mark.parametrize("with_prompts", [False, True])
@pytest.mark.parametrize(("family", "way"), CASES, indirect=["family"], scope="module")
def test_logprobs_and_scores_are_those_of_plain_passes(family, way, with_prompts, monkeypatch):
    packs, max_tokens = WAYS[way]
    monkeypatch.setattr(family.policy, "packs", packs)
    monkeypatch.setattr(family.scorer, "packs", packs)
    sums = response_logprobs(family.policy, PAIRS, max_tokens, with_prompts=with_prompts)
    scores = response_scores(family.scorer, PAIRS, max_tokens)
    pairs = list(enumerate(zip(PROMPTS, *RESPONSES, strict=True)))
    with torch.no_grad():
        for row, (prompt, *responses) in pairs:
            for number, response in enumerate(responses):
                right = plain_logprobs(family.policy.model, prompt, response, with_prompts).sum()
                assert sums[number, row] == pytest.approx(right.item(), rel=1e-5)
                right = plain_scores(family.scorer.model, prompt, response)[-1]
                assert scores[number, row] == pytest.approx(right.item(), rel=1e-4, abs=1e-5)


# That the comparison can fail.


def see_other_answers(rows, branches, plainly=batches.visible):
    return plainly(rows, torch.zeros_like(branches))


def see_other_rows(rows, branches, plainly=batches.visible):
    return plainly((rows > 0).long(), branches)


@pytest.mark.parametrize("loss", ["last_token", "dpo"])
@pytest.mark.parametrize("leak", [see_other_answers, see_other_rows])
@pytest.mark.parametrize("family", MASKED, indirect=True, scope="module")
def test_a_leak_would_be_seen(family, leak, loss, monkeypatch):
    # Many rows to a line: the more there are, the more leaks.
    monkeypatch.setattr(batches, "LINE_WIDTHS", (4,))
    monkeypatch.setattr(batches, "visible", leak)
    module = module_of(family, loss)
    found, slopes = loss_of(module, loss, "packed"), expected(family, loss)[1]
    assert distance(gradients(module, found), slopes) > 0.05


@pytest.mark.parametrize("loss", ["last_token", "dpo"])
@pytest.mark.parametrize("family", MASKED, indirect=True, scope="module")
def test_positions_that_go_on_from_the_other_response_would_be_seen(family, loss, monkeypatch):
    def count(model, grid):
        places = torch.arange(grid.inputs.input_ids.shape[1])
        inputs = grid.inputs._replace(position_ids=places.expand_as(grid.inputs.input_ids))
        return plainly(model, grid._replace(inputs=inputs))

    plainly = passes.hidden_states
    monkeypatch.setattr(batches, "LINE_WIDTHS", (4,))
    monkeypatch.setattr(passes, "hidden_states", count)
    module = module_of(family, loss)
    found, slopes = loss_of(module, loss, "packed"), expected(family, loss)[1]
    assert distance(gradients(module, found), slopes) > 0.05


# Policies.


def grid_of(module, examples=PAIRS, with_prompts=False):
    """All examples in one pass."""
    rows = np.arange(len(examples))
    [part] = examples.passes(rows, 10_000, module.packs, CPU, with_prompts)
    return part


@pytest.fixture
def policy(model):
    return Policy(model)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logprobs_and_entropies_are_those_of_the_plain_model(policy, temperature):
    part = grid_of(policy)
    logprobs, entropies = policy(part.grid, temperature, entropies=True)
    tables, tokens = [], []
    for responses in RESPONSES:
        for row in part.rows:
            ids = torch.tensor([[*PROMPTS[row], *responses[row]]])
            logits = policy.model(ids).logits[0] / temperature
            tables.append(logits[len(PROMPTS[row]) - 1 : -1])
            tokens += responses[row]
    drawn = torch.distributions.Categorical(logits=torch.cat(tables))
    torch.testing.assert_close(logprobs, drawn.log_prob(torch.tensor(tokens)))
    torch.testing.assert_close(entropies, drawn.entropy())
    assert torch.equal(logprobs, policy(part.grid, temperature))
    assert not entropies.requires_grad


def test_the_sum_is_that_of_the_tokens(policy):
    grid = grid_of(policy).grid
    torch.testing.assert_close(policy(grid, summed=True), policy(grid).sum())


def test_a_bf16_policy_gives_fp32_logprobs(folder, tokenizer):
    policy = Policy(load_causal(folder, "bf16", tokenizer))
    assert next(policy.parameters()).dtype == torch.bfloat16
    logprobs, entropies = policy(grid_of(policy).grid, entropies=True)
    assert logprobs.dtype == entropies.dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_adapters_are_those_of_plain_passes(way, model):
    policy = Policy(spread(add_lora(model, 2, 4)))
    assert policy.packs
    assert not policy.borrowed_weights()[0].requires_grad
    slopes = gradients(policy, plain_loss(model, "dpo"))
    assert distance(gradients(policy, loss_of(policy, "dpo", way)), slopes) < 1e-5


@pytest.mark.parametrize("with_prompts", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_logits_are_made_of_learnt_tokens_alone(policy, summed, with_prompts, monkeypatch):
    made = []

    def linear(hidden, weight, bias):
        made.append(len(hidden))
        return nn.functional.linear(hidden, weight, bias)

    monkeypatch.setattr(logprobs, "functional", SimpleNamespace(linear=linear))
    head = policy.model.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda _: pytest.fail("all logits were made"))
    part = grid_of(policy, ROWS, with_prompts)
    policy(part.grid, summed=summed)
    # Chosen responses, and of prompts all but the first tokens.
    assert made == [9 + 4 + 2 + 6 + 1 + 3 + with_prompts * (11 + 4 + 2 + 0 + 6 + 3)]
    assert part.grid.inputs.input_ids.numel() > made[0]


def test_the_output_layer_is_borrowed(policy):
    [weight] = policy.borrowed_weights()
    assert weight is policy.model.lm_head.weight
    grid = grid_of(policy).grid
    before = policy(grid)
    head = nn.Linear(weight.shape[1], weight.shape[0])
    head.weight = weight
    policy.model.set_output_embeddings(head)
    assert policy.borrowed_weights()[0] is head.weight
    assert policy.borrowed_weights()[1] is head.bias
    # Its bias has a say.
    with torch.no_grad():
        head.bias.zero_()
    torch.testing.assert_close(policy(grid), before)
    with torch.no_grad():
        head.bias[int(grid.inputs.input_ids.flatten()[grid.tokens[0]])] = 5.0
    assert policy(grid)[0] > before[0] + 1


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_a_response_has_the_sum_of_its_tokens_logprobs(policy, max_tokens):
    [sums] = response_logprobs(policy, ROWS, max_tokens, temperature=0.7)
    assert sums.dtype == np.float64
    for row, found in enumerate(sums):
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*PROMPTS[row], *RESPONSES[0][row]]])).logits[0]
        table = torch.log_softmax(logits / 0.7, dim=-1)[len(PROMPTS[row]) - 1 : -1]
        right = table[range(len(RESPONSES[0][row])), RESPONSES[0][row]].sum().item()
        assert found == pytest.approx(right, abs=1e-4)


def test_a_response_of_no_tokens_has_probability_1(policy):
    examples = Examples([[11, 12], [21]], [[], [22, 23]])
    [sums] = response_logprobs(policy, examples, 100)
    assert sums[0] == 0 and sums[1] < 0
    [sums] = response_logprobs(policy, examples, 100, with_prompts=True)
    assert sums[0] < 0


# What is judged.


@pytest.fixture
def judge():
    """A module of which nothing but its device and its way is asked."""
    module = nn.Linear(1, 1)
    module.packs = True
    return module


def last_tokens(grid):
    return grid.inputs.input_ids.flatten()[grid.ends]


RIGHT = [[response[-1] for response in responses] for responses in RESPONSES]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_all_rows_are_judged_each_in_its_place(packs, max_tokens, judge):
    judge.packs = packs
    assert judged(last_tokens, judge, PAIRS, max_tokens).tolist() == RIGHT
    assert judged(last_tokens, judge, ROWS, max_tokens).tolist() == RIGHT[:1]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_what_ranks_judge_adds_up(world_size, packs, judge, monkeypatch):
    judge.packs, tables = packs, []
    monkeypatch.setattr(passes, "total", lambda table: table)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        tables.append(judged(last_tokens, judge, PAIRS, 40))
    assert sum(tables).tolist() == RIGHT


def test_values_are_padded_with_the_last_of_each_sequence():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    table = padded(values, torch.tensor([1, 3, 2]))
    assert table.tolist() == [[1, 1, 1], [2, 3, 4], [5, 6, 6]]
    table[:, 2].sum().backward()
    assert values.grad.tolist() == [1, 0, 0, 1, 0, 1]


# Scorers.


@pytest.fixture
def scorer(scorer_folder, tokenizer):
    return Scorer(load_scorer(scorer_folder, "fp32", tokenizer))


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_transformers_scores_a_padded_batch_as_we_do(max_tokens, scorer, scorer_folder, tokenizer):
    plain = AutoModelForSequenceClassification.from_pretrained(scorer_folder).eval()
    sequences = [
        [*prompt, *response] for prompt, response in zip(PROMPTS, RESPONSES[0], strict=True)
    ]
    longest, pad = max(map(len, sequences)), tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in sequences])
    with torch.no_grad():
        right = plain(input_ids=ids, attention_mask=(ids != pad).long()).logits.squeeze(-1)
    [scores] = response_scores(scorer, ROWS, max_tokens)
    torch.testing.assert_close(torch.from_numpy(scores).float(), right)
    # The scores are apart, so that a mixed-up order could not pass.
    assert (right[:, None] - right[None, :]).abs().add(torch.eye(len(right))).min() > 1e-3


@pytest.mark.parametrize("packs", [True, False])
def test_a_scorer_gives_the_heads_output_at_places_one_sequence_after_the_other(packs, scorer):
    scorer.packs = packs
    part = grid_of(scorer)
    tokens, before = [], []
    for responses in RESPONSES:
        for row in part.rows:
            ids, first = torch.tensor([[*PROMPTS[row], *responses[row]]]), len(PROMPTS[row])
            hidden = scorer.model.base_model(input_ids=ids)[0][0]
            tokens.append(hidden[first:] @ scorer.model.score.weight[0])
            before.append(hidden[first - 1 : -1] @ scorer.model.score.weight[0])
    grid = part.grid
    torch.testing.assert_close(scorer(grid, grid.tokens), torch.cat(tokens))
    torch.testing.assert_close(scorer(grid, grid.before), torch.cat(before))
    torch.testing.assert_close(scorer(grid, grid.ends), torch.stack([t[-1] for t in tokens]))


def test_outputs_are_told_in_units(scorer):
    grid = grid_of(scorer).grid
    raw = scorer(grid, grid.ends)
    scorer.units = lambda outputs: (outputs - 3.0) * 2.0
    torch.testing.assert_close(scorer(grid, grid.ends), (raw - 3.0) * 2.0)
    torch.testing.assert_close(Scorer(scorer.model, scorer.units)(grid, grid.ends), (raw - 3) * 2)


def test_units_are_given_fp32(scorer_folder, tokenizer):
    kinds = []
    scorer = Scorer(load_scorer(scorer_folder, "bf16", tokenizer))
    scorer.units = lambda outputs: kinds.append(outputs.dtype) or outputs
    grid = grid_of(scorer).grid
    scorer(grid, grid.ends)
    assert kinds == [torch.float32]


def test_gradients_go_through_units(scorer):
    # As a critic's, whose values are told in deviations.
    grid = grid_of(scorer).grid
    raw = gradients(scorer, scorer(grid, grid.before).sum())
    scorer.units = lambda outputs: (outputs - 3.0) / 2.0
    torch.testing.assert_close(gradients(scorer, scorer(grid, grid.before).sum()), raw / 2)
