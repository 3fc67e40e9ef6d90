"""Random configurations of two to four options: each update is NumPy's, however it is cut, packed, killed or called.

`make test-fuzz` runs 200; a failure prints the command that runs its configuration again.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from rlhf_ppo.ranks.signals import RunStopped
from tests.fuzz import recording
from tests.fuzz.formulas import Known
from tests.fuzz.options import Configuration, described, draw
from tests.fuzz.recording import SignalAt, Snapshots, make, make_stepped, padded, split
from tests.fuzz.simulation import Simulation
from tests.runs import assert_identical, end_of_run, history, parameters

SEED, NUM_CONFIGURATIONS = int(os.environ.get("SEED", "1")), int(os.environ.get("NUM_CONFIGURATIONS", "12"))
GIVEN: Configuration | None = json.loads(os.environ.get("CONFIGURATION") or "null")
MOST_REFUSED = 20

OF_CLOCKS = ("time/", "health/", "eps", "epoch", "step")
OF_PARTS = ("val/ratio_var", "val/first_logratio", "batch/shared_frac")
"""What is logged of micro-batches, and so depends on how they are cut."""


@contextmanager
def explaining(configuration: Configuration, what: str) -> Iterator[None]:
    """Add the command that runs a configuration again to what fails."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{what}: {described(configuration)}")
        raise


def accepted(number: int, tmp_path: Path) -> tuple[Configuration, Any]:
    """Draw until the package takes a configuration; what it refuses, it refuses by name."""
    for attempt in range(MOST_REFUSED):
        configuration = draw(SEED, number, attempt) if GIVEN is None else GIVEN
        when = random.Random(configuration["seed"])
        snapshots = Snapshots(when.choice([1, 2]), is_learning=when.random() < 0.5)
        try:
            with explaining(configuration, "made"):
                trainer = make(configuration, tmp_path / f"run-{attempt}", callbacks=(snapshots,))
        except ValueError as error:
            assert any(names(error, option) for option in configuration), f"{configuration} is refused without a name"
            print(f"refused: {configuration}: {error}")
            continue
        snapshots.trainer = trainer
        return configuration, trainer
    raise AssertionError(f"{MOST_REFUSED} configurations were refused one after the other")


def names(error: Exception, option: str) -> bool:
    given_as = {"adapter": "peft_config", "reference": "ref_model", "responses": "PPOTrainer"}
    return given_as.get(option, option) in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_CONFIGURATIONS if GIVEN is None else 1))
def test_updates_are_numpys_and_do_not_depend_on_how_they_are_run(number: int, tmp_path: Path) -> None:
    configuration, trainer = accepted(number, tmp_path)
    print(described(configuration))
    with explaining(configuration, "trained"):
        trainer.train()
    whole = end_of_run(trainer)
    with explaining(configuration, "simulated"):
        check_simulation(configuration, trainer)
    with explaining(configuration, "resumed"):
        check_resumed(configuration, trainer, whole)
    with explaining(configuration, "padded and without accumulation"), padded():
        check_close(trainer, uncut(configuration, trainer, tmp_path / "uncut"))
    with explaining(configuration, "called step by step"):
        check_steps(configuration, trainer, tmp_path / "steps")


# ---- The simulation ----


def check_simulation(configuration: Configuration, trainer: Any, room: float = 1.0) -> None:
    """Compare what the run did, update by update, with NumPy's account of it; `room` scales all tolerances."""
    simulation, log = Simulation(configuration), iter(training_logs(trainer))
    check_start(simulation, trainer.updates[0].weights)
    every = simulation.settings.logging_steps
    assert len(trainer.updates) == simulation.settings.num_updates
    for number, seen in enumerate(trainer.updates, start=1):
        known = simulation.known(seen)
        simulation.check_sampled(known.episodes if seen.answers is not None else [])
        check_known(known, seen, room)
        for index, (step, taken) in enumerate(zip(simulation.run(known, seen), seen.steps, strict=True)):
            where = f"update {number}, step {index + 1}"
            check_weights(f"gradients of {where}", taken.gradients, step.gradients, room)
            check_weights(f"weights after {where}", taken.after, step.after, room)
        if number == 1 or number % every == 0 or number == len(trainer.updates):
            check_logged(next(log), simulation.drained(), room)
    assert not list(log)


def check_start(simulation: Simulation, weights: dict[str, Any]) -> None:
    """The run starts from the models that were given, and from a value model that is made as is said."""
    if simulation.objects["adapter"] is not None:
        return
    expected = {f"policy.{name}": value for name, value in recording.stopping_policy().named_parameters()}
    made = simulation.objects["value_model"] == "made"
    value_model: Any = recording.tiny_scorer(seed=2, **recording.TINY)
    if made and simulation.objects["reward"] in recording.HAVE_MODEL:
        value_model = recording.reward_model()
    elif made:
        value_model.model.load_state_dict(recording.stopping_policy().model.state_dict())
        value_model.score.weight.data.zero_()
    expected |= {f"value_model.{name}": value for name, value in value_model.named_parameters()}
    for name, value in expected.items():
        assert_allclose(weights[name], value.detach().numpy(), rtol=0, atol=0, err_msg=name)


