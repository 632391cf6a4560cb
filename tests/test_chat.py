"""Talking to a model: what it is asked, what of its answers is shown, how it is typed."""

import io
import json
import os
import pty
import random
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import chat
from conftest import INIT, ROOT
from rlhf.conversation import load
from rlhf.dialogues import chat_template, prompt_of
from rlhf.job import InputError
from rlhf.models import make_causal, save_model
from rlhf.tokens import Encoder, Ragged, load_tokenizer, trained_tokenizer
from test_dialogues import DIALOGUES

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
# Seed, temperature, most tokens of an answer.
GREEDY, SAMPLED = (1, 0, 40), (1, 1, 10)
# With room for some turns, and weights under which these matter.
LONGER = {**INIT, "max_position_embeddings": 128, "init_std": 0.2}


def as_chat(tokenizer):
    """A copy of a tokenizer with ChatML, and <|im_end|> as its eos."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )


@pytest.fixture
def folders(tokenizer, tmp_path):
    """Folders of two models in the Human/Assistant form, of other weights, and one in ChatML."""
    dialogue = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        **tokenizer.special_tokens_map,
    )
    dialogue.chat_template = chat_template(dialogue)
    kinds = {"rlhf": dialogue, "sft": dialogue, "chatml": as_chat(tokenizer)}
    for number, (name, kind) in enumerate(kinds.items()):
        save_model(make_causal(LONGER, kind, number), kind, tmp_path / name)
    return {name: tmp_path / name for name in kinds}


@pytest.fixture
def dialogue(folders):
    """A conversation in the Human/Assistant form."""
    return load(folders["rlhf"])


@pytest.fixture
def chatml(folders):
    """A conversation in ChatML."""
    return load(folders["chatml"])


def say(conversation, text, ended=True):
    """Have a conversation's model write a text, whatever it is asked; returns its token ids."""
    tokenizer = conversation.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids += [tokenizer.eos_token_id] * ended
    script = []

    def hook(model, inputs, outputs):
        if not script:
            script.extend(ids)
        outputs.logits[:, -1] = -100
        outputs.logits[:, -1, script.pop(0)] = 100

    conversation.model.register_forward_hook(hook)
    return ids


def ask(conversation, question="Why?", settings=GREEDY):
    """The pieces of an answer."""
    ids, _ = conversation.make_room(question, settings[2])
    pieces = []
    answer = conversation.answer(question, ids, *settings, pieces.append)
    assert "".join(pieces) == answer
    return pieces


# --- answers ----------------------------------------------------------------------------------


def test_what_is_shown_is_what_is_generated_without_showing_it(dialogue):
    ids, _ = dialogue.make_room("Where?", 40)
    torch.manual_seed(3)
    whole = dialogue.model.generate(
        torch.tensor([ids]), do_sample=True, top_k=0, temperature=0.5, max_new_tokens=40
    )
    text = dialogue.tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True)
    pieces = ask(dialogue, "Where?", (3, 0.5, 40))
    assert "".join(pieces) == text.strip()
    assert len(pieces) > 5


@pytest.mark.parametrize(
    "text",
    [
        " Hello Pia, get a hat at the boutique.",
        "\n First.\n\nSecond:\n\tthird  \n",
        " 天空 é 🙂",
        " One.\n\nHum",
        " One.\n\nHumble\n\nSystems: two.",
        " Human: one\nAssistant: two",
        " half a sign: \ufffd",
    ],
)
def test_an_answer_comes_piece_by_piece_and_whole(dialogue, text):
    say(dialogue, text)
    assert "".join(ask(dialogue)) == text.strip()


def test_no_half_character_is_shown(dialogue):
    say(dialogue, " 天空🙂 é")
    assert len(dialogue.tokenizer("天", add_special_tokens=False).input_ids) == 3
    assert ask(dialogue) == ["天", "空", "🙂", " é"]


