"""A chat session with a trained model: its turns, and responses streamed while they are generated.

Prompts are encoded as in training, by snakechat.data.dialogues and snakechat.data.tokenizers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from snakechat.data.dialogues import MARKER, NAMES, Turn
from snakechat.data.encoder import Encoder
from snakechat.data.model_files import load_pretrained
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import DTYPES, max_positions
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import read_manifest


def load(folder: Path) -> "ChatSession":
    """Start a session with the model in a folder, on the GPU if there is one.

    Raises:
        InputError: The folder contains no chat model, or differs from its manifest.
    """
    config = check_folder(folder)
    dtypes: dict[Any, str] = {value: name for name, value in DTYPES.items()}
    try:
        tokenizer = load_tokenizer(folder)
        model: Any = load_causal(folder, dtypes.get(config.dtype, "fp32"), tokenizer)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None
    if tokenizer.chat_template is None:
        raise InputError(
            f"{folder}: the tokenizer has no chat template, so this is a base model: expected the"
            " result of sft, dpo or rlhf"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ChatSession(model.to(device).eval(), tokenizer)


def check_folder(folder: Path) -> PretrainedConfig:
    """Return the config of a model folder.

    Raises:
        InputError: The folder is not that of a language model, or differs from its manifest.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: it is not the folder of a model")
    try:
        config = load_pretrained(AutoConfig, folder)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: {str(error).splitlines()[0]}") from None
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        raise InputError(
            f"{folder} is a reward model, which scores responses and generates none: expected the"
            " result of sft, dpo or rlhf"
        )
    check_files(folder)
    return config


def check_files(folder: Path) -> None:
    """Check names and sizes of a result's files against its manifest, if it has one.

    Digests are not checked, because that reads all weights: scripts/verify.py does it.

    Raises:
        InputError: A file is missing or has another size, or the manifest is unreadable.
    """
    result = folder.parent if folder.name == "ema" else folder
    path = result / "manifest.json"
    if not path.exists():
        return
    manifest = read_manifest(path)
    if manifest is None:
        raise InputError(f"{path} cannot be read: delete {result} and build it again")
    for name, entry in sorted(manifest["files"].items()):
        file = result / name
        if not file.is_file() or file.stat().st_size != entry["size"]:
            raise InputError(
                f"{file} is missing or differs in size from its manifest: delete {result} and"
                " build it again"
            )


class ChatSession:
    """A conversation with a model.

    Attributes:
        turns: (role, text) of the prompts and responses so far.
        system: System prompt, or "".
        max_positions: Maximum number of tokens of the model, or None if it has no limit.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.encoder = Encoder(tokenizer, "auto")
        self.max_positions = max_positions(model)
        self.turns: list[Turn] = []
        self.system = ""

    def encode(self, prompt: str, max_tokens: int) -> tuple[list[int], int]:
        """Encode the conversation with a new prompt, and drop the oldest turns if it is too long.

        Reserves positions for a response of max_tokens, but not more than half of all positions.

        Returns:
            The token ids, and the number of turns dropped.

        Raises:
            InputError: The prompt alone is too long, or contains a special token. No turn is
                dropped then.
        """
        if any(map(self.encoder.has_special_token, (prompt, self.system))):
            raise InputError("the text contains a special token of the chat template: remove it")
        system = [("system", self.system)] if self.system else []
        limit = self.max_positions and self.max_positions - min(max_tokens, self.max_positions // 2)
        # A prompt and its response are dropped together.
        for num_dropped in range(0, len(self.turns) + 1, 2):
            turns = [*system, *self.turns[num_dropped:], ("user", prompt)]
            (ids,) = self.encoder.prompts([turns])
            if limit is None or len(ids) <= limit:
                break
        if self.max_positions and len(ids) >= self.max_positions:
            raise InputError(
                f"the prompt has {len(ids)} tokens, and the model {self.max_positions} positions:"
                " shorten the prompt"
            )
        del self.turns[:num_dropped]
        return ids, num_dropped

    def respond(
        self,
        prompt: str,
        ids: list[int],
        seed: int,
        temperature: float,
        max_tokens: int,
        show: Callable[[str], None],
    ) -> str:
        """Generate a response, and append prompt and response to the turns.

        Args:
            ids: Token ids from encode.
            temperature: 0 is greedy decoding; otherwise tokens are sampled from the whole
                vocabulary, as in training.
            max_tokens: Maximum number of tokens of the response.
            show: Called with each new piece of text; the response is their concatenation. If
                generation is interrupted, the text shown so far is the response.
        """
        if self.max_positions:
            max_tokens = min(max_tokens, self.max_positions - len(ids))
        one_turn = self.encoder.template == "dialogue"
        stream = ResponseStream(self.tokenizer, len(ids), one_turn, show)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        input_ids = torch.tensor([ids], device=self.model.device)
        torch.manual_seed(seed)
        generate: Any = self.model.generate
        try:
            generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                stopping_criteria=StoppingCriteriaList([stream]),
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
            stream.finish()
        finally:
            if stream.shown:
                self.turns += [("user", prompt), ("assistant", stream.shown)]
        return stream.shown


class ResponseStream(StoppingCriteria):
    """Shows a response while it is generated, and stops generation at the marker of a new turn.

    Args:
        start: Position of the response's first token.
        one_turn: Whether markers end the response.
        show: Called with each new piece of text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        start: int,
        one_turn: bool,
        show: Callable[[str], None],
    ) -> None:
        self.tokenizer, self.start, self.one_turn, self.show = tokenizer, start, one_turn, show
        self.text = self.shown = ""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Show the new text of input_ids [1, T]; return whether generation stops, bool [1]."""
        ids: Any = input_ids[0, self.start :]
        decode: Any = self.tokenizer.decode
        self.text = decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        new_turn = MARKER.search(self.text) if self.one_turn else None
        if new_turn:
            self.text = self.text[: new_turn.start()]
        self._show_up_to(stable_prefix(self.text))
        return torch.tensor([new_turn is not None], device=input_ids.device)

    def finish(self) -> None:
        """Show the rest of the text."""
        self._show_up_to(self.text.strip())

    def _show_up_to(self, text: str) -> None:
        new = text[len(self.shown) :]
        if new:
            self.shown = text
            self.show(new)


def stable_prefix(text: str) -> str:
    """Return the part of an unfinished response that further tokens cannot change.

    Excludes incomplete characters, and text that may become the marker of a turn.
    """
    tail = text[text.rfind("\n\n") :] if "\n\n" in text else None
    if tail and any(f"\n\n{name}:".startswith(tail) for name in NAMES.values()):
        text = text.removesuffix(tail)
    # Bytes of an incomplete character decode to U+FFFD.
    return text.rstrip("\ufffd").strip()
