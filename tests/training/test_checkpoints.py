"""What a checkpoint holds, when it counts as one, and what loading it is trusted with."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.checkpoints import last_complete_checkpoint, why_incomplete
from rlhf_ppo.checkpoints.files import write_manifest
from tests.conftest import count_w4, make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.runs import QUICK, Bomb, DieAt, RunDied, assert_identical, parameters

MakeTrainer = Callable[..., PPOTrainer]
SAVING: dict[str, Any] = {**QUICK, "total_episodes": 4, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has written checkpoint-1 and checkpoint-2."""
    output_dir = tmp_path_factory.mktemp("finished")
    args = PPOConfig(
        output_dir=str(output_dir), stop_token="eos", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, num_sample_generations=0, seed=3, **SAVING,
    )  # fmt: skip
    trainer = PPOTrainer(
        args, make_tokenizer(), tiny_policy(), value_model=tiny_scorer(seed=2), reward_funcs=count_w4,
        train_dataset=Dataset.from_list(prompt_rows(32)),
    )  # fmt: skip
    trainer.train()
    return output_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, where `make_trainer`'s output goes."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


# ---- What is in it ----


def test_checkpoint_holds_all_that_resuming_needs_and_its_manifest_last(run: Path) -> None:
    checkpoint = run / "checkpoint-2"
    assert files_of(checkpoint) == {
        "config.json", "generation_config.json", "manifest.json", "model.safetensors", "optimizer.pt",
        "ppo_arguments.json", "ppo_run.json", "ppo_state.json", "rng_state.pth", "scheduler.pt",
        "separate_rng_state_0.pth", "tokenizer.json", "tokenizer_config.json", "trainer_state.json",
        "training_args.bin", "value_model/config.json", "value_model/model.safetensors",
    }  # fmt: skip
    written = {name: (checkpoint / name).stat().st_mtime_ns for name in files_of(checkpoint)}
    assert written["manifest.json"] == max(written.values())
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert listed.keys() == files_of(checkpoint) - {"manifest.json"}
    assert listed["optimizer.pt"]["size"] == (checkpoint / "optimizer.pt").stat().st_size


def test_checkpoint_loads_as_the_models_it_was_made_of(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**SAVING)
    trainer.train()
    checkpoint = Path(trainer.args.output_dir, "checkpoint-2")
    ids = torch.tensor([[5, 6, 7, 8]])
    pairs = (
        (AutoModelForCausalLM, checkpoint, trainer.model.policy),
        (AutoModelForSequenceClassification, checkpoint / "value_model", trainer.model.value_model),
    )
    for auto_class, directory, trained in pairs:
        loaded = auto_class.from_pretrained(directory)
        assert torch.equal(loaded(ids).logits, trained.eval()(ids).logits)


# ---- Whole and half-written checkpoints ----


def without(name: str) -> Callable[[Path], None]:
    def remove(checkpoint: Path) -> None:
        shutil.rmtree(checkpoint / name) if (checkpoint / name).is_dir() else (checkpoint / name).unlink()

    return remove


def test_newest_is_the_highest_number_not_the_last_in_the_alphabet(run: Path) -> None:
    (run / "checkpoint-2").rename(run / "checkpoint-10")
    shutil.copytree(run / "checkpoint-1", run / "checkpoint-9")
    (run / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-10")


def test_resuming_without_a_whole_checkpoint_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**SAVING)
    with pytest.raises(
        ValueError, match=r"resume_from_checkpoint=True, but output_dir=.* holds no complete checkpoint"
    ):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="resume_from_checkpoint='nowhere' is not a complete checkpoint"):
        trainer.train(resume_from_checkpoint="nowhere")
    assert trainer.state.global_step == 0


