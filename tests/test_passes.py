"""The passes of models, against transformers' own forward."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from conftest import SEQUENCES
from rlhf.job import InputError
from rlhf.models import add_lora, load_causal, load_scorer
from rlhf.passes import (
    Policy,
    Scorer,
    Standardizer,
    response_logprobs,
    row_sums,
    score_last_tokens,
)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_policy_gives_the_logprobs_of_the_plain_model(model, batch, temperature):
    input_ids, attention_mask, targets = batch
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits / temperature
    expected = []
    for row, position in targets.nonzero().tolist():
        distribution = torch.log_softmax(logits[row, position - 1], dim=-1)
        expected.append(distribution[input_ids[row, position]])
    logprobs = Policy(model)(input_ids, attention_mask, targets, temperature)
    torch.testing.assert_close(logprobs, torch.stack(expected))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_policy_gives_the_entropies_of_the_plain_model(model, batch, temperature):
    input_ids, attention_mask, targets = batch
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits / temperature
    expected = [
        torch.distributions.Categorical(logits=logits[row, position - 1]).entropy()
        for row, position in targets.nonzero().tolist()
    ]
    policy = Policy(model)
    logprobs, entropies = policy(*batch, temperature, entropies=True)
    torch.testing.assert_close(entropies, torch.stack(expected))
    assert torch.equal(logprobs, policy(*batch, temperature))


def test_only_targets_are_given_and_padding_does_not_change_them(model, batch):
    input_ids, attention_mask, targets = batch
    targets = torch.zeros_like(targets)
    targets[1, 2:4] = True
    together = Policy(model)(input_ids, attention_mask, targets)
    alone = torch.tensor([SEQUENCES[1]])
    apart = Policy(model)(alone, torch.ones_like(alone), targets[1:2, :4])
    assert together.shape == (2,)
    torch.testing.assert_close(together, apart)


def test_the_gradient_of_a_policy_is_that_of_cross_entropy(model, batch):
    input_ids, attention_mask, targets = batch
    logprobs, entropies = Policy(model)(input_ids, attention_mask, targets, entropies=True)
    (-logprobs.sum()).backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    labels = input_ids.masked_fill(~targets, -100)
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], reduction="sum"
    ).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, rtol=1e-4, atol=1e-5)
    assert not entropies.requires_grad


def test_a_bf16_policy_gives_fp32_logprobs(folder, tokenizer, batch):
    model = load_causal(folder, "bf16", tokenizer)
    assert next(model.parameters()).dtype == torch.bfloat16
    logprobs, entropies = Policy(model)(*batch, entropies=True)
    assert logprobs.dtype == entropies.dtype == torch.float32


def test_the_causal_model_of_a_policy_is_the_one_inside_its_adapters(folder, tokenizer):
    plain, inner = load_causal(folder, "fp32", tokenizer), load_causal(folder, "fp32", tokenizer)
    assert Policy(plain).causal is plain
    assert Policy(add_lora(inner, 2, 1)).causal is inner


def test_transformers_scores_a_padded_batch_as_we_do_at_the_last_token(
    scorer_folder, tokenizer, batch
):
    input_ids, attention_mask, _ = batch
    plain = AutoModelForSequenceClassification.from_pretrained(scorer_folder).eval()
    expected = plain(input_ids=input_ids, attention_mask=attention_mask).logits.squeeze(-1)
    scorer = Scorer(load_scorer(scorer_folder, "fp32", tokenizer))
    scores = score_last_tokens(scorer, SEQUENCES, tokenizer.pad_token_id, 8192)
    torch.testing.assert_close(scores, expected)
    # The scores are apart, so that a mixed-up order could not pass.
    assert (scores[:, None] - scores[None, :]).abs().add(torch.eye(3)).min() > 1e-3


def test_scores_keep_the_order_of_sequences_however_they_share_passes(scorer_folder, tokenizer):
    scorer = Scorer(load_scorer(scorer_folder, "fp32", tokenizer))
    together = score_last_tokens(scorer, SEQUENCES, tokenizer.pad_token_id, 8192)
    apart = score_last_tokens(scorer, SEQUENCES, tokenizer.pad_token_id, 7)
    torch.testing.assert_close(together, apart)


def test_a_scorer_gives_the_heads_output_at_positions_row_after_row(
    scorer_folder, tokenizer, batch
):
    input_ids, attention_mask, _ = batch
    model = load_scorer(scorer_folder, "fp32", tokenizer)
    positions = torch.zeros_like(input_ids, dtype=torch.bool)
    positions[0, 3] = positions[1, 0] = positions[1, 2] = True
    hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask)[0]
    expected = [model.score.weight[0] @ hidden[row, t] for row, t in [(0, 3), (1, 0), (1, 2)]]
    found = Scorer(model)(input_ids, attention_mask, positions)
    torch.testing.assert_close(found, torch.stack(expected))


def test_outputs_are_in_units_of_mean_and_deviation(scorer_folder, tokenizer, batch):
    scorer = Scorer(load_scorer(scorer_folder, "fp32", tokenizer))
    raw = scorer(*batch)
    scorer.standardizer.mean, scorer.standardizer.deviation = 3.0, 0.5
    torch.testing.assert_close(scorer(*batch), (raw - 3.0) * 2.0)


def test_scores_are_as_they_are_before_any_are_fitted():
    scores = torch.tensor([-2.5, 0.0, 7.0])
    assert torch.equal(Standardizer()(scores), scores)


def test_scores_are_told_in_deviations_from_their_mean():
    standardizer = Standardizer()
    standardizer.fit(torch.tensor([1.0, 5.0, 1.0, 5.0]))
    # Each is 2 from the mean of 3.
    assert (standardizer.mean, standardizer.deviation) == (3.0, 2.0)
    assert standardizer(torch.tensor([1.0, 3.0, 6.0])).tolist() == [-1.0, 0.0, 1.5]


def test_the_scorer_whose_scores_were_fitted_gives_mean_0_and_deviation_1(
    scorer_folder, tokenizer, batch
):
    scorer = Scorer(load_scorer(scorer_folder, "fp32", tokenizer))
    scorer.standardizer.fit(scorer(*batch))
    scores = scorer(*batch)
    assert scores.mean().item() == pytest.approx(0, abs=1e-5)
    assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("scores", [[2.5] * 4, [0.0] * 4, [7.0], [0.1] * 7, [1.7] * 512])
def test_scores_that_are_all_the_same_are_refused(scores):
    with pytest.raises(InputError, match="the reward model gives every answer the same score"):
        Standardizer().fit(torch.tensor(scores))


def test_a_standardizer_comes_back_from_its_state_to_the_last_digit():
    fitted, restored = Standardizer(), Standardizer()
    scores = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 3 + 0.1
    fitted.fit(scores)
    restored.restore(json.loads(json.dumps(fitted.state())))
    assert (restored.mean, restored.deviation) == (fitted.mean, fitted.deviation)
    assert torch.equal(restored(scores), fitted(scores))


def test_rows_are_summed_by_their_mask():
    mask = torch.tensor([[False, True, True], [False, False, False], [True, False, True]])
    values = torch.tensor([1.0, 2.0, 10.0, 20.0], requires_grad=True)
    sums = row_sums(values, mask)
    assert sums.tolist() == [3.0, 0.0, 30.0]
    (sums * torch.tensor([1.0, 5.0, 7.0])).sum().backward()
    assert values.grad.tolist() == [1.0, 1.0, 7.0, 7.0]


@pytest.mark.parametrize("max_tokens", [8, 64])
def test_a_response_has_the_sum_of_its_tokens_logprobs(model, tokenizer, max_tokens):
    prompts, responses = [[0, 9, 8], [0], [0, 30, 31]], [[7, 6, 2], [21, 2], [5]]
    sums = response_logprobs(
        Policy(model).eval(), prompts, responses, tokenizer.pad_token_id, max_tokens
    )
    for prompt, response, found in zip(prompts, responses, sums, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0]
        logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        expected = logprobs[range(len(response)), response].sum().item()
        assert found == pytest.approx(expected, abs=1e-5)
