"""Chat with a trained model: output/sft/NAME, output/dpo/NAME, output/rlhf/NAME or its folder ema.

    python scripts/chat.py output/rlhf/1.3b
    echo "My name is Pia and I need a hat." | python scripts/chat.py output/rlhf/tiny

If standard input is not a terminal, each of its lines is a prompt, and standard output contains
only the responses. The same turns and the same seed give the same response.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_text

if TYPE_CHECKING:
    from snakechat.evaluation.chat_session import ChatSession

HELP = """\
/reset        start a new conversation
/system TEXT  set the system prompt; without TEXT remove it
/help         show this help
/quit         exit, as Ctrl-D does; Ctrl-C stops a response, or exits at the prompt"""


def main() -> None:
    """Load the model and chat; print errors on one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    stdin: Any = sys.stdin
    stdout: Any = sys.stdout
    stdin.reconfigure(errors="replace")
    stdout.reconfigure(errors="backslashreplace")
    # Imported late: it takes seconds, which an invalid option should not cost.
    from snakechat.evaluation import chat_session

    try:
        options = arguments.seed, arguments.temperature, arguments.max_tokens
        session = chat_session.ChatSession(arguments.model, *options)
        converse(session, sys.stdin.isatty() and sys.stdout.isatty())
    except (InputError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)


def print_note(text: str) -> None:
    """Print anything but a response: to standard error."""
    print(text, file=sys.stderr)


def read_lines(prompt: str) -> Iterator[str]:
    """Yield the lines of standard input until its end or /quit, without white space around them."""
    with suppress(EOFError):
        while (line := input(prompt).strip()) != "/quit":
            yield line


def converse(session: "ChatSession", is_terminal: bool) -> None:
    """Run the command, or respond to the prompt, of each line.

    On a terminal, an error does not end the program, and Ctrl-C stops only one response.
    """
    if is_terminal:
        # Adds line editing and a history to input().
        import readline  # noqa: F401

        model = session.model
        print_note(f"{model.num_parameters():,} parameters on {model.device.type}")
        print_note("/help lists the commands.")
    for line in read_lines("> " if is_terminal else ""):
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


def run_command(session: "ChatSession", line: str) -> None:
    """Run a command. Raises InputError if the command is unknown."""
    command, _, text = line.partition(" ")
    text = text.strip()
    if command == "/help":
        print_note(HELP)
    elif command == "/reset":
        session.turns.clear()
        print_note("New conversation.")
    elif command == "/system":
        session.system = text
        print_note(f"System prompt: {text}" if text else "No system prompt.")
    else:
        raise InputError(f"unknown command {command}: /help lists the commands")


def respond(session: "ChatSession", prompt: str) -> None:
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
