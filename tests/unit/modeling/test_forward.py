"""Forward passes of packed batches, compared with transformers' forward pass of each sequence."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from snakechat.modeling import forward, models
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer, response_logprobs, response_scores
from snakechat.modeling.loading import add_lora, load_causal, load_scorer
from snakechat.modeling.models import Acceleration, accelerated, choose_device, make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.processes import (
    ENVIRONMENT,
    REQUEST,
    SERIAL,
    missing_kernel,
    request_deterministic_kernels,
)
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
OF_POLICIES = ["logprobs", "logprobs with prompts", "logprobs of turns", "their sum"]
OF_SCORERS = ["scores", "last scores"]

# Lengths of prompt, chosen and rejected response.
SHAPES = [(12, 9, 4), (5, 4, 2), (3, 2, 5), (1, 6, 1), (7, 1, 3), (4, 3, 3)]


RANDOM = np.random.default_rng(1)
PROMPTS, *RESPONSES = (
    [RANDOM.integers(10, 300, shape[field]).tolist() for shape in SHAPES] for field in range(3)
)
PAIRS, ROWS = Examples(PROMPTS, *RESPONSES), Examples(PROMPTS, RESPONSES[0])
# Of every three tokens of a response, the second one belongs to the user.
TRAINED = [[int(place % 3 != 1) for place in range(len(ids))] for ids in RESPONSES[0]]
TURNS = Examples(PROMPTS, RESPONSES[0], trained=TRAINED)
# Of each token of each response, so that a wrong order fails.
FACTORS = 0.5 + torch.rand(2, len(PAIRS), 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def family(request, tokenizer, tmp_path_factory):
    """A policy and a scorer of a family, and the expected sums and gradients."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(make_causal(MODELS[request.param], tokenizer, 1), tokenizer, folder)
    policy = Policy(spread(load_causal(folder, "fp32", tokenizer)))
    scorer = Scorer(spread(load_scorer(folder, "fp32", tokenizer, new_head=True)))
    assert policy.supports_packing == scorer.supports_packing == (request.param in PACKING_FAMILIES)
    return SimpleNamespace(policy=policy, scorer=scorer, expected={})


def module_of(family, kind):
    return family.scorer if kind in OF_SCORERS else family.policy


def examples_of(kind):
    return {"logprobs of turns": TURNS, "their sum": ROWS}.get(kind, PAIRS)


