"""RewardBench 2 on data in its format: scores of the saved model, metrics by hand, bad rows."""

import json
import shutil
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import evaluate_reward_bench
from conftest import INIT
from snakechat.data import hub
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from support.evaluation import PLACEMENT

# Ties also has ids that occur in other subsets.
ROWS = [
    ("0", "Factuality", "A hat?", ["At the boutique."], ["No.", "Yes.", "A pie."]),
    ("1", "Math", "A plum?", ["At the market."], ["No.", "Maybe.", "A book."]),
    ("2", "Math", "A pie?", ["Same."], ["Same.", "Same.", "Same."]),
    ("ref:0", "Ties", "A bird?", ["Wren."], ["Car.", "Hat."]),
    ("tied:0", "Ties", "A colour?", ["Red.", "Blue."], ["Car."]),
    ("7", "Mine", "A book?", ["At the library."], ["No."]),
]
COLUMNS = ("id", "subset", "prompt", "chosen", "rejected")


def as_rows(rows):
    """Rows with the columns of the dataset that nothing reads, too."""
    return [{**dict(zip(COLUMNS, row, strict=True)), "models": ["a"]} for row in rows]


@pytest.fixture
def job(tokenizer, tmp_path):
    """A job with a random reward model and the rows in two files."""
    place, data = tmp_path / "model", tmp_path / "bench/data"
    save_model(make_causal({**INIT, "init_std": 0.2}, tokenizer, 1), tokenizer, place)
    torch.manual_seed(2)
    scorer = load_scorer(place, "fp32", tokenizer, new_head=True)
    shutil.rmtree(place)
    save_model(scorer, tokenizer, place)
    data.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(as_rows(ROWS[:4])), data / "test-0.parquet")
    lines = [json.dumps(row) + "\n" for row in as_rows(ROWS[4:])]
    (data / "test-1.jsonl").write_text("".join(lines))
    (tmp_path / "result").mkdir()
    files = {f"data/{path.name}": file_digest(path) for path in sorted(data.iterdir())}
    return SimpleNamespace(
        settings=SimpleNamespace(template="dialogue"),
        placement={**PLACEMENT, "source": str(tmp_path / "bench")},
        spec={"name": "tiny", "files": files},
        inputs={"model": place},
        result=tmp_path / "result",
        facts={},
    )


def evaluated(job):
    """The rows of scores.jsonl, and the metrics."""
    evaluate_reward_bench.main(job)
    rows = [json.loads(line) for line in (job.result / "scores.jsonl").read_text().splitlines()]
    return rows, json.loads((job.result / "metrics.json").read_text())


def replace_rows(job, *rows):
    """Have the job read one file with these rows instead."""
    path = job.result.parent / "bench/rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job.spec["files"] = {path.name: file_digest(path)}


def test_scores_are_those_of_the_saved_model_at_the_last_token(job, tokenizer):
    rows, metrics = evaluated(job)
    assert [(row["id"], row["subset"]) for row in rows] == [row[:2] for row in ROWS]
    model = AutoModelForSequenceClassification.from_pretrained(job.inputs["model"]).eval()
    for row, (_, _, prompt, chosen, rejected) in zip(rows, ROWS, strict=True):
        assert len(row["chosen"]) == len(chosen)
        found = row["chosen"] + row["rejected"]
        for score, response in zip(found, chosen + rejected, strict=True):
            ids = tokenizer(f"\n\nHuman: {prompt}\n\nAssistant: {response}").input_ids
            with torch.no_grad():
                wanted = model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits.item()
            assert score == pytest.approx(wanted, abs=1e-4)
    assert metrics["truncated"] == 0
    # A response whose text is that of another one has its score.
    assert metrics["by_subset"]["Math"]["score"] in (0.125, 0.625)


