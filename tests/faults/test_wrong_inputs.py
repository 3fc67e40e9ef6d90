"""Every input that cannot be is one sentence that names it, before a model is loaded: a table made from the types.

What a value of the wrong kind is follows from a field's type, so that a field that transformers adds is tried too. A
value that is accepted although it looks wrong stands in a table here, with the reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, get_args, get_type_hints

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.config.validation import REMOVED
from rlhf_ppo.data.prompts import PromptCollator
from tests.conftest import QUIET, count_w4, make_tokenizer, prompt_rows, save_models, tiny_policy, tiny_scorer
from tests.runs import QUICK

NAN, INF, HUGE, BEYOND = math.nan, math.inf, 10**12, 10**400
NOTHING = object()

PACKAGES = {
    *("azureml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flytekit", "mlflow", "neptune"),
    *("swanlab", "tensorboard", "tensorboardX", "trackio", "wandb"),
}
"""What trackers need."""

# ---- Arguments ----

OWN = {*inspect.get_annotations(PPOConfig)}
INHERITED = {item.name: item for item in dataclasses.fields(TrainingArguments) if item.name not in {*OWN, *REMOVED}}
HINTS = get_type_hints(TrainingArguments)


def wrong_values(name: str) -> list[Any]:
    """Values that no argument of this type can have, and some that look wrong for all."""
    hint = HINTS[name]
    kinds = {*(get_args(hint) or (hint,))}
    wrong: list[Any] = [NOTHING, b"bytes", 1.5j]
    if bool in kinds and not {int, float, str} & kinds:
        wrong += ["yes", 2, "", 1.0]
    if {int, float} & kinds:
        wrong += ["3x", "5", NAN, INF, -INF, -3, -7, -1e30, True, [1], HUGE, torch.tensor(3), BEYOND]
    if int in kinds:
        wrong += [1.5]
    if str in kinds:
        wrong += ["no_such", 3, ""]
    if "dict" in str(hint):
        wrong += ["{bad", "nowhere.json", [1], {"no_such_key": 1}, 3]
    if "list" in str(hint):
        wrong += [[3], ["no_such"]]
    return wrong + ([] if type(None) in kinds else [None])


ANY_TEXT = ("no_such", "")
ACCEPTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        ("warmup_steps", "eval_steps", "eval_delay", "save_steps", "save_total_limit", "torch_empty_cache_steps"),
        ((HUGE,), "beyond the end of a run it means never, or all"),
    ),
    **dict.fromkeys(("max_steps", "num_train_epochs", "ddp_timeout"), ((HUGE,), "a run may be as long as one likes")),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size"),
        ((HUGE,), "the data set says how many there can be: an error of PPOTrainer, below"),
    ),
    **dict.fromkeys(
        ("weight_decay", "adam_epsilon", "max_grad_norm"), ((HUGE,), "finite; what diverges is stopped in training")
    ),
    **dict.fromkeys(("dataloader_num_workers", "ddp_bucket_cap_mb", "local_rank"), ((HUGE,), "the machine's limits")),
    **dict.fromkeys(("run_name", "project", "hub_token", "hub_model_id", "hub_revision"), (ANY_TEXT, "any text")),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "length_column_name"),
        (ANY_TEXT, "any text"),
    ),
    "output_dir": (("no_such",), "it is made"),
    "resume_from_checkpoint": (ANY_TEXT, "train() looks for it before anything else, as its own argument"),
    "metric_for_best_model": (("no_such",), "rewards have metrics of their own: an error of PPOTrainer, below"),
    "optim_target_modules": ((*ANY_TEXT, ["no_such"]), "names of modules, which a model must be asked for"),
    "optim_args": (ANY_TEXT, "its optimizer reads it: an error of PPOTrainer, below"),
    "lr_scheduler_kwargs": (({"no_such_key": 1},), "its schedule reads them: an error of PPOTrainer, below"),
    "fsdp": (("",), "not used"),
    "fsdp_config": (({"no_such_key": 1},), "not used without fsdp"),
    "deepspeed": (("",), "not used"),
    "debug": (("", None), "the default, and what a command line says"),
}
"""Values that look wrong and are not, or are found later, and why."""

SAID_BY_TRANSFORMERS = {"deepspeed": "deepspeed config", "fsdp": "unknown `fsdp` option: no_such"}


def is_accepted(name: str, value: Any) -> bool:
    return any(value is given or (type(value) is type(given) and value == given) for given in ACCEPTED[name][0])


@pytest.mark.parametrize("name", INHERITED)
def test_a_wrong_value_is_refused_by_name(name: str, tmp_path: Any) -> None:
    for value in wrong_values(name):
        given = {**QUIET, "output_dir": str(tmp_path), name: value}
        if name in ACCEPTED and is_accepted(name, value):
            PPOConfig(**given)
            continue
        with pytest.raises((TypeError, ValueError)) as error:
            PPOConfig(**given)
        said = str(error.value)
        if name in SAID_BY_TRANSFORMERS and value in ("no_such", "nowhere.json", {"no_such_key": 1}):
            assert SAID_BY_TRANSFORMERS[name] in said.lower()
        else:
            told = "" if name == "hub_token" else repr(value)
            assert f"{name}={told}" in said or (value is BEYOND and f"{name}=a whole number of more" in said)


COMBINATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "best model without evaluation": ({"load_best_model_at_end": True}, "load_best_model_at_end=True compares"),
    "best saves without evaluation": ({"save_strategy": "best"}, "save_strategy='best' compares"),
    "plateau without evaluation": ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "compares evaluations"),
    "saves at no step": ({"save_strategy": "steps", "save_steps": 0}, "save_steps=0 must be greater than 0"),
    "logs at no step": ({"logging_steps": 0}, "logging_steps=0 must be greater than 0; logging_strategy='no'"),
    "evaluations at no step": ({"eval_strategy": "steps", "eval_steps": 0}, "eval_steps=0 must be greater than 0"),
    "a repository without a name": ({"push_to_hub": True, "hub_model_id": ""}, "hub_model_id='' must be 'name'"),
    "a temperature that overflows": ({"temperature": 1e-320}, r"temperature=1e-320 must be in \[0.001, 1000\]"),
    "a seed beyond NumPy's": ({"seed": 2**32}, r"seed=4294967296 must be in \[0, 4294967295\]"),
    "a home of nobody": ({"output_dir": "~nobody_at_all/run"}, "output_dir='~nobody_at_all/run' names a user without"),
    "steps that are none": ({"max_steps": 0}, "max_steps=0 must be at least 1; with -1"),
    "prefetching nobody": ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor=2 needs worker"),
    "persistent nobody": ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers=True needs worker"),
    "spawning nobody": ({"dataloader_multiprocessing_context": "spawn"}, "=.spawn. needs worker"),
    "a backend for one": ({"ddp_backend": "gloo"}, "ddp_backend='gloo' needs a run of several processes"),
    "a repository too deep": ({"push_to_hub": True, "hub_model_id": "a/b/c"}, "hub_model_id='a/b/c' must be"),
    "two precisions": ({"fp16": True, "bf16": True}, "one of fp16 and bf16"),
    "unknown settings of checkpointing": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"reentrant": False}}, r"\['reentrant'\]"
    ),
    "an unknown tracker": ({"report_to": ["wandb", "wandbb"]}, r"report_to=\['wandb', 'wandbb'\] must be 'none'"),
}  # fmt: skip


@pytest.mark.parametrize("case", COMBINATIONS)
def test_a_combination_that_cannot_be_is_refused(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    given, said = COMBINATIONS[case]
    if absent := given.keys() - {item.name for item in dataclasses.fields(PPOConfig)}:
        pytest.skip(f"this transformers has no {', '.join(absent)}")
    with pytest.raises(ValueError, match=said):
        PPOConfig(**{**QUIET, "output_dir": str(tmp_path), **given})


@pytest.mark.parametrize("tracker", INTEGRATION_TO_CALLBACK)
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(
    tracker: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages are those that Trainer's callback asks for, after the models were loaded."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name.partition(".")[0] in PACKAGES else found(name)
    )
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    # Half made, some fail again where they are deleted.
    callback = type("Callback", (INTEGRATION_TO_CALLBACK[tracker],), {"__del__": lambda self: None})
    with pytest.raises((RuntimeError, ImportError, ValueError)) as theirs:
        callback()
    needed = re.search(r"pip install ([\w-]+)|(KUBEFLOW_TRAINER_SERVER_URL)|requires (tensorboard)", str(theirs.value))
    for given in (tracker, ["none", tracker]):
        with pytest.raises(ValueError) as ours:
            PPOConfig(**{**QUIET, "output_dir": str(tmp_path), "report_to": given})
        said = str(ours.value)
        assert said.startswith(f"report_to={given!r} has {tracker!r}, which is not installed: ")
        assert needed is not None and needed[needed.lastindex or 0] in said and "report to 'none'" in said


# ---- What the trainer is given ----


class NoCallback:
    """Has nothing of one."""


def without_a_reward() -> list[float]:
    return []


ANYTHING: dict[str, Any] = {
    "object": NOTHING, "number": 3, "empty text": "", "bytes": b"x", "empty list": [], "empty dict": {},
    "list of a number": [3], "tuple": (1, 2, 3), "list of None": [None], "nan": NAN,
}  # fmt: skip
ARGUMENTS = (
    *("model", "ref_model", "value_model", "reward_model", "processing_class", "train_dataset", "eval_dataset"),
    *("data_collator", "optimizers", "callbacks", "peft_config", "value_peft_config", "reward_funcs"),
)
LEGITIMATE = {("callbacks", "empty list"): "no callbacks"}
FOUND_LATER = {(name, "empty text") for name in ("model", "ref_model", "value_model", "reward_model")}
"""A text may be a path, which is looked for where models are loaded."""

GOOD = {"processing_class": make_tokenizer(), "train_dataset": prompt_rows(8), "reward_funcs": count_w4}


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("models were loaded")

    for name in ("trainer.load_reward_models", "training.construction.assemble_models"):
        monkeypatch.setattr(f"rlhf_ppo.{name}", forbidden)


def construct(tmp_path: Any, **given: Any) -> PPOTrainer:
    """A trainer; keyword arguments of PPOTrainer, or else of PPOConfig."""
    names = {name: given.pop(name) for name in list(given) if name in inspect.signature(PPOTrainer).parameters}
    args = PPOConfig(**{**QUIET, **QUICK, "output_dir": str(tmp_path / "run"), **given})
    rewards = {} if "reward_model" in names else {"reward_funcs": count_w4}
    return PPOTrainer(args, **{"model": "a/model", **GOOD, **rewards, **names})


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_something_else_is_refused_before_a_model_is_loaded(argument: str, tmp_path: Any) -> None:
    for kind, value in ANYTHING.items():
        if (argument, kind) in LEGITIMATE or (argument, kind) in FOUND_LATER:
            continue
        given = {argument: value} | ({"reward_funcs": None} if argument == "reward_model" else {})
        with pytest.raises((TypeError, ValueError)) as error:
            construct(tmp_path, **given)
        assert argument in str(error.value), (kind, error.value)


TEXTS = ["w1 w2"] * 8


def texts(**columns: Any) -> Dataset:
    return Dataset.from_dict({"prompt": TEXTS, **columns})


def following() -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


GIVEN: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "rows that are texts": (lambda: {"train_dataset": ["w1"] * 8}, "row 0 of train_dataset is 'w1'"),
    "evaluation rows that are none": (lambda: {"eval_dataset": [None] * 8}, "row 0 of eval_dataset is None"),
    "a table of pandas": (
        lambda: {"train_dataset": pd.DataFrame({"prompt": TEXTS})}, "train_dataset is a DataFrame, whose row 0 cannot"
    ),
    "an evaluation set with a number for a name": (lambda: {"eval_dataset": {1: prompt_rows(4)}}, "of the name 1"),
    "a class as a model": (lambda: {"model": NoCallback}, "model is the class NoCallback: pass a model"),
    "a class as a reference": (lambda: {"ref_model": NoCallback}, "ref_model is the class NoCallback"),
    "no evaluation sets": (lambda: {"eval_dataset": {}}, "eval_dataset={} is not a data set"),
    "an evaluation set that is none": (lambda: {"eval_dataset": {"a": None}}, r"eval_dataset\['a'\] is a NoneType"),
    "evaluation of nothing": (lambda: {"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy='steps' evaluates"),
    "evaluation of nothing at the start": (lambda: {"eval_on_start": True}, "eval_on_start=True evaluates"),
    "no columns of prompts": (lambda: {"train_dataset": Dataset.from_dict({"q": TEXTS})}, r"columns \['q'\]"),
    "lengths that are texts": (
        lambda: {
            "train_dataset": texts(), "train_sampling_strategy": "group_by_length", "length_column_name": "prompt"
        },
        "length_column_name='prompt' holds no whole numbers",
    ),
    "callbacks that are none": (lambda: {"callbacks": [NoCallback]}, "callbacks holds .*NoCallback.*not a Train"),
    "a class as a reward": (lambda: {"reward_funcs": NoCallback}, "reward_funcs holds the class NoCallback"),
    "a directory below a file": (lambda: {"output_dir": f"{__file__}/run"}, "output_dir=.*is a file"),
    "a directory of a name too long": (lambda: {"output_dir": "x" * 300}, "output_dir='xxx.*cannot be written"),
    "a directory of no name": (lambda: {"output_dir": "a\0b"}, "output_dir='a.x00b' cannot be written: no name"),
    "a directory of half a character": (lambda: {"output_dir": "\udcff"}, "output_dir='.udcff' cannot be written"),
    "more episodes than prompts": (
        lambda: {"per_device_train_batch_size": HUGE, "total_episodes": None}, "fewer than the 1000000000000 of one"
    ),
    "a schedule that follows evaluations without any": (lambda: {"optimizers": following()}, "eval_strategy='no'"),
    "settings of the optimizer that cannot be read": (
        lambda: {"optim_args": "no_such"}, "optim_args='no_such' cannot be used"
    ),
    "an optimizer that is not installed": (lambda: {"optim": "galore_adamw"}, "optim='galore_adamw' .* cannot be us"),
    "settings that the schedule does not know": (
        lambda: {"lr_scheduler_kwargs": {"no_such": 1}}, "lr_scheduler_type='linear' .*'no_such'.* cannot be used"
    ),
    "settings that the schedule lacks": (
        lambda: {"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type='cosine_with_min_lr' .*cannot be used"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("case", GIVEN)
def test_what_cannot_be_given_is_refused_before_a_model_is_loaded(case: str, tmp_path: Any) -> None:
    make, said = GIVEN[case]
    with pytest.raises((TypeError, ValueError), match=f"(?s){said}"):
        construct(tmp_path, **make())


def ids(*row: Any) -> dict[str, Any]:
    return {"train_dataset": [{"input_ids": list(row)}] * 8}


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
BEST |= {"save_strategy": "steps", "eval_dataset": prompt_rows(4)}

WITH_MODELS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "BOS alone": (lambda: ids(2), r"row 0 of train_dataset holds only BOS and PAD \(\[2\]\)"),
    "BOS as text": (lambda: {"train_dataset": texts(prompt=["<bos>"] * 8)}, "holds only BOS and PAD"),
    "PAD as text": (lambda: {"train_dataset": texts(prompt=["<pad> <pad>"] * 8)}, "holds only BOS and PAD"),
    "BOS and PAD with a mask": (
        lambda: {"train_dataset": [{"input_ids": [2, 0], "attention_mask": [1, 1]}] * 8}, "only BOS and PAD"
    ),
    "booleans as ids": (lambda: ids(True), "no valid input_ids"),
    "the tokenizer's output as ids": (
        lambda: {"train_dataset": [{"input_ids": {"input_ids": [5], "attention_mask": [1]}}] * 8},
        r"row 0 of train_dataset has the tokenizer's whole output, a dict, as input_ids: .*return_dict=False",
    ),
    "ids beyond all vocabularies": (lambda: ids(10**30), "token id 1000000"),
    "half a surrogate pair": (
        lambda: {"train_dataset": [{"prompt": "w1 \ud800"}] * 8}, "row 0 of train_dataset has a prompt that the token"
    ),
    "bytes": (lambda: {"train_dataset": [{"prompt": b"w1"}] * 8}, "prompt of type bytes"),
    "a later row that is none": (lambda: {"train_dataset": [{"prompt": "w1"}] * 7 + ["w1"]}, "row 7 .* is 'w1'"),
    **{
        f"a column named {name}": (
            lambda name=name: {"train_dataset": texts(**{name: TEXTS})}, rf"train_dataset has the columns \['{name}'\]"
        )
        for name in (
            *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
            "policy_answers",
        )
    },
    "an adapter of no module": (
        lambda: {"peft_config": LoraConfig(target_modules=["no_such"])}, "^peft_config does not fit .*'no_such'"
    ),
    "a value adapter of no module": (
        lambda: {"value_peft_config": LoraConfig(target_modules=["no_such"])}, "^value_peft_config does not fit"
    ),
    "an adapter of a classifier": (
        lambda: {"peft_config": LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])},
        "peft_config has task_type='SEQ_CLS'",
    ),
    "a stop token beyond the vocabulary": (
        lambda: {"stop_token": None, "stop_token_id": 10**6}, "the stop token 1000000 lies outside .*set stop_token_id"
    ),
    "a metric that evaluation does not give": (
        lambda: {**BEST, "metric_for_best_model": "scores"}, r"best_model='scores' is not a metric .*\['score'"
    ),
    "such a metric without a comparison": (
        lambda: {**BEST, "load_best_model_at_end": False, "metric_for_best_model": "scores"}, "'scores' is not a metri"
    ),
    "a metric of no evaluation set": (
        lambda: {**BEST, "eval_dataset": {"a": prompt_rows(4)}}, r"metric_for_best_model='score' .*\['a_score'"
    ),
    "a collator that takes nothing": (lambda: {"data_collator": without_a_reward}, "takes 0 positional arguments"),
    "a collator of something else": (lambda: {"data_collator": lambda rows: 3}, "data_collator returned int"),
    "a collator of other columns": (lambda: {"data_collator": lambda rows: {"x": 1}}, r"returned \['x'\]"),
    "a collator of fewer rows": (
        lambda: {"data_collator": lambda rows: PromptCollator(0)(rows[:1])}, r"data_collator returned 1 prompts for \d"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {"model": tiny_policy(), "value_model": tiny_scorer()}


@pytest.mark.parametrize("case", WITH_MODELS)
def test_what_the_models_must_tell_is_refused_at_construction(case: str, models: Any, tmp_path: Any) -> None:
    make, said = WITH_MODELS[case]
    with pytest.raises((TypeError, ValueError), match=f"(?s){said}"):
        construct(tmp_path, **models, **make())


def logs_by_keyword(completions: Any, **kwargs: Any) -> list[float]:
    kwargs["log_metric"]("mine", 1.0)
    return [0.0] * len(completions)


def names_log_metric(completions: Any, log_metric: Any = None, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("metric", ["score", "eval_score", "rewards/count_w4/mean", "eval_ended_frac"])
def test_metrics_that_evaluation_gives_are_known(metric: str, models: Any, tmp_path: Any) -> None:
    construct(tmp_path, **models, **BEST, metric_for_best_model=metric)


@pytest.mark.parametrize("function", [logs_by_keyword, names_log_metric])
def test_a_function_may_log_any_metric(function: Any, models: Any, tmp_path: Any) -> None:
    construct(tmp_path, **models, **BEST, reward_funcs=[count_w4, function], metric_for_best_model="mine")


def test_a_language_model_is_no_reward_model_by_its_path_either(models: Any, tmp_path: Any) -> None:
    save_models(tmp_path, writer=tiny_policy())
    with pytest.raises(ValueError, match=r"reward_model='.*writer' is not a reward model: score.weight of .* random"):
        construct(tmp_path, **models, reward_model=str(tmp_path / "writer"), reward_funcs=None)


def test_numbers_of_every_library_are_numbers(tmp_path: Any) -> None:
    """NumPy's and fractions are, as Python's own, which checkpoints can hold; a tensor is none."""
    given = {"learning_rate": np.float32(0.5), "seed": np.int64(3), "gamma": Fraction(1, 2), "save_steps": np.int32(7)}
    args = PPOConfig(**{**QUIET, "output_dir": str(tmp_path), **given, "reward_weights": [np.float16(0.25)]})
    for name, value in given.items():
        kept = getattr(args, name)
        assert kept == value and type(kept) in (int, float), name
    assert args.reward_weights == [0.25] and type(args.reward_weights[0]) is float


def test_what_is_asked_of_a_trainer(models: Any, tmp_path: Any) -> None:
    trainer = construct(tmp_path, **models, eval_dataset={"a": prompt_rows(4)})
    for value in (3, 1.5, [], NOTHING, b"x"):
        with pytest.raises(TypeError, match=r"^resume_from_checkpoint=.* must be a checkpoint's directory, True or"):
            trainer.train(resume_from_checkpoint=value)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"eval_dataset='b' is none of \['a'\], the names"):
        trainer.evaluate("b")
    with pytest.raises(ValueError, match=r"eval_dataset={} is not a data set"):
        trainer.evaluate({})
    trainer.args.learning_rate = "fast"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match=r"^learning_rate='fast' is not float"):
        trainer.train()


def test_what_looks_wrong_and_is_not(models: Any, tmp_path: Any) -> None:
    """A `completion` is left out for functions as GRPO does; each row may have a prompt of its own form."""
    construct(tmp_path, **models, train_dataset=texts(completion=TEXTS))
    construct(tmp_path, **models, train_dataset=[{"prompt": "w1"}] * 7 + [{"text": "w1"}])
    construct(
        tmp_path, **models, train_dataset=texts(prompt=["w9"] * 8), processing_class=make_tokenizer(pad_token="w9")
    )
    assert torch.is_grad_enabled()
