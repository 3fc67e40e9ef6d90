"""What is broken, room by room: by file and tests, what stands there and what is put in its place."""

from tests.mutation.mutants import (
    algorithm,
    checkpoints,
    config,
    data,
    estimate,
    evaluation,
    generation,
    models,
    processes,
    reporting,
    rewards,
    trainer,
    training,
)

TABLES: dict[str, dict[tuple[str, str], list[tuple[str, str]]]] = {
    ".": trainer.MUTANTS,
    "algorithm": algorithm.MUTANTS,
    "checkpoints": checkpoints.MUTANTS,
    "config": config.MUTANTS,
    "data": data.MUTANTS,
    "estimate": estimate.MUTANTS,
    "evaluation": evaluation.MUTANTS,
    "generation": generation.MUTANTS,
    "models": models.MUTANTS,
    "processes": processes.MUTANTS,
    "reporting": reporting.MUTANTS,
    "rewards": rewards.MUTANTS,
    "training": training.MUTANTS,
}
