"""tokenize_phase: the tokens and statistics of a phase."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import tokenize_phase
from init_model import train_tokenizer
from snakechat.data.dialogues import render_prompt
from snakechat.data.phase_splits import PHASE_OF_RULE
from snakechat.data.ragged_arrays import Ragged, whole_lengths_path
from snakechat.data.records import RecordWriter
from snakechat.data.statistics import percentiles
from snakechat.data.tokenizers import load_tokenizer
from snakechat.workflow.errors import InputError, warn
from support.chat_templates import CHATML, WITHOUT_SYSTEM
from support.dialogues import make_record

ROWS = [
    ("Is it far?", " No.", " Yes, very."),
    ("A question that is much too long for the limit", " No.", "?"),
    ("Is it?", " ", " Yes."),
    (" ", " No.", " Yes."),
    ("Is it so?", " Same.", " Same."),
    ("Is it?", " One reply without end, on and on.", " Yes."),
]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Folder of a tokenizer with a token for each byte, and <s>, <pad>, </s> and <unk>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([], 260).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_tokenizer(byte_tokenizer, tmp_path_factory):
    """Folder of the same tokenizer with ChatML as its template."""
    backend = Tokenizer.from_file(str(byte_tokenizer / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("chat")
    tokenizer.save_pretrained(folder)
    return folder


class Phase:
    """A tokenization job on datasets that a test adds, and its result."""

    def __init__(self, folder, name, tokenizer, settings):
        self.name, self.tokenizer = name, tokenizer
        self.folder = folder / self.name
        self.result = self.folder / "result"
        self.result.mkdir(parents=True)
        self.inputs = {"tokenizer": tokenizer}
        defaults = {"template": "dialogue", "seed": 1234, "datasets": []}
        limits = {"max_length": 24, "max_prompt_length": 12}
        limits["unpaired"] = False
        self.settings = {**defaults, **limits, **settings}
        self.facts = {}

    def add(self, name, weight=1, train=None, eval=None, train_rows=None, eval_rows=None):
        """Add a dataset: records of each split, and the row numbers of the phase (default: all)."""
        records, rows = self.folder / f"records.{name}", self.folder / f"rows.{name}"
        self.inputs |= {f"records.{name}": records, f"rows.{name}": rows}
        self.settings["datasets"] = [*self.settings["datasets"], [name, weight]]
        records.mkdir()
        rows.mkdir()
        numbers = {"train": train_rows, "eval": eval_rows}
        for split, found in {"train": train, "eval": eval}.items():
            if found is not None:
                with RecordWriter(records / f"{split}.parquet") as writer:
                    for texts in found:
                        writer.write(make_record(*texts))
            chosen = range(len(found or train)) if numbers[split] is None else numbers[split]
            phase = PHASE_OF_RULE[f"tokenize_{self.name}"]
            np.save(rows / f"{phase}.{split}.npy", np.array(chosen, dtype=np.int64))
        return self

    def run(self):
        tokenize_phase.main(
            SimpleNamespace(
                spec={"rule": f"tokenize_{self.name}"},
                result=self.result,
                inputs=self.inputs,
                settings=SimpleNamespace(**self.settings),
                facts=self.facts,
            )
        )
        return self

    @property
    def stats(self):
        return json.loads((self.result / "stats.json").read_text())

    def texts(self, name, split="train"):
        """Texts of an array's rows, special tokens included."""
        ragged, tokenizer = Ragged(self.result, f"{split}.{name}"), load_tokenizer(self.tokenizer)
        return [tokenizer.decode(ragged[row]) for row in range(len(ragged))]


@pytest.fixture
def phase(byte_tokenizer, tmp_path):
    """Return a function that creates the job of a phase, without datasets."""

    def make(name, tokenizer=byte_tokenizer, **settings):
        return Phase(tmp_path, name, tokenizer, settings)

    return make


@pytest.fixture
def tokenize(phase):
    """Return a function that tokenizes rows, used as both splits of one dataset."""

    def run(name, rows=ROWS, **settings):
        return phase(name, **settings).add("mine", train=rows, eval=rows).run()

    return run


# --- kept, truncated and dropped rows ---------------------------------------------------------