@pytest.mark.parametrize("marker", ["Human:", "Assistant:", "System:"])
def test_an_answer_ends_where_it_begins_a_new_turn(dialogue, marker):
    ids = say(dialogue, f" Yes.\n\n{marker} And now I talk to myself.")
    passes = []
    dialogue.model.register_forward_hook(lambda *_: passes.append(1))
    assert "".join(ask(dialogue)) == "Yes."
    assert dialogue.turns[-1] == ("assistant", "Yes.")
    # And no more is generated: the rest of the text would have taken as many passes.
    assert len(passes) < len(ids) - 8


def test_in_a_chat_template_a_marker_is_text(chatml):
    say(chatml, "Write:\n\nHuman: Hello")
    assert "".join(ask(chatml)) == "Write:\n\nHuman: Hello"


def test_the_same_turns_and_seed_give_the_same_answer(folders):
    one, other = load(folders["rlhf"]), load(folders["rlhf"])
    first = ask(one, settings=SAMPLED)
    torch.rand(5)
    assert ask(other, settings=SAMPLED) == first
    assert ask(other, settings=SAMPLED) != first
    other.turns.clear()
    assert ask(other, settings=SAMPLED) == first
    other.turns.clear()
    assert ask(other, settings=(2, *SAMPLED[1:])) != first


def test_at_temperature_0_no_seed_matters(dialogue):
    first = ask(dialogue, settings=(1, 0, 20))
    dialogue.turns.clear()
    assert ask(dialogue, settings=(2, 0, 20)) == first


def test_an_answer_has_so_many_tokens_at_most(dialogue):
    say(dialogue, "aaaaaaaa", ended=False)
    one = dialogue.tokenizer.tokenize("aaaaaaaa")[0]
    assert "".join(ask(dialogue, settings=(1, 0, 3))) == one * 3


def test_what_was_shown_of_a_stopped_answer_is_remembered(dialogue):
    say(dialogue, " One two three")
    shown = []

    def show(text):
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    ids, _ = dialogue.make_room("Count.", 40)
    with pytest.raises(KeyboardInterrupt):
        dialogue.answer("Count.", ids, *GREEDY, show)
    assert dialogue.turns == [("user", "Count."), ("assistant", "".join(shown))]
    assert "One two three".startswith("".join(shown)) and "".join(shown) != "One two three"


# --- prompts ----------------------------------------------------------------------------------


def test_a_model_is_asked_as_in_training(dialogue):
    say(dialogue, " Hi. ")
    dialogue.system = "Be brief."
    ask(dialogue, "Hello.")
    ids, _ = dialogue.make_room("Name a fruit.", 40)
    text = (
        "\n\nSystem: Be brief.\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: Name a fruit."
        "\n\nAssistant:"
    )
    assert ids == dialogue.tokenizer(text).input_ids
    assert dialogue.tokenizer.decode(ids) == f"<s>{text}"


def test_a_special_token_that_is_typed_is_text_in_the_human_assistant_form(dialogue):
    ids, _ = dialogue.make_room("What is </s>?", 40)
    assert dialogue.tokenizer.eos_token_id not in ids


def test_a_model_with_a_chat_template_is_asked_by_it(chatml):
    say(chatml, "Hi.")
    chatml.system = "Be brief."
    ask(chatml, "Hello.")
    ids, _ = chatml.make_room("Name a fruit.", 40)
    assert chatml.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nName a fruit.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with pytest.raises(InputError, match="special token"):
        chatml.make_room("<|im_end|>", 40)


