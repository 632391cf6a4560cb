"""The models of RLHF (actor, reference, reward model, critic) and the engines that train them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from snakechat.algorithms.experience import Reference
from snakechat.algorithms.sanity_checks import check_probes, check_tokenizers
from snakechat.config.rlhf import RlhfSettings
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.lora import add_lora, disable_adapters
from snakechat.modeling.models import (
    check_sequence_length,
    load_causal,
    load_scorer,
    model_size,
)
from snakechat.training.engine import Engine, FrozenModel, make_engine
from snakechat.workflow.job import Job

RlhfJob = Job[RlhfSettings]


class RlhfModels(NamedTuple):
    """The models of RLHF. reward and critic are None if the recipe has none."""

    actor: Policy
    reference: Reference
    reward: FrozenModel | None
    critic: Scorer | None


def load_models(
    job: RlhfJob, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> RlhfModels:
    """Load the models and check that they fit together.

    Raises:
        InputError: The tokenizers differ, the reward model does not reproduce its recorded scores,
            or a model has too few positions.
    """
    settings = job.settings
    actor, reference = load_actor_and_reference(job, tokenizer, device)
    reward = load_reward(job, tokenizer, device) if "reward" in job.inputs else None
    critic = load_critic(job, tokenizer, device) if settings.algorithm == "ppo" else None
    trained: dict[str, Policy | Scorer] = {"actor": actor}
    if critic:
        trained["critic"] = critic
    for module in trained.values():
        check_sequence_length(
            module.model, settings.max_prompt_length + settings.max_response_length
        )
    job.record["models"] = {name: model_size(module.model) for name, module in trained.items()}
    return RlhfModels(actor, reference, reward, critic)


def load_actor_and_reference(
    job: RlhfJob, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[Policy, Reference]:
    """Load the SFT model as actor and as frozen reference."""
    settings, folder = job.settings, job.inputs["actor"]
    model = load_causal(folder, settings.dtype, tokenizer)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    actor = Policy(model).to(device)
    if settings.lora_rank and settings.train_base == "none":
        # The actor without its adapters is the SFT model: no second copy is needed.
        return actor, partial(without_adapters, actor)
    reference = Policy(load_causal(folder, settings.dtype, tokenizer))
    return actor, FrozenModel(reference, device, offload_frozen(job)).on_device


@contextlib.contextmanager
def without_adapters(actor: Policy) -> Iterator[Policy]:
    """Yield the actor with its adapters disabled."""
    with disable_adapters(actor.model):
        yield actor


def load_reward(
    job: RlhfJob, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> FrozenModel:
    """Load the reward model and check its tokenizer and its recorded scores."""
    folder = job.inputs["reward"]
    check_tokenizers(tokenizer, load_tokenizer(folder), (job.inputs["actor"], folder))
    scorer = Scorer(load_scorer(folder, job.settings.dtype, tokenizer))
    reward = FrozenModel(scorer, device, offload_frozen(job))
    with reward.on_device():
        check_probes(
            scorer, folder, job.inputs["tokens.reward"], job.placement["micro_batch_tokens"]
        )
    return reward


def load_critic(job: RlhfJob, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Scorer:
    """Load the reward model as critic; without a reward model, the actor with a new score head."""
    settings = job.settings
    folder = job.inputs.get("reward", job.inputs["actor"])
    model = load_scorer(folder, settings.dtype, tokenizer, new_head="reward" not in job.inputs)
    if settings.critic_lora_rank:
        model = add_lora(model, settings.critic_lora_rank, settings.critic_lora_alpha)
    return Scorer(model).to(device)


def offload_frozen(job: RlhfJob) -> bool:
    """Whether reference and reward model stay in CPU memory while they are not in use."""
    return job.placement.get("offload_frozen", False)


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
        dataclasses.replace(settings, lora_learning_rate=settings.critic_lora_learning_rate),
        settings.critic_learning_rate,
        sum(updates),
        placement | {"zero_stage": placement.get("critic_zero_stage", placement["zero_stage"])},
    )
    return actor, critic
