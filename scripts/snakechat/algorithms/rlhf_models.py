"""The models of RLHF (actor, reference, reward models, critic) and the engines that train them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from snakechat.algorithms.experience import Reference
from snakechat.algorithms.reward_models import RewardModel, load_reward
from snakechat.config.references import input_names, weighted_references
from snakechat.config.rlhf import RlhfSettings
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer
from snakechat.modeling.batching import prompt_examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.lora import add_lora, disable_adapters, select_trained
from snakechat.modeling.models import check_sequence_length, model_size
from snakechat.training.engine import Engine, make_engine
from snakechat.training.evaluated_models import load_frozen
from snakechat.training.zero_stages import is_partitioned
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.placement import Placement

RlhfJob = Job[RlhfSettings]


class RlhfModels(NamedTuple):
    """The models of RLHF. critic is None if the algorithm has none.

    reference: With `distill`, the teacher.
    rewards: By the names of the job's inputs.
    critic_weight: The weight of the reward model that a critic starts from; None if it starts from
        the actor.
    """

    actor: Policy
    reference: Reference
    rewards: dict[str, RewardModel]
    critic_weight: float | None
    critic: Scorer | None


def load_models(job: RlhfJob, tokenizer: PreTrainedTokenizerBase) -> RlhfModels:
    """Load the models and check that they fit together.

    Raises:
        InputError: A model is of the wrong kind or has too few positions.
    """
    settings = job.settings
    longest = settings.max_prompt_length + settings.max_response_length
    actor, reference = load_actor_and_reference(job, tokenizer)
    check_sequence_length(actor.model, longest)
    weights = weighted_references(settings.reward)
    rewards = {
        key: load_reward(
            *(job, key, name, weights[name], "actor", settings.dtype, "train"),
            job.placement.offload_frozen,
            longest,
        )
        for key, name in input_names("reward", settings.reward).items()
    }
    origins = [key for key, reward in rewards.items() if reward.reader.shares_tokenizer]
    origin = origins[0] if origins else None
    weight = rewards[origin].weight if origin else None
    critic = None
    if settings.algorithm == "ppo":
        critic = load_critic(job, tokenizer, origin)
        check_sequence_length(critic.model, longest)
    trained: dict[str, Policy | Scorer] = {"actor": actor}
    if critic:
        trained["critic"] = critic
    job.record["models"] = {name: model_size(module.model) for name, module in trained.items()}
    return RlhfModels(actor, reference, rewards, weight, critic)


def load_actor_and_reference(
    job: RlhfJob, tokenizer: PreTrainedTokenizerBase
) -> tuple[Policy, Reference]:
    """Load the model that training starts from as actor and as frozen reference.

    With `distill`, the teacher takes the place of the reference, and reads the token ids of the
    actor.

    Raises:
        InputError: The teacher has another tokenizer, too few positions, or passes that do not
            agree.
    """
    settings, folder = job.settings, job.inputs["actor"]
    deferred = is_partitioned(job.placement, settings.dtype)
    model = load_causal(folder, settings.dtype, tokenizer, deferred)
    actor = Policy(select_trained(model, settings))
    frozen = partial(
        load_frozen,
        Policy,
        dtype=settings.dtype,
        tokenizer=tokenizer,
        placement=job.placement,
        offload=job.placement.offload_frozen,
    )
    if settings.algorithm == "distill":
        folder = job.inputs["teacher"]
        if not is_same_tokenizer(load_tokenizer(folder), tokenizer):
            raise InputError(
                f"teacher: {folder} has another tokenizer than the actor, {job.inputs['actor']}:"
                " expected the same one: use a teacher with the tokenizer of the actor"
            )
        prompts = Ragged(job.inputs["tokens"], "train.prompt")
        examples = prompt_examples(prompts, settings.max_response_length, settings.num_generations)
        longest = settings.max_prompt_length + settings.max_response_length
        return actor, frozen(folder, examples=examples, longest=longest).on_device
    if settings.lora_rank and settings.train_base == "none":
        # The actor without its adapters is the initial model: no second copy is needed.
        return actor, partial(without_adapters, actor)
    # It is compared with transformers as the actor, whose model it is.
    return actor, frozen(folder, examples=None).on_device


@contextlib.contextmanager
def without_adapters(actor: Policy) -> Iterator[Policy]:
    """Yield the actor with its adapters disabled."""
    with disable_adapters(actor.model):
        yield actor


def load_critic(job: RlhfJob, tokenizer: PreTrainedTokenizerBase, origin: str | None) -> Scorer:
    """Load the critic.

    origin: The job's input with the reward model that it starts from; None starts from the actor
        with a new score head.
    """
    settings = job.settings
    folder = job.inputs[origin or "actor"]
    deferred = is_partitioned(critic_placement(job), settings.dtype)
    model = load_scorer(folder, settings.dtype, tokenizer, origin is None, deferred)
    if settings.critic_lora_rank:
        model = add_lora(model, settings.critic_lora_rank, settings.critic_lora_alpha)
    return Scorer(model)


def critic_placement(job: RlhfJob) -> Placement:
    """Return the placement of the critic, which may have a ZeRO stage of its own."""
    stage = job.placement.critic_zero_stage
    return job.placement if stage is None else replace(job.placement, zero_stage=stage)


def make_engines(
    job: RlhfJob, models: RlhfModels, updates: Sequence[int]
) -> tuple[Engine, Engine | None]:
    """Return the engines of actor and critic. updates: number of updates of each step."""
    settings, placement = job.settings, job.placement
    actor_updates = sum(updates[settings.critic_warmup_steps :])
    actor = make_engine(
        models.actor, settings, settings.actor_learning_rate, actor_updates, placement
    )
    if models.critic is None:
        return actor, None
    critic = make_engine(
        models.critic,
        settings.model_copy(
            update={
                "lora_learning_rate": settings.critic_lora_learning_rate,
                "lr_schedule": settings.critic_lr_schedule,
            }
        ),
        settings.critic_learning_rate,
        sum(updates),
        critic_placement(job),
    )
    return actor, critic
