"""A user's mistake is one sentence on stderr and exit code 2."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl.trainer.model_config import ModelConfig

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli.aitraining import LLMCommand
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.main import main
from rlhf_ppo.compat.params import LLMTrainingParams
from tests.conftest import save_models, tiny_policy, tiny_scorer, write_rows


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models and data, right ones and wrong ones; nothing is trained in it."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_models(base=tiny_policy(), scorer=tiny_scorer())
        Path("bare").mkdir()
        Path("used/checkpoint-1").mkdir(parents=True)
        Path("used/checkpoint-1/trainer_state.json").write_text('{"global_step": 1}')
        row = {"prompt": "w4 w5", "text": "w4 w5", "completion": " w6", "chosen": " w4", "rejected": " w7"}
        write_rows("rows.jsonl", [row] * 12)
        write_rows("questions.jsonl", [{"question": "w4"}] * 12)
        write_rows("numbers.jsonl", [row | {"text": 5, "chosen": 1}] * 12)
        write_rows("gap.jsonl", [row] * 6 + [row | {"text": None, "rejected": None}] * 6)
        write_rows("blank.jsonl", [row] * 6 + [row | {"prompt": None}])
        write_rows("mixed.jsonl", [row | {"chosen": [{"role": "assistant", "content": "w4"}]}] * 12)
        write_rows("flat.jsonl", [{"messages": "w4 w5"}] * 12)
        for name in ("empty.jsonl", "sheet.xlsx"):
            Path(name).touch()
        Path("syntax.py").write_text("def ours(:\n")
        Path("importing.py").write_text("import os\nimport no_such_module\n")
        Path("own.py").write_text(OWN)
        step = "{sft_model_path: base, dataset_name: rows.jsonl, reward_funcs: own.py:numbr, response_length: 4}"
        Path("steps.yaml").write_text(f"output_dir: steps\nppo: {step}\n")
        Path("torn.jsonl").write_text('{"prompt": "w4"}\n{"prompt": \n')
        Path("unknown.yaml").write_text("learning_rte: 1e-5\n")
        Path("null.yaml").write_text("critic_learning_rate: null\nlearning_rate: null\n")
        Path("open.yaml").write_text("reward_funcs: [length\n")
        Path("game.yaml").write_text("environment: own.py:Game\n")
        Path("list.yaml").write_text("- learning_rate\n")
        Path("choice.yaml").write_text("dtype: bf16\n")
    return folder


OWN = """
LIMIT = 5

class Game: pass

def number(completions, **_):
    return [1.0] * len(completions)

def word(completions, **_):
    return ["0.5"] * len(completions)

def needs(completions, answer):
    return [1.0] * len(completions)

def untold(move):
    return move