def packed_sum(module, kind, layout):
    """The sum of values times FACTORS over all micro-batches."""
    packing, micro_batch_tokens = LAYOUTS[layout]
    rows, total = np.arange(len(PAIRS)), 0.0
    with accelerated(replace(models.acceleration(), micro_batch_tokens=micro_batch_tokens)):
        micro_batches = list(
            examples_of(kind).micro_batches(rows, packing, CPU, kind == "logprobs with prompts")
        )
    for rows_of_batch, batch, *_ in micro_batches:
        if kind == "their sum":
            total += module(batch, return_sum=True)
            continue
        factors = FACTORS[: len(batch.target_lengths) // len(rows_of_batch), rows_of_batch]
        factors = factors.flatten(end_dim=1)
        if kind == "last scores":
            total += factors[:, 0] @ module(batch, batch.last_index)
            continue
        values = module(batch, batch.target_index) if kind == "scores" else module(batch)
        parts = values.split(batch.target_lengths.tolist())
        total += sum(each[: len(part)] @ part for each, part in zip(factors, parts, strict=True))
    return total


# The same from one forward pass of transformers per sequence.


def reference_logprobs(model, prompt, response, with_prompt=False):
    """Log-probability of each target token, from the logits of transformers' model."""
    ids = torch.tensor([[*prompt, *response]])
    table = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
    logprobs = table[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return logprobs if with_prompt else logprobs[len(prompt) - 1 :]


def reference_scores(model, prompt, response):
    """Score at each token of a response. transformers returns only the score of the last token."""
    ends = range(len(prompt) + 1, len(prompt) + len(response) + 1)
    ids = [*prompt, *response]
    return torch.stack([model(input_ids=torch.tensor([ids[:end]])).logits[0, 0] for end in ends])


def separate_sum(model, kind):
    """The sum of packed_sum, from separate sequences."""
    total = 0.0
    for number, responses in enumerate(examples_of(kind).responses):
        for row, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
            factors = FACTORS[number, row]
            if kind in OF_SCORERS:
                values = reference_scores(model, prompt, response)
                values = values[-1:] if kind == "last scores" else values
            else:
                values = reference_logprobs(model, prompt, response, "prompts" in kind)
            if kind == "logprobs of turns":
                values = values[torch.tensor(TRAINED[row]) == 1]
            total += values.sum() if kind == "their sum" else factors[: len(values)] @ values
    return total


def gradients(module, value):
    """Gradients of all trainable weights, concatenated."""
    weights = [weight for weight in module.model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def expected(family, kind):
    """The sum of separate sequences and its gradients."""
    if kind not in family.expected:
        module = module_of(family, kind)
        value = separate_sum(module.model, kind)
        family.expected[kind] = value.detach(), gradients(module, value)
    return family.expected[kind]


def relative_error(actual, reference):
    """Norm of the difference, relative to the reference."""
    return ((actual - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("kind", OF_POLICIES + OF_SCORERS)
@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"], scope="module")
def test_values_and_gradients_equal_those_of_separate_sequences(family, layout, kind, monkeypatch):
    if layout == "padded":
        choices = Acceleration(pad_to_multiple_of=64)
        monkeypatch.setattr(models, "_acceleration", choices)
    module = module_of(family, kind)
    value, grads = expected(family, kind)
    actual = packed_sum(module, kind, layout)
    assert actual.item() == pytest.approx(value.item(), rel=1e-5, abs=1e-4)
    assert relative_error(gradients(module, actual), grads) < 1e-5


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", ["opt"], indirect=True, scope="module")
def test_logprobs_and_scores_equal_those_of_separate_sequences(family, packing, monkeypatch):
    monkeypatch.setattr(family.policy, "supports_packing", packing)
    monkeypatch.setattr(family.scorer, "supports_packing", packing)
    with accelerated(Acceleration(micro_batch_tokens=60)):
        sums, of_prompts = (response_logprobs(family.policy, PAIRS, each) for each in (False, True))
        scores = response_scores(family.scorer, PAIRS)
    with torch.no_grad():
        for row, (prompt, *responses) in enumerate(zip(PROMPTS, *RESPONSES, strict=True)):
            for number, response in enumerate(responses):
                for found, with_prompts in ((sums, False), (of_prompts, True)):
                    logprobs = reference_logprobs(
                        family.policy.model, prompt, response, with_prompts
                    )
                    assert found[number, row] == pytest.approx(logprobs.sum().item(), rel=1e-5)
                score = reference_scores(family.scorer.model, prompt, response)[-1]
                assert scores[number, row] == pytest.approx(score.item(), rel=1e-4, abs=1e-5)


@pytest.fixture
def policy(model):
    return Policy(model)


def test_gradients_of_adapters_equal_those_of_separate_sequences(model):
    policy = Policy(spread(add_lora(model, 2, 4)))
    assert policy.supports_packing
    assert not policy.external_parameters()[0].requires_grad
    grads = gradients(policy, separate_sum(model, "logprobs"))
    actual = packed_sum(policy, "logprobs", "packed")
    assert relative_error(gradients(policy, actual), grads) < 1e-5


def test_logits_are_computed_for_target_tokens_only(policy, monkeypatch):
    states = []
    monkeypatch.setattr(forward, "token_logprobs", lambda hidden, *_: states.append(hidden))
    [micro_batch] = ROWS.micro_batches(np.arange(len(ROWS)), True, CPU)
    policy(micro_batch.batch)
    # Chosen responses.
    assert len(states[0]) == 9 + 4 + 2 + 6 + 1 + 3


def test_the_output_layer_may_have_a_bias(policy):
    [weight] = policy.external_parameters()
    head = nn.Linear(*reversed(weight.shape))
    head.weight = weight
    policy.model.set_output_embeddings(head)
    assert [*map(id, policy.external_parameters())] == [id(weight), id(head.bias)]
    expected = separate_sum(policy.model, "their sum").item()
    actual = packed_sum(policy, "their sum", "packed").item()
    assert actual == pytest.approx(expected, rel=1e-5)


def test_an_empty_response_has_probability_1(policy):
    examples = Examples([[11, 12], [21]], [[], [22, 23]])
    [sums] = response_logprobs(policy, examples)
    assert sums[0] == 0 and sums[1] < 0
    [sums] = response_logprobs(policy, examples, with_prompts=True)
    assert sums[0] < 0


# Deterministic kernels: of GPUs with `deterministic: true`, of CPUs always.


@pytest.fixture
def _restored():
    """Restore what choose_device and the tests set for the process."""
    filled, number = torch.utils.deterministic.fill_uninitialized_memory, torch.get_num_threads()
    yield
    torch.set_num_threads(number)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.usefixtures("_restored")
def test_an_operation_without_a_deterministic_kernel_is_an_error(monkeypatch):
    for name in (*ENVIRONMENT, REQUEST):
        # Deletes them after the test, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    request_deterministic_kernels()
    choose_device(SERIAL)
    # torch has none for it on a CPU either.
    with pytest.raises(RuntimeError) as error:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert missing_kernel(error.value) == "put_"


@pytest.mark.usefixtures("_restored")
def test_threads_of_a_cpu_add_gradients_in_the_same_order(model):
    # More numbers than torch leaves to one thread, and prompts whose last state 8 responses share.
    prompts = [[3 + row, 9] for row in range(40)]
    rows = Examples(prompts, *([[20 + i, 5, 6, 2]] * 40 for i in range(8)))
    torch.set_num_threads(2)
    policy = Policy(model)
    batch = rows.collate([[row] for row in range(40)], True, choose_device(SERIAL))
    weights = list(policy.model.parameters())
    first, *others = (torch.autograd.grad(policy(batch).sum(), weights) for _ in range(8))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))