def test_the_oldest_turns_make_room(dialogue):
    dialogue.system = "Brief."
    turns = [("user", "Old?"), ("assistant", "Yes."), ("user", "New?"), ("assistant", "No.")]

    def tokens(*some):
        every = [("system", "Brief."), *some, ("user", "Why?")]
        return dialogue.tokenizer(prompt_of(every)).input_ids

    lengths = [len(tokens(*turns[start:])) for start in (0, 2, 4)]
    for forgotten, room in ((0, 0), (2, 1), (2, lengths[0] - lengths[1])):
        dialogue.turns = list(turns)
        dialogue.positions = lengths[0] + 40 - room
        assert dialogue.make_room("Why?", 40) == (tokens(*turns[forgotten:]), forgotten)
        assert dialogue.turns == turns[forgotten:]
    # An answer may take half of the positions, and not more.
    dialogue.positions = 2 * lengths[1]
    assert dialogue.make_room("Why?", 10**6) == (tokens(*turns[2:]), 0)
    # Without turns before, the question has all positions but one.
    dialogue.positions = lengths[2] + 1
    assert dialogue.make_room("Why?", 40) == (tokens(), 2)
    assert dialogue.turns == []


def test_an_answer_ends_where_positions_do(dialogue):
    say(dialogue, "a" * 500, ended=False)
    ids, _ = dialogue.make_room("Why?", 500)
    dialogue.positions = len(ids) + 5
    assert len(dialogue.tokenizer("".join(ask(dialogue, settings=(1, 0, 500)))).input_ids) <= 6


def test_a_question_that_is_too_long_is_refused_and_nothing_forgotten(dialogue):
    dialogue.turns = [("user", "Old?"), ("assistant", "Yes.")]
    with pytest.raises(InputError, match=r"\d+ tokens .* but positions for 128: ask in fewer"):
        dialogue.make_room("why " * 200, 40)
    assert len(dialogue.turns) == 2


def test_a_model_without_a_limit_forgets_nothing(dialogue):
    dialogue.turns = [("user", "Old?"), ("assistant", "Yes.")] * 50
    dialogue.positions = None
    assert dialogue.make_room("Why?", 40)[1] == 0


# --- the form as a chat template --------------------------------------------------------------


def messages_of(turns):
    return [{"role": role, "content": text} for role, text in turns]


@pytest.mark.parametrize("name", DIALOGUES)
def test_the_chat_template_gives_the_text_of_training(dialogue, name):
    turns, prompt = DIALOGUES[name]
    messages, tokenizer = messages_of(turns), dialogue.tokenizer
    options = {"add_generation_prompt": True}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert text == f"<s>{prompt}"
    ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    assert ids == Encoder(tokenizer, "dialogue").prompts([prompt])[0]


def test_the_chat_template_disarms_markers_as_records_do(dialogue):
    draw = random.Random(1)
    parts = ["\n", "\n", "Human:", "System:", "Assistant:", " ", "a"]
    for _ in range(300):
        turns = [("user", "".join(draw.choices(parts, k=12)))]
        text = dialogue.tokenizer.apply_chat_template(
            messages_of(turns), tokenize=False, add_generation_prompt=True
        )
        assert text == f"<s>{prompt_of(turns)}"


def test_a_whole_dialogue_is_closed_by_eos(dialogue):
    messages = messages_of([("user", "Hello."), ("assistant", "Hi.")])
    text = dialogue.tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<s>\n\nHuman: Hello.\n\nAssistant: Hi.</s>"


def test_a_tokenizer_that_puts_nothing_in_front_has_a_template_that_does_not(chatml):
    tokenizer = chatml.tokenizer
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.chat_template = chat_template(tokenizer)
    messages = messages_of([("user", "Hello.")])
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "\n\nHuman: Hello."


def test_a_role_without_a_name_is_refused(dialogue):
    with pytest.raises(Exception, match="roles are system, user and assistant, not tool"):
        dialogue.tokenizer.apply_chat_template(messages_of([("tool", "4")]), tokenize=False)


@pytest.mark.parametrize("template", ["dialogue", "chat"])
def test_a_tokenizer_is_saved_with_the_form_of_its_tokens(folders, template):
    # The base model has a template of its own, whatever it is then trained in.
    tokenizer = trained_tokenizer(folders["chatml"], template)
    expected = {"chat": CHATML, "dialogue": chat_template(tokenizer)}
    assert tokenizer.chat_template == expected[template]


