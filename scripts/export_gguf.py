"""Export a trained model for llama.cpp and Ollama.

model.gguf has the weights, the tokenizer and the chat template; Modelfile is that of Ollama.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace

from snakechat.data.ollama import modelfile
from snakechat.data.special_tokens import stop_ids
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.gguf_export import load_config, write_gguf
from snakechat.workflow.errors import warn
from snakechat.workflow.job import Job, run

GGUF = "model.gguf"
CARD = "README.md"


def main(job: Job[SimpleNamespace]) -> None:
    """Write the GGUF file, the Modelfile and a copy of the model card."""
    folder = job.inputs["model"]
    config = load_config(folder)
    tokenizer = load_tokenizer(folder)
    name = job.spec["name"]
    write_gguf(job.result / GGUF, folder, config, tokenizer, job.settings.quantization, name)
    text = modelfile(tokenizer, stop_ids(tokenizer, folder), GGUF)
    if text is None:
        warn(
            f"{job.target} has no Modelfile: no template of Ollama writes what the chat template"
            " of the model writes; llama.cpp uses the one in the GGUF file"
        )
    else:
        (job.result / "Modelfile").write_text(text)
    card = Path(folder, CARD)
    if card.exists():
        shutil.copyfile(card, job.result / CARD)


if __name__ == "__main__":
    run(main)
