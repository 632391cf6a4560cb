"""Conversations with a model: what it is asked, what of its responses is shown, what is loaded."""

import io
import json
import random
import shutil

import pytest
import torch

from snakechat.data.dialogues import chat_template, render_prompt
from snakechat.data.tokenizers import Encoder, load_tokenizer, load_training_tokenizer
from snakechat.data.tokens import Ragged
from snakechat.evaluation.chat_session import load
from snakechat.workflow.errors import InputError
from support.dialogues import DIALOGUES
from support.talking import CHATML, GREEDY, SAMPLED, ask, make_folders, say


@pytest.fixture
def folders(tokenizer, tmp_path):
    """Folders of models to talk to."""
    return make_folders(tokenizer, tmp_path)


@pytest.fixture
def dialogue(folders):
    """A conversation in the Human/Assistant form."""
    return load(folders["rlhf"])


@pytest.fixture
def chatml(folders):
    """A conversation in ChatML."""
    return load(folders["chatml"])


# --- responses ----------------------------------------------------------------------------------


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
def test_a_response_comes_piece_by_piece_and_whole(dialogue, text):
    say(dialogue, text)
    assert "".join(ask(dialogue)) == text.strip()


def test_no_half_character_is_shown(dialogue):
    say(dialogue, " 天空🙂 é")
    assert len(dialogue.tokenizer("天", add_special_tokens=False).input_ids) == 3
    assert ask(dialogue) == ["天", "空", "🙂", " é"]


@pytest.mark.parametrize("marker", ["Human:", "Assistant:", "System:"])
def test_a_response_ends_where_it_begins_a_new_turn(dialogue, marker):
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


def test_the_same_turns_and_seed_give_the_same_response(folders):
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


def test_a_response_has_so_many_tokens_at_most(dialogue):
    say(dialogue, "aaaaaaaa", ended=False)
    one = dialogue.tokenizer.tokenize("aaaaaaaa")[0]
    assert "".join(ask(dialogue, settings=(1, 0, 3))) == one * 3


def test_what_was_shown_of_a_stopped_response_is_remembered(dialogue):
    say(dialogue, " One two three")
    shown = []

    def show(text):
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    ids, _ = dialogue.make_room("Count.", 40)
    with pytest.raises(KeyboardInterrupt):
        dialogue.response("Count.", ids, *GREEDY, show)
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
        return dialogue.tokenizer(render_prompt(every)).input_ids

    lengths = [len(tokens(*turns[start:])) for start in (0, 2, 4)]
    for forgotten, room in ((0, 0), (2, 1), (2, lengths[0] - lengths[1])):
        dialogue.turns = list(turns)
        dialogue.positions = lengths[0] + 40 - room
        assert dialogue.make_room("Why?", 40) == (tokens(*turns[forgotten:]), forgotten)
        assert dialogue.turns == turns[forgotten:]
    # A response may take half of the positions, and not more.
    dialogue.positions = 2 * lengths[1]
    assert dialogue.make_room("Why?", 10**6) == (tokens(*turns[2:]), 0)
    # Without turns before, the question has all positions but one.
    dialogue.positions = lengths[2] + 1
    assert dialogue.make_room("Why?", 40) == (tokens(), 2)
    assert dialogue.turns == []


def test_a_response_ends_where_positions_do(dialogue):
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
        assert text == f"<s>{render_prompt(turns)}"


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
    tokenizer = load_training_tokenizer(folders["chatml"], template)
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
def test_a_folder_that_cannot_response_is_refused_in_one_line(folders, name, monkeypatch):
    # Nobody is asked whether code may run.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    spoil(folders["rlhf"], name)
    with pytest.raises(InputError, match=FOLDERS[name]) as refused:
        load(folders["rlhf"])
    assert str(folders["rlhf"]) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_reward_model_is_refused(scorer_folder):
    with pytest.raises(InputError, match="is a reward model, which scores responses"):
        load(scorer_folder)
