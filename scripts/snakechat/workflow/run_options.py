"""What a run of a job uses that its result does not depend on, apart from its placement.

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snakechat.workflow.store import STORE


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Paths, addresses and limits of a run.

    Attributes:
        stores: Folders of the stores whose results are used. New ones go to the first.
        snakemake: The options of Snakemake with which the result is rebuilt.
        save_steps: Steps between two checkpoints.
        source: Folder of the external files of the job; empty if it has none.
        licenses: The licences that the config declares, by the path of the import or the fetch.
        llm_judges: Where and how LLM judges are asked, by name.
        versions: Folders in the store of compared versions, by recipe and kind of result.
    """

    stores: list[str] = field(default_factory=lambda: [str(STORE)])
    snakemake: list[str] = field(default_factory=list)
    save_steps: int = 1
    source: str = ""
    licenses: Mapping[str, str] = field(default_factory=dict)
    llm_judges: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, dict[str, str]] = field(default_factory=dict)


DEFAULTS = RunOptions()


def parse_options(text: str) -> RunOptions:
    """Return the options in a JSON text of the values that differ from their defaults."""
    return RunOptions(**json.loads(text))
