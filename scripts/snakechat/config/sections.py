"""Keys of the config other than training settings: datasets, models, placement, evaluation."""

import re
from typing import Annotated, Any, Literal, Self, Union

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    HttpUrl,
    StringConstraints,
    Tag,
    model_validator,
)

from snakechat.config.references import Reward
from snakechat.config.settings import (
    ABSENT,
    IS_NUMBER,
    Count,
    Name,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    Seed,
    Settings,
)
from snakechat.config.training_settings import Template
from snakechat.data.formats import FORMATS, has_dialogues


def _form_by_key(**forms: Any) -> Any:
    """Return the type of mappings of several forms, each with a key that the others do not have.

    Errors are about this form. Without any of the keys, it is the first one.
    """

    def form(values: Any) -> str:
        keys = values.model_fields_set if isinstance(values, Settings) else values
        found = [key for key in forms if isinstance(keys, dict | set) and key in keys]
        return f"with {[*found, *forms][0]}"

    tagged = tuple(Annotated[each, Tag(f"with {key}")] for key, each in forms.items())
    return Annotated[Union[tagged], Discriminator(form)]  # noqa: UP007


# Variables that a placement sets, and that have the key of a judge.
EnvironmentVariable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error})") from None
    return text


def _check_address(url: str) -> str:
    try:
        HttpUrl(url)
    except ValueError:
        raise ValueError("expected an address such as http://host:8000/v1") from None
    return url


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


# Fields of requests to an LLM judge that the client sets, or whose replies it does not read.
SET_BY_CLIENT = (
    *("messages", "model", "n", "stream", "stream_options", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "functions", "function_call", "modalities", "audio"),
)
BadRowPolicy = Literal["fail", "skip"]
NonEmptyText = Annotated[str, Field(min_length=1)]
Regex = Annotated[NonEmptyText, AfterValidator(_check_regex)]
PromptSets = Annotated[list[Name], Field(min_length=1)]
Format = Annotated[str, GetPydanticSchema(lambda _, handler: handler(Literal[tuple(FORMATS)]))]

# A variable of a chat template, apart from those that every rendering sets.
TemplateVariable = Annotated[
    str,
    StringConstraints(
        pattern=r"^(?!(messages|tools|documents|add_generation_prompt|[a-z]+_token)\Z)[A-Za-z_]\w*\Z",
    ),
]
TemplateArguments = Annotated[dict[TemplateVariable, int | float | str | bool], Field(min_length=1)]

# A repository on the Hugging Face Hub: NAME or OWNER/NAME.
HubName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?\Z")
]
# An identifier of the Hub or of SPDX.
License = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]+\Z")]
# A text around the last turn of the user.
PromptTemplate = Annotated[str, StringConstraints(pattern=r"\{prompt\}")]
# Files inside the source.
Glob = Annotated[str, StringConstraints(pattern=r"^(?!/|(.*/)?[.][.](/|\Z)).+\Z")]
# Specs are public: a user name, a password or a query in the address is an error.
Url = Annotated[
    str,
    StringConstraints(pattern=r"^https?://[^@?#/\s]+(/[^@?#\s]*)?\Z"),
    AfterValidator(_check_address),
]

ColumnList = Annotated[list[NonEmptyText], Field(min_length=1)]


class PhaseWeights(Settings):
    """Weight of each phase in the split of a dataset."""

    sft: NonNegative
    reward: NonNegative
    rlhf: NonNegative


# The phases that share the rows equally.
PhaseList = Annotated[list[Literal["sft", "reward", "rlhf"]], Field(min_length=1)]


class NamedSplits(Settings):
    """The splits of the source that are train and eval, and the phases that have their rows."""

    train: NonEmptyText = ABSENT
    eval: NonEmptyText = ABSENT
    phases: PhaseWeights | PhaseList = ABSENT


class Split(Settings):
    """Split of the rows of a dataset among the phases."""

    weights: PhaseWeights
    by: Literal["row", "prompt"]


class ExcludedFile(Settings):
    """A file with the digest of a row in each line."""

    file: NonEmptyText


# Digests of rows that are removed after the split.
Exclude = Annotated[
    list[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}\Z")]], Field(min_length=1)
]