"""
QUICK = "--output_dir out --report_to none --save_strategy no --use_cpu --max_steps 1 --per_device_train_batch_size 4"
PPO = f"train --sft_model_path base --reward_funcs length --response_length 4 {QUICK}"
RUN = f"{PPO} --dataset_name rows.jsonl"
TRL = f"--bf16 False {QUICK} --model_name_or_path"
LLM = "llm --train --trainer ppo --model base --rl-reward-model-path scorer --data-path rows.jsonl --log none"
JUDGE = "judge --dataset_name rows.jsonl --model_column chosen --opponent_column rejected"
MISTAKES = [
    (f"{RUN} --learnin_rate 1", "there is no option --learnin_rate (did you mean 'learning_rate'?)"),
    (f"{RUN} --report_to none stray", "no option takes 'stray'"),
    (f"{RUN} --lora_r 8", "lora_r=8 has no effect without use_peft: add --use_peft"),
    (f"reward {TRL} base --dataset_name rows.jsonl --lora_alpha 8", "lora_alpha=8 has no effect without use_peft"),
    (f"{RUN} --use_dora", "use_dora=True has no effect without use_peft"),
    ("estimate --sft_model_path base --lora_r 8", "lora_r=8 has no effect without use_peft"),
    ("estimate --model_name_or_path base", "model_name_or_path='base' names the tokenizer only"),
    (
        f"train --model_name_or_path base --reward_funcs length --response_length 4 {QUICK} --dataset_name rows.jsonl",
        "'EleutherAI/pythia-160m', its default, would be trained: write --sft_model_path base",
    ),
    (f"sft {TRL} base --dataset_name rows.jsonl --max_seq_length 8", "(did you mean 'max_length'?)"),
    (f"{RUN} --report_to comet_ml", "report_to='comet_ml': CometCallback requires comet-ml"),
    (f"sft {TRL} base --dataset_name rows.jsonl --report_to comet_ml", "report_to='comet_ml': CometCallback requires"),
    (f"{RUN} --report_to nowhere", "nowhere is not supported, only"),
    (f"{RUN} --fp16", "fp16=True has no effect on a CPU"),
    (
        f"train --sft_model_path base --response_length 4 {QUICK} --dataset_name rows.jsonl",
        "no reward is given, and TRL's default cannot be loaded: give reward_model_path, reward_funcs or environment",
    ),
    (f"{RUN} --model_name_or_path no/hub", "model_name_or_path='no/hub' is not a directory, and the hub does not"),
    (f"{RUN} --learning_rate 3e-4x", "learning_rate='3e-4x' must be a number"),
    (f"{RUN} --seed x", "seed='x' must be a whole number"),
    (f"{RUN} --stop_token foo", "stop_token='foo' must be one of 'eos'"),
    (rf"{RUN} --stop_strings '\n\n'", r"""write a line break in JSON, '["\n"]',"""),
    (f"{RUN} --config", "argument --config: expected one argument"),
    (f"{RUN} --no_cuda", "no_cuda: use use_cpu"),
    (f"{RUN} --gamma 2", "gamma=2.0 must be in [0, 1]"),
    (f"{RUN} --config nowhere.yaml", "nowhere.yaml is no file and no preset: the presets are"),
    (
        f"{RUN} --config unknown.yaml",
        "--config unknown.yaml: there is no option --learning_rte (did you mean 'learning_rate'?)",
    ),
    *(
        (
            f"{command} --config null.yaml",
            "--config null.yaml: learning_rate is null, but needs a value: write it, or d",
        )
        for command in (RUN, f"sft {TRL} base --dataset_name rows.jsonl")
    ),
    (f"{RUN} --config steps.yaml", "--config steps.yaml is the file of a pipeline: rlhf-ppo pipeline steps.yaml"),
    (f"{RUN} --config list.yaml", "must contain a YAML mapping"),
    (f"{RUN} --config choice.yaml", "--config choice.yaml: dtype='bf16' must be one of"),
    (f"{RUN} --use_peft --use_bnb_nested_quant", "use_bnb_nested_quant=True has no effect without load_in_4bit"),
    (f"{RUN} --policy_loss own.py:gspoo", "but own.py has no function or class 'gspoo'"),
    (f"{RUN} --dataset_train_split dev", "dataset_train_split='dev', but the data s"),
    (PPO, "dataset_name is not set"),
    (f"{PPO} --dataset_name nowhere.jsonl", "dataset_name='nowhere.jsonl'"),
    (f"{PPO} --dataset_name torn.jsonl", "dataset_name='torn.jsonl'"),
    (f"{PPO} --dataset_name questions.jsonl", "'question'"),
    (f"{RUN} --sft_model_path nowhere/at-all", "sft_model_path='nowhere/at-all'"),
    (f"{RUN} --output_dir used --sft_model_path nowhere", "output_dir='used' holds checkpoints"),
    (f"{LLM} --project-name used --model nowhere", "move them away, or choose another project_name"),
    (f"{RUN} --sft_model_path bare", "sft_model_path='bare'"),
    (f"{RUN} --sft_model_path scorer", "sft_model_path='scorer' is a reward model (LlamaForSeq"),
    (f"{RUN} --reward_model_path base", "reward_model_path='base' is not a reward model: score.weight of Llama"),
    (f"{RUN} --reward_funcs lenght", "reward_funcs holds 'lenght': write"),
    (
        f"{RUN} --reward_funcs nowhere.py:ours",
        "reward_funcs holds 'nowhere.py:ours', but nowhere.py cannot be imported",
    ),
    (f"{RUN} --reward_funcs own.py:numbr", "own.py has no function or class 'numbr' (did you mean 'number'?)"),
    (f"{RUN} --reward_funcs own.py:LIMIT", "own.py has no function or class 'LIMIT'"),
    (f"{RUN} --reward_funcs own.py", "reward_funcs holds 'own.py': write 'path/file.py:name'"),
    (f"{RUN} --reward_funcs nowhere.ours", "nowhere cannot be imported: ModuleNotFoundError"),
    (f"{RUN} --reward_funcs syntax.py:ours", "SyntaxError: invalid syntax (syntax.py, line 1)"),
    (f"{RUN} --reward_funcs importing.py:ours", "ModuleNotFoundError in line 2: No module named 'no_such_module'"),
    (
        f"{RUN} --reward_funcs own.py:word",
        "the reward function 'word' returned '0.5' for row 0: return a finite number",
    ),
    (f"{RUN} --reward_funcs own.py:needs", "'needs' requires the argument 'answer', but no column has this name"),
    (f"{RUN} --reward_funcs http://", "reward_funcs holds 'http://': write"),
    (f"{RUN} --tools own.py:untold", "a tool cannot be used: DocstringParsingException"),
    (
        f"{RUN} --environment own.py:Game",
        "cannot be used: AttributeError: type object 'Game' has no attribute 'reset'",
    ),
    (f"{RUN} --policy_loss own.py:LIMIT", "policy_loss holds 'own.py:LIMIT', but own.py has no function"),
    ("pipeline steps.yaml", "ppo: error: reward_funcs holds 'own.py:numbr'"),
    ("pipeline nowhere.yaml", "nowhere.yaml: No such file or directory"),
    ("init --model base --prompts rows.jsonl --reward_funcs own.py:numbr", "reward_funcs holds 'own.py:numbr'"),
    (
        "init --model base --prompts rows.jsonl --preferences numbers.jsonl",
        "preferences='numbers.jsonl' has chosen=1",
    ),
    (
        "init --model base --prompts rows.jsonl --preferences questions.jsonl",
        "preferences='questions.jsonl' has the columns ['question'], but training needs `chosen` and `rejected`, and "
        "`prompt` unless both begin with it: rename them, such as by datasets' `rename_columns({'OLD': 'chosen'})",
    ),
    (f"{PPO} --dataset_name blank.jsonl", "row 6 of train_dataset has an empty prompt: drop such rows, such as by"),
    (
        "init --model base --prompts questions.jsonl --reward_funcs length",
        "or name it with --prompt_column of `train` and `init`",
    ),
    (
        f"{PPO} --dataset_name questions.jsonl --prompt_column query",
        "prompt_column='query', but the data set has the co",
    ),
    (f"{PPO} --dataset_name empty.jsonl", "dataset_name='empty.jsonl' cannot be loaded as a file"),
    (f"{PPO} --dataset_name sheet.xlsx", "files of another kind are not read"),
    (f"sft {TRL} base --dataset_name numbers.jsonl", "text=5 in row 0: write texts"),
    (f"sft {TRL} base --dataset_name gap.jsonl", "text=None in row 6: write texts"),
    (f"sft {TRL} base --dataset_name flat.jsonl", "messages='w4 w5' in row 0: write conversations"),
    (f"sft {TRL} base --dataset_name rows.jsonl --max_length 0", "max_length=0 must be finite and at least 1"),
    (f"sft {TRL} scorer --dataset_name rows.jsonl", "model_name_or_path='scorer' is a reward model, not a language"),
    (
        f"reward {TRL} base --dataset_name gap.jsonl",
        "dataset_name='gap.jsonl' has chosen=' w4', prompt='w4 w5', rejected=None in row 6",
    ),
    (
        f"reward {TRL} base --dataset_name mixed.jsonl",
        "has chosen=[{'role': 'assistant', 'content': 'w4'}], prompt='w4",
    ),
    (f"sft {QUICK} --bf16 False --dataset_name rows.jsonl", "model_name_or_path=None: give the directory"),
    (f"sft {TRL} base --dataset_name questions.jsonl", "but training needs `text` or `messages`"),
    (f"reward {TRL} nowhere --dataset_name rows.jsonl", "model_name_or_path='nowhere'"),
    (f"reward {TRL} base --dataset_name rows.jsonl --lerning_rate 1", "there is no option --lerning_rate"),
    (f"{LLM} --rl-gama 1", "there is no option --rl-gama (did you mean 'rl_gamma'?)"),
    (f"{LLM} --use-sweep", "there is no option --use-sweep"),
    (f"{LLM} --rl-gamma 7", "rl_gamma=7.0 must be in [0, 1]"),
    (f"{LLM} --rl-max-new-tokens 100000", "and rl_max_new_tokens=100000 take 100002 positions"),
    (f"{LLM} --rl-max-new-tokens 63", "set block_size=2, or"),
    (f"{LLM} --rl-multi-objective --rl-env-type nonsense", "contradicts rl_env_type='nonsense': leave one of them"),
    (
        f'{LLM} --rl-env-type text_generation --rl-reward-fn length --rl-env-config \'{{"reward_fn": "default"}}\'',
        "reward_fn is given both in the environment's config and apart from it: leave one of them out",
    ),
    (
        "judge --dataset_name rows.jsonl --model base --opponent_column completion --judge_model gpt-4o-mini",
        "OPENAI_API_KEY is not",
    ),
    (
        "judge --dataset_name rows.jsonl --model base --opponent_column completion --judge_model nowhere",
        "judge_model='now",
    ),
    (
        f"{JUDGE} --judge_model m --judge_url http://127.0.0.1:1/v1 --judge_options temperature=0",
        "judge_options='temperature=0' must be a dict or the JSON text of an object",
    ),
    (f"{LLM} --rl-reward-fn custom", "--rl-reward-fn custom needs the function"),
    (f"{LLM} --rl-reward-weights '{{'", "rl_reward_weights='{' must be a dict or the JSON text of an object"),
    (f"{LLM} --rl-mini-batch-size 3", "--rl-mini-batch-size 3 does not divide the 8 episodes"),
    (f"{LLM} --text-column nothing", "text_column='nothing': the data set has no column 'nothing'"),
    (f"{LLM} --rl-env-type nowhere", "must be one of ['text_generation'"),
    (f"{LLM} --no-train", "train=False: rlhf-ppo llm only trains; leave the option out"),
    (
        f"{LLM} --data-path mixed.jsonl --text-column chosen --chat-template none",
        "chat_template='none', but the column 'chosen' holds conversations, which a template renders: leave",
    ),
    (f"{LLM} --auto-find-batch-size", "leave out options that trainer='ppo' does not use: auto_find_batch_size=True"),
    (f"{LLM} --packing", "options that trainer='ppo' does not use: packing=True"),
    (
        f"{LLM} --trainer sft --prompt-text-column prompt",
        "that trainer='sft' does not use: prompt_text_column='prompt', rl_reward_model_path='scorer'",
    ),
    (f"{LLM} --trainer reward --no-rl-optimize-device-cache", "'scorer', rl_optimize_device_cache=False"),
    (
        f"{LLM} --use-flash-attention-2 --attn-implementation eager",
        "use_flash_attention_2=True contradicts attn_implementation='eager': leave one of them out",
    ),
    (f"{LLM} --lora-r 8", "leave out options that have no effect without peft: lora_r; or give --peft"),
    ("llm --train --trainer dpo", "trainer='dpo' must be one of"),
    ("llm --train --trainer ppo --data-path rows.jsonl", "give --rl-reward-model-path"),
    (f"{JUDGE} --judge own.py:word", "the reward function 'word' returned '0.5' for row 0"),
    (f"{JUDGE} --judge own.py:numbr", "judge holds 'own.py:numbr'"),
    (
        f"reward {TRL} base --dataset_name rows.jsonl --eval_strategy epoch",
        "eval_strategy='epoch': none of the 12 pairs can be held out, which takes at most a tenth of them and all "
        "pairs of a prompt together: name a split with dataset_test_split, or leave eval_strategy out",
    ),
    (
        f"{RUN} --dataset_streaming",
        "the first 100 rows of a stream are held out for evaluation, and none is left: give dataset_test_split, or "
        "leave dataset_streaming out",
    ),
    (
        "init --model base --prompts rows.jsonl --reward_funcs length",
        "prompts='rows.jsonl' has 1 distinct prompt: init holds some out for the judge; give at least 2",
    ),
    (f"estimate {RUN.removeprefix('train ')} --num_devices 0", "num_devices=0 must be"),
    (f"reward {TRL} base --dataset_name blank.jsonl", "prompt=None, rejected=' w7' in row 6"),
    (f"{JUDGE.replace('rows', 'blank')} --judge length", "dataset_name='blank.jsonl': row 6 has no prompt"),
    (f"{JUDGE.replace('rows', 'numbers')} --judge length", "column 'chosen' has 1, which is no text"),
    (f"{RUN} --config open.yaml", 'while parsing a flow sequence in "open.yaml", line 1, column 15'),
    (f"{RUN} --config game.yaml", "cannot be used: AttributeError: type object 'Game' has no attribute 'reset'"),
    (f"{RUN} --reward_funcs custom", "reward_funcs holds 'custom', which needs settings"),
    (f"{RUN} --reward_funcs get_soft_overlong_punishment", "call builtin_reward('get_soft_overlong_punishment', ...)"),
    ("plot nowhere", "nowhere holds no run: neither it nor a checkpoint"),
    ("plot", "give directories of runs"),
    ("report nowhere", "nowhere holds no run: neither it nor a checkpoint"),
    ("trian", "there is no command 'trian': use one of demo"),
]

NOT_OF_LLM = {option.name for group in (PPOConfig, ModelConfig) for option in fields(group) if "_" in option.name} - {
    option.name for group in (LLMTrainingParams, LLMCommand) for option in fields(group)
}


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence(
    command: str, message: str, workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(workshop)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in error and "usage:" not in error
    last = error.splitlines()[-1]
    assert last.startswith("rlhf-ppo") and ": error: " in last and message in last, last
    if command.startswith("llm"):
        assert not NOT_OF_LLM & {*re.findall(r"\w+", last)}, last


@pytest.mark.parametrize("command", [RUN, f"sft {TRL} base --dataset_name rows.jsonl"])
def test_a_precision_other_than_the_launchers_is_one_sentence(
    command: str, workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(workshop)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(f"{command} --bf16 False"))
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "error: bf16=False contradicts the launcher's mixed_precision='bf16'" in last


def test_an_error_of_the_users_code_has_its_traceback(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    Path("failing.py").write_text("def fails(completions, **_):\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(shlex.split(f"{RUN} --reward_funcs failing.py:fails"))


def test_a_run_without_sample_tables_prints_neither_table_nor_bars(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(workshop)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for number, places in enumerate((0, 1)):
        questions = f"--dataset_name questions.jsonl --prompt_column question --output_dir quiet{number}"
        main(shlex.split(f"{PPO} {questions} --num_sample_generations {places}"))
        printed = capsys.readouterr()
        assert ("model response" in printed.out) == (places == 1)
        assert "Writing model shards" not in printed.err


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no such option"), ""), (RuntimeError("no memory"), "rlhf-ppo train, rank 5: error: no memory")],
)
def test_a_process_says_what_it_alone_may_have(
    error: Exception, said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all have, one on each machine says."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(SystemExit, match="2"), user_errors("rlhf-ppo train"):
        raise error
    assert capsys.readouterr().err.strip() == said
