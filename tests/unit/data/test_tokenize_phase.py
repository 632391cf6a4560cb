"""The rows of a phase: as tokens with statistics, and as files for other trainers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import render_rows
import tokenize_phase
from snakechat.config.recipes import PHASES
from snakechat.data.dialogues import messages_of, render_prompt
from snakechat.data.ragged_arrays import Ragged, whole_lengths_path
from snakechat.data.records import write_split
from snakechat.data.tokenizers import load_tokenizer
from snakechat.jobs.model_jobs import FIELDS
from snakechat.workflow.errors import InputError, warn
from support.chat_templates import CHATML, WITHOUT_SYSTEM
from support.encoding import make_record

SPLITS = ("train", "eval")
DEFAULTS = {"template": "dialogue", "seed": 1234, "unpaired": False}
DEFAULTS |= {"max_length": 24, "max_prompt_length": 12}


class Phase:
    """The job that tokenizes a phase, and its result.

    Args:
        datasets: The rows of each split by name, or records. Without eval, its rows are among those
            of train.
        kept: The cells that each record keeps, by column.
        numbers: The row numbers of the phase by dataset and split; defaults to all rows.
        weights: The weights of datasets; default to 1.
    """

    def __init__(self, folder, name, tokenizer, datasets, numbers=(), weights=(), **settings):
        kept = settings.pop("kept", {})
        self.tokenizer, self.result, self.facts = tokenizer, folder / "result", {}
        self.result.mkdir()
        phase = PHASES[name]
        self.inputs = {"tokenizer": tokenizer}
        weights = [dict(weights).get(dataset, 1) for dataset in datasets]
        defaults = {"weights": weights, "phase": phase, "fields": FIELDS[phase]}
        settings = {**DEFAULTS, **defaults, **settings}
        self.settings = SimpleNamespace(**settings)
        names = {f"records.{number}": {"name": name} for number, name in enumerate(datasets, 1)}
        self.spec = {"inputs": names}
        for number, (dataset, splits) in enumerate(datasets.items(), start=1):
            records, rows = folder / f"records.{dataset}", folder / f"rows.{dataset}"
            self.inputs |= {f"records.{number}": records, f"rows.{number}": rows}
            records.mkdir()
            rows.mkdir()
            for split in SPLITS:
                if split in splits:
                    found = (
                        row if isinstance(row[0], list) else make_record(*row)
                        for row in splits[split]
                    )
                    found = ((*record, *kept.values()) for record in found)
                    write_split(records / f"{split}.parquet", found, list(kept))
                chosen = dict(numbers).get((dataset, split))
                found = range(len(splits.get(split, ()))) if chosen is None else chosen
                path = rows / f"{phase}.{split}.npy"
                np.save(path, np.array(found, dtype=np.int64))

    def run(self):
        tokenize_phase.main(self)
        self.stats = json.loads((self.result / "stats.json").read_text())
        return self

    def texts(self, name, split="train"):
        """Return the texts of an array's rows, special tokens included."""
        ragged, tokenizer = Ragged(self.result, f"{split}.{name}"), load_tokenizer(self.tokenizer)
        return [tokenizer.decode(ragged[row]) for row in range(len(ragged))]


@pytest.fixture
def phase(trained, tmp_path):
    """Return a function that makes the job of a phase, with a token for each byte."""
    trained.save_pretrained(tmp_path / "bytes")

    def make(name, datasets, tokenizer=tmp_path / "bytes", **settings):
        return Phase(tmp_path, name, tokenizer, datasets, **settings)

    return make


@pytest.fixture
def tokenize(phase):
    """Return a function that tokenizes rows, used as both splits of one dataset."""

    def run(name, rows, **settings):
        return phase(name, {"mine": dict.fromkeys(SPLITS, rows)}, **settings).run()

    return run


@pytest.fixture
def render(phase):
    """Return a function that writes records as files; it returns their lines, and what it drops."""

    def run(records, **settings):
        job = phase("reward", {"mine": dict.fromkeys(SPLITS, records)}, **settings)
        render_rows.main(job)
        texts = [(job.result / name).read_text() for name in ("train.jsonl", "train.text.jsonl")]
        assert [(job.result / f"eval{end}.jsonl").read_text() for end in ("", ".text")] == texts
        lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
        return *lines, job.facts["dropped"]["train"]

    return run


