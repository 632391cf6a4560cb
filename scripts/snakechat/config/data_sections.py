"""Sections of the config: datasets, how they are split, and models."""

from typing import Annotated, Any, Literal, Union

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    StringConstraints,
    Tag,
)

from snakechat.config.rlhf import MESSAGES, POSITIONAL
from snakechat.config.settings import (
    ABSENT,
    IS_NUMBER,
    SORTED,
    Count,
    Entry,
    JsonValue,
    Name,
    NonEmptyText,
    NonNegative,
    Number,
    ReadIf,
    Regex,
    Seed,
    Settings,
    Template,
    only_with,
)
from snakechat.data.formats import FORMATS, PROMPTS, TEXTS, columns_of, named_columns


def _form_by_key(**forms: Any) -> Any:
    """Return the type of mappings of several forms, each with a key that the others do not have.

    Errors are about this form. Without any of the keys, it is the first one.
    """

    def keys_of_forms(values: Any) -> list[str]:
        keys = values.model_fields_set if isinstance(values, Settings) else values
        return [key for key in forms if isinstance(keys, dict | set) and key in keys]

    def check_form(values: Any) -> Any:
        if len(found := keys_of_forms(values)) > 1:
            raise ValueError(f"{found[1]}: an entry has either {' or '.join(forms)}: remove it")
        return values

    form = Discriminator(lambda values: f"with {[*keys_of_forms(values), *forms][0]}")
    tagged = tuple(Annotated[each, Tag(f"with {key}")] for key, each in forms.items())
    return Annotated[Union[tagged], form, BeforeValidator(check_form)]  # noqa: UP007


BadRowPolicy = Literal["fail", "skip"]
PromptSets = Annotated[list[Name], Field(min_length=1)]

# A variable of a chat template, apart from those that every rendering sets.
RESERVED = "messages|tools|documents|add_generation_prompt|[a-z]+_token"
TemplateVariable = Annotated[
    str,
    StringConstraints(
        pattern=rf"(?#a variable that renderings do not set)^(?!({RESERVED})\Z)[A-Za-z_]\w*\Z"
    ),
]
# A repository on the Hugging Face Hub: NAME or OWNER/NAME.
HubName = Annotated[
    str,
    StringConstraints(
        pattern=r"(?#NAME or OWNER/NAME)^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?\Z"
    ),
]
# Files inside the source.
Glob = Annotated[
    str, StringConstraints(pattern=r"(?#files inside the source)^(?!/|(.*/)?[.][.](/|\Z)).+\Z")
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


RowDigest = Annotated[str, StringConstraints(pattern=r"(?#32 hexadecimal digits)^[0-9a-f]{32}\Z")]


class DatasetKeys(Entry):
    """Keys of all datasets."""

    split: PhaseWeights | PhaseList = ABSENT
    max_rows: Count = ABSENT
    # Digests of rows that are removed after the split.
    exclude: Annotated[list[RowDigest], Field(min_length=1), SORTED] = ABSENT


class Source(Entry):
    """Local files or a repository of the Hub. With path, hub names what path is a copy of."""

    path: NonEmptyText = ABSENT
    hub: HubName = ABSENT
    revision: Annotated[NonEmptyText, only_with("hub")] = ABSENT

    def problems(self) -> dict[str, bool]:
        return super().problems() | {"expected path or hub": self.path is None and self.hub is None}


OF_DIALOGUES = ReadIf(lambda settings: settings["format"] != TEXTS, "with format: text")


class SourceDataset(DatasetKeys, Source):
    """A dataset of files."""

    format: Annotated[str, GetPydanticSchema(lambda _, handle: handle(Literal[tuple(FORMATS)]))]
    columns: dict[str, NonEmptyText | ColumnList] = ABSENT
    keep: ColumnList | Annotated[dict[str, NonEmptyText], Field(min_length=1)] = ABSENT
    remove: Annotated[
        Regex, ReadIf(lambda settings: settings["format"] != PROMPTS, "with format: prompt")
    ] = ABSENT
    # A text around the last turn of the user.
    prompt_template: Annotated[
        str, StringConstraints(pattern=r"(?#a text with {prompt})\{prompt\}"), OF_DIALOGUES
    ] = ABSENT
    system: Annotated[NonEmptyText, OF_DIALOGUES] = ABSENT
    name: NonEmptyText = ABSENT
    train: Glob = ABSENT
    eval: Annotated[Glob, only_with("train")] = ABSENT
    on_bad_row: BadRowPolicy = ABSENT
    split: PhaseWeights | PhaseList | NamedSplits = ABSENT  # type: ignore[assignment]

    def problems(self) -> dict[str, bool]:
        named = self.split.model_fields_set if isinstance(self.split, NamedSplits) else set()
        problems = super().problems() | {
            "train: selects files by a glob: remove name, and train and eval of split": (
                self.train is not None
                and (self.name is not None or bool(named & {"train", "eval"}))
            )
        }
        key = "columns"
        try:
            columns_of(self.format, self.columns)
            key = "keep"
            names = named_columns(self.keep or {})
        except ValueError as error:
            return problems | {f"{key}: {error}": True}
        for name in names.keys() & {*POSITIONAL, MESSAGES}:
            problems[f"keep: {name} is what reward functions receive anyway"] = True
        return problems


class GeneratedDataset(DatasetKeys):
    """A dataset that the pipeline generates."""

    generate: Literal["shop"]
    rows: Count
    eval_rows: Count
    seed: Seed = ABSENT


class SelectedDataset(DatasetKeys):
    """A dataset of scored responses, which a recipe of `generations` generates."""

    generations: str
    select: Literal["best", "best_and_worst"]
    min_score: Number = ABSENT
    min_margin: Annotated[NonNegative, only_with("select", "best_and_worst")] = ABSENT


class LabelledDataset(DatasetKeys):
    """The pairs of another dataset (label), with the labels of an LLM judge."""

    label: str
    llm_judge: str


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


class Architecture(Settings):
    """A transformers config; it takes any further key."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    model_type: str


class ModelKeys(Entry):
    """Keys of all models."""

    template: Template = ABSENT
    template_arguments: Annotated[
        dict[TemplateVariable, int | float | str | bool], Field(min_length=1)
    ] = ABSENT
    prompt_sets: PromptSets = ABSENT


class PretrainedModel(ModelKeys, Source):
    """A base model of the Hub or of a local folder."""


class InitializedModel(ModelKeys):
    """A base model with random weights."""

    init: Architecture
    tokenizer: TrainedTokenizer


Model = _form_by_key(path=PretrainedModel, init=InitializedModel)
