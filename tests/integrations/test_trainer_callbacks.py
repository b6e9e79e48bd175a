"""Recording real trainers, Hugging Face's and Lightning's, and reading the folders they write."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.transformers_models import bert, gpt2, llama
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence.run import Run, RunError

T = 15  # updates: 3 epochs of 9 batches, two to an update
SIZE = 18


def same(a: dict[str, Tensor] | None, b: dict[str, Tensor] | None) -> bool:
    assert a is not None and b is not None
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def by_hand(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """v̂ of Adam, from the optimizer's own state."""
    state = getattr(optimizer, "optimizer", optimizer).state
    return {
        name: state[p]["exp_avg_sq"] / (1 - 0.999 ** state[p]["step"].item())
        for name, p in model.named_parameters(remove_duplicate=False)
    }


# --- Hugging Face -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    return pytest.importorskip("transformers")


def examples(model: Any) -> list[dict[str, Any]]:
    tokens = torch.randint(0, 20, (SIZE, 6), generator=torch.Generator().manual_seed(1))
    classes = "Classification" in type(model).__name__
    return [{"input_ids": t, "labels": int(t[0]) % 2 if classes else t} for t in tokens]


def trainer(model: Any, out: Path, *callbacks: Any, **arguments: Any) -> Any:
    """A Trainer with gradient accumulation and, by default, AdamW, warm-up and clipping."""
    hf = import_module("transformers")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = hf.TrainingArguments(str(out), **(settings | arguments))
    data = examples(model)
    training = hf.Trainer(
        model, args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks)
    )
    training.remove_callback(hf.PrinterCallback)
    return training


def spy(**events: Callable[..., None]) -> Any:
    """A callback that calls the given functions."""
    base = import_module("transformers").TrainerCallback

    def method(event: Callable[..., None]) -> Callable[..., None]:
        return lambda self, args, state, control, **others: event(state.global_step, **others)

    return type("Spy", (base,), {name: method(event) for name, event in events.items()})()


def recorder(path: Path, checkpoints: Any = 5, **options: Any) -> Any:
    from whence.integrations.huggingface import RecorderCallback

    return RecorderCallback(path, checkpoints, **options)


class Trained:
    """A model trained once, with the folder the Trainer left and the run the callback recorded."""

    def __init__(self, make: Callable[[], Any], folder: Path) -> None:
        self.make, self.out, self.path = make, folder / "out", folder / "run"
        self.rates: list[list[float]] = []
        self.moments: dict[int, dict[str, Tensor]] = {}
        self.model = make()
        self.initial = copy.deepcopy(self.model.state_dict())

        def before(step: int, optimizer: Any, **_: Any) -> None:
            self.rates.append([group["lr"] for group in optimizer.param_groups])

        def after(step: int, model: Any, optimizer: Any, **_: Any) -> None:
            self.moments[step + 1] = by_hand(model, optimizer)

        seen = spy(on_pre_optimizer_step=before, on_optimizer_step=after)
        training = trainer(self.model, self.out, recorder(self.path), seen)
        with warnings.catch_warnings():
            # the Trainer clips by default: nobody needs to be warned of it
            warnings.filterwarnings("error", "kept with the run", UserWarning)
            training.train()
        self.optimizer = training.optimizer.optimizer


@pytest.fixture(scope="module", params=[bert, gpt2, llama])
def trained(request: Any, hf: ModuleType, tmp_path_factory: Any) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp(request.param.__name__))


@pytest.fixture(scope="module")
def left(hf: ModuleType, tmp_path_factory: Any) -> Trained:
    """GPT-2, whose head is tied, for what does not depend on the model."""
    return Trained(gpt2, tmp_path_factory.mktemp("left"))


def test_the_trainer_is_recorded(trained: Trained, tmp_path: Path) -> None:
    run, model = Run.open(trained.path), trained.model
    assert run.finished and run.steps == T and run.optimizer == "adamw"
    assert [c.step for c in run.checkpoints] == [3, 6, 9, 12, 15]
    assert [(s.name, s.start, s.end, s.size) for s in run.stages] == [("train", 0, T, SIZE)]
    assert run.notes == {"clip_norm": 1.0}
    np.testing.assert_array_equal(run.learning_rates, trained.rates)
    assert run.learning_rates[0, 0] == 0 and run.learning_rates[3, 0] == 1e-2  # a warm-up
    assert run.learning_rates[-1, 0] == pytest.approx(1e-2 / 12)
    assert run.initial and same(run.initial.weights(), trained.initial)
    assert same(run.final.weights(), model.state_dict())
    for checkpoint in run.checkpoints:
        moments = checkpoint.second_moments()
        assert moments and moments.keys() == trained.moments[checkpoint.step].keys()
        for name, v in trained.moments[checkpoint.step].items():
            torch.testing.assert_close(moments[name], v, rtol=1e-5, atol=0)
    decay, free = run.groups
    assert set(decay) | set(free) == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert [settings["weight_decay"] for settings in run.hyperparameters] == [0.1, 0.0]
    assert not any("bias" in name for name in decay)
    assert not trained.optimizer._optimizer_step_post_hooks
    # Recording changes nothing in the training.
    alone = trained.make()
    trainer(alone, tmp_path, save_strategy="no").train()
    assert same(alone.state_dict(), model.state_dict())


