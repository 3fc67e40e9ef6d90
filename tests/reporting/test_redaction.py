"""No secret is shown or written: units, errors of servers, and runs of which every file and every line is searched."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from rlhf_ppo import PPOConfig
from rlhf_ppo.compat.environments import make_environment
from rlhf_ppo.rewards.endpoint import RewardEndpoint
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.terminal import is_secret, redact_in_place, redact_text, redact_url, redacted
from tests.conftest import make_tokenizer, prompt_rows, tiny_policy, tiny_scorer
from tests.rewards.local_server import Request, drop, lengths, says, url
from tests.runs import QUICK

HUB, ENVIRONMENT, USER, PASSWORD, KEY = "hf_QxHub71", "hf_QxEnv72", "QxUser73", "Qx@Pass/74", "QxKey75"
INIT, TEMPLATE, SENT = "QxInit76", "QxTemplate77", "QxSent78"
OF_SERVERS = {"RLHF_PPO_REWARD_TOKEN": "QxReward79", "RLHF_PPO_JUDGE_TOKEN": "QxJudge80"}
TOKENS = {"HF_TOKEN": ENVIRONMENT, **OF_SERVERS, "OPENAI_API_KEY": "QxOpenAI81", "WANDB_API_KEY": "QxWandb82"}
WRITTEN = "Qx%40Pass%2F74"
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SECRETS = [HUB, USER, PASSWORD, WRITTEN, KEY, BASIC, INIT, TEMPLATE, SENT, *TOKENS.values()]


def with_secrets(address: str) -> str:
    return address.replace("://", f"://{USER}:{WRITTEN}@") + f"?api_key={KEY}&v=1"


def leaks(text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    return [secret for secret in SECRETS if secret.encode() in data]


# ---- Names, addresses, texts ----


def test_which_names_are_secret() -> None:
    secret = ["hub_token", "push_to_hub_token", "token", "HF_TOKEN", "api_key", "apikey", "wandb-token", "password"]
    harmless = [
        "stop_token",
        "eos_token",
        "pad_token",
        "max_new_tokens",
        "keyword",
        "token_variable",
        "tokens",
        "keys",
    ]
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
    assert not leaks(redact_text(f"Authorization: Bearer {KEY}") + redact_text(f"hub_token={HUB}"))
    nested = {"comet": {"api_key": KEY, "project": "p"}, "list": [with_secrets("http://h")], "n": 3}
    assert redacted(nested) == {"comet": {"api_key": "***", "project": "p"}, "list": ["http://h"], "n": 3}


def test_a_command_line_is_hidden_in_place() -> None:
    words = ["--hub_token", HUB, f"--token={HUB}", "--reward_funcs", with_secrets("http://h/x"), "--stop_token", "eos"]
    redact_in_place(words)
    assert words == ["--hub_token", "***", "--token=***", "--reward_funcs", "http://h/x", "--stop_token", "eos"]


# ---- Arguments ----


# ---- Servers ----


REPLIES = {"401": says("no", 401), "wrong": says("[]"), "drops": drop}


@pytest.mark.parametrize("kind", [*REPLIES, "down"])
def test_errors_of_a_server_show_host_and_path_only(kind: str, server: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RLHF_PPO_REWARD_TOKEN", ENVIRONMENT)
    server.replies = [REPLIES.get(kind, lengths)] * 2
    reward = RewardEndpoint(with_secrets(url(server)), retries=1, backoff=0.001)
    if kind == "down":
        server.shutdown()
        server.server_close()
    with pytest.raises((ConnectionError, ValueError), match=f"endpoint {url(server)}, asked") as raised:
        asyncio.run(reward(prompts=["p"], completions=["abc"], completion_ids=[[1]]))
    assert not leaks("".join(traceback.format_exception(raised.value)))


WRONG: list[Callable[[], Any]] = [
    lambda: resolve_reward(with_secrets("htp://host/x")),
    lambda: make_environment("text_generation", {"reward_fn": {"type": "lenght", "api_key": KEY}}),
    lambda: make_environment("text_generation", {"reward_fn": {"type": "length", "api_key": KEY}}),
    lambda: make_environment("text_generation", f'{{"reward_fn": "{with_secrets("http://h")}", "api_key": "{KEY}"'),
    lambda: make_environment("text_generation", {"api_key": KEY}),
    lambda: PPOConfig(vllm_server_base_url=[with_secrets("http://h")], hub_token=HUB),
]


@pytest.mark.parametrize("make", WRONG)
def test_errors_of_arguments_show_no_secret(make: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert not leaks("".join(traceback.format_exception_only(raised.value)))


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
    make_trainer: Any, server: Any, tmp_path: Path, monkeypatch: Any, capfd: Any, caplog: Any
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HF_TOKEN", ENVIRONMENT)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    caplog.set_level(logging.DEBUG)
    trainer = make_trainer(
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
    trainer.train()
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


# ---- The pipeline ----


PIPELINE = """
output_dir: out
common: {{use_cpu: true, bf16: false, report_to: none, hub_token: "{hub}", max_steps: 1}}
sft: {{model_name_or_path: sft, dataset_name: texts.jsonl, max_length: 8, model_init_kwargs: {{token: {init}}}}}
reward: {{model_name_or_path: reward, dataset_name: pairs.jsonl, max_length: 8}}
ppo:
  dataset_name: prompts.jsonl
  reward_funcs: ["{url}", "{plain}"]
  response_length: 4
  per_device_train_batch_size: 2
  chat_template_kwargs: {{api_key: {template}}}
