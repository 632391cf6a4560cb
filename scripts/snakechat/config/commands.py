"""Keys of commands of users, which run in place of our trainers or as benchmarks."""

from typing import Annotated

from pydantic import Field

from snakechat.config.settings import ABSENT, Settings, only_with

Text = Annotated[str, Field(min_length=1)]
WITH_COMMAND = only_with("command")


class CommandKeys(Settings):
    """A command, and what it reads besides its inputs."""

    command: Text = ABSENT
    # An interpreter of Python; by default, the build's.
    python: Annotated[Text, WITH_COMMAND] = ABSENT
    files: Annotated[list[Text], Field(min_length=1), WITH_COMMAND] = ABSENT
    lock: Annotated[Text, WITH_COMMAND] = ABSENT
    network: Annotated[bool, WITH_COMMAND] = ABSENT


# Names in braces of all commands, and those that only some stages have.
NAMES = ("python", "model", "output", "state", "log_dir", "seed", "gpus")
NAMES_OF_STAGE = {"dpo": ("reference",), "rlhf": ("reference", "reward")}
# Settings of recipes that describe data and evaluations, which recipes with a command have too.
READ_WITH_COMMAND = {
    *("seed", "datasets", "model", "actor", "reward", "reward_functions", "dtype", "train_on"),
    *("max_length", "max_prompt_length", "max_response_length", "judge", "compare_with"),
    # The loss by which pairs are evaluated.
    *("beta", "label_smoothing", "length_normalized", "margin", "sft_coef"),
    *("desirable_weight", "undesirable_weight", "loss", "evaluation"),
}


def recipe_names(stage: str) -> tuple[str, ...]:
    """Return the names in braces that the command of a recipe may have."""
    return (*NAMES, "data", "tokens", *NAMES_OF_STAGE.get(stage, ()))
