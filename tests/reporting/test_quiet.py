"""What libraries print is kept back for the time of our own calls, and nothing else is."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
from peft import LoraConfig
from transformers.utils import logging as transformers_logging

from rlhf_ppo import PPOTrainer
from rlhf_ppo.terminal import hide_data_bars, hide_library_warnings, hide_model_bars
from tests.conftest import tiny_policy
from tests.reporting.test_progress import Terminal
from tests.runs import QUICK, DieAt, RunDied


def test_a_run_warns_of_nothing_that_is_not_the_users(
    make_trainer: Callable[..., PPOTrainer], recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**QUICK, "gradient_checkpointing": True, "save_strategy": "steps", "use_cpu": False}
    trainer = make_trainer(**settings, peft_config=LoraConfig(task_type="CAUSAL_LM", r=2))
    trainer.train()
    trainer.save_model()
    assert trainer.args.dataloader_pin_memory  # as the user has it
    assert [str(warning.message) for warning in recwarn] == []
    assert capfd.readouterr().err == ""


@pytest.fixture
def trainer_logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers' trainer logs; its loggers pass nothing on to the root."""
    loggers = [logging.getLogger(f"transformers.{name}") for name in ("trainer", "trainer_utils")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def test_a_resumed_run_repeats_no_warning(
    make_trainer: Callable[..., PPOTrainer], trainer_logs: pytest.LogCaptureFixture
) -> None:
    """A head that is the embeddings is not missing, and other arguments than the checkpoint's are listed once."""
    settings = {**QUICK, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RunDied):
        make_trainer(**settings, model=tiny_policy(tie_word_embeddings=True), callbacks=[DieAt("on_save", 1)]).train()
    settings["save_steps"] = 2
    make_trainer(**settings, model=tiny_policy(tie_word_embeddings=True)).train(resume_from_checkpoint=True)
    assert "missing keys" not in trainer_logs.text and "do not match" not in trainer_logs.text


def test_special_tokens_of_the_tokenizer_are_adopted_without_a_warning(
    make_trainer: Callable[..., PPOTrainer], trainer_logs: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy()
    policy.config.eos_token_id = 3
    trainer = make_trainer(**QUICK, model=policy)
    trainer.train()
    assert policy.config.eos_token_id == trainer.processing_class.eos_token_id != 3  # pyright: ignore
    assert "PAD/BOS/EOS" not in trainer_logs.text


def test_other_warnings_pass_and_the_users_filters_stay() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        before = list(warnings.filters)
        with hide_library_warnings():
            warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed", FutureWarning, stacklevel=1)
            with pytest.raises(UserWarning, match="mine"):
                warnings.warn("mine", UserWarning, stacklevel=1)
            with pytest.warns(FutureWarning, match="other"):
                warnings.warn("other", FutureWarning, stacklevel=1)
        assert list(warnings.filters) == before


def test_the_logger_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("DeepSpeed")
    before = list(logger.filters)
    with hide_library_warnings():
        logger.warning("Setting accelerator to CPU. If you have GPU ...")
        logger.warning("something else")
    logger.warning("Setting accelerator to CPU, after")
    assert [record.getMessage() for record in caplog.records] == [
        "something else",
        "Setting accelerator to CPU, after",
    ]
    assert logger.filters == before


@pytest.mark.parametrize("enabled", [True, False])
def test_switches_of_bars_are_as_before(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_logging, "_tqdm_active", enabled)
    monkeypatch.setattr(sys, "stderr", Terminal())
    was_disabled = datasets.are_progress_bars_disabled()
    try:
        datasets.enable_progress_bars() if enabled else datasets.disable_progress_bars()
        shown: list[Any] = []
        with pytest.raises(KeyError), hide_model_bars(), hide_data_bars(8):
            shown += [transformers_logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()]
            raise KeyError
        with hide_data_bars(10**6):
            shown.append(not datasets.are_progress_bars_disabled())
        assert shown == [False, False, enabled]
        assert transformers_logging.is_progress_bar_enabled() is enabled
        assert datasets.are_progress_bars_disabled() is not enabled
    finally:
        datasets.disable_progress_bars() if was_disabled else datasets.enable_progress_bars()
