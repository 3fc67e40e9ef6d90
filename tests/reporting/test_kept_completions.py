"""The responses of logged updates in `completions/`: what is in the rows, that files stay, and what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

import rlhf_ppo.reporting.completion_files as completion_files
from rlhf_ppo.checkpoints.files import DiskFullError
from rlhf_ppo.checkpoints.run import Run
from rlhf_ppo.reporting.completion_files import (
    TOKEN_VALUES,
    find_completions,
    read_completions,
    texts_of_tokens,
    write_completions,
)
from tests.conftest import count_w4, make_tokenizer
from tests.runs import QUICK, DieAt, RunDied, assert_identical, end_of_run, record, record_rollouts

KEEPS = {**QUICK, "logging_steps": 2, "missing_eos_penalty": 0.5}


def row(step: int = 1, **values: Any) -> dict[str, Any]:
    lists = {"token_id": [5], "token_text": ["w2"], "token_written": [True], **{name: [0.5] for name in TOKEN_VALUES}}
    texts = {"step": step, "prompt": "w1", "completion": "w2", "score": 1.0, "rewards/r": 1.0}
    return {**texts, "kl": 0.5, "length": 1, "ended": True, "prompt_id": [4], **lists, **values}


def logs_a_note(completion_ids: list[list[int]], log_extra: Any, **columns: Any) -> list[float]:
    log_extra("note", [f"{len(ids)} tokens" for ids in completion_ids])
    return count_w4(None, None, completion_ids)


def test_every_logged_update_has_its_responses_token_by_token(make_trainer: Any) -> None:
    trainer = make_trainer(**KEEPS, reward_funcs=logs_a_note)
    rollouts, experiences = record_rollouts(trainer), record(trainer, "estimate_advantages")
    trainer.train()
    found = find_completions(trainer.args.output_dir)
    assert {step: path.name for step, path in found.items()} == {
        step: f"completions_0000{step}.parquet" for step in (1, 2, 3)
    }
    tokenizer = make_tokenizer()
    for step, path in found.items():
        rollout, experience = rollouts[step - 1], experiences[step - 1]
        rows = read_completions(path)
        assert [row["step"] for row in rows] == [step, step]  # of three wanted there are two
        for index, kept in enumerate(rows):
            written = rollout.response_mask[index]
            ids = rollout.responses[index][written]
            assert kept["token_id"] == ids.tolist() and kept["completion"] == tokenizer.decode(ids)
            prompt = rollout.query_responses[index, : rollout.context_length]
            assert kept["prompt"] == tokenizer.decode(prompt, skip_special_tokens=True)
            assert kept["prompt_id"] == prompt[rollout.attention_mask[index, : rollout.context_length]].tolist()
            kl = (rollout.logprobs - rollout.ref_logprobs)[index][written]
            score = rollout.scores[index] - (0.0 if rollout.ended[index] else 0.5)
            paid = -trainer.args.kl_coef * kl
            paid[-1] += score
            of_tokens = (rollout.values[index][written], experience.advantages[index][written], kl, paid)
            for name, expected in zip(TOKEN_VALUES, of_tokens, strict=True):
                torch.testing.assert_close(torch.tensor(kept[name]), expected)
            assert (kept["length"], kept["ended"]) == (len(ids), bool(rollout.ended[index]))
            assert kept["score"] == pytest.approx(float(score)) and kept["kl"] == pytest.approx(float(kl.sum()))
            assert kept["rewards/logs_a_note"] == pytest.approx(float(rollout.scores[index]))
            assert kept["extra/note"] == f"{len(ids)} tokens"


def test_keeping_them_changes_no_number(make_trainer: Any) -> None:
    ends = []
    for number in (0, 3):
        trainer = make_trainer(**{**KEEPS, "num_completions_to_keep": number})
        trainer.train()
        ends.append(end_of_run(trainer))
        assert Path(trainer.args.output_dir, "completions").exists() == (number > 0)
    assert_identical(*ends)


def test_gaps_have_text_and_no_figures(make_trainer: Any) -> None:
    settings = {**KEEPS, "reward_funcs": None, "train_dataset": None, "max_steps": 1, "total_episodes": None}
    trainer = make_trainer(**settings)
    queries, responses = [torch.tensor([5]), torch.tensor([6, 7])], [torch.tensor([8, 9, 10, 1]), torch.tensor([8, 1])]
    masks = [torch.tensor([1, 0, 0, 1]).bool(), torch.ones(2).bool()]
    trainer.step(queries, responses, [1.0, float("nan")], masks)
    gap, unscored = read_completions(find_completions(trainer.args.output_dir)[1])
    assert gap["token_id"] == [8, 9, 10, 1] and gap["token_written"] == [True, False, False, True]
    assert gap["length"] == 2 and len(gap["token_text"]) == 4
    assert all([value is None for value in gap[name]] == [False, True, True, False] for name in TOKEN_VALUES)
    assert unscored["score"] is None and unscored["token_advantage"] == [0.0, 0.0]


def test_bytes_that_make_no_character_end_no_run(shared_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260K")
    names = ["<0x62>", "<0xE2>", "</s>", "▁the", "<0xC3>", "<0xA9>", "</s>"]
    ids = tokenizer.convert_tokens_to_ids(names)
    assert texts_of_tokens(tokenizer, ids) == ["b", "", "\ufffd</s>", " the", "", "é", "</s>"]


# ---- Files stay ----


def test_a_resumed_run_finds_its_own_files_and_replaces_none(make_trainer: Any, tmp_path: Path) -> None:
    here = str(tmp_path / "here")
    saving = {**KEEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "output_dir": here}
    with pytest.raises(RunDied):
        make_trainer(**saving, callbacks=[DieAt("on_save", 2)]).train()
    folder = Path(here, "completions")
    written = {path: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}
    assert len(written) == 2
    for changed, names in ({}, [1, 2, 3]), ({"kl_coef": 0.5}, [1, 2, 3]):
        make_trainer(**{**saving, **changed}).train(resume_from_checkpoint=f"{here}/checkpoint-2")
        assert {path: (path.read_bytes(), path.stat().st_ino) for path in written} == written
        assert list(find_completions(here)) == names
    # The second time update 3 is paid otherwise: it has a file of its own, which is the one that counts.
    assert sorted(path.name for path in folder.iterdir())[-2:] == [
        "completions_00003-2.parquet",
        "completions_00003.parquet",
    ]
    assert find_completions(here)[3].name == "completions_00003-2.parquet"


def test_another_run_in_the_directory_has_files_of_its_own(tmp_path: Path) -> None:
    first, second = Run("a"), Run("b")
    for run in (first, second):
        run.save(tmp_path)
        for step in (1, 2):
            write_completions(tmp_path, [row(step)], run)
    assert [path.name for path in find_completions(tmp_path).values()] == [
        "completions_00001-2.parquet",
        "completions_00002-2.parquet",
    ]
    Run("c", earlier={"b": 1}).save(tmp_path)  # which goes on from the second one's first update
    assert list(find_completions(tmp_path)) == [1]


def test_a_full_disk_is_named(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **settings: Any) -> None:
        raise OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr(completion_files.pq, "write_table", full)
    with pytest.raises(DiskFullError, match="no space is left for what is logged or printed"):
        make_trainer(**KEEPS).train()


def test_unscored_responses_and_infinite_figures_survive(tmp_path: Path) -> None:
    path = write_completions(tmp_path, [row(score=float("nan"), token_kl=[float("inf")])], Run("a"))
    assert write_completions(tmp_path, [row(score=float("nan"), token_kl=[float("inf")])], Run("a")) == path
    [found] = read_completions(path)
    assert found["score"] is None and found["token_kl"] == [float("inf")]


def test_numbers_that_no_float_holds_exactly_are_kept_as_texts(tmp_path: Path) -> None:
    """Such as a hash that a reward function logs, which would end the run."""
    rows = [row(**{"extra/hash": 2**53 + 1, "extra/size": 2**70, "extra/share": 0.5, "extra/flag": True})]
    (found,) = read_completions(write_completions(tmp_path, rows, Run("a")))
    kept = (found["extra/hash"], found["extra/size"], found["extra/share"], found["extra/flag"])
    assert kept == (str(2**53 + 1), 2.0**70, 0.5, 1.0)


def test_a_damaged_or_foreign_file_is_named(tmp_path: Path) -> None:
    path = write_completions(tmp_path, [row()], Run("a"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"completions_00001\.parquet is damaged"):
        find_completions(tmp_path)
    path.write_bytes(whole[:40] + bytes(60) + whole[100:])
    with pytest.raises(ValueError, match=r"completions_00001\.parquet is damaged"):
        read_completions(path)
    pq.write_table(pa.table({"prompt": ["a"], "step": [1]}), tmp_path / "completions" / "completions_00002.parquet")
    with pytest.raises(ValueError, match="has no column 'completion': it was not written by rlhf_ppo"):
        read_completions(tmp_path / "completions" / "completions_00002.parquet")
