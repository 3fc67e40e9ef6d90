"""What every step imports, for processes that are forked from one that has imported it."""
# ruff: noqa: F401

import trl.trainer.reward_trainer
import trl.trainer.sft_trainer

import rlhf_ppo.cli.commands
import rlhf_ppo.cli.judge
import rlhf_ppo.reporting.report