def test_the_folder_gives_the_same_run(trained: Trained, tmp_path: Path) -> None:
    recorded = Run.open(trained.path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run.from_huggingface(trained.out, trained.make(), size=SIZE)
    assert type(run) is Run and run.finished and run.initial is None and run.path is None
    assert run.stages == recorded.stages and run.optimizers == recorded.optimizers
    assert run.groups == recorded.groups and run.columns == recorded.columns
    assert run.hyperparameters == recorded.hyperparameters
    np.testing.assert_array_equal(run.learning_rates, recorded.learning_rates)
    np.testing.assert_array_equal(run.momentums, recorded.momentums)
    assert [c.step for c in run.checkpoints] == [c.step for c in recorded.checkpoints]
    for ours, theirs in zip(run.checkpoints, recorded.checkpoints, strict=True):
        assert same(ours.weights(), theirs.weights())
        assert same(ours.second_moments(), theirs.second_moments())
    assert [s.rates for s in run.segments(3)] == [s.rates for s in recorded.segments(3)]
    # Saved to a folder, it is the same run.
    saved = run.save(tmp_path / "saved")
    assert same(saved.final.weights(), run.final.weights())
    assert same(saved.final.second_moments(), run.final.second_moments())
    np.testing.assert_array_equal(saved.learning_rates, run.learning_rates)


def test_a_study_takes_either(left: Trained) -> None:
    data = [{"input_ids": e["input_ids"], "labels": e["labels"]} for e in examples(left.model)]
    values = []
    for run in (Run.open(left.path), Run.from_huggingface(left.out, gpt2(), size=SIZE)):
        study = whence.Study(gpt2(), whence.LanguageModeling(), train=data, runs=run)
        values.append(whence.TracIn().attribute(study, data[:2], progress=False).values)
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)
    assert np.abs(values[0]).max() > 0


def test_other_optimizers_and_schedules(hf: ModuleType, tmp_path: Path) -> None:
    model = bert()
    arguments = {"optim": "sgd", "optim_args": "momentum=0.5", "lr_scheduler_type": "cosine"}
    callback = recorder(tmp_path / "run", [4, 9], size=7, stage="pre", notes={"ema": 0.9})
    training = trainer(
        model,
        tmp_path / "out",
        callback,
        max_grad_norm=0.0,
        label_smoothing_factor=0.1,
        **arguments,
    )
    with pytest.warns(UserWarning, match=r"label_smoothing=0\.1, ema=0\.9"):
        training.train()
    run = Run.open(tmp_path / "run")
    assert run.optimizer == "sgd" and [c.step for c in run.checkpoints] == [4, 9, T]
    assert run.final.second_moments() is None
    assert [(s.name, s.size) for s in run.stages] == [("pre", 7)]
    assert run.notes == {"label_smoothing": 0.1, "ema": 0.9}
    again = Run.from_huggingface(tmp_path / "out", bert(), stage="pre", notes={"ema": 0.9})
    assert again.optimizer == "sgd" and again.final.second_moments() is None
    assert again.stages[0].name == "pre" and again.notes == {"ema": 0.9}
    np.testing.assert_array_equal(again.learning_rates, run.learning_rates)
    np.testing.assert_array_equal(again.momentums, run.momentums)
    assert again.hyperparameters == run.hyperparameters and again.groups == run.groups


def test_frozen_parameters(hf: ModuleType, tmp_path: Path) -> None:
    def frozen() -> Any:
        model = bert()
        model.bert.embeddings.requires_grad_(False)
        return model

    trainer(model := frozen(), tmp_path / "out", recorder(tmp_path / "run")).train()
    run, again = Run.open(tmp_path / "run"), Run.from_huggingface(tmp_path / "out", frozen())
    assert again.groups == run.groups
    assert not any("embeddings" in name for group in run.groups for name in group)
    assert same(again.final.weights(), model.state_dict())
    with pytest.raises(RunError, match="Freeze the parameters that were frozen in training"):
        Run.from_huggingface(tmp_path / "out", bert())