# --- kept, truncated and dropped rows ---------------------------------------------------------

ROWS = [
    ("Is it far?", " No.", " Yes, very."),
    ("A question that is much too long for the limit", " No.", "?"),
    ("Is it?", " ", " Yes."),
    (" ", " No.", " Yes."),
    ("Is it so?", " Same.", " Same."),
    ("Is it?", " One reply without end, on and on.", " Yes."),
]


# 24 tokens are <s>, 22 letters and </s>.
def test_sft_drops_prompts_that_leave_no_room_and_cuts_the_end_of_responses(phase):
    datasets = {"mine": dict.fromkeys(SPLITS, ROWS)}
    done = phase("sft", datasets, numbers={("mine", "eval"): [0, 2]}).run()
    assert done.texts("prompt") == ["<s>Is it far?", "<s>Is it so?", "<s>Is it?"]
    # 7 tokens of prompt leave 17 to the response, which has no eos.
    assert done.texts("chosen") == [" No.</s>", " Same.</s>", " One reply withou"]
    # A text without turns is kept whole or not at all.
    dropped = {"empty response": 1, "empty prompt": 1, "last user turn too long": 1}
    tokens = done.stats["train"].pop("tokens")
    assert done.stats["train"] == {
        "rows": 3,
        "template": "dialogue",
        "weights": [1],
        "kept_of": [3],
        "dropped": dropped,
        "truncated": {"end of response": 1},
    }
    # 11, 10 and 7 tokens, and 5, 7 and 17 tokens.
    shares = {"p0": 7, "p1": 7, "p10": 7, "p50": 10, "p90": 11, "p99": 11, "p100": 11}
    assert tokens["prompt"] == {"sum": 28, "mean": 9.3, **shares}
    assert tokens["chosen"]["sum"] == 29
    assert done.texts("chosen", "eval") == [" No.</s>"]
    assert done.facts == {"dropped": {"train": dropped, "eval": {"empty response": 1}}}


def numbered(name, number):
    return [(f"{name}{i}", f" yes {name}{i}") for i in range(number)]


HISTORY = "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: Is it far?\n\nAssistant:"


# The question has 32 tokens with <s>, the whole prompt 63; the responses 5 and 12 with </s>.
@pytest.mark.parametrize(("name", "limit"), [("sft", 67), ("reward", 74)])
def test_older_turns_make_room_for_the_longer_response(tokenize, name, limit):
    done = tokenize(name, [(HISTORY, " No.", " Yes, very.")], max_length=limit)
    assert done.texts("prompt") == ["<s>\n\nHuman: Is it far?\n\nAssistant:"]
    assert done.texts("chosen") == [" No.</s>"]
    assert done.stats["train"]["truncated"] == {"older turns": 1}


@pytest.mark.parametrize(("limit", "cut"), [(43, ""), (24, "system turn")])
def test_a_row_that_loses_its_system_turn_is_counted(tokenize, chat_tokenizer, capfd, limit, cut):
    # It prints each warning once in a process.
    warn.cache_clear()
    default = "{% if messages[0].role != 'system' %}!{% endif %}"
    folder = chat_tokenizer(default + CHATML.replace("<|im_start|>", "")).name_or_path
    settings = {"tokenizer": folder, "template": "chat", "max_length": limit}
    done = tokenize("sft", [(WITH_SYSTEM, " So.")], **settings)
    # "!user\nWhy?", its end and a line break, "assistant\n": 22 tokens, and 18 of the system turn.
    assert done.texts("prompt")[0].startswith("!" if cut else "system\nBe brief.")
    assert done.stats["train"]["truncated"] == ({f"{cut} and end of response": 1} if cut else {})
    assert ("1 of 1 rows lost their system turn" in capfd.readouterr().err) == bool(cut)


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


def test_responses_that_are_labelled_good_or_bad_need_no_other_one(tokenize):
    rows = [("Why?", " So.", None), ("How?", None, " No."), ("What?", None, None)]
    done = tokenize("dpo", rows, unpaired=True)
    assert done.texts("prompt") == ["<s>Why?", "<s>How?"]
    assert done.texts("chosen") == [" So.</s>", ""]
    assert done.texts("rejected") == ["", " No.</s>"]
    assert done.stats["train"]["dropped"] == {"no chosen response": 1}


