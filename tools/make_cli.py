"""Write docs/cli.md: the text below, and a reference generated from the commands' own help.

python -m tools.make_cli
"""

# ruff: noqa: E501 (lines of Markdown)
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from whence.cli import settings
from whence.cli.app import build
from whence.integrations.study_yaml import KEYS

PAGE = Path(__file__).parents[1] / "docs/cli.md"
INTRO = """# The command line

```console
$ pip install 'whence-tda[cli]'
$ whence demo                                # a one-minute tour; needs 'whence-tda[demo]'
```

All other commands take a **study file**: one Python file that describes what was trained.

```python
# study.py
import torch
from torch import nn
from torch.utils.data import TensorDataset

import whence

torch.manual_seed(0)                         # every command runs this file: same data each time
x, y = torch.randn(500, 8), torch.randint(0, 3, (500,))
train, query = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


recipe = whence.Recipe(
    make_model, whence.Classification(), train,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=50, epochs=10,
)
study = whence.Study(
    make_model(), whence.Classification(), train,
    runs=recipe.run(seed=0, out="runs/0"),   # trains the first time; later it opens the run
)
```

`whence init train.py` writes such a file from your script, from the output folder of a Hugging Face Trainer, or from a
Lightning checkpoint.

```console
$ whence doctor study.py                     # check it, and estimate the time
$ whence attribute study.py --method source --segments 3 --out scores/source
$ whence top scores/source --query 3 --study study.py
$ whence report scores/source --study study.py -o report.html
$ whence card scores/source --query 3 --study study.py -o card.svg
$ whence explore scores/source --study study.py
$ whence whatif scores/source --examples 3,14,159 --study study.py --retrain 5
$ whence audit study.py scores/source -o audit.csv
$ whence select study.py scores/source --drop 5%
$ whence truth study.py --subsets 100 --seeds 10 --out truth/0
$ whence lds scores/* --truth truth/0
```

![whence init writes study.py, whence attribute computes scores, and whence top, card, report, explore and whatif answer from them](figures/guide-cli.png)

## The study file

It must define `study`, a [`whence.Study`](api.md). It may also define:

| name | |
|---|---|
| `query` | the queries, a dataset built like the training data. Choose another name with `--query NAME` |
| `recipe` | a `whence.Recipe`, for the commands that retrain: `truth`, `removal`, `select`, `whatif --retrain`, `--method leaveoneout`, and the explorer's *what if* |
| `classes`, `columns` | names of classes and features |
| `tokenizer`, `renderer` | turns token ids into text; turns an example into something to show |

If your file uses one of the last four names for something else (`columns = 3`), it is ignored with a
warning.

The run can also come from a [Recorder](record.md): `runs="runs/mnist"`. The file is imported, so a training
script can be its own study file, with the training under `if __name__ == "__main__":`. Relative paths start
from the folder of the file. The file runs with your permissions: use only files that you
trust.

### A YAML for Hugging Face folders

For the output folder of a `transformers.Trainer`, a YAML file is enough. Install `whence-tda[cli,huggingface]`.

```yaml
# study.yaml
output_dir: out/my-model               # with its checkpoint-* folders
task: causal-lm                        # or sequence-classification
train: train.jsonl                     # as the Trainer saw it: .jsonl, .csv, or .txt line by line
query: questions.jsonl
columns: {text: answer, prompt: question}   # prompt tokens have no loss
max_length: 512
```

KEYS

Tokenizer and architecture come from the last checkpoint, unless you name others. Nothing is downloaded, and
nothing is unpickled. Give all of the Trainer's data, in any fixed order. Models with adapters (PEFT), other
tasks and other collators need a `study.py`.

## For machines

- `--json` prints only the answer on stdout. Progress, warnings and the output of the study file go to
  stderr. NaN is `null`.
- Exit codes: 0 success, 1 failure, 2 bad input (a wrong option, file or setting), 130 interrupted.
- Progress bars with the remaining time appear on a terminal, and never in a log file; `--no-progress` hides them.
- Tab completion: `whence --install-completion`, once.
- `fit`, `attribute`, `truth`, `select`, `removal` and `reproduce` **resume**: after Ctrl-C or a killed job, run the same
  command again. The result is bit-identical to an uninterrupted run.
- `WHENCE_DEBUG=1` before a command shows tracebacks.
"""


def page() -> str:
    """The page as a text."""
    program: Any = typer.main.get_command(build())
    keys = "\n".join(["| key | |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in KEYS.items())])
    parts = [INTRO.replace("KEYS", keys).rstrip(), "## Reference"]
    for name, command in program.commands.items():
        if name not in ("demo", "reproduce"):
            parts.append(_command(name, command))
    parts += ["### Settings of the methods", *(_method(name) for name in settings.OPTIONS)]
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> str:
    text = re.sub(r"^Examples:$", "", command.help or "", flags=re.M)
    description, _, examples = text.partition("\n- ")
    lines = [f"### whence {name}", " ".join(description.split())]
    if examples:
        commands = re.findall(r"`(whence [^`]*)`", examples)
        lines.append("```console\n" + "\n".join(f"$ {line}" for line in commands) + "\n```")
    rows = []
    for parameter in command.params:
        panel = getattr(parameter, "rich_help_panel", None) or ""
        if parameter.hidden or panel.startswith("Settings of") or parameter.name == "help":
            continue
        rows.append(f"| {_names(parameter)} | {_cell(parameter.help or '')}{_default(parameter)} |")
    lines.append("\n".join(["| argument | |", "|---|---|", *rows]))
    if name in ("fit", "attribute"):
        lines.append("Plus the settings of the method: [below](#settings-of-the-methods).")
    return "\n\n".join(lines)


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag or not parameter.metavar else f"{names} {parameter.metavar}"


def _default(parameter: Any) -> str:
    value = parameter.default
    plain = isinstance(value, (str, int, float, Path)) and not isinstance(value, bool)
    return f" Default: {value}." if plain and "Default" not in (parameter.help or "") else ""


def _method(name: str) -> str:
    rows = []
    for setting, option in settings.typed(name).items():
        value = "" if settings.is_switch(option) else f" {settings.metavar(option)}"
        flag = settings.flag(setting, option)
        rows.append(f"| `{flag}`{value} | {_cell(settings.help_text(option))} |")
    return "\n".join([f"`--method {name}`:", "", "| setting | |", "|---|---|", *rows])


def _cell(text: str) -> str:
    text = re.sub(r"\[(\S+)\]$", r"Default: \1.", text)
    return text.replace("|", "\\|").replace("[", "\\[")


if __name__ == "__main__":
    PAGE.write_text(page())
