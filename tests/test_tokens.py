"""Tokenizers, and ragged arrays of tokens on disk."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from init_model import train_tokenizer
from rlhf.job import InputError
from rlhf.records import write_records
from rlhf.tokens import (
    Ragged,
    is_blank,
    load_tokenizer,
    phase_records,
    prompt_ids,
    response_ids,
    write_phase,
    write_ragged,
)

RECORDS = [
    {"prompt": f"Human: {number}\n\nAssistant:", "chosen": f" yes {number}", "rejected": " no"}
    for number in range(10)
]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(RECORDS, 300)


@pytest.fixture
def folder_of(trained, tmp_path):
    """Saves the trained tokenizer with these special tokens and no others."""

    def save(**special):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer, **special)
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.fixture
def opt(shared_data):
    return load_tokenizer(shared_data / "tokenizer_opt")


def test_ragged_rows_come_back_as_they_were(tmp_path):
    rows = [[], [3, 1, 4], [], [], [1], [5, 9, 2, 6], []]
    write_ragged(tmp_path, "train.prompt", rows, 300)
    ragged = Ragged(tmp_path, "train.prompt")
    assert len(ragged) == 7
    assert [ragged[row].tolist() for row in range(7)] == rows
    assert ragged.lengths.tolist() == [0, 3, 0, 0, 1, 4, 0]


def test_no_rows_come_back_as_none(tmp_path):
    write_ragged(tmp_path, "eval.prompt", [], 300)
    ragged = Ragged(tmp_path, "eval.prompt")
    assert len(ragged) == 0
    assert ragged.lengths.tolist() == []


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(512, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(tmp_path, vocab_size, dtype):
    write_ragged(tmp_path, "ids", [[0, vocab_size - 1]], vocab_size)
    ragged = Ragged(tmp_path, "ids")
    assert ragged.ids.dtype == dtype
    assert ragged[0].tolist() == [0, vocab_size - 1]


def test_rows_are_views_of_the_file(tmp_path):
    write_ragged(tmp_path, "ids", [[1, 2], [3]], 300)
    ragged = Ragged(tmp_path, "ids")
    assert isinstance(ragged.ids, np.memmap)
    assert np.shares_memory(ragged[1], ragged.ids)
    with pytest.raises(ValueError, match="read-only"):
        ragged[1][0] = 7


def test_nothing_is_padded_on_disk(tmp_path):
    write_ragged(tmp_path, "ids", [[1], [2] * 1000], 300)
    assert len(Ragged(tmp_path, "ids").ids) == 1001


def test_a_pad_token_of_its_own_is_kept(folder_of):
    folder = folder_of(eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    assert load_tokenizer(folder).pad_token == "<pad>"


@pytest.mark.parametrize("special", [{}, {"pad_token": "</s>"}])
def test_unk_takes_the_place_of_a_pad_that_is_missing_or_eos(folder_of, special):
    tokenizer = load_tokenizer(folder_of(eos_token="</s>", unk_token="<unk>", **special))
    assert tokenizer.pad_token == "<unk>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("special", [{}, {"unk_token": "</s>"}])
def test_a_tokenizer_with_nothing_that_could_be_pad_is_refused(folder_of, special):
    folder = folder_of(eos_token="</s>", **special)
    with pytest.raises(InputError, match="no pad token apart from eos"):
        load_tokenizer(folder)


def test_a_tokenizer_without_eos_is_refused(folder_of):
    folder = folder_of(bos_token="<s>", pad_token="<pad>", unk_token="<unk>")
    with pytest.raises(InputError, match="no eos token"):
        load_tokenizer(folder)


def test_the_choice_of_pad_survives_saving(folder_of, tmp_path):
    tokenizer = load_tokenizer(folder_of(eos_token="</s>", unk_token="<unk>"))
    tokenizer.save_pretrained(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").pad_token == "<unk>"


def test_prompts_start_with_bos_and_do_not_end_with_eos(trained):
    for ids in prompt_ids(trained, ["Human: 1\n\nAssistant:", ""]):
        assert ids[0] == trained.bos_token_id
        assert trained.eos_token_id not in ids


def test_responses_end_with_one_eos_and_have_no_bos(trained):
    for ids in response_ids(trained, [" yes 1", " no", ""]):
        assert ids.count(trained.eos_token_id) == 1
        assert ids[-1] == trained.eos_token_id
        assert trained.bos_token_id not in ids


def test_prompt_and_response_together_are_the_text(trained):
    (prompt,), (response,) = prompt_ids(trained, ["Human: 1\n\n"]), response_ids(trained, [" yes"])
    assert trained.decode([*prompt, *response]) == "<s>Human: 1\n\n yes</s>"
    assert trained.decode([*prompt, *response], skip_special_tokens=True) == "Human: 1\n\n yes"


def test_no_texts_give_no_ids(trained):
    assert prompt_ids(trained, []) == []
    assert response_ids(trained, []) == []


def test_opt_prompts_and_responses(opt):
    assert prompt_ids(opt, ["Hello world"]) == [[2, 31414, 232]]
    # The same words without </s> in front; "</s>" closes a response.
    assert response_ids(opt, ["Hello world"]) == [[31414, 232, 2]]
    assert (opt.pad_token_id, opt.eos_token_id) == (1, 2)


def test_opt_vocabulary_fits_two_bytes(opt, tmp_path):
    write_ragged(tmp_path, "ids", prompt_ids(opt, ["Hello world"]), len(opt))
    assert Ragged(tmp_path, "ids").ids.dtype == np.uint16


@pytest.mark.parametrize(
    ("text", "blank"), [("", True), (" ", True), ("\n\t ", True), (" a", False)]
)
def test_an_answer_of_blanks_is_blank(text, blank):
    assert is_blank(text) == blank


@pytest.fixture
def job(tmp_path):
    """A job on two datasets, whose rows of phase sft are 3, 1 and 0 of a; 2 of b."""
    inputs = {}
    for name, rows in {"a": [3, 1, 0], "b": [2]}.items():
        inputs[f"records.{name}"] = tmp_path / f"records.{name}"
        inputs[f"rows.{name}"] = tmp_path / f"rows.{name}"
        for part in ("train", "eval"):
            records = [{**row, "prompt": f"{name}.{part}.{n}"} for n, row in enumerate(RECORDS)]
            inputs[f"records.{name}"].mkdir(exist_ok=True)
            inputs[f"rows.{name}"].mkdir(exist_ok=True)
            write_records(inputs[f"records.{name}"] / f"{part}.parquet", records)
            np.save(inputs[f"rows.{name}"] / f"sft.{part}.npy", np.array(rows))
    result = tmp_path / "result"
    result.mkdir()
    return SimpleNamespace(
        settings=SimpleNamespace(datasets=["a", "b"]), inputs=inputs, result=result
    )


def test_records_of_a_phase_are_its_rows_of_each_dataset_in_turn(job):
    prompts = [row["prompt"] for row in phase_records(job, "sft", "eval")]
    assert prompts == ["a.eval.3", "a.eval.1", "a.eval.0", "b.eval.2"]


def test_a_phase_is_written_with_counts_of_what_was_kept_and_dropped(job):
    def encode(records):
        kept = [row for row in records if row["prompt"].startswith("a")]
        ids = [[7] * int(row["prompt"][-1]) for row in kept]
        return {"prompt": ids}, {"of b": len(records) - len(kept)}

    write_phase(job, "sft", encode, 300)
    for part in ("train", "eval"):
        assert Ragged(job.result, f"{part}.prompt").lengths.tolist() == [3, 1, 0]
    expected = {"rows": 3, "dropped": {"of b": 1}, "prompt_tokens": 4}
    stats = json.loads((job.result / "stats.json").read_text())
    assert stats == {"train": expected, "eval": expected}


def test_a_phase_without_rows_is_refused(job):
    with pytest.raises(InputError, match=r"no row of a, b is left to train phase sft \(4 rows"):
        write_phase(job, "sft", lambda records: ({"prompt": []}, {"too long": 4}), 300)
