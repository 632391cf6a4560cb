"""Train a chat model on its own responses: by PPO, RLOO or GRPO on their scores, or by a teacher.

Each step has five phases: (1) sample responses, (2) score them, (3) evaluate the log-probabilities
of actor and reference and the values of the critic, (4) compute rewards, advantages and returns,
(5) update actor and critic. The equations are in snakechat/algorithms/policy_gradient.py.

The actor starts as an SFT or DPO model or as any other language model, which is also the frozen
reference. The critic of PPO starts as a reward model with the actor's tokenizer, or as the actor
with a new head; the other algorithms have none. In distillation, a frozen teacher takes the place
of the reference, and no scores are needed. Each rank samples and evaluates its share of the
responses; every rank holds the tensors of the whole step.
"""

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snakechat.algorithms.experience import Experience, RlhfState, TokenEvaluation, make_experience
from snakechat.algorithms.llm_judge import load_judges, record_usage
from snakechat.algorithms.policy_updates import (
    evaluation_metrics,
    informative_rows,
    kl_name,
    policy_gradients,
    sample_text,
    step_metrics,
    value_gradients,
)
from snakechat.algorithms.reward_functions import load_functions
from snakechat.algorithms.rewards import RewardSum, Scores, load_rewards, weighted_judges
from snakechat.algorithms.rollouts import Rollouts, sample_on_all_ranks
from snakechat.config.rlhf import RlhfSettings, evaluated_in_update
from snakechat.data.chat_templates import stop_ids
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.records import PromptTexts
from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer
from snakechat.evaluation.held_out_prompts import draw_held_out_prompts
from snakechat.modeling.batching import (
    Examples,
    epoch_batches,
    num_steps,
    prompt_examples,
    training_batches,
)
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import disable_adapters
from snakechat.training.engine import Ema, Engine, FrozenModel
from snakechat.training.metrics import Evaluations
from snakechat.training.placed_models import load_frozen, make_sampler
from snakechat.training.trainer import Metrics, Step, Training, trainer
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run

# Prompts of a step whose responses are logged.
LOGGED_PROMPTS = 8


