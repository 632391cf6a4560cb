"""What forks of the tests share: Snakemake, and what it imports and finds while it plans."""

import gc

import snakemake_logger_plugin_rich  # noqa: F401
import yte  # noqa: F401
from snakemake.cli import get_argument_parser

# Searches for plugins, once.
get_argument_parser()
# Collections in forks would visit, and copy, what they share.
gc.freeze()
