# Responses of a model to the prompts of datasets: generated, scored, selected as a dataset.


SPECS.describe(
    "tokenize_generations",
    folder="tokens/generations",
    program="tokenize_phase",
    settings=lambda name: tokenization_settings(CONFIG, "generations", name, "max_prompt_length"),
    inputs=lambda name: tokenization_inputs(CONFIG, "generations", name),
)
SPECS.describe(
    "generate_responses",
    folder="generations",
    settings=lambda name: sampling_settings(CONFIG, name),
    inputs=lambda name: generation_inputs(CONFIG, name),
    runs_models=True,
)
SPECS.describe(
    "score_responses",
    folder="scores",
    settings=lambda name: CONFIG.program_settings("generations", name),
    inputs=lambda name: scoring_inputs(CONFIG, name),
    runs_models=True,
)
SPECS.describe(
    "select_responses",
    folder="data",
    settings=lambda name: selection_settings(CONFIG, name),
    inputs=lambda name: selection_inputs(CONFIG, name),
)


use rule tokenize_sft as tokenize_generations with:
    input:
        unpack(inputs("tokenize_generations")),
    output:
        "output/tokens/generations/{name}.manifest.json",
    log:
        "output/logs/tokenize_generations/{name}.log",
    threads: threads_of("generations")
    message:
        "Tokenizing the prompts of generations {wildcards.name}"


use rule train_sft as generate_responses with:
    input:
        unpack(inputs("generate_responses")),
    output:
        "output/generations/{name}.manifest.json",
    log:
        "output/logs/generate_responses/{name}.log",
    threads: threads_of("generations")
    resources:
        **resources_of("generations"),
    params:
        spec=spec_file,
        program=program("generate_responses"),
        placement=placement_json("generations"),
    message:
        "Generating responses {wildcards.name}"


use rule train_sft as score_responses with:
    input:
        unpack(inputs("score_responses")),
    output:
        "output/scores/{name}.manifest.json",
    log:
        "output/logs/score_responses/{name}.log",
    threads: threads_of("generations", work="evaluation")
    resources:
        **resources_of("generations", work="evaluation"),
    params:
        spec=spec_file,
        program=program("score_responses"),
        placement=placement_json("generations", work="evaluation"),
    message:
        "Scoring responses {wildcards.name}"


use rule import_dataset as select_responses with:
    input:
        unpack(inputs("select_responses")),
    log:
        "output/logs/select_responses/{name}.log",
    wildcard_constraints:
        name=entries_with("datasets", "generations"),
    params:
        spec=spec_file,
        program=program("select_responses"),
        placement=COMMON_PLACEMENT_JSON,
    message:
        "Selecting responses for dataset {wildcards.name}"