# <s> and the ten letters of "Is it far?" are 11 tokens.
def test_rlhf_drops_long_prompts_and_ignores_responses(tokenize):
    done = tokenize("rlhf", ROWS, max_prompt_length=10)
    assert done.texts("prompt") == ["<s>Is it?", "<s>Is it so?", "<s>Is it?"]
    assert done.stats["train"]["dropped"] == {"empty prompt": 1, "prompt too long": 2}
    assert done.stats["train"]["truncated"] == {}


# --- templates --------------------------------------------------------------------------------

ASKED = render_prompt([("user", "Why?")])
WITH_SYSTEM = render_prompt([("system", "Be brief."), ("user", "Why?")])
CHAT = {"template": "chat", "max_length": 200, "max_prompt_length": 200}


@pytest.mark.parametrize(("name", "dropped"), [("sft", 2), ("reward", 3), ("rlhf", 1)])
def test_special_tokens_in_text_drop_a_row_in_a_chat(tokenize, chat_tokenizer, name, dropped):
    rows = [
        (render_prompt([("user", "Hi<|im_end|>\n<|im_start|>system")]), " Yes.", " No."),
        (WITH_SYSTEM, " Yes.<|im_end|>", " No."),
        (WITH_SYSTEM, " Yes.", " <|im_start|>"),
        (WITH_SYSTEM, " Yes.", " No."),
    ]
    done = tokenize(name, rows, tokenizer=chat_tokenizer().name_or_path, **CHAT)
    # Only the phase's own columns count.
    assert done.stats["train"]["dropped"] == {"special token in text": dropped}
    assert done.stats["train"]["rows"] == 4 - dropped


@pytest.mark.parametrize(
    ("name", "more"),
    [("sft", {"max_length": 60}), ("sft", {"train_on": "all_turns"}), ("reward", {}), ("rlhf", {})],
)
def test_turns_that_the_template_rejects(phase, chat_tokenizer, name, more):
    rows = [(prompt, " Yes.", " No.") for prompt in (ASKED, " ", WITH_SYSTEM)]
    datasets = {
        "others": dict.fromkeys(SPLITS, rows[:1] * 2),
        "mine": {"train": rows, "eval": rows[:1]},
    }
    tokenizer = chat_tokenizer(WITHOUT_SYSTEM).name_or_path
    numbers = {("mine", "train"): [0, 2]}
    job = phase(name, datasets, tokenizer=tokenizer, numbers=numbers, **CHAT | more)
    with pytest.raises(InputError) as error:
        job.run()
    path = job.inputs["records.2"] / "train.parquet"
    assert f"dataset mine: {path}: row 3: " in str(error.value)
    assert "the chat template rejects turns of system, user: " in str(error.value)
    assert str(error.value).endswith("; on_bad_row: skip drops such rows")
    job.settings.skip_rejected = [2]
    stats = job.run().stats["train"]
    assert stats["dropped"] == {"rejected by the chat template": 1}
    assert stats["kept_of"] == [2, 1]


def test_all_turns_are_rows_that_mark_the_trained_tokens(tokenize, chat_tokenizer):
    prompt = "\n\nHuman: Is it?\n\nAssistant: Yes.\n\nHuman: Far?\n\nAssistant:"
    rows, folder = [(prompt, " No."), ("Is it so?", " Same.")], chat_tokenizer().name_or_path
    done = tokenize("sft", rows, tokenizer=folder, **CHAT, train_on="all_turns")
    start, end = "<|im_start|>", "<|im_end|>"
    between = f"\n{start}user\nFar?{end}\n{start}assistant\n"
    assert done.texts("chosen") == [f"Yes.{end}{between}No.{end}", f"Same.{end}"]
    ids, marks = (Ragged(done.result, f"train.{name}") for name in ("chosen", "trained"))
    assert load_tokenizer(folder).decode(ids[0][marks[0] == 1]) == f"Yes.{end}No.{end}"
    assert marks[1].tolist() == [1] * len(ids[1])
    assert np.load(whole_lengths_path(done.result, "train")).tolist() == [ids.lengths.tolist()]


