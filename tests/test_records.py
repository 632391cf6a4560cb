"""Reading sources of preference data, and sharing rows among phases."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.job import InputError
from rlhf.records import phase_of_rows, read_records, read_source, write_records
from rlhf.tokens import is_blank

ROW = {
    "prompt": "\n\nHuman: Can you help?\n\nAssistant:",
    "chosen": " Of course.",
    "rejected": " No.",
}


def source(folder, rows, schema=None):
    path = folder / "source.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def shares(number, weights, seed=1234):
    return [len(rows) for rows in phase_of_rows(number, weights, seed)]


# What DeepSpeed-Chat's arithmetic gives. 76,256 and 5,103 rows are Dahoas/rm-static's train and
# test; 33,143 rows are Dahoas/synthetic-instruct-gptj-pairwise's.
@pytest.mark.parametrize(
    ("number", "weights", "expected"),
    [
        # Shares 15,251.2, 30,502.4 and 30,502.4; the row that rounding leaves is the first's.
        (76256, [2, 4, 4], [15252, 30502, 30502]),
        # Shares 1,020.6, 2,041.2 and 2,041.2: rounding leaves none.
        (5103, [2, 4, 4], [1021, 2041, 2041]),
        # Shares 29,828.7 and 3,314.3.
        (33143, [9, 1], [29829, 3314]),
        (10, [1, 0, 0], [10, 0, 0]),
        (10, [0, 1, 0], [0, 10, 0]),
        (0, [2, 4, 4], [0, 0, 0]),
    ],
)
def test_number_of_rows_of_each_phase(number, weights, expected):
    assert shares(number, weights) == expected


@pytest.mark.parametrize(
    "weights",
    [
        [1],
        [9, 1],
        [2, 4, 4],
        [0, 5, 5],
        [5, 0, 5],
        [0, 1, 3],
        [1, 0, 0],
        [0, 0, 1],
        [3, 3, 3],
        [1000, 1, 1],
        [1, 1000, 1000],
        [0.1, 0.2, 0.7],
        [1, 1, 1, 1, 1, 1, 1],
    ],
)
@pytest.mark.parametrize("number", [*range(13), 97, 1001])
def test_phases_are_disjoint_and_cover_all_rows(number, weights):
    phases = phase_of_rows(number, weights, 5)
    assert len(phases) == len(weights)
    assert sorted(np.concatenate(phases).tolist()) == list(range(number))


def test_three_rows_for_two_phases_are_used_once():
    # Shares 0, 1.5, 1.5 are rounded to 0, 2, 2: four rows of three.
    phases = phase_of_rows(3, [0, 5, 5], 1)
    assert sorted(np.concatenate(phases).tolist()) == [0, 1, 2]
    assert len(phases[0]) == 0


def test_same_seed_same_rows():
    first, second, other = (phase_of_rows(100, [2, 4, 4], seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_phases_are_cut_from_the_permutation_of_deepspeed_chat():
    order = np.arange(50)
    np.random.RandomState(1234).shuffle(order)
    phases = phase_of_rows(50, [2, 4, 4], 1234)
    assert np.concatenate(phases).tolist() == order.tolist()
    assert [len(rows) for rows in phases] == [10, 20, 20]


def test_the_global_random_state_is_left_alone():
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    phase_of_rows(50, [2, 4, 4], 1234)
    assert np.random.random() == expected


def test_plain_rows_as_in_rm_static(tmp_path):
    # Dahoas/rm-static has a fourth column, a copy of chosen.
    path = source(tmp_path, [{**ROW, "response": ROW["chosen"]}])
    assert read_source(path, "plain") == [ROW]


def test_instruct_rows_as_in_synthetic_instruct(tmp_path):
    # Dahoas/synthetic-instruct-gptj-pairwise: no turn markers, no blanks before answers.
    row = {"prompt": "Name a fruit.", "chosen": "An apple.\n", "rejected": "  A stone."}
    assert read_source(source(tmp_path, [row]), "instruct") == [
        {
            "prompt": "\n\nHuman: Name a fruit.\n\nAssistant:",
            "chosen": " An apple.",
            "rejected": " A stone.",
        }
    ]


def test_last_turn_rows_keep_the_answer_behind_the_last_turn(tmp_path):
    # yitingxie/rlhf-reward-datasets: prompts stop before "Assistant:", answers repeat the dialogue.
    dialogue = "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: Name a fruit."
    row = {
        "prompt": dialogue + "\n\n",
        "chosen": dialogue + "\n\nAssistant: An apple.",
        "rejected": dialogue + "\n\nAssistant: A stone.",
    }
    assert read_source(source(tmp_path, [row]), "last_turn") == [
        {"prompt": dialogue + "\n\nAssistant:", "chosen": " An apple.", "rejected": " A stone."}
    ]


def test_last_turn_rows_with_answers_alone(tmp_path):
    row = {
        "prompt": "\n\nHuman: Name a fruit.\n\n",
        "chosen": "Assistant: An apple.",
        "rejected": "Assistant: A stone.",
    }
    assert read_source(source(tmp_path, [row]), "last_turn") == [
        {
            "prompt": "\n\nHuman: Name a fruit.\n\nAssistant:",
            "chosen": " An apple.",
            "rejected": " A stone.",
        }
    ]


def test_rows_come_in_the_order_of_the_file(tmp_path):
    rows = [{**ROW, "chosen": f" {number}"} for number in range(20)]
    assert read_source(source(tmp_path, rows), "plain") == rows


def test_a_path_with_an_equals_sign_is_no_partition(tmp_path):
    folder = tmp_path / "lang=en"
    folder.mkdir()
    assert read_source(source(folder, [ROW]), "plain") == [ROW]


def refusal(path):
    with pytest.raises(InputError) as error:
        read_source(path, "plain")
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_a_missing_column_is_named_beside_those_that_exist(tmp_path):
    path = source(tmp_path, [{"question": "a", "chosen": "b", "answer": "c"}])
    message = refusal(path)
    assert "no column prompt, rejected" in message
    assert "question, chosen, answer" in message


def test_a_cell_without_a_value_is_named(tmp_path):
    path = source(tmp_path, [ROW, ROW, {**ROW, "rejected": None}, ROW])
    message = refusal(path)
    assert "row 2" in message
    assert "rejected is nothing" in message


def test_a_cell_that_is_no_text_is_named(tmp_path):
    path = source(tmp_path, [{**ROW, "chosen": 7}])
    message = refusal(path)
    assert "row 0" in message
    assert "chosen is int" in message


def test_a_cell_that_is_not_utf_8_is_refused(tmp_path):
    # Parquet does not check what is written as text: files with Latin-1 in them exist.
    latin = pa.array([" caf\xe9".encode("latin-1")])
    chosen = pa.Array.from_buffers(pa.string(), 1, latin.buffers())
    path = tmp_path / "source.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "chosen": chosen, "rejected": ["b"]}), path)
    refusal(path)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = source(tmp_path, [ROW] * 1000)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "not a whole parquet file" in refusal(path)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "source.parquet"
    path.touch()
    assert "(0 bytes)" in refusal(path)


def test_a_file_without_rows_is_refused(tmp_path):
    path = source(tmp_path, [], pa.schema([(name, pa.string()) for name in ROW]))
    assert "no rows" in refusal(path)


def test_text_is_refused(tmp_path):
    path = tmp_path / "source.parquet"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert "not a whole parquet file" in refusal(path)


def test_damaged_data_pages_are_refused(tmp_path):
    rows = [{**ROW, "chosen": f" answer {number}"} for number in range(1000)]
    path = source(tmp_path, rows)
    damaged = bytearray(path.read_bytes())
    # Zeros over the first page; the footer, which says where it stands, stays whole.
    damaged[20:60] = bytes(40)
    path.write_bytes(damaged)
    refusal(path)


def test_records_are_read_as_they_were_written(tmp_path):
    rows = [{**ROW, "chosen": text} for text in (" a", "", "\n", " é中\x00\u2028", ' "b"')]
    write_records(tmp_path / "train.parquet", rows)
    assert read_records(tmp_path / "train.parquet") == rows


def test_chosen_records_come_in_the_order_asked_for(tmp_path):
    rows = [{**ROW, "chosen": f" {number}"} for number in range(5)]
    write_records(tmp_path / "train.parquet", rows)
    found = read_records(tmp_path / "train.parquet", np.array([3, 0, 3]))
    assert [row["chosen"] for row in found] == [" 3", " 0", " 3"]
    assert read_records(tmp_path / "train.parquet", np.array([], dtype=np.int64)) == []


def test_the_same_records_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_records(tmp_path / name, [ROW] * 10)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_records_are_refused(tmp_path):
    with pytest.raises(InputError, match="eval: no rows"):
        write_records(tmp_path / "eval.parquet", [])


def test_real_rows_with_blank_answers(shared_data):
    rows = read_source(shared_data / "hh_harmless" / "train.parquet", "plain")
    assert len(rows) == 2097
    assert all(row.keys() == {"prompt", "chosen", "rejected"} for row in rows)
    assert all(row["prompt"].endswith("\n\nAssistant:") for row in rows)
    assert sum(is_blank(row["chosen"]) for row in rows) == 4
