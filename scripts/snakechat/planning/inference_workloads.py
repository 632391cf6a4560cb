"""The workloads of jobs that sample, score and evaluate, and train no model."""

import math

from snakechat.data.prompt_sets import PAIR_KEYS, read_pairs, read_prompts
from snakechat.evaluation.comparisons import compared_inputs, initial_model
from snakechat.planning import compute_time
from snakechat.planning.activation_memory import POLICY, SCORE, ModelSpec, measure_size
from snakechat.planning.job_sizes import (
    JobSizes,
    forward_flops,
    product,
    with_responses,
)
from snakechat.planning.token_counts import text_counts
from snakechat.planning.workload import Generation, Workload


def compute_teacher(job: JobSizes) -> Workload:
    """Return the workload of the most probable tokens of a teacher."""
    tokens, model = job.tokens("train"), job.model("teacher", POLICY)
    targets = tokens.per_row if job.settings["train_on"] == "all_tokens" else tokens.responses
    # A number in fp32, and the id of a token (snakechat/modeling/teacher_split.py).
    size = 4 + (2 if measure_size(model).vocabulary <= 1 << 16 else 4)
    return Workload(
        trained=[],
        frozen=[model],
        largest=job.micro_batch(tokens.longest, tokens.longest - 1),
        flops=product(tokens.num_rows, forward_flops(model, tokens)),
        notes=tuple(tokens.notes),
        file_bytes=product(tokens.num_rows, targets, job.settings["teacher_top_k"], size),
    )


def compute_reference(job: JobSizes) -> Workload:
    """Return the workload of the log-probabilities of DPO's reference model."""
    workload = pair_evaluation(job, job.model("model", POLICY), "train")
    batches = job.settings["batches"]
    epochs = 1 if batches is None else batches["epochs"]
    return workload._replace(flops=product(epochs, workload.flops))


def evaluate_reward(job: JobSizes) -> Workload:
    """Return the workload of scoring the evaluation split, in fp32."""
    return pair_evaluation(job, job.model("model", SCORE, dtype="fp32"), "eval")


def evaluate_dpo(job: JobSizes) -> Workload:
    """Return the workload of the implicit rewards of the evaluation split, in fp32.

    It evaluates one model after the other.
    """
    models = [
        job.model(key, POLICY, dtype="fp32") for key in ("model", "base") if key in job.inputs
    ]
    workload = pair_evaluation(job, models[0], "eval")
    flops = product(len(models), workload.flops)
    return workload._replace(frozen=models, one_at_a_time=True, flops=flops)


def pair_evaluation(job: JobSizes, model: ModelSpec, split: str) -> Workload:
    """Return the workload of one forward pass over the pairs of a split."""
    tokens = job.tokens(split)
    return Workload(
        trained=[],
        frozen=[model],
        largest=job.micro_batch(tokens.longest, tokens.longest // 2),
        flops=product(tokens.num_rows, forward_flops(model, tokens)),
        notes=tuple(tokens.notes),
    )


def evaluate_sft(job: JobSizes) -> Workload:
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


def evaluate_rlhf(job: JobSizes) -> Workload:
    """Return the workload of the comparison of a chat model with its initial model."""
    settings, prompts = job.settings, job.tokens("eval")
    num_generations, response_length = settings["num_generations"], settings["max_response_length"]
    num_prompts = min(prompts.num_rows or math.inf, settings["num_prompts"])
    tokens = with_responses(prompts, num_generations, response_length)
    models = [job.model(key, POLICY) for key in compared_inputs(job.inputs)]
    initial = job.model(initial_model(job.inputs), POLICY)
    scorers = [job.model(key, SCORE, dtype="fp32") for key in job.scorers("reward", "judge")]
    # Each model evaluates its own responses; the initial model and the scorers those of all.
    flops = sum(forward_flops(model, tokens) for model in models)
    flops += len(models) * sum(forward_flops(model, tokens) for model in (initial, *scorers))
    shape = job.generation_batch(models[0], prompts, response_length, num_prompts * num_generations)
    return Workload(
        trained=[],
        frozen=[*models, *scorers],
        one_at_a_time=True,
        largest=job.micro_batch(tokens.longest, num_generations * response_length),
        flops=num_prompts * flops,
        generation=shape,
        generations=tuple(
            job.generation(model, num_prompts * num_generations, shape) for model in models
        ),
        notes=tuple(prompts.notes),
    )


def generate_responses(job: JobSizes) -> Workload:
    """Return the workload of sampling responses to the prompts of both splits."""
    settings, splits = job.settings, (job.tokens("train"), job.tokens("eval"))
    model = job.model("model", POLICY)
    prompts = max(splits, key=lambda tokens: tokens.longest)
    counts = [tokens.num_rows for tokens in splits if tokens.num_rows is not None]
    rows = sum(counts) if len(counts) == len(splits) else None
    num_responses = math.inf if rows is None else rows * settings["num_generations"]
    shape = job.generation_batch(model, prompts, settings["max_response_length"], num_responses)
    generations: tuple[Generation, ...] = ()
    if rows is not None:
        generations = (job.generation(model, num_responses, shape),)
    return Workload(
        trained=[],
        frozen=[model],
        # vLLM samples all responses.
        largest=shape._replace(sequences=1) if job.vllm_ranks() else shape,
        flops=product(rows, compute_time.inference_flops(model, prompts.prompt, prompts.prompt)),
        generation=shape,
        vllm_ranks=job.vllm_ranks(),
        generations=generations,
        notes=tuple(prompts.notes),
    )


def score_responses(job: JobSizes) -> Workload | None:
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


def prompt_eval(job: JobSizes) -> Workload:
    """Return the workload of responses to prompt sets, of one model after the other."""
    response_length = job.settings["max_response_length"]
    prompts = read_prompts(*job.prompt_files())
    tokens = text_counts([[prompt] for _, prompt in prompts])
    models = [job.model(key, POLICY) for key in compared_inputs(job.inputs)]
    num_prompts = len(prompts)
    shape = job.generation_batch(models[0], tokens, response_length, num_prompts)
    flops = sum(
        compute_time.inference_flops(model, tokens.prompt, tokens.prompt) for model in models
    )
    return Workload(
        trained=[],
        frozen=models,
        one_at_a_time=True,
        largest=shape,
        # Greedy decoding and sampling.
        flops=2 * num_prompts * flops,
        generation=shape,
        generations=tuple(job.generation(model, 2 * num_prompts, shape) for model in models),
        notes=tuple(tokens.notes),
    )


def rw_eval(job: JobSizes) -> Workload:
    """Return the workload of scoring the pairs of prompt sets, in fp32."""
    pairs = [pair for _, pair in read_pairs(*job.prompt_files())]
    tokens = text_counts([[pair[key] for key in PAIR_KEYS] for pair in pairs])
    model = job.model("model", SCORE, dtype="fp32")
    largest = job.micro_batch(tokens.longest, tokens.longest // 2)
    return Workload(
        trained=[],
        frozen=[model],
        largest=largest._replace(sequences=min(largest.sequences, len(pairs))),
        flops=product(tokens.num_rows, forward_flops(model, tokens)),
        notes=tuple(tokens.notes),
    )
