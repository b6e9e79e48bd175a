"""bergson: EK-FAC influence functions and TrackStar, of causal language models.

It reads a model folder of transformers and datasets of token ids, so the run's final model and
data are written as such. It does not take more tokens at a time than the model has positions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import whence
from experiments.engine.trainings import Trainings
from experiments.peers.inputs import Values, final_model, training_data

TRACKSTAR_SIDE = 16  # rows and columns of each layer's projection: bergson's default


def ekfac(work: Trainings, study: whence.Study, damping: float, empirical: bool = False) -> Values:
    """EK-FAC influence, with its sampled Fisher, or the empirical one."""
    check(work)
    given = import_module("bergson.config.config")
    pipeline = import_module("bergson.hessians.pipeline").hessian_pipeline

    def command(index: Any, query: Any) -> None:
        inverse = given.InversionConfig("absolute_damped_inverse", damping)
        pipeline(
            index,
            given.HessianConfig("kfac", ev_correction=True, use_dataset_labels=empirical),
            given.ScoreConfig(),
            given.PreprocessConfig(),
            given.HessianPipelineConfig(query=query, inversion_cfg=inverse),
        )

    return -scores(work, study, given.IndexConfig, command) / work.examples


def trackstar(work: Trainings, study: whence.Study) -> Values:
    """TrackStar: unit gradients, projected and whitened."""
    check(work)
    given = import_module("bergson.config.config")
    pipeline = import_module("bergson.cli.trackstar").trackstar

    def command(index: Any, query: Any) -> None:
        pipeline(index, given.TrackstarConfig(query=query))

    # each side of a layer has this many dimensions
    side = {"projection_dim": TRACKSTAR_SIDE}
    return -scores(work, study, given.TrackstarIndexConfig, command, **side)


def check(work: Trainings) -> None:
    if not isinstance(work.recipe.task, whence.LanguageModeling):
        raise ValueError("it attributes language models of transformers, not this task")


def scores(
    work: Trainings,
    study: whence.Study,
    index: Callable[..., Any],
    command: Callable[[Any, Any], None],
    **settings: Any,
) -> Values:
    """What a command of bergson leaves, (q, n)."""
    given, data = (import_module(f"bergson.{name}") for name in ("config.config", "data"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        length = write_model(study, folder / "model")
        write_tokens(training_data(work), folder / "train")
        write_tokens(work.query, folder / "query")
        command(
            index(
                str(folder / "run"),
                model=str(folder / "model"),
                data=given.DataConfig(str(folder / "train")),
                loss_reduction="mean",
                include_bias=True,
                token_batch_size=length,
                **settings,
            ),
            given.QuerySetConfig(str(folder / "query"), aggregation="none"),
        )
        return np.array(data.load_scores(folder / "run" / "scores")[:], np.float64).T


def write_model(study: whence.Study, folder: Path) -> int:
    """The run's final model as transformers saves a GPT-2; its number of positions."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
    from transformers.pytorch_utils import Conv1D

    linear: Any = final_model(study)
    linear = linear.model  # its Conv1D layers are linear layers
    model = GPT2LMHeadModel(linear.config)  # type: ignore[no-untyped-call]
    state: dict[str, Tensor] = linear.state_dict()
    turned = {n for n, module in model.named_modules() if isinstance(module, Conv1D)}
    for module in turned:
        state[f"{module}.weight"] = state[f"{module}.weight"].T.contiguous()
    model.load_state_dict(state)
    model.save_pretrained(folder)
    words = {str(k): k for k in range(linear.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(words, "0"))
    )
    tokenizer.save_pretrained(folder)
    return int(linear.config.n_positions)


def write_tokens(dataset: Any, folder: Path) -> None:
    """A dataset of token ids, as `datasets` saves it."""
    ids = torch.stack([dataset[k][0] for k in range(len(dataset))])
    lengths = [ids.shape[1]] * len(ids)
    table = {"input_ids": ids.tolist(), "labels": ids.tolist(), "length": lengths}
    datasets, arrow = (import_module(name) for name in ("datasets", "pyarrow"))
    in_memory = import_module("datasets.table").InMemoryTable(arrow.table(table))
    datasets.Dataset(in_memory, fingerprint=folder.name).save_to_disk(str(folder))