def check_known(known: Known, seen: recording.SeenUpdate, room: float) -> None:
    for name in ("logprobs", "values", "ref_logprobs", "advantages", "returns"):
        learned = name in ("advantages", "returns")
        given, expected = getattr(seen.experience if learned else seen.rollout, name), getattr(known, name)
        assert (given is None) == (expected is None), name
        for row, episode in enumerate(known.episodes if expected is not None else []):
            if learned and row not in known.scored:
                continue
            where = f"{name} of {row}"
            assert_allclose(given[row][episode.own], expected[row], rtol=room * 1e-4, atol=room * 2e-5, err_msg=where)
            assert not np.delete(given[row].numpy(), episode.own).any(), where
    assert seen.rollout.ended.tolist() == [episode.ended for episode in known.episodes]


def check_weights(what: str, given: dict[str, Any], expected: dict[str, Any], room: float) -> None:
    assert given.keys() == expected.keys() or (what.startswith("gradients") and not zero_apart(given, expected)), what
    largest = {name: float(np.abs(value).max()) for name, value in expected.items()}
    noise = 1e-6 * max(largest.values(), default=0.0)  # of float32 sums, in what is 0
    for name, value in expected.items():
        if name in given:
            atol = noise + room * 3e-4 * max(1e-3, largest[name])
            assert_allclose(given[name], value, rtol=0, atol=atol, err_msg=f"{what}: {name}")


def zero_apart(given: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Gradients that only one of the two has, unless they are 0."""
    alone = {**given, **expected}
    return [name for name in given.keys() ^ expected.keys() if np.abs(alone[name]).max() > 0]


def check_logged(given: dict[str, Any], expected: dict[str, Any], room: float) -> None:
    names_ = {name for name in given if not name.startswith(OF_CLOCKS)}
    assert names_ | {"episode"} == expected.keys() | {"episode"}
    for name in sorted(expected):
        assert_allclose(given[name], expected[name], rtol=room * 5e-4, atol=room * 1e-4, err_msg=name)


def training_logs(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in history(trainer) if "loss" in entry]


# ---- However it is run ----


def uncut(configuration: Configuration, trainer: Any, output_dir: Path) -> Any:
    """Make a trainer that is answered as the run was, and takes its mini-batches whole."""
    options, _ = split(configuration)
    size = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    whole = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 1, "max_tokens_per_micro_batch": None}
    answers = trainer.sampler.engine.answers or None
    return make(configuration, output_dir, answers=answers, save_strategy="no", **whole)


def check_close(trainer: Any, other: Any) -> None:
    """Train another way, on the same responses: the same numbers, but for those of micro-batches.

    Steps far apart multiply the rounding of the first update, so that later ones have more room.
    """
    other.train()
    room = {"rtol": 1e-4, "atol": 2e-5}
    for given, expected in zip(training_logs(other), training_logs(trainer), strict=True):
        assert given.keys() == expected.keys()
        for name in expected:
            if not name.startswith((*OF_CLOCKS, *OF_PARTS)):
                assert_allclose(given[name], expected[name], **room, err_msg=name)
        room = {"rtol": 1e-2, "atol": 1e-3}
    for name, value in parameters(trainer).items():
        torch.testing.assert_close(parameters(other)[name], value, rtol=1e-2, atol=1e-3)


def check_resumed(configuration: Configuration, trainer: Any, whole: dict[str, Any]) -> None:
    """Go on where a kill would have left the run, or where a signal did: it ends bit for bit as if left alone."""
    output_dir = f"{trainer.args.output_dir}-killed"
    if configuration["seed"] % 4 == 0 and trainer.updates[1].steps[0].before:
        output_dir = f"{trainer.args.output_dir}-ended"
        with pytest.raises(RunStopped):
            make(configuration, Path(output_dir), callbacks=(SignalAt(1, 1),)).train()
    resumed = make(configuration, Path(output_dir))
    resumed.train(resume_from_checkpoint=True)
    assert_identical(end_of_run(resumed), whole)


def check_steps(configuration: Configuration, trainer: Any, output_dir: Path) -> None:
    """Give `step` what the run sampled and scored: bit for bit the same weights and numbers."""
    if split(configuration)[1]["reward"] == "tokens":
        return  # `step` takes none of single tokens
    stepped = make_stepped(configuration, output_dir)
    for seen in trainer.updates:
        rollout, pairs = seen.rollout, recording.keys_of(seen.rollout.responses)
        queries, responses = ([torch.tensor(ids) for ids in column] for column in zip(*pairs, strict=True))

        def of_rows(values: Any, responses: Any = responses) -> Any:
            return None if values is None else [row[: len(ids)] for row, ids in zip(values, responses, strict=True)]

        stepped.step(
            queries,
            responses,
            rollout.scores,
            of_rows(rollout.response_mask),
            of_rows(rollout.responses.sampling_logprobs),
        )
    assert_identical(parameters(stepped), parameters(trainer))
    for given, expected in zip(training_logs(stepped), training_logs(trainer), strict=True):
        logs = (given, expected)
        assert_identical(*({name: value for name, value in log.items() if is_of_both(name)} for log in logs))


def is_of_both(name: str) -> bool:
    return not name.startswith((*OF_CLOCKS, "rewards/", "generation/"))