class Writes:
    """Counts what writes files, and stops the n-th of them when half of it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.stop_at = 0, 0
        self.targets: list[str] = []
        for module, name in ((builtins, "open"), (io, "open")):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name), self._opens))
        monkeypatch.setattr(torch, "save", self._counted(torch.save, lambda _, target: target))
        save_file = transformers.modeling_utils.safe_save_file
        monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", self._counted(save_file, lambda _, to: to))
        monkeypatch.setattr(os, "replace", self._counted(os.replace, lambda source, target: target))

    @staticmethod
    def _opens(path: Any, mode: str = "r", *_: Any, **__: Any) -> Any:
        return path if "w" in mode and isinstance(path, str | os.PathLike) else None

    def _counted(self, function: Callable[..., Any], target_of: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            target = target_of(*args, **{key: value for key, value in kwargs.items() if key == "mode"})
            if target is not None and "checkpoint-2" in str(target):
                self.count += 1
                self.targets.append(Path(target).name)
                if self.count == self.stop_at:
                    if function is not os.replace:
                        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
                    raise RunDied
            return function(*args, **kwargs)

        return counted


def test_at_every_write_of_a_checkpoint_the_one_before_is_the_newest_whole_one(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a whole checkpoint of an older run is being overwritten, and where only one may be kept."""
    trainer = make_trainer(**SAVING, save_total_limit=1, callbacks=[DieAt("on_step_begin", 1)])
    with pytest.raises(RunDied):
        trainer.train()
    run = Path(trainer.args.output_dir)
    trainer.state.global_step = 2
    writes = Writes(monkeypatch)
    shutil.copytree(run, run.with_name("before"))
    trainer._save_checkpoint(trainer.model, None)
    assert re.fullmatch(r"manifest\.json\.[0-9a-f]{8}\.tmp", writes.targets[-2])
    assert writes.targets[-1] == "manifest.json"
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"]
    num_writes = writes.count
    assert num_writes > 10

    for stop_at in range(1, num_writes + 1):
        writes.stop_at = 0
        shutil.rmtree(run)
        shutil.copytree(run.with_name("before"), run)
        shutil.copytree(run / "checkpoint-1", run / "checkpoint-2")  # whole, of an older run
        writes.count, writes.stop_at = 0, stop_at
        with pytest.raises(RunDied):
            trainer._save_checkpoint(trainer.model, None)
        assert why_incomplete(str(run / "checkpoint-2")), f"counts as whole without {writes.targets[-1]}"
        assert last_complete_checkpoint(str(run)) == str(run / "checkpoint-1")


