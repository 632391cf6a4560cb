"""Generations: responses are sampled, scored and selected, in this process."""

import pytest
import torch

import generate_responses
from snakechat.data.dialogues import render_prompt
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.records import SCORED, read_record_batches, read_records, read_texts
from snakechat.modeling.loading import load_scorer
from support.stages import stages_of_small_model, toy_rows

COMMON = {"model": "random", "datasets": ["toy"], "dtype": "fp32"}
COMMON["placement"] = {"deployment": "cpu"}
GENERATIONS = {
    **COMMON,
    "reward": {"reward/tiny": 0.5},
    # Longer responses are better.
    "reward_functions": {"length_bounds": {"weight": 2, "arguments": {"min_characters": 12}}},
    "max_prompt_length": 60,
    "max_response_length": 20,
    "num_generations": 8,
}
RECIPES = {
    "reward": {"tiny": {**COMMON, "epochs": 1, "max_length": 64, "global_batch_size": 8}},
    "generations": {"mine": GENERATIONS},
}
DATASETS = {"pairs": {"generations": "mine", "select": "best_and_worst"}}


@pytest.fixture(scope="module")
def stages(tokenizer, group, tmp_path_factory):
    """Generations of a small random model to 40 prompts, in batches of 16."""
    folder = tmp_path_factory.mktemp("generations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_responses, "BATCH_SIZE", 16)
        with stages_of_small_model(folder, tokenizer, toy_rows(40), RECIPES, DATASETS) as stages:
            yield stages


def responses_of(folder, split="train"):
    ids = Ragged(folder, f"{split}.responses")
    return [ids[row].tolist() for row in range(len(ids))]


def test_an_interrupted_run_continues_with_the_same_responses(stages, monkeypatch):
    whole = responses_of(stages.result("generate_responses", "mine"))
    save, saved = generate_responses.write_atomically, []

    def save_two(path, text):
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(path.stem)
        save(path, text)

    monkeypatch.setattr(generate_responses, "write_atomically", save_two)
    stages.made.pop(("generate_responses", "mine"))
    with pytest.raises(KeyboardInterrupt):
        stages.result("generate_responses", "mine")
    monkeypatch.setattr(
        generate_responses, "write_atomically", lambda *a: saved.append(a[0].stem) or save(*a)
    )
    assert responses_of(stages.result("generate_responses", "mine")) == whole
    # Batches of 16 prompts; none was sampled twice.
    assert saved == [f"{split}-{n:09}" for split in ("train", "eval") for n in (0, 16, 32)]


def test_scores_are_the_weighted_sum_of_models_and_functions(stages, tokenizer):
    responses = responses_of(stages.result("generate_responses", "mine"))
    path = stages.result("score_responses", "mine") / "train.parquet"
    [batch] = read_record_batches(path, columns=SCORED.names)
    prompts = [prompt for prompt, *_ in read_records(stages.folder / "records/train.parquet")]
    assert batch["prompt"] == prompts
    tokens = Ragged(stages.result("tokenize_generations", "mine"), "train.prompt")
    reward = load_scorer(stages.result("train_reward", "tiny"), "fp32", tokenizer)
    rows = list(zip(*batch.values(), strict=True))
    for number, (_, _, ended, of_responses) in enumerate(rows):
        ids = responses[8 * number : 8 * (number + 1)]
        assert ended == [response[-1] == tokenizer.eos_token_id for response in ids]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        # One response at a time, by the class of transformers alone.
        for response, text, score in zip(ids, texts, of_responses, strict=True):
            sequence = torch.tensor([[*tokens[number].tolist(), *response]])
            with torch.no_grad():
                hidden = reward.base_model(sequence).last_hidden_state[0, -1]
            expected = 0.5 * reward.score(hidden).item() + 2 * (len(text.strip()) >= 12)
            assert score == pytest.approx(expected, abs=1e-4)
    scores = {
        (render_prompt(prompt), text.strip()): score
        for prompt, responses, _, of_responses in rows
        for text, score in zip(responses, of_responses, strict=True)
    }
    pairs = list(read_texts(stages.result("select_responses", "pairs") / "train.parquet"))
    assert pairs
    for prompt, chosen, rejected in pairs:
        assert scores[prompt, chosen.strip()] > scores[prompt, rejected.strip()]
