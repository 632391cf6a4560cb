"""Chat with a trained model: output/sft/NAME, output/dpo/NAME, output/rlhf/NAME or its folder ema.

    python scripts/chat.py output/rlhf/1.3b
    echo "My name is Pia and I need a hat." | python scripts/chat.py output/rlhf/tiny

If standard input is not a terminal, each of its lines is a prompt, and standard output contains
only the responses. The same turns and the same seed give the same response.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from snakechat.data.dialogues import MARKER, NAMES, Turn
from snakechat.workflow.errors import InputError, tool_parser
from snakechat.workflow.printable import printable_text

HELP = """\
/reset        start a new conversation
/system TEXT  set the system prompt; without TEXT remove it
/help         show this help
/quit         exit, as Ctrl-D does; Ctrl-C stops a response, or exits at the prompt"""


def main() -> None:
    """Load the model and chat; print errors on one line."""
    parser = tool_parser(__doc__)
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("--seed", type=int, default=1234, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 is greedy decoding; default: %(default)s"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        help="maximum number of tokens of a response; default: %(default)s",
    )
    arguments = parser.parse_args()
    output: Any = sys.stdout
    output.reconfigure(errors="backslashreplace")
    try:
        converse(ChatSession(**vars(arguments)), sys.stdin.isatty() and sys.stdout.isatty())
    except (InputError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)


# --- the session ----------------------------------------------------------------------------------


class ChatSession:
    """A conversation with the chat model in a folder, on the GPU if there is one.

    Prompts are encoded as in training. The same turns and the same seed give the same response.

    Attributes:
        turns: (role, text) of the prompts and responses so far.
        system: System prompt, or "".
        temperature: 0 is greedy decoding; otherwise tokens are sampled from the whole vocabulary,
            as in training.
        max_tokens: Maximum number of tokens of a response.
        max_positions: Maximum number of tokens of the model.
    """

    def __init__(
        self, model: Path, seed: int = 1234, temperature: float = 0.7, max_tokens: int = 256
    ) -> None:
        # Imported late: it takes seconds, which an invalid option should not cost.
        import torch

        from snakechat.data.encoder import Encoder
        from snakechat.data.tokenizers import load_tokenizer
        from snakechat.modeling.loading import load_causal
        from snakechat.modeling.models import max_positions

        if not (model / "config.json").is_file():
            raise InputError(f"{model} has no config.json: it is not the folder of a model")
        self.tokenizer = load_tokenizer(model)
        if self.tokenizer.chat_template is None:
            raise InputError(
                f"{model} is a base model, without a chat template: expected the result of sft,"
                " dpo or rlhf"
            )
        loaded: Any = load_causal(model, "auto", self.tokenizer)
        self.model = loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.encoder = Encoder(self.tokenizer, "auto")
        self.max_positions = max_positions(loaded) or sys.maxsize
        self.seed, self.temperature, self.max_tokens = seed, temperature, max_tokens
        self.turns: list[Turn] = []
        self.system = ""

    def encode(self, prompt: str) -> tuple[list[int], int]:
        """Encode the conversation with a new prompt, and drop the oldest turns if it is too long.

        Reserves positions for a response of max_tokens, but not more than half of all positions.
        Returns the token ids, and the number of turns dropped. Raises InputError, and drops none,
        if the prompt alone is too long or contains a special token.
        """
        self.encoder.require_text("text", (prompt, self.system))
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
            show: Called with each new piece of text; the response is their concatenation, up to the
                marker of a new turn. If generation is interrupted, the text shown so far is the
                response.
        """
        import torch
        from transformers import TextStreamer

        has_markers = self.encoder.template == "dialogue"
        generated = response = ""

        def show_text(text: str, stream_end: bool = False) -> None:
            """Show text that further tokens do not change; whitespace once text follows it."""
            nonlocal generated, response
            generated += text
            text = (MARKER.split(generated)[0] if has_markers else generated).strip()
            new, response = text[len(response) :], text
            if new:
                show(new)

        streamer: Any = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = show_text
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        input_ids = torch.tensor([ids], device=self.model.device)
        torch.manual_seed(self.seed)
        try:
            self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=min(self.max_tokens, self.max_positions - len(ids)),
                streamer=streamer,
                tokenizer=self.tokenizer,
                stop_strings=[f"\n\n{name}:" for name in NAMES.values()] if has_markers else None,
                **(sampling if self.temperature > 0 else {"do_sample": False}),
            )
        finally:
            if response:
                self.turns += [("user", prompt), ("assistant", response)]
        return response


# --- the terminal ---------------------------------------------------------------------------------


def print_note(text: str) -> None:
    """Print anything but a response: to standard error."""
    print(text, file=sys.stderr)


def converse(session: ChatSession, is_terminal: bool) -> None:
    """Run the command, or respond to the prompt, of each line.

    On a terminal, an error does not end the program, and Ctrl-C stops only one response.
    """
    if is_terminal:
        # Adds line editing and a history to input().
        import readline  # noqa: F401

        number, device = session.model.num_parameters(), session.model.device.type
        print_note(f"{number:,} parameters on {device}\n/help lists the commands.")
    prompt = "> " if is_terminal else ""
    with suppress(EOFError):
        for line in iter(lambda: input(prompt).strip(), "/quit"):
            try:
                if line.startswith("/"):
                    run_command(session, line)
                elif line:
                    respond(session, line)
            except (InputError, KeyboardInterrupt) as error:
                if not is_terminal:
                    raise
                print_note(f"error: {error}" if isinstance(error, InputError) else "")
    if is_terminal:
        print()


def run_command(session: ChatSession, line: str) -> None:
    """Run a command. Raises InputError if the command is unknown."""
    command, _, text = line.partition(" ")
    if command == "/help":
        print_note(HELP)
    elif command == "/reset":
        session.turns.clear()
        print_note("New conversation.")
    elif command == "/system":
        session.system = text.strip()
        print_note(f"System prompt: {session.system}" if session.system else "No system prompt.")
    else:
        raise InputError(f"unknown command {command}: /help lists the commands")


def respond(session: ChatSession, prompt: str) -> None:
    """Print the response while it is generated."""
    ids, num_dropped = session.encode(prompt)
    if num_dropped:
        print_note(
            f"note: the conversation exceeds the {session.max_positions} positions of the model:"
            f" the oldest {num_dropped} turns are dropped"
        )
    session.respond(prompt, ids, lambda text: print(printable_text(text), end="", flush=True))
    print()


if __name__ == "__main__":
    main()
