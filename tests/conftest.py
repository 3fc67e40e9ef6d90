"""Shared fixtures: tiny models, a tiny tokenizer, the shared data, and a trainer factory."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import random
import signal
import tempfile
import threading
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TRACKIO_DIR", f"{tempfile.gettempdir()}/trackio-of-tests-{os.getpid()}")  # read in its import

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils.memory
import hypothesis
import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.config.checks import TRAINER_ARGUMENTS
from rlhf_ppo.data.rollout import Prompts, Responses
from rlhf_ppo.generation.engine_factory import is_recent_enough
from rlhf_ppo.models import packing
from rlhf_ppo.ranks import random_streams
from rlhf_ppo.rewards import ScoringBatch
from tests.rewards.local_server import Request

torch.set_num_threads(1)
# accelerate reads a package's metadata each time that it unwraps a model or asks for DeepSpeed.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
# Each `train()` collects garbage, which takes a tenth of a tiny run; Python does so by itself when there is much.
accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)  # pyright: ignore[reportAttributeAccessIssue]
# On a busy machine an example may take any time.
hypothesis.settings.register_profile(
    "any speed", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")
# No test cuts the power, and on a busy disk each call waits for tenths of a second.
os.fsync = lambda descriptor: None


def _never_copied(self: StorageWeakRef, protocol: int) -> Any:
    raise AssertionError("a copy of a StorageWeakRef is released twice: the process crashes later, somewhere else")


StorageWeakRef.__reduce_ex__ = _never_copied  # pyright: ignore[reportAttributeAccessIssue]

# A shell's background jobs ignore SIGINT, and those of nohup SIGHUP: a run would rightly ignore them too.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(_number, _handler)


def pytest_collection_finish() -> None:
    """Take what the imports left out of garbage collection, which would walk through it."""
    gc.collect()
    gc.freeze()


# Tests of whole runs, or slow; `make check` leaves them to `make test`.
WHOLE_RUNS = {"reporting/test_sample_tables.py", "run/test_evaluate.py", "run/test_samples_and_logging.py"}
# Files of which most tests run commands or several runs from beginning to end.
LONG_RUNS = {
    "data/test_train_data_forms.py",
    "models/test_peft.py",
    "reporting/test_hub.py",
    "run/test_checkpoints.py",
    "run/test_optimization.py",
    "cli/test_commands.py",
    "cli/test_jobs.py",
    "examples/test_ppo_example.py",
    "generation/test_continuous.py",
    "generation/test_baseline_completions.py",
    "rewards/test_in_training.py",
    "run/test_callbacks.py",
    "compat/test_drop_in.py",
    "models/test_one_base.py",
    "run/test_trainer_arguments.py",
}
# The longest files, which a run begins with, so that no process is left with one at the end; beside one that starts
# several processes there is one that does not.
LONGEST_FIRST = (
    "distributed/test_resume.py",
    "models/test_architectures.py",
    "distributed/test_accelerate_launch.py",
    "distributed/test_sharding.py",
    "demo/test_demo.py",
    "examples/test_documented_commands.py",
    "learning/test_stories.py",
    "run/test_trainer_arguments.py",
    "distributed/test_launchers.py",
    "examples/test_ppo_example.py",
    "models/test_peft.py",
    "test_first_update.py",
)
# Tests whose cases show one thing many times, and how many of them `make check` runs: `make test` runs all.
CASES_IN_CHECK = {
    "cli/test_user_errors.py::test_a_mistake_is_one_sentence": 30,
    "generation/test_transformers_engine.py::test_what_is_stored_with_the_model_changes_nothing": 1,
    "models/test_architectures.py::test_an_update_reads_each_row_as_if_it_were_alone": 12,
    "models/test_reference.py::test_kl_starts_at_zero_and_the_reference_stays_while_the_policy_moves": 1,
    "test_first_update.py::test_gradients_of_the_whole_loss_equal_finite_differences": 1,
    "test_first_update.py::test_ratio_starts_at_one_and_kl_at_zero": 3,
    "test_first_update.py::test_no_setup_moves_a_number": 2,
    "test_first_update.py::test_the_first_update_equals_numpy": 4,
}
# The same of those that run long: `make test` runs that many, `make test-long` the rest.
CASES_IN_TEST = {"run/test_resume.py::test_resumed_run_equals_one_that_never_stopped": 3}


MAX_CASES = int(os.environ.get("MAX_CASES", "1000"))
"""How many cases of each test run; `make test-oldest` runs the first two."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole runs and further cases as thorough, long runs as slow, before `-m` chooses; long files come first."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        seen[name] += 1
        is_further_case = seen[name] > min(CASES_IN_CHECK.get(name, MAX_CASES), MAX_CASES)
        if is_further_case or name.partition("::")[0] in WHOLE_RUNS:
            item.add_marker(pytest.mark.thorough)
        elif seen[name] > CASES_IN_TEST.get(name, seen[name]) or name.partition("::")[0] in LONG_RUNS:
            item.add_marker(pytest.mark.slow)
    order = {f"tests/{file}": place for place, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


needs_continuous = pytest.mark.skipif(not is_recent_enough("continuous"), reason="needs a newer transformers")
needs_vllm_of_trl = pytest.mark.skipif(not is_recent_enough("vllm"), reason="needs a newer TRL")
"""For tests of generation engines that the oldest libraries do not have."""


@pytest.fixture(autouse=True)
def rich_reads_the_environment() -> None:
    """`datasets.map` with processes leaves a copy as `os.environ`; rich keeps the one of its import."""
    Console._environ = os.environ


@pytest.fixture(autouse=True)
def random_numbers_of_its_own() -> None:
    """A test that draws without a seed draws the same, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


QUIET: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "num_sample_generations": 0,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""A run that only trains, in float32 on the CPU, and writes nothing."""

WORDS = [f"w{index}" for index in range(29)]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; without it tests are skipped, or fail if REQUIRE_SHARED_DATA=1."""
    folder = Path(__file__).parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        reason = "the folder ../shared/data is not there"
        pytest.fail(reason) if os.environ.get("REQUIRE_SHARED_DATA") == "1" else pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def chat_model() -> Path:
    """The real chat model that `make chat-model` makes; CHAT_MODEL names another folder."""
    folder = Path(os.environ.get("CHAT_MODEL") or Path(__file__).parents[1] / "chat-model")
    if not (folder / "config.json").is_file():
        pytest.skip(f"there is no {folder}; `make chat-model` makes it")
    return folder


def make_tokenizer(
    padding_side: str = "left", pad_token: str | None = "<pad>", words: Sequence[str] = WORDS, **more: Any
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: <pad>=0, <eos>=1, <bos>=2, then the words: w0, w1, ..."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<bos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        eos_token="<eos>",
        bos_token="<bos>",
        padding_side=padding_side,
        **more,
    )


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A fresh tiny tokenizer with distinct PAD and EOS, padding on the left."""
    return make_tokenizer()


def tiny_config(**overrides: Any) -> LlamaConfig:
    """A two-layer Llama of width 32 over 32 tokens."""
    values = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**values, **overrides})


