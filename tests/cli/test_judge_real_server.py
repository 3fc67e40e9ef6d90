"""`rlhf-ppo judge` against `transformers serve`: its verdicts are those of the model that it serves."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import import_utils

from rlhf_ppo.cli.judge import judge
from rlhf_ppo.evaluation.win_rate import WinRate
from tests.conftest import tiny_policy
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not getattr(import_utils, "is_serve_available", bool)(), reason="needs transformers[serving]"),
]

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}:"
QUESTION = "{prompt}|{first}|{second}"
ROWS = [{"prompt": f"q{index}", "one": f"{index}" * (1 + index % 3), "two": "ab"[index % 2]} for index in range(12)]


def chat_model(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A random model over single bytes, with a chat template."""
    letters = ["<pad>", "<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE
    )
    model = tiny_policy(seed=3, vocab_size=len(letters), max_position_embeddings=2048, initializer_range=0.4).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, str]]:
    """A chat model, its tokenizer, and the address of the server that serves it as `chat`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, tokenizer = chat_model(tmp_path / "chat")
    pd.DataFrame(ROWS).to_parquet("rows.parquet")
    port = free_port()
    command = ["serve", "chat", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with open("serve.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from transformers.cli.transformers import main; main()", *command],
            stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield model, tokenizer, f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, Path("serve.log").read_text()[-2000:]
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(Path("serve.log").read_text()[-2000:])


def judged(address: str, *options: str) -> tuple[WinRate, pd.DataFrame]:
    columns = ["--dataset_name", "rows.parquet", "--model_column", "one", "--opponent_column", "two"]
    found = judge([*columns, "--judge_model", "chat", "--judge_url", address, *options])
    return found, pd.read_parquet(max(Path("judged").glob("judged*.parquet"), key=lambda path: path.stat().st_mtime))


def test_the_verdicts_are_those_of_the_model_that_is_served(
    served: tuple[Any, Any, str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer, address = served
    Path("question.txt").write_text(QUESTION)
    letters = tokenizer.convert_tokens_to_ids(["A", "B"])
    options = {"temperature": 0.0, "max_tokens": 1, "logit_bias": {str(token): 100.0 for token in letters}}
    found, table = judged(address, "--judge_prompt", "question.txt", "--judge_options", json.dumps(options))

    def prefers_second(prompt: str, first: str, second: str) -> bool:
        asked = QUESTION.format(prompt=prompt, first=first, second=second)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": asked}], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores = model(ids).logits[0, -1, letters]
        return bool(scores[1] > scores[0])

    first = [1 - 2.0 * prefers_second(row["prompt"], row["one"], row["two"]) for row in ROWS]
    second = [2.0 * prefers_second(row["prompt"], row["two"], row["one"]) - 1 for row in ROWS]
    assert table["verdict_first"].tolist() == first and table["verdict_second"].tolist() == second
    agree = [one == other for one, other in zip(first, second, strict=True)]
    assert 0 < sum(agree) < len(ROWS) and found.agreement == sum(agree) / len(ROWS)  # the model decides, not the place
    assert (found.judged, found.ties, found.failed) == (len(ROWS), len(ROWS) - sum(agree), 0)

    # Without the bias it writes nonsense, of which each reply is a failed verdict.
    with pytest.raises(SystemExit) as stopped:
        judged(address)
    assert stopped.value.code == 2 and set(pd.read_parquet("judged/judged-2.parquet")["verdict"].isna()) == {True}
    said = capsys.readouterr()
    assert "Model win rate: none, as nothing was judged; 12 failed verdicts" in said.out
    assert f"no verdict on any of {len(ROWS)} prompts" in said.err
    (said,) = [message for message in caplog.messages if "verdicts failed" in message]
    assert said.startswith("24 of 24 verdicts failed: the judge 'chat' at http://127.0.0.1:")
    assert "did not end its reply with A, B or tie, but for example" in said and "limit of tokens" in said

    # What the server refuses is one sentence with its reason, before anything is judged.
    for mistake, words in (
        (["--judge_model", "chat2"], "pinned to"),
        (["--judge_options", '{"unknown": 1}'], "Unexpected fields in the request: {'unknown'}"),
        (["--judge_url", address.removesuffix("/v1")], "the address of an API ends in /v1 as a rule"),
    ):
        with pytest.raises(SystemExit, match="2"):
            judged(address, *mistake)
        (sentence,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert words in sentence and "sk-secret" not in sentence
