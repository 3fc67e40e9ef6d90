"""PPO on TL;DR summaries, with the command line of TRL's `examples/scripts/ppo/ppo_tldr.py`.

python examples/ppo_tldr.py \
    --dataset_name trl-lib/tldr \
    --dataset_test_split validation \
    --learning_rate 3e-6 \
    --output_dir pythia-1b-deduped-tldr-preference-sft-trl-style-ppo \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 64 \
    --total_episodes 30000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
    --missing_eos_penalty 1.0 \
    --stop_token eos \
    --response_length 53 \
    --eval_strategy steps \
    --eval_steps 100

accelerate launch --config_file accelerate_configs/zero2.yaml \
    examples/ppo_tldr.py \
    --dataset_name trl-lib/tldr \
    --dataset_test_split validation \
    --output_dir pythia-1b-deduped-tldr-preference-sft-trl-style-ppo \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 4 \
    --total_episodes 1000000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
    --local_rollout_forward_batch_size 16 \
    --missing_eos_penalty 1.0 \
    --stop_token eos \
    --eval_strategy steps \
    --eval_steps 100

The data has posts as `prompt`, of which those above 512 tokens are dropped (`--max_prompt_length` sets another limit).
Paths, files and all other options are as in `ppo.py`; without `--eval_strategy` no evaluation set is loaded.
"""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.model_config import ModelConfig
from trl.trainer.utils import get_peft_config

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.cli.parser import PPOArgumentParser
from rlhf_ppo.cli.quantization import quantization_options
from rlhf_ppo.cli.sources import PPOScriptArguments, choose_split, load_splits

if __name__ == "__main__":
    parser = PPOArgumentParser((PPOScriptArguments, PPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]
    script_args, training_args, model_args = parser.parse_args_and_config()
    if training_args.stop_token is None and training_args.stop_token_id is None:
        training_args.stop_token = "eos"
    if training_args.max_prompt_length is None:
        training_args.max_prompt_length = 512

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
    if training_args.eval_strategy != "no":
        eval_dataset = choose_split(dataset, script_args.dataset_test_split, "dataset_test_split")
    else:
        eval_dataset = None

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
