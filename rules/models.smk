# Base models: fetched from the hub or a local folder, or initialized from a config.


use rule job as fetch_model with:
    input:
        unpack(inputs("fetch_model")),
    output:
        "output/models/{name}.manifest.json",
    log:
        "output/logs/fetch_model/{name}.log",
    wildcard_constraints:
        name=entries_with("models", "hub", "path"),
    resources:
        # The weights are copied without loading them.
        mem_mb=8000,
    message:
        "Fetching model {wildcards.name}"


use rule job as init_model with:
    input:
        unpack(inputs("init_model")),
    output:
        "output/models/{name}.manifest.json",
    log:
        "output/logs/init_model/{name}.log",
    wildcard_constraints:
        name=entries_with("models", "init"),
    message:
        "Initializing model {wildcards.name} from its config"
