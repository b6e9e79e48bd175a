"""`whence init`: write a study file from what a training left, or from the script that trains.

Nothing is executed: JSON and weights are read, and a script is only parsed. What cannot be known is
marked with EDIT.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.screen import Answer, CommandError, command
from whence.cli.signature import OUT
from whence.table import listed

EDIT = "EDIT"
CAUSAL, CLASSIFIER = ("ForCausalLM", "LMHeadModel"), "ForSequenceClassification"
DATA_FILES = (".jsonl", ".csv", ".txt")
TASKS = {  # by the loss that a script calls
    "cross_entropy": "Classification",
    "CrossEntropyLoss": "Classification",
    "mse_loss": "Regression",
    "MSELoss": "Regression",
}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop")
RECORDERS = ("Recorder", "RecorderCallback")


@command()
def init(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="The output folder of a Hugging Face Trainer, a Lightning checkpoint (.ckpt), or "
            "the script that trains (.py).",
        ),
    ],
    out: Annotated[Path | None, OUT] = None,
) -> Answer:
    """Write a study file from a Trainer's folder, a Lightning checkpoint or a training script.

    Lines that only you can complete are marked with EDIT. Nothing is executed.

    Examples:

    - `whence init out/my-model`
    - `whence init lightning_logs/version_0/checkpoints/last.ckpt`
    - `whence init train.py`

    Args:
        out (FILE): The file. Default: study.py or study.yaml.
    """
    if not source.exists():
        raise CommandError(f"{source} does not exist: give a folder, a .ckpt or a .py file")
    trainer = source.is_dir()
    path = out or Path("study.yaml" if trainer else "study.py")
    if path.suffix not in ((".yaml", ".yml") if trainer else (".py",)):
        raise CommandError(f"--out {path}: use {'study.yaml' if trainer else 'study.py'}")
    if path.exists():
        raise CommandError(f"{path} exists: delete it, or choose another name with --out")
    if trainer:
        text = _from_trainer(source, path)
    elif source.suffix == ".ckpt":
        text = _from_lightning(source, path)
    elif source.suffix == ".py":
        text = _from_script(source, path)
    else:
        raise CommandError(f"{source} is neither a folder, nor a .ckpt or .py file")
    path.write_text(text)
    todo = [n for n, line in enumerate(text.splitlines(), 1) if EDIT in line]
    lines = f"line{'s' if len(todo) > 1 else ''} {listed(todo, 8)}"
    then = shlex.join(["whence", "doctor", str(path)])
    steps = f"Complete {lines}, marked with {EDIT}. Then check it: {then}" if todo else then
    return Answer({"path": path, "edit": todo}, f"{path} is written. {steps}")


# -- a Trainer's folder ----------------------------------------------------------------------------


def _from_trainer(folder: Path, path: Path) -> str:
    steps = {int(f.name[11:]): f for f in folder.glob("checkpoint-*") if f.name[11:].isdigit()}
    if not steps:
        raise CommandError(
            f"{folder} has no checkpoint-* folders: give a Trainer's output_dir that has some"
        )
    last = steps[max(steps)]
    config: dict[str, Any] = {}
    if (last / "config.json").is_file():
        config = json.loads((last / "config.json").read_text("utf-8"))
    kinds = " ".join(map(str, config.get("architectures") or []))
    causal = any(word in kinds for word in CAUSAL)
    task = "causal-lm" if causal else "sequence-classification"
    known = causal or CLASSIFIER in kinds
    data = sorted(f.name for f in path.absolute().parent.iterdir() if f.suffix in DATA_FILES)
    train = next((name for name in data if "train" in name), None)
    query = next((n for n in data if any(w in n for w in ("test", "query", "valid", "eval"))), None)
    return "\n".join(
        [
            f"# Written by `whence init {folder}`. Check it: whence doctor {path.name}",
            f"output_dir: {json.dumps(_relative(folder, path))}  # {len(steps)} checkpoints, "
            f"up to update {max(steps)}",
            f"task: {task}"
            + ("" if known else f"  # {EDIT}: causal-lm or sequence-classification"),
            f"train: {json.dumps(train or 'train.jsonl')}"
            + ("" if train else f"  # {EDIT}: the examples, as the Trainer saw them"),
            f"query: {json.dumps(query or 'test.jsonl')}"
            + ("" if query else f"  # {EDIT}: the examples to explain, in the same format"),
            "# columns: {text: text, label: label}   # names of the columns",
            "# max_length: 512                        # tokens of an example, as in training",
            "",
        ]
    )


# -- a Lightning checkpoint ------------------------------------------------------------------------


def _from_lightning(checkpoint: Path, path: Path) -> str:
    import torch

    try:
        content = torch.load(checkpoint, map_location="meta", weights_only=True)
    except Exception as error:
        raise CommandError(
            f"{checkpoint} cannot be read without running code in it ({type(error).__name__}): "
            "save it again without Python objects among the hyperparameters"
        ) from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise CommandError(f"{checkpoint} has no state_dict: is it a Lightning checkpoint?")
    states = content.get("optimizer_states") or [{}]
    groups = states[0].get("param_groups") or [{}]
    moments = any("exp_avg_sq" in one for one in (states[0].get("state") or {}).values())
    prefixes = {name.partition(".")[0] for name in content["state_dict"]}
    prefix = f"{prefixes.pop()}." if len(prefixes) == 1 else ""
    return _LIGHTNING.format(
        source=checkpoint,
        name=path.name,
        checkpoint=_relative(checkpoint, path),
        steps=int(content.get("global_step", 0)),
        rate=float(groups[0].get("lr", 0.0)) or "0.001",
        optimizer="adamw" if moments else "sgd",
        momentum=float(groups[0].get("momentum", 0.0) or 0.0),
        decay=float(groups[0].get("weight_decay", 0.0) or 0.0),
        prefix=prefix,
        edit=EDIT,
    )


_LIGHTNING = '''"""Written by `whence init {source}`. Check it: whence doctor {name}"""

import torch
import whence

checkpoint = torch.load("{checkpoint}", map_location="cpu", weights_only=True)
weights = {{k.removeprefix("{prefix}"): v for k, v in checkpoint["state_dict"].items()}}
run = whence.Run.from_checkpoints(
    [weights],
    steps=[{steps}],
    learning_rates={rate},  # {edit}: that of the last update, or one per update
    optimizer="{optimizer}",
    momentum={momentum},
    weight_decay={decay},
)
# One checkpoint is enough for Influence(damping=1e-3) and TracIn. For SOURCE, train with
# whence.integrations.lightning.RecorderCallback("runs/mine"), and use runs="runs/mine".

model = ...  # {edit}: the module whose weights these are, such as MyModule().model
train = ...  # {edit}: the training dataset, without augmentation
query = ...  # {edit}: the examples to explain, in the same format

study = whence.Study(model, whence.Classification(), train, run)  # {edit}: the task
'''


# -- a training script -----------------------------------------------------------------------------


@dataclass
class _Script:
    """What a training script defines, as far as its text shows."""

    functions: list[str] = field(default_factory=list)  # without required arguments
    modules: list[str] = field(default_factory=list)  # classes of models
    names: list[str] = field(default_factory=list)  # of other values
    optimizer: str | None = None  # "torch.optim.SGD(parameters, lr=0.1)"
    batch_size: str | None = None
    epochs: str | None = None
    task: str | None = None  # "Classification"
    run: str | None = None  # the folder of its Recorder
    guarded: bool = False  # training is under if __name__ == "__main__"

    @classmethod
    def read(cls, path: Path) -> _Script:
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except SyntaxError as error:
            raise CommandError(f"{path}, line {error.lineno}: {error.msg}") from error
        script = cls()
        for node in tree.body:
            script._add(node)
        for part in ast.walk(tree):
            if isinstance(part, ast.Call):
                script._add_call(part)
            elif isinstance(part, ast.For) and script.epochs is None:
                script._add_loop(part)
        return script

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            required = len(node.args.args) - len(node.args.defaults)
            if not required:
                self.functions.append(node.name)
        elif isinstance(node, ast.ClassDef):
            if any("Module" in ast.unparse(base) for base in node.bases):
                self.modules.append(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                self.names += [part.id for part in parts if isinstance(part, ast.Name)]
                if "epochs" in ast.unparse(target).lower() and isinstance(node.value, ast.Constant):
                    self.epochs = ast.unparse(node.value)
        elif isinstance(node, ast.If):
            self.guarded |= "__name__" in ast.unparse(node.test)

    def _add_call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        self.task = self.task or TASKS.get(name)
        match node.args:
            case [ast.Constant(str() as folder), *_] if name in RECORDERS:
                self.run = self.run or folder
        if name in OPTIMIZERS and self.optimizer is None:
            settings = [ast.unparse(k) for k in node.keywords if k.arg != "params"]
            settings += [f"lr={ast.unparse(a)}" for a in node.args[1:2]]
            self.optimizer = f"torch.optim.{name}({', '.join(['parameters', *settings])})"
        for keyword in node.keywords:
            if keyword.arg == "batch_size" and isinstance(keyword.value, ast.Constant):
                self.batch_size = self.batch_size or ast.unparse(keyword.value)
        if name == "DataLoader" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            self.batch_size = self.batch_size or ast.unparse(node.args[1])

    def _add_loop(self, node: ast.For) -> None:
        """The epochs of `for epoch in range(5)`."""
        named = "epoch" in ast.unparse(node.target).lower()
        match node.iter:
            case ast.Call(func=ast.Name("range"), args=[ast.Constant() as count]) if named:
                self.epochs = ast.unparse(count)

    def factory(self) -> str | None:
        """What builds the model."""
        named = [n for n in self.functions if any(w in n.lower() for w in ("model", "net"))]
        return next(iter([*named, *self.modules]), None)

    def data(self, *words: str) -> str | None:
        """The value whose name has one of the words, and best also "set" or "data"."""
        fitting = [n for n in self.names if any(w in n.lower() for w in words)]
        fitting = [n for n in fitting if not any(w in n.lower() for w in ("loader", "loss", "acc"))]
        return min(
            fitting, key=lambda n: not any(w in n.lower() for w in ("set", "data")), default=None
        )


def _from_script(script: Path, path: Path) -> str:
    about = _Script.read(script)
    if path.absolute().parent != script.absolute().parent:
        raise CommandError(f"--out {path}: write it beside {script}, which it imports")
    factory, train = about.factory(), about.data("train")
    query = about.data("test", "valid", "val", "query")
    imported = [name for name in (factory, train, query) if name]
    lines = [f'"""Written by `whence init {script}`. Check it: whence doctor {path.name}"""', ""]
    lines += ["import torch", "import whence", ""]
    if imported:
        lines.append(f"from {script.stem} import {', '.join(imported)}")
        if not about.guarded:
            lines.append(
                f'# {EDIT}: put training in {script.name} under if __name__ == "__main__":'
            )
        lines.append("")
    missing = {
        "make_model": None if factory else "a function that builds the untrained model",
        "train_set": None if train else "the training dataset, without augmentation",
        "test_set": None if query else "the examples to explain, in the same format",
    }
    lines += [f"{name} = ...  # {EDIT}: {what}" for name, what in missing.items() if what]
    factory, train, query = factory or "make_model", train or "train_set", query or "test_set"
    optimizer = about.optimizer or "torch.optim.SGD(parameters, lr=0.1)"
    mark = {name: "" if value else f"  # {EDIT}" for name, value in vars(about).items()}
    if about.run:
        runs = json.dumps(about.run)
        origin = [
            f"# The run that {script.name} records. Commands that retrain use the recipe, which",
            f"# must train as {script.name} does: whence doctor {path.name} compares the two.",
        ]
    else:
        runs = 'recipe.run(0, "runs/0")'
        origin = [
            "# The recipe trains the run once. If you recorded your own training loop with a",
            '# whence.Recorder, use its folder instead: runs="runs/mine".',
        ]
    lines += [
        *([] if query == "query" else [f"query = {query}"]),
        f"task = whence.{about.task or 'Classification'}()"
        + ("" if about.task else f"  # {EDIT}: or Regression(), LanguageModeling()"),
        "recipe = whence.Recipe(",
        f"    {factory},",
        "    task,",
        f"    {train},",
        f"    optimizer=lambda parameters: {optimizer},{mark['optimizer']}",
        f"    batch_size={about.batch_size or 64},{mark['batch_size']}",
        f"    epochs={about.epochs or 10},{mark['epochs']}",
        ")",
        *origin,
        f"study = whence.Study({factory}(), task, {train}, runs={runs})",
        "",
    ]
    return "\n".join(lines)


def _relative(target: Path, path: Path) -> str:
    """The path as the study file's folder sees it."""
    return Path(os.path.relpath(target.absolute(), path.absolute().parent)).as_posix()
