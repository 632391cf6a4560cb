# What all rule files use: the constraints of wildcards, the inputs and the command of jobs.

from snakechat.config.recipes import COMPARISON_NAME, RECIPE_NAME, STAGES


wildcard_constraints:
    name=RECIPE_NAME.pattern,
    stage="|".join(STAGES),


# The manifests that a job reads: those that a rule names, and others that the config decides.
inputs = FUNCTIONS.inputs
results_of, entries_with = FUNCTIONS.results, FUNCTIONS.names
# The resources of a job that runs a model.
OF_PLACEMENT = FUNCTIONS.resources

# Snakemake uses the image with --sdm apptainer alone.
if FUNCTIONS.config.values["container"]:

    container: FUNCTIONS.config.values["container"]


# The file of the build, for its jobs; on a cluster, in the environment of the submitted command. It
# is written when the first job starts.
if workflow.is_main_process:
    os.environ.update(SNAKECHAT_BUILD=FUNCTIONS.build_file)


envvars:
    "SNAKECHAT_BUILD",


# The command of all rules. The launcher links a result that exists already; otherwise it starts the
# processes that the placement has.
# The launcher empties the log of a result that is replaced; a job that keeps its result adds a line.
# Ctrl-C, a closed terminal and a cluster's SIGTERM reach a whole job. The shell and tee ignore them
# while a program saves its state, so that its last messages are printed and logged.
# What may change without making a result stale (the folder of the sources, the placement) is not in
# this text, which Snakemake compares with the last run's.
PROGRAM = "SNAKECHAT_LOG={log:q} PYTHONSAFEPATH= {params.command}"
TO_LOG = "2>&1 | (trap '' HUP INT TERM; tee -a {log:q})"
RUN = f"trap 'exit 143' HUP TERM; {PROGRAM} {TO_LOG}"


# The base of the rules below. No job is of this rule itself.
rule job:
    log:
        "output/logs/job.log",
    conda:
        "../envs/snakechat.yaml"
    threads: FUNCTIONS.threads
    params:
        command=FUNCTIONS.command,
    shell:
        RUN


# Folders and files of results, such as output/eval/sft/tiny/metrics.json. Other rules write them: a
# rule without a command leaves them alone.
rule result_folder:
    input:
        unpack(FUNCTIONS.result_of),
    output:
        directory("output/{result}"),
    wildcard_constraints:
        result=rf"(?!({'|'.join(STAGES)}|report)/){FUNCTIONS.result_pattern}(?<![.]html)",


rule result_file:
    input:
        unpack(FUNCTIONS.result_of),
    output:
        "output/{result}/{file}",
    wildcard_constraints:
        result=FUNCTIONS.result_pattern,
        file=".+",
