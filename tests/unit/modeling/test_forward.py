"""Forward passes of packed batches, compared with transformers' forward pass of each sequence."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from snakechat.algorithms.preference import (
    divergent_positions,
    dpo_loss,
    pairwise_loss,
    per_token_loss,
)
from snakechat.modeling import acceleration, logprobs
from snakechat.modeling.acceleration import Acceleration
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import (
    Policy,
    Scorer,
    pad_with_last,
    response_logprobs,
    response_scores,
)
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.families import FAMILIES, WINDOWS, spread

CPU = torch.device("cpu")
MODELS = FAMILIES | WINDOWS
PACKING_FAMILIES = [family for family in MODELS if family != "bloom"]

# (packing, micro_batch_tokens): several rows in a packed sequence and several sequences in a
# micro-batch; the same with the padding of GPUs; one row, whose responses share the prompt; each
# response in a sequence by itself.
LAYOUTS = {"packed": (True, 60), "padded": (True, 60), "shared_prompt": (True, 1)}
LAYOUTS["unpacked"] = (False, 70)
CASES = [(family, "packed") for family in PACKING_FAMILIES]
CASES += [("opt", "shared_prompt"), ("mistral, window", "shared_prompt")]
CASES += [("opt", "padded"), ("qwen3, window", "padded")]
CASES += [("opt", "unpacked"), ("bloom", "unpacked"), ("mistral, window", "unpacked")]
LOSSES = ["sft", "sft with prompts", "sft of turns", "last_token", "per_token", "dpo"]

# Lengths of prompt, chosen and rejected response, and of the responses' common prefix.
SHAPES = [(12, 9, 4, 0), (5, 4, 2, 1), (3, 2, 5, 0), (1, 6, 1, 0), (7, 1, 3, 1), (4, 3, 3, 2)]
BETA, SMOOTHING = 0.1, 0.1


def make_rows():
    random = np.random.default_rng(1)
    prompts, chosen, rejected = (
        [random.integers(10, 300, shape[field]).tolist() for shape in SHAPES] for field in range(3)
    )
    for first, second, shape in zip(chosen, rejected, SHAPES, strict=True):
        second[: shape[3]] = first[: shape[3]]
    return prompts, chosen, rejected


PROMPTS, *RESPONSES = make_rows()
PAIRS, ROWS = Examples(PROMPTS, *RESPONSES), Examples(PROMPTS, RESPONSES[0])
# Of every three tokens of a response, the second one belongs to the user.
TRAINED = [[int(place % 3 != 1) for place in range(len(ids))] for ids in RESPONSES[0]]
TURNS = Examples(PROMPTS, RESPONSES[0], trained=TRAINED)
# Far apart, so that a wrong order of rows fails.
REFERENCE = -torch.arange(2.0 * len(PAIRS)).view(2, -1) * 7


@pytest.fixture(scope="module")
def family(request, tokenizer, tmp_path_factory):
    """A policy and a scorer of a family, and the expected value and gradients of each loss."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(make_causal(MODELS[request.param], tokenizer, 1), tokenizer, folder)
    policy = Policy(spread(load_causal(folder, "fp32", tokenizer)))
    scorer = Scorer(spread(load_scorer(folder, "fp32", tokenizer, new_head=True)))
    assert policy.supports_packing == scorer.supports_packing == (request.param in PACKING_FAMILIES)
    return SimpleNamespace(policy=policy, scorer=scorer, expected={})


def module_of(family, loss):
    return family.scorer if loss in ("last_token", "per_token") else family.policy


# Each loss as its trainer computes it, over all micro-batches.


def compute_loss(module, loss, layout):
    packing, micro_batch_tokens = LAYOUTS[layout]
    examples = TURNS if loss == "sft of turns" else ROWS if "sft" in loss else PAIRS
    with_prompts = loss == "sft with prompts"
    rows = np.arange(len(examples))
    micro_batches = examples.micro_batches(rows, micro_batch_tokens, packing, CPU, with_prompts)
    return sum(micro_batch_loss(module, loss, micro_batch) for micro_batch in micro_batches)


