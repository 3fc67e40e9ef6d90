"""`preset`: which options it sets, what wins over it, and how it is told."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.compat.params import LLMTrainingParams, ppo_arguments
from rlhf_ppo.config.presets import PRESETS, describe_preset

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
CPU: dict[str, Any] = {"use_cpu": True, "report_to": "none"}


def options_of(args: PPOConfig, names: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def made(**options: Any) -> PPOConfig:
    return PPOConfig("out", **CPU, **options)


def parsed(*words: str) -> PPOConfig:
    parser: Any = PPOArgumentParser(PPOConfig)
    (args,) = parser.parse_args_and_config([*words, "--output_dir", "out", "--use_cpu", "--report_to", "none"])
    return args


def test_the_page_has_all_options_of_each_preset() -> None:
    blocks = re.findall(
        r"^```yaml\n# preset: (\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert {name: yaml.safe_load(block) for name, block in blocks} == PRESETS
    assert len(blocks) == len(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_all_its_options_and_no_others(preset: str) -> None:
    args, plain = made(preset=preset), made()
    assert options_of(args, PRESETS[preset]) == PRESETS[preset]
    others = {field.name for field in dataclasses.fields(PPOConfig)} - {"preset", *PRESETS[preset]}
    assert options_of(args, others) == options_of(plain, others)
    assert parsed("--preset", preset).to_dict() | {"logging_dir": None} == args.to_dict() | {"logging_dir": None}


def test_options_that_are_given_win_even_with_the_value_that_is_the_default(tmp_path: Path) -> None:
    given = {"adam_epsilon": 1e-8, "kl_coef": 0.1}
    expected = PRESETS["nplus"] | given
    assert options_of(made(preset="nplus", **given), expected) == expected
    words = ("--adam-epsilon", "1e-8", "--kl_coef=0.1")
    assert options_of(parsed("--preset", "nplus", *words), expected) == expected
    config = tmp_path / "nplus.yaml"
    config.write_text("preset: nplus\nkl_coef: 0.1\nadam_epsilon: 0.2\n")
    assert options_of(parsed("--config", str(config), "--adam_epsilon", "1e-8"), expected) == expected
    assert options_of(parsed("--config", str(config), "--preset", "trl"), ("kl_coef", "adam_epsilon", "preset")) == {
        **{"kl_coef": 0.1, "adam_epsilon": 0.2, "preset": "trl"}
    }


def test_an_option_that_a_given_one_excludes_is_not_set() -> None:
    given = {"missing_eos_penalty": 1.0, "stop_token_id": 5, "warmup_ratio": 0.2}
    for args in (
        made(preset="nplus", **given),
        parsed("--preset", "nplus", *(word for name, value in given.items() for word in (f"--{name}", str(value)))),
    ):
        assert (args.missing_eos_score, args.stop_token, args.warmup_steps) == (None, None, 0.2)


def test_a_subclass_and_a_copy_have_the_presets_options() -> None:
    @dataclasses.dataclass(repr=False)
    class Own(PPOConfig):
        twist: int = 3

    args = Own("out", twist=4, preset="nplus", kl_coef=0.3, **CPU)
    for each in (args, copy.deepcopy(args), dataclasses.replace(args, seed=1)):
        assert (each.twist, each.missing_eos_score, each.kl_coef) == (4, -1, 0.3)
    again = pickle.loads(pickle.dumps(made(preset="nplus", kl_coef=0.3)))
    assert (again.missing_eos_score, again.kl_coef) == (-1, 0.3)


def test_trl_is_what_a_script_of_trl_has_without_options() -> None:
    assert options_of(made(), PRESETS["trl"]) == PRESETS["trl"]


def test_aitraining_is_what_its_command_line_has_without_options() -> None:
    params = LLMTrainingParams(trainer="ppo", rl_reward_model_path="reward")
    assert ppo_arguments(params) | PRESETS["aitraining"] == ppo_arguments(params)


def test_what_a_preset_contradicts_is_said_to_be_the_presets() -> None:
    message = r"kl_target=6.0 multiplies kl_coef=0.* \(kl_coef: of preset='reasoning'\)$"
    with pytest.raises(ValueError, match=message):
        made(preset="reasoning", kl_target=6.0)
    with pytest.raises(ValueError, match=message):
        parsed("--preset", "reasoning", "--kl_target", "6")
    with pytest.raises(ValueError, match="preset='best' must be"):
        made(preset="best")


def test_a_parser_that_knows_no_presets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"preset='nplus' has changed nothing.*PPOArgumentParser"):
        HfArgumentParser(PPOConfig).parse_args_into_dataclasses(["--output_dir", "out", "--preset", "nplus"])  # pyright: ignore[reportArgumentType]


def test_a_preset_is_printed_in_full_when_training_starts(
    make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"total_episodes": 8, "response_length": 4, "num_ppo_epochs": 1}
    made = make_trainer(preset="nplus", kl_coef=0.1, log_console="line", **sizes)
    made.train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Preset")]
    taken, _, beside = line.partition("; given beside it: ")
    assert taken.startswith("Preset nplus: ") and "missing_eos_score=-1.0" in taken and "vf_coef=0.1" in taken
    assert "kl_coef=0.1 (not 0.05)" in beside and "response_length=4 (not 53)" in beside
    names = {
        part.partition("=")[0] for part in (*taken.removeprefix("Preset nplus: ").split(", "), *beside.split(", "))
    }
    assert names == {*PRESETS["nplus"]}

    make_trainer(preset="nplus", log_console="none", **sizes).train()
    assert "Preset" not in capsys.readouterr().out


GSPO, GIVEN = (3e-4, 4e-4), (0.2, 0.2)


@pytest.mark.parametrize("preset", [None, "trl", "reasoning", "aitraining"])
@pytest.mark.parametrize(
    ("options", "ranges"),
    [
        ({}, GSPO),
        ({"cliprange": 0.2}, GIVEN),
        ({"cliprange": 0.2, "cliprange_high": 0.28}, (0.2, 0.28)),
        ({"cliprange": 3e-4, "cliprange_high": 4e-4}, GSPO),
    ],
)
def test_clip_ranges_that_are_given_are_in_force_with_every_loss(
    preset: str | None, options: dict[str, float], ranges: tuple[float, float], tmp_path: Path
) -> None:
    """In Python, on the command line, in YAML, in copies and in replaced arguments; with the default's value too."""
    given = {"policy_loss": "gspo", **options} | ({} if preset is None else {"preset": preset})
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    config = tmp_path / "config.yaml"
    config.write_text("\n".join(f"{name}: {value}" for name, value in given.items()))
    python = made(**given)
    for args in (
        python,
        parsed(*words),
        parsed("--config", str(config)),
        copy.deepcopy(python),
        pickle.loads(pickle.dumps(python)),
        dataclasses.replace(python, seed=1),
        dataclasses.replace(dataclasses.replace(python, seed=1), seed=2),
    ):
        found = (args.cliprange, args.cliprange_high)
        preset_gives_high = preset == "reasoning" and "cliprange" in options and "cliprange_high" not in options
        assert found == ((0.2, 0.28) if preset_gives_high else ranges)
    if preset is not None:
        line = describe_preset(python) or ""
        of_gspo = [
            part for part in line.split("; ") if part.startswith("of policy_loss='gspo': cliprange=0.0003 (not")
        ]
        assert bool(of_gspo) is (ranges == GSPO) and "beside it: cliprange" not in line


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo", "dis"])
def test_no_option_replaces_a_given_one(preset: str | None, policy_loss: str) -> None:
    """Each of PPO's own options, given with its default's value beside all others, is in force."""
    own = {
        name
        for part in PPOConfig.__mro__
        if part.__module__.startswith("rlhf_ppo")
        for name in vars(part).get("__annotations__", {})
    }
    defaults = {f.name: f.default for f in dataclasses.fields(PPOConfig) if f.name in own and f.init}
    given = {name: value for name, value in defaults.items() if value is not None and name != "output_dir"}
    given |= {"preset": preset, "policy_loss": policy_loss, "cliprange_high": 0.3, "num_critic_epochs": 4}
    args = made(**given)
    assert {name: getattr(args, name) for name in given} == given
