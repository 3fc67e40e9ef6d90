"""The arguments of TRL's trainers, for any machine, written without secrets."""

# TrlParser reads the annotations, so they are not postponed.
from dataclasses import dataclass

from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig

from rlhf_ppo.config.precision import default_bf16
from rlhf_ppo.config.redaction import HidesSecrets
from rlhf_ppo.terminal.quiet import quiet_calls


@dataclass(repr=False)
class SFTArguments(HidesSecrets, SFTConfig):
    """TRL's `SFTConfig`, whose `bf16` is on where the device can do it, as that of `PPOConfig`."""

    def __post_init__(self) -> None:
        """Settle `bf16`, which TRL switches on everywhere."""
        self.bf16 = default_bf16(self) if self.bf16 is None else self.bf16
        with quiet_calls():
            super().__post_init__()


@dataclass(repr=False)
class RewardArguments(HidesSecrets, RewardConfig):
    """TRL's `RewardConfig`, whose `bf16` is on where the device can do it, as that of `PPOConfig`."""

    def __post_init__(self) -> None:
        """Settle `bf16`, which TRL switches on everywhere."""
        self.bf16 = default_bf16(self) if self.bf16 is None else self.bf16
        with quiet_calls():
            super().__post_init__()