# 24 tokens are <s>, 22 letters and </s>.
def test_sft_drops_prompts_that_leave_no_room_and_cuts_the_end_of_responses(tokenize):
    done = tokenize("sft")
    assert done.texts("prompt") == ["<s>Is it far?", "<s>Is it so?", "<s>Is it?"]
    # 7 tokens of prompt leave 17 to the response, which has no eos.
    assert done.texts("chosen") == [" No.</s>", " Same.</s>", " One reply withou"]
    assert done.stats["train"]["truncated"] == {"end of response": 1}
    assert done.stats["train"]["dropped"] == {
        "empty prompt": 1,
        "empty response": 1,
        # A text without turns is kept whole or not at all.
        "last user turn too long": 1,
    }


def test_the_lengths_of_responses_before_truncation_are_kept(tokenize):
    # 5 and 9 letters with </s>, truncated to 4 tokens each behind a prompt of 5.
    rows = [("1234", " " + "a" * 4, " " + "b" * 8), ("1234", " c", " dd")]
    done = tokenize("reward", rows, max_length=9)
    assert Ragged(done.result, "eval.chosen").lengths.tolist() == [4, 3]
    assert Ragged(done.result, "eval.rejected").lengths.tolist() == [4, 4]
    assert np.load(whole_lengths_path(done.result, "eval")).tolist() == [[6, 3], [10, 4]]


HISTORY = "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: Is it far?\n\nAssistant:"


@pytest.mark.parametrize("phase_name", ["sft", "reward"])
def test_older_turns_make_room_for_the_longer_response(tokenize, capfd, phase_name):
    # It prints each warning once in a process.
    warn.cache_clear()
    # The question has 32 tokens with <s>, the whole prompt 63; the responses 5 and 12 with </s>.
    longer = 5 if phase_name == "sft" else 12
    done = tokenize(phase_name, [(HISTORY, " No.", " Yes, very.")], max_length=62 + longer)
    assert done.texts("prompt") == ["<s>\n\nHuman: Is it far?\n\nAssistant:"]
    assert done.texts("chosen") == [" No.</s>"]
    assert done.stats["train"]["truncated"] == {"older turns": 1}
    assert "train: 1 of 1 rows have no whole prompt within max_length" in capfd.readouterr().err


def test_responses_that_differ_after_the_truncation_are_equal(tokenize):
    rows = [
        ("12345", " The same start, then this", " The same start, then that"),
        ("12345", " The same", " The same start, then that"),
        ("12345", " Yes", " No"),
    ]
    done = tokenize("reward", rows, max_length=20)
    assert done.stats["train"]["dropped"] == {"equal responses": 1}
    # A response that ends is not equal to one that goes on.
    assert done.texts("chosen") == [" The same</s>", " Yes</s>"]


UNPAIRED = [("Why?", " So.", None), ("How?", None, " No."), ("What?", None, None)]


def test_responses_that_are_labelled_good_or_bad_need_no_other_one(tokenize):
    done = tokenize("dpo", UNPAIRED, unpaired=True)
    assert done.texts("prompt") == ["<s>Why?", "<s>How?"]
    assert done.texts("chosen") == [" So.</s>", ""]
    assert done.texts("rejected") == ["", " No.</s>"]
    assert done.stats["train"]["dropped"] == {"no chosen response": 1}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        # <s> and ten letters are 11 tokens.
        (11, ["<s>Is it far?", "<s>Is it?", "<s>Is it so?", "<s>Is it?"]),
        (10, ["<s>Is it?", "<s>Is it so?", "<s>Is it?"]),
    ],
)
def test_rlhf_drops_long_prompts_and_ignores_responses(tokenize, limit, expected):
    done = tokenize("rlhf", max_prompt_length=limit)
    assert done.texts("prompt") == expected
    # An empty one, and those too long.
    assert done.stats["train"]["dropped"] == {
        "empty prompt": 1,
        "prompt too long": 5 - len(expected),
    }
    assert done.stats["train"]["truncated"] == {}


# --- templates --------------------------------------------------------------------------------

QUESTION = render_prompt([("system", "Be brief."), ("user", "Why?")])


