"""What a job takes: memory of a GPU by part, operations, seconds, disk. Nothing is run.

Memory is that of the fullest moment: what a job holds at all times, and what its phases add, one at
a time. Sizes and passes are those of snakechat/planning/footprint.py; bytes, and elements where it says so.
"""

from typing import NamedTuple

from snakechat.planning.flops import PEAKS, forward_flops, training_flops
from snakechat.planning.footprint import SCORE, asked_bytes, size_of, trained_bytes
from snakechat.training.zero_stages import stage_used

GIB = 1 << 30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PARTS = ("weights", "gradients", "optimizer", "activations", "cache", "buffers")


class Gpu(NamedTuple):
    """memory: bytes; flops: operations of 16-bit numbers a second, dense; bandwidth: bytes a second
    of its memory.
    """

    memory: int
    flops: float
    bandwidth: float


# NVIDIA's data sheets of each; those with two forms are SXM ones.
GPUS = {
    "v100-32g": Gpu(32 * GIB, PEAKS["V100"], 0.9e12),
    "a6000": Gpu(48 * GIB, PEAKS["RTX A6000"], 0.768e12),
    "l40s": Gpu(48 * GIB, PEAKS["L40S"], 0.864e12),
    "a100-40g": Gpu(40 * GIB, PEAKS["A100"], 1.555e12),
    "a100-80g": Gpu(80 * GIB, PEAKS["A100"], 2.039e12),
    "h100": Gpu(80 * GIB, PEAKS["H100"], 3.35e12),
    "h200": Gpu(141 * 10**9, PEAKS["H200"], 4.8e12),
}

# What is assumed, here alone: the share of a GPU's memory that tensors can have (the rest is CUDA's
# own, and gaps); of its operations that training and scoring reach; of its bandwidth that sampling
# reaches; and the seconds that a layer takes to start its kernels for one more token.
USABLE = 0.93
FLOPS_REACHED = 0.4
BANDWIDTH_REACHED = 0.5
SECONDS_A_LAYER = 5e-4


class Zero(NamedTuple):
    """Elements that DeepSpeed gathers and sends at a time; its defaults (zero/config.py, 0.19).

    bucket: of gradients that are sent together. reuse: weights that stage 3 keeps if they are
    needed again before so many others. prefetch: weights that it fetches ahead.
    """

    bucket: int = 500_000_000
    reuse: int = 1_000_000_000
    prefetch: int = 50_000_000


DEFAULT = Zero()


class Trained(NamedTuple):
    """A model that a job trains: a footprint.Model, and its ZeRO stage as the placement has it."""

    model: tuple
    zero_stage: int

    @property
    def stage(self):
        """The ZeRO stage that it is trained at."""
        return stage_used(self.zero_stage, self.model.dtype)


def add(*parts):
    """The sum of some parts of memory."""
    return {name: sum(some.get(name, 0) for some in parts) for name in PARTS}


def processes(placement):
    """Processes of a job, each with a GPU of its own where there are any."""
    return placement["nodes"] * max(placement["gpus_per_node"], 1)


# --- memory -----------------------------------------------------------------------------------


def memory(trained, frozen, placement, largest, sampled, average, zero=DEFAULT):
    """The fullest moment of a training in a process: its name, and bytes by part.

    trained: the models, of RLHF the actor first. frozen: footprint.Models that are asked beside.
    largest, sampled: Layouts of the largest pass, and of one that samples, if any. average: whether
    a moving average of the first model is kept.
    """
    base = [held(entry, placement, zero) for entry in trained]
    if average:
        base.append(
            {"optimizer": 4 * size_of(trained[0].model).trained / cut(trained[0], placement)}
        )
    frozen_here = 0 if placement.get("offload_frozen") else sum(map(whole, frozen))
    base.append({"weights": frozen_here})
    moments = [*phases(trained, frozen, placement, largest, zero)]
    if sampled:
        actor = trained[0]
        weights = {"weights": whole(actor.model) if actor.stage == 3 else 0}
        moments.append(("sampling", add(weights, sampling(actor.model, sampled))))
    moments = [(name, add(*base, parts)) for name, parts in moments]
    # Each process loads all models whole, before any is cut up.
    loaded = sum(whole(entry.model) for entry in trained) + frozen_here
    moments.append(("loading", add({"weights": loaded})))
    return fullest(moments)


