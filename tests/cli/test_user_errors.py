"""Every mistake of a user, at every command, is one sentence on stderr and exit code 2."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_ppo.checkpoints.run import locked
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.main import COMMANDS, main
from tests.cli.test_commands import SOURCES
from tests.conftest import save_models, tiny_policy, tiny_scorer, write_rows

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A directory with models and data, right ones and wrong ones; nothing is trained in it."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        save_models(base=tiny_policy(), other=tiny_policy(seed=3), scorer=tiny_scorer())
        save_models(torn=tiny_policy(), torn_config=tiny_policy())
        tiny_policy().save_pretrained("mute")  # no tokenizer
        weights = Path("torn/model.safetensors")
        weights.write_bytes(weights.read_bytes()[:1000])
        Path("torn_config/config.json").write_text("{")
        Path("bare").mkdir()
        row = {"prompt": "w4 w5", "text": "w4 w5", "completion": " w6", "chosen": " w4", "rejected": " w7"}
        write_rows("rows.jsonl", [row] * 12)
        write_rows("few.jsonl", [row] * 2)
        write_rows("questions.jsonl", [{"question": "w4"}] * 12)
        write_rows("numbers.jsonl", [{"prompt": 4, "text": 4, "chosen": 4, "rejected": 4}] * 12)
        write_rows("nulls.jsonl", [row] * 12 + [None])
        Path("empty.jsonl").touch()
        Path("twice.csv").write_text("prompt,text,prompt\nw4,w5,w6\n")
        Path("latin.jsonl").write_bytes('{"prompt": "caf\u00e9", "text": "caf\u00e9"}\n'.encode("latin-1") * 12)
        Path("odd.py").write_text(
            "def too_few(**_):\n    return [1.0]\n"
            "def words(completions, **_):\n    return ['good'] * len(completions)\n"
            "def not_finite(completions, **_):\n    return [float('nan')] * len(completions)\n"
        )
        Path("types.yaml").write_text("learning_rate: [1]\n")
        Path("nested.yaml").write_text("seed: {value: 1}\n")
        Path("latin.yaml").write_bytes("exp_name: caf\u00e9\n".encode("latin-1"))
        Path("header.csv").write_text("prompt,text,chosen,rejected\n")
        Path("torn.jsonl").write_text('{"prompt": "w4"}\n{"prompt": \n')
        Path("torn.parquet").write_bytes(b"PAR1 nothing")
        Path("binary.csv").write_bytes(bytes(range(256)) * 9)
        Path("notes.xlsx").touch()
        Path("file").touch()
        Path("broken.yaml").write_text("learning_rate: [1\n")
        Path("list.json").write_text("[1]")
        Path("list.yaml").write_text("- learning_rate\n")
        Path("twice.yaml").write_text("seed: 1\nlearning_rate: 1e-5\nseed: 2\n")
        Path("dashes.yaml").write_text("save_steps: 1\nsave-steps: 2\n")
        Path("dashed.yaml").write_text("save-steps: -3\n")
        Path("unknown.yaml").write_text("learning_rte: 1e-5\n")
        Path("wrong.yaml").write_text("learning_rate: fast\n")
        Path("choice.yaml").write_text("dtype: float7\n")
        Path("rewards.py").write_text(
            "def ours(completions, **kwargs):\n    return [1.0] * len(completions)\nthree = 3\n"
        )
        Path("run").mkdir()
        Path("run/trainer_state.json").write_text(json.dumps({"log_history": [{"episode": 8, "objective/kl": 0.5}]}))
        Path("unlogged").mkdir()
        Path("unlogged/trainer_state.json").write_text(json.dumps({"log_history": []}))
        Path("torn_run").mkdir()
        Path("torn_run/trainer_state.json").write_text("{")
        Path("odd_run").mkdir()
        Path("odd_run/trainer_state.json").write_text("[]")
        yield folder


@pytest.fixture
def here(workshop, monkeypatch):
    monkeypatch.chdir(workshop)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", workshop / "cache")


def error_of(command: str, options: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> str:
    """The last line on stderr of a program that must end with code 2; a script's name stands for the script."""
    with pytest.raises(SystemExit) as ended:
        if command.endswith(".py"):
            monkeypatch.setattr("sys.argv", [command, *shlex.split(options)])
            runpy.run_path(str(EXAMPLES / command), run_name="__main__")
        else:
            main([command, *shlex.split(options)])
    written = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in written and "usage:" not in written
    return written.splitlines()[-1]


