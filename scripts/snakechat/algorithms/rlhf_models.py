"""The models of RLHF (actor, reference, reward models, critic) and the engines that train them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from snakechat.algorithms.experience import Reference
from snakechat.algorithms.rewards import RewardModel, load_reward
from snakechat.config.references import model_names
from snakechat.config.rlhf import RlhfSettings
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer
from snakechat.modeling.batching import num_steps, prompt_examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.lora import add_lora, disable_adapters, select_trained
from snakechat.modeling.models import check_sequence_length, model_size
from snakechat.training.engine import Engine
from snakechat.training.placed_models import load_frozen, make_engine
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.processes import Placement

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

    The critic starts as the first reward model that has the actor's tokenizer, or as the actor with
    a new score head.

    Raises:
        InputError: A model is of the wrong kind, or has too few positions; the teacher has another
            tokenizer.
    """
    settings, dtype, placement = job.settings, job.settings.dtype, job.placement
    longest = settings.max_prompt_length + settings.max_response_length
    deferred = placement.is_partitioned(dtype)
    model = load_causal(job.inputs["actor"], dtype, tokenizer, deferred)
    actor = Policy(select_trained(model, settings))
    check_sequence_length(actor.model, longest)
    reference = load_reference(job, tokenizer, actor, longest)
    rewards = {
        key: load_reward(job, key, "actor", dtype, "train", placement.offload_frozen, longest)
        for key in model_names(settings.reward)
    }
    origin = next((key for key in rewards if rewards[key].shares_tokenizer), None)
    trained: dict[str, Policy | Scorer] = {"actor": actor}
    critic = None
    if settings.algorithm == "ppo":
        folder = job.inputs[origin or "actor"]
        deferred = critic_placement(job).is_partitioned(dtype)
        model = load_scorer(folder, dtype, tokenizer, origin is None, deferred)
        if settings.critic_lora_rank:
            model = add_lora(model, settings.critic_lora_rank, settings.critic_lora_alpha)
        critic = trained["critic"] = Scorer(model)
        check_sequence_length(critic.model, longest)
    job.record["models"] = {name: model_size(module.model) for name, module in trained.items()}
    weight = rewards[origin].weight if origin else None
    return RlhfModels(actor, reference, rewards, weight, critic)


def load_reference(
    job: RlhfJob, tokenizer: PreTrainedTokenizerBase, actor: Policy, longest: int
) -> Reference:
    """Return the frozen model that the actor starts from or, with `distill`, the teacher.

    longest: Tokens of the longest sequence.

    Raises:
        InputError: The teacher has another tokenizer, too few positions, or passes that do not
            agree.
    """
    settings, folder, examples = job.settings, job.inputs["actor"], None
    if settings.algorithm == "distill":
        # It reads the token ids of the actor.
        folder = job.inputs["teacher"]
        if not is_same_tokenizer(load_tokenizer(folder), tokenizer):
            raise InputError(
                f"teacher: {folder} has another tokenizer than the actor, {job.inputs['actor']}:"
                " expected the same one: use a teacher with the tokenizer of the actor"
            )
        prompts = Ragged(job.inputs["tokens"], "train.prompt")
        examples = prompt_examples(prompts, settings.max_response_length, settings.num_generations)
    elif settings.lora_rank and settings.train_base == "none":
        # The actor without its adapters is the initial model: no second copy is needed.
        return partial(without_adapters, actor)
    # Without examples, it is compared with transformers as the actor, whose model it is.
    return load_frozen(
        Policy,
        folder,
        settings.dtype,
        tokenizer,
        job.placement,
        examples,
        offload=job.placement.offload_frozen,
        longest=longest,
    ).on_device


@contextlib.contextmanager
def without_adapters(actor: Policy) -> Iterator[Policy]:
    """Yield the actor with its adapters disabled."""
    with disable_adapters(actor.model):
        yield actor


def critic_placement(job: RlhfJob) -> Placement:
    """Return the placement of the critic, which may have a ZeRO stage of its own."""
    stage = job.placement.critic_zero_stage
    return job.placement if stage is None else replace(job.placement, zero_stage=stage)


def make_engines(
    job: RlhfJob, models: RlhfModels, batches: Sequence[np.ndarray]
) -> tuple[Engine, Engine | None]:
    """Return the engines of actor and critic.

    batches: The rows of each step, which determine the number of its updates.
    """
    settings, placement = job.settings, job.placement
    minibatch = settings.global_batch_size // settings.num_generations
    updates = [num_steps(len(rows), minibatch, settings.ppo_epochs) for rows in batches]
    actor_updates = sum(updates[settings.critic_warmup_steps :])
    actor = make_engine(
        models.actor, settings, settings.actor_learning_rate, actor_updates, placement
    )
    if models.critic is None:
        return actor, None
    changes = {
        "lora_learning_rate": settings.critic_lora_learning_rate,
        "lr_schedule": settings.critic_lr_schedule,
    }
    critic = make_engine(
        models.critic,
        settings.model_copy(update=changes),
        settings.critic_learning_rate,
        sum(updates),
        critic_placement(job),
    )
    return actor, critic