def test_the_best_model_is_not_the_final_one(hf: ModuleType, tmp_path: Path) -> None:
    """Early stopping ends the training, then load_best_model_at_end puts other weights in place."""
    model = bert()
    seen = {}

    def look(step: int, model: Any, **_: Any) -> None:
        seen[step + 1] = copy.deepcopy(model.state_dict())

    metrics = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    training = trainer(
        model,
        tmp_path / "out",
        recorder(tmp_path / "run", 3),
        spy(on_optimizer_step=look),
        hf.EarlyStoppingCallback(early_stopping_patience=2),
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        metric_for_best_model="worse",
        greater_is_better=False,
    )
    training.compute_metrics = lambda _: {"worse": next(metrics)}
    with pytest.warns(UserWarning) as caught:
        training.train()
    assert any("load_best_model_at_end=True" in str(w.message) for w in caught)
    assert any("reached 6" in str(w.message) for w in caught)
    run = Run.open(tmp_path / "run")
    assert run.finished and [c.step for c in run.checkpoints] == [5, 6]
    assert same(run.final.weights(), seen[6]) and same(model.state_dict(), seen[2])


# --- Hugging Face, interrupted ------------------------------------------------------------------


def stop_at(step: int) -> Any:
    def stop(now: int, **_: Any) -> None:
        if now == step:
            raise KeyboardInterrupt

    return spy(on_step_begin=stop)


def test_a_resumed_training_ends_with_the_same_bits(hf: ModuleType, tmp_path: Path) -> None:
    """The Trainer saves at 4, 8, 12; the run at 5, 10, 15."""

    def resumed(folder: Path, *callbacks: Any, **arguments: Any) -> Any:
        model = bert()
        callback = recorder(folder / "run", 3, every_step=True)
        resume = arguments.pop("resume", None)
        training = trainer(model, folder / "out", callback, *callbacks, save_steps=4, **arguments)
        training.train(resume_from_checkpoint=resume)
        return model

    whole = resumed(tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        resumed(folder, stop_at(6))
    run = Run.open(folder / "run")
    assert not run.finished and [c.step for c in run.checkpoints] == [5]
    with pytest.raises(KeyboardInterrupt):
        resumed(folder, stop_at(11), resume=True)  # from 4, before the run's own 5
    run = Run.open(folder / "run")
    assert run.steps == 10 and [c.step for c in run.checkpoints] == [5, 10]
    model = resumed(folder, resume=True)  # from 8
    assert same(model.state_dict(), whole.state_dict())
    assert content(folder / "run") == content(tmp_path / "whole/run")
    # From the start, with the folder of an interrupted run there.
    with pytest.raises(KeyboardInterrupt):
        resumed(tmp_path / "again", stop_at(6))
    resumed(tmp_path / "again")
    assert content(tmp_path / "again/run") == content(tmp_path / "whole/run")


def test_saved_at_every_step_and_from_the_start_again(hf: ModuleType, tmp_path: Path) -> None:
    """The first update of a warm-up has rate 0: the weights alone do not tell it from none."""
    for callbacks in ([stop_at(1)], []):
        training = trainer(
            bert(), tmp_path / "out", recorder(tmp_path / "run"), *callbacks, save_steps=1
        )
        if callbacks:
            with pytest.raises(KeyboardInterrupt):
                training.train()
        else:
            training.train()
    run = Run.open(tmp_path / "run")
    assert run.finished and run.steps == T
    assert run.learning_rates[:3, 0] == pytest.approx(1e-2 * np.array([0, 1 / 3, 2 / 3]))


def test_the_same_trainer_after_an_error(hf: ModuleType, tmp_path: Path) -> None:
    once = [True]

    def stumble(step: int, **_: Any) -> None:
        if step == 7 and once.pop():
            raise ZeroDivisionError

    model = bert()
    callback = recorder(tmp_path / "run")
    training = trainer(model, tmp_path / "out", callback, spy(on_step_begin=stumble), save_steps=4)
    with pytest.raises(ZeroDivisionError):
        training.train()
    once.append(False)
    training.train(resume_from_checkpoint=True)
    assert not training.optimizer.optimizer._optimizer_step_post_hooks
    run = Run.open(tmp_path / "run")
    assert run.finished and run.steps == T and [c.step for c in run.checkpoints] == [3, 6, 9, 12, T]
    assert same(run.final.weights(), model.state_dict())


def test_a_batch_size_found_on_the_way(hf: ModuleType, tmp_path: Path) -> None:
    """The Trainer starts over by itself, with the weights its first attempt left."""
    full = [True]

    def overflow(step: int, **_: Any) -> None:
        if step == 4 and full:
            full.clear()
            raise RuntimeError("CUDA out of memory.")

    model = bert()
    callbacks = [recorder(tmp_path / "run"), spy(on_step_begin=overflow)]
    trainer(model, tmp_path / "out", *callbacks, auto_find_batch_size=True).train()
    run = Run.open(tmp_path / "run")
    assert run.finished and run.steps == 27 and len(run.checkpoints) == 5
    assert same(run.final.weights(), model.state_dict())


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
    import test_trainer_callbacks as t, torch
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])

    def kill(step, **_):
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    kills = t.spy(on_save=kill)  # the Trainer has saved; the recorder has not heard of it yet
    t.trainer(t.bert(), folder / "out", kills, t.recorder(folder / "run", 3), save_steps=4).train()
