"""A metric to compare models by that is missed costs nothing of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from rlhf_ppo.checkpoints import last_complete_checkpoint
from tests.conftest import prompt_rows
from tests.faults.conftest import make_saving
from tests.runs import assert_identical, parameters

RUN: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


def logs(completion_ids: Any, log_metric: Any, **columns: Any) -> list[float]:
    """Logs a metric of its own, which nobody knows before it is called."""
    log_metric("mine", float(len(completion_ids)))
    return [float(len(ids)) for ids in completion_ids]


def make(output_dir: Path, **arguments: Any) -> Any:
    return make_saving(output_dir, given={"reward_funcs": logs, "eval_dataset": prompt_rows(4)}, **RUN, **arguments)


def test_it_is_said_at_the_first_evaluation_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError) as error:
        make(run, metric_for_best_model="yours").train()
    said = str(error.value)
    assert "metric_for_best_model='yours' is not a metric of this evaluation: ['score'" in said
    assert "'mine'" in said and f"continue with resume_from_checkpoint='{run}/checkpoint-1'" in said
    assert last_complete_checkpoint(str(run)) == f"{run}/checkpoint-1"
    with pytest.raises(ValueError, match=r"metric_for_best_model='his' .*resume_from_checkpoint='.*checkpoint-1'"):
        make(run, metric_for_best_model="his").train(resume_from_checkpoint=True)

    resumed, whole = make(run, metric_for_best_model="mine"), make(tmp_path / "whole", metric_for_best_model="mine")
    resumed.train(resume_from_checkpoint=True)
    whole.train()
    assert resumed.state.best_metric == whole.state.best_metric == 4.0
    assert_identical(parameters(resumed), parameters(whole))


def test_it_is_said_before_the_first_update_with_eval_on_start(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", metric_for_best_model="yours", eval_on_start=True)
    with pytest.raises(ValueError, match="metric_for_best_model='yours' is not a metric of this evaluation"):
        trainer.train()
    assert trainer.state.global_step == 0 and not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_schedule_that_is_given_follows_the_score(tmp_path: Path) -> None:
    from torch.optim import SGD
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    trainer = make_saving(
        tmp_path / "run", eval_strategy="steps", eval_steps=1,
        given={
            "eval_dataset": prompt_rows(4), "reward_funcs": logs,
            "optimizers": (
                lambda named: SGD([parameter for _, parameter in named], lr=1e-7),
                lambda optimizer, num_updates: ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5),
            ),
        },
    )  # fmt: skip
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5e-7  # the second evaluation's score is the first's


# ---- The judge of the health checks ----


def scored(completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def judged(output_dir: Path, judge: str, **arguments: Any) -> Any:
    given = {"reward_funcs": [scored], "eval_dataset": prompt_rows(4), **arguments.pop("given", {})}
    return make_saving(output_dir, given=given, health_judge=judge, **arguments)


@pytest.mark.parametrize(
    "judge", ["eval_rewards/none/mean", "rewards/scored/mean", "eval_runtime", "", "eval_few_score"]
)
def test_a_judge_that_no_evaluation_gives_is_refused(judge: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        judged(tmp_path, judge)
    said = str(error.value)
    assert said.startswith(f"health_judge={judge!r} is not a metric of evaluation: name one of ['eval_score', ")
    assert "'eval_rewards/scored/mean'" in said and "health_checks=False" in said and "log_metric" in said


def test_a_judge_that_may_be_given_is_taken(tmp_path: Path) -> None:
    for judge in ("eval_score", "eval_rewards/scored/mean", "eval_kl"):
        judged(tmp_path, judge)
    judged(tmp_path, "eval_mine", given={"reward_funcs": logs})
    judged(tmp_path, "eval_none", health_checks=False)
    judged(tmp_path, "eval_of_callback", given={"callbacks": [TrainerCallback()]})
    several = {"eval_dataset": {"few": prompt_rows(4)}}
    for judge in ("eval_few_score", "eval_few_rewards/scored/mean", "eval_score"):
        judged(tmp_path, judge, given=several)
