#!/usr/bin/env bash
# The smallest command of a recipe: it copies the model that it starts from.
#     command: "bash programs/copy_model.sh {model} {output}"
set -euo pipefail
cp -r "$1/." "$2"
echo "copied $1"