def asked_memory(models, largest, sampled=None):
    """The same of a job that only asks models, all of which it has at a time."""
    weights = {"weights": sum(map(whole, models))}
    moments = [("scoring", scoring(model, largest)) for model in models]
    if sampled:
        moments.append(("sampling", sampling(models[0], sampled)))
    return fullest((name, add(weights, parts)) for name, parts in moments)


def host_memory(trained, frozen, placement):
    """Bytes of a node's own memory: what is offloaded, and models on their way to each GPU.

    transformers makes a model in the CPU's memory, in each process, one model after the other.
    """
    here = max(placement["gpus_per_node"], 1)
    models = [entry.model for entry in trained] + frozen
    kept = sum(map(whole, frozen)) * here if placement.get("offload_frozen") else 0
    for entry in trained:
        on_gpu = held(entry, placement)
        there = held(entry, placement | {"offload": "none"})
        kept += here * sum(there[part] - on_gpu[part] for part in there)
    return kept + here * max(map(whole, models))


def fullest(moments):
    """The moment, of some (name, parts), that has the most bytes."""
    return max(moments, key=lambda moment: sum(moment[1].values()))


def held(entry, placement, zero=DEFAULT):
    """Parts that a process has of a model in training at all times, from the first step on.

    Rajbhandari et al. 2020 (ZeRO), section 3.1: weights in the dtype of the passes, and for each
    trained one 12 bytes of optimizer: the weight in fp32 and two moments. Gradients add up in fp32
    here, 4 bytes. Of n processes each has 1/n of the optimizer from stage 1 on, of the gradients
    from 2 on, and of the weights at 3. At stage 0 in fp32, weights and masters are the same tensor.
    What is offloaded is in the CPU's memory.
    """
    size, n = size_of(entry.model), cut(entry, placement)
    if entry.stage == 0:
        masters = 0 if entry.model.dtype == "fp32" else 4
        return {
            "weights": whole(entry.model),
            "gradients": 4 * size.trained,
            "optimizer": (8 + masters) * size.trained,
        }
    parts = {
        "weights": whole(entry.model) / (n if entry.stage == 3 else 1),
        "gradients": 4 * size.trained / (1 if entry.stage == 1 else n),
        "optimizer": 12 * size.trained / n,
        "buffers": bucket(entry, zero) if entry.stage == 3 else 0,
    }
    if placement["offload"] != "none":
        parts |= {"gradients": 0, "optimizer": 0}
    if placement["offload"] == "parameters":
        parts["weights"] = 0
    return parts


def phases(trained, frozen, placement, largest, zero):
    """What the moments of a training add to what it has at all times: (name, parts) of each."""
    for entry in trained:
        up, down = trained_bytes(entry.model, largest)
        there = {"weights": gathered(entry, zero)}
        sent = {"buffers": 0 if entry.stage == 3 else bucket(entry, zero)}
        # Stage 1 has its bucket from the first pass of a step to the last, stage 2 in backward.
        early = sent if entry.stage == 1 else {}
        yield "forward", add(there, early, {"activations": up})
        # One that fills up before the end is sent while there are activations left.
        full = sent_copy(entry, zero) if size_of(entry.model).trained > zero.bucket else 0
        activations = {"activations": down, "buffers": full}
        yield "backward", add(there, sent, activations)
        yield "sending", add(there, sent, {"buffers": sent_copy(entry, zero)})
        yield "scoring", add(there, scoring(entry.model, largest))
        if entry.stage == 3:
            # As it is saved: every process has the whole model.
            yield "saving", {"weights": whole(entry.model)}
    for model in frozen:
        awake = whole(model) if placement.get("offload_frozen") else 0
        yield "scoring", add({"weights": awake}, scoring(model, largest))


def whole(model):
    """Bytes of all weights of a model."""
    return BYTES[model.dtype] * size_of(model).weights