def tiny_policy(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A randomly initialised tiny language model."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**overrides))


def tiny_scorer(seed: int = 1, num_labels: int = 1, **overrides: Any) -> LlamaForSequenceClassification:
    """A randomly initialised tiny sequence classifier."""
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(tiny_config(num_labels=num_labels, **overrides))


def save_models(folder: str | Path = ".", **models: PreTrainedModel) -> None:
    """Save models under their names, each with the tiny tokenizer."""
    for name, model in models.items():
        model.save_pretrained(Path(folder, name))
        make_tokenizer().save_pretrained(Path(folder, name))


def save_thinking_run(folder: str | Path, recorded: dict[str, Any] | None) -> None:
    """Give a saved model a chat template that ends in w8 without thinking, and the settings of a run."""
    tokenizer = make_tokenizer()
    last = "{% if enable_thinking is not defined or enable_thinking %}w7{% else %}w8{% endif %}"
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}" + last
    tokenizer.save_pretrained(folder)
    if recorded is not None:
        settings = {"arguments": {"chat_template_kwargs": recorded}, "versions": {}, "made_of": {}}
        Path(folder, "ppo_settings.json").write_text(json.dumps(settings))


THINKING = [
    (None, [], "w7"),
    ({"enable_thinking": False}, [], "w8"),
    ({"enable_thinking": False}, ["--chat_template_kwargs", '{"enable_thinking": true}'], "w7"),
    (None, ["--chat_template_kwargs", '{"enable_thinking": false}'], "w8"),
]
"""What a run recorded, the options of a command, and the last word of its prompts."""