"""


def test_killed_while_saving_it_resumes(hf: ModuleType, tmp_path: Path) -> None:
    source = Path(whence.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(Path(__file__).parent), tmp_path],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    model = bert()
    training = trainer(model, tmp_path / "out", recorder(tmp_path / "run", 3), save_steps=4)
    training.train(resume_from_checkpoint=True)
    whole = bert()
    trainer(whole, tmp_path / "other", recorder(tmp_path / "whole", 3), save_steps=4).train()
    assert same(model.state_dict(), whole.state_dict())
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_only_the_end_of_a_training_recorded(hf: ModuleType, tmp_path: Path) -> None:
    trainer(bert(), tmp_path / "out").train()
    resume = str(tmp_path / "out/checkpoint-9")
    training = trainer(bert(), tmp_path / "out", recorder(tmp_path / "run", 2))
    with pytest.warns(UserWarning, match="first 9 updates of this training were not recorded"):
        training.train(resume_from_checkpoint=resume)
    run = Run.open(tmp_path / "run")
    assert run.finished and [c.step for c in run.checkpoints] == [3, 6]
    assert run.learning_rates[0, 0] == pytest.approx(1e-2 * 6 / 12)


def test_a_finished_run_is_kept(hf: ModuleType, left: Trained, tmp_path: Path) -> None:
    shutil.copytree(left.path, tmp_path / "run")
    before = content(tmp_path / "run")
    model = gpt2()
    with pytest.raises(RunError, match=r"finished run of 15 updates.*overwrite=True.*stage="):
        trainer(model, tmp_path / "out", recorder(tmp_path / "run")).train()
    assert content(tmp_path / "run") == before
    # Another stage is appended to it, and overwrite=True replaces the run.
    model.load_state_dict(left.model.state_dict())
    callback = recorder(tmp_path / "run", 2, stage="fine")
    trainer(model, tmp_path / "out", callback, num_train_epochs=1).train()
    run = Run.open(tmp_path / "run")
    assert [(s.name, s.start, s.end) for s in run.stages] == [("train", 0, T), ("fine", T, T + 5)]
    assert [c.step for c in run.checkpoints] == [3, 6, 9, 12, 15, 17, 20]
    callback = recorder(tmp_path / "run", overwrite=True)
    trainer(gpt2(), tmp_path / "again", callback).train()
    assert Run.open(tmp_path / "run").fingerprint == Run.open(left.path).fingerprint
    # overwrite=True does not apply to a training that resumes.
    training = trainer(gpt2(), tmp_path / "again", callback, num_train_epochs=4)
    training.train(resume_from_checkpoint=True)
    assert Run.open(tmp_path / "run").steps == 20


def test_what_a_callback_cannot_do(hf: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got chekpoints: its options are .*every_step"):
        recorder(tmp_path, chekpoints=3)
    with pytest.raises(ValueError, match="use checkpoints<=15"):
        trainer(bert(), tmp_path / "out", recorder(tmp_path / "run", 50)).train()
    assert not (tmp_path / "run").exists()
    model = bert()
    model.classifier.weight.ds_id = 0  # as DeepSpeed's ZeRO-3 marks what it shards
    with pytest.raises(ValueError, match=r"classifier\.weight is sharded.*train with DDP"):
        trainer(model, tmp_path / "out", recorder(tmp_path / "run")).train()


# --- Hugging Face, folders ----------------------------------------------------------------------


@pytest.fixture
def folder(left: Trained, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left.out, tmp_path / "out"))


def change(path: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def relog(folder: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the log of the last checkpoint."""

    def inside(state: dict[str, Any]) -> None:
        state["log_history"] = edit(state["log_history"])

    change(folder / "checkpoint-15/trainer_state.json", inside)


