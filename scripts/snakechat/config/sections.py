"""Sections of the config: placement, recipes, judges, benchmarks, evaluation."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, GetPydanticSchema, StringConstraints
from pydantic.json_schema import SkipJsonSchema

from snakechat.config.data_sections import BadRowPolicy, Dataset, Model, PromptSets, Split
from snakechat.config.rlhf import GenerationSettings, Reward, RlhfSettings
from snakechat.config.settings import (
    ABSENT,
    IS_NUMBER,
    NAME_END,
    Count,
    DpoSettings,
    JsonValue,
    Name,
    NonEmptyText,
    NonNegativeInt,
    Number,
    Positive,
    PreferenceSettings,
    ReadIf,
    RefersTo,
    RewardSettings,
    Seed,
    Settings,
    SftSettings,
    Template,
    only_with,
)

# The name of a variable that a placement sets, or that has the key of a judge.
EnvironmentVariable = Annotated[
    str, StringConstraints(pattern=r"(?#letters, digits and '_')^[A-Za-z_][A-Za-z0-9_]*\Z")
]


def _check_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    for key in parameters.keys() & SET_BY_CLIENT:
        raise ValueError(f"{key} is set by Snakechat, which reads one reply: remove it")
    # JSON has one kind of number: 0 and 0.0 are the same request.
    return json.loads(json.dumps(parameters), parse_float=_as_number)


def _as_number(text: str) -> float:
    return int(number) if (number := float(text)).is_integer() else number


# Fields of requests to an LLM judge that the client sets, or whose replies it does not read.
SET_BY_CLIENT = {
    *("messages", "model", "n", "stream", "stream_options", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "functions", "function_call", "modalities", "audio"),
}


SweepValues = Annotated[list[int | float | str | bool], Field(min_length=1)]


class Sweep(Settings):
    """Recipes that differ in some settings."""

    stage: Literal["sft", "reward", "dpo", "rlhf"]
    recipe: str
    over: Annotated[dict[str, SweepValues], Field(min_length=1)]


class Gate(Settings):
    """Bounds of a metric of the evaluation."""

    metric: NonEmptyText
    min: Number = ABSENT
    max: Number = ABSENT

    def problems(self) -> dict[str, bool]:
        return {
            "expected min or max": self.min is None and self.max is None,
            "expected min below max": None not in (self.min, self.max) and self.min > self.max,
        }


# Where a cluster runs jobs; snakechat.jobs.rules has the names of Snakemake's plugin.
SlurmKey = Literal["partition", "account", "qos", "constraint", "gpu_type"]


class PlacementKeys(Settings):
    """Keys of a deployment, which a recipe may change (snakechat.workflow.processes)."""

    nodes: Count = ABSENT
    gpus_per_node: NonNegativeInt = ABSENT
    zero_stage: Annotated[Literal["auto", 0, 1, 2, 3], IS_NUMBER] = ABSENT
    offload: Literal["none", "optimizer", "parameters"] = ABSENT
    activation_checkpointing: Literal["auto"] | bool = ABSENT
    micro_batch_tokens: Literal["auto"] | Count = ABSENT
    threads: Count = ABSENT
    mem_mb: Count = ABSENT
    runtime: Count = ABSENT
    generate_tokens: Count | None = ABSENT
    cuda_graphs: bool | None = ABSENT
    attn_implementation: Literal["auto", "sdpa"] = ABSENT
    compile: bool | None = ABSENT
    vllm_tensor_parallel_size: Annotated[Count, only_with("generation_backend", "vllm")] = ABSENT
    environment: dict[EnvironmentVariable, str] | None = ABSENT
    critic_zero_stage: Annotated[Literal[0, 1, 2, 3] | None, only_with("algorithm", "ppo")] = ABSENT
    offload_frozen: Annotated[bool, ReadIf(lambda s: "algorithm" in s, "outside of rlhf")] = ABSENT
    max_mem_mb: Count | None = ABSENT
    slurm: dict[SlurmKey, str] | None = ABSENT


# A deployment has values for these, which have no defaults.
REQUIRED = tuple(PlacementKeys.model_fields)[:9]
# DeepSpeed offloads only what ZeRO partitions.
STAGES_OF_OFFLOAD: dict[str, tuple[int | str, ...]] = {
    "none": ("auto", 0, 1, 2, 3),
    "optimizer": (1, 2, 3, "auto"),
    "parameters": (3,),
}


class Deployment(PlacementKeys):
    """Named hardware, and how jobs use it."""

    def problems(self) -> dict[str, bool]:
        return {f"{key}: this key is required": getattr(self, key) is None for key in REQUIRED}


class RecipePlacement(Deployment):
    """The placement of a recipe: a deployment with the recipe's own keys."""

    def problems(self) -> dict[str, bool]:
        problems, allowed = super().problems(), STAGES_OF_OFFLOAD[self.offload]
        for key in ("zero_stage", "critic_zero_stage"):
            stage, offload = getattr(self, key), f"offload: {self.offload}"
            # critic_zero_stage defaults to zero_stage.
            problems |= {
                f"{key}: {stage} cannot be combined with {offload}: set {key}: {allowed[0]}": (
                    stage not in (None, *allowed)
                ),
                # ZeRO 3 gathers the weights of a layer while it runs.
                f"compile: true needs {key}: 0, 1 or 2, not 3: set compile: false": (
                    bool(self.compile) and stage == 3
                ),
            }
        size, gpus = self.vllm_tensor_parallel_size or 1, self.gpus_per_node
        return problems | {
            f"max_mem_mb: {self.max_mem_mb} is less than mem_mb ({self.mem_mb})": (
                (self.max_mem_mb or self.mem_mb) < self.mem_mb
            ),
            f"vllm_tensor_parallel_size: {size} does not divide the {gpus} GPUs of a node"
            " (gpus_per_node): set a divisor": gpus % size > 0,
        }


