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

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.model_config import ModelConfig
from trl.trainer.utils import get_peft_config

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.cli.parser import PPOArgumentParser
from rlhf_ppo.cli.quantization import quantization_options
from rlhf_ppo.cli.sources import PPOScriptArguments, choose_split, hold_out, load_splits

if __name__ == "__main__":
    parser = PPOArgumentParser((PPOScriptArguments, PPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]
    script_args, training_args, model_args = parser.parse_args_and_config()
    if training_args.stop_token is None and training_args.stop_token_id is None:
        training_args.stop_token = "eos"

    ################
    # Model & Tokenizer
    ################
    quantization = quantization_options(model_args)
    dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    model_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        trust_remote_code=script_args.trust_remote_code,
    )
    # All of the value model is trained: it stays in 32 bits, whatever the others are loaded in.
    value_model = AutoModelForSequenceClassification.from_pretrained(
        training_args.reward_model_path, num_labels=1, dtype=torch.float32, **model_kwargs
    )
    model_kwargs["dtype"] = dtype
    model_kwargs |= quantization

    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path or training_args.sft_model_path,
        padding_side="left",
        trust_remote_code=script_args.trust_remote_code,
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # a new token would lie outside the models' vocabularies
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        training_args.reward_model_path, num_labels=1, **model_kwargs
    )
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **model_kwargs)

    peft_config = get_peft_config(model_args)
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **model_kwargs)
    else:
        ref_policy = None

    ################
    # Dataset
    ################
    dataset = load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)
    train_dataset = choose_split(dataset, script_args.dataset_train_split, "dataset_train_split")
    if script_args.dataset_test_split == "test" and "test" not in dataset:
        train_dataset, eval_dataset = hold_out(train_dataset, num_rows=100)
    else:
        eval_dataset = choose_split(dataset, script_args.dataset_test_split, "dataset_test_split")

    ################
    # Training
    ################
    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    # Save and push to hub
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)

    trainer.generate_completions()
    PartialState().destroy_process_group()