def test_a_kill_while_old_checkpoints_are_removed_leaves_the_new_one(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_half(directory: str, **_: Any) -> None:
        without("model.safetensors")(Path(directory))
        raise RunDied

    monkeypatch.setattr(transformers.trainer_utils.shutil, "rmtree", remove_half)
    trainer = make_trainer(**SAVING, save_total_limit=1)
    with pytest.raises(RunDied):
        trainer.train()
    run = trainer.args.output_dir
    assert not Path(run, "checkpoint-1").exists() and Path(run, "deleted-checkpoint-1").exists()
    assert last_complete_checkpoint(run) == os.path.join(run, "checkpoint-2")


# ---- Checkpoints of other models ----


def lora(rank: int = 4) -> Any:
    return pytest.importorskip("peft").LoraConfig(r=rank, target_modules=["q_proj"])


@pytest.mark.parametrize("kind", ["other rank", "no adapter"])
def test_checkpoint_of_an_adapter_needs_the_same_adapter(kind: str, make_trainer: MakeTrainer) -> None:
    run = make_trainer(**SAVING, peft_config=lora(4)).args.output_dir
    make_trainer(**SAVING, peft_config=lora(4)).train()
    trainer = make_trainer(**SAVING, **({"peft_config": lora(8)} if kind == "other rank" else {}))
    before = parameters(trainer)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=.*checkpoint-1' is of another model"):
        trainer.train(resume_from_checkpoint=f"{run}/checkpoint-1")
    assert_identical(parameters(trainer), before)


# ---- What loading is trusted with ----


def test_nothing_of_a_checkpoint_is_unpickled_with_full_trust(
    run: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, Any] = {}
    load = torch.load

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        loaded[os.path.basename(file)] = kwargs.get("weights_only")
        return load(file, *args, **kwargs)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was loaded")

    trainer = make_trainer(**SAVING)
    monkeypatch.setattr(torch, "load", watched)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert loaded == {
        "optimizer.pt": True,
        "scheduler.pt": True,
        "rng_state.pth": True,
        "separate_rng_state_0.pth": True,
    }


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_code_hidden_in_a_checkpoint_does_not_run(name: str, run: Path, make_trainer: MakeTrainer) -> None:
    """Not even with a manifest that its author has made for it."""
    mark = run / "mark"
    torch.save(Bomb(mark), run / "checkpoint-1" / name)
    trainer = make_trainer(**SAVING)
    with pytest.raises(ValueError, match=f"is not a complete checkpoint: its {name}"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    write_manifest(str(run / "checkpoint-1"))
    if name == "training_args.bin":  # written for the reader, never read
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    else:
        with pytest.raises(ValueError, match=f"(?s)cannot be loaded: its .*{name}.*Weights only load failed"):
            trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert not mark.exists()
    torch.load(run / "checkpoint-1" / name, weights_only=False)
    assert mark.exists()  # the bomb does work


def test_code_beside_a_model_is_not_run(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    directory = tmp_path / "model"
    tiny_policy().save_pretrained(directory)
    mark = tmp_path / "mark"
    (directory / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).write_text('ran')\n")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (directory / "config.json").write_text(json.dumps(config))
    trainer = make_trainer(**QUICK, model=str(directory))  # Llama is known without the code
    assert type(trainer.model.policy).__module__.startswith("transformers.")
    config["model_type"] = "own"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="comes with Python code of its own, which is not run"):
        make_trainer(**QUICK, model=str(directory))
    assert not mark.exists()


# ---- save_model ----


def test_save_model_writes_the_policy_alone(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.generation_config.repetition_penalty = 1.3
    trainer = make_trainer(**QUICK, model=policy)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert files_of(tmp_path / "saved") == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "training_args.bin",
    }  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded(ids).logits, trainer.model.policy.eval()(ids).logits)
    assert_identical(dict(loaded.state_dict()), dict(trainer.model.policy.state_dict()))
    assert loaded.generation_config.repetition_penalty == 1.3
    assert loaded.config.use_cache is True
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == make_tokenizer().get_vocab()


def test_saved_policy_with_tied_embeddings_stays_tied(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(**SAVING, model=tiny_policy(tie_word_embeddings=True))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for directory in (tmp_path / "saved", Path(trainer.args.output_dir, "checkpoint-2")):
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded.lm_head.weight, trainer.model.policy.lm_head.weight)
    expected = parameters(trainer)
    resumed = make_trainer(**SAVING, model=tiny_policy(tie_word_embeddings=True))
    resumed.train(resume_from_checkpoint=str(Path(trainer.args.output_dir, "checkpoint-1")))
    assert_identical(parameters(resumed), expected)


def test_saved_lora_policy_is_its_adapter(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = make_trainer(**QUICK, peft_config=lora())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    names = files_of(tmp_path / "saved")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not any("value" in name or name == "model.safetensors" for name in names)
    loaded = peft.PeftModel.from_pretrained(tiny_policy(), tmp_path / "saved")
    ids = torch.tensor([[5, 6, 7, 8]])
    trained = trainer.model.policy.eval()(ids).logits
    assert torch.equal(loaded(ids).logits, trained)
    assert not torch.equal(tiny_policy()(ids).logits, trained)  # the adapter does something


def test_train_end_leaves_config_as_it_was(make_trainer: MakeTrainer) -> None:
    class SeesCache(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            assert model.config.use_cache is True

    trainer = make_trainer(**QUICK, callbacks=[SeesCache()], gradient_checkpointing=True)
    trainer.train()
    assert trainer.model.policy.config.use_cache is True
