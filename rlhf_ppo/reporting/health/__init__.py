"""Health checks: what in the logs of a run says that it goes wrong, why, and which option to turn."""

from rlhf_ppo.reporting.health.callback import HealthCallback
from rlhf_ppo.reporting.health.checks import CHECKS, Check
from rlhf_ppo.reporting.health.history import History, Surroundings

__all__ = ["CHECKS", "Check", "HealthCallback", "History", "Surroundings"]
