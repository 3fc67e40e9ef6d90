"""What the processes of the distributed tests do. Every scenario reports how it was launched, and tests check that."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, TrainerCallback

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.data.rollout import Prompts, Responses
from rlhf_ppo.generation import transformers_engine
from rlhf_ppo.generation.sampling import join_responses, whole_policy
from rlhf_ppo.models import policy_and_value
from rlhf_ppo.models.unwrapping import gathered
from rlhf_ppo.rewards.judges import PreferenceReward
from tests import conftest
from tests.distributed.processes import scenario_named
from tests.episodes import RespondsInTurns
from tests.runs import At, SeenPrompts, record_rollouts, train_and_record


def launched_as(trainer: PPOTrainer) -> dict[str, Any]:
    """Number of processes, launcher, ZeRO stage and precision, as seen from inside."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    return {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "zero_stage": None if plugin is None else plugin.zero_stage,
        "mixed_precision": trainer.accelerator.mixed_precision,
    }


def report(trainer: PPOTrainer, **more: Any) -> dict[str, Any]:
    """How the trainer was launched, its log, and more."""
    return {**launched_as(trainer), "log": trainer.state.log_history, **more}


class FixedResponses(PPOTrainer):
    """Answers each prompt with ids drawn from a generator that the prompt seeds, and which of its responses it is."""

    def generate_responses(self, prompts: Prompts, *given: Any) -> Responses:
        rows, device = [], prompts.input_ids.device
        for row, (ids, real) in enumerate(zip(prompts.input_ids.cpu(), prompts.attention_mask.cpu(), strict=True)):
            seed = int((ids[real] * torch.arange(1, int(real.sum()) + 1)).sum())
            generator = torch.Generator().manual_seed(seed + 1000 * (row % self.args.num_generations))
            rows.append(torch.randint(1, 12, (self.args.response_length,), generator=generator))
        return join_responses(prompts, torch.stack(rows).to(device), self.tokens.stop, self.tokens.pad)


def signal_this_process(number: int) -> None:
    os.kill(os.getpid(), number)


def kill(_: Any) -> None:
    """End this process the hard way."""
    signal_this_process(signal.SIGKILL)


def make_trainer(
    output_dir: str,
    models: str,
    trainer_class: type[PPOTrainer] = PPOTrainer,
    num_prompts: int = 32,
    given: dict[str, Any] | None = None,
    **overrides: Any,
) -> PPOTrainer:
    """A tiny trainer for a few updates, on the models in the directories `policy` and `value_model`.

    `given` are arguments of the trainer, `overrides` of its configuration.
    """
    values: dict[str, Any] = {
        "output_dir": output_dir, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2, "num_mini_batches": 2, "max_steps": 3, "response_length": 8, "stop_token": "eos",
        "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "num_sample_generations": 0, "seed": 3, "ddp_backend": "gloo",
    }  # fmt: skip
    arguments: dict[str, Any] = {
        "processing_class": conftest.make_tokenizer(),
        "model": f"{models}/policy",
        "value_model": f"{models}/value_model",
        "train_dataset": Dataset.from_list(conftest.prompt_rows(num_prompts)),
        "eval_dataset": Dataset.from_list(conftest.prompt_rows(6, seed=1)),
        "reward_funcs": conftest.count_w4,
    }
    if overrides.get("ptx_coef"):
        arguments["ptx_dataset"] = [
            {"text": " ".join(f"w{row + word}" for word in range(1 + row))} for row in range(11)
        ]
    return trainer_class(args=PPOConfig(**{**values, **overrides}), **{**arguments, **(given or {})})


def lora() -> dict[str, Any]:
    """An adapter for the policy and one for the value model."""
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    return {"peft_config": LoraConfig(**config), "value_peft_config": LoraConfig(**config)}