class SourceDataset(Settings):
    """A dataset of local files or of the Hub. With path, hub names what path is a copy of."""

    path: NonEmptyText = ABSENT
    hub: HubName = ABSENT
    revision: NonEmptyText = ABSENT
    license: License = ABSENT
    format: Format
    columns: dict[str, NonEmptyText | ColumnList] = ABSENT
    keep: ColumnList | Annotated[dict[str, NonEmptyText], Field(min_length=1)] = ABSENT
    remove: Regex = ABSENT
    prompt_template: PromptTemplate = ABSENT
    system: NonEmptyText = ABSENT
    name: NonEmptyText = ABSENT
    train: Glob = ABSENT
    eval: Glob = ABSENT
    on_bad_row: BadRowPolicy = ABSENT
    split: PhaseWeights | PhaseList | NamedSplits = ABSENT
    max_rows: Count = ABSENT
    exclude: Exclude = ABSENT

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is None and self.hub is None:
            raise ValueError("expected path or hub")
        if self.hub is None and self.revision is not None:
            raise ValueError("revision: has no effect without hub: remove it")
        if self.eval is not None and self.train is None:
            raise ValueError("eval needs train, the glob of the other files")
        for key in ("prompt_template", "system"):
            if getattr(self, key) is not None and not has_dialogues(self.format):
                raise ValueError(f"{key}: has no effect with format: text: remove it")
        names = self.split.model_fields_set if isinstance(self.split, NamedSplits) else set()
        if self.train is not None and (self.name is not None or names & {"train", "eval"}):
            raise ValueError(
                "train selects files by a glob: remove name, and train and eval of split"
            )
        return self


class GeneratedDataset(Settings):
    """A dataset that the pipeline generates."""

    generate: Literal["shop"]
    rows: Count
    eval_rows: Count
    seed: Seed = ABSENT
    split: PhaseWeights | PhaseList = ABSENT
    max_rows: Count = ABSENT
    exclude: Exclude = ABSENT


class SelectedDataset(Settings):
    """A dataset of scored responses, which a recipe of `generations` generates."""

    generations: str
    select: Literal["best", "best_and_worst"]
    min_score: Number = ABSENT
    min_margin: NonNegative = ABSENT
    split: PhaseWeights | PhaseList = ABSENT
    max_rows: Count = ABSENT
    exclude: Exclude = ABSENT

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        if self.select == "best" and self.min_margin is not None:
            raise ValueError(
                "min_margin: has no effect with select: best, only with best_and_worst: remove it"
            )
        return self


class LabelledDataset(Settings):
    """The pairs of another dataset (label), with the labels of an LLM judge."""

    label: str
    llm_judge: str
    split: PhaseWeights | PhaseList = ABSENT
    max_rows: Count = ABSENT
    exclude: Exclude = ABSENT


Dataset = _form_by_key(
    path=SourceDataset,
    generate=GeneratedDataset,
    generations=SelectedDataset,
    label=LabelledDataset,
)


class TrainedTokenizer(Settings):
    """A byte-level BPE tokenizer that is trained on a dataset."""

    train_on: str
    vocab_size: Annotated[int, Field(ge=260), IS_NUMBER]


class CopiedTokenizer(Settings):
    """A tokenizer from a local folder."""

    path: str


Tokenizer = _form_by_key(train_on=TrainedTokenizer, path=CopiedTokenizer)


class Architecture(Settings):
    """A transformers config; it takes any further key."""

    model_config = ConfigDict(extra="allow")

    model_type: str


class PretrainedModel(Settings):
    """A base model of the Hub or of a local folder."""

    path: str = ABSENT
    hub: HubName = ABSENT
    revision: NonEmptyText = ABSENT
    license: License = ABSENT
    template: Template = ABSENT
    template_arguments: TemplateArguments = ABSENT
    prompt_sets: PromptSets = ABSENT

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is None and self.hub is None:
            raise ValueError("expected path or hub")
        if self.hub is None and self.revision is not None:
            raise ValueError("revision: has no effect without hub: remove it")
        return self


class InitializedModel(Settings):
    """A base model with random weights."""

    init: Architecture
    tokenizer: Tokenizer  # type: ignore[valid-type]
    template: Template = ABSENT
    template_arguments: TemplateArguments = ABSENT
    prompt_sets: PromptSets = ABSENT


Model = _form_by_key(path=PretrainedModel, init=InitializedModel)

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

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("expected min or max")
        if None not in (self.min, self.max) and self.min > self.max:
            raise ValueError("expected min below max")
        return self


# Where a cluster runs jobs; snakechat.jobs.placements has the names of Snakemake's plugin.
SlurmKey = Literal["partition", "account", "qos", "constraint", "gpu_type"]


