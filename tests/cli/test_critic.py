"""The command `rlhf-ppo critic RUN`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from peft import LoraConfig
from safetensors.torch import load_file

from rlhf_ppo.cli.main import main
from tests.conftest import make_tokenizer, prompt_rows, save_models, tiny_policy, tiny_scorer, write_rows
from tests.data.test_sources import CONFIGURATIONS

SMALL = ["--num_prefixes", "2", "--num_continuations", "4"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> Path:
    """Policy, reward model, reward function and prompts."""
    folder = tmp_path_factory.mktemp("critic")
    save_models(folder, policy=tiny_policy(), reward=tiny_scorer())
    prompts = [{"prompt": make_tokenizer().decode(row["input_ids"])} for row in prompt_rows(40, seed=1)]
    write_rows(folder / "prompts.jsonl", prompts)
    (folder / "paid.py").write_text(
        "def score(completion_ids, **columns):\n    return [1.0 * len(set(ids)) for ids in completion_ids]\n"
    )
    return folder


def train(folder: Path, output_dir: str, *options: str) -> Path:
    """Train with `save_critic`, from the command line."""
    words = {
        "sft_model_path": "policy",
        "reward_model_path": "reward",
        "dataset_name": "prompts.jsonl",
        "output_dir": output_dir,
    }
    words = [word for name, path in words.items() for word in (f"--{name}", str(folder / path))]
    words += ["--reward_funcs", f"{folder / 'paid.py'}:score", "--response_length", "5", "--total_episodes", "8"]
    words += ["--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu", "--save_critic"]
    main(["train", *words, "--num_sample_generations", "0", *options])
    return folder / output_dir


@pytest.fixture(scope="module")
def folder(files: Path) -> Path:
    """The same, with a finished run in `run`."""
    return train(files, "run").parent


LORA = ["--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj"]


@pytest.mark.parametrize(
    "options",
    [["--dtype", "bfloat16"], ["--value_loss", "hl_gauss", "--critic_ensemble", "2"], [*LORA, "--share_base_model"]],
    ids=" ".join,
)
def test_another_run_starts_from_the_critic(options: list[str], files: Path, tmp_path: Path) -> None:
    first = train(files, str(tmp_path / "first"), *options) / "critic"
    second = train(files, str(tmp_path / "second"), *options, "--value_model_path", str(first), "--learning_rate", "0")
    (weights,) = (path.name for path in first.glob("*.safetensors"))
    expected, found = (load_file(path / weights) for path in (first, second / "critic"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_it_audits_a_run_with_its_own_prompts_and_rewards(folder: Path, capsys: Any) -> None:
    run = folder / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    main(["critic", str(run), *SMALL])
    assert "explained variance" in capsys.readouterr().out
    found = json.loads((run / "critic_audit.json").read_text())
    assert (found["num_prefixes"], found["num_continuations"]) == (8, 4)
    assert found["figures"]["bias"]["value"] < -1, "both rewards count: the function pays 1 to 5, the values are small"
    assert before == {path: path.read_bytes() for path in before}


def test_the_prompts_may_be_of_a_configuration(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CONFIGURATIONS)
    rows = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "whole.jsonl").write_text("".join(rows))
    (tmp_path / "short.jsonl").write_text("".join(rows[:3]))
    run = folder / "run"
    main(["critic", str(run), "--dataset_name", str(tmp_path), "--dataset_config", "whole", *SMALL])
    assert json.loads((run / "critic_audit.json").read_text())["num_prefixes"] == 2 * 3


@pytest.mark.parametrize(
    ("options", "outputs", "centers"),
    [
        (["--value_loss", "hl_gauss", "--value_bins", "4", "--value_range", "-3", "5"], 4, [-2, 0, 2, 4]),
        (["--value_loss", "hl_gauss", "--value_bins", "6", "--critic_ensemble", "2"], 12, None),
        (["--critic_ensemble", "3"], 3, None),
    ],
    ids=["bins in a range", "bins and heads", "heads"],
)
def test_critics_with_bins_and_heads_are_audited(
    files: Path, options: list[str], outputs: int, centers: list[int] | None, capsys: Any
) -> None:
    run = train(files, "-".join(options), *options)
    saved = json.loads((run / "critic" / "config.json").read_text())
    assert len(saved["id2label"]) == outputs and (centers is None or saved["value_centers"] == centers)
    main(["critic", str(run), *SMALL])
    assert "explained variance" in capsys.readouterr().out
    assert json.loads((run / "critic_audit.json").read_text())["num_prefixes"] == 8


@pytest.mark.usefixtures("plain_runs")
def test_the_kl_is_to_the_runs_own_reference(files: Path, make_trainer: Any, caplog: Any, recwarn: Any) -> None:
    """Another model than the policy was: the audit equals that of the trainer, and warns of nothing."""
    save_models(files, other=tiny_policy(seed=7))
    given: Any = {
        "model": str(files / "policy"),
        "ref_model": str(files / "other"),
        "reward_model": str(files / "reward"),
    }
    made = {"value_peft_config": LoraConfig(r=2, target_modules="all-linear"), "critic_freeze": "lora_A"}
    given |= {"value_model": str(files / "reward"), "kl_coef": 1.0, "old_logprobs": "sampling", "save_critic": True}
    trainer: Any = make_trainer(**given, **made)
    trainer.train()
    trainer.save_model()
    rows = load_dataset("json", data_files=str(files / "prompts.jsonl"), split="train").select(range(4))
    expected = trainer.audit_critic(rows, num_prefixes=2, num_continuations=4)
    run = trainer.args.output_dir
    caplog.clear()
    recwarn.clear()
    words = [*SMALL, "--num_prompts", "4", "--dataset_name", str(files / "prompts.jsonl")]
    main(["critic", run, *words, "--dataset_test_split", "train"])
    found = json.loads(Path(run, "critic_audit.json").read_text())
    assert found["figures"]["bias"]["value"] == pytest.approx(expected.figures["bias"].value, abs=1e-4)
    assert not caplog.records and not recwarn.list


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ([], None, "is not the output directory of a run"),
        ([], {}, "has no critic/"),
        ([], {"whiten_rewards": True}, "whiten_rewards=True"),
        ([], {"score_scaling": True}, "score_scaling=True"),
        (["--dataset_name", "nowhere.jsonl"], {"seed": 1}, "nowhere.jsonl"),
        (["--reward_funcs", "nowhere.py:score"], {"seed": 1}, "nowhere.py"),
        (["--num_prefixes", "1"], {"seed": 1}, "num_prefixes=1"),
        (["--num_prompts", "0"], {"seed": 1}, "num_prompts=0"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path, tmp_path: Path, options: list[str], change: dict[str, Any] | None, message: str, capsys: Any
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if change is not None:
        shutil.copytree(folder / "run", run, dirs_exist_ok=True)
        settings = json.loads((run / "ppo_settings.json").read_text())
        settings["arguments"] |= change
        (run / "ppo_settings.json").write_text(json.dumps(settings))
        if not change:
            shutil.rmtree(run / "critic")
    with pytest.raises(SystemExit) as error:
        main(["critic", str(run), *options])
    assert error.value.code == 2 and message in capsys.readouterr().err
