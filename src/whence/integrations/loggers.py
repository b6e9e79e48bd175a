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

LONGEST = 500  # characters of a parameter that MLflow accepts


def log(logged: Run | Scores, to: str, *, k: int = 20, name: str | None = None) -> None:
    """Write a run or scores to the tracker's active run.

    Keys begin with "whence/" and the name in W&B, with "whence." and the name in MLflow.

    Args:
        logged: a `Run`, or `Scores`.
        to: "wandb" or "mlflow". Start a run there first: `wandb.init()`, `mlflow.start_run()`.
        k: of scores, the number of training examples at each end of the table.
        name: "run" or "scores", unless you give one. Several scores need different names.
    """
    if to not in ("wandb", "mlflow"):
        raise InvalidInput(f'to={to!r}: use "wandb" or "mlflow"')
    if isinstance(logged, Run):
        parameters, metrics = _about_run(logged)
        table, name = None, name or "run"
    elif isinstance(logged, Scores):
        parameters, metrics = _about_scores(logged)
        table, name = _table(logged, k), name or "scores"
    else:
        raise InvalidType(f"{type(logged).__name__} cannot be logged: give a Run or Scores")
    try:
        tracker = importlib.import_module(to)
    except ImportError as error:
        raise MissingDependency(f"{to} is not installed: pip install {to}") from error
    (_to_wandb if to == "wandb" else _to_mlflow)(tracker, name, parameters, metrics, table)


def _to_wandb(
    wandb: Any, name: str, parameters: dict[str, Any], metrics: dict[str, float], table: Any
) -> None:
    if wandb.run is None:
        raise InvalidInput("no run of W&B is active: call wandb.init() first")
    prefix = f"whence/{name}"
    _check_unused(name, parameters, wandb.run.config.get(prefix))
    wandb.run.config.update({prefix: parameters})
    wandb.run.summary.update({f"{prefix}/{key}": value for key, value in metrics.items()})
    if table is not None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        wandb.run.log({f"{prefix}/examples": wandb.Table(columns=list(table), data=rows)})


def _to_mlflow(
    mlflow: Any, name: str, parameters: dict[str, Any], metrics: dict[str, float], table: Any
) -> None:
    active = mlflow.active_run()
    if active is None:
        raise InvalidInput("no run of MLflow is active: call mlflow.start_run() first")
    prefix = f"whence.{name}"
    texts = {f"{prefix}.{key}": str(value)[:LONGEST] for key, value in parameters.items()}
    params = mlflow.get_run(active.info.run_id).data.params
    _check_unused(name, texts, {key: params[key] for key in texts if key in params})
    mlflow.log_params(texts)
    mlflow.log_metrics({f"{prefix}.{key}": value for key, value in metrics.items()})
    if table is not None:
        mlflow.log_dict(table, f"{prefix}.examples.json")


def _check_unused(name: str, parameters: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Refuse to replace the parameters of something else; the same may be logged again."""
    if before and dict(before) != parameters:
        raise InvalidInput(
            f"the tracker's run has other parameters under the name {name!r}: give name=, such as "
            f'"{name}-2"'
        )


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