def test_rates_between_the_logged_are_interpolated(hf: ModuleType, tmp_path: Path) -> None:
    arguments = {"logging_steps": 5, "save_steps": 15, "warmup_steps": 0}
    training = trainer(bert(), tmp_path / "out", recorder(tmp_path / "run"), **arguments)
    training.train()
    with pytest.warns(UserWarning, match="of 12 of 15 updates were not logged in .* interpolated"):
        run = Run.from_huggingface(tmp_path / "out", bert())
    # A straight line goes through all, before the first and after the last too.
    np.testing.assert_allclose(run.learning_rates, Run.open(tmp_path / "run").learning_rates)


def test_rates_of_a_warm_up_interpolated(left: Trained, folder: Path) -> None:
    relog(folder, lambda log: [entry for entry in log if entry["step"] % 5 == 0])
    with pytest.warns(UserWarning, match="of 9 of 15 updates"):  # checkpoints tell 4, 7, 10, 13
        run = Run.from_huggingface(folder, gpt2())
    exact = np.array(left.rates)[:, 0]
    rates = run.learning_rates[:, 0]
    known = [4, 5, 7, 10, 13, 15]
    np.testing.assert_array_equal(rates[np.array(known) - 1], exact[np.array(known) - 1])
    np.testing.assert_allclose(rates[3:], exact[3:], rtol=1e-12)
    assert (rates >= 0).all() and (rates <= exact.max()).all()


def test_rates_logged_by_an_older_version(left: Trained, folder: Path) -> None:
    """Before 4.51 it was the rate of the next update."""
    next_rates = [*np.array(left.rates)[1:, 0], 0.0]
    relog(folder, lambda log: [e | {"learning_rate": next_rates[e["step"] - 1]} for e in log])
    change(folder / "checkpoint-15/config.json", lambda c: c.update(transformers_version="4.50.3"))
    with pytest.warns(UserWarning, match="of 1 of 15 updates"):
        run = Run.from_huggingface(folder, gpt2())
    np.testing.assert_allclose(run.learning_rates, left.rates, atol=1e-12)


def test_groups_with_rates_of_their_own(left: Trained, folder: Path) -> None:
    def faster(path: Path, **rates: float) -> None:
        saved = torch.load(path, weights_only=True)
        for key, rate in rates.items():
            saved["param_groups"][1][key] *= rate
        torch.save(saved, path)

    for place in folder.glob("checkpoint-*"):
        faster(place / "optimizer.pt", lr=3.0, initial_lr=3.0)
    run = Run.from_huggingface(folder, gpt2())
    np.testing.assert_allclose(run.learning_rates, np.array(left.rates) * [1, 3])
    faster(folder / "checkpoint-9/optimizer.pt", lr=2.0)
    with pytest.raises(RunError, match=r"learning rates change in .*checkpoint-9"):
        Run.from_huggingface(folder, gpt2())


