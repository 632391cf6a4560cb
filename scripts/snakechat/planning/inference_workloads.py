"""The workloads of jobs that sample, score and evaluate, and train no model."""

from snakechat.data.prompt_sets import PAIR_KEYS, read_pairs, read_prompts
from snakechat.evaluation.comparisons import compared_inputs, initial_model
from snakechat.planning.activation_memory import POLICY, SCORE, ModelSpec, measure_size
from snakechat.planning.compute_time import forward_flops
from snakechat.planning.job_sizes import JobSizes, with_responses
from snakechat.planning.token_counts import TokenCounts, text_counts
from snakechat.planning.workload import Workload


def evaluation(
    job: JobSizes,
    models: list[ModelSpec],
    tokens: TokenCounts,
    num_targets: int,
    passes: float = 1,
) -> Workload:
    """Return the workload of forward passes over rows by one model after the other.

    Args:
        models: The models.
        tokens: The rows.
        num_targets: Largest number of tokens of a row that are scored.
        passes: Passes of each model over all rows.
    """
    flops = sum(forward_flops(model, tokens.per_row) for model in models)
    return Workload(
        trained=[],
        frozen=models,
        one_at_a_time=True,
        largest=job.micro_batch(tokens.longest, num_targets),
        flops=passes * tokens.num_rows * flops,
        notes=tuple(tokens.notes),
    )


def compute_teacher(job: JobSizes) -> Workload:
    """Return the workload of the most probable tokens of a teacher."""
    tokens, model = job.tokens(), job.model("teacher", POLICY)
    targets = tokens.per_row if job.settings["train_on"] == "all_tokens" else tokens.responses
    # A number in fp32, and the id of a token (snakechat/modeling/teacher_split.py).
    size = 4 + (2 if measure_size(model).vocabulary <= 1 << 16 else 4)
    return evaluation(job, [model], tokens, tokens.longest - 1)._replace(
        file_bytes=tokens.num_rows * targets * job.settings["teacher_top_k"] * size
    )


def compute_reference(job: JobSizes) -> Workload:
    """Return the workload of the log-probabilities of DPO's reference model."""
    tokens, batches = job.tokens(), job.settings["batches"]
    epochs = 1 if batches is None else batches["epochs"]
    return evaluation(job, [job.model("model", POLICY)], tokens, tokens.longest // 2, epochs)


def evaluate_sft(job: JobSizes) -> Workload:
    """Return the workload of perplexities, with and without the prompts as targets."""
    tokens, models = job.tokens("eval"), [job.model(key, POLICY) for key in ("base", "model")]
    return evaluation(job, models, tokens, tokens.longest - 1, passes=2)


def evaluate_reward(job: JobSizes) -> Workload:
    """Return the workload of scoring the evaluation split, in fp32."""
    tokens, model = job.tokens("eval"), job.model("model", SCORE, dtype="fp32")
    return evaluation(job, [model], tokens, tokens.longest // 2)


def evaluate_dpo(job: JobSizes) -> Workload:
    """Return the workload of the implicit rewards of the evaluation split, in fp32."""
    tokens, keys = job.tokens("eval"), [key for key in ("model", "base") if key in job.inputs]
    models = [job.model(key, POLICY, dtype="fp32") for key in keys]
    return evaluation(job, models, tokens, tokens.longest // 2)


def rw_eval(job: JobSizes) -> Workload:
    """Return the workload of scoring the pairs of prompt sets, in fp32."""
    pairs = [pair for _, pair in read_pairs(*job.prompt_files())]
    tokens = text_counts([[pair[key] for key in PAIR_KEYS] for pair in pairs])
    model = job.model("model", SCORE, dtype="fp32")
    return evaluation(job, [model], tokens, tokens.longest // 2)


def score_responses(job: JobSizes) -> Workload | None:
    """Return the workload of scoring generated responses; None if only functions score them."""
    tokens = with_responses(job.tokens(), job.settings)
    scorers = [job.model(key, SCORE) for key in job.scorers("reward")]
    if not scorers:
        return None
    workload = evaluation(job, scorers, tokens, int(tokens.responses))
    return workload._replace(one_at_a_time=False)


def generate_responses(job: JobSizes) -> Workload:
    """Return the workload of sampling responses to the prompts of both splits."""
    splits, model = (job.tokens("train"), job.tokens("eval")), job.model("model", POLICY)
    prompts = max(splits, key=lambda tokens: tokens.longest)
    prompts = prompts._replace(num_rows=sum(tokens.num_rows for tokens in splits))
    generation = job.generation(model, prompts, prompts.num_rows * job.settings["num_generations"])
    return evaluation(job, [model], prompts, 0)._replace(
        largest=generation.shape._replace(sequences=1), generations=(generation,)
    )


def evaluate_rlhf(job: JobSizes) -> Workload:
    """Return the workload of the comparison of a chat model with its initial model."""
    settings, prompts = job.settings, job.tokens("eval")
    num_prompts = min(settings["num_prompts"], prompts.num_rows)
    tokens = with_responses(prompts._replace(num_rows=num_prompts), settings)
    models = [job.model(key, POLICY) for key in compared_inputs(job.inputs)]
    initial = job.model(initial_model(job.inputs), POLICY)
    scorers = [job.model(key, SCORE, dtype="fp32") for key in job.scorers("reward", "judge")]
    # Each model evaluates its own responses twice, to find its most probable tokens and to read
    # their log-probabilities; the initial model and the scorers evaluate those of all.
    of_all = [initial, *scorers] * len(models)
    flops = sum(forward_flops(model, tokens.per_row) for model in [*models, *models, *of_all])
    num_responses = num_prompts * settings["num_generations"]
    return evaluation(job, [*models, *scorers], tokens, int(tokens.responses))._replace(
        flops=num_prompts * flops,
        generations=tuple(job.generation(model, prompts, num_responses) for model in models),
    )


def prompt_eval(job: JobSizes) -> Workload:
    """Return the workload of responses to prompt sets: greedy ones, then sampled ones."""
    prompts = text_counts([[prompt] for _, prompt in read_prompts(*job.prompt_files())])
    models = [job.model(key, POLICY) for key in compared_inputs(job.inputs)]
    generations = tuple(
        job.generation(model, prompts, 2 * prompts.num_rows, prompts.num_rows) for model in models
    )
    return evaluation(job, models, prompts, 0, passes=2)._replace(
        largest=generations[0].shape._replace(sequences=1), generations=generations
    )