class PlacementChanges(PlacementKeys):
    """A deployment, and keys that a recipe changes."""

    deployment: str = ABSENT


def _named_weights(
    entries: list[str | dict[str, float] | tuple[str, float]],
) -> list[tuple[str, float]]:
    """Return the name and the weight of each dataset; the weight defaults to 1."""
    named = ({entry: 1.0} if isinstance(entry, str) else entry for entry in entries)
    pairs = [
        pair for each in named for pair in (each.items() if isinstance(each, dict) else [each])
    ]
    if len(pairs) > len(dict(pairs)):
        raise ValueError("names a dataset twice: use a weight")
    return pairs


# A dataset is its name, or {name: weight}; after the check, the name and the weight.
WeightedDataset = Annotated[dict[str, Positive], Field(min_length=1, max_length=1)]
DatasetList = Annotated[
    list[str | WeightedDataset | SkipJsonSchema[tuple[str, Positive]]],
    Field(min_length=1),
    AfterValidator(_named_weights),
]


WITH_COMMAND = only_with("command")
# Settings of recipes that describe data and evaluations, which recipes with a command have too.
READ_WITH_COMMAND = {
    *("seed", "datasets", "model", "actor", "reward", "reward_functions", "dtype", "train_on"),
    *("max_length", "max_prompt_length", "max_response_length", "judge", "compare_with"),
    "evaluation",
    # The loss by which pairs are evaluated.
    *PreferenceSettings.model_fields,
}


class CommandKeys(Settings):
    """A command, and what it reads besides its inputs."""

    command: NonEmptyText = ABSENT
    # An interpreter of Python; by default, the build's.
    python: Annotated[NonEmptyText, WITH_COMMAND] = ABSENT
    files: Annotated[list[NonEmptyText], Field(min_length=1), WITH_COMMAND] = ABSENT
    lock: Annotated[NonEmptyText, WITH_COMMAND] = ABSENT
    network: Annotated[bool, WITH_COMMAND] = ABSENT


class RecipeKeys(Settings):
    """Keys of all recipes that programs do not receive as settings."""

    # Fields of settings that models and judges determine.
    not_keys: ClassVar = ("reward_templates", "llm_judges")

    datasets: Annotated[
        list[tuple[str, float]], GetPydanticSchema(lambda _, handler: handler(DatasetList))
    ]
    # The name of a deployment, or keys that change one.
    placement: str | PlacementChanges = ABSENT