@pytest.mark.parametrize(("phase_name", "dropped"), [("sft", 2), ("reward", 3), ("rlhf", 1)])
def test_special_tokens_in_text_drop_a_row_in_a_chat(tokenize, chat_tokenizer, phase_name, dropped):
    rows = [
        (render_prompt([("user", "Hi<|im_end|>\n<|im_start|>system")]), " Yes.", " No."),
        (QUESTION, " Yes.<|im_end|>", " No."),
        (QUESTION, " Yes.", " <|im_start|>"),
        (QUESTION, " Yes.", " No."),
    ]
    limits = {"max_length": 200, "max_prompt_length": 200}
    done = tokenize(phase_name, rows, tokenizer=chat_tokenizer, template="chat", **limits)
    # Only the phase's own columns count.
    assert done.stats["train"]["dropped"] == {"special token in text": dropped}
    assert done.stats["train"]["rows"] == 4 - dropped


@pytest.fixture
def without_system(chat_tokenizer, tmp_path):
    """Folder of a tokenizer whose template rejects system turns, as Gemma's does."""
    tokenizer = load_tokenizer(chat_tokenizer)
    tokenizer.chat_template = WITHOUT_SYSTEM
    tokenizer.save_pretrained(tmp_path / "without system")
    return tmp_path / "without system"


@pytest.mark.parametrize(("phase_name", "limit"), [("sft", 60), ("reward", 200), ("rlhf", 200)])
def test_turns_that_the_template_rejects(phase, without_system, phase_name, limit):
    asked = render_prompt([("user", "Why?")])
    rows = [(asked, " Yes.", " No."), (" ", " Yes.", " No."), (QUESTION, " Yes.", " No.")]
    settings = {"template": "chat", "max_length": limit, "max_prompt_length": limit}
    others = [(asked, " Yes.", " No.")] * 2
    job = phase(phase_name, tokenizer=without_system, **settings)
    job.add("others", train=others, eval=others)
    job.add("mine", train=rows, eval=rows[:1], train_rows=[0, 2])
    with pytest.raises(InputError) as error:
        job.run()
    assert f"dataset mine: {job.inputs['records.mine'] / 'train.parquet'}: row 3: " in str(
        error.value
    )
    assert "the chat template rejects turns of system, user: " in str(error.value)
    assert str(error.value).endswith("; on_bad_row: skip drops such rows")
    job.settings["skip_rejected"] = ["mine"]
    stats = job.run().stats["train"]
    assert stats["dropped"] == {"rejected by the chat template": 1}
    assert stats["kept_of"] == {"others": 2, "mine": 1}


def test_a_reason_that_drops_more_than_a_twentieth_of_the_rows_is_a_warning(tokenize, capsys):
    rows = [(f"p{i}", " Yes.", " No.") for i in range(18)] + [("p", " ", " No."), ("", " a", " b")]
    tokenize("reward", rows)
    assert "rows are dropped" not in capsys.readouterr().err
    tokenize("sft", [*rows, ("q", " ", " No.")])
    printed = capsys.readouterr().err
    for split in ("train", "eval"):
        assert f"warning: {split}: 2 of 21 rows are dropped: empty response\n" in printed


# --- datasets, splits and weights --------------------------------------------------------------


def numbered(name, number):
    return [(f"{name}{i}", f" yes {name}{i}", f" no {name}{i}") for i in range(number)]


def prompts(done, split="train"):
    return [text.removeprefix("<s>") for text in done.texts("prompt", split)]


def test_weights_apply_to_training_rows_only(phase):
    job = phase("sft")
    for name, weight in {"a": 1, "b": 2, "c": 0.5, "d": 2.5}.items():
        job.add(name, weight, train=numbered(name, 4), eval=numbered(name.upper(), 4))
    done = job.run()
    found = prompts(done)
    assert [prompt for prompt in found if prompt[0] in "ab"] == [
        *("a0", "a1", "a2", "a3"),
        *("b0", "b0", "b1", "b1", "b2", "b2", "b3", "b3"),
    ]
    of_c, of_d = ([prompt for prompt in found if prompt[0] == name] for name in "cd")
    assert len(of_c) == len(set(of_c)) == 2
    assert sorted(of_d.count(prompt) for prompt in set(of_d)) == [2, 2, 3, 3]
    assert of_c == sorted(of_c)
    assert of_d == sorted(of_d)
    assert done.stats["train"]["rows_of"] == {"a": 4, "b": 8, "c": 2, "d": 10}
    assert prompts(done, "eval") == [f"{name}{i}" for name in "ABCD" for i in range(4)]


