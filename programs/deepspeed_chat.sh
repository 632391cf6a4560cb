#!/usr/bin/env bash
# DeepSpeed-Chat's own DPO as the command of a recipe (docs/en/migration.md#its-own-programs).
#     bash programs/deepspeed_chat.sh MODEL DATA OUTPUT GPUS [FLAGS...]
# The folder applications/DeepSpeed-Chat of DeepSpeedExamples lies next to the Snakefile. Its dataset local/jsonfile has two fixed paths; 0,1,0 gives all rows to its second step.
set -euo pipefail
model=$1 data=$2 output=$3 gpus=$4
shift 4
mkdir -p DeepSpeed-Chat/data
cp "$data/train.text.jsonl" DeepSpeed-Chat/data/train.json
cp "$data/eval.text.jsonl" DeepSpeed-Chat/data/eval.json
deepspeed --num_gpus "$gpus" DeepSpeed-Chat/training/step2_dpo_finetuning/main.py \
    --data_path local/jsonfile --data_split 0,1,0 --data_output_path "$TMPDIR/data" \
    --model_name_or_path "$model" --output_dir "$output" "$@"
# It saves a vocabulary alone.
cp "$model"/tokenizer* "$output"
