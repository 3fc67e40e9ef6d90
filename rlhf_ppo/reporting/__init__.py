"""Metrics, logs, health checks, curves, reports and model cards of runs."""
