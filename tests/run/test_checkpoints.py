"""What a checkpoint holds, when it counts as one, and what loading it is trusted with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.run.checkpoints import last_complete_checkpoint
from tests.conftest import make_tokenizer, tiny_policy
from tests.generation.test_stopping import byte_level
from tests.models.architectures import tiny_model
from tests.models.test_peft import lora
from tests.runs import QUICK, Bomb, MakeTrainer, RunDied, assert_identical, parameters

SAVING: dict[str, Any] = {**QUICK, "total_episodes": 4, "save_strategy": "steps", "save_steps": 1}
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def run(make_trained: MakeTrainer) -> Path:
    """The directory of a run that has written checkpoint-1; the next trainer has the same."""
    trainer = make_trained(**{**SAVING, "total_episodes": 2})
    return Path(str(trainer.args.output_dir))


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_checkpoint_holds_what_resuming_needs_and_loads_as_the_trained_models(make_trained: MakeTrainer) -> None:
    trainer = make_trained(**SAVING)
    checkpoint = Path(str(trainer.args.output_dir), "checkpoint-2")
    assert files_of(checkpoint) == {
        *("config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "ppo_state.json"),
        *("rng_state.pth", "scheduler.pt", "separate_rng_state_0.pth", "tokenizer.json", "tokenizer_config.json"),
        *("trainer_state.json", "training_args.bin", "value_model/config.json", "value_model/model.safetensors"),
    }
    for auto_class, directory, trained in (
        (AutoModelForCausalLM, checkpoint, trainer.model.policy),
        (AutoModelForSequenceClassification, checkpoint / "value_model", trainer.model.value_model),
    ):
        loaded = auto_class.from_pretrained(directory)
        assert torch.equal(loaded(IDS).logits, trained.eval()(IDS).logits)


@pytest.mark.parametrize("method", ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_save_that_died_leaves_the_checkpoint_before_as_the_newest(
    method: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only one may be kept; what it has left is deleted by the next save."""
    trainer = make_trainer(**SAVING, save_total_limit=1)
    save = getattr(trainer, method)

    def dies(directory: str, *args: Any, **kwargs: Any) -> None:
        save(directory, *args, **kwargs)
        if trainer.state.global_step == 2:
            raise RunDied

    monkeypatch.setattr(trainer, method, dies)
    with pytest.raises(RunDied):
        trainer.train()
    run = Path(str(trainer.args.output_dir))
    assert last_complete_checkpoint(run) == str(run / "checkpoint-1") and not (run / "checkpoint-2").exists()
    make_trainer(**SAVING, save_total_limit=1).train(resume_from_checkpoint=True)
    assert [path.name for path in run.glob("*checkpoint*")] == ["checkpoint-2"] and not (run / "_unfinished").exists()


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        ("peft_config", lora, r"'model: all weights, now a LORA adapter'"),
        ("value_model", lambda: "policy", r"'value_model: all weights, now a head on the policy'"),
        ("model", lambda: tiny_policy(num_hidden_layers=1), r"model\.layers\.1\."),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    name: str, value: Callable[[], Any], difference: str, run: Path, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(**SAVING, **{name: value()})
    with pytest.raises(ValueError, match=rf"the checkpoint is of another model, which differs in \[.*{difference}"):
        trainer.train(resume_from_checkpoint=True)