def micro_batch_loss(module, loss, micro_batch):
    batch = micro_batch.batch
    if "sft" in loss:
        examples = TURNS if loss == "sft of turns" else ROWS
        tokens = examples.num_tokens(loss == "sft with prompts").sum()
        return -module(batch, return_sum=True) / int(tokens)
    if loss == "dpo":
        sums = torch.segment_reduce(module(batch), "sum", lengths=batch.target_lengths).view(2, -1)
        rewards = BETA * (sums - REFERENCE[:, micro_batch.rows])
        return dpo_loss(*rewards, SMOOTHING).sum() / len(PAIRS)
    if loss == "last_token":
        return pairwise_loss(*module(batch, batch.last_index).view(2, -1)).sum() / len(PAIRS)
    tokens = pad_with_last(
        batch.inputs.input_ids.flatten()[batch.target_index], batch.target_lengths
    )
    scores = pad_with_last(module(batch, batch.target_index), batch.target_lengths)
    compared = divergent_positions(tokens, batch.target_lengths)
    return per_token_loss(*scores.chunk(2), compared).sum() / len(PAIRS)


# The same losses from one forward pass of transformers per sequence.


def reference_logprobs(model, prompt, response, with_prompt=False):
    """Log-probability of each target token, from the logits of transformers' model."""
    ids = torch.tensor([[*prompt, *response]])
    table = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
    logprobs = table[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return logprobs if with_prompt else logprobs[len(prompt) - 1 :]


def reference_scores(model, prompt, response):
    """Score at each token of a response. transformers returns only that of the last token."""
    ends = range(len(prompt) + 1, len(prompt) + len(response) + 1)
    ids = [*prompt, *response]
    return torch.stack([model(input_ids=torch.tensor([ids[:end]])).logits[0, 0] for end in ends])


def reference_loss(model, loss):
    losses = []
    if "sft" in loss:
        for row in zip(PROMPTS, RESPONSES[0], strict=True):
            losses.append(reference_logprobs(model, *row, loss == "sft with prompts"))
        logprobs = torch.cat(losses)
        if loss == "sft of turns":
            logprobs = logprobs[torch.tensor([*chain(*TRAINED)]) == 1]
        return -logprobs.mean()
    for number, (prompt, *responses) in enumerate(zip(PROMPTS, *RESPONSES, strict=True)):
        if loss == "dpo":
            sums = [reference_logprobs(model, prompt, response).sum() for response in responses]
            chosen, rejected = torch.stack(sums) - REFERENCE[:, number]
            margin = BETA * (chosen - rejected)
            right, wrong = softplus(-margin), softplus(margin)
            losses.append((1 - SMOOTHING) * right + SMOOTHING * wrong)
            continue
        chosen, rejected = (reference_scores(model, prompt, response) for response in responses)
        if loss == "last_token":
            losses.append(softplus(rejected[-1] - chosen[-1]))
            continue
        losses.append(
            torch.stack(
                [
                    softplus(rejected[min(t, len(rejected) - 1)] - chosen[min(t, len(chosen) - 1)])
                    for t in range(SHAPES[number][3], max(len(chosen), len(rejected)))
                ]
            ).mean()
        )
    return torch.stack(losses).mean()


def gradients(module, loss):
    """Gradients of all trainable weights, concatenated."""
    weights = [weight for weight in module.model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def expected(family, loss):
    """The reference loss and its gradients."""
    if loss not in family.expected:
        module = module_of(family, loss)
        value = reference_loss(module.model, loss)
        family.expected[loss] = value.detach(), gradients(module, value)
    return family.expected[loss]


def relative_error(actual, reference):
    """Norm of the difference, relative to the reference."""
    return ((actual - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"], scope="module")
def test_losses_and_gradients_equal_those_of_separate_sequences(family, layout, loss, monkeypatch):
    if layout == "padded":
        choices = Acceleration(pad_to_multiple_of=64, prefetch=True)
        monkeypatch.setattr(acceleration, "_current", choices)
    module = module_of(family, loss)
    value, grads = expected(family, loss)
    actual = compute_loss(module, loss, layout)
    assert actual.item() == pytest.approx(value.item(), rel=1e-5)
    assert relative_error(gradients(module, actual), grads) < 1e-5


@pytest.mark.parametrize("with_prompts", [False, True])
@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"], scope="module")
def test_logprobs_and_scores_equal_those_of_separate_sequences(
    family, layout, with_prompts, monkeypatch
):
    packing, micro_batch_tokens = LAYOUTS[layout]
    monkeypatch.setattr(family.policy, "supports_packing", packing)
    monkeypatch.setattr(family.scorer, "supports_packing", packing)
    sums = response_logprobs(family.policy, PAIRS, micro_batch_tokens, with_prompts=with_prompts)
    scores = response_scores(family.scorer, PAIRS, micro_batch_tokens)
    pairs = list(enumerate(zip(PROMPTS, *RESPONSES, strict=True)))
    with torch.no_grad():
        for row, (prompt, *responses) in pairs:
            for number, response in enumerate(responses):
                logprobs = reference_logprobs(family.policy.model, prompt, response, with_prompts)
                assert sums[number, row] == pytest.approx(logprobs.sum().item(), rel=1e-5)
                score = reference_scores(family.scorer.model, prompt, response)[-1]
                assert scores[number, row] == pytest.approx(score.item(), rel=1e-4, abs=1e-5)


# Policies.


def one_micro_batch(module, examples=PAIRS):
    """All examples in one micro-batch."""
    rows = np.arange(len(examples))
    [micro_batch] = examples.micro_batches(rows, 10_000, module.supports_packing, CPU)
    return micro_batch


@pytest.fixture
def policy(model):
    return Policy(model)


def test_gradients_of_adapters_equal_those_of_separate_sequences(model):
    policy = Policy(spread(add_lora(model, 2, 4)))
    assert policy.supports_packing
    assert not policy.external_parameters()[0].requires_grad
    grads = gradients(policy, reference_loss(model, "dpo"))
    assert relative_error(gradients(policy, compute_loss(policy, "dpo", "packed")), grads) < 1e-5


@pytest.mark.parametrize("return_sum", [False, True])
def test_logits_are_computed_for_target_tokens_only(policy, return_sum, monkeypatch):
    num_states = []

    def linear(hidden, weight, bias):
        num_states.append(len(hidden))
        return nn.functional.linear(hidden, weight, bias)

    monkeypatch.setattr(logprobs, "functional", SimpleNamespace(linear=linear))
    head = policy.model.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda _: pytest.fail("computed all logits"))
    batch = one_micro_batch(policy, ROWS).batch
    policy(batch, return_sum=return_sum)
    # Chosen responses.
    assert num_states == [9 + 4 + 2 + 6 + 1 + 3]
    assert batch.inputs.input_ids.numel() > num_states[0]


def test_the_output_layer_may_have_a_bias(policy):
    [weight] = policy.external_parameters()
    head = nn.Linear(*reversed(weight.shape))
    head.weight = weight
    policy.model.set_output_embeddings(head)
    assert [*map(id, policy.external_parameters())] == [id(weight), id(head.bias)]
    expected = reference_loss(policy.model, "sft").item()
    assert compute_loss(policy, "sft", "packed").item() == pytest.approx(expected, rel=1e-5)


def test_an_empty_response_has_probability_1(policy):
    examples = Examples([[11, 12], [21]], [[], [22, 23]])
    [sums] = response_logprobs(policy, examples, 100)
    assert sums[0] == 0 and sums[1] < 0
    [sums] = response_logprobs(policy, examples, 100, with_prompts=True)
    assert sums[0] < 0