def test_models_of_a_build_are_asked_what_they_were_trained_on(quick):
    output = quick.folder / "output"
    held_out = {"sft": "tokens/sft", "dpo": "tokens/dpo", "rlhf": "tokens/rlhf"}
    for stage, tokens in held_out.items():
        tokenizer = load_tokenizer(output / stage / "tiny")
        ids = Ragged(output / tokens / "tiny", "eval.prompt")[0].tolist()
        question = tokenizer.decode(ids).removeprefix("<s>\n\nHuman: ")
        messages = messages_of([("user", question.removesuffix("\n\nAssistant:"))])
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert asked == ids
        assert load(output / stage / "tiny").make_room(messages[0]["content"], 40)[0] == ids


# --- folders ----------------------------------------------------------------------------------


def record(folder, **sizes):
    """Write the manifest of a folder as it is, or with other sizes."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": ""}
        for path in folder.rglob("*.*")
        if path.is_file()
    }
    for name, size in sizes.items():
        files[name] = {"size": size, "sha256": ""}
    manifest = {"spec": {"path": "x", "inputs": {}}, "inputs": {}, "lineage": {}, "facts": {}}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))


def test_a_folder_with_its_manifest_or_without_is_loaded(folders):
    folder = folders["rlhf"]
    load(folder)
    shutil.copytree(folders["sft"], folder / "ema")
    record(folder)
    load(folder)
    load(folder / "ema")


@pytest.mark.parametrize("name", ["", "ema"])
def test_files_that_are_not_those_of_the_manifest_are_refused(folders, name):
    folder = folders["rlhf"]
    shutil.copytree(folders["sft"], folder / "ema")
    record(folder)
    with (folder / name / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"model\.safetensors is not the file that its manifest"):
        load(folder / name)
    (folder / name / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is not the file that its manifest"):
        load(folder / name)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"manifest.json cannot be read: delete .*/rlhf and build"):
        load(folder / name)


def spoil(folder, name):
    """What is wrong with a folder, by name."""
    if name == "no folder":
        shutil.rmtree(folder)
    elif name == "no model":
        (folder / "config.json").unlink()
    elif name == "no config":
        (folder / "config.json").write_text("{")
    elif name == "no weights":
        (folder / "model.safetensors").unlink()
    elif name == "broken weights":
        (folder / "model.safetensors").write_text("x" * 100)
    elif name == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif name == "never trained":
        (folder / "chat_template.jinja").unlink()
    elif name == "own code":
        config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "mine.py").write_text("raise SystemExit('ran')")


FOLDERS = {
    "no folder": "there is no folder",
    "no model": "has no config.json: it is not the folder of a model",
    "no config": "not a valid JSON file",
    "no weights": "no file named model.safetensors",
    "broken weights": "deserializing header",
    "no tokenizer": "tokenizer",
    "never trained": "no chat template, as if it was never trained to chat",
    "own code": "contains custom code",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_answer_is_refused_in_one_line(folders, name, monkeypatch):
    # Nobody is asked whether code may run.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    spoil(folders["rlhf"], name)
    with pytest.raises(InputError, match=FOLDERS[name]) as refused:
        load(folders["rlhf"])
    assert str(folders["rlhf"]) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_reward_model_is_refused(scorer_folder):
    with pytest.raises(InputError, match="is a reward model, which scores answers"):
        load(scorer_folder)


# --- the program ------------------------------------------------------------------------------


@pytest.fixture
def talk(monkeypatch, capsys):
    """A function that runs the program with lines on standard input: (output, notes, exit code)."""

    def run(*arguments, lines=()):
        stdin = io.TextIOWrapper(io.BytesIO(b"".join(line + b"\n" for line in lines)))
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.argv", ["chat.py", *map(str, arguments)])
        code = 0
        try:
            chat.main()
        except SystemExit as end:
            code = end.code
        return *capsys.readouterr(), code

    return run


def answers_to(folder, *questions, seed=1234):
    """What a model answers in a row."""
    conversation = load(folder)
    settings = seed, 0.7, 20
    return ["".join(ask(conversation, question, settings)) for question in questions]


def test_lines_of_standard_input_are_answered(folders, talk):
    lines = [b"Why?", b"", b"  And how? "]
    output, notes, code = talk(folders["rlhf"], "--max-tokens", 20, lines=lines)
    answers = answers_to(folders["rlhf"], "Why?", "And how?")
    assert output == "".join(chat.escaped(answer) + "\n" for answer in answers)
    assert (notes, code) == ("", 0)
    assert all(answers) and answers[0] != answers[1]


def test_commands_do_what_they_say(folders, talk):
    folder = folders["rlhf"]
    lines = [b"/help", b"Why?", b"/reset", b"Why?", b"/reset", b"/seed 7", b"Why?", b"/reset"]
    lines += [b"/system Be brief.", b"Why?", b"/quit", b"Why?"]
    output, notes, _ = talk(folder, "--max-tokens", 20, lines=lines)
    (first,), (second,) = answers_to(folder, "Why?"), answers_to(folder, "Why?", seed=7)
    conversation = load(folder)
    conversation.system = "Be brief."
    third = "".join(ask(conversation, "Why?", (7, 0.7, 20)))
    answers = [first, first, second, third]
    assert output == "".join(chat.escaped(answer) + "\n" for answer in answers)
    assert notes.startswith(chat.HELP)
    assert notes.splitlines()[-4:] == [
        "All turns are forgotten.",
        "Seed: 7",
        "All turns are forgotten.",
        "Before all turns: Be brief.",
    ]


def test_two_models_answer_one_under_the_other(folders, talk):
    rlhf, sft = folders["rlhf"], folders["sft"]
    output, _, code = talk(rlhf, "--compare", sft, "--max-tokens", 20, lines=[b"Why?", b"How?"])
    answers = [answers_to(folder, "Why?", "How?") for folder in (rlhf, sft)]
    expected = [
        f"{folder}:\n{chat.escaped(found[number])}\n\n"
        for number in (0, 1)
        for folder, found in zip((rlhf, sft), answers, strict=True)
    ]
    assert (output, code) == ("".join(expected), 0)
    assert answers[0] != answers[1]


def test_turns_that_are_left_out_are_told(folders, talk):
    _, notes, code = talk(folders["rlhf"], "--max-tokens", 64, lines=[b"Why? " * 6] * 9)
    note = f"note: {folders['rlhf']} has positions for 128 tokens: its oldest 2 turns are left out"
    assert note in notes.splitlines()
    assert code == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("over\rwritten\x08\x7f", "over\\rwritten\\x08\\x7f"),
        ("\x9b2J\x00", "\\x9b2J\\x00"),
        ("a\u202egnp.exe\u2066", "a\\u202egnp.exe\\u2066"),
        ("lines\nand\ttabs, 天空 é 👩\u200d🚀 [bold] \\x1b", None),
    ],
)
def test_control_characters_are_told_and_not_obeyed(folders, talk, monkeypatch, text, shown):
    conversation = load(folders["rlhf"])
    say(conversation, f" {text}.")
    monkeypatch.setattr("rlhf.conversation.load", lambda folder: conversation)
    output, _, _ = talk(folders["rlhf"], lines=[b"Why?"])
    assert output == f"{shown or text}.\n"
    # What the model has written, it reads again as it was.
    assert conversation.turns[-1] == ("assistant", f"{text}.")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"/nonsense", "error: /nonsense is no command: /help tells them"),
        (b"/seed -1", "error: /seed: '-1' is not a whole number from 0 on"),
        (b"why " * 200, "but positions for 128: ask in fewer words"),
    ],
)
def test_a_line_that_cannot_be_answered_ends_a_pipe(folders, talk, line, told):
    output, _, code = talk(folders["rlhf"], lines=[line, b"Why?"])
    assert output == "" and told in code


def test_bytes_that_are_no_text_are_no_end(folders, talk):
    output, _, code = talk(folders["rlhf"], "--max-tokens", 20, lines=[b"Caf\xe9?"])
    assert code == 0 and output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seed", str(1 << 63)], "--seed: '9223372036854775808' is not a whole number from 0 on"),
        (["--temperature", "nan"], "--temperature: 'nan' is not a number from 0 on"),
        (["--max-tokens", "0"], "--max-tokens: '0' is not a whole number from 1 on"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(talk, arguments, told):
    _, notes, code = talk("x", *arguments)
    assert code == 2 and told in notes


def test_a_wrong_folder_is_told_in_one_line(tmp_path, talk):
    assert talk(tmp_path / "x") == ("", "", f"error: there is no folder {tmp_path / 'x'}")


def stop_first(conversation):
    """Have Ctrl-C pressed in a conversation's first answer, behind its first piece."""
    answer, presses = conversation.answer, [KeyboardInterrupt]

    def answer_once_stopped(*arguments):
        *arguments, show = arguments

        def shown(text):
            show(text)
            if presses:
                raise presses.pop()

        return answer(*arguments, shown)

    conversation.answer = answer_once_stopped