def whole_parameters(trainer: PPOTrainer) -> dict[str, np.ndarray]:
    """All parameters of both models, put together from all ranks; every rank calls this."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    return {name: value.float().cpu().numpy() for name, value in state.items()}


def own_optimizer_state(trainer: PPOTrainer) -> list[np.ndarray]:
    """This rank's share of the optimizer's moments and step counts."""
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    tensors = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    own = (value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value) for value in tensors)
    return [value.float().cpu().numpy() for value in own]


def train_with_checkpoints(
    output_dir: str,
    models: str,
    adapters: bool = False,
    fixed_responses: bool = False,
    die_at: int | None = None,
    resume: bool | str = False,
    trainer_class: type[PPOTrainer] = PPOTrainer,
    given: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Train with a checkpoint at each update; return all that an exact continuation must give again."""
    trainer = make_trainer(
        output_dir,
        models,
        FixedResponses if fixed_responses else trainer_class,
        given={
            "callbacks": [] if die_at is None else [At("on_step_begin", die_at, kill)],
            **(lora() if adapters else {}),
            **(given or {}),
        },
        **{"save_strategy": "steps", "save_steps": 1, "num_ppo_epochs": 1, **overrides},
    )
    trainer.train(resume_from_checkpoint=resume)
    return report(
        trainer,
        parameters=whole_parameters(trainer),
        optimizer=own_optimizer_state(trainer),
        random=torch.rand(4).numpy(),
    )


