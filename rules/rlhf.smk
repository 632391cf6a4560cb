# Reinforcement learning from the reward model's scores.


@job("tokenize_rlhf", folder="tokens/rlhf")
def describe_tokenize_rlhf(name):
    settings = recipe("rlhf", name)
    return {
        "settings": {key: settings[key] for key in ("datasets", "max_prompt_length")},
        "inputs": {"tokenizer": tokenizer_model("rlhf", name), **phase_inputs("rlhf", name)},
    }


@job("train_rlhf", folder="rlhf")
def describe_train_rlhf(name):
    settings = recipe("rlhf", name)
    return {
        "settings": science(settings),
        "inputs": {
            "actor": ("train_sft", settings["actor"]),
            "reward": ("train_reward", settings["reward"]),
            "tokens": ("tokenize_rlhf", name),
        },
    }


def exact_check(name):
    """The generator of a recipe's only dataset, which can tell right answers exactly, or None."""
    datasets = recipe("rlhf", name)["datasets"]
    return config["datasets"][datasets[0]].get("generate") if len(datasets) == 1 else None


@job("evaluate_rlhf", folder="eval/rlhf")
def describe_evaluate_rlhf(name):
    settings = recipe("rlhf", name)
    return {
        "settings": {
            "seed": config["seed"],
            "max_response_length": settings["max_response_length"],
            "exact_check": exact_check(name),
            **config["evaluate"],
        },
        "inputs": {
            "sft": ("train_sft", settings["actor"]),
            "rlhf": ("train_rlhf", name),
            "reward": ("train_reward", settings["reward"]),
            "tokens": ("tokenize_rlhf", name),
        },
    }


rule tokenize_rlhf:
    message:
        "Tokenizing the RLHF prompts for {wildcards.name}"
    input:
        unpack(inputs("tokenize_rlhf")),
    output:
        "output/tokens/rlhf/{name}.manifest.json",
    log:
        "output/logs/tokenize_rlhf/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/tokenize_rlhf.py --spec {input.spec} 2>&1 | tee {log}"


rule train_rlhf:
    message:
        "Training {wildcards.name} by PPO"
    input:
        unpack(inputs("train_rlhf")),
    output:
        "output/rlhf/{name}.manifest.json",
    params:
        placement=placement_json("rlhf"),
    log:
        "output/logs/train_rlhf/{name}.log",
    threads: placement("rlhf", "threads")
    resources:
        gpu=gpus("rlhf"),
        mem_mb=placement("rlhf", "mem_mb"),
        runtime=placement("rlhf", "runtime"),
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/train_rlhf.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"


rule evaluate_rlhf:
    message:
        "Evaluating chat model {wildcards.name}"
    input:
        unpack(inputs("evaluate_rlhf")),
    output:
        "output/eval/rlhf/{name}.manifest.json",
    params:
        placement=placement_json("rlhf"),
    log:
        "output/logs/evaluate_rlhf/{name}.log",
    threads: placement("rlhf", "threads")
    resources:
        gpu=gpus("rlhf"),
        mem_mb=placement("rlhf", "mem_mb"),
        runtime=placement("rlhf", "runtime"),
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/evaluate_rlhf.py --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | tee {log}"


rule rlhf:
    input:
        ancient("output/rlhf/{name}.manifest.json"),
        ancient("output/eval/rlhf/{name}.manifest.json"),
        ancient("output/report/{name}"),
    output:
        directory("output/rlhf/{name}"),
