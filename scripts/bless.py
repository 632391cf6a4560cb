"""Write the figures of a recipe's evaluation as a baseline, which `not_worse_than` reads.

    python scripts/bless.py output/reward/tiny
    python scripts/bless.py output/rlhf/mine baselines/mine.json --configfile mine.yaml

The evaluation must be up to date. The baseline is a small JSON file for version control: figures
with their 95 % intervals, and digests of the reward models that scores come from.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from snakechat.config.recipes import STAGES
from snakechat.planning.planner import parse_arguments, plan_build
from snakechat.reporting.verdicts import COMPARED, figures_of
from snakechat.workflow.digests import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] output/STAGE/RECIPE [FILE] [options of snakemake]",
    )
    parser.add_argument("target", help="output/STAGE/RECIPE")
    parser.add_argument("file", nargs="?", help="defaults to baselines/STAGE/RECIPE.json")
    arguments, options = parse_arguments(parser, sys.argv[1:])
    stage, name = recipe_of(arguments.target)
    evaluation = f"output/eval/{stage}/{name}"
    if plan_build([f"{evaluation}.manifest.json"], options).stale:
        sys.exit(f"error: {evaluation} is missing or stale: build {arguments.target} first")
    path = Path(arguments.file or f"baselines/{stage}/{name}.json")
    if path.suffix != ".json":
        sys.exit(f"error: {path} does not end in .json, by which not_worse_than knows a file")
    baseline = figures_of(stage, Path(evaluation))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(baseline, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        sys.exit(f"error: {path} cannot be written: {error.strerror}")
    print(f"{path} has these figures of {stage}/{name}: {', '.join(baseline['figures'])}")
    print(f"a recipe of {stage} compares itself with them by not_worse_than: {path}")


def recipe_of(target: str) -> tuple[str, str]:
    """Return stage and name of a recipe by its result; exit if it is none or has no baseline."""
    match = re.fullmatch(rf"output/({'|'.join(STAGES)})/([^/]+?)/?", target)
    if match is None:
        sys.exit(f"error: {target} is no result of a recipe: name output/STAGE/RECIPE")
    stage, name = match.groups()
    if stage not in COMPARED:
        sys.exit(f"error: {target}: perplexities have no intervals to compare by: use expect")
    return stage, name.removesuffix(".manifest.json")


if __name__ == "__main__":
    main()