class TrainingKeys(RecipeKeys, CommandKeys):
    """Keys of recipes of all stages that train; training does not use them."""

    gate: Gate | None = ABSENT
    preset: str | None = ABSENT
    benchmarks: Annotated[list[str], RefersTo((), "benchmarks")]

    @classmethod
    def without_effect(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return the keys that nothing reads. A command reads no setting of our trainers."""
        unread = super().without_effect(settings)
        if settings.get("command"):
            read = READ_WITH_COMMAND | TrainingKeys.model_fields.keys()
            others = cls.model_fields.keys() - read
            unread |= dict.fromkeys(others, "with a command, which does not receive it")
        return unread


class SftRecipe(SftSettings, TrainingKeys):
    """A recipe of SFT."""

    model: Annotated[str, RefersTo(("models",), plain="models")]


class RewardRecipe(RewardSettings, TrainingKeys):
    """A recipe of a reward model."""

    model: Annotated[str, RefersTo(("sft", "models"), plain="models")]


class DpoRecipe(DpoSettings, TrainingKeys):
    """A recipe of DPO."""

    model: Annotated[str, RefersTo(("sft", "dpo", "models"), plain="models")]


class SampledEvaluation(Settings):
    """How a recipe samples responses in its evaluation, where it differs from `evaluation`."""

    num_prompts: Count = ABSENT
    num_generations: Count = ABSENT
    temperature: Positive = ABSENT
    # Defaults to the recipe's.
    max_response_length: Count = ABSENT


class RlhfRecipe(RlhfSettings, TrainingKeys):
    """A recipe of RLHF."""

    actor: Annotated[str, RefersTo(("sft", "dpo", "models"))]
    # With `distill` alone.
    teacher: Annotated[str | None, RefersTo(("sft", "dpo", "rlhf", "models"))]
    ptx: Annotated[str | None, RefersTo((), plain="sft")]
    evaluation: SampledEvaluation = ABSENT
    judge: Reward
    compare_with: Annotated[list[str], RefersTo(("sft", "dpo", "rlhf"))]

    def problems(self) -> dict[str, bool]:
        return super().problems() | {
            f"teacher: {self.teacher} does not fit algorithm: {self.algorithm}: distill needs a"
            " teacher, and no other algorithm has one": (
                (self.algorithm == "distill") != (self.teacher is not None)
            )
        }


class GenerationRecipe(GenerationSettings, RecipeKeys):
    """A recipe of generated responses."""

    model: Annotated[str, RefersTo(("sft", "dpo", "rlhf", "models"), plain="models")]


# metrics.json of a benchmark has two keys besides its metrics.
MetricName = Annotated[
    str,
    StringConstraints(
        pattern=r"(?#a name as recipes have, other than items and intervals_95)"
        rf"^(?!(items|intervals_95)\Z)[A-Za-z0-9][A-Za-z0-9_.-]{{0,199}}{NAME_END}\Z"
    ),
]
# A glob of files in {output}, and the keys that lead to a number or to a list of numbers.
MetricPath = Annotated[list[NonEmptyText | NonNegativeInt], Field(min_length=1)]


class Benchmark(CommandKeys):
    """A command that measures a model."""

    command: NonEmptyText
    metrics: Annotated[dict[MetricName, MetricPath], Field(min_length=1)]
    placement: str | PlacementChanges = ABSENT


class LlmJudge(Settings):
    """A model behind an OpenAI-compatible endpoint that rates and compares responses.

    What it is asked determines results and is part of specs; where and how fast it is asked is not.
    """

    model: NonEmptyText
    rubric: Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
    scale: list[Number] = Field([1.0, 10.0], min_length=2, max_length=2)
    parameters: Annotated[dict[str, JsonValue], AfterValidator(_check_parameters)] = Field(
        {"temperature": 0}
    )

    # Records of runs have it and are public: a user name, a password or a query is an error.
    url: Annotated[
        str,
        StringConstraints(
            pattern=r"(?#http://HOST/PATH or https://HOST/PATH)^https?://[^@?#/\s]+(/[^@?#\s]*)?\Z"
        ),
    ]
    key_env: EnvironmentVariable = ABSENT
    requests_per_minute: Positive = ABSENT
    concurrency: Count = 8

    def problems(self) -> dict[str, bool]:
        low, high = self.scale
        return {
            "scale: expected the lowest rating before the highest one, found"
            f" [{low:g}, {high:g}]": low >= high
        }


# The keys of access to a judge.
ACCESS = {"url", "key_env", "requests_per_minute", "concurrency"}
# Judges by name.
Judges = Mapping[str, Mapping[str, Any]]


def judge_settings(judges: Judges, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of judges as specs have them, by name."""
    return {name: LlmJudge(**judges[name]).model_dump(exclude=ACCESS) for name in names}


def judge_access(judges: Judges, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return where and how judges are asked, by name: an option of a run."""
    return {name: LlmJudge(**judges[name]).model_dump(include=ACCESS) for name in names}


class Evaluation(Settings):
    """Comparison of chat models."""

    num_prompts: Count
    num_generations: Count
    temperature: Positive
    llm_judge: str | None
    llm_judge_prompts: Annotated[Count, only_with("llm_judge")]


class PromptEval(Settings):
    """Responses to prompt sets, side by side."""

    max_response_length: Count
    temperature: Positive


# Keys of a recipe, which are checked together with its preset and the defaults.
Keys = dict[str, JsonValue]


class Generations(Settings):
    """The section of generated responses."""

    defaults: Keys
    recipes: dict[Name, Keys]


class Stage(Generations):
    """The section of a stage that trains."""

    presets: dict[Name, Keys]


class Sections(Settings):
    """The config."""

    seed: Seed
    template: Template
    deterministic: bool
    on_bad_row: BadRowPolicy
    save_steps: Count
    hermetic: Literal["auto", "require", "off"]
    store: NonEmptyText
    store_max_size: (
        Annotated[str, StringConstraints(pattern=r"(?#a size such as 500G)^\d+(\.\d+)?[KMGT]\Z")]
        | None
    )
    language: Literal["en", "zh"]
    container: NonEmptyText | None
    prompt_sets: PromptSets
    deployments: dict[Name, Deployment]
    deployment: str | None
    split: Split
    datasets: dict[Name, Dataset]
    models: dict[Name, Model]
    sft: Stage
    reward: Stage
    dpo: Stage
    rlhf: Stage
    generations: Generations
    llm_judges: dict[Name, LlmJudge]
    benchmarks: dict[Name, Benchmark]
    sweeps: dict[Name, Sweep]
    logs: dict[Name, NonEmptyText]
    evaluation: Evaluation
    prompt_eval: PromptEval
