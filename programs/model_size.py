"""A benchmark without any library: the size of a model. python model_size.py MODEL OUTPUT."""

import json
import sys
from math import prod
from pathlib import Path

model, output = map(Path, sys.argv[1:])
weights = 0
for path in model.glob("*.safetensors"):
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    weights += sum(prod(entry["shape"]) for name, entry in header.items() if name[:2] != "__")
(output / "size.json").write_text(json.dumps({"weights": weights}))
