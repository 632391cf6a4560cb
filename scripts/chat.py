"""Talk to a model: to output/sft/NAME, output/dpo/NAME, output/rlhf/NAME or its folder ema.

    python scripts/chat.py output/rlhf/1.3b
    python scripts/chat.py output/rlhf/1.3b --compare output/sft/1.3b
    echo "My name is Pia and I need a hat." | python scripts/chat.py output/rlhf/tiny

Without a terminal each line of standard input is a question, and standard output has the responses
alone. The same turns and the same seed give the same response.
"""

import argparse
import math
import re
import sys
from pathlib import Path

from snakechat.workflow.errors import InputError

HELP = """\
/reset        forget all turns
/system TEXT  what stands before all turns; without TEXT nothing does
/seed N       draw responses by another seed
/help         this
/quit         leave, as Ctrl-D does; Ctrl-C stops a response, and leaves where none is written"""

# Below that many columns, responses to compare stand one under the other.
SIDE_BY_SIDE = 80

# All but line breaks and tabs: a terminal obeys them, and the last ones turn text around.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def main():
    """Load the models, then talk. One line says what is wrong."""
    arguments = parse_arguments()
    sys.stdin.reconfigure(errors="replace")
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        Chat(arguments).talk()
    except InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)


def parse_arguments():
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("--compare", type=Path, metavar="MODEL", help="asked the same, beside it")
    parser.add_argument("--seed", type=as_seed, default=1234, help="default: 1234")
    parser.add_argument(
        "--temperature",
        type=as_temperature,
        default=0.7,
        help="0 takes the likeliest tokens; default: 0.7",
    )
    parser.add_argument(
        "--max-tokens", type=as_length, default=256, help="of a response, at most; default: 256"
    )
    return parser.parse_args()


def at_least(lowest, kind, below=math.inf):
    """A function that makes a number of a text, and raises ArgumentTypeError for all others."""

    def parse(text):
        try:
            value = kind(text)
            if lowest <= value < below:
                return value
        except ValueError:
            pass
        name = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {name} from {lowest} on")

    return parse


# torch takes no larger one.
as_seed = at_least(0, int, below=1 << 63)
as_temperature = at_least(0, float)
as_length = at_least(1, int)


def escaped(text):
    """A text whose control characters are told, and not obeyed."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def note(text):
    """Tell what is no response."""
    print(text, file=sys.stderr)


class Chat:
    """What is typed, and the models that response: conversations by folder."""

    def __init__(self, arguments):
        # Seconds, of which an unknown option should not cost any.
        from snakechat.evaluation.chat_session import load

        folders = [arguments.model, arguments.compare]
        self.conversations = {folder: load(folder) for folder in folders if folder}
        self.temperature, self.max_tokens = arguments.temperature, arguments.max_tokens
        self.seed = arguments.seed
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def talk(self):
        """Response what is typed, to the end of it or to /quit."""
        if self.is_terminal:
            # Gives input() keys to edit with, and what was typed before.
            import readline  # noqa: F401

            for folder, conversation in self.conversations.items():
                model = conversation.model
                note(f"{folder}: {model.num_parameters():,} weights on {model.device.type}")
            note("/help tells what can be typed beside questions.")
        for line in self.lines():
            if line == "/quit":
                break
            try:
                if line.startswith("/"):
                    self.obey(line)
                else:
                    self.response(line)
            except InputError as error:
                if not self.is_terminal:
                    raise
                note(f"error: {error}")

    def lines(self):
        """Yield lines that say something."""
        while True:
            try:
                line = input("> " if self.is_terminal else "").strip()
            except EOFError:
                if self.is_terminal:
                    print()
                return
            if line:
                yield line

    def obey(self, line):
        """Do what a line with a slash asks for. Raises InputError where that is nothing known."""
        command, _, text = line.partition(" ")
        text = text.strip()
        if command == "/help":
            note(HELP)
        elif command == "/reset":
            for conversation in self.conversations.values():
                conversation.turns.clear()
            note("All turns are forgotten.")
        elif command == "/system":
            for conversation in self.conversations.values():
                conversation.system = text
            note(f"Before all turns: {text}" if text else "Nothing stands before the turns.")
        elif command == "/seed":
            try:
                self.seed = as_seed(text)
            except argparse.ArgumentTypeError as error:
                raise InputError(f"/seed: {error}") from None
            note(f"Seed: {self.seed}")
        else:
            raise InputError(f"{command} is no command: /help tells them")

    def response(self, question):
        """Print the response of each model."""
        prompts = {}
        for folder, conversation in self.conversations.items():
            prompts[folder], forgotten = conversation.make_room(question, self.max_tokens)
            if forgotten:
                note(
                    f"note: {folder} has positions for {conversation.positions} tokens:"
                    f" its oldest {forgotten} turns are left out"
                )
        if len(prompts) == 1:
            self.write(*prompts.popitem(), question)
        elif self.is_wide():
            self.write_side_by_side(prompts, question)
        else:
            for folder, ids in prompts.items():
                print(f"{folder}:")
                self.write(folder, ids, question)
                print()

    def is_wide(self):
        """Whether two responses have room beside each other."""
        from rich.console import Console

        console = Console()
        return console.is_terminal and console.width >= SIDE_BY_SIDE

    def write(self, folder, ids, question):
        """Print a response as it comes."""
        self.ask(folder, ids, question, lambda text: print(escaped(text), end="", flush=True))
        print()

    def write_side_by_side(self, prompts, question):
        """Print responses in columns, one of which grows at a time."""
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text

        texts = dict.fromkeys(prompts, "")

        def table():
            found = Table(expand=True, box=None)
            for folder in texts:
                found.add_column(Text(str(folder)), ratio=1, overflow="fold")
            found.add_row(*(Text(text) for text in texts.values()))
            return found

        with Live(table()) as live:
            for folder, ids in prompts.items():

                def show(text, folder=folder):
                    texts[folder] += escaped(text)
                    live.update(table())

                self.ask(folder, ids, question, show)

    def ask(self, folder, ids, question, show):
        """Have a model response. At a terminal, Ctrl-C ends its response and nothing else."""
        settings = self.seed, self.temperature, self.max_tokens
        try:
            self.conversations[folder].response(question, ids, *settings, show)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise


if __name__ == "__main__":
    main()
