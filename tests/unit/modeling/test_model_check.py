"""Models of many types: right, or refused in one line, before a job uses them."""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from snakechat.modeling import attention, models
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import Acceleration
from snakechat.workflow.errors import InputError
from support.families import LLAMA, spread
from support.varlen import loop_over_segments

SIZE = {**LLAMA, "vocab_size": 300, "pad_token_id": 1}
SMALL = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4}
WINDOW = {"sliding_window": 6, "head_dim": 8}
# One of each kind: keys of the config, and whether rows are packed.
RIGHT = {
    # A window in one of the layers.
    "olmo3": ({**SIZE, "sliding_window": 6}, True),
    # A mixture of experts.
    "mixtral": ({**SIZE, "num_local_experts": 4}, True),
    # Its attention has no kernel for a boolean mask.
    "gptj": ({**SMALL, "rotary_dim": 4}, False),
    # A state besides keys and values, which packing would mix.
    "jamba": (
        {**SIZE, "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2}
        | {"mamba_d_state": 8, "use_mamba_kernels": False},
        False,
    ),
}
HEAD = "the forward pass of training differs"
CACHE = "sampling with a key-value cache differs"
WRONG = {
    # Logits that are limited.
    "gemma2": ({**SIZE, **WINDOW}, HEAD),
    # Our hidden states do not fit the output layer.
    "electra": ({**SIZE, "is_decoder": True}, "the forward pass of training fails"),
    # A state that no cache of keys and values has.
    "mamba": (
        {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        CACHE,
    ),
    "openai-gpt": (
        {**SMALL, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)},
        "sampling with a key-value cache fails",
    ),
}
STATEFUL = ("mamba", "openai-gpt")

random = np.random.default_rng(3)
# Lengths of prompt, chosen and rejected response.
LENGTHS = [(13, 4, 11), (10, 5, 6), (8, 9, 7)]
EXAMPLES = Examples(*([random.integers(10, 290, n).tolist() for n in row] for row in LENGTHS))


def make_policy(model_type, keys, dtype=torch.float32, large=True):
    """A policy in evaluation mode. large: with weights that make every token matter."""
    config = AutoConfig.for_model(model_type, **keys)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return Policy((spread(model) if large else model).to(dtype)).eval()


@pytest.mark.parametrize("model_type", RIGHT)
def test_models_that_compute_the_same_are_accepted(model_type):
    keys, packed = RIGHT[model_type]
    policy = make_policy(model_type, keys, torch.bfloat16)
    weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
    check_model(policy, EXAMPLES, samples=True)
    assert policy.supports_packing == packed
    # The check leaves the model as it is.
    for name, weight in policy.state_dict().items():
        assert weight.dtype == weights[name].dtype
        assert torch.equal(weight, weights[name])
    assert not policy.training


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("model_type", WRONG)
def test_models_that_compute_something_else_are_refused(model_type, large):
    keys, problem = WRONG[model_type]
    policy = make_policy(model_type, keys, large=large)
    with pytest.raises(InputError, match=f"model_type {model_type}: {problem}"):
        check_model(policy, EXAMPLES, samples=True)
    if model_type in STATEFUL:
        # They can be trained on given responses.
        check_model(policy, EXAMPLES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_is_measured_whatever_hides_its_effect(dtype):
    # With the weights of a new model, packed rows change outputs less than rounding in bf16.
    policy = make_policy("jamba", RIGHT["jamba"][0], dtype, large=False)
    check_model(policy, EXAMPLES)
    assert not policy.supports_packing


def test_noise_in_training_is_refused_and_random_numbers_stay():
    keys = {**SIZE, "num_local_experts": 4, "router_jitter_noise": 0.1}
    policy = make_policy("mixtral", keys)
    state = torch.get_rng_state()
    with pytest.raises(InputError, match="the forward pass in training mode differs"):
        check_model(policy, EXAMPLES)
    assert torch.equal(torch.get_rng_state(), state)
    # Models that are not trained stay in evaluation mode.
    policy.eval().requires_grad_(False)
    check_model(policy, EXAMPLES)


def test_scorers_are_compared_with_the_scores_of_transformers():
    config = AutoConfig.for_model("llama", **SIZE, num_labels=1)
    scorer = Scorer(spread(AutoModelForSequenceClassification.from_config(config))).eval()
    check_model(scorer, EXAMPLES)
    assert scorer.supports_packing
    scorer.normalizer = lambda scores: 3 * scores - 1
    check_model(scorer, EXAMPLES)
    # A score that the family's own forward pass changes.
    forward = scorer.model.forward

    @functools.wraps(forward)
    def changed(**arguments):
        return SimpleNamespace(logits=forward(**arguments).logits.tanh())

    scorer.model.forward = changed
    with pytest.raises(InputError, match=HEAD):
        check_model(scorer, EXAMPLES)


def test_a_window_that_only_long_rows_exceed_is_measured(monkeypatch):
    policy = make_policy("starcoder2", {**SIZE, "sliding_window": 20})
    # As a family whose window is not in the masks of packed rows.
    monkeypatch.setattr(attention, "layer_masks", lambda config, mask, positions: mask)
    check_model(policy, EXAMPLES.select([1, 2]))
    assert policy.supports_packing
    check_model(policy, EXAMPLES)
    assert not policy.supports_packing


@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.0, False)])
def test_a_kernel_of_16_bits_is_compared_too(scale, is_right, monkeypatch):
    # As on a GPU: the kernel runs in bf16, and the comparison of small models is in fp32.
    def varlen_attn(query, *arguments, **named):
        return scale * loop_over_segments(query, *arguments, **named)

    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(
        attention, "supports_varlen", lambda device, dtype, head_dim: dtype == torch.bfloat16
    )
    monkeypatch.setattr(models, "_acceleration", Acceleration(attn_implementation="auto"))
    policy = make_policy("llama", SIZE, torch.bfloat16)
    examples = Examples(EXAMPLES.prompts, EXAMPLES.responses[0])
    with (
        contextlib.nullcontext()
        if is_right
        else pytest.raises(InputError, match="the attention kernel of the GPU differs")
    ):
        check_model(policy, examples)
    assert policy.supports_packing