class RlhfTrainer(Training[RlhfSettings]):
    """A training with its models and data.

    Attributes:
        actor, critic: Engines of the models that are trained; only PPO has a critic.
        reference: The frozen model that the actor starts as or, with `distill`, the teacher; None
            if it is the actor without its adapters.
        state: What a step changes besides the models.
    """

    def prepare(self) -> None:
        """Load data and models, which may not fit: `trainer` then goes down a rung."""
        job, settings, tokens = self.job, self.settings, self.job.inputs["tokens"]
        # Prompts of an update.
        self.minibatch = settings.global_batch_size // settings.num_generations
        # Of a whole step, for its throughput.
        job.record["evaluated_in_update"] = evaluated_in_update(settings)
        # Before the models are loaded: a missing API key is noticed at once.
        self.judges = load_judges(job)
        functions = load_functions(settings.reward_functions)
        self.prompts = Ragged(tokens, "train.prompt")
        self.batches = training_batches(len(self.prompts), settings.rollout_batch_size, settings)
        self.load_models()
        weighted = weighted_judges(settings.reward, self.judges)
        self.scorer = RewardSum(self.rewards, functions, PromptTexts(tokens, "train"), weighted)
        if settings.eval_steps:
            self.eval_scorer = self.scorer._replace(prompt_texts=PromptTexts(tokens, "eval"))
            self.eval_prompts = Ragged(tokens, "eval.prompt")
            self.eval_rows, _ = draw_held_out_prompts(tokens, settings.eval_prompts, settings.seed)
        ends = stop_ids(self.tokenizer, self.base)
        self.sampler = make_sampler(settings, ends, self.base, job.placement)
        # Of prompts and responses.
        self.rollouts = partial(
            Rollouts,
            tokenizer=self.tokenizer,
            stop_ids=ends,
            temperature=settings.temperature,
            device=self.device,
        )
        text = job.inputs.get("ptx")
        self.ptx = Examples.read(text, "train", "chosen") if text else None
        self.ema = Ema(self.actor, settings.ema_decay) if settings.ema_decay else None

    def load_models(self) -> None:
        """Load actor, reference model, reward models and critic."""
        job, settings, placement = self.job, self.settings, self.job.placement
        longest = settings.max_prompt_length + settings.max_response_length
        examples = prompt_examples(
            self.prompts, settings.max_response_length, settings.num_generations
        )
        updates = [
            num_steps(len(rows), self.minibatch, settings.ppo_epochs) for rows in self.batches
        ]
        self.actor = self.load_engine(
            Policy,
            self.base,
            examples,
            settings.actor_learning_rate,
            sum(updates[settings.critic_warmup_steps :]),
            longest,
            samples=settings.generation_backend == "hf",
        )
        self.reference = self.load_reference(examples, longest)
        self.rewards = list(
            load_rewards(
                job, "reward", "actor", settings.dtype, "train", placement.offload_frozen, longest
            )
        )
        self.state = RlhfState(settings, bool(self.rewards))
        has_critic = settings.algorithm == "ppo"
        self.critic = self.load_critic(examples, sum(updates), longest) if has_critic else None

    def load_critic(self, examples: Examples, num_updates: int, longest: int) -> Engine[Scorer]:
        """Load the critic, from the first reward model that can read the actor's token ids.

        The chat template of that model may differ. Its values are on the scale of normalized
        scores. Without such a model, the critic starts as the actor with a new head.
        """
        settings, placement, inputs = self.settings, self.job.placement, self.job.inputs
        origin = next(
            (each for each in self.rewards if is_same_tokenizer(each.tokenizer, self.tokenizer)),
            None,
        )
        changes = {
            "lr_schedule": settings.critic_lr_schedule,
            "lora_rank": settings.critic_lora_rank,
            "lora_alpha": settings.critic_lora_alpha,
            "lora_learning_rate": settings.critic_lora_learning_rate,
            "train_base": "none",
            "lora_target_modules": None,
            "train_only": None,
        }
        stage = placement.critic_zero_stage
        critic = self.load_engine(
            Scorer,
            inputs[origin.name if origin else "actor"],
            examples,
            settings.critic_learning_rate,
            num_updates,
            longest,
            settings.model_copy(update=changes),
            placement if stage is None else replace(placement, zero_stage=stage),
            new_head=origin is None,
        )
        if origin:
            critic.module.normalizer = partial(self.state.standardized, weight=origin.weight)
        return critic

    def load_reference(self, examples: Examples, longest: int) -> FrozenModel[Policy] | None:
        """Load the teacher or the initial model; None if it is the actor without adapters."""
        settings, placement, folder = self.settings, self.job.placement, self.base
        distills = settings.algorithm == "distill"
        if distills:
            # It reads the token ids of the actor.
            folder = self.job.inputs["teacher"]
            if not is_same_tokenizer(load_tokenizer(folder), self.tokenizer):
                raise InputError(
                    f"teacher: {folder} has another tokenizer than the actor, {self.base}: expected"
                    " the same one: use a teacher with the tokenizer of the actor"
                )
        elif settings.lora_rank and settings.train_base == "none":
            return None
        # The model of the actor has been compared with transformers as the actor.
        frozen = load_frozen(
            Policy,
            folder,
            settings.dtype,
            self.tokenizer,
            placement,
            examples if distills else None,
            offload=placement.offload_frozen,
            longest=longest,
        )
        if not distills:
            frozen.module.supports_packing = self.actor.module.supports_packing
        return frozen

    def step(self, step: int, rows: np.ndarray) -> Step:
        """Train on the prompts in the given rows."""
        settings = self.settings

        # 1. Sample responses.
        with self.timer("generate"):
            rollouts = self.sample([self.prompts[row] for row in rows])
        self.state.check_responses(rollouts, step)

        # 2. Score the responses.
        with self.timer("score"):
            scores = self.scorer.score(rollouts, step, rows)
            if settings.algorithm != "distill":
                self.state.add_scores(scores.sum, step)
            normalized_scores = self.state.normalized(scores.sum, rollouts)

        # 3. Evaluate log-probabilities, entropies and values of each token.
        in_update = evaluated_in_update(settings, rollouts.num_responses, step)
        with self.timer("logprobs"):
            evaluation = self.evaluate_tokens(rollouts, in_update)

        # 4. Compute rewards, advantages and returns.
        experience = make_experience(
            settings, rollouts, evaluation, normalized_scores, self.state.kl_coef, in_update
        )

        # 5. Update actor and critic.
        with self.timer("train"):
            batches = epoch_batches(
                rollouts.num_prompts, self.minibatch, settings.ppo_epochs, settings.seed + step
            )
            updates = [
                self.update(step, number, prompts, rollouts, experience)
                for number, prompts in enumerate(chain(*batches))
            ]
        self.sampler.step_ended()
        if self.sampler.asleep_bytes:
            self.job.record["vllm_asleep_gb"] = round(self.sampler.asleep_bytes / 1e9, 2)
        kl = evaluation.kl(rollouts)
        self.state.adapt_kl_coef(kl)
        metrics = step_metrics(settings.algorithm, rollouts, experience, scores, updates)
        shown = ["objective/scores", kl_name(settings.algorithm)]
        is_logged = step % settings.log_responses_steps == 0 or step == 1
        logged = response_lines(settings.algorithm, rollouts, scores, kl) if is_logged else []
        return Step(metrics, shown, int(rollouts.lengths.sum()), logged)

    def update(
        self, step: int, number: int, rows: np.ndarray, rollouts: Rollouts, experience: Experience
    ) -> Metrics:
        """Update actor and critic on the responses to the given prompts; return metrics.

        number: Of the update in its step.
        """
        settings = self.settings
        engines: dict[str, Engine[Any]] = {}
        metrics: dict[str, float | None] = {}
        if step > settings.critic_warmup_steps:
            engines["policy"] = self.actor
            text = sample_text(self.ptx, settings, step, number) if self.ptx else None
            used = informative_rows(rows, experience) if settings.drop_uniform_groups else rows
            metrics |= policy_gradients(self.actor, rollouts, used, experience, settings, text)
        if self.critic:
            engines["value"] = self.critic
            metrics |= value_gradients(self.critic, rollouts, rows, experience, settings)
        metrics |= {f"{name}/learning_rate": each.learning_rate for name, each in engines.items()}
        for name, engine in engines.items():
            engine.step()
            metrics |= {f"{name}/{key}": value for key, value in engine.metrics.items()}
        if self.ema and "policy" in engines:
            self.ema.update()
        return metrics

    def try_step(self) -> None:
        """Run all models, but no function or judge, on the longest responses, and update."""
        settings = self.settings
        rows = np.argsort(-self.prompts.lengths, kind="stable")[: settings.rollout_batch_size]
        prompts = [self.prompts[row] for row in rows]
        # The cache has space for the longest responses, whenever they end.
        self.sample(prompts)
        longest = [np.resize(ids, settings.max_response_length).tolist() for ids in prompts]
        rollouts = self.rollouts(prompts, [longest] * settings.num_generations)
        self.scorer._replace(functions={}, judges=()).score(rollouts, 0, rows)
        evaluation = self.evaluate_tokens(rollouts)
        scores = torch.zeros(rollouts.num_responses, device=self.device)
        experience = make_experience(settings, rollouts, evaluation, scores, 0.0)
        minibatch = np.arange(min(len(rows), self.minibatch))
        # After the warmup of the critic, actor and critic are updated.
        self.update(settings.critic_warmup_steps + 1, 0, minibatch, rollouts, experience)
        self.sampler.step_ended()

    def evaluate(self) -> dict[str, float]:
        """Sample responses to the held-out prompts, the same ones each time; return metrics."""
        with torch.random.fork_rng(devices=[]):
            # Common random numbers: evaluations differ by the actor alone.
            torch.default_generator.manual_seed(self.settings.seed)
            rollouts = self.sample([self.eval_prompts[row] for row in self.eval_rows])
        scores = self.eval_scorer.score(rollouts, 0, self.eval_rows)
        normalized = self.state.normalized(scores.sum, rollouts)
        evaluation = self.evaluate_tokens(rollouts, with_values=False)
        return evaluation_metrics(self.settings, rollouts, evaluation, scores, normalized)

    def evaluate_tokens(
        self, rollouts: Rollouts, in_update: bool = False, with_values: bool = True
    ) -> TokenEvaluation:
        """Run reference and critic on the responses, and the actor unless the update does."""
        tables = (
            torch.zeros(2, *rollouts.response_mask.shape, device=self.device)
            if in_update
            else rollouts.logprobs_and_entropies(self.actor.module)
        )
        if self.reference:
            with self.reference.on_device() as reference:
                ref_logprobs = rollouts.logprobs(reference)
        else:
            with disable_adapters(self.actor.module.model):
                ref_logprobs = rollouts.logprobs(self.actor.module)
        values = rollouts.values(self.critic.module) if self.critic and with_values else None
        return TokenEvaluation(tables[0], tables[1], ref_logprobs, values)

    def sample(self, prompts: list[np.ndarray]) -> Rollouts:
        """Sample responses from the actor."""
        self.sampler.update(self.actor.module.model, self.actor.gathered)
        responses, sampler_logprobs = sample_on_all_ranks(
            self.sampler, prompts, self.actor.sampling
        )
        self.sampler.sleep()
        return self.rollouts(prompts, responses, sampler_logprobs=sampler_logprobs)

    def save_actor(self, folder: Path) -> None:
        """Save the actor, and the average of its weights, if any, in the subfolder ema."""
        self.save(self.actor, folder)
        if self.ema:
            with self.ema.average_weights():
                self.save(self.actor, folder / "ema")