def test_weights_in_other_files(left: Trained, folder: Path, tmp_path: Path) -> None:
    """A pickle of tensors; shards of either kind; weights tied the other way round."""
    weights = {s: load_file(folder / f"checkpoint-{s}/model.safetensors") for s in (3, 6, 9, 12)}
    assert "lm_head.weight" not in weights[3]
    for step in weights:
        (folder / f"checkpoint-{step}/model.safetensors").unlink()
    torch.save(weights[3], folder / "checkpoint-3/pytorch_model.bin")

    def shards(step: int, stem: str, suffix: str, save: Callable[..., None]) -> None:
        place = folder / f"checkpoint-{step}"
        names = sorted(weights[step])
        mapped = {n: f"{stem}-0000{1 + i % 2}-of-00002.{suffix}" for i, n in enumerate(names)}
        for file in set(mapped.values()):
            save({n: weights[step][n] for n in names if mapped[n] == file}, place / file)
        (place / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": mapped}))

    shards(6, "model", "safetensors", save_file)
    shards(9, "pytorch_model", "bin", torch.save)
    weights[12]["lm_head.weight"] = weights[12].pop("transformer.wte.weight")
    save_file(weights[12], folder / "checkpoint-12/model.safetensors")
    run = Run.from_huggingface(folder, gpt2())
    for ours, theirs in zip(run.checkpoints, Run.open(left.path).checkpoints, strict=True):
        assert same(ours.weights(), theirs.weights())
        assert same(ours.second_moments(), theirs.second_moments())
    (folder / "checkpoint-6/model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="truncated or altered"):
        run.checkpoints[1].weights()
    (folder / "checkpoint-6/model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RunError, match=r"checkpoint-6 lacks model-00002-of-00002\.safetensors"):
        Run.from_huggingface(folder, gpt2())


def test_weights_that_the_model_does_not_have(left: Trained, folder: Path) -> None:
    file = folder / "checkpoint-3/model.safetensors"
    save_file(load_file(file) | {"transformer.h.0.attn.masked_bias": torch.zeros(())}, file)
    with pytest.warns(UserWarning, match=r"checkpoint-3.*masked_bias.*ignored"):
        run = Run.from_huggingface(folder, gpt2())
    assert same(run.checkpoints[0].weights(), Run.open(left.path).checkpoints[0].weights())


def test_named_groups_and_amsgrad(hf: ModuleType, tmp_path: Path) -> None:
    """A custom optimizer, whose groups are named and differ from the Trainer's."""
    model = bert()
    named = list(model.named_parameters())
    parts = [{"params": named[::2]}, {"params": named[1::4], "lr": 1e-4}, {"params": named[3::4]}]
    optimizer = torch.optim.Adam(parts, lr=1e-3, amsgrad=True, weight_decay=0.2)
    training = trainer(model, tmp_path / "out", recorder(tmp_path / "run"), save_steps=5)
    training.optimizer = optimizer
    training.train()
    run, again = Run.open(tmp_path / "run"), Run.from_huggingface(tmp_path / "out", bert())
    assert again.optimizer == run.optimizer == "adam" and again.groups == run.groups
    np.testing.assert_allclose(again.learning_rates, run.learning_rates)
    assert same(again.final.second_moments(), run.final.second_moments())
    assert again.hyperparameters == run.hyperparameters


def test_moments_of_centered_rmsprop(hf: ModuleType, tmp_path: Path) -> None:
    model = bert()
    training = trainer(model, tmp_path / "out", recorder(tmp_path / "run"), save_steps=5)
    training.optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True)
    training.train()
    run, again = Run.open(tmp_path / "run"), Run.from_huggingface(tmp_path / "out", bert())
    assert again.optimizer == run.optimizer == "rmsprop"
    assert same(again.final.second_moments(), run.final.second_moments())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f), "is not a folder"),
        (lambda f: [shutil.rmtree(c) for c in f.glob("checkpoint-*")], "no checkpoint-* folders"),
        (lambda f: (f / "checkpoint-6/model.safetensors").unlink(), "checkpoint-6 has no weights"),
        (
            lambda f: (f / "checkpoint-6/model.safetensors").rename(
                f / "checkpoint-6/adapter_model.safetensors"
            ),
            "it holds only an adapter",
        ),
        (
            lambda f: (f / "checkpoint-6/model.safetensors").write_bytes(b"weights"),
            "checkpoint-6/model.safetensors cannot be read",
        ),
        (
            lambda f: (f / "checkpoint-15/trainer_state.json").unlink(),
            "checkpoint-15 has no trainer_state.json",
        ),
        (
            lambda f: (f / "checkpoint-15/trainer_state.json").write_text("{"),
            "checkpoint-15/trainer_state.json is damaged",
        ),
        (lambda f: relog(f, lambda log: [{"step": 1, "learning_rate": "much"}]), "log_history"),
        (
            lambda f: relog(f, lambda log: [{"step": 1, "learning_rate": -1.0}]),
            "negative or infinite learning rate",
        ),
        (
            lambda f: (f / "checkpoint-9/optimizer.pt").write_bytes(b"PK"),
            "checkpoint-9/optimizer.pt cannot be read",
        ),
        (
            lambda f: torch.save({"state": {}}, f / "checkpoint-9/optimizer.pt"),
            "checkpoint-9/optimizer.pt does not hold the state_dict() of an optimizer",
        ),
    ],
)
def test_damaged_folders(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    with pytest.raises(RunError, match=re.escape(message)):
        Run.from_huggingface(folder, gpt2())


def test_a_checkpoint_given_in_place_of_the_folder(folder: Path) -> None:
    with pytest.raises(RunError, match="give its parent folder"):
        Run.from_huggingface(folder / "checkpoint-3", gpt2())


def test_nothing_is_unpickled(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "sprung",)

    torch.save(Trap(), folder / "checkpoint-15/training_args.bin")
    torch.save(Trap(), folder / "checkpoint-15/scheduler.pt")
    Run.from_huggingface(folder, gpt2())
    torch.save({"state": Trap(), "param_groups": []}, folder / "checkpoint-15/optimizer.pt")
    with pytest.raises(RunError, match="unpickling"):
        Run.from_huggingface(folder, gpt2())
    assert not (folder / "sprung").exists()


def test_without_optimizers(left: Trained, folder: Path) -> None:
    (folder / "checkpoint-6/optimizer.pt").unlink()
    with pytest.warns(UserWarning, match=r"no optimizer\.pt at \[6\]: no second moments"):
        run = Run.from_huggingface(folder, gpt2())
    assert [bool(c.moments) for c in run.checkpoints] == [True, False, True, True, True]
    for file in folder.glob("*/optimizer.pt"):
        file.unlink()
    with pytest.warns(UserWarning, match=r"SOURCE needs.*Assuming AdamW"):
        run = Run.from_huggingface(folder, gpt2())
    assert run.optimizer == "adamw" and run.final.second_moments() is None
    np.testing.assert_array_equal(run.learning_rates[:, 0], np.array(left.rates)[:, 0])
    assert run.segments(1)[0].rate("lm_head.weight") == run.segments(1)[0].rate(
        "transformer.wte.weight"
    )
    relog(folder, lambda log: [])
    with (
        pytest.warns(UserWarning, match=r"no optimizer\.pt"),
        pytest.raises(RunError, match="has no learning rate"),
    ):
        Run.from_huggingface(folder, gpt2())


def test_an_unknown_optimizer(folder: Path) -> None:
    for path in folder.glob("*/optimizer.pt"):
        saved = torch.load(path, weights_only=True)
        for group in saved["param_groups"]:
            group["momentum_decay"] = 0.004
        torch.save(saved, path)
    with pytest.warns(UserWarning, match=r"unknown optimizer.*'momentum_decay'"):
        run = Run.from_huggingface(folder, gpt2())
    assert run.optimizer == "unknown" and run.final.second_moments() is None


def test_missing_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint-6")
    with pytest.warns(
        UserWarning, match="no checkpoint between updates 3 and 9, though .* every 3"
    ):
        Run.from_huggingface(folder, gpt2())
    shutil.rmtree(folder / "checkpoint-3")
    shutil.rmtree(folder / "checkpoint-9")
    with pytest.warns(UserWarning, match="between updates 0 and 12"):  # as save_total_limit=2
        run = Run.from_huggingface(folder, gpt2())
    assert [c.step for c in run.checkpoints] == [12, 15]
    shutil.rmtree(folder / "checkpoint-15")
    with pytest.warns(UserWarning, match=r"reach update 15 \(max_steps\).* is after 12"):
        run = Run.from_huggingface(folder, gpt2())
    assert not run.finished and run.steps == 12


def test_skipped_updates_warn(folder: Path) -> None:
    path = folder / "checkpoint-9/optimizer.pt"
    saved = torch.load(path, weights_only=True)
    for state in saved["state"].values():
        state["step"] -= 2
    torch.save(saved, path)
    with pytest.warns(
        UserWarning, match=r"checkpoint-9/optimizer\.pt has counted 7 updates, not 9"
    ):
        Run.from_huggingface(folder, gpt2())


def test_another_model(folder: Path) -> None:
    with pytest.raises(RunError, match=r"of another model: it has no "):
        Run.from_huggingface(folder, bert())
    resized = gpt2()
    resized.resize_token_embeddings(23)
    with pytest.raises(RunError, match=r"wte\.weight of shape \(20, 8\), not \(23, 8\)"):
        Run.from_huggingface(folder, resized)


def test_an_altered_optimizer_is_noticed(folder: Path) -> None:
    run = Run.from_huggingface(folder, gpt2())
    shutil.copy(folder / "checkpoint-3/optimizer.pt", folder / "checkpoint-6/optimizer.pt")
    with pytest.raises(RunError, match=r"checkpoint-6/optimizer\.pt was altered"):
        run.checkpoints[1].second_moments()


# --- Lightning ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: Any) -> ModuleType:
    module: ModuleType = pytest.importorskip(request.param)
    return module


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """Lightning has much to say about workers, logging and small epochs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning|pytorch_lightning")
        yield


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 3, generator=generator)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    return torch.utils.data.DataLoader(data, batch_size=2)


def module(pl: ModuleType, manual: bool = False, stop: int | None = None, two: bool = False) -> Any:
    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            self.automatic_optimization = not manual
            self.rates: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            if self.trainer.global_step == stop:
                raise ZeroDivisionError
            loss = F.cross_entropy(self.model(x), y)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.lr_schedulers().step()
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            if two:
                return [optimizer, torch.optim.SGD(self.parameters(), lr=0.1)]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def fit(pl: ModuleType, lit: Any, folder: Path, *callbacks: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": str(folder),
    }
    resume = options.pop("ckpt_path", None)
    training = pl.Trainer(callbacks=list(callbacks), **(settings | options))
    training.fit(lit, loader(), ckpt_path=resume)
    return training


def lightning(path: Path, checkpoints: Any = 5, **options: Any) -> Any:
    from whence.integrations.lightning import RecorderCallback

    return RecorderCallback(path, checkpoints, **options)


def test_lightning_is_recorded(pl: ModuleType, tmp_path: Path) -> None:
    lit = module(pl)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    with pytest.warns(UserWarning, match=r"clip_norm=0\.5"):
        training = fit(pl, lit, tmp_path, lightning(tmp_path / "run"), **options)
    run = Run.open(tmp_path / "run")
    assert run.finished and run.steps == T and run.optimizer == "adamw"
    assert [c.step for c in run.checkpoints] == [3, 6, 9, 12, 15]
    assert [(s.name, s.size) for s in run.stages] == [("train", SIZE)]
    assert run.notes == {"clip_norm": 0.5}
    np.testing.assert_array_equal(run.learning_rates[:, 0], lit.rates)
    np.testing.assert_allclose(lit.rates, 0.1 / np.arange(1, T + 1))
    assert same(run.final.weights(), lit.state_dict())
    moments = run.final.second_moments()
    assert moments is not None
    for name, v in by_hand(lit, training.optimizers[0]).items():
        torch.testing.assert_close(moments[name], v, rtol=1e-5, atol=0)
    alone = module(pl)
    fit(pl, alone, tmp_path, **options)
    assert same(alone.state_dict(), lit.state_dict())


@pytest.mark.parametrize("manual", [False, True])
def test_the_model_inside_a_lightning_module(pl: ModuleType, tmp_path: Path, manual: bool) -> None:
    lit = module(pl, manual)
    clip = {} if manual else {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    fit(pl, lit, tmp_path, lightning(tmp_path / "run", 3, module="model"), **clip)
    run = Run.open(tmp_path / "run")
    assert run.finished and run.steps == 27 and [c.step for c in run.checkpoints] == [9, 18, 27]
    assert run.notes == ({} if manual else {"clip_value": 0.1})
    assert same(run.final.weights(), lit.model.state_dict())
    assert run.groups == [["0.weight", "0.bias", "2.weight", "2.bias"]]
    np.testing.assert_allclose(run.learning_rates[:, 0], 0.1 / np.arange(1, 28))
    data = loader().dataset
    study = whence.Study(lit.model, whence.Classification(), train=data, runs=tmp_path / "run")
    assert np.abs(whence.TracIn().attribute(study, data, progress=False).values).max() > 0


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_resumes_to_the_same_bits(pl: ModuleType, tmp_path: Path, manual: bool) -> None:
    """Lightning saves after 9, 18 and 27 updates: it resumes exactly only between epochs."""
    saves = import_module(f"{pl.__name__}.callbacks").ModelCheckpoint

    def run(folder: Path, stop: int | None = None, resume: Path | None = None) -> Any:
        lit = module(pl, manual, stop)
        keep = saves(folder / "saved", "{step}", save_top_k=-1)
        callbacks = [lightning(folder / "run", [5, 14]), keep]
        fit(pl, lit, folder, *callbacks, enable_checkpointing=True, ckpt_path=resume)
        return lit

    whole = run(tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(ZeroDivisionError):
        run(folder, stop=11)
    cut = Run.open(folder / "run")
    assert not cut.finished and cut.steps == 11 and [c.step for c in cut.checkpoints] == [5]
    lit = run(folder, resume=folder / "saved/step=9.ckpt")
    assert same(lit.state_dict(), whole.state_dict())
    assert content(folder / "run") == content(tmp_path / "whole/run")


def test_what_lightning_cannot_record(pl: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 optimizers"):
        fit(pl, module(pl, manual=True, two=True), tmp_path, lightning(tmp_path / "run"))
    with pytest.raises(ValueError, match="module='net' is not in Module, which has model"):
        fit(pl, module(pl), tmp_path, lightning(tmp_path / "run", module="net"))
    with pytest.raises(ValueError, match="pass total_steps="):
        fit(pl, module(pl), tmp_path, lightning(tmp_path / "run"), max_epochs=-1)
    with pytest.raises(TypeError, match="got sizes: its options are"):
        lightning(tmp_path / "run", sizes=3)
    assert not (tmp_path / "run").exists()


def test_averaged_weights_are_noted(pl: ModuleType, tmp_path: Path) -> None:
    averaging = import_module(f"{pl.__name__}.callbacks").StochasticWeightAveraging(swa_lrs=0.01)
    with pytest.warns(UserWarning, match="weight_averaging='StochasticWeightAveraging'"):
        fit(pl, module(pl), tmp_path, lightning(tmp_path / "run", [9]), averaging)
    assert Run.open(tmp_path / "run").notes == {"weight_averaging": "StochasticWeightAveraging"}
