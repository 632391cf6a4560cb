"""Reward functions: programs of the user, rewards/NAME.py, that score responses.

Each program defines score(prompts, responses), which takes two lists of texts without special
tokens and returns one number for each response, or None for a response that it cannot judge. It may
have further parameters, or **columns. It receives by keyword those that have the name of a column
that a dataset keeps (a list with the cell of each response, None where its dataset has no such
column), of an argument in the config, or `messages`: for each response the conversation with it, a
list of {"role", "content"}.

A program may import modules in rewards/ and scripts/, and read data files in rewards/ whose paths
it has as strings, relative to rewards/: "words.txt". These files are part of its code
(snakechat.workflow.code_digests).
"""

import builtins
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from snakechat.config.rlhf import MESSAGES, weighted_functions
from snakechat.data.dialogues import messages_of
from snakechat.data.records import PromptTexts
from snakechat.workflow.errors import InputError, denied_line, one_line_errors

FOLDER = Path(__file__).resolve().parents[3] / "rewards"
# Characters of a text that an error message quotes.
MAX_QUOTED = 60

# Lists with the cell of each response, by column.
Columns = Mapping[str, list[Any]]
# Scores texts: prompts, responses, columns.
TextScorer = Callable[[list[str], list[str], Columns], Sequence[float] | np.ndarray]
# Weight and function by name.
WeightedFunctions = Mapping[str, tuple[float, TextScorer]]


def load_functions(functions: Mapping[str, Any]) -> WeightedFunctions:
    """Return the reward functions of the key `reward_functions`."""
    return {
        name: (weight, load_function(name, arguments))
        for name, (weight, arguments) in weighted_functions(functions).items()
    }


def function_columns(
    texts: PromptTexts, rows: Sequence[int] | np.ndarray, responses: Sequence[str]
) -> dict[str, list[Any]]:
    """Return what reward functions receive besides prompts and responses.

    Args:
        rows: Row numbers of the prompts, whose responses follow one another once per generation.
        responses: Texts without special tokens [n].
    """
    generations = len(responses) // len(rows)
    messages = [
        messages_of([*turns, ("assistant", response)])
        for turns, response in zip(texts.turns(rows) * generations, responses, strict=True)
    ]
    kept = {name: cells * generations for name, cells in texts.columns(rows).items()}
    return kept | {MESSAGES: messages}


def load_function(name: str, arguments: Mapping[str, Any]) -> TextScorer:
    """Return the function score of rewards/NAME.py, with arguments that it receives by keyword.

    That function returns the score of each response, float64 [n]; NaN where the program returned
    None. Both functions raise InputError if the program cannot be run, if it defines no score, or
    if score raises or returns anything but a finite number for each response.
    """
    with _errors_of(name):
        function: Any = getattr(load_module(name, {}), "score", None)
    if not callable(function):
        raise InputError(f"rewards/{name}.py: has no function score(prompts, responses)")
    # Without the first two.
    parameters = [*inspect.signature(function).parameters.values()][2:]
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}

    def score(prompts: list[str], responses: list[str], columns: Columns) -> np.ndarray:
        kept = {key: cells for key, cells in columns.items() if takes_all or key in names}
        with _errors_of(name):
            # Copies, which it may change.
            scores = function([*prompts], [*responses], **{**kept, **arguments})
        # Converts arrays and tensors on any device to Python numbers.
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(scores, (list, tuple)) or len(scores) != len(responses):
            raise InputError(
                f"rewards/{name}.py: score returned {shorten(repr(scores))}, expected a number for"
                f" each of {len(responses)} responses"
            )
        for number, response in zip(scores, responses, strict=True):
            is_number = isinstance(number, (Real, np.bool_)) and math.isfinite(number)
            if number is not None and not is_number:
                raise InputError(
                    f"rewards/{name}.py: score returned {shorten(repr(number))} for the response"
                    f" {shorten(response)!r}, expected a finite number or None"
                )
        return np.array(scores, dtype=np.float64)

    return score


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Context in which an exception becomes one line, with the program's innermost line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(FOLDER / f"{name}.py")]
        place = f"line {lines[-1]}: " if lines else ""
        # Our own errors, such as a missing sandbox, say what to do.
        own = str(error) if isinstance(error, InputError) else denied_line(error)
        reason = own or f"{type(error).__name__}: {shorten(str(error))}"
        raise InputError(f"rewards/{name}.py: {place}{reason}") from error


def load_module(name: str, loaded: dict[str, ModuleType]) -> ModuleType:
    """Run the module rewards/NAME.py from its source, and the modules of rewards/ that it imports.

    They are not imported as others are: that could find another module of the same name, or stale
    bytecode. A module in rewards/ takes precedence over a library, but not over the standard
    library. loaded: Modules of rewards/ that have been run, by name; this one is added.
    """

    def import_module(
        target: str,
        namespace: Mapping[str, Any] | None = None,
        local_names: Mapping[str, Any] | None = None,
        attributes: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import a module as an import statement of this one does."""
        if level == 1 and not target:
            package = ModuleType("rewards")
            for each in attributes or ():
                setattr(package, each, loaded.get(each) or load_module(each, loaded))
            return package
        is_file = target != name and (FOLDER / f"{target}.py").is_file()
        if level == 1 or (level == 0 and is_file and target not in sys.stdlib_module_names):
            return loaded.get(target) or load_module(target, loaded)
        return builtins.__import__(target, namespace, local_names, attributes or (), level)

    path = FOLDER / f"{name}.py"
    module = loaded[name] = ModuleType(f"rewards.{name}")
    vars(module).update(
        __file__=str(path),
        __package__="rewards",
        __builtins__={**vars(builtins), "__import__": import_module},
    )
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module


def shorten(text: str) -> str:
    """Return the start of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


@one_line_errors()
def main() -> None:
    """Import the reward functions that the arguments name; exit with one line at an error."""
    for name in sys.argv[1:]:
        load_function(name, {})


if __name__ == "__main__":
    main()
