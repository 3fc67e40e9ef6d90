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

The data, by default `trl-lib/tldr`, has posts as `prompt`. Posts above 512 tokens are dropped; `--max_prompt_length`
sets another limit. Paths, files and all other options are as in `ppo.py`; without `--eval_strategy` no evaluation set
is loaded.
"""

from accelerate import PartialState
from trl.trainer.model_config import ModelConfig

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli.arguments import PPOArgumentParser, PPOScriptArguments, quantization_options
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.training import running, scored_ppo_trainer, train_and_save
from rlhf_ppo.data.sources import choose_split, load_splits
from rlhf_ppo.training.checks import check_output_dir

if __name__ == "__main__":
    parser = PPOArgumentParser((PPOScriptArguments, PPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]
    with user_errors(parser.prog):
        script_args, training_args, model_args = parser.parse_args_and_config()
        quantization_options(model_args)  # an error comes before anything is loaded
        check_output_dir(training_args.output_dir)
        if training_args.stop_token is None and training_args.stop_token_id is None:
            training_args.stop_token = "eos"
        if training_args.max_prompt_length is None:
            training_args.max_prompt_length = 512

        name = script_args.dataset_name or "trl-lib/tldr"
        dataset = load_splits(name, script_args.dataset_config, script_args.dataset_streaming)
        train_dataset = choose_split(dataset, script_args.dataset_train_split, "dataset_train_split")
        eval_dataset = None
        if training_args.eval_strategy != "no":
            eval_dataset = choose_split(dataset, script_args.dataset_test_split, "dataset_test_split")
        trainer = scored_ppo_trainer(script_args, training_args, model_args, train_dataset, eval_dataset)
    with running(parser.prog, trainer):
        train_and_save(trainer, name, show_samples=True)
    PartialState().destroy_process_group()