def test_metrics_of_each_subset_and_their_mean(job, monkeypatch):
    scores = [
        *(3.0, 1.0, 0.0, -1.0),
        *(0.0, 1.0, 2.0, 3.0),
        *(1.0, 1.0, 1.0, 1.0),
        # Ties: margins of 4; of 2, with a difference of 1 of the correct ones.
        *(5.0, 1.0, 0.0),
        *(3.0, 4.0, 1.0),
        *(0.0, 2.0),
    ]
    monkeypatch.setattr(
        evaluate_reward_bench, "sequence_scores", lambda *_: torch.tensor(scores).numpy()
    )
    rows, metrics = evaluated(job)
    assert rows[4] == {"id": "tied:0", "subset": "Ties", "chosen": [3.0, 4.0], "rejected": [1.0]}
    by_subset = metrics.pop("by_subset")
    # tanh(2 / 1 - 1) = 0.76159.
    ties = 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * 0.761594
    assert {name: of["prompts"] for name, of in by_subset.items()} == {
        "Factuality": 1,
        "Math": 2,
        "Ties": 2,
        "Mine": 1,
    }
    assert by_subset["Factuality"]["score"] == 1.0
    assert by_subset["Math"]["score"] == 1 / 8
    assert by_subset["Ties"]["score"] == pytest.approx(ties)
    assert by_subset["Mine"]["score"] == 0.0
    assert metrics == {
        "prompts": 6,
        "truncated": 0,
        "score": pytest.approx((1 + 1 / 8 + ties + 0) / 4),
    }
    # Wilson's interval of one success in one trial: 1 / (1 + 1.96 ** 2) to 1.
    assert by_subset["Factuality"]["interval_95"] == pytest.approx([0.206549, 1.0], abs=1e-6)
    assert "interval_95" not in by_subset["Ties"]


def test_a_benchmark_of_the_hub_is_that_of_its_files(job, tmp_path, monkeypatch):
    local = evaluated(job)
    folder = tmp_path / "bench"
    (folder / "README.md").write_text("---\nlicense: odc-by\n---\n")

    def fetch(repository, kind, revision, choose):
        assert (repository, kind, revision) == ("lab/bench", "dataset", "main")
        listed = ["README.md", "data/test-0.parquet", "data/test-1.jsonl", "plot.png"]
        return folder, choose(listed), "f" * 40

    monkeypatch.setattr(hub, "fetch", fetch)
    job.settings.hub, job.settings.revision, job.spec["files"] = "lab/bench", "main", {}
    assert evaluated(job) == local
    assert job.facts == {"commit": "f" * 40, "licence": "odc-by"}


def test_a_repository_without_data_is_an_error(job, monkeypatch):
    monkeypatch.setattr(hub, "fetch", lambda *arguments: arguments[-1](["README.md"]))
    job.settings.hub, job.settings.revision = "lab/bench", "main"
    with pytest.raises(InputError, match="hub dataset lab/bench: no data files: expected parquet"):
        evaluate_reward_bench.main(job)


def test_conversations_beyond_the_positions_are_counted(job):
    replace_rows(job, *as_rows([("0", "Focus", "A hat?", ["Yes."], ["No.", "hat " * 100])]))
    assert evaluated(job)[1]["truncated"] == 1


GOOD = as_rows(ROWS)[0]
TIED = as_rows(ROWS)[4]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**GOOD, "chosen": []}], r"row 1: chosen: expected a list of responses, found \[\]"),
        ([GOOD, {**GOOD, "rejected": "No."}], "row 2: rejected: expected a list of responses, fo"),
        ([GOOD, {**GOOD, "prompt": None}], "row 2: prompt: expected text, found None"),
        ([{"id": "0", "prompt": "A?"}], "row 1: column chosen is missing; the row has id, prompt"),
        ([{**TIED, "id": "12"}], "row 1: id: expected ref:NUMBER or tied:NUMBER in Ties, found"),
        ([TIED, GOOD, TIED], "row 3: id: tied:0 occurs twice in Ties"),
        (["text"], "row 1: is str, expected an object with columns"),
    ],
)
def test_bad_rows_are_named(job, rows, message):
    replace_rows(job, *rows)
    with pytest.raises(InputError, match=rf"rows\.jsonl: {message}"):
        evaluate_reward_bench.main(job)


def test_a_column_that_a_parquet_file_lacks_is_named(job, tmp_path):
    path = tmp_path / "bench/data/test-0.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": "0", "prompt": "A?"}]), path)
    job.spec["files"] = {"data/test-0.parquet": file_digest(path)}
    with pytest.raises(InputError, match=r"test-0\.parquet: column chosen, rejected, subset is mi"):
        evaluate_reward_bench.main(job)


def test_a_file_that_changed_after_planning_is_rejected(job, tmp_path):
    (tmp_path / "bench/data/test-1.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"test-1\.jsonl changed since this build was planned"):
        evaluate_reward_bench.main(job)
