"""What was set is compared by name, and said in a line."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

from rlhf_ppo.training.optimization import Settings, changes, describe_changes


def scheduled(rate: float = 0.1, length: int = 4) -> CosineAnnealingLR:
    return CosineAnnealingLR(SGD([torch.nn.Parameter(torch.ones(1))], rate), length)


def test_only_what_differs_is_a_change() -> None:
    before, now = {"same": 1, "other": [1, 2], "gone": None}, {"same": 1, "other": [2, 2], "new": "x"}
    assert changes(before, now) == {"gone": (None, "not set"), "new": ("not set", "x"), "other": ([1, 2], [2, 2])}


def test_a_line_names_what_is_and_what_was() -> None:
    assert (
        describe_changes({"rate": ([0.1, 0.1], [0.2, 0.3]), "n": (1, 2)}) == "rate=[0.2, 0.3] (was 0.1), n=2 (was 1)"
    )


def test_settings_are_those_of_the_new_scheduler_whatever_it_has_done_since() -> None:
    scheduler = scheduled()
    settings = Settings(scheduler)
    recorded = settings.recorded()
    for _ in range(3):
        scheduler.step()
    assert settings.recorded() == recorded
    assert recorded["T_max"] == 4 and recorded["learning_rate"] == [0.1] and recorded["momentum"] == [0]
    assert Settings(scheduled()).recorded() == recorded
    assert set(changes(recorded, Settings(scheduled(0.2, 8)).recorded())) == {"T_max", "learning_rate"}


def test_a_replayed_schedule_equals_one_that_was_never_another_bit_for_bit() -> None:
    old, new, never = scheduled(), scheduled(0.3, 9), scheduled(0.3, 9)
    settings, before = Settings(new), Settings(old).recorded()
    for scheduler in (old, never):
        for _ in range(3):
            scheduler.step()
    new.load_state_dict(old.state_dict())
    new.optimizer.load_state_dict(old.optimizer.state_dict())
    settings.put_in_force(changes(before, settings.recorded()), 3)
    assert new.optimizer.param_groups[0]["initial_lr"] == 0.3
    for _ in range(4):
        assert new.get_last_lr() == never.get_last_lr()
        assert new.optimizer.param_groups[0]["lr"] == never.optimizer.param_groups[0]["lr"]
        new.step(), never.step()


def test_rates_that_are_tensors_stay_the_very_tensors() -> None:
    rate = torch.tensor(0.1)
    scheduler = LambdaLR(SGD([torch.nn.Parameter(torch.ones(1))], rate), lambda update: 0.5**update)
    settings = Settings(scheduler)
    held = scheduler.optimizer.param_groups[0]["lr"]
    settings.put_in_force({"num_total_batches": (1, 2)}, 2)
    assert scheduler.optimizer.param_groups[0]["lr"] is held
    assert float(held) == float(torch.tensor(0.1) * 0.25)


def test_a_schedule_that_follows_a_metric_keeps_what_it_has_learned() -> None:
    def plateau(rate: float, factor: float) -> ReduceLROnPlateau:
        optimizer = SGD([torch.nn.Parameter(torch.ones(1))], rate)
        return ReduceLROnPlateau(optimizer, factor=factor, patience=0)

    old, new = plateau(0.1, 0.5), plateau(0.3, 0.2)
    settings, before = Settings(new), Settings(old).recorded()
    old.step(1.0)
    old.step(2.0)  # worse: half the rate
    new.load_state_dict(old.state_dict())
    new.optimizer.load_state_dict(old.optimizer.state_dict())
    settings.put_in_force(changes(before, settings.recorded()), 2)
    assert new.optimizer.param_groups[0]["lr"] == pytest.approx(0.15)
    new.step(2.0)
    assert new.optimizer.param_groups[0]["lr"] == pytest.approx(0.15 * 0.2)
