"""Episodes on two processes, whose numbers of rounds differ: nobody waits for ever, and the step is that of one."""

from __future__ import annotations

import json
import re
import threading
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_ppo.data.conversation import check_versions
from tests.conftest import needs_vllm_of_trl
from tests.distributed import processes
from tests.distributed.comparing import assert_same_step
from tests.distributed.playing import answer_to
from tests.generation.test_vllm import FakeServer

pytestmark = pytest.mark.distributed

PLAY = "tests.distributed.playing.play"
LAUNCHERS = {
    "DDP": ("multi_gpu", {}),
    "ZeRO-2": ("deepspeed_zero2", {}),
    "ZeRO-3": ("deepspeed_zero3", {}),
    "ZeRO-3 that gathers layer by layer": ("deepspeed_zero3", {"ds3_gather_for_generation": False}),
    "FSDP2": ("fsdp2", {}),
}
HANGS = {6: {"hangs": 3}}


@pytest.fixture(scope="module", autouse=True)
def _recent_libraries() -> None:
    try:
        check_versions()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def alone(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    given = {"output_dir": str(tmp_path_factory.mktemp("one")), "models": str(models), "local_batch_size": 8}
    return processes.run("multi_gpu", PLAY, world=1, changes=HANGS, **given)[0]


class Server(FakeServer):
    """Answers each context with its own word, and keeps how many contexts each request had."""

    sizes: list[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request: Any = json.loads(body) if body else None
        choices = []
        for prompt in request["prompt"] if request else []:
            assert request["stop_token_ids"] == [1] and len(prompt) + request["max_tokens"] <= 128
            ids = answer_to(prompt, request["max_tokens"])
            names, values = [f"token_id:{token}" for token in ids], [-0.5] * len(ids)
            tops = [{name: value} for name, value in zip(names, values, strict=True)]
            logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
            choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        self.sizes += [len(choices)] * bool(choices)
        self._send({"choices": choices})


@needs_vllm_of_trl
def test_ranks_with_unequal_rows_get_their_own_answers_from_a_server(models: Any, tmp_path: Any) -> None:
    """A rank that has played its episodes asks with filling; TRL cuts the answers by the number of its own rows."""
    served = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "max_model_len": 128}
    handler = type("Serving", (Server,), {"received": [], "sizes": [], "model_config": served})
    serving = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    try:
        address = f"http://127.0.0.1:{serving.server_port}"
        given = {"address": address, "output_dir": str(tmp_path), "models": str(models), "changes": HANGS}
        ranks = processes.run("multi_gpu", f"{PLAY}_with_server", **given)
    finally:
        serving.shutdown()
        serving.server_close()

    assert [rank["turns"] for rank in ranks] == [[1] * 4, [9, 9, 3, 9]]
    assert handler.sizes == [8, 8, 8, *[6] * 6]  # the episode of the tool that hangs leaves after three rounds
    assert ranks[0]["log"][0]["val/first_logratio"] == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_1_turn_and_9_and_a_tool_that_hangs(launcher: str, models: Any, alone: Any, tmp_path: Any) -> None:
    config, options = LAUNCHERS[launcher]
    given = {"output_dir": str(tmp_path), "models": str(models), "changes": HANGS, **options}
    fails = {place: {"scenario": PLAY, **given, "changes": {5: {"fails": place}}} for place in ("reset", "step")}
    ranks, *errors = processes.run_all(
        config, [(PLAY, given), *(("error_of", arguments) for arguments in fails.values())]
    )

    assert [rank["turns"] for rank in ranks] == [[1] * 4, [9, 9, 3, 9]] and alone["turns"] == [1] * 4 + [9, 9, 3, 9]
    assert_same_step(ranks[0], alone)
    in_step = "layer by layer" in launcher
    assert [len(rank["calls"]) for rank in ranks] == ([9, 9] if in_step else [1, 9])
    for (first, second), message in zip(errors, ("reset failed: ValueError: no board", "must be finite"), strict=True):
        assert re.search(rf"EpisodeError: row 1 of the batch, environment Walk: .*{message}", second), second
        assert first == second