def train_over_one_base(output_dir: str, models: str, **arguments: Any) -> dict[str, Any]:
    """Train two adapters with checkpoints; return how many tensors the models share and hold at the end, too."""
    kept: list[PPOTrainer] = []

    class Kept(PPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kept.append(self)

    torch.manual_seed(0)  # of the adapters
    given = {"value_model": None, **lora()}
    result = train_with_checkpoints(output_dir, models, trainer_class=Kept, given=given, **arguments)
    wrapper = kept[0].accelerator.unwrap_model(kept[0].model)
    policy, value_model = wrapper.policy, wrapper.value_model
    held = {value.data_ptr() for value in wrapper.parameters()}
    return result | {
        "num_shared": len(set(policy.parameters()) & set(value_model.parameters())),
        "num_held": len(held),
    }


def train(output_dir: str, models: str, adapters: bool = False, **overrides: Any) -> dict[str, Any]:
    """Train, save the policy alone, and return all that it must be loaded with again."""
    torch.manual_seed(0)  # of the adapters
    trainer = make_trainer(output_dir, models, given=lora() if adapters else {}, **overrides)
    trainer.train()
    trainer.save_model(output_dir)
    policy = {name: value for name, value in whole_parameters(trainer).items() if name.startswith("policy.")}
    with whole_policy(trainer.model_wrapped, trainer.accelerator, True) as whole:
        logits = logits_of(whole)
    return report(trainer, policy=policy, logits=logits)


class KeepWeights(TrainerCallback):
    """Keeps all parameters as they are before each update, and at the end."""

    trainer: PPOTrainer

    def __init__(self) -> None:
        self.kept: list[dict[str, np.ndarray]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kept.append({name: value.copy() for name, value in whole_parameters(self.trainer).items()})

    on_train_end = on_step_begin


TRAINED = ("policy", "value_model")


def warm_the_critic_up(
    output_dir: str, models: str, adapters: bool = False, one_body: bool = False, **overrides: Any
) -> dict[str, Any]:
    """Train two updates of critic warm-up and one of both models; return how far each moved, in learning rates."""
    weights = KeepWeights()
    given = (lora() if adapters else {}) | ({"value_model": "policy", "value_peft_config": None} if one_body else {})
    trainer = weights.trainer = make_trainer(
        output_dir, models, FixedResponses, given={"callbacks": [weights], **given},
        critic_warmup_steps=2, num_ppo_epochs=1, num_mini_batches=1, weight_decay=0.1, lr_scheduler_type="constant",
        **overrides,
    )  # fmt: skip
    trainer.train()
    largest = []
    for before, after in itertools.pairwise(weights.kept):
        moved = {name: np.abs(after[name] - before[name]).max() / trainer.args.learning_rate for name in after}
        by_model = {model: [far for name, far in moved.items() if name.startswith(model)] for model in TRAINED}
        largest.append({model: max(far, default=0.0) for model, far in by_model.items()})
    return {
        **launched_as(trainer),
        "largest": largest,
        "warmup": [log["val/critic_warmup"] for log in trainer.state.log_history[:-1]],
    }


@torch.no_grad()
def logits_of(policy: Any) -> np.ndarray:
    """The policy's logits of two fixed texts."""
    ids = torch.randint(3, 32, (2, 9), generator=torch.Generator().manual_seed(0)).to(policy.device)
    return (
        policy.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float().cpu().numpy()
    )


def one_step(
    output_dir: str,
    models: str,
    local_batch_size: int,
    adapted_head: bool = False,
    one_body: bool = False,
    tokens_per_chunk: int = 1000,
    **overrides: Any,
) -> dict[str, Any]:
    """Take one SGD step of rate 1 on responses that do not depend on the ranks; return all parameters and samples.

    The ranks have different numbers of chunks, and ZeRO-3 takes weights of any size apart. Those that are read outside
    the forward pass of their layer it would gather for the whole pass of both models.
    """
    adapter = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)  # of the adapter
    trainer = make_trainer(
        output_dir, models, FixedResponses, num_prompts=8, gradient_accumulation_steps=local_batch_size // 2,
        given=({"peft_config": adapter} if adapted_head else {}) | ({"value_model": "policy"} if one_body else {}),
        num_ppo_epochs=1, num_mini_batches=1, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
        whiten_rewards=True, missing_eos_penalty=1.0, **overrides,
    )  # fmt: skip
    plugin = trainer.accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with fused_heads(tokens_per_chunk + 2 * trainer.args.process_index) as chunks:
        trainer.train()
    table = trainer.generate_completions()
    return report(
        trainer,
        parameters=whole_parameters(trainer),
        table=table.to_dict("list"),
        chunks=chunks,
        gathered_by_the_way=len(getattr(trainer.accelerator.unwrap_model(trainer.model), "_external_params", ())),
    )


@contextmanager
def fused_heads(tokens_per_chunk: int) -> Iterator[list[int]]:
    """Cut the tokens of each pass into chunks, list how many, and let no head be called instead of taken apart."""
    fused, chunks = policy_and_value.fused_logprobs, []

    def counted(factors: Any, targets: Any, scaling: Any, max_elements: int, *others: Any) -> Any:
        chunks.append(-(-len(targets) // tokens_per_chunk))
        return fused(factors, targets, scaling, tokens_per_chunk * len(factors.weights[0]), *others)

    with (
        patch.object(policy_and_value, "fused_logprobs", counted),
        patch.object(policy_and_value, "_logprobs_of_called_head", None),
    ):
        yield chunks


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    """A reward for each token."""
    return [[0.5 if token % 2 == 0 else token / 100 for token in ids] for ids in completion_ids]


async def slow_length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """An endpoint's manner: late, and without a score for some."""
    await asyncio.sleep(0.01)
    return [None if ids[0] % 3 == 0 else float(len(ids)) for ids in completion_ids]


def two_updates_of_scaled_rewards(
    output_dir: str, models: str, local_batch_size: int, in_turns: bool = False, **recipe: Any
) -> dict[str, Any]:
    """Train on rewards per token and a slow function, scaled by the scores of all ranks; responses are given.

    With `in_turns` their masks have holes.
    """
    run = {"score_scaling": True, "num_ppo_epochs": 1, "learning_rate": 0.1, **recipe}
    trainer = make_trainer(
        output_dir, models, RespondsInTurns if in_turns else FixedResponses, num_prompts=16,
        gradient_accumulation_steps=local_batch_size // 2,
        given={"reward_funcs": [even_tokens, slow_length], "ref_model": f"{models}/policy"},
        reward_weights={"even_tokens": 2.0, "slow_length": 0.5}, score_clip=1.5, missing_eos_penalty=0.25,
        num_mini_batches=1, max_steps=2, optim="sgd", max_grad_norm=0.0, dataloader_drop_last=True,
        train_sampling_strategy="sequential", **run,
    )  # fmt: skip
    trainer.train()
    return report(trainer, parameters=whole_parameters(trainer), score_moments=trainer.score_moments.state_dict())


def two_steps_of_given_responses(output_dir: str, models: str, local_batch_size: int, **recipe: Any) -> dict[str, Any]:
    """Call `step` twice, each time with this rank's share of eight responses, some with a hole.

    Before each, the last rank passes too few rows: an error on all ranks, after which the trainer is unchanged.
    """
    trainer = make_trainer(
        output_dir, models, gradient_accumulation_steps=local_batch_size // 2,
        given={"train_dataset": None, "eval_dataset": None, "reward_funcs": None, "ref_model": f"{models}/policy"},
        score_scaling=True, missing_eos_penalty=0.25, num_ppo_epochs=1, num_mini_batches=1, max_steps=2, optim="sgd",
        learning_rate=0.1, max_grad_norm=0.0, **recipe,
    )  # fmt: skip
    own = slice(trainer.args.process_index * local_batch_size, (trainer.args.process_index + 1) * local_batch_size)
    for update in range(2):
        generator = torch.Generator().manual_seed(update)
        lengths = [3 + row % 4 for row in range(8)]
        queries = [torch.randint(3, 12, (2 + row % 3,), generator=generator) for row in range(8)]
        responses = [torch.randint(1, 12, (length,), generator=generator) for length in lengths]
        masks = [torch.arange(length) != 1 + row % 5 for row, length in enumerate(lengths)]
        scores = torch.randn(8, generator=generator)
        is_last = trainer.args.process_index == trainer.args.world_size - 1
        with pytest.raises(ValueError, match="entries, but an update takes"):
            trainer.step(queries[own][is_last:], responses[own], scores[own], masks[own])
        trainer.step(queries[own], responses[own], scores[own], masks[own])
    return report(trainer, parameters=whole_parameters(trainer), score_moments=trainer.score_moments.state_dict())


def keep_finished_rows() -> None:
    """Let finished rows stay in the batch everywhere, as they do layer by layer: all then draw the same numbers."""
    transformers_engine.UNFINISHED_SHARE = 0.0


def train_with_reward_model(output_dir: str, models: str, adapters: bool = False, **overrides: Any) -> dict[str, Any]:
    """Evaluate, then train on a reward model, with the reference and the value model made by the trainer.

    Responses are also compared with the reference's and with the policy's own.

    Micro-batches are cut by tokens, of which the ranks have different numbers; all prompts begin with the same nine. A
    stop string ends most responses, so that the ranks generate for different numbers of tokens.
    """
    keep_finished_rows()
    rewards = [PreferenceReward(prefers_larger_words, kind, name=kind) for kind in ("reference", "self")]
    given = {"reward_model": f"{models}/reward_model", "value_model": None, "reward_funcs": rewards}
    prompts = [{"input_ids": [*range(3, 12), *row["input_ids"]]} for row in conftest.prompt_rows(32)]
    given |= {"train_dataset": Dataset.from_list(prompts)} | (lora() if adapters else {})
    torch.manual_seed(0)  # of the adapters
    run = {"max_tokens_per_micro_batch": 24, "stop_strings": ["w1"], **overrides}
    trainer = make_trainer(output_dir, models, given=given, **run)
    built = sum(own_numbers(parameter) for parameter in trainer.model.parameters())
    rollouts = record_rollouts(trainer)
    before = trainer.evaluate()
    trainer.train()
    reference = trainer.reference.model  # None with adapters
    frozen = [*trainer.reward_model.parameters(), *([] if reference is None else reference.parameters())]
    return report(
        trainer,
        before=before,
        frozen_numbers_here=sum(own_numbers(parameter) for parameter in frozen),
        built_numbers_here=built,
        widths=[int(rollout.response_mask.sum(dim=1).max()) for rollout in rollouts],
    )


def made_by_the_constructor(output_dir: str, models: str, **given: Any) -> dict[str, np.ndarray]:
    """Construct a trainer without a given value model; return its weights and the reward model's, put together."""
    trainer = make_trainer(output_dir, models, given={"value_model": None, **given})
    parts = {"value_model": trainer.model.value_model, "reward_model": trainer.reward_model}
    weights = {}
    for part, model in parts.items():
        for name, weight in () if model is None else model.named_parameters():
            with gathered([weight]):
                weights[f"{part}.{name.removeprefix('module.')}"] = weight.detach().numpy().copy()
    return weights


def prefers_larger_words(prompts: list[str], pairs: list[list[str]]) -> list[float]:
    """A judge that depends on every word, so that another response is another verdict."""
    sums = [[sum(int(word[1:]) for word in text.split() if word[0] == "w") for text in pair] for pair in pairs]
    return [0.5 if first == second else float(second > first) for first, second in sums]


def own_numbers(parameter: Any) -> int:
    """How many numbers of a parameter this rank holds."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel()
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()


def reward_function_fails_on_one_rank(output_dir: str, models: str) -> None:
    """Train with a reward function that raises in the second update of rank 1."""
    trainer = make_trainer(output_dir, models)

    async def count_or_fail(**kwargs: Any) -> list[float]:
        await asyncio.sleep(0.01)
        if trainer.args.process_index == 1 and trainer.state.global_step == 1:
            raise ZeroDivisionError("no such luck")
        return conftest.count_w4(**kwargs)

    trainer.scorer = make_trainer(output_dir, models, given={"reward_funcs": count_or_fail}).scorer
    trainer.train()


def out_of_memory_on_one_rank(output_dir: str, models: str, where: str) -> None:
    """Run out of memory in the first pass of rank 1's second rollout: of the policy, or of the reward model."""
    given = {"reward_funcs": None, "reward_model": f"{models}/reward_model"}
    trainer = make_trainer(output_dir, models, given=given)
    model: Any = trainer.policy_model if where == "generation" else trainer.reward_models[0]

    def fail(*_: Any) -> None:
        if trainer.args.process_index == 1 and trainer.state.global_step == 1:
            raise torch.OutOfMemoryError("no room")

    model.model.layers[-1].mlp.register_forward_pre_hook(fail)
    try:
        trainer.train()
    finally:
        trainer.save_model()  # which takes all ranks


def train_with_other_settings_on_one_rank(output_dir: str, models: str, what: str) -> None:
    is_other = os.environ["RANK"] == "1"
    if what == "rows":
        given = {"train_dataset": Dataset.from_list(conftest.prompt_rows(32, seed=int(is_other)))}
        make_trainer(output_dir, models, given=given).train()
    elif what == "output_dir":
        make_trainer(f"{output_dir}/{os.environ['RANK']}", models).train()
    else:
        make_trainer(output_dir, models, learning_rate=0.1 if is_other else 1e-3).train()


def set_flags_on_one_rank(output_dir: str, models: str, event: str, flag: str) -> list[Any]:
    """Train with a callback that sets a flag; return the updates evaluated and saved, and the last one.

    Before `on_evaluate` the first update is evaluated because rank 1 asks for it.
    """
    flags = {event: flag} | ({"on_step_end": "should_evaluate"} if event == "on_evaluate" else {})
    callbacks = [
        At(
            place,
            0 if place == "on_epoch_begin" else 1,
            lambda now, name=name: now.args.process_index == 1 and setattr(now.control, name, True),
        )
        for place, name in flags.items()
    ]
    trainer = make_trainer(
        output_dir, models, given={"callbacks": callbacks}, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, ddp_timeout=20,
    )  # fmt: skip
    trainer.train()
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_score" in entry]
    saved = sorted(int(name.partition("-")[2]) for name in os.listdir(output_dir) if name.startswith("checkpoint-"))
    return [evaluated, saved, trainer.state.global_step]


def train_until_sigterm(output_dir: str, models: str, at: tuple[str, int], **run: Any) -> dict[str, Any]:
    """Rank 1 receives SIGTERM at an event of an update."""
    sends = At(*at, lambda now: now.args.process_index == 1 and signal_this_process(signal.SIGTERM))
    given = {"callbacks": [sends]}
    trainer = make_trainer(output_dir, models, given=given, num_ppo_epochs=1, **run)
    code = None
    try:
        trainer.train()
    except SystemExit as error:
        code = error.code
    return {**launched_as(trainer), "global_step": trainer.state.global_step, "code": code}


def error_of(scenario: str, **arguments: Any) -> str:
    """Run another scenario that must fail; return its error."""
    try:
        scenario_named(scenario)(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def reads_names(completions: list[str], name: list[str], **columns: Any) -> list[float]:
    """Read a column of text."""
    return [float(len(text) + len(each)) for text, each in zip(completions, name, strict=True)]


def see_prompts(
    output_dir: str, models: str, stream: bool = False, tokens: Sequence[int] = range(3, 19), **overrides: Any
) -> dict[str, Any]:
    """Train for two passes over 16 prompts of 1 to 3 tokens; return what this rank saw and answered.

    A stream has two more rows, which fill no batch. The evaluation set has five.
    """
    tokens = [*tokens, 20, 21] if stream else tokens
    rows = [{"input_ids": [3] * (token % 3) + [token], "name": f"w{token}"} for token in tokens]
    sets = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:5])}
    given: dict[str, Any] = {name: each.to_iterable_dataset() if stream else each for name, each in sets.items()}
    given["reward_funcs"] = reads_names
    run = {"gradient_accumulation_steps": 1, "num_ppo_epochs": 1, "response_length": 2, "max_steps": 8, **overrides}
    trainer: Any = make_trainer(output_dir, models, SeenPrompts, given=given, **run)
    rollouts = train_and_record(trainer)
    found = {
        **launched_as(trainer),
        "seen": [ids[-1] for prompts in trainer.seen for ids in prompts],
        "names": [name for columns in trainer.columns for name in columns["name"]],
        "answers": [token for rollout in rollouts for token in rollout.responses.response_ids[:, 0].tolist()],
    }
    evaluated = trainer.evaluation_loop(trainer.get_eval_dataloader(), "five prompts")
    return found | {"num_evaluated": evaluated.num_samples}


def first_update_in_bf16(output_dir: str, models: str, adapters: bool) -> dict[str, Any]:
    """One SGD step of rate 1 on 8 rows in micro-batches of 2; return rollout and log; DeepSpeed's gradients.

    With adapters one of them is on the tied head.
    """
    of_adapters = lora() | {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"])}
    reward_model = AutoModelForSequenceClassification.from_pretrained(f"{models}/reward_model")
    torch.manual_seed(0)  # of the adapters
    trainer = make_trainer(
        output_dir, models, FixedResponses, given={"reward_model": reward_model, **(of_adapters if adapters else {})},
        num_prompts=8, bf16=True, num_ppo_epochs=1,
        num_mini_batches=1, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
    )  # fmt: skip
    rollouts, steps, own = record_rollouts(trainer), FirstStep(trainer.model), own_gradients(trainer.model)
    if trainer.accelerator.state.deepspeed_plugin is not None:
        trainer.add_callback(steps)
    trainer.train()
    rollout = rollouts[0]
    return report(
        trainer,
        figures={
            name: getattr(rollout, name).cpu().numpy()
            for name in ("logprobs", "ref_logprobs", "values", "final_values")
        },
        gradients=steps.gradients,
        own_gradients={name: total.numpy() for name, total in own.items()},
    )


def evaluations_in_bf16(output_dir: str, models: str) -> dict[str, Any]:
    """Evaluate before and after an update that changes no weight."""
    trainer = make_trainer(output_dir, models, bf16=True, max_steps=1, learning_rate=0.0)
    before = trainer.evaluate()
    stored = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    trainer.train()
    return {"before": before, "after": trainer.evaluate(), "stored": stored}


def own_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Add up in float32 the gradients of this rank's micro-batches, before an engine has any of them."""
    totals: dict[str, torch.Tensor] = {}

    def adding(name: str) -> Any:
        def add(gradient: torch.Tensor) -> None:
            totals[name] = totals.get(name, 0.0) + gradient.detach().float()

        return add

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(adding(name))
    return totals


class FirstStep(TrainerCallback):
    """Gives the gradients of the first step of SGD at rate 1: how far it moved each weight, in float32.

    DeepSpeed steps inside of `backward`, where it also frees what it added up.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.gradients = model, dict[str, np.ndarray]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.before = exact_weights(self.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.gradients = {name: self.before[name] - value for name, value in exact_weights(self.model).items()}


def exact_weights(model: Any) -> dict[str, np.ndarray]:
    """What is trained, whole and as DeepSpeed's optimizer has it, in float32; every rank calls this."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    exact = {name: safe_get_full_fp32_param(value) for name, value in named}
    return {name.removeprefix("module."): value.detach().clone().numpy() for name, value in exact.items()}
