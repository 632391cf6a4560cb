"""Rows are found wherever they were used; excluded rows are in nothing that is built then."""

import re
import shutil

import numpy as np
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from snakechat.data.ragged_arrays import Ragged
from support.staleness import MINE, SPLIT, setting

PHASES = [f"{phase}.{split}" for phase in ("sft", "reward", "rlhf") for split in ("train", "eval")]
EXCLUDE = "datasets.mine.exclude"


def find(workflow, *arguments):
    """Run find_row.py; return its exit code and its output."""
    process = workflow.run("python", "scripts/find_row.py", *map(str, arguments))
    assert "Traceback" not in process.stdout
    return process.returncode, process.stdout


def results_with(workflow, *arguments):
    """Return the phases of the rows that each result was made from."""
    code, output = find(workflow, *arguments)
    results = re.findall(r"^(\S+): rows: \d+(?: \((.*)\))?$", output, re.MULTILINE)
    assert code == (0 if any("/data/" not in name for name, _ in results) else 1)
    return {name: phases.split(", ") if phases else [] for name, phases in results}


def phases_of(folder):
    """Return the row numbers of each phase of the dataset `mine`."""
    return {name: np.load(folder / f"output/split/mine/{name}.npy").tolist() for name in PHASES}


def row(folder, phase, index=0, dataset="mine"):
    """Return the number, the digest and the prompt of a row of a phase."""
    number = np.load(folder / f"output/split/{dataset}/{phase}.npy").tolist()[index]
    split = phase.partition(".")[2]
    record = pq.read_table(folder / f"output/data/{dataset}/{split}.parquet").to_pylist()[number]
    return number, record["digest"].hex(), record["prompt"][0]["content"]


def prompts(folder):
    """Return the decoded prompts of all token files of `mine`."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "output/models/far")
    return {
        tokenizer.decode(ids, skip_special_tokens=True)
        for split in ("train", "eval")
        for ids in Ragged(folder / "output/tokens/sft/mine", f"{split}.prompt")
    }


def test_rows_are_found_by_text_and_digest_in_all_results_made_from_them(built, tmp_path):
    number, digest, prompt = row(built.folder, "sft.train")
    phase = ["mine sft.train"]
    # `far` has the first rows of `mine`, too.
    assert number < 40
    expected = {"output/data/far": [], "output/data/mine": []}
    expected |= {"output/tokens/sft/mine": phase, "output/sft/mine": phase}
    assert results_with(built, prompt) == results_with(built, digest) == expected
    # Rows of other phases reached no tokens: no recipe uses these phases of the dataset.
    unused = row(built.folder, "rlhf.train", -1)[2]
    assert results_with(built, unused) == {"output/data/mine": []}
    # A copy of a model has its lineage.
    shutil.copytree(built.folder / "output/sft/mine", tmp_path / "copy")
    assert str(tmp_path / "copy") in results_with(built, digest, "--in", tmp_path)
    assert find(built, "no row contains this") == (1, "no row matches\n")


def test_a_tokenizer_that_was_trained_on_a_row_counts(built):
    found = results_with(built, row(built.folder, "rlhf.train", dataset="toy")[1])
    assert {"output/models/tiny", "output/sft/tiny", "output/rlhf/tiny"} <= set(found)
    assert found["output/sft/tiny"] == []
    assert found["output/rlhf/tiny"] == ["toy rlhf.train"]
    # The tokenizer reads no row of the eval split.
    held_out = row(built.folder, "sft.eval", dataset="toy")[1]
    assert "output/models/tiny" not in results_with(built, held_out)


def test_exclusion_rebuilds_what_was_made_from_the_rows(built, tmp_path):
    copy = built.copy(tmp_path / "copy")
    folder = copy.folder
    before, old = phases_of(folder), tmp_path / "old"
    shutil.copytree(folder / "output/sft/mine", old)
    first, second = row(folder, "sft.train"), row(folder, "rlhf.train", 3)
    erased = first[1], second[1]
    assert find(copy, *erased)[0] == 0

    setting(EXCLUDE, [first[1], second[1]])(folder)
    assert copy.planned(MINE) == SPLIT
    copy.build("output/tokens/sft/mine")
    # The model still has the weights of the old tokens.
    code, output = find(copy, *erased)
    assert code == 0 and "output/sft/mine: " in output
    copy.build(MINE)
    gone = {("sft.train", first[0]), ("rlhf.train", second[0])}
    assert phases_of(folder) == {
        name: [number for number in numbers if (name, number) not in gone]
        for name, numbers in before.items()
    }
    assert first[2] not in prompts(folder)
    # Earlier versions have the rows, until they are removed.
    assert any(path.startswith("output/store/") for path in results_with(copy, *erased))
    assert copy.run("python", "scripts/store.py", "gc", "--max-size", "0").returncode == 0
    # Only the records, which mirror the source, still have the rows.
    assert results_with(copy, *erased) == {"output/data/far": [], "output/data/mine": []}
    # A copy of the new model has none of the rows; without its split, the old one is unknown.
    shutil.copytree(folder / "output/sft/mine", tmp_path / "models/new")
    assert find(copy, *erased, "--in", tmp_path / "models")[0] == 1
    shutil.copytree(old, tmp_path / "models/old")
    code, output = find(copy, *erased, "--in", tmp_path / "models")
    assert code == 0 and "models/old: rows: 0\n  unknown: no copy of " in output
