"""PPO on any prompts, with the command line of TRL's `examples/scripts/ppo/ppo.py`.

python examples/ppo.py \
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style \
    --dataset_train_split descriptiveness \
    --learning_rate 3e-6 \
    --output_dir pythia-1b-deduped-descriptiveness-sentiment-trl-style-ppo \
    --per_device_train_batch_size 64 \
    --gradient_accumulation_steps 1 \
    --total_episodes 10000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path EleutherAI/pythia-1b-deduped \
    --reward_model_path EleutherAI/pythia-1b-deduped \
    --missing_eos_penalty 1.0

accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml \
    examples/ppo.py \
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style \
    --dataset_train_split descriptiveness \
    --output_dir pythia-1b-deduped-descriptiveness-sentiment-trl-style-ppo \
    --num_ppo_epochs 1 \
    --num_mini_batches 1 \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --total_episodes 10000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path EleutherAI/pythia-1b-deduped \
    --reward_model_path EleutherAI/pythia-1b-deduped \
    --local_rollout_forward_batch_size 1 \
    --missing_eos_penalty 1.0

Every path may be a local directory; `--dataset_name` also takes a .jsonl, .json, .csv or .parquet file with a `prompt`
column. `--use_peft` trains LoRA adapters, with `--load_in_4bit` over a quantized model. `--config run.yaml` reads
options from a file, `--resume_from_checkpoint True` goes on from the newest checkpoint in `--output_dir`.
"""

from accelerate import PartialState

from rlhf_ppo.cli.commands import train

if __name__ == "__main__":
    trainer = train()
    PartialState().destroy_process_group()
