# Responses of a model to the prompts of datasets: generated, scored, selected as a dataset.


use rule job as tokenize_generations with:
    input:
        unpack(inputs("tokenize_generations")),
    output:
        "output/tokens/generations/{name}.manifest.json",
    log:
        "output/logs/tokenize_generations/{name}.log",
    message:
        "Tokenizing the prompts of generations {wildcards.name}"


use rule job as generate_responses with:
    input:
        unpack(inputs("generate_responses", tokens="output/tokens/generations/{name}")),
    output:
        "output/generations/{name}.manifest.json",
    log:
        "output/logs/generate_responses/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Generating responses {wildcards.name}"


use rule job as score_responses with:
    input:
        unpack(inputs("score_responses", responses="output/generations/{name}")),
    output:
        "output/scores/{name}.manifest.json",
    log:
        "output/logs/score_responses/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Scoring responses {wildcards.name}"


use rule job as select_responses with:
    input:
        unpack(inputs("select_responses")),
    output:
        "output/data/{name}.manifest.json",
    log:
        "output/logs/select_responses/{name}.log",
    wildcard_constraints:
        name=entries_with("datasets", "generations"),
    message:
        "Selecting responses for dataset {wildcards.name}"
