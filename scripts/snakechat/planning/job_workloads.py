"""The workload of each kind of job, from its spec."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from snakechat.config.references import input_names
from snakechat.evaluation.comparisons import initial_model
from snakechat.planning import compute_time
from snakechat.planning.footprint import POLICY, SCORE, SFT, BatchShape, ModelSpec
from snakechat.planning.memory import TrainedModel
from snakechat.planning.model_configs import model_config
from snakechat.planning.plan import Plan
from snakechat.planning.token_counts import TokenCounts, token_counts
from snakechat.planning.workload import Generation, Workload


class JobDescription:
    """A job, with the models and tokens that its program reads."""

    def __init__(self, spec: Mapping[str, Any], placement: Mapping[str, Any], plan: Plan) -> None:
        self.rule, self.settings, self.inputs = spec["rule"], spec["settings"], spec["inputs"]
        self.placement, self.plan = placement, plan

    def model(
        self, key: str, loss: str, dtype: str | None = None, lora: str | None = None
    ) -> ModelSpec:
        """Return the model of an input.

        Args:
            key: Name of the input.
            loss: What the forward pass computes (SFT, POLICY or SCORE).
            dtype: Defaults to that of the recipe.
            lora: Prefix of the settings of its adapters; None for a model that is not trained.
        """
        settings = self.settings
        return ModelSpec(
            model_config(self.inputs[key]["path"], self.plan),
            loss,
            dtype or settings["dtype"],
            settings.get(f"{lora}_rank", 0) if lora else 0,
            settings.get("train_base", "none") if lora == "lora" else "none",
            bool(lora) and self.placement["activation_checkpointing"],
        )

    def scorers(self, *keys: str) -> list[str]:
        """Return the inputs with models of `reward` or `judge` (keys), in their given order."""
        return [name for key in keys for name in input_names(key, self.settings[key])]

    def critic_origin(self) -> str:
        """Return the input that a critic starts from: a reward model with the actor's tokenizer.

        Until the models exist, equal vocabulary sizes stand for equal tokenizers.
        """
        sizes = {
            name: json.loads(model_config(self.inputs[name]["path"], self.plan)).get("vocab_size")
            for name in ("actor", *self.scorers("reward"))
        }
        same = [name for name in sizes if sizes[name] == sizes["actor"]]
        # The actor itself comes first.
        return same[min(1, len(same) - 1)]

    def tokens(self, split: str = "train") -> TokenCounts:
        """Return the counts of a split of the job's tokens."""
        return token_counts(self.inputs["tokens"]["path"], split, self.plan)

    def rows_trained(self, tokens: TokenCounts) -> float | None:
        """Return the rows of all steps, at most; None if the number of rows is unknown."""
        rows, settings = product(tokens.num_rows, self.settings["epochs"]), self.settings
        if rows is None or settings["max_steps"] is None:
            return rows
        batch_size = settings.get("rollout_batch_size", settings["global_batch_size"])
        return min(rows, settings["max_steps"] * batch_size)

    def micro_batch(
        self, length: int, num_targets: int, max_tokens: int | None = None
    ) -> BatchShape:
        """Return the largest micro-batch of sequences of a length, each with so many targets.

        max_tokens: Limit of its tokens; defaults to micro_batch_tokens.
        """
        sequences = max(1, (max_tokens or self.placement["micro_batch_tokens"]) // length)
        on_gpu = self.placement["gpus_per_node"] > 0
        dense_mask = not on_gpu or self.has_dense_mask()
        return BatchShape(sequences, length, num_targets, on_gpu, dense_mask)

    def has_dense_mask(self) -> bool:
        """Return whether packed sequences have a dense mask on a GPU (modeling/attention.py)."""
        choice = self.placement.get("attn_implementation", "sdpa")
        one_response = self.rule == "train_sft" or self.settings.get("num_generations") == 1
        return choice == "sdpa" or (choice == "varlen" and not one_response)

    def generation_batch(self, prompts: TokenCounts, response_length: int) -> BatchShape:
        """Return the largest batch that generates: one sequence for each response."""
        length, limit = prompts.longest + response_length, self.placement.get("generate_tokens")
        return self.micro_batch(length, response_length, limit)


def job_workload(
    spec: Mapping[str, Any], placement: Mapping[str, Any], plan: Plan
) -> Workload | None:
    """Return the workload of a job; None if the job needs no GPU.

    Raises:
        InputError: The size of its model is unknown.
    """
    describe = WORKLOADS.get(spec["rule"])
    return describe(JobDescription(spec, placement, plan)) if describe else None


def train_sft(job: JobDescription) -> Workload:
    """Return the workload of supervised fine-tuning."""
    tokens, model = job.tokens(), job.model("model", SFT, lora="lora")
    return Workload(
        trained=[TrainedModel(model, job.placement["zero_stage"])],
        frozen=[],
        largest=job.micro_batch(tokens.longest, tokens.longest - 1),
        flops=product(job.rows_trained(tokens), training_flops(model, tokens)),
        notes=tuple(tokens.notes),
    )


def train_on_pairs(job: JobDescription, loss: str) -> Workload:
    """Return the workload of a reward model (loss SCORE) or of DPO (POLICY)."""
    tokens, model = job.tokens(), job.model("model", loss, lora="lora")
    return Workload(
        trained=[TrainedModel(model, job.placement["zero_stage"])],
        frozen=[],
        largest=job.micro_batch(tokens.longest, tokens.longest // 2),
        flops=product(job.rows_trained(tokens), training_flops(model, tokens)),
        notes=tuple(tokens.notes),
    )


def train_rlhf(job: JobDescription) -> Workload:
    """Return the workload of PPO, RLOO or GRPO."""
    settings, prompts, zero_stage = job.settings, job.tokens(), job.placement["zero_stage"]
    num_generations, response_length = settings["num_generations"], settings["max_response_length"]
    tokens = with_responses(prompts, num_generations, response_length)
    actor, reference = job.model("actor", POLICY, lora="lora"), job.model("actor", POLICY)
    trained = [TrainedModel(actor, zero_stage)]
    rewards = [job.model(name, SCORE) for name in job.scorers("reward")]
    frozen = list(rewards)
    # Without its adapters, the actor is the reference model.
    if actor.lora_rank == 0 or actor.train_base != "none":
        frozen.append(reference)
    if settings["algorithm"] == "ppo":
        critic = job.model(job.critic_origin(), SCORE, lora="critic_lora")
        critic_stage = job.placement.get("critic_zero_stage")
        trained.append(TrainedModel(critic, zero_stage if critic_stage is None else critic_stage))
    evaluated = [entry.model for entry in trained] + [reference] + rewards
    flops = [forward_flops(model, tokens) for model in evaluated]
    flops += [settings["ppo_epochs"] * training_flops(entry.model, tokens) for entry in trained]
    # Generation runs the actor on each prompt once more.
    flops.append(compute_time.inference_flops(actor, prompts.prompt, prompts.prompt))
    num_prompts = job.rows_trained(prompts)
    generations: tuple[Generation, ...] = ()
    if num_prompts is not None:
        generations = (Generation(actor, num_prompts * num_generations),)
    return Workload(
        trained=trained,
        frozen=frozen,
        largest=job.micro_batch(tokens.longest, num_generations * response_length),
        flops=product(num_prompts, sum(flops)),
        generation=job.generation_batch(prompts, response_length),
        generations=generations,
        ema=settings["ema_decay"] > 0,
        notes=(*prompts.notes, f"assumed: responses of {response_length} tokens, the limit"),
    )


def compute_reference(job: JobDescription) -> Workload:
    """Return the workload of the log-probabilities of DPO's reference model."""
    workload = pair_evaluation(job, job.model("model", POLICY), "train")
    batches = job.settings["batches"]
    epochs = 1 if batches is None else batches["epochs"]
    return workload._replace(flops=product(epochs, workload.flops))


def evaluate_reward(job: JobDescription) -> Workload:
    """Return the workload of scoring the evaluation split, in fp32."""
    return pair_evaluation(job, job.model("model", SCORE, dtype="fp32"), "eval")


def evaluate_dpo(job: JobDescription) -> Workload:
    """Return the workload of the implicit rewards of the evaluation split."""
    return pair_evaluation(job, job.model("model", POLICY), "eval")


def pair_evaluation(job: JobDescription, model: ModelSpec, split: str) -> Workload:
    """Return the workload of one forward pass over the pairs of a split."""
    tokens = job.tokens(split)
    return Workload(
        trained=[],
        frozen=[model],
        largest=job.micro_batch(tokens.longest, tokens.longest // 2),
        flops=product(tokens.num_rows, forward_flops(model, tokens)),
        notes=tuple(tokens.notes),
    )


def evaluate_sft(job: JobDescription) -> Workload:
    """Return the workload of perplexities, of one model after the other."""
    tokens = job.tokens("eval")
    models = [job.model(key, POLICY) for key in ("base", "model")]
    # With and without the prompts as targets.
    flops = 2 * sum(forward_flops(model, tokens) for model in models)
    return Workload(
        trained=[],
        frozen=models,
        one_at_a_time=True,
        largest=job.micro_batch(tokens.longest, tokens.longest - 1),
        flops=product(tokens.num_rows, flops),
        notes=tuple(tokens.notes),
    )


def evaluate_rlhf(job: JobDescription) -> Workload:
    """Return the workload of the comparison of a chat model with its initial model."""
    settings, prompts = job.settings, job.tokens("eval")
    num_generations, response_length = settings["num_generations"], settings["max_response_length"]
    num_prompts = min(prompts.num_rows or math.inf, settings["num_prompts"])
    tokens = with_responses(prompts, num_generations, response_length)
    models = [job.model(key, POLICY) for key in ("rlhf", initial_model(job.inputs))]
    scorers = [job.model(key, SCORE, dtype="fp32") for key in job.scorers("reward", "judge")]
    # Each model evaluates the responses of both.
    flops = 2 * sum(forward_flops(model, tokens) for model in (*models, *scorers))
    return Workload(
        trained=[],
        frozen=[*models, *scorers],
        one_at_a_time=True,
        largest=job.micro_batch(tokens.longest, num_generations * response_length),
        flops=num_prompts * flops,
        generation=job.generation_batch(prompts, response_length),
        generations=tuple(Generation(model, num_prompts * num_generations) for model in models),
        notes=tuple(prompts.notes),
    )


def generate_responses(job: JobDescription) -> Workload:
    """Return the workload of sampling responses to the prompts of both splits."""
    settings, splits = job.settings, (job.tokens("train"), job.tokens("eval"))
    model = job.model("model", POLICY)
    prompts = max(splits, key=lambda tokens: tokens.longest)
    counts = [tokens.num_rows for tokens in splits if tokens.num_rows is not None]
    rows = sum(counts) if len(counts) == len(splits) else None
    generations: tuple[Generation, ...] = ()
    if rows is not None:
        generations = (Generation(model, rows * settings["num_generations"]),)
    shape = job.generation_batch(prompts, settings["max_response_length"])
    return Workload(
        trained=[],
        frozen=[model],
        largest=shape,
        flops=product(rows, compute_time.inference_flops(model, prompts.prompt, prompts.prompt)),
        generation=shape,
        generations=generations,
        notes=tuple(prompts.notes),
    )


def score_responses(job: JobDescription) -> Workload | None:
    """Return the workload of scoring generated responses; None if only functions score them."""
    settings, prompts = job.settings, job.tokens("train")
    num_generations, response_length = settings["num_generations"], settings["max_response_length"]
    tokens = with_responses(prompts, num_generations, response_length)
    scorers = [job.model(key, SCORE) for key in job.scorers("reward")]
    if not scorers:
        return None
    return Workload(
        trained=[],
        frozen=scorers,
        largest=job.micro_batch(tokens.longest, num_generations * response_length),
        flops=product(prompts.num_rows, sum(forward_flops(model, tokens) for model in scorers)),
        notes=tuple(prompts.notes),
    )


WORKLOADS: dict[str, Callable[[JobDescription], Workload | None]] = {
    "train_sft": train_sft,
    "train_reward": partial(train_on_pairs, loss=SCORE),
    "train_dpo": partial(train_on_pairs, loss=POLICY),
    "train_rlhf": train_rlhf,
    "generate_responses": generate_responses,
    "score_responses": score_responses,
    "compute_reference": compute_reference,
    "evaluate_sft": evaluate_sft,
    "evaluate_reward": evaluate_reward,
    "evaluate_dpo": evaluate_dpo,
    "evaluate_rlhf": evaluate_rlhf,
}


def with_responses(prompts: TokenCounts, num_generations: int, response_length: int) -> TokenCounts:
    """Return the counts of prompts with all their responses, which have the maximum length."""
    responses = num_generations * response_length
    return prompts._replace(responses=responses, longest=prompts.longest + responses)


def product(*factors: float | None) -> float | None:
    """Return the product of the factors; None if one is unknown."""
    result: float = 1
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result


def training_flops(model: ModelSpec, tokens: TokenCounts) -> float:
    """Return the operations of training on a row."""
    return compute_time.training_flops(model, tokens.per_row, tokens.per_row)


def forward_flops(model: ModelSpec, tokens: TokenCounts) -> float:
    """Return the operations of a forward pass over a row."""
    return compute_time.inference_flops(model, tokens.per_row, tokens.per_row)