judge:
  {{dataset_name: prompts.jsonl, num_prompts: 2, max_new_tokens: 4, judge_model: m, judge_url: "{plain}",
   judge_options: '{{"password": "{sent}"}}'}}
report: {{}}
"""


@pytest.fixture
def place(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a pipeline's file that holds secrets, and what it names."""
    monkeypatch.chdir(tmp_path)
    for name, model in (("sft", tiny_policy()), ("reward", tiny_scorer())):
        model.save_pretrained(name)
        make_tokenizer().save_pretrained(name)
    rows = {"texts": {"text": "w1 w2 w3"}, "prompts": {"prompt": "w1 w2"}, "pairs": {"chosen": "w1", "rejected": "w2"}}
    for name, row in rows.items():
        Path(f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    given = {"url": with_secrets(url(server)), "plain": url(server).replace("/score", "")}
    Path("run.yaml").write_text(PIPELINE.format(hub=HUB, init=INIT, template=TEMPLATE, sent=SENT, **given))
    return tmp_path


def command_lines() -> Iterator[bytes]:
    """Those of all processes, which every user of a machine can read."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def scores_or_judges(request: Request) -> None:
    verdict = {"choices": [{"message": {"content": "A"}, "finish_reason": "stop"}]}
    lengths(request) if "completions" in request.body else request.answer(json.dumps(verdict))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_whole_pipeline_shows_no_secret_in_files_output_or_command_lines(place: Path, server: Any) -> None:
    environment = {**os.environ, **TOKENS, "PYTHONPATH": str(Path(__file__).parents[2])}
    server.replies = [scores_or_judges] * 999
    with open("printed.txt", "wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_ppo", "pipeline", "run.yaml"], env=environment, stdout=printed, stderr=printed
        )
        seen: set[bytes] = set()
        while process.poll() is None:
            seen |= {line for line in command_lines() if b"rlhf_ppo" in line}
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
    assert process.returncode == 0, Path("printed.txt").read_text()[-3000:]
    for command in ("sft", "reward", "train", "judge", "report"):
        assert any(f"rlhf_ppo\0{command}\0".encode() in line for line in seen), command
    sent = {headers["Authorization"] for headers, _ in server.requests}
    assert sent == {f"Basic {BASIC}", *(f"Bearer {token}" for token in OF_SERVERS.values())}
    assert SENT in {body.get("password") for _, body in server.requests}
    assert not [line for line in seen if leaks(line)]
    assert_clean(place / "out", Path("printed.txt").read_text(), ("pipeline.json", "win_rate.json", "report.html"))