QUICK = "--output_dir out --report_to none --save_strategy no --use_cpu --max_steps 1 --per_device_train_batch_size 4"
PPO = f"--sft_model_path base --reward_funcs length --response_length 4 {QUICK}"
RUN = f"{PPO} --dataset_name rows.jsonl"
DOWN = "http://127.0.0.1:9/score(backoff=0)"
LLM = "--train --trainer ppo --model base --rl-reward-model-path scorer --data-path rows.jsonl --log none"
EVAL = "--model base --opponent other --judge length --dataset_name rows.jsonl --max_new_tokens 2 --num_prompts 2"
ASKED = "--model base --opponent other --dataset_name rows.jsonl --judge_model gpt-4o-mini"

# What is wrong with the data, and what the sentence says; `{}` is the option that names it.
DATA = {
    "nowhere.jsonl": "{}='nowhere.jsonl': there is no such file or directory",
    "nowhere/at-all": "{}='nowhere/at-all' is neither a file nor a directory with data here, nor did the hub give it",
    "bare": "{}='bare' is neither a file nor a directory with data",
    "empty.jsonl": "{}='empty.jsonl': it has no rows",
    "nulls.jsonl": "{}='nulls.jsonl': line 13 of nulls.jsonl is not a JSON object such as",
    "torn.jsonl": "{}='torn.jsonl': it cannot be read: ",
    "torn.parquet": "{}='torn.parquet': it cannot be read: ",
    "binary.csv": "{}='binary.csv': it cannot be read: ",
    "twice.csv": "{}='twice.csv': the column 'prompt' stands twice",
    "latin.jsonl": "{}='latin.jsonl': it cannot be read: ",
    "notes.xlsx": "{}='notes.xlsx' is a file of an unknown kind",
    "header.csv": "{}='header.csv': it has no rows",
    "questions.jsonl": "'question'",
    "numbers.jsonl": "",
}
DATA_COMMANDS = {
    "train": f"{PPO} --dataset_name",
    "ppo_tldr.py": f"{PPO} --dataset_name",
    "sft": f"--model_name_or_path base {QUICK} --dataset_name",
    "reward": f"--model_name_or_path base {QUICK} --dataset_name",
    "estimate": f"{PPO} --device_flops 1e12 --device_bandwidth 1e11 --dataset_name",
    "llm": f"{LLM} --data-path",
    "llm sft": "--train --trainer sft --model base --log none --data-path",
    "llm reward": "--train --trainer reward --model base --log none --rejected-text-column rejected --data-path",
    "eval": f"{EVAL} --dataset_name",
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("command", DATA_COMMANDS)
def test_data_that_cannot_be_used(command, data, here, capsys, monkeypatch):
    error = error_of(command.split()[0], f"{DATA_COMMANDS[command]} {data}", capsys, monkeypatch)

    option = "data_path" if command.startswith("llm") else "dataset_name"
    program = command if command.endswith(".py") else f"rlhf-ppo {command.split()[0]}"
    assert error.startswith(f"{program}: error: ") and DATA[data].format(option) in error
    assert len(error) < 600


LORA = "--use_peft --lora_target_modules nothing_of_it"
MISTAKES = [
    # ---- rlhf-ppo train, and its script ----
    ("train", f"{RUN} --learnin_rate 1", "there is no option --learnin_rate; did you mean --l"),
    ("train", f"{RUN} --warmup_ratio", "argument --warmup_ratio"),
    ("train", f"{RUN} 3", "there is a word too many after --dataset_name"),
    ("train", f"{RUN} --learning_rate fast", "--learning_rate/--learning-rate: invalid float"),
    ("train", f"{RUN} --use_cpu perhaps", "argument --use_cpu"),
    ("train", f"{RUN} --gamma 2", "gamma=2.0 must be in [0, 1]"),
    ("train", f"{RUN} --no_cuda", "no_cuda"),
    ("train", f"{RUN} --report_to comet_ml", "`pip install -U comet-ml`, or report to 'none'"),
    ("train", f"{RUN} --deepspeed nowhere.json", "deepspeed='nowhere.json' cannot be"),
    ("train", f"{RUN} --sft_model_path scorer", "sft_model_path='scorer' is not a language model: lm_head.weight"),
    ("train", f"{RUN} --deepspeed list.json", "deepspeed='list.json' cannot be read as JSON: it holds no object"),
    ("train", f"{RUN} --deepspeed file", "deepspeed='file' cannot be read as JSON"),
    ("train", f"{RUN} --fsdp no_such_way", "no_such_way"),
    ("train", f"{RUN} --reward_weights [1", "reward_weights"),
    ("train", f"{RUN} --reward_weights 1 2", "reward_weights has 2 numbers"),
    ("train", f"{RUN} --generation_kwargs {{", "generation_kwargs"),
    ("train", f"{RUN} --config", "argument --config: expected one argument"),
    ("train", f"{RUN} --config nowhere.yaml", "--config 'nowhere.yaml' cannot be read as YAML"),
    ("train", f"{RUN} --config=broken.yaml", "--config 'broken.yaml' cannot be read as YAML"),
    ("train", f"{RUN} --config list.yaml", "--config 'list.yaml' must hold options"),
    ("train", f"{RUN} --config twice.yaml", "the key seed is repeated"),
    ("train", f"{RUN} --config list.yaml --config twice.yaml", "argument --config: given twice"),
    ("train", f"{RUN} --config dashes.yaml", "the key save_steps is repeated in --config"),
    ("train", f"{RUN} --config dashed.yaml", "save_steps=-3 must be"),
    ("train", f"{RUN} --config unknown.yaml", "no option --learning_rte; did you mean --lea"),
    ("train", f"{RUN} --config wrong.yaml", "--learning_rate"),
    ("train", f"{RUN} --config choice.yaml", "dtype='float7' in --config must be one of"),
    ("train", f"{RUN} --dtype float7", "argument --dtype: invalid choice: 'float7'"),
    ("train", f"{RUN} --output_dir file/out", "output_dir='file/out' cannot be written"),
    ("train", f"{RUN} --output_dir file", "output_dir='file' cannot be written"),
    ("train", f"{RUN} --dataset_train_split dev", "dataset_train_split='dev', but the data s"),
    ("train", f"{RUN} --dataset_test_split dev", "dataset_test_split='dev', but the data set"),
    ("train", f"{PPO} --dataset_name few.jsonl", "the training set has 2 prompts, fewer than the 4"),
    ("train", f"{PPO}", "dataset_name is not set"),
    ("train", f"{PPO} --dataset_name /", "dataset_name='/' is neither a file nor a directory with data"),
    ("train", f"{RUN} --sft_model_path nowhere/at-all", "sft_model_path='nowhere/at-all' could"),
    ("train", f"{RUN} --sft_model_path bare", "sft_model_path='bare' is a directory without a"),
    ("train", f"{RUN} --sft_model_path torn", "sft_model_path='torn' could not be loaded: its w"),
    ("train", f"{RUN} --sft_model_path torn_config", "sft_model_path='torn_config' could not b"),
    ("train", f"{RUN} --sft_model_path mute", "sft_model_path='mute' has no tokenizer"),
    ("train", f"{RUN} --model_name_or_path bare", "model_name_or_path='bare' has no tokenizer"),
    ("train", f"{RUN} --attn_implementation none_such", "sft_model_path='base' cannot be load"),
    ("train", f"{RUN} {LORA}", "nothing_of_it"),
    ("train", f"{RUN} --load_in_4bit", "load_in_4bit=True quantizes with bitsandbytes"),
    ("train", f"{RUN} --reward_model_path nowhere", "reward_model_path='nowhere' could not be l"),
    ("train", f"{RUN} --reward_model_path bare", "reward_model_path='bare' is a directory witho"),
    ("train", f"{RUN} --reward_model_path other", "reward_model_path='other' is not a reward model"),
    ("train", f"{RUN} --reward_funcs lenght", "'lenght', which is not a reward's name"),
    ("train", f"{RUN} --reward_funcs none.such.thing", "Python finds no module 'none'"),
    ("train", f"{RUN} --reward_funcs nowhere.py:ours", "there is no file 'nowhere.py'"),
    ("train", f"{RUN} --reward_funcs rewards.py:mine", "has no 'mine'"),
    ("train", f"{RUN} --reward_funcs rewards.py:three", "cannot be called"),
    ("train", f"{RUN} --reward_funcs '{DOWN}'", "the endpoint http://127.0.0.1"),
    ("train", f"{RUN} --resume_from_checkpoint nowhere", "resume_from_checkpoint='nowhere'"),
    ("train", f"{RUN} --resume_from_checkpoint True", "checkpoint"),
    ("train", f"{RUN} --response_length 99999", "response_length=99999"),
    ("train", f"{RUN} --config types.yaml", "learning_rate"),
    ("train", f"{RUN} --config nested.yaml", "seed"),
    ("train", f"{RUN} --config latin.yaml", "--config 'latin.yaml' cannot be read as YAML"),
    ("train", f"{RUN} --stop_token_id 99999", "the stop token 99999 lies outside"),
    ("train", f"{RUN} --debug nothing", "argument --debug: invalid"),
    ("train", f"{RUN} --torch_compile_mode none_such", "torch_compile_mode='none_such' must be one of"),
    ("train", f"{RUN} --optim_args nothing", "optim_args='nothing' cannot be used"),
    ("train", f"{RUN} --lr_scheduler_kwargs {{", "lr_scheduler_kwargs='{' is not JSON"),
    ("train", f"{RUN} --lr_scheduler_kwargs '{{\"none\": 1}}'", "lr_scheduler_kwargs={'none': 1} cannot be used"),
    ("train", f"{RUN} --reward_weights '{{\"length\": 1, \"length\": 2}}'", "the key length is repeated"),
    ("train", f"{RUN} --hub_token a hf_misplaced", "there is a word too many after --hub_token"),
    ("ppo.py", f"{RUN} --learnin_rate 1", "ppo.py: error: there is no option --learnin_rate"),
    ("ppo.py", f"{PPO} --dataset_name nowhere.jsonl", "ppo.py: error: dataset_name='nowhere.jsonl': there is no such"),
    ("ppo_tldr.py", f"{PPO} --learnin_rate 1", "ppo_tldr.py: error: there is no option --learnin_rate"),
    ("ppo_tldr.py", f"{PPO} --output_dir file/out --dataset_name rows.jsonl", "output_dir='file/out' cannot be w"),
    ("ppo_tldr.py", f"{RUN} --sft_model_path bare", "sft_model_path='bare' is a directory with"),
    ("ppo_tldr.py", f"{RUN} --eval_strategy steps --eval_steps 1", "dataset_test_split='test'"),
    # ---- sft and reward ----
    *[
        (command, f"{QUICK} --dataset_name rows.jsonl {options}", message)
        for command in ("sft", "reward")
        for options, message in [
            ("", "model_name_or_path=None: give the directory"),
            ("--model_name_or_path nowhere", "model_name_or_path='nowhere' could not be loaded"),
            ("--model_name_or_path bare", "model_name_or_path='bare' is a directory without a model"),
            ("--model_name_or_path torn", "model_name_or_path='torn' could not be loaded: its weights are damaged"),
            ("--model_name_or_path mute", "model_name_or_path='mute' has no tokenizer"),
            ("--model_name_or_path base --lerning_rate 1", "there is no option --lerning_rate; did you mean --l"),
            ("--model_name_or_path base --learning_rate fast", "--learning_rate/--learning-rate: invalid float"),
            ("--model_name_or_path base --eval_strategy steps --eval_steps 1", "eval"),
            ("--model_name_or_path base --config twice.yaml", "the key seed is repeated"),
            (f"--model_name_or_path base {LORA}", "nothing_of_it"),
            ("--model_name_or_path base --bf16 True --fp16 True", "bf16"),
            ("--model_name_or_path base --output_dir file/out", "output_dir='file/out' cannot be written"),
            ("--model_name_or_path base --resume_from_checkpoint nowhere", "='nowhere' is not a complete checkpoint"),
            ("--model_name_or_path base --resume_from_checkpoint True", "'out' holds no complete checkpoint"),
            ("--model_name_or_path base --report_to mlflow", "has 'mlflow', which is not installed"),
            ("--model_name_or_path base --save_steps -3", "save_steps=-3.0 must be"),
            ("--model_name_or_path base --weight_decay nan", "weight_decay=nan must be"),
            ("--model_name_or_path base --load_best_model_at_end True", "load_best_model_at_end"),
            ("--model_name_or_path base --optim none_such", "none_such"),
            ("--model_name_or_path base --report_to nobody", "report_to"),
            ("--model_name_or_path base three", "there is a word too many after --model_name_or_path"),
            ("--model_name_or_path base --dataset_train_split dev", "dataset_train_split='dev', but the data set has"),
        ]
    ],
    # ---- llm ----
    ("llm", f"{LLM} --rl-gama 1", "there is no option --rl-gama; did you mean --rl-gamma"),
    ("llm", f"{LLM} --rl-gamma 7", "(gamma is --rl-gamma)"),
    ("llm", f"{LLM} --rl-reward-fn custom", "--rl-reward-fn custom needs the function"),
    ("llm", f"{LLM} --rl-reward-weights '{{'", "rl_reward_weights='{' is not JSON"),
    ("llm", f"{LLM} --rl-mini-batch-size 3", "--rl-mini-batch-size 3 does not divide the 8 episodes"),
    ("llm", f"{LLM} --block-size 1", "--block-size 1 and --model-max-length 2048 leave no room"),
    ("llm", f"{LLM} --backend spaces-a10g", "backend='spaces-a10g' is not available here"),
    ("llm", f"{LLM} --deploy", "--deploy is not available here: serve"),
    ("llm", f"{LLM} --no-train", "--train false leaves nothing to do"),
    ("llm", f"{LLM} --lr fast", "argument --lr: invalid float value: 'fast'"),
    ("llm", f"{LLM} --use-sweep", "--use-sweep True is not available here"),
    ("llm", f"{LLM} --rl-env-type nowhere", "must be one of ['text_generation'"),
    ("llm", f"{LLM} --rl-env-type text_generation --rl-env-config '{{'", "rl_env_config='{' is not JSON"),
    ("llm", f"{LLM} --rl-reward-weights '[1]'", "rl_reward_weights='[1]' must be a dict or the JSON text"),
    ("llm", f"{LLM} --rl-reward-fn nothing", "'nothing', which is not a reward's name"),
    ("llm", f"{LLM} --text-column nothing", "text_column='nothing': the data set has no column 'nothing'"),
    ("llm", f"{LLM} --train-split dev", "train_split='dev', but the data set has only"),
    ("llm", f"{LLM} --valid-split dev", "valid_split='dev', but the data set has only"),
    ("llm", f"{LLM} --project-name file/out", "(output_dir is --project-name)"),
    ("llm", f"{LLM} --model bare", "sft_model_path='bare' is a directory without a model"),
    ("llm", f"{LLM} --model bare", "(sft_model_path is --model)"),
    ("llm", f"{LLM} --model-ref bare", "(ref_model is --model-ref)"),
    ("llm", f"{LLM} --rl-reward-model-path other", "(reward_model is --rl-reward-model-path)"),
    ("llm", f"{LLM} --rl-reward-model-path nowhere", "reward_model='nowhere' could not be loaded"),
    ("llm", f"{LLM} --quantization int4", "needs adapters"),
    ("llm", f"{LLM} --push-to-hub", "--push-to-hub needs --username and --token"),
    ("llm", f"{LLM} --rl-reward-fn '{DOWN}' --rl-max-new-tokens 4 --project-name out", "the endpoint"),
    ("llm", f"{LLM} --warmup-ratio 2", "warmup_ratio=2.0 must be in [0, 1)"),
    ("llm", f"{LLM} --block-size 0", "--block-size 0 must be at least 1, or -1"),
    ("llm", f"{LLM} --model scorer", "sft_model_path='scorer' is not a language model: lm_head.weight"),
    ("llm", f"{LLM} --batch-size 0", "batch_size=0 must be"),
    ("llm", f"{LLM} --max-samples -3", "max_samples=-3"),
    ("llm", f"{LLM} --log nobody", "(report_to is --log)"),
    ("llm", f"{LLM} --log mlflow", "`pip install mlflow`, or report to 'none' (report_to is --log)"),
    ("llm", f"{LLM} --resume-from-checkpoint True", "holds no complete checkpoint"),
    ("llm", f"{LLM} --resume-from-checkpoint nowhere", "checkpoint='nowhere' is not a complete checkpoint"),
    ("llm", f"{LLM} --token a hf_misplaced", "a word too many after --token"),
    ("llm", "--train --trainer dpo", "trainer='dpo' must be one of"),
    ("llm", "--train --trainer sft --model bare --data-path rows.jsonl --log none", "(model_name_or_path is --model)"),
    ("llm", "--train --trainer sft --mixed-precision bf16 --data-path rows.jsonl --log none --rl-gamma 1", "no mean"),
    # ---- in the first update ----
    ("train", f"{RUN} --reward_funcs odd.py:too_few", "the reward function 'too_few' returned 1 rewards for 4"),
    ("train", f"{RUN} --reward_funcs odd.py:words", "the reward function 'words' returned 'good' (str) for row 0"),
    ("train", f"{RUN} --reward_funcs odd.py:not_finite", "the reward function 'not_finite' returned nan for row 0"),
    ("llm", f"{LLM} --rl-reward-fn odd.py:too_few --rl-max-new-tokens 4", "'too_few' returned 1 rewards for"),
    # ---- eval ----
    ("eval", f"{EVAL} --modle base", "there is no option --modle; did you mean --model"),
    ("eval", f"{EVAL} hf_misplaced", "a word too many"),
    ("eval", f"{EVAL} --num_prompts many", "invalid int value: 'many'"),
    ("eval", f"{EVAL} --judge_model scorer", "give one of them"),
    ("eval", "--dataset_name rows.jsonl", "model=None and model_column=None: give one of them"),
    ("eval", f"{EVAL} --model nowhere", "model='nowhere'"),
    ("eval", f"{EVAL} --model bare", "model='bare'"),
    ("eval", f"{EVAL} --opponent torn", "opponent='torn'"),
    ("eval", f"{EVAL} --judge lenght", "judge holds 'lenght', which is not a reward's name"),
    ("eval", f"{EVAL} --judge '{DOWN}'", "the endpoint http://127.0.0.1:9/score"),
    ("eval", f"{EVAL} --judge ''", "judge holds ''"),
    ("eval", f"{EVAL} --model scorer", "model='scorer' is not a language model"),
    ("eval", f"{EVAL} --split dev", "split='dev', but the data set has only"),
    ("eval", "--model base --opponent-column missing --judge length --dataset_name rows.jsonl", "missing"),
    ("eval", "--model base --opponent other --judge_model other --dataset_name rows.jsonl", "not a reward model"),
    ("eval", f"{EVAL} --max_new_tokens 0", "max_new_tokens=0"),
    ("eval", f"{EVAL} --temperature -1", "temperature=-1"),
    ("eval", f"{EVAL} --num_prompts 0", "num_prompts=0"),
    ("eval", f"{EVAL} --batch_size 0", "batch_size=0"),
    ("eval", f"{EVAL} --temperature nan", "temperature=nan"),
    ("eval", f"{EVAL} --seed -1", "seed=-1"),
    # ---- plot, estimate, configs, demo, reward_server ----
    ("judge", f"{EVAL} --top_p 0", "top_p=0"),
    ("judge", f"{ASKED} --judge_prompt nowhere.txt", "judge_prompt='nowhere.txt' must be a text file"),
    ("judge", f"{ASKED} --judge_prompt base/model.safetensors", "judge_prompt='base/model.safetensors' must be"),
    ("judge_tldr.py", "--model_name_or_path base --judge_model scorer --num_examples 0", "num_prompts=0"),
    ("judge_tldr.py", "--model_name_or_path base --judge_model gpt-4o-mini", "OPENAI_API_KEY"),
    ("report", "nowhere", "nowhere holds no run"),
    ("init", "--model base", "the following arguments are required: --prompts"),
    ("init", "--model base --prompts p --reward_funcs length --file rows.jsonl", "rows.jsonl is there already"),
    ("pipeline", "nowhere.yaml", "nowhere.yaml"),
    ("pipeline", "~no-such-user/run.yaml", "~no-such-user/run.yaml"),
    ("pipeline", "rows.jsonl", "rows.jsonl cannot be read as YAML"),
    ("pipeline", "", "the following arguments are required: file"),
    ("plot", "", "give directories of runs, or --seeds LABEL RUN RUN"),
    ("plot", "nowhere", "nowhere holds no run: there is no such directory"),
    ("plot", "unlogged --output curves.png", "there is nothing to draw"),
    ("plot", "torn_run", "torn_run/trainer_state.json"),
    ("plot", "odd_run", "odd_run/trainer_state.json"),
    ("plot", "run --metrics no/such", "metrics=['no/such'] were logged by no run"),
    ("plot", "run --metrics objective/kls", "(did you mean 'objective/kl'?)"),
    ("plot", "run --output curves.nonsense", "output='curves.nonsense' must end in .png"),
    ("plot", "run --output bare", "output='bare' must end in .png"),
    ("report", "run --output bare", "output='bare' is a directory; name a file in it, such as 'bare/report.html'"),
    ("plot", "run --output file/curves.png", "file"),
    ("plot", "run --metric objective/kl", "unrecognized arguments: --metric"),
    ("estimate", f"{RUN} --num_devices 0", "num_devices=0 must be"),
    ("estimate", f"{RUN} --accelerate_config nowhere.yaml", "accelerate_config='nowhere.yaml'"),
    ("estimate", f"{RUN} --accelerate_config list.yaml", "accelerate_config='list.yaml' is not a configuration"),
    ("estimate", f"{RUN} --accelerate_config file", "accelerate_config='file' is not a configuration"),
    ("estimate", f"{RUN} --accelerate_config broken.yaml", "accelerate_config='broken.yaml'"),
    ("estimate", f"{RUN} --sft_model_path bare", "sft_model_path='bare' is a directory without a model"),
    ("estimate", f"{RUN} --learnin_rate 1", "there is no option --learnin_rate"),
    ("estimate", f"{RUN} --device_flops -1", "device_flops=-1"),
    ("estimate", f"{RUN} --device_memory 0", "device_memory=0"),
    ("estimate", f"{RUN} --reward_model_path nowhere", "reward_model_path='nowhere' could not be loaded"),
    ("estimate", f"{RUN} --dataset_streaming true --max_steps 3", "dataset_streaming=True"),
    ("estimate", f"{RUN} --device_bandwidth nan", "device_bandwidth=nan"),
    ("plot", "run --x week", "argument --x: invalid choice: 'week'"),
    ("plot", "run --metrics", "argument --metrics"),
    ("plot", "--seeds one", "--seeds one: give an unused label, then the runs"),
    ("configs", "out more", "unrecognized arguments: a word without an option"),
    ("configs", "out hf_misplaced", "a word without an option"),
    ("configs", "file", "directory='file' is a file"),
    ("configs", "out --over", "unrecognized arguments: --over"),
    ("demo", "file", "output_dir='file' cannot be written"),
    ("demo", "out --fast", "unrecognized arguments: --fast"),
    ("demo.py", "file", "demo.py: error: output_dir='file' cannot be written"),
    ("gsm8k.py", "nowhere.jsonl out", "'nowhere.jsonl': there is no such file or directory"),
    ("gsm8k.py", "rows.jsonl out", "rows.jsonl has no column answer, question, but ['"),
    ("gsm8k.py", "rows.jsonl", "the following arguments are required: folder"),
    ("human_text.py", "nowhere.jsonl out", "nowhere.jsonl"),
    ("human_text.py", "rows.jsonl out", "rows.jsonl has 1 prompts; 512 held out ones take four times"),
    ("human_text.py", "rows.jsonl out --num_held_out many", "invalid int value: 'many'"),
    ("human_text.py", "rows.jsonl out --num_held_out 0", "num_held_out=0 must be at least 1"),
    ("sft.py", "--model_name_or_path base --dataset_name nowhere.jsonl --output_dir out", "there is no such file"),
    ("sft.py", "--model_name_or_path base", "dataset_name is not set"),
    ("reward_modeling.py", "--model_name_or_path base --dataset_name nowhere.jsonl", "there is no such file"),
    ("reward_modeling.py", "--model_name_or_path base --dataset_name rows.jsonl --lerning_rate 1", "--lerning_rate"),
    ("reward_server.py", "--prt 8000", "reward_server.py: error: unrecognized arguments: --prt"),
    ("reward_server.py", "--port many", "argument --port: invalid int value: 'many'"),
    ("reward_server.py", "--port 99999", "--port 99999 cannot be served"),
    ("reward_server.py", "--host no.such.host.example", "--host no.such.host.example --port 8000 cannot be served"),
    ("no_such_command", "", "there is no command 'no_such_command'"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "options", "message"), MISTAKES)
def test_a_mistake_is_one_sentence(command, options, message, here, capsys, monkeypatch):
    error = error_of(command, options, capsys, monkeypatch)

    program = command if command.endswith(".py") else f"rlhf-ppo {command}" if command in COMMANDS else "rlhf-ppo"
    assert error.startswith(f"{program}: error: ") and message in error
    assert "hf_misplaced" not in error


@pytest.mark.parametrize("command", ["train", "sft", "reward"])
def test_a_directory_that_is_in_use_is_a_sentence(command, here, capsys, monkeypatch):
    Path("held").mkdir(exist_ok=True)
    options = RUN if command == "train" else f"--model_name_or_path base {QUICK} --dataset_name rows.jsonl"
    with locked("held"):
        error = error_of(command, f"{options} --output_dir held", capsys, monkeypatch)
    assert "output_dir='held' is in use: a trainer of this process" in error


@pytest.mark.parametrize("command", ["judge", "generate"])
def test_several_processes_would_all_do_the_same(command, here, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = EVAL if command == "judge" else "--model base --critic scorer --dataset_name rows.jsonl"
    error = error_of(command, options, capsys, monkeypatch)
    assert error.startswith(f"rlhf-ppo {command}: error: num_processes=2: responses are ")
    assert error.endswith("in a single process; start only one")


@pytest.mark.slow
@pytest.mark.parametrize("program", [["-m", "rlhf_ppo", "train"], [str(EXAMPLES / "ppo.py")]], ids=str)
def test_the_sentence_is_all_that_a_process_writes(program, here):
    words = shlex.split(f"{PPO} --dataset_name nowhere.jsonl")
    environment = {name: value for name, value in SOURCES.items() if name != "WANDB_MODE"}  # transformers talks of it
    ended = subprocess.run(
        [sys.executable, *program, *words], capture_output=True, text=True, env=environment, timeout=200
    )

    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert ": error: dataset_name='nowhere.jsonl': there is no such file" in line


# ---- What is a user's error ----


def deliberate() -> None:
    raise ValueError("size=3 must be\n2")


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (deliberate, "it: error: size=3 must be 2\n"),
        (lambda: open("/nowhere/at/all"), "it: error: /nowhere/at/all: No such file or directory\n"),
        (lambda: int("x"), "it: error: invalid literal for int() with base 10: 'x'\n"),
        (lambda: yaml.safe_load("a: ["), None),
        (lambda: [][0], None),
        (lambda: None.path, None),  # pyright: ignore[reportOptionalMemberAccess]
    ],
)
def test_errors_of_values_and_files_are_a_sentence_and_others_are_bugs(raised, line, capsys, monkeypatch):
    with pytest.raises(BaseException) as ended, user_errors("it"):
        raised()

    assert isinstance(ended.value, SystemExit) is (line is not None)
    assert capsys.readouterr().err == (line or "")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "debug")
    with pytest.raises(Exception), user_errors("it"):  # noqa: B017 (of any kind, with its traceback)
        raised()


def test_only_one_process_of_a_machine_speaks(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended, user_errors("it"):
        deliberate()

    assert ended.value.code == 2 and capsys.readouterr().err == ""


def test_a_users_own_module_that_fails_keeps_its_frames_of_the_traceback(here, capsys, monkeypatch):
    Path("failing.py").write_text("raise ValueError('while loading')\nreward = len\n")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["rlhf-ppo", "train", *shlex.split(f"{RUN} --reward_funcs failing.py:reward")])
    with pytest.raises(ValueError, match="while loading") as raised:
        main()
    sys.excepthook(ValueError, raised.value, raised.tb)
    error = capsys.readouterr().err
    assert re.findall(r'File ".*/(.*)", line', error) == ["failing.py"]
    assert error.endswith("ValueError: while loading\nraised while loading 'failing.py:reward' of reward_funcs\n")
