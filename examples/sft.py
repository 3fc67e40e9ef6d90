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

Rows have `text`, `messages`, or `prompt` and `completion`. The directory is the
`--sft_model_path` of `ppo.py`; after LoRA, that of `rlhf-ppo train`.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false

from datasets import load_dataset
from trl import (
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, args, model_args = parser.parse_args_and_config()
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    if model_args.load_in_4bit or model_args.load_in_8bit:
        args.model_init_kwargs["quantization_config"] = get_quantization_config(model_args)

    splits = load_dataset(script_args.dataset_name, script_args.dataset_config)
    trainer = SFTTrainer(
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
