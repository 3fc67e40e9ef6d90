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

accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml \
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

The data, by default `trl-lib/tldr`, have posts as `prompt`. Posts above 512 tokens are dropped; `--max_prompt_length`
sets another limit. Without `--eval_strategy` no evaluation set is used. Responses end at EOS; TRL's script has no stop
token unless you give one.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from rlhf_ppo import PPOConfig, PPOTrainer

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PPOConfig, ModelConfig))
    script_args, args, model_args = parser.parse_args_and_config()
    if args.stop_token is None and args.stop_token_id is None:
        args.stop_token = "eos"
    if args.max_prompt_length is None:
        args.max_prompt_length = 512

    # Tokenizer and models
    path = model_args.model_name_or_path or args.sft_model_path
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    loading = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    if model_args.load_in_4bit or model_args.load_in_8bit:
        loading["quantization_config"] = get_quantization_config(model_args)
    peft_config = get_peft_config(model_args)
    policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path, **loading)
    ref_policy = None  # with adapters, the policy without them
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path, **loading)
    reward_model = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path, num_labels=1, **loading)
    value_model = AutoModelForSequenceClassification.from_pretrained(
        args.reward_model_path, num_labels=1, dtype="float32"
    )

    # Data
    dataset_name = script_args.dataset_name or "trl-lib/tldr"
    splits = load_dataset(dataset_name, script_args.dataset_config)
    train_dataset = splits[script_args.dataset_train_split]
    eval_dataset = None if args.eval_strategy == "no" else splits[script_args.dataset_test_split]

    # Training
    trainer = PPOTrainer(
        args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    trainer.generate_completions()