def cut(entry, placement):
    """Into how many parts the optimizer of a model is cut."""
    return processes(placement) if entry.stage else 1


def bucket(entry, zero):
    """Bytes of the gradients that DeepSpeed sends together: in fp32, at stage 2 in the dtype."""
    if entry.stage == 0:
        return 0
    return zero.bucket * (BYTES[entry.model.dtype] if entry.stage == 2 else 4)


def sent_copy(entry, zero):
    """Bytes of the copy of a bucket that is sent: in fp32, or cut up for stage 3."""
    if entry.stage < 2 or (entry.stage == 2 and entry.model.dtype == "fp32"):
        return 0
    return 4 * min(size_of(entry.model).trained, zero.bucket)


def gathered(entry, zero):
    """Bytes of whole weights that stage 3 has beside its part, while a pass goes on.

    DeepSpeed keeps those that come again before `reuse` others: forward and backward together that
    is the half of it. Beside are those fetched ahead, and the layer that is at work.
    """
    if entry.stage < 3:
        return 0
    size = size_of(entry.model)
    kept = zero.reuse / 2 + zero.prefetch + max(size.layer, size.largest)
    return BYTES[entry.model.dtype] * min(size.weights, kept)


def scoring(model, largest):
    """Parts of a pass without gradients."""
    return {"activations": asked_bytes(model, largest)}


def sampling(model, sampled):
    """Parts of a pass that samples: keys and values of all its tokens, and once more those of half
    a layer, as rows leave; the prompts' pass; the last logits of each row, in the dtype and three
    times in fp32.
    """
    size, width = size_of(model), BYTES[model.dtype]
    cache = width * size.kv * sampled.lines * sampled.length * (1 + 0.5 / size.layers)
    prompt = sampled.length - sampled.learnt
    prompts = sampled._replace(length=prompt, learnt=prompt)
    asked = asked_bytes(model._replace(loss=SCORE), prompts)
    logits = sampled.lines * size.vocabulary * (width + 12)
    return {"cache": cache, "activations": asked + logits}


# --- operations and time ----------------------------------------------------------------------


def scored_flops(model, tokens, length):
    """Operations of a pass without gradients over tokens of sequences of a mean length: 2 a weight
    and token, and attention's (snakechat/planning/flops.py).
    """
    return tokens * forward_flops(size_of(model)._asdict(), length)


def trained_flops(model, tokens, length):
    """Operations of training on tokens: 6 a weight and token, 4 where it has no gradient, and
    attention's (snakechat/planning/flops.py). What is computed anew counts here: it takes its time.
    """
    anew = scored_flops(model, tokens, length) if model.checkpointing else 0
    return tokens * training_flops(size_of(model)._asdict(), length) + anew


def seconds_of(flops, gpu, gpus):
    """Seconds that operations take on so many GPUs."""
    return flops / (gpus * gpu.flops * FLOPS_REACHED)


def sampling_seconds(model, rows, sampled, gpu, gpus):
    """Seconds in which rows are responded on so many GPUs.

    Each token of a pass reads all weights, and keys and values of what is there, half of the
    response in the mean (Pope et al. 2022, section 2.1); kernels take their time to start, too.
    """
    size, width = size_of(model), BYTES[model.dtype]
    mean = sampled.length - sampled.learnt / 2
    read = width * (size.weights + size.kv * sampled.lines * mean)
    token = max(read / (gpu.bandwidth * BANDWIDTH_REACHED), size.layers * SECONDS_A_LAYER)
    passes = -(-rows // (sampled.lines * gpus))
    return passes * sampled.learnt * token


# --- disk -------------------------------------------------------------------------------------


def saved_bytes(model):
    """Bytes of a model's folder: its weights, in fp32 where adapters were merged into them."""
    size, width = size_of(model), BYTES[model.dtype]
    merged = size.layer * size.layers if model.lora_rank else 0
    return width * (size.weights - merged) + 4 * merged


def state_bytes(trained):
    """Bytes of what a run can go on from: masters and moments of all that is trained."""
    return sum(12 * size_of(entry.model).trained for entry in trained)
