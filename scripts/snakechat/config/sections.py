"""Keys of the config other than training settings: datasets, models, evaluation and others."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from snakechat.config.placement_schema import OtherPlacement
from snakechat.config.rlhf import WeightedModels
from snakechat.config.training_settings import Template
from snakechat.data.formats import FORMATS
from snakechat.workflow.value_types import (
    Count,
    EnvironmentVariable,
    Keyword,
    Name,
    NonNegative,
    Positive,
    Seed,
)

BadRowPolicy = Literal["fail", "skip"]
NonEmptyText = Annotated[str, Keyword("minLength", 1)]
PromptSets = Annotated[list[Name], Keyword("minItems", 1), Keyword("uniqueItems", True)]
Format = Annotated[str, Keyword("enum", list(FORMATS))]

# A variable of a chat template, apart from those that every rendering sets.
TemplateVariable = Annotated[
    str,
    Keyword(
        "pattern",
        "^(?!(messages|tools|documents|add_generation_prompt|[a-z]+_token)$)[A-Za-z_][A-Za-z0-9_]*$",
    ),
]
TemplateArguments = Annotated[
    dict[TemplateVariable, float | str | bool], Keyword("minProperties", 1)
]

# A repository on the Hugging Face Hub: NAME or OWNER/NAME.
HubName = Annotated[
    str, Keyword("pattern", "^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$")
]
# An identifier of the Hub or of SPDX.
License = Annotated[str, Keyword("pattern", r"^[A-Za-z0-9_.+-]+$")]
# Files of a supported type inside the source.
Glob = Annotated[
    str,
    Keyword("pattern", "[.](parquet|arrow|jsonl|jsonl[.]gz|json|csv|[*])([?]download=true)?$"),
    Keyword("not", {"pattern": "(^/)|(^|/)[.][.](/|$)"}),
]
# Specs are public: a user name, a password or a query in the address is an error.
Url = Annotated[str, Keyword("pattern", r"^https?://[^@?#/\s]+(/[^@?#\s]*)?$")]

# With path, hub is optional: it names what path is a copy of.
PATH_OR_HUB = Keyword("anyOf", [{"required": ["path"]}, {"required": ["hub"]}])


ColumnList = Annotated[list[NonEmptyText], Keyword("minItems", 1)]


class PhaseWeights(TypedDict):
    """Weight of each phase in the split of a dataset."""

    sft: NonNegative
    reward: NonNegative
    rlhf: NonNegative


SplitWeights = Annotated[
    PhaseWeights,
    Keyword(
        "anyOf",
        [{"properties": {phase: {"exclusiveMinimum": 0}}} for phase in ("sft", "reward", "rlhf")],
    ),
    Keyword("title", "weights of the phases"),
]

# The phases that share the rows equally.
PhaseList = Annotated[
    list[Literal["sft", "reward", "rlhf"]],
    Keyword("minItems", 1),
    Keyword("uniqueItems", True),
    Keyword("title", "a list of phases"),
]


class Split(TypedDict):
    """Split of the rows of a dataset among the phases."""

    weights: SplitWeights
    by: Literal["row", "prompt"]


class ExcludedFile(TypedDict):
    """A file with the digest of a row in each line."""

    file: NonEmptyText


class ExcludedPattern(TypedDict):
    """A regular expression that matches in a text of the rows."""

    pattern: Annotated[NonEmptyText, Keyword("format", "regex")]
    because: NonEmptyText


# Rows that are removed after the split.
Exclude = Annotated[
    list[
        Annotated[str, Keyword("pattern", "^[0-9a-f]{32}$"), Keyword("title", "a digest of a row")]
        | Annotated[ExcludedFile, Keyword("title", "a file of digests")]
        | Annotated[ExcludedPattern, Keyword("title", "a pattern with a reason")]
    ],
    Keyword("minItems", 1),
]


class SourceDataset(TypedDict):
    """A dataset of local files or of the Hub."""

    path: NotRequired[NonEmptyText]
    hub: NotRequired[HubName]
    revision: NotRequired[NonEmptyText]
    license: NotRequired[License]
    format: Format
    columns: NotRequired[dict[str, NonEmptyText | ColumnList]]
    keep: NotRequired[ColumnList | Annotated[dict[str, NonEmptyText], Keyword("minProperties", 1)]]
    remove: NotRequired[Annotated[NonEmptyText, Keyword("format", "regex")]]
    train: NotRequired[Glob]
    eval: NotRequired[Glob]
    follow_links: NotRequired[bool]
    on_bad_row: NotRequired[BadRowPolicy]
    split: NotRequired[SplitWeights | PhaseList]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


class GeneratedDataset(TypedDict):
    """A dataset that the pipeline generates."""

    generate: Literal["shop"]
    rows: Count
    eval_rows: Count
    seed: NotRequired[Seed]
    split: NotRequired[SplitWeights | PhaseList]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


class SelectedDataset(TypedDict):
    """A dataset of scored responses, which a recipe of `generations` generates."""

    generations: str
    select: Literal["best", "best_and_worst"]
    min_score: NotRequired[float]
    min_margin: NotRequired[NonNegative]
    split: NotRequired[SplitWeights | PhaseList]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


class LabelledDataset(TypedDict):
    """The pairs of another dataset (label), with the labels of an LLM judge."""

    label: str
    llm_judge: str
    split: NotRequired[SplitWeights | PhaseList]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


# The titles are for errors.
Dataset = (
    Annotated[
        SourceDataset,
        PATH_OR_HUB,
        Keyword("dependentRequired", {"eval": ["train"]}),
        Keyword("title", "a dataset with path or hub"),
    ]
    | Annotated[GeneratedDataset, Keyword("title", "a dataset with generate")]
    | Annotated[SelectedDataset, Keyword("title", "a dataset with generations")]
    | Annotated[LabelledDataset, Keyword("title", "a dataset with label")]
)


class TrainedTokenizer(TypedDict):
    """A byte-level BPE tokenizer that is trained on a dataset."""

    train_on: str
    vocab_size: Annotated[int, Keyword("minimum", 260)]


class CopiedTokenizer(TypedDict):
    """A tokenizer from a local folder."""

    path: str


class Architecture(TypedDict):
    """A transformers config; it takes any further key."""

    model_type: str


class PretrainedModel(TypedDict):
    """A base model of the Hub or of a local folder."""

    path: NotRequired[str]
    hub: NotRequired[HubName]
    revision: NotRequired[NonEmptyText]
    license: NotRequired[License]
    template: NotRequired[Template]
    template_arguments: NotRequired[TemplateArguments]
    prompt_sets: NotRequired[PromptSets]


class InitializedModel(TypedDict):
    """A base model with random weights."""

    init: Annotated[Architecture, Keyword("additionalProperties", True)]
    tokenizer: (
        Annotated[TrainedTokenizer, Keyword("title", "a tokenizer with train_on")]
        | Annotated[CopiedTokenizer, Keyword("title", "a tokenizer with path")]
    )
    template: NotRequired[Template]
    template_arguments: NotRequired[TemplateArguments]
    prompt_sets: NotRequired[PromptSets]


Model = (
    Annotated[PretrainedModel, PATH_OR_HUB, Keyword("title", "a model with path or hub")]
    | Annotated[InitializedModel, Keyword("title", "a model with init")]
)

SweepValues = Annotated[
    list[float | str | bool], Keyword("minItems", 1), Keyword("uniqueItems", True)
]


class Sweep(TypedDict):
    """Recipes that differ in some settings."""

    stage: Literal["sft", "reward", "dpo", "rlhf"]
    recipe: str
    over: Annotated[dict[str, SweepValues], Keyword("minProperties", 1)]


class Gate(TypedDict):
    """Bounds of a metric of the evaluation."""

    metric: NonEmptyText
    min: NotRequired[float]
    max: NotRequired[float]


class TrainingKeys(TypedDict):
    """Keys of recipes of all stages that train; training does not use them."""

    gate: Annotated[Gate, Keyword("anyOf", [{"required": ["min"]}, {"required": ["max"]}])] | None
    preset: str | None


class RlhfKeys(TypedDict):
    """Keys of rlhf recipes that training does not use; `placement` is one of every recipe."""

    judge: str | WeightedModels | None
    compare_with: list[
        Annotated[str, Keyword("pattern", "^(sft|dpo|rlhf)/[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    ]


class LlmJudge(TypedDict):
    """A model behind an OpenAI-compatible endpoint that rates and compares responses."""

    url: Url
    model: NonEmptyText
    rubric: NonEmptyText
    scale: NotRequired[tuple[float, float]]
    parameters: NotRequired[dict[str, Any]]
    key_env: NotRequired[EnvironmentVariable]
    requests_per_minute: NotRequired[Positive]
    concurrency: NotRequired[Count]


class Evaluation(TypedDict):
    """Comparison of chat models."""

    num_prompts: Count
    num_generations: Count
    temperature: Positive
    bootstrap_resamples: Annotated[int, Keyword("minimum", 100)]
    llm_judge: str | None
    llm_judge_prompts: Count


class PromptEval(TypedDict):
    """Responses to prompt sets, side by side."""

    max_response_length: Count
    temperature: Positive
    num_beams: Annotated[int, Keyword("minimum", 2)]


class ZeroComparison(TypedDict):
    """Comparison of ZeRO stages."""

    steps: Count


class Sections(TypedDict):
    """The top level of the config, without the stages."""

    seed: Seed
    template: Template
    deterministic: bool
    on_bad_row: BadRowPolicy
    save_steps: Count
    shared_store: str | None
    store_max_size: Annotated[str, Keyword("pattern", r"^\d+(\.\d+)?[KMGT]$")] | None
    language: Literal["en", "zh"]
    container: NonEmptyText | None
    prompt_sets: PromptSets
    deployments: dict[Name, OtherPlacement]
    deployment: str | None
    split: Split
    datasets: dict[Name, Dataset]
    models: dict[Name, Model]
    llm_judges: dict[Name, LlmJudge]
    sweeps: dict[Name, Sweep]
    evaluation: Evaluation
    prompt_eval: PromptEval
    zero: ZeroComparison