def test_ctrl_c_stops_an_answer_at_a_terminal(dialogue, monkeypatch, capsys):
    monkeypatch.setattr("rlhf.conversation.load", lambda folder: dialogue)
    settings = {"seed": 1, "temperature": 0, "max_tokens": 40}
    program = chat.Chat(SimpleNamespace(model="x", compare=None, **settings))
    program.is_terminal = True
    lines = iter(["One?", "/reset", "Two?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    say(dialogue, " Yes indeed.")
    stop_first(dialogue)
    program.talk()
    first, second = capsys.readouterr().out.splitlines()
    assert "Yes indeed.".startswith(first) and first != "Yes indeed."
    # The model's script goes on where it was stopped: only that there is an answer matters.
    assert second and dialogue.turns[0] == ("user", "Two?")


def test_ctrl_c_ends_a_pipe(folders, talk, monkeypatch):
    conversation = load(folders["rlhf"])
    monkeypatch.setattr("rlhf.conversation.load", lambda folder: conversation)
    say(conversation, " Yes indeed.")
    stop_first(conversation)
    output, _, code = talk(folders["rlhf"], lines=[b"One?", b"Two?"])
    assert code == 130 and "Yes indeed.".startswith(output)


# Makes standard input the terminal of this process, which Ctrl-C goes to, and becomes a program.
# (preexec_fn would fork the process of the tests, which may be too large for that.)
TAKE = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """The program at a terminal of its own."""

    def __init__(self, *arguments):
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE, ROOT / "scripts/chat.py", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""},
        )
        os.close(theirs)

    def resize(self, columns):
        """Give it another width."""
        ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def type(self, text):
        """Press the keys of a text."""
        os.write(self.ours, text.encode())

    def until(self, text, seconds=60):
        """What is shown until a text is; fails where it is not shown in time."""
        shown, deadline = "", time.monotonic() + seconds
        while text not in shown:
            ready, _, _ = select.select([self.ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, shown
            shown += os.read(self.ours, 4096).decode(errors="replace")
        return shown


def test_at_a_terminal(folders):
    rlhf, sft = str(folders["rlhf"]), str(folders["sft"])
    terminal = Terminal(rlhf, "--compare", sft, "--max-tokens", "5")
    terminal.resize(79)
    assert f"{rlhf}: " in terminal.until("\r\n> ")
    terminal.type("Why?\n")
    under = terminal.until(f"{sft}:\r\n")
    assert under.index("Why?") < under.index(f"{rlhf}:\r\n")
    terminal.resize(300)
    terminal.type("/nonsense\n")
    terminal.until("error: /nonsense is no command: /help tells them")
    terminal.type("Why?\n")
    # The cursor is shown again when both have answered.
    lines = terminal.until("\x1b[?25h").splitlines()
    assert any(rlhf in line and sft in line for line in lines)
    terminal.type("\x03")
    assert terminal.process.wait(30) == 130
