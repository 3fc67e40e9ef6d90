"""A reward model from pairs of responses, with the command line of TRL's `examples/scripts/reward_modeling.py`.

python examples/reward_modeling.py \
    --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
    --dataset_name trl-lib/ultrafeedback_binarized \
    --output_dir Qwen2-0.5B-Reward \
    --per_device_train_batch_size 8 \
    --num_train_epochs 1 \
    --gradient_checkpointing True \
    --learning_rate 1.0e-5 \
    --logging_steps 25 \
    --eval_strategy steps \
    --eval_steps 50 \
    --max_length 2048

LoRA:

python examples/reward_modeling.py \
    --model_name_or_path Qwen/Qwen2-0.5B-Instruct \
    --dataset_name trl-lib/ultrafeedback_binarized \
    --output_dir Qwen2-0.5B-Reward-LoRA \
    --per_device_train_batch_size 8 \
    --num_train_epochs 1 \
    --gradient_checkpointing True \
    --learning_rate 1.0e-4 \
    --logging_steps 25 \
    --eval_strategy steps \
    --eval_steps 50 \
    --max_length 2048 \
    --use_peft \
    --lora_task_type SEQ_CLS \
    --lora_r 32 \
    --lora_alpha 16

Rows have `chosen` and `rejected`, texts or conversations, and `prompt` unless these begin with it. Paths and files are
as in `ppo.py`, whose `--reward_model_path` the directory is. `rlhf-ppo reward` does the same.
"""

from accelerate import PartialState

from rlhf_ppo.cli.commands import reward

if __name__ == "__main__":
    trainer = reward()
    PartialState().destroy_process_group()
