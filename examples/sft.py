"""A language model that imitates texts, the first step, with the command line of TRL's `trl/scripts/sft.py`.

python examples/sft.py \
    --model_name_or_path Qwen/Qwen2-0.5B \
    --dataset_name trl-lib/Capybara \
    --learning_rate 2.0e-5 \
    --num_train_epochs 1 \
    --packing \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --eos_token '<|im_end|>' \
    --eval_strategy steps \
    --eval_steps 100 \
    --output_dir Qwen2-0.5B-SFT \
    --push_to_hub

LoRA:

python examples/sft.py \
    --model_name_or_path Qwen/Qwen2-0.5B \
    --dataset_name trl-lib/Capybara \
    --learning_rate 2.0e-4 \
    --num_train_epochs 1 \
    --packing \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --eos_token '<|im_end|>' \
    --eval_strategy steps \
    --eval_steps 100 \
    --use_peft \
    --lora_r 32 \
    --lora_alpha 16 \
    --output_dir Qwen2-0.5B-SFT \
    --push_to_hub

Rows have `text`, `messages`, or `prompt` and `completion`. Paths and files are as in `ppo.py`, whose
`--sft_model_path` the directory is. `rlhf-ppo sft` does the same.
"""

from accelerate import PartialState

from rlhf_ppo.cli.commands import sft

if __name__ == "__main__":
    trainer = sft()
    PartialState().destroy_process_group()
