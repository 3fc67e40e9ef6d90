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

Rows have `chosen` and `rejected`, texts or conversations, and `prompt` unless these begin with it. The directory is
the `--reward_model_path` of `ppo.py`.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false

from datasets import load_dataset
from trl import (
    ModelConfig,
    RewardConfig,
    RewardTrainer,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, RewardConfig, ModelConfig))
    script_args, args, model_args = parser.parse_args_and_config()
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    if model_args.load_in_4bit or model_args.load_in_8bit:
        args.model_init_kwargs["quantization_config"] = get_quantization_config(model_args)

    splits = load_dataset(script_args.dataset_name, script_args.dataset_config)
    trainer = RewardTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=splits[script_args.dataset_train_split],
        eval_dataset=None if args.eval_strategy == "no" else splits[script_args.dataset_test_split],
        peft_config=get_peft_config(model_args),
    )
    resume = {"true": True, "false": False}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