def test_what_is_resumed_with_other_arguments_is_said_once(
    run: Path, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("WARNING", logger="rlhf_ppo"):
        make_trainer(**SAVING, kl_coef=0.5, gamma=0.25).train(resume_from_checkpoint=True)
    [said] = [record.getMessage() for record in caplog.records if "other arguments" in record.getMessage()]
    assert "gamma=0.25 (was 1.0)" in said and "kl_coef=0.5 (was 0.05)" in said and "learning_rate" not in said
    assert capsys.readouterr().out.count(f"Continues from {run / 'checkpoint-1'} (update 1 of 2).\n") == 1


def test_another_batch_size_is_refused(run: Path, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="batch_size=2 episodes per update, but it is 1"):
        make_trainer(**SAVING | {"per_device_train_batch_size": 1}).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_code_hidden_in_a_checkpoint_does_not_run(name: str, run: Path, make_trainer: MakeTrainer) -> None:
    mark = run / "mark"
    torch.save(Bomb(mark), run / "checkpoint-1" / name)
    trainer = make_trainer(**SAVING)
    if name == "training_args.bin":  # written for the reader, never read
        trainer.train(resume_from_checkpoint=True)
    else:
        with pytest.raises(Exception, match=r"(?s)Weights only load failed"):
            trainer.train(resume_from_checkpoint=True)
    assert not mark.exists()
    torch.load(run / "checkpoint-1" / name, weights_only=False)
    assert mark.exists()  # the bomb does work


def test_save_model_writes_the_policy_alone(make_trained: MakeTrainer, tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.generation_config.repetition_penalty = 1.3
    trainer = make_trained(**QUICK, model=policy)
    trainer.save_model(str(tmp_path / "saved"))
    assert files_of(tmp_path / "saved") == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        "training_args.bin",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_identical(dict(loaded.state_dict()), dict(trainer.model.policy.state_dict()))
    assert loaded.generation_config.repetition_penalty == 1.3 and loaded.config.use_cache is True
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == make_tokenizer().get_vocab()


def test_the_saved_policy_stops_where_training_stopped_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """At the stop token, not at EOS, and at the stop strings: alone in plain transformers, as the trainer's rows."""
    stopping: dict[str, Any] = {"stop_token": None, "stop_token_id": 9, "stop_strings": list("adehkq")}
    models = {"model": tiny_policy(vocab_size=310), "value_model": None, "processing_class": byte_level()}
    trainer = make_trainer(**QUICK | {"response_length": 40}, **stopping, **models)
    prompts = torch.arange(100, 116)[:, None].repeat(1, 2)
    sampled = trainer.generate_responses(Prompts(prompts, prompts > 0, {}), trainer.sampler.settings(greedy=True))
    trainer.save_model(str(tmp_path))
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for row, (ids, real) in enumerate(zip(sampled.response_ids, sampled.response_mask, strict=True)):
        again = loaded.generate(prompts[row : row + 1], max_new_tokens=40, do_sample=False, tokenizer=tokenizer)
        assert again[0, 2:].tolist() == ids[real].tolist()
    assert len(set(sampled.response_mask.sum(dim=1).tolist())) > 2
    assert trainer.policy_model.generation_config.stop_strings is None  # of the model that trains


def test_a_policy_is_saved_in_the_type_of_the_directory_that_it_came_from(
    make_trained: MakeTrainer, tmp_path: Path
) -> None:
    tiny_policy(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "given")
    trainer = make_trained(**SAVING, model=str(tmp_path / "given"))
    trainer.save_model(str(tmp_path / "saved"))
    loaded, trained = AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), trainer.policy_model
    assert loaded.dtype == torch.bfloat16 and trained.dtype == torch.float32
    assert_identical(dict(loaded.state_dict()), dict(trained.to(torch.bfloat16).state_dict()))
    sizes = [Path(tmp_path, name, "model.safetensors").stat().st_size for name in ("given", "saved")]
    assert abs(sizes[0] - sizes[1]) < 100
    checkpoint = Path(str(trainer.args.output_dir), "checkpoint-2")
    assert (
        AutoModelForCausalLM.from_pretrained(checkpoint).dtype == torch.float32
    )  # from which a run continues exactly


def test_weights_that_transformers_keeps_in_float32_are_saved_in_float32(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """The bias that chooses a token's experts: bfloat16 would round it, and choose others."""
    given = tiny_model("deepseek_v3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    given.get_buffer(bias).copy_(1 + torch.arange(len(given.get_buffer(bias))) * 1e-4)
    given.save_pretrained(tmp_path / "float32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "given"
    )
    make_trainer(**SAVING, model=str(tmp_path / "given")).save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert_identical(saved, load_file(tmp_path / "given" / "model.safetensors"))
    assert torch.equal(saved[bias], given.get_buffer(bias)) and saved["lm_head.weight"].dtype == torch.bfloat16


def test_tied_embeddings_stay_tied(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(**SAVING, model=tiny_policy(tie_word_embeddings=True))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, trainer.model.policy.lm_head.weight)
    first = str(Path(str(trainer.args.output_dir), "checkpoint-1"))
    resumed = make_trainer(**SAVING, model=tiny_policy(tie_word_embeddings=True), output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=first)
    assert_identical(parameters(resumed), parameters(trainer))