class PlacementKeys(Settings):
    """Keys of a deployment, which a recipe may change (snakechat.workflow.placement)."""

    nodes: Count = ABSENT
    gpus_per_node: NonNegativeInt = ABSENT
    zero_stage: Literal["auto", 0, 1, 2, 3] = ABSENT
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
    vllm_tensor_parallel_size: Count = ABSENT
    environment: dict[EnvironmentVariable, str] | None = ABSENT
    critic_zero_stage: Literal[0, 1, 2, 3] | None = ABSENT
    offload_frozen: bool = ABSENT
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

    @model_validator(mode="after")
    def _check_required(self) -> Self:
        if missing := [key for key in REQUIRED if getattr(self, key) is None]:
            raise ValueError(f"{missing[0]}: this key is required")
        return self


class RecipePlacement(Deployment):
    """The placement of a recipe: a deployment with the recipe's own keys."""

    @model_validator(mode="after")
    def _check_zero_stages(self) -> Self:
        allowed = STAGES_OF_OFFLOAD[self.offload]
        for key in ("zero_stage", "critic_zero_stage"):
            stage = getattr(self, key)
            # critic_zero_stage defaults to zero_stage.
            if stage not in (None, *allowed):
                raise ValueError(
                    f"{key}: {stage} cannot be combined with offload: {self.offload}: set {key}:"
                    f" {allowed[0]}"
                )
            # ZeRO 3 gathers the weights of a layer while it runs.
            if self.compile and stage == 3:
                raise ValueError(f"compile: true needs {key}: 0, 1 or 2, not 3: set compile: false")
        return self

    @model_validator(mode="after")
    def _check_vllm(self) -> Self:
        size = self.vllm_tensor_parallel_size or 1
        if self.gpus_per_node % size:
            raise ValueError(
                f"vllm_tensor_parallel_size: {size} does not divide the {self.gpus_per_node} GPUs"
                " of a node (gpus_per_node): set it to a divisor"
            )
        return self


class PlacementChanges(PlacementKeys):
    """A deployment, and keys that a recipe changes."""

    deployment: str = ABSENT


class GenerationKeys(Settings):
    """Keys of all recipes that programs do not receive as settings."""

    # The name of a deployment, or keys that change one.
    placement: str | PlacementChanges = ABSENT


class TrainingKeys(GenerationKeys):
    """Keys of recipes of all stages that train; training does not use them."""

    gate: Gate | None = ABSENT
    preset: str | None = ABSENT


class RlhfKeys(TrainingKeys):
    """Keys of rlhf recipes that training does not use."""

    judge: Reward = ABSENT
    compare_with: list[
        Annotated[str, StringConstraints(pattern=r"^(sft|dpo|rlhf)/[A-Za-z0-9][A-Za-z0-9_.-]*\Z")]
    ] = ABSENT


class LlmJudge(Settings):
    """A model behind an OpenAI-compatible endpoint that rates and compares responses."""

    url: Url
    model: NonEmptyText
    rubric: NonEmptyText
    scale: Annotated[
        list[Number], Field(min_length=2, max_length=2), AfterValidator(_check_scale)
    ] = ABSENT
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] = ABSENT
    key_env: EnvironmentVariable = ABSENT
    requests_per_minute: Positive = ABSENT
    concurrency: Count = ABSENT


class Evaluation(Settings):
    """Comparison of chat models."""

    num_prompts: Count
    num_generations: Count
    temperature: Positive
    llm_judge: str | None
    llm_judge_prompts: Count


class PromptEval(Settings):
    """Responses to prompt sets, side by side."""

    max_response_length: Count
    temperature: Positive


# Keys of a recipe, which are checked together with its preset and the defaults.
RecipeKeys = dict[str, Any]


class Generations(Settings):
    """The section of generated responses."""

    defaults: RecipeKeys
    recipes: dict[Name, RecipeKeys]


class Stage(Generations):
    """The section of a stage that trains."""

    presets: dict[Name, RecipeKeys]


class Sections(Settings):
    """The config."""

    seed: Seed
    template: Template
    deterministic: bool
    on_bad_row: BadRowPolicy
    save_steps: Count
    store: NonEmptyText
    store_max_size: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?[KMGT]\Z")] | None
    language: Literal["en", "zh"]
    container: NonEmptyText | None
    prompt_sets: PromptSets
    deployments: dict[Name, Deployment]
    deployment: str | None
    split: Split
    datasets: dict[Name, Dataset]  # type: ignore[valid-type]
    models: dict[Name, Model]  # type: ignore[valid-type]
    sft: Stage
    reward: Stage
    dpo: Stage
    rlhf: Stage
    generations: Generations
    llm_judges: dict[Name, LlmJudge]
    sweeps: dict[Name, Sweep]
    evaluation: Evaluation
    prompt_eval: PromptEval
