"""Scored responses: their file, and the records that are selected from them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from select_responses import select_record
from snakechat.data import records
from snakechat.data.records import ScoredPrompt, read_scored_responses

# The best response did not end; of two equal ones, the first is taken.
SCORED = ScoredPrompt(
    [("user", "Why?")],
    ["So.", " Because.", "No", "Never.", "Not."],
    [True, True, False, True, True],
    [2.0, 2.0, 9.0, -1.0, -1.0],
)


def test_prompts_are_read_as_they_were_written(tmp_path):
    other = ScoredPrompt([], ["\n\u2028", "é"], [False, True], [0.1, -1e300])
    with pq.ParquetWriter(tmp_path / "train.parquet", records.SCORED) as file:
        for prompts in ([SCORED, other], [SCORED]):
            file.write_table(records.scored_table(prompts))
    assert list(read_scored_responses(tmp_path / "train.parquet")) == [SCORED, other, SCORED]


def test_one_part_of_a_file_is_held_at_a_time(tmp_path):
    long = [SCORED._replace(responses=[f"{row}" * 100_000] * 5) for row in range(30)]
    with pq.ParquetWriter(tmp_path / "train.parquet", records.SCORED) as file:
        for prompt in long:
            file.write_table(records.scored_table([prompt]))
    before = pa.total_allocated_bytes()
    for _ in read_scored_responses(tmp_path / "train.parquet"):
        assert pa.total_allocated_bytes() - before < 5_000_000


def test_the_best_and_the_worst_response_that_ended_are_selected():
    assert select_record(SCORED, "best", None, 0.0) == (SCORED.prompt, " So.", None)
    assert select_record(SCORED, "best_and_worst", 2.0, 3.0) == (SCORED.prompt, " So.", " Never.")


@pytest.mark.parametrize(
    ("scored", "select", "min_score", "min_margin", "reason"),
    [
        (SCORED, "best", 2.5, 0.0, "score below min_score"),
        (SCORED, "best_and_worst", None, 3.5, "difference of scores below min_margin"),
        (SCORED._replace(scores=[1.0] * 5), "best_and_worst", None, 0.0, "equal scores"),
        (SCORED._replace(ended=[False] * 5), "best", None, 0.0, "no response ended"),
    ],
)
def test_other_prompts_are_dropped(scored, select, min_score, min_margin, reason):
    assert select_record(scored, select, min_score, min_margin) == reason
