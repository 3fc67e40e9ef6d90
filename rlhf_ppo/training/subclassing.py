"""Names of a subclass of `PPOTrainer` that mean something else there."""

from __future__ import annotations

import inspect
from typing import Any

from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.rewards.scorer import Scorer
from rlhf_ppo.training.special_tokens import SpecialTokens

KEPT = frozenset(
    (
        *("kl_controller", "policy_model", "reference", "reward_models", "score_moments", "scorer", "sizes", "tokens"),
        *("value_model", "_as_given", "_check_columns", "_checkpoints", "_config", "_critic", "_directory"),
        *("_end", "_engine", "_estimate", "_evaluation", "_final_metrics", "_functions", "_gather", "_guard"),
        *(
            "_is_stepped",
            "_learning",
            "_logged",
            "_longest_sequence",
            "_loop",
            "_metrics",
            "_objective",
            "_optimization",
            "_own_loop",
            "_policy_loss",
        ),
        *(
            "_preparation",
            "_progress",
            "_ptx",
            "_record",
            "_rollouts",
            "_signals",
            "_stateful",
            "_steps",
            "_streams",
            "_sum",
        ),
        *("_timer", "_tokenizer", "_vocabulary", "_window", "_withheld"),
    )
)
"""Attributes that a `PPOTrainer` has beside those of Trainer."""

_KINDS = {"reference": Reference | None, "scorer": Scorer, "sizes": Sizes, "tokens": SpecialTokens}


def check_subclass(trainer: object, parent: type) -> None:
    """Check that a subclass keeps nothing where `PPOTrainer` does, and that its steps take what they are given.

    Args:
        trainer: An instance that is not constructed yet.
        parent: `PPOTrainer`.

    Raises:
        TypeError: A name of the subclass is in use.
    """
    classes = type(trainer).__mro__
    for owner in classes[: classes.index(parent)]:
        for name, value in vars(owner).items():
            if name in KEPT:
                raise _in_use(owner, name, value)
            if name in vars(parent) and not name.startswith("_"):
                _check_step(owner, name, value, vars(parent)[name])
    for name in vars(trainer).keys() & KEPT:
        raise _in_use(type(trainer), name, vars(trainer)[name])


def check_kept(trainer: object) -> None:
    """Check that what `PPOTrainer` has set is still there, before a run.

    Raises:
        TypeError: A subclass has set something else.
    """
    for name, kind in _KINDS.items():
        if not isinstance(value := vars(trainer)[name], kind):
            raise _in_use(type(trainer), name, value)


def _in_use(owner: type, name: str, value: Any) -> TypeError:
    return TypeError(
        f"{owner.__name__}.{name}={value!r:.60}, but PPOTrainer keeps something of its own under this name; give the "
        "subclass's attribute another one"
    )


def _check_step(owner: type, name: str, value: Any, ours: Any) -> None:
    """Check that a method that replaces one of `PPOTrainer`'s can be called as that one."""
    if not inspect.isfunction(ours):
        return
    expected = inspect.signature(ours)
    required = [part for part in expected.parameters.values() if part.default is part.empty]
    try:
        inspect.signature(value).bind(*required)
    except ValueError:  # it tells nobody what it takes
        return
    except TypeError as error:
        raise TypeError(
            f"{owner.__name__}.{name}={value!r:.60} cannot take the place of PPOTrainer.{name}{expected}: {error}; "
            "give it another name, or these parameters"
        ) from error
