"""No secret is shown or written: units, and a run of which every file and every line is searched."""

from __future__ import annotations

import base64
import logging
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf_ppo.terminal import is_secret, redact_text, redact_url, redact_words, redacted
from tests.conftest import prompt_rows
from tests.rewards.local_server import says, url
from tests.runs import QUICK

HUB, ENVIRONMENT, USER, PASSWORD, KEY = "hf_QxHub71", "hf_QxEnv72", "QxUser73", "Qx@Pass/74", "QxKey75"
WRITTEN = "Qx%40Pass%2F74"
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SECRETS = [HUB, ENVIRONMENT, USER, PASSWORD, WRITTEN, KEY, BASIC]


def with_secrets(address: str) -> str:
    return address.replace("://", f"://{USER}:{WRITTEN}@") + f"?api_key={KEY}&v=1"


def leaks(text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    return [secret for secret in SECRETS if secret.encode() in data]


# ---- Names, addresses, texts ----


def test_which_names_are_secret() -> None:
    secret = ["hub_token", "push_to_hub_token", "token", "HF_TOKEN", "api_key", "apikey", "wandb-token", "password"]
    secret.append("bearer")
    harmless = ["stop_token", "eos_token", "max_new_tokens", "keyword", "token_variable", "tokens", "keys"]
    assert [name for name in secret + harmless if is_secret(name)] == secret


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://host:80/a/b", "http://host:80/a/b"),
        (with_secrets("https://host/a"), "https://host/a"),
        ("http://user:a/b@host/x", "http://host/x"),
        ("http://host#token", "http://host"),
    ],
)
def test_an_address_keeps_host_and_path(address: str, expected: str) -> None:
    assert redact_url(address) == expected
    assert redact_text(f"asked {address} twice") == f"asked {expected} twice"


def test_settings_inside_of_a_text_are_hidden() -> None:
    text = f'{{"reward_fn": "{with_secrets("http://h/x")}", "api_key": "{KEY}", "stop_token": "eos"}}'
    assert redact_text(text) == '{"reward_fn": "http://h/x", "api_key": ***, "stop_token": "eos"}'
    assert not leaks(redact_text(f"Authorization: Bearer {KEY}") + redact_text(f"f(bearer={HUB!r})"))
    nested = {"comet": {"api_key": KEY, "project": "p"}, "list": [with_secrets("http://h")], "n": 3}
    assert redacted(nested) == {"comet": {"api_key": "***", "project": "p"}, "list": ["http://h"], "n": 3}


def test_a_command_line_is_hidden() -> None:
    words = ["--hub_token", HUB, f"--token={HUB}", "--reward_funcs", with_secrets("http://h/x"), "--stop_token", "eos"]
    shown = ["--hub_token", "***", "--token=***", "--reward_funcs", "http://h/x", "--stop_token", "eos"]
    assert redact_words(words) == shown


# ---- Whole runs ----


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder, and what is packed in those that are archives, as torch.save's are."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield str(path), path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield f"{path}:{name}", archive.read(name)


def assert_clean(folder: Path, printed: str, expects: tuple[str, ...]) -> None:
    found = dict(contents(folder))
    for part in expects:
        assert any(part in name for name in found), f"{part} was not written"
    assert {name: leaks(data) for name, data in found.items() if leaks(data)} == {}
    assert not leaks(printed)


def test_a_run_writes_and_prints_no_secret(
    make_trained: Any, server: Any, tmp_path: Path, monkeypatch: Any, capfd: Any, caplog: Any
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HF_TOKEN", ENVIRONMENT)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    caplog.set_level(logging.DEBUG)
    trainer = make_trained(
        **QUICK,
        hub_token=HUB,
        vllm_server_base_url=with_secrets("http://localhost:8000"),
        reward_funcs=[with_secrets(url(server)), "length"],
        report_to=["tensorboard", "wandb"],
        save_strategy="steps",
        save_steps=2,
        num_sample_generations=3,
        eval_dataset=Dataset.from_list(prompt_rows(4)),
        output_dir=str(tmp_path / "run"),
    )
    trainer.save_model()
    trainer.create_model_card(dataset_name=with_secrets("https://host/prompts.jsonl"))
    wandb.finish()
    wandb.teardown()  # else the next run of this process is recorded in this one's directory
    assert "rewards/score/mean" in trainer.state.log_history[0] and trainer.args.hub_token == HUB
    server.replies = [says("no", 401)]
    with pytest.raises(ConnectionError) as raised:
        trainer.evaluate()
    printed = "".join(traceback.format_exception(raised.value)) + caplog.text + "".join(capfd.readouterr())
    expects = ("checkpoint-2/training_args.bin:", "run/training_args.bin:", "README.md", "events.out", ".wandb")
    assert_clean(tmp_path, printed, expects)
