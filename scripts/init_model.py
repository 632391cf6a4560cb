"""Create a model with random weights from a config, and its tokenizer."""

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from snakechat.data.records import read_texts, removed_rows
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.models import make_causal
from snakechat.workflow.job import Job, run


def main(job: Job) -> None:
    """Create the tokenizer, then the model with the tokenizer's vocabulary and special ids."""
    settings, folder = job.settings.tokenizer, job.inputs["records"]
    paths = {path.stem: path for path in folder.glob("*.parquet")}
    removed = set(removed_rows(job, settings, paths)["train"].tolist())
    rows = enumerate(read_texts(paths["train"]))
    kept = (row for number, row in rows if number not in removed)
    texts = (text for row in kept for text in row if text is not None)
    train_tokenizer(texts, settings["vocab_size"]).save_pretrained(job.result)
    arguments = getattr(job.settings, "template_arguments", {})
    tokenizer = load_tokenizer(job.result, arguments)
    if arguments:
        tokenizer.save_pretrained(job.result)
    model = make_causal(job.settings.init, tokenizer, job.settings.seed)
    model.save_pretrained(job.result)
    print(f"{job.spec['name']}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that, like OPT's, starts every text with <s>."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts,
        vocab_size,
        min_frequency=0,
        show_progress=False,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    run(main)
