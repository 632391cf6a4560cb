# Responses of a model to the prompts of datasets: generated, scored, selected as a dataset.


use rule tokenize_sft as tokenize_generations with:
    input:
        unpack(inputs("tokenize_generations")),
    output:
        "output/tokens/generations/{name}.manifest.json",
    log:
        "output/logs/tokenize_generations/{name}.log",
    threads: threads_of("tokenize_generations")
    params:
        **params_of("tokenize_generations"),
    message:
        "Tokenizing the prompts of generations {wildcards.name}"


use rule train_sft as generate_responses with:
    input:
        unpack(inputs("generate_responses")),
    output:
        "output/generations/{name}.manifest.json",
    log:
        "output/logs/generate_responses/{name}.log",
    threads: threads_of("generate_responses")
    resources:
        **resources_of("generate_responses"),
    params:
        **params_of("generate_responses"),
    message:
        "Generating responses {wildcards.name}"


use rule train_sft as score_responses with:
    input:
        unpack(inputs("score_responses")),
    output:
        "output/scores/{name}.manifest.json",
    log:
        "output/logs/score_responses/{name}.log",
    threads: threads_of("score_responses")
    resources:
        **resources_of("score_responses"),
    params:
        **params_of("score_responses"),
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
        **params_of("select_responses"),
    message:
        "Selecting responses for dataset {wildcards.name}"