# --- datasets, splits and weights --------------------------------------------------------------


def test_datasets_have_weights_in_training_and_rows_of_train_where_eval_is_missing(phase):
    datasets = {
        "a": {"train": numbered("a", 6)},
        "b": {"train": numbered("b", 2), "eval": numbered("B", 3)},
    }
    numbers = {("a", "train"): [0, 2], ("a", "eval"): [1, 5], ("b", "eval"): [1]}
    done = phase("sft", datasets, numbers=numbers, weights={"b": 2}).run()
    assert done.texts("prompt") == ["<s>a0", "<s>a2", "<s>b0", "<s>b0", "<s>b1", "<s>b1"]
    assert done.stats["train"]["kept_of"] == [2, 4]
    assert done.stats["eval"]["weights"] == [1, 2]
    assert done.texts("prompt", "eval") == ["<s>a1", "<s>a5", "<s>B1"]


def test_phase_without_rows_is_an_error_of_one_line(phase):
    datasets = {name: dict.fromkeys(SPLITS, ROWS) for name in "ab"}
    # The fourth row has no prompt.
    job = phase("sft", datasets, numbers={(name, "eval"): [3] for name in "ab"})
    with pytest.raises(InputError, match="a, b: the eval split of phase sft has no rows left of 2"):
        job.run()


def test_a_response_with_weight_0_is_an_error_where_prompts_are_trained(tokenize):
    rows = [([("user", "a"), ("untrained", "b"), ("user", "c")], " d", None)]
    with pytest.raises(InputError, match=r"train\.parquet: row 1: a response with weight 0, which"):
        tokenize("sft", rows, train_on="all_tokens")


# --- files for other trainers -----------------------------------------------------------------

PAIR = ([("user", "Far?")], " No.", " Yes.")
TALK = ([("user", "a"), ("assistant", "b"), ("user", "c")], " d", None)


def test_pairs_have_messages_and_texts_that_end_in_the_token_that_ends_a_response(render):
    messages, texts, dropped = render([PAIR, ([("user", "Far?")], " Same.", " Same.")])
    turns = {"prompt": ("user", "Far?"), "chosen": ("assistant", "No.")}
    turns["rejected"] = ("assistant", "Yes.")
    assert messages == [{key: messages_of([turn]) for key, turn in turns.items()}]
    prompt = "\n\nHuman: Far?\n\nAssistant:"
    assert texts == [{"prompt": prompt, "chosen": " No.</s>", "rejected": " Yes.</s>"}]
    assert dropped == {"equal responses": 1}


FIRST = {"prompt": "\n\nHuman: a\n\nAssistant:", "completion": " b</s>"}
LAST = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
LAST = {"prompt": LAST, "completion": " d</s>"}


@pytest.mark.parametrize(
    ("train_on", "texts"), [("response", [LAST]), ("all_turns", [FIRST, LAST])]
)
def test_dialogues_of_sft_have_one_text_or_one_for_each_turn_that_is_trained(
    render, train_on, texts
):
    text = ([], "All of it.", None)
    lines, found, _ = render([TALK, text], fields=["prompt", "chosen"], train_on=train_on)
    assert [message["content"] for message in lines[0]["messages"]] == ["a", "b", "c", "d"]
    # Without turns, a text is a text.
    assert lines[1] == {"text": "All of it."}
    assert found == [*texts, {"text": "All of it.</s>"}]


def test_labelled_responses_have_labels(render):
    good, bad = ([("user", "x")], " a", None), ([("user", "x")], None, " b")
    lines, texts, _ = render([PAIR, good, bad], unpaired=True)
    labels = [("No.", True), ("Yes.", False), ("a", True), ("b", False)]
    assert [(line["completion"][0]["content"], line["label"]) for line in lines] == labels
    assert [(text["completion"], text["label"]) for text in texts[2:]] == [
        (" a</s>", True),
        (" b</s>", False),
    ]


def test_prompts_keep_the_columns_of_reward_functions(render):
    record = ([("user", "1 + 1?")], None, None)
    [line], [text], _ = render([record], kept={"solution": "[2]"}, fields=["prompt"])
    assert line == {"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": [2]}
    assert text == {"prompt": "\n\nHuman: 1 + 1?\n\nAssistant:", "solution": [2]}
