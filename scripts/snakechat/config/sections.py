"""Keys of the config other than training settings: datasets, models, evaluation and others."""

import math
import re
from typing import Annotated, Any, Literal, NotRequired, Union

from pydantic import AfterValidator, ConfigDict, Discriminator, Tag, with_config
from typing_extensions import TypedDict

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
    Written,
)


def _one_of(*keys: str) -> AfterValidator:
    """Return the check that a mapping has at least one of some keys."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        if not values.keys() & {*keys}:
            raise ValueError(f"expected {' or '.join(keys)}")
        return values

    return AfterValidator(check)


def _form_by_key(forms: dict[str, Any]) -> Written:
    """Return the type of mappings of several forms, each with a key that the others do not have.

    Errors are those of this form. Without any of the keys, the form is the first one.
    """

    def form(values: Any) -> str:
        found = [key for key in forms if isinstance(values, dict) and key in values]
        return f"with {[*found, *forms][0]}"

    tagged = [Annotated[each, Tag(f"with {key}")] for key, each in forms.items()]
    return Written(Annotated[Union[tuple(tagged)], Discriminator(form)])  # noqa: UP007


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error})") from None
    return text


def _check_scale(scale: list[float]) -> list[float]:
    if scale[0] >= scale[1]:
        raise ValueError("expected the lowest rating before the highest one")
    return scale


def _check_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    for key in SET_BY_CLIENT:
        if key in parameters:
            raise ValueError(f"{key} is set by Snakechat, which reads one reply: remove it")
    # JSON has one kind of number: 0 and 0.0 are the same request.
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in parameters.items()
    }


def _check_bounds(gate: dict[str, Any]) -> dict[str, Any]:
    if gate.get("min", -math.inf) > gate.get("max", math.inf):
        raise ValueError("expected min below max")
    return gate


def _check_selection(dataset: dict[str, Any]) -> dict[str, Any]:
    if dataset.get("select") == "best" and "min_margin" in dataset:
        raise ValueError(
            "min_margin has no effect with select: best, only with best_and_worst: remove it"
        )
    return dataset


# Fields of requests to an LLM judge that the client sets, or whose replies it does not read.
SET_BY_CLIENT = (
    *("messages", "model", "n", "stream", "stream_options", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "functions", "function_call", "modalities", "audio"),
)
BadRowPolicy = Literal["fail", "skip"]
NonEmptyText = Annotated[str, Keyword("min_length", 1)]
Regex = Annotated[NonEmptyText, AfterValidator(_check_regex)]
PromptSets = Annotated[list[Name], Keyword("min_length", 1)]
Format = Annotated[str, Written(Literal[tuple(FORMATS)])]

# A variable of a chat template, apart from those that every rendering sets.
TemplateVariable = Annotated[
    str,
    Keyword(
        "pattern",
        r"^(?!(messages|tools|documents|add_generation_prompt|[a-z]+_token)\Z)[A-Za-z_]\w*\Z",
    ),
]
TemplateArguments = Annotated[
    dict[TemplateVariable, int | float | str | bool], Keyword("min_length", 1)
]

# A repository on the Hugging Face Hub: NAME or OWNER/NAME.
HubName = Annotated[
    str, Keyword("pattern", r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?\Z")
]
# An identifier of the Hub or of SPDX.
License = Annotated[str, Keyword("pattern", r"^[A-Za-z0-9_.+-]+\Z")]
# Files inside the source.
Glob = Annotated[str, Keyword("pattern", r"^(?!/|(.*/)?[.][.](/|\Z)).+\Z")]
# Specs are public: a user name, a password or a query in the address is an error.
Url = Annotated[str, Keyword("pattern", r"^https?://[^@?#/\s]+(/[^@?#\s]*)?\Z")]

ColumnList = Annotated[list[NonEmptyText], Keyword("min_length", 1)]


class PhaseWeights(TypedDict):
    """Weight of each phase in the split of a dataset."""

    sft: NonNegative
    reward: NonNegative
    rlhf: NonNegative


# The phases that share the rows equally.
PhaseList = Annotated[list[Literal["sft", "reward", "rlhf"]], Keyword("min_length", 1)]


class NamedSplits(TypedDict):
    """The splits of the source that are train and eval, and the phases that have their rows."""

    train: NotRequired[NonEmptyText]
    eval: NotRequired[NonEmptyText]
    phases: NotRequired[PhaseWeights | PhaseList]


class Split(TypedDict):
    """Split of the rows of a dataset among the phases."""

    weights: PhaseWeights
    by: Literal["row", "prompt"]


# Digests of rows that are removed after the split.
Exclude = Annotated[
    list[Annotated[str, Keyword("pattern", r"^[0-9a-f]{32}\Z")]], Keyword("min_length", 1)
]


class SourceDataset(TypedDict):
    """A dataset of local files or of the Hub."""

    path: NotRequired[NonEmptyText]
    hub: NotRequired[HubName]
    revision: NotRequired[NonEmptyText]
    license: NotRequired[License]
    format: Format
    columns: NotRequired[dict[str, NonEmptyText | ColumnList]]
    keep: NotRequired[ColumnList | Annotated[dict[str, NonEmptyText], Keyword("min_length", 1)]]
    remove: NotRequired[Regex]
    name: NotRequired[NonEmptyText]
    train: NotRequired[Glob]
    eval: NotRequired[Glob]
    on_bad_row: NotRequired[BadRowPolicy]
    split: NotRequired[PhaseWeights | PhaseList | NamedSplits]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


class GeneratedDataset(TypedDict):
    """A dataset that the pipeline generates."""

    generate: Literal["shop"]
    rows: Count
    eval_rows: Count
    seed: NotRequired[Seed]
    split: NotRequired[PhaseWeights | PhaseList]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


class SelectedDataset(TypedDict):
    """A dataset of scored responses, which a recipe of `generations` generates."""

    generations: str
    select: Literal["best", "best_and_worst"]
    min_score: NotRequired[float]
    min_margin: NotRequired[NonNegative]
    split: NotRequired[PhaseWeights | PhaseList]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


class LabelledDataset(TypedDict):
    """The pairs of another dataset (label), with the labels of an LLM judge."""

    label: str
    llm_judge: str
    split: NotRequired[PhaseWeights | PhaseList]
    max_rows: NotRequired[Count]
    exclude: NotRequired[Exclude]


def _check_eval_glob(values: dict[str, Any]) -> dict[str, Any]:
    if "eval" in values and "train" not in values:
        raise ValueError("eval needs train, the glob of the other files")
    split = values.get("split")
    if "train" in values and ("name" in values or (split and {"train", "eval"} & {*split})):
        raise ValueError("train selects files by a glob: remove name, and train and eval of split")
    return values


# With path, hub is optional: it names what path is a copy of.
Dataset = Annotated[
    dict[str, Any],
    _form_by_key(
        {
            "path": Annotated[
                SourceDataset, _one_of("path", "hub"), AfterValidator(_check_eval_glob)
            ],
            "generate": GeneratedDataset,
            "generations": Annotated[SelectedDataset, AfterValidator(_check_selection)],
            "label": LabelledDataset,
        }
    ),
]


class TrainedTokenizer(TypedDict):
    """A byte-level BPE tokenizer that is trained on a dataset."""

    train_on: str
    vocab_size: Annotated[int, Keyword("ge", 260)]


class CopiedTokenizer(TypedDict):
    """A tokenizer from a local folder."""

    path: str


@with_config(ConfigDict(extra="allow"))
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

    init: Architecture
    tokenizer: Annotated[
        dict[str, Any], _form_by_key({"train_on": TrainedTokenizer, "path": CopiedTokenizer})
    ]
    template: NotRequired[Template]
    template_arguments: NotRequired[TemplateArguments]
    prompt_sets: NotRequired[PromptSets]


Model = Annotated[
    dict[str, Any],
    _form_by_key(
        {"path": Annotated[PretrainedModel, _one_of("path", "hub")], "init": InitializedModel}
    ),
]

SweepValues = Annotated[list[int | float | str | bool], Keyword("min_length", 1)]


class Sweep(TypedDict):
    """Recipes that differ in some settings."""

    stage: Literal["sft", "reward", "dpo", "rlhf"]
    recipe: str
    over: Annotated[dict[str, SweepValues], Keyword("min_length", 1)]


class Gate(TypedDict):
    """Bounds of a metric of the evaluation."""

    metric: NonEmptyText
    min: NotRequired[float]
    max: NotRequired[float]


class TrainingKeys(TypedDict):
    """Keys of recipes of all stages that train; training does not use them."""

    gate: Annotated[Gate, _one_of("min", "max"), AfterValidator(_check_bounds)] | None
    preset: str | None


class RlhfKeys(TypedDict):
    """Keys of rlhf recipes that training does not use; `placement` is one of every recipe."""

    judge: str | WeightedModels | None
    compare_with: list[
        Annotated[str, Keyword("pattern", r"^(sft|dpo|rlhf)/[A-Za-z0-9][A-Za-z0-9_.-]*\Z")]
    ]


class LlmJudge(TypedDict):
    """A model behind an OpenAI-compatible endpoint that rates and compares responses."""

    url: Url
    model: NonEmptyText
    rubric: NonEmptyText
    scale: NotRequired[
        Annotated[
            list[float],
            Keyword("min_length", 2),
            Keyword("max_length", 2),
            AfterValidator(_check_scale),
        ]
    ]
    parameters: NotRequired[Annotated[dict[str, Any], AfterValidator(_check_parameters)]]
    key_env: NotRequired[EnvironmentVariable]
    requests_per_minute: NotRequired[Positive]
    concurrency: NotRequired[Count]


class Evaluation(TypedDict):
    """Comparison of chat models."""

    num_prompts: Count
    num_generations: Count
    temperature: Positive
    llm_judge: str | None
    llm_judge_prompts: Count


class PromptEval(TypedDict):
    """Responses to prompt sets, side by side."""

    max_response_length: Count
    temperature: Positive


class Sections(TypedDict):
    """The top level of the config, without the deployments and the stages."""

    seed: Seed
    template: Template
    deterministic: bool
    on_bad_row: BadRowPolicy
    save_steps: Count
    store: NonEmptyText
    store_max_size: Annotated[str, Keyword("pattern", r"^\d+(\.\d+)?[KMGT]\Z")] | None
    language: Literal["en", "zh"]
    container: NonEmptyText | None
    prompt_sets: PromptSets
    deployment: str | None
    split: Split
    datasets: dict[Name, Dataset]
    models: dict[Name, Model]
    llm_judges: dict[Name, LlmJudge]
    sweeps: dict[Name, Sweep]
    evaluation: Evaluation
    prompt_eval: PromptEval
