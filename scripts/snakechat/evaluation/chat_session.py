"""A chat session with a trained model: its turns, and responses streamed while they are generated.

Prompts are encoded as in training, by snakechat.data.encoder.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from snakechat.data.dialogues import MARKER, NAMES, Turn
from snakechat.data.encoder import Encoder
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import max_positions
from snakechat.workflow.errors import InputError


class ChatSession:
    """A conversation with a model, on the GPU if there is one.

    The same turns and the same seed give the same response.

    Args:
        folder: The folder of a chat model.
        temperature: 0 is greedy decoding; otherwise tokens are sampled from the whole vocabulary,
            as in training.
        max_tokens: Maximum number of tokens of a response.

    Attributes:
        turns: (role, text) of the prompts and responses so far.
        system: System prompt, or "".
        max_positions: Maximum number of tokens of the model.
    """

    def __init__(
        self, folder: Path, seed: int = 1234, temperature: float = 0.7, max_tokens: int = 256
    ) -> None:
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json: it is not the folder of a model")
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.chat_template is None:
            raise InputError(
                f"{folder} is a base model, without a chat template: expected the result of sft,"
                " dpo or rlhf"
            )
        model: Any = load_causal(folder, "auto", self.tokenizer)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.seed, self.temperature, self.max_tokens = seed, temperature, max_tokens
        self.encoder = Encoder(self.tokenizer, "auto")
        self.max_positions = max_positions(model) or sys.maxsize
        self.turns: list[Turn] = []
        self.system = ""

    def encode(self, prompt: str) -> tuple[list[int], int]:
        """Encode the conversation with a new prompt, and drop the oldest turns if it is too long.

        Reserves positions for a response of max_tokens, but not more than half of all positions.
        Returns the token ids, and the number of turns dropped. Raises InputError, and drops none,
        if the prompt alone is too long or contains a special token.
        """
        if any(map(self.encoder.has_special_token, (prompt, self.system))):
            raise InputError("the text contains a special token of the chat template: remove it")
        system = [("system", self.system)] if self.system else []
        limit = self.max_positions - min(self.max_tokens, self.max_positions // 2)
        # A prompt and its response are dropped together.
        for num_dropped in range(0, len(self.turns) + 1, 2):
            turns = [*system, *self.turns[num_dropped:], ("user", prompt)]
            (ids,) = self.encoder.prompts([turns])
            if len(ids) <= limit:
                break
        if len(ids) >= self.max_positions:
            raise InputError(
                f"the prompt has {len(ids)} tokens, and the model {self.max_positions} positions:"
                " shorten the prompt"
            )
        del self.turns[:num_dropped]
        return ids, num_dropped

    def respond(self, prompt: str, ids: list[int], show: Callable[[str], None]) -> str:
        """Generate a response, and append prompt and response to the turns.

        Args:
            ids: Token ids from encode.
            show: Called with each new piece of text; the response is their concatenation. If
                generation is interrupted, the text shown so far is the response.
        """
        has_markers = self.encoder.template == "dialogue"
        stream = ResponseStream(self.tokenizer, MARKER if has_markers else None, show)
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        input_ids = torch.tensor([ids], device=self.model.device)
        torch.manual_seed(self.seed)
        try:
            self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=min(self.max_tokens, self.max_positions - len(ids)),
                streamer=stream,
                tokenizer=self.tokenizer,
                stop_strings=[f"\n\n{name}:" for name in NAMES.values()] if has_markers else None,
                **(sampling if self.temperature > 0 else {"do_sample": False}),
            )
        finally:
            if stream.text:
                self.turns += [("user", prompt), ("assistant", stream.text)]
        return stream.text


class ResponseStream(TextStreamer):
    """Shows a response while it is generated, up to the marker of a new turn, if there are markers.

    show: Called with each new piece of text. `text` is what it has shown so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        marker: re.Pattern[str] | None,
        show: Callable[[str], None],
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.marker, self.show = marker, show
        self.text = self.whitespace = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Show text that further tokens do not change; whitespace once text follows it."""
        text = self.whitespace + text
        if self.marker:
            text = self.marker.split(text)[0]
        new = text.rstrip() if self.text else text.strip()
        self.whitespace = text[len(text.rstrip()) :]
        if new:
            self.text += new
            self.show(new)
