"""Chat with a trained model: output/sft/NAME, output/dpo/NAME, output/rlhf/NAME or its folder ema.

    python scripts/chat.py output/rlhf/1.3b
    echo "My name is Pia and I need a hat." | python scripts/chat.py output/rlhf/tiny

If standard input is not a terminal, each of its lines is a prompt, and standard output contains
only the responses. The same turns and the same seed give the same response.
"""

import argparse
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_text

HELP = """\
/reset        start a new conversation
/system TEXT  set the system prompt; without TEXT remove it
/help         show this help
/quit         exit, as Ctrl-D does; Ctrl-C stops a response, or exits at the prompt"""


def main() -> None:
    """Load the model and chat; print errors on one line."""
    arguments = parse_arguments()
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        Chat(arguments).run()
    except (InputError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("--seed", type=natural, default=1234, help="default: 1234")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 is greedy decoding; default: 0.7"
    )
    parser.add_argument(
        "--max-tokens",
        type=natural,
        default=256,
        help="maximum number of tokens of a response; default: 256",
    )
    arguments = parser.parse_args()
    if not 0 <= arguments.temperature < math.inf:
        found = arguments.temperature
        parser.error(f"argument --temperature: expected a number of at least 0, found {found:g}")
    return arguments


def natural(text: str) -> int:
    """Return an integer of at least 0; raise ArgumentTypeError for any other text."""
    # Seeds of torch have 63 bits.
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, found {text!r}")
    return int(text)


def print_note(text: str) -> None:
    """Print anything but a response: to standard error."""
    print(text, file=sys.stderr)


class Chat:
    """Reads prompts and commands, and prints the responses."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        # Imported late: it takes seconds, which an invalid option should not cost.
        from snakechat.evaluation.chat_session import load

        self.folder, self.session = arguments.model, load(arguments.model)
        self.temperature, self.max_tokens = arguments.temperature, arguments.max_tokens
        self.seed = arguments.seed
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Respond to each line until the end of the input or /quit."""
        if self.is_terminal:
            # Adds line editing and a history to input().
            import readline  # noqa: F401

            model = self.session.model
            print_note(
                f"{self.folder}: {model.num_parameters():,} parameters on {model.device.type}"
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
            self.session.turns.clear()
            print_note("New conversation.")
        elif command == "/system":
            self.session.system = text
            print_note(f"System prompt: {text}" if text else "No system prompt.")
        else:
            raise InputError(f"unknown command {command}: /help lists the commands")

    def respond(self, prompt: str) -> None:
        """Print the response while it is generated. On a terminal, Ctrl-C stops only this one."""
        ids, num_dropped = self.session.encode(prompt, self.max_tokens)
        if num_dropped:
            print_note(
                f"note: the conversation exceeds the {self.session.max_positions} positions of"
                f" {self.folder}: the oldest {num_dropped} turns are dropped"
            )

        def show(text: str) -> None:
            print(printable_text(text), end="", flush=True)

        settings = self.seed, self.temperature, self.max_tokens
        try:
            self.session.respond(prompt, ids, *settings, show)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
        print()


if __name__ == "__main__":
    main()