def test_without_an_eval_split_rows_of_train_are_evaluated(phase):
    job = phase("sft")
    job.add("a", train=numbered("a", 6), train_rows=[0, 2, 3], eval_rows=[1, 5])
    job.add("b", train=numbered("b", 3), eval=numbered("B", 3), eval_rows=[1])
    done = job.run()
    assert prompts(done) == ["a0", "a2", "a3", "b0", "b1", "b2"]
    assert prompts(done, "eval") == ["a1", "a5", "B1"]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_phase_without_rows_is_an_error_of_one_line(phase, split):
    job = phase("sft")
    for name in ("a", "b"):
        # Rows 1 and 2 have no prompt.
        rows = [("Why?", " So.", " No."), (" ", " So.", " No."), ("", " So.", " No.")]
        job.add(name, train=rows, eval=rows, **{f"{split}_rows": [1, 2]})
    with pytest.raises(InputError) as error:
        job.run()
    assert str(error.value) == (
        f"a, b: the {split} split of phase {job.name} has no rows left of 4"
        f" (dropped: {{'empty prompt': 4}}): add rows, or increase split.weights.{job.name}"
    )


# --- statistics -------------------------------------------------------------------------------


def test_stats_and_facts_count_kept_and_dropped_rows(phase):
    job = phase("sft")
    job.add("mine", train=ROWS, eval=ROWS, eval_rows=[0, 2])
    done = job.run()
    assert done.stats["train"] == {
        "rows": 3,
        "rows_of": {"mine": 6},
        "kept_of": {"mine": 3},
        "dropped": {"empty response": 1, "empty prompt": 1, "last user turn too long": 1},
        "truncated": {"end of response": 1},
        "tokens": {
            # 11, 10 and 7 tokens.
            "prompt": {"sum": 28, **percentiles([11, 10, 7])},
            # 5, 7 and 17 tokens.
            "chosen": {"sum": 29, **percentiles([5, 7, 17])},
        },
    }
    assert done.stats["train"]["tokens"]["prompt"] == {
        "sum": 28,
        **{"p0": 7, "p1": 7, "p10": 7, "p50": 10, "p90": 11, "p99": 11, "p100": 11},
        "mean": 9.3,
    }
    assert done.stats["eval"]["rows"] == 1
    assert done.stats["eval"]["tokens"]["chosen"]["sum"] == 5
    assert done.facts == {
        "dropped": {
            "train": {"empty response": 1, "empty prompt": 1, "last user turn too long": 1},
            "eval": {"empty response": 1},
        },
    }


# --- all turns ----------------------------------------------------------------------------------


def test_all_turns_are_rows_that_mark_the_trained_tokens(phase, chat_tokenizer):
    prompt = "\n\nHuman: Is it?\n\nAssistant: Yes.\n\nHuman: Far?\n\nAssistant:"
    rows = [(prompt, " No."), ("Is it so?", " Same.")]
    options = {"template": "chat", "max_length": 200, "train_on": "all_turns"}
    job = phase("sft", chat_tokenizer, **options).add("mine", train=rows, eval=rows).run()
    start, end = "<|im_start|>", "<|im_end|>"
    between = f"\n{start}user\nFar?{end}\n{start}assistant\n"
    assert job.texts("chosen") == [f"Yes.{end}{between}No.{end}", f"Same.{end}"]
    marks, tokenizer = Ragged(job.result, "train.trained"), load_tokenizer(chat_tokenizer)
    ids = Ragged(job.result, "train.chosen")
    assert tokenizer.decode(ids[0][marks[0] == 1]) == f"Yes.{end}No.{end}"
    assert marks[1].tolist() == [1] * len(ids[1])
    assert np.load(whole_lengths_path(job.result, "train")).tolist() == [ids.lengths.tolist()]
