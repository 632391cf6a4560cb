"""Commands of DeepSpeed-Chat as recipes: the printed YAML against the recipes of the project.

The commands have the flags of DeepSpeed-Chat's scripts (applications/DeepSpeed-Chat at 45b4b71).
"""

import shlex
import subprocess
import sys

import pytest
import yaml

from support.configs import ROOT, load, project_values

FOUR = (
    "Dahoas/rm-static Dahoas/full-hh-rlhf Dahoas/synthetic-instruct-gptj-pairwise"
    " yitingxie/rlhf-reward-datasets"
)
SFT_SINGLE_NODE = (
    f"deepspeed step1_supervised_finetuning/main.py --data_path {FOUR} --data_split 2,4,4"
    " --model_name_or_path facebook/opt-1.3b --per_device_train_batch_size 8"
    " --max_seq_len 512 --learning_rate 9.65e-6 --weight_decay 0. --num_train_epochs 16"
    " --gradient_accumulation_steps 1 --lr_scheduler_type cosine --num_warmup_steps 0 --seed 1234"
    " --zero_stage 2 --deepspeed --print_loss --output_dir out"
)
RLHF_13B = (
    "deepspeed main.py --data_path Dahoas/rm-static --data_split 2,4,4"
    " --actor_model_name_or_path out/sft --critic_model_name_or_path out/reward"
    " --num_padding_at_beginning 1 --per_device_generation_batch_size 16"
    " --per_device_training_batch_size 16 --generation_batches 1 --ppo_epochs 1"
    " --max_answer_seq_len 256 --max_prompt_seq_len 256 --actor_learning_rate 5e-4"
    " --critic_learning_rate 5e-6 --num_train_epochs 1 --lr_scheduler_type cosine"
    " --gradient_accumulation_steps 1 --num_warmup_steps 100 --deepspeed --seed 1234"
    " --enable_hybrid_engine --inference_tp_size 2 --actor_zero_stage 3 --critic_zero_stage 3"
    " --actor_gradient_checkpointing --actor_lora_dim 128 --only_optimize_lora"
    " --actor_lora_module_name decoder.layers. --output_dir out"
)


def printed_by(command, *options):
    program = [sys.executable, "scripts/from_deepspeed_chat.py", *options, *shlex.split(command)]
    return yaml.safe_load(subprocess.check_output(program, cwd=ROOT, text=True))


# The flag of RLHF_13B trains the adapters alone, at their default rate of 5e-4.
OF_RLHF = {"actor": "sft/mine", "reward": "reward/mine", "actor_learning_rate": 5e-4}


@pytest.mark.parametrize(
    ("command", "stage", "recipe", "differences"),
    [
        (SFT_SINGLE_NODE, "sft", "1.3b-single-node", {}),
        (RLHF_13B, "rlhf", "13b", {**OF_RLHF, "preset": "deepspeed_chat"}),
    ],
    ids=["sft", "rlhf"],
)
def test_a_script_gives_the_settings_of_its_recipe(command, stage, recipe, differences):
    printed = printed_by(command)[stage]["recipes"]["mine"]
    config = project_values()[stage]
    preset = config["presets"].get(printed.get("preset"), {})
    got = {**config["defaults"], **preset, **printed, "placement": None}
    ours = {**config["defaults"], **config["recipes"][recipe], "placement": None}
    assert got == {**ours, **preset, **differences, "dtype": "fp16"}


def test_python_alone_starts_one_process_and_an_empty_name_is_left_to_the_build():
    printed = printed_by("python step1/main.py --model_name_or_path ''")
    assert printed["sft"]["recipes"]["mine"]["global_batch_size"] == 16
    assert printed["models"] == {"": {"path": ""}}


def test_the_printed_config_is_accepted():
    printed = printed_by(
        "deepspeed --num_gpus 2 step1/main.py --data_path Dahoas/rm-static my/set"
        " --sft_only_data_path Dahoas/SHP --data_split 6,2,2 --model_name_or_path my/model"
        " --lora_dim 8 --zero_stage 2 --offload --gradient_checkpointing --seed 7",
        "--name=theirs",
    )
    assert printed["seed"] == 7
    assert printed["split"] == {"weights": {"sft": 6, "reward": 2, "rlhf": 2}}
    recipe = printed["sft"]["recipes"]["theirs"]
    assert recipe["datasets"] == ["rm-static", "my-set", "Dahoas-SHP"]
    assert printed["datasets"]["Dahoas-SHP"]["split"] == ["sft"]
    # 16 rows on each of two GPUs.
    assert recipe["global_batch_size"] == 32
    assert recipe["train_base"] == "embeddings_and_norms"
    assert recipe["placement"]["offload"] == "optimizer"
    load(printed)
