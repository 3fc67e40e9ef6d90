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

Paths may be directories or hub names; data may be a file. The data have a column `prompt`, as text or conversation.
Without a split `test`, the last tenth of the rows (at most 100) is held out. `--reward_funcs rewards.py:function`
replaces the reward model, `--use_peft` trains LoRA adapters, `--config run.yaml` reads options from a file. Responses
end at EOS; TRL's script has no stop token unless you give one.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false

from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.data.sources import hold_out, load_splits
from rlhf_ppo.ranks.processes import num_processes


@dataclass
class RewardArguments(ScriptArguments):
    """TRL's options of the data, and rewards in place of a reward model."""

    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Such as length, or rewards.py:function."})


if __name__ == "__main__":
    parser = TrlParser((RewardArguments, PPOConfig, ModelConfig))
    script_args, args, model_args = parser.parse_args_and_config()
    if args.stop_token is None and args.stop_token_id is None:
        args.stop_token = "eos"

    with user_errors("ppo.py"):  # before models load, in one sentence
        num_processes(args)
        splits = load_splits(script_args.dataset_name, script_args.dataset_config)

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
    reward_model = value_model = None  # with reward functions, values start from the policy
    if script_args.reward_funcs is None:
        load = AutoModelForSequenceClassification.from_pretrained
        reward_model = load(args.reward_model_path, num_labels=1, **loading)
        value_model = load(args.reward_model_path, num_labels=1, dtype="float32")

    # Data
    dataset = splits[script_args.dataset_train_split]
    if script_args.dataset_test_split in splits:
        train_dataset, eval_dataset = dataset, splits[script_args.dataset_test_split]
    else:
        train_dataset, eval_dataset = hold_out(dataset, num_rows=100)

    # Training
    trainer = PPOTrainer(
        args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        reward_funcs=script_args.reward_funcs,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.generate_completions()
