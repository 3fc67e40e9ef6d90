"""What a run leaves to read: curves and a model card."""

from rlhf_ppo.reporting.model_card import final_metrics, hyperparameters, installed_versions, model_card
from rlhf_ppo.reporting.plots import mean_curve, plot_metrics, read_log

__all__ = [
    "final_metrics",
    "hyperparameters",
    "installed_versions",
    "mean_curve",
    "model_card",
    "plot_metrics",
    "read_log",
]
