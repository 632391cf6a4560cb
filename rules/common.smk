# What all rule files use: the functions of wildcards, the command of jobs, start and end of a build.

from snakechat.config.recipes import COMPARISON_NAME, RECIPE_NAME, STAGES
from snakechat.rules.functions import RuleFunctions, fails_in_one_line


wildcard_constraints:
    name=RECIPE_NAME.pattern,
    stage="|".join(STAGES),


FUNCTIONS = fails_in_one_line(RuleFunctions)(workflow, config, BUILD, Path(workflow.basedir))
inputs, params_of = FUNCTIONS.inputs, FUNCTIONS.params
threads_of, resources_of = FUNCTIONS.threads, FUNCTIONS.resources
results_of, recipe_results = FUNCTIONS.results, FUNCTIONS.recipe_results
entries_with = FUNCTIONS.names

# Snakemake uses the image with --sdm apptainer alone.
if FUNCTIONS.config.values["container"]:

    container: FUNCTIONS.config.values["container"]


# The file of the build, for its jobs; on a cluster, in the environment of the submitted command. It
# is written when the first job starts.
if workflow.is_main_process:
    os.environ.update(SNAKECHAT_BUILD=FUNCTIONS.build_file)


envvars:
    "SNAKECHAT_BUILD",


# Ctrl-C and a cluster's SIGTERM reach a whole job. The shell and tee ignore them while a program
# saves its state, so that its last messages are printed and logged. The first words are Snakemake's
# own prefix, which this one replaces: a job fails if its program fails.
shell.prefix("set -euo pipefail; trap 'exit 143' TERM; ")

# The command of all rules. The launcher links a result that exists already; otherwise it starts the
# processes that the placement has.
# The launcher empties the log of a result that is replaced; a job that keeps its result adds a line.
LAUNCHER = f"{FUNCTIONS.snapshot.folder}/scripts/launch.py"
TO_LOG = " 2>&1 | (trap '' INT TERM; tee -a {log:q})"
ARGUMENTS = "{params.program:q} --spec {params.spec:q} --placement {params.placement:q}"
ARGUMENTS += " --options {params.options:q}"
RUN = f"SNAKECHAT_LOG={{log:q}} PYTHONSAFEPATH= python {LAUNCHER} {ARGUMENTS}{TO_LOG}"


onstart:
    FUNCTIONS.start()
