"""The end of a build: verdicts on the evaluations of its recipes, in messages and model cards."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from snakechat.config.expectations import CARD_HEADING, baseline_inputs, expectations
from snakechat.config.recipes import Config
from snakechat.jobs.specs import Specs
from snakechat.jobs.staleness import Staleness
from snakechat.reporting.pages import escape_markdown
from snakechat.reporting.verdicts import Verdict, describe, judge
from snakechat.workflow.digests import write_atomically
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path
from snakechat.workflow.valid_manifests import read_valid_manifest

# The heading before which a model card has its expectations.
NEXT_HEADING = "## Sources\n"


def judge_build(
    config: Config, specs: Specs, recipes: Iterable[tuple[str, str]]
) -> tuple[list[str], list[str]]:
    """Judge the evaluations of recipes, and write the verdicts into their model cards.

    Evaluations that are not up to date are not of this build: another target needs them.

    Args:
        config: The config, with the expectations.
        specs: The specs of today.
        recipes: Stage and name of each recipe.

    Returns:
        A line for each recipe that meets its expectations, and one for each missed expectation.

    Raises:
        InputError: A baseline is missing or damaged, or a model card cannot be written.
    """
    staleness, met, missed = Staleness(specs), [], []
    for stage, name in recipes:
        evaluation = _evaluation(specs, staleness, stage, name)
        if evaluation is None:
            continue
        verdicts = judge_recipe(config, specs, staleness, (stage, name), evaluation)
        _update_card(Path(f"output/{stage}/{name}/README.md"), verdicts)
        lines = [f"{stage}/{name}: {describe(each)}" for each in verdicts if not each.met]
        missed += lines
        if verdicts and not lines:
            metrics = ", ".join(dict.fromkeys(verdict.metric for verdict in verdicts))
            met.append(f"{stage}/{name} meets its expectations: {metrics}")
    return met, missed


def judge_recipe(
    config: Config, specs: Specs, staleness: Staleness, recipe: tuple[str, str], evaluation: Path
) -> list[Verdict]:
    """Return the verdicts on the evaluation of a recipe; none if it expects nothing."""
    stage, name = recipe
    expected = expectations(config, stage, name)
    baseline = None
    for _, other in baseline_inputs(config, {stage: name}).values():
        baseline = _evaluation(specs, staleness, stage, other)
        if baseline is None:
            raise InputError(
                f"{stage}/{name}: not_worse_than names {other}, whose evaluation is missing or"
                f" stale: build output/{stage}/{name}, which builds it too"
            )
    return judge(stage, expected, evaluation, baseline) if expected else []


def _evaluation(specs: Specs, staleness: Staleness, stage: str, name: str) -> Path | None:
    """Return the folder of the evaluation of a recipe; None if it is missing or stale."""
    spec, _ = specs.spec(f"evaluate_{stage}", name)
    manifest = read_valid_manifest(manifest_path(spec["path"]))
    return Path(spec["path"]) if staleness.is_up_to_date(spec, manifest) else None


def _update_card(card: Path, verdicts: Iterable[Verdict]) -> None:
    """Write verdicts into a model card, in place of earlier ones. The rest of it stays."""
    try:
        old = card.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    new = with_verdicts(old, verdicts)
    if new == old:
        return
    # Not next to the card: after a kill, it would be a file of the result.
    temporary = card.parent.with_name(f".{card.parent.name}.card")
    try:
        write_atomically(temporary, new, writer="tmp")
        temporary.replace(card)
    except OSError as error:
        raise InputError(f"{card} cannot be written: {error.strerror}") from None


def with_verdicts(card: str, verdicts: Iterable[Verdict]) -> str:
    """Return a model card with these verdicts in place of earlier ones."""
    return insert_section(card, CARD_HEADING, "".join(_card_lines(verdicts)))


def insert_section(card: str, heading: str, section: str) -> str:
    """Return a model card with a section before its sources, in place of one with this heading.

    section: Its text; an empty one removes the section.
    """
    without = re.sub(rf"^{heading}.*?(?=^## |\Z)", "", card, flags=re.MULTILINE | re.DOTALL)
    before, next_heading, after = without.partition(NEXT_HEADING)
    if section:
        section = f"{heading}\n{section}\n"
    return f"{before}{section}{next_heading}{after}"


def _card_lines(verdicts: Iterable[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        mark = "met" if verdict.met else "**missed**"
        yield f"- {mark}: {escape_markdown(describe(verdict))}\n"
