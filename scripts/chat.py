"""Chat with a trained model: output/sft/NAME, output/dpo/NAME, output/rlhf/NAME or its folder ema.

    python scripts/chat.py output/rlhf/1.3b
    python scripts/chat.py output/rlhf/1.3b --compare output/sft/1.3b
    echo "My name is Pia and I need a hat." | python scripts/chat.py output/rlhf/tiny

If standard input is not a terminal, each of its lines is a prompt, and standard output contains
only the responses. The same turns and the same seed give the same response.
"""

import argparse
import io
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_text

HELP = """\
/reset        start a new conversation
/system TEXT  set the system prompt; without TEXT remove it
/seed N       set the seed for sampling
/help         show this help
/quit         exit, as Ctrl-D does; Ctrl-C stops a response, or exits at the prompt"""

# Minimum number of columns for responses side by side.
SIDE_BY_SIDE_COLUMNS = 80

Number = TypeVar("Number", int, float)


def main() -> None:
    """Load the models and chat; print errors on one line."""
    arguments = parse_arguments()
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        Chat(arguments).run()
    except InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument(
        "--compare", type=Path, metavar="MODEL", help="second model that gets the same prompts"
    )
    parser.add_argument("--seed", type=parse_seed, default=1234, help="default: 1234")
    parser.add_argument(
        "--temperature",
        type=parse_temperature,
        default=0.7,
        help="0 is greedy decoding; default: 0.7",
    )
    parser.add_argument(
        "--max-tokens",
        type=parse_length,
        default=256,
        help="maximum number of tokens of a response; default: 256",
    )
    # DeepSpeed-Chat's chat.py has the model as an option.
    if any(word.partition("=")[0] == "--path" for word in sys.argv[1:]):
        parser.error("the model is an argument without an option: chat.py output/rlhf/RECIPE")
    return parser.parse_args()


def at_least(
    minimum: Number, kind: type[Number], below: float = math.inf
) -> Callable[[str], Number]:
    """Return a parser of numbers in [minimum, below), which raises ArgumentTypeError otherwise."""

    def parse(text: str) -> Number:
        try:
            value = kind(text)
            if minimum <= value < below:
                return value
        except ValueError:
            pass
        name = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"expected {name} of at least {minimum:g}, found {text!r}")

    return parse


# Seeds of torch have 63 bits.
parse_seed = at_least(0, int, below=1 << 63)
parse_temperature = at_least(0.0, float)
parse_length = at_least(1, int)


def print_note(text: str) -> None:
    """Print anything but a response: to standard error."""
    print(text, file=sys.stderr)


class Chat:
    """Reads prompts and commands, and prints the responses of one or two models."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        # Imported late: it takes seconds, which an invalid option should not cost.
        from snakechat.evaluation.chat_session import load

        folders = [arguments.model, arguments.compare]
        self.sessions = {folder: load(folder) for folder in folders if folder}
        self.temperature, self.max_tokens = arguments.temperature, arguments.max_tokens
        self.seed = arguments.seed
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Respond to each line until the end of the input or /quit."""
        if self.is_terminal:
            # Adds line editing and a history to input().
            import readline  # noqa: F401

            for folder, session in self.sessions.items():
                model = session.model
                print_note(
                    f"{folder}: {model.num_parameters():,} parameters on {model.device.type}"
                )
            print_note("/help lists the commands.")
        for line in self.lines():
            if line == "/quit":
                break
            try:
                if line.startswith("/"):
                    self.run_command(line)
                else:
                    self.respond(line)
            except InputError as error:
                if not self.is_terminal:
                    raise
                print_note(f"error: {error}")

    def lines(self) -> Iterator[str]:
        """Yield the lines of the input that are not empty."""
        while True:
            try:
                line = input("> " if self.is_terminal else "").strip()
            except EOFError:
                if self.is_terminal:
                    print()
                return
            if line:
                yield line

    def run_command(self, line: str) -> None:
        """Run a command. Raises InputError if there is no such command."""
        command, _, text = line.partition(" ")
        text = text.strip()
        if command == "/help":
            print_note(HELP)
        elif command == "/reset":
            for session in self.sessions.values():
                session.turns.clear()
            print_note("New conversation.")
        elif command == "/system":
            for session in self.sessions.values():
                session.system = text
            print_note(f"System prompt: {text}" if text else "No system prompt.")
        elif command == "/seed":
            try:
                self.seed = parse_seed(text)
            except argparse.ArgumentTypeError as error:
                raise InputError(f"/seed: {error}") from None
            print_note(f"Seed: {self.seed}")
        else:
            raise InputError(f"unknown command {command}: /help lists the commands")

    def respond(self, prompt: str) -> None:
        """Print the response of each model."""
        encoded = {}
        for folder, session in self.sessions.items():
            encoded[folder], num_dropped = session.encode(prompt, self.max_tokens)
            if num_dropped:
                print_note(
                    f"note: the conversation exceeds the {session.max_positions} positions of"
                    f" {folder}: the oldest {num_dropped} turns are dropped"
                )
        if len(encoded) == 1:
            self.print_response(*encoded.popitem(), prompt)
        elif self.is_wide():
            self.print_side_by_side(encoded, prompt)
        else:
            for folder, ids in encoded.items():
                print(f"{folder}:")
                self.print_response(folder, ids, prompt)
                print()

    def is_wide(self) -> bool:
        """Whether the terminal is wide enough for two columns."""
        from rich.console import Console

        console = Console()
        return console.is_terminal and console.width >= SIDE_BY_SIDE_COLUMNS

    def print_response(self, folder: Path, ids: list[int], prompt: str) -> None:
        """Print a response while it is generated."""
        self.generate(
            folder, ids, prompt, lambda text: print(printable_text(text), end="", flush=True)
        )
        print()

    def print_side_by_side(self, encoded: dict[Path, list[int]], prompt: str) -> None:
        """Print responses in columns, one after the other."""
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text

        texts = dict.fromkeys(encoded, "")

        def make_table() -> Table:
            table = Table(expand=True, box=None)
            for folder in texts:
                table.add_column(Text(str(folder)), ratio=1, overflow="fold")
            table.add_row(*(Text(text) for text in texts.values()))
            return table

        with Live(make_table()) as live:
            for folder, ids in encoded.items():

                def show(text: str, folder: Path = folder) -> None:
                    texts[folder] += printable_text(text)
                    live.update(make_table())

                self.generate(folder, ids, prompt, show)

    def generate(
        self, folder: Path, ids: list[int], prompt: str, show: Callable[[str], None]
    ) -> None:
        """Generate a response. On a terminal, Ctrl-C stops only this response."""
        settings = self.seed, self.temperature, self.max_tokens
        try:
            self.sessions[folder].respond(prompt, ids, *settings, show)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise


if __name__ == "__main__":
    main()
