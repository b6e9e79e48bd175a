"""Runs and scores as lines of an experiment tracker: Weights & Biases or MLflow.

Settings become parameters, numbers become metrics, and the examples with the highest and lowest
mean score become a table. Text from datasets is not sent.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from whence.errors import InvalidInput, InvalidType, MissingDependency
from whence.run import Run
from whence.scores import Scores
from whence.scores.means import mean_scores

TABLE = "whence_examples"  # the name of the table
LONGEST = 500  # characters of a parameter that MLflow accepts


def log(logged: Run | Scores, to: str, *, k: int = 20) -> None:
    """Write a run or scores to the tracker's active run.

    Args:
        logged: a `Run`, or `Scores`.
        to: "wandb" or "mlflow". Start a run there first: `wandb.init()`, `mlflow.start_run()`.
        k: of scores, the number of training examples at each end of the table.
    """
    if to not in ("wandb", "mlflow"):
        raise InvalidInput(f'to={to!r}: use "wandb" or "mlflow"')
    if isinstance(logged, Run):
        parameters, metrics = _about_run(logged)
        table = None
    elif isinstance(logged, Scores):
        parameters, metrics = _about_scores(logged)
        table = _table(logged, k)
    else:
        raise InvalidType(f"{type(logged).__name__} cannot be logged: give a Run or Scores")
    try:
        tracker = importlib.import_module(to)
    except ImportError as error:
        raise MissingDependency(f"{to} is not installed: pip install {to}") from error
    (_to_wandb if to == "wandb" else _to_mlflow)(tracker, parameters, metrics, table)


def _to_wandb(
    wandb: Any, parameters: dict[str, Any], metrics: dict[str, float], table: Any
) -> None:
    if wandb.run is None:
        raise InvalidInput("no run of W&B is active: call wandb.init() first")
    wandb.run.config.update({"whence": parameters}, allow_val_change=True)
    wandb.run.summary.update({f"whence/{name}": value for name, value in metrics.items()})
    if table is not None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        wandb.run.log({f"whence/{TABLE}": wandb.Table(columns=list(table), data=rows)})


def _to_mlflow(
    mlflow: Any, parameters: dict[str, Any], metrics: dict[str, float], table: Any
) -> None:
    if mlflow.active_run() is None:
        raise InvalidInput("no run of MLflow is active: call mlflow.start_run() first")
    texts = {f"whence.{name}": str(value)[:LONGEST] for name, value in parameters.items()}
    mlflow.log_params(texts)
    mlflow.log_metrics({f"whence.{name}": value for name, value in metrics.items()})
    if table is not None:
        mlflow.log_dict(table, f"{TABLE}.json")


def _about_run(run: Run) -> tuple[dict[str, Any], dict[str, float]]:
    parameters = {
        "run": None if run.path is None else str(run.path),
        "run_fingerprint": run.fingerprint,
        "optimizer": ", ".join(dict.fromkeys(run.optimizers.values())),
        "stages": ", ".join(stage.name for stage in run.stages),
        "checkpoints": [checkpoint.step for checkpoint in run.checkpoints],
    }
    rates = run.learning_rates.max(1, initial=0.0)
    metrics = {"updates": float(run.steps), "warnings": float(len(run.warnings))}
    if len(rates):
        metrics |= {"mean_learning_rate": float(rates.mean()), "sum_of_rates": float(rates.sum())}
    return parameters, metrics


def _about_scores(scores: Scores) -> tuple[dict[str, Any], dict[str, float]]:
    parameters = {
        "method": scores.call,
        "measurement": scores.measurement,
        "unit": scores.unit,
        "shape": list(scores.shape),
        "run_fingerprint": scores.provenance.get("run"),
    }
    means = mean_scores(scores)
    better = means if scores.higher_is_better else -means
    metrics = {
        "examples_that_harm": float((better < 0).sum()),
        "share_left_out": float(scores.left_out[0]),
        "warnings": float(len(scores.warnings)),
    }
    return parameters, metrics


def _table(scores: Scores, k: int) -> dict[str, list[Any]]:
    """Columns: the k most helpful and the k most harmful training examples over all queries."""
    means = mean_scores(scores)
    known = np.flatnonzero(np.isfinite(means))
    help_ = means[known] if scores.higher_is_better else -means[known]
    order = known[np.argsort(-help_, kind="stable")]
    shown = order if len(order) <= 2 * k else np.concatenate([order[:k], order[len(order) - k :]])
    table: dict[str, list[Any]] = {"example": scores.train_ids[shown].tolist()}
    if scores.stage is not None:
        table["stage"] = [scores.stage[column] for column in shown]
    return table | {"mean_score": means[shown].tolist()}
