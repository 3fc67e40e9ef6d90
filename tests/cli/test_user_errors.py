"""A user's mistake is one sentence on stderr and exit code 2."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.cli.main import main
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
        write_rows("few.jsonl", [row] * 2)
        write_rows("questions.jsonl", [{"question": "w4"}] * 12)
        Path("torn.jsonl").write_text('{"prompt": "w4"}\n{"prompt": \n')
        Path("unknown.yaml").write_text("learning_rte: 1e-5\n")
        Path("list.yaml").write_text("- learning_rate\n")
    return folder


QUICK = "--output_dir out --report_to none --save_strategy no --use_cpu --max_steps 1 --per_device_train_batch_size 4"
PPO = f"train --sft_model_path base --reward_funcs length --response_length 4 {QUICK}"
RUN = f"{PPO} --dataset_name rows.jsonl"
TRL = f"--bf16 False {QUICK} --model_name_or_path"
LLM = "llm --train --trainer ppo --model base --rl-reward-model-path scorer --data-path rows.jsonl --log none"
MISTAKES = [
    (f"{RUN} --learnin_rate 1", "there is no option --learnin_rate (did you mean 'learning_rate'?)"),
    (f"{RUN} --lora_r 8", "lora_r=8 has no effect without use_peft: add --use_peft"),
    (f"reward {TRL} base --dataset_name rows.jsonl --lora_alpha 8", "lora_alpha=8 has no effect without use_peft"),
    (f"{RUN} --fp16", "fp16=True has no effect on a CPU"),
    (
        f"train --sft_model_path base --response_length 4 {QUICK} --dataset_name rows.jsonl",
        "no reward is given, and TRL's default cannot be loaded: give reward_model_path, reward_funcs or environment",
    ),
    (f"{RUN} --model_name_or_path no/hub", "model_name_or_path='no/hub' is no directory here, and the hub did not"),
    (f"{RUN} --learning_rate fast", "--learning_rate/--learning-rate: invalid float"),
    (f"{RUN} --no_cuda", "no_cuda"),
    (f"{RUN} --gamma 2", "gamma=2.0 must be in [0, 1]"),
    (f"{RUN} --config nowhere.yaml", "nowhere.yaml"),
    (f"{RUN} --config unknown.yaml", "learning_rte"),
    (f"{RUN} --config list.yaml", "must contain a YAML mapping"),
    (f"{RUN} --dataset_train_split dev", "dataset_train_split='dev', but the data s"),
    (f"{PPO} --dataset_name few.jsonl", "the training set has 2 prompts, fewer than the 4"),
    (PPO, "dataset_name is not set"),
    (f"{PPO} --dataset_name nowhere.jsonl", "dataset_name='nowhere.jsonl'"),
    (f"{PPO} --dataset_name torn.jsonl", "dataset_name='torn.jsonl'"),
    (f"{PPO} --dataset_name questions.jsonl", "'question'"),
    (f"{RUN} --sft_model_path nowhere/at-all", "sft_model_path='nowhere/at-all'"),
    (f"{RUN} --output_dir used --sft_model_path nowhere", "output_dir='used' holds checkpoints"),
    (f"{LLM} --project-name used --model nowhere", "holds checkpoints that this run does not continue"),
    (f"{RUN} --sft_model_path bare", "sft_model_path='bare'"),
    (f"{RUN} --sft_model_path scorer", "sft_model_path='scorer' is not a language model: lm_head.weight"),
    (f"{RUN} --reward_model_path base --sft_model_path ./base", "reward_model_path='base' is not a reward model"),
    (f"{RUN} --reward_funcs lenght", "reward_funcs holds 'lenght': write"),
    (f"{RUN} --reward_funcs nowhere.py:ours", "nowhere.py"),
    (f"sft {QUICK} --bf16 False --dataset_name rows.jsonl", "model_name_or_path=None: give the directory"),
    (f"sft {TRL} base --dataset_name questions.jsonl", "but training needs `text` or `messages`"),
    (f"reward {TRL} nowhere --dataset_name rows.jsonl", "model_name_or_path='nowhere'"),
    (f"reward {TRL} base --dataset_name rows.jsonl --lerning_rate 1", "there is no option --lerning_rate"),
    (f"{LLM} --rl-gama 1", "there is no option --rl-gama (did you mean 'rl_gamma'?)"),
    (f"{LLM} --use-sweep", "there is no option --use-sweep"),
    (f"{LLM} --rl-gamma 7", "gamma=7.0 must be in [0, 1]"),
    (f"{LLM} --rl-reward-fn custom", "--rl-reward-fn custom needs the function"),
    (f"{LLM} --rl-reward-weights '{{'", "rl_reward_weights='{' must be a dict or the JSON text of an object"),
    (f"{LLM} --rl-mini-batch-size 3", "--rl-mini-batch-size 3 does not divide the 8 episodes"),
    (f"{LLM} --text-column nothing", "text_column='nothing': the data set has no column 'nothing'"),
    (f"{LLM} --rl-env-type nowhere", "must be one of ['text_generation'"),
    ("llm --train --trainer dpo", "trainer='dpo' must be one of"),
    ("llm --train --trainer ppo --data-path rows.jsonl", "give --rl-reward-model-path"),
    ("plot nowhere", "nowhere"),
    ("plot", "give directories of runs"),
    ("report nowhere", "nowhere"),
    ("trian", "there is no command 'trian': use one of demo"),
]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence(
    command: str, message: str, workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(workshop)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in error and "usage:" not in error
    last = error.splitlines()[-1]
    assert last.startswith("rlhf-ppo") and ": error: " in last and message in last, last


def test_an_error_of_the_users_code_has_its_traceback(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    Path("own.py").write_text("def fails(completions, **_):\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(shlex.split(f"{RUN} --reward_funcs own.py:fails"))