def response_lines(
    algorithm: str, rollouts: Rollouts, scores: Scores, kl: torch.Tensor
) -> list[dict[str, Any]]:
    """Return the responses to the first prompts of a step, with scores and KL [B] in nats."""
    prompts, responses = rollouts.decode()
    name = kl_name(algorithm).removeprefix("objective/")
    return [
        {
            "prompt": prompt,
            "response": response,
            # Nothing may score a response.
            **({} if np.isnan(score) else {"score": score}),
            name: kl[row].item(),
        }
        for row, (prompt, response, score) in enumerate(
            zip(prompts, responses, scores.sum.tolist(), strict=True)
        )
        if row % rollouts.num_prompts < LOGGED_PROMPTS
    ]


def train(rlhf: RlhfTrainer) -> None:
    """Load data and models, train, save."""
    rlhf.prepare()
    # New heads and adapters have drawn random numbers.
    torch.manual_seed(rlhf.settings.seed)
    evaluations = Evaluations(
        rlhf.job,
        len(rlhf.batches),
        rlhf.evaluate,
        rlhf.save_actor,
        best_metric="objective/rlhf_reward",
    )
    parts: dict[str, Any] = {
        "actor": rlhf.actor,
        "state": rlhf.state,
        "critic": rlhf.critic,
        "ema": rlhf.ema,
    }
    components = {name: part for name, part in parts.items() if part}
    rlhf.take_steps(rlhf.batches, rlhf.step, rlhf.try_step, evaluations, components)
    record_usage(rlhf.job, rlhf.judges.values())


main = trainer(train, RlhfTrainer)

if __name__ == "__main__":
    run(main, RlhfSettings)
