"""A conversation with a trained model: its turns, and responses that are told as they are written.

A prompt gets the ids that it had in training, through snakechat.data.dialogues and snakechat.data.tokens.
"""

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, StoppingCriteria, StoppingCriteriaList

from snakechat.data.dialogues import MARKER, NAMES, chat_template, render_prompt
from snakechat.data.tokenizers import Encoder, load_tokenizer
from snakechat.modeling.models import DTYPES, load_causal
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import read_manifest


def load(folder):
    """A conversation with the model of a folder, on the GPU where there is one.

    Raises InputError where the folder has no model that responses, or not the one that was built.
    """
    config = check_folder(folder)
    dtypes = {value: name for name, value in DTYPES.items()}
    try:
        tokenizer = load_tokenizer(folder)
        model = load_causal(folder, dtypes.get(config.dtype, "fp32"), tokenizer)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None
    if tokenizer.chat_template is None:
        raise InputError(
            f"{folder}: its tokenizer has no chat template, as if it was never trained to chat:"
            " name a folder that sft, dpo or rlhf has made"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Conversation(model.to(device).eval(), tokenizer)


def check_folder(folder):
    """The config of a model folder. Raises InputError where it is none, or cannot response."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: it is not the folder of a model")
    try:
        # Code of its own is refused here, instead of asking whether it may run.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        raise InputError(
            f"{folder} is a reward model, which scores responses and writes none:"
            " name a folder that sft, dpo or rlhf has made"
        )
    check_files(folder)
    return config


def check_files(folder):
    """Raises InputError where a result has other files than its manifest says, by name and size.

    Not by digest, as scripts/verify.py does: that reads all weights. A folder that came without its
    manifest is taken as it is.
    """
    result = folder.parent if folder.name == "ema" else folder
    path = result / "manifest.json"
    if not path.exists():
        return
    manifest = read_manifest(path)
    if manifest is None:
        raise InputError(f"{path} cannot be read: delete {result} and build it again")
    for name, file in sorted(manifest["files"].items()):
        found = result / name
        if not found.is_file() or found.stat().st_size != file["size"]:
            raise InputError(
                f"{found} is not the file that its manifest names:"
                f" delete {result} and build it again"
            )


class Conversation:
    """Turns with a model.

    turns: (role, text) of questions and responses so far. system: what stands before them, or "".
    positions: the most tokens that the model takes, or None where it has no limit.
    """

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        is_dialogue = tokenizer.chat_template == chat_template(tokenizer)
        self.encoder = Encoder(tokenizer, "dialogue" if is_dialogue else "chat")
        self.positions = getattr(model.config, "max_position_embeddings", None)
        self.turns, self.system = [], ""

    def make_room(self, question, max_tokens):
        """Ids of the prompt for a question; the oldest turns are forgotten where there is no room.

        A response has room for max_tokens, or for half of the positions if that is less. Returns
        ids, and the number of turns forgotten. Raises InputError, and forgets nothing, if the
        question by itself is too long.
        """
        if any(map(self.encoder.has_special_token, (question, self.system))):
            raise InputError("a special token in the text, which only the chat template may write")
        before = [("system", self.system)] if self.system else []
        limit = self.positions and self.positions - min(max_tokens, self.positions // 2)
        # A question stands together with its response.
        for forgotten in range(0, len(self.turns) + 1, 2):
            turns = [*before, *self.turns[forgotten:], ("user", question)]
            (ids,) = self.encoder.prompts([render_prompt(turns)])
            if limit is None or len(ids) <= limit:
                break
        if self.positions and len(ids) >= self.positions:
            raise InputError(
                f"{len(ids)} tokens without any turn before, but positions for {self.positions}:"
                " ask in fewer words"
            )
        del self.turns[:forgotten]
        return ids, forgotten

    def response(self, question, ids, seed, temperature, max_tokens, show):
        """Response a question by at most max_tokens, and remember both.

        ids: of the prompt, from make_room. show: called with each new piece of the response; joined,
        the pieces are the response. temperature 0 takes the likeliest tokens; all others are drawn
        from all tokens, as in training. Whatever stops it, what was shown is remembered.
        """
        if self.positions:
            max_tokens = min(max_tokens, self.positions - len(ids))
        writing = Writing(self.tokenizer, len(ids), self.encoder.template == "dialogue", show)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        input_ids = torch.tensor([ids], device=self.model.device)
        torch.manual_seed(seed)
        try:
            self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                stopping_criteria=StoppingCriteriaList([writing]),
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
            writing.finish()
        finally:
            if writing.shown:
                self.turns += [("user", question), ("assistant", writing.shown)]
        return writing.shown


class Writing(StoppingCriteria):
    """A response that is being written: shows what stays of it, and ends it where a new turn begins.

    start: the place of the response's first token. one_turn: whether markers of turns are such.
    """

    def __init__(self, tokenizer, start, one_turn, show):
        self.tokenizer, self.start, self.one_turn, self.show = tokenizer, start, one_turn, show
        self.text = self.shown = ""

    def __call__(self, input_ids, scores, **_):
        """Take the tokens so far [1, T]; returns whether that was all, [1]."""
        self.text = self.tokenizer.decode(
            input_ids[0, self.start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        new_turn = MARKER.search(self.text) if self.one_turn else None
        if new_turn:
            self.text = self.text[: new_turn.start()]
        self._show(settled(self.text))
        return torch.tensor([new_turn is not None], device=input_ids.device)

    def finish(self):
        """Show what was held back."""
        self._show(self.text.strip())

    def _show(self, text):
        new = text[len(self.shown) :]
        if new:
            self.shown = text
            self.show(new)


def settled(text):
    """The part of an unfinished response that stays, whatever comes: no half character or marker."""
    tail = text[text.rfind("\n\n") :] if "\n\n" in text else None
    if tail and any(f"\n\n{name}:".startswith(tail) for name in NAMES.values()):
        text = text.removesuffix(tail)
    # What bytes become that make no character yet.
    return text.rstrip("\ufffd").strip()