def write_rows(path: str | Path, rows: Iterable[Any]) -> None:
    """Write a JSON lines file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with the cache of `datasets`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def prompt_rows(count: int, seed: int = 0, longest: int = 6) -> list[dict[str, list[int]]]:
    """Random prompts of 1 to `longest` words, as ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 32, (length,), generator=generator).tolist()} for length in lengths]


def scoring_batch(
    ids: Tensor,
    mask: Tensor,
    written: Tensor,
    columns: dict[str, list[Any]],
    ended: Tensor,
    stops: tuple[int, ...] = (),
    tokenizer: Any = None,
) -> ScoringBatch:
    """Make a batch of ids and their masks, `(B, C + T)`, and which of the last `T` tokens the policy wrote."""
    responses = Responses(ids, mask, written)
    prompts = dataclasses.replace(Prompts.of_responses(responses), columns=columns)
    return ScoringBatch(responses, prompts, ended, stops, tokenizer)


def count_w4(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward: how much of the response is the token w4 (id 7)."""
    return [ids.count(7) / len(ids) for ids in completion_ids]


@pytest.fixture
def plain_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of commands: no curves, which take half of a tiny run; `tests/reporting` has those."""
    monkeypatch.setattr("rlhf_ppo.reporting.model_card._draw", lambda log, path: path.touch())


@pytest.fixture
def determinism_restored() -> Iterator[None]:
    """For tests that train with `full_determinism`, which changes switches of the whole process."""
    environment = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def slow_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A main thread that loses the processor wherever random numbers are read, installed or removed."""

    def slow(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*states: Any) -> Any:
            time.sleep(0.005)
            result = exchange(*states)
            time.sleep(0.005)
            return result

        return slowly

    for name in ("_rng_states", "_set_rng_states"):
        monkeypatch.setattr(random_streams, name, slow(getattr(random_streams, name)))


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., PPOConfig]:
    """Factory of arguments for fast runs on the CPU."""

    def make(**overrides: Any) -> PPOConfig:
        values: dict[str, Any] = {
            **QUIET,
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_ppo_epochs": 2,
            "num_mini_batches": 2,
            "total_episodes": 16,
            "response_length": 8,
            "stop_token": "eos",
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "seed": 3,
        }
        return PPOConfig(**{**values, **overrides})

    return make


@pytest.fixture
def make_trainer(make_args: Callable[..., PPOConfig]) -> Iterator[Callable[..., PPOTrainer]]:
    """Factory of trainers over tiny models; keyword arguments of either PPOTrainer or PPOConfig."""

    def make(trainer_class: type[PPOTrainer] = PPOTrainer, **overrides: Any) -> PPOTrainer:
        given = {name: overrides.pop(name) for name in overrides.keys() & TRAINER_ARGUMENTS}
        values: dict[str, Any] = {
            "processing_class": make_tokenizer(),
            "model": tiny_policy(),
            "value_model": tiny_scorer(seed=2),
            "train_dataset": Dataset.from_list(prompt_rows(32)),
        }
        if "reward_funcs" not in given and "reward_model" not in given:
            values["reward_funcs"] = count_w4
        return trainer_class(args=make_args(**overrides), **{**values, **given})

    yield make


@pytest.fixture
def make_trained(make_trainer: Callable[..., PPOTrainer]) -> Callable[..., PPOTrainer]:
    """The same; the trainers have trained."""

    def make(*trainer_class: type[PPOTrainer], **overrides: Any) -> PPOTrainer:
        trainer = make_trainer(*trainer_class, **overrides)
        trainer.train()
        return trainer

    return make


@pytest.fixture
def each_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a model's rows can be packed is found out anew."""
    monkeypatch.setattr(packing, "_LOOKS", {})


@pytest.fixture
def server() -> Iterator[Any]:
    """A reward server on this machine; see `tests/rewards/local_server.py`."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    http.requests, http.replies, http.lock = [], [], threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield http
    http.shutdown()
    http.server_close()
