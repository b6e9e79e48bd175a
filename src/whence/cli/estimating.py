"""`whence estimate`: what an attribution would take, before anything was trained."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli import settings
from whence.cli.screen import Answer, CommandError, command

if TYPE_CHECKING:
    from torch import nn

    from whence.engine.estimate import Gpu
    from whence.task import Task

MACHINE = "The machine"
INSTALL = "pip install 'whence-tda[huggingface]'"


def whole(option: str, text: str | None) -> int | None:
    """A whole number, at least 1, from a text such as "1e6" or "1,000,000"."""
    if text is None:
        return None
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = 0.5
    if not 1 <= value < 1e18 or value != int(value):
        raise CommandError(f"{option} {text}: give a whole number, at least 1, such as 1e6")
    return int(value)


@command()
def estimate(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="A Hugging Face model by its name, folder or config.json, or your own: "
            "`module:function`, a function that returns a model. No weights are loaded.",
        ),
    ],
    examples: Annotated[str, typer.Option(metavar="N", help="Training examples, such as 1e6.")],
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of an example. Default: 512.")
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="Instead of tokens: the shape of an example, such as 3x32x32, of a classifier.",
        ),
    ] = None,
    queries: Annotated[str, typer.Option(metavar="N", help="Queries.")] = "100",
    checkpoints: Annotated[
        int, typer.Option(min=1, metavar="INT", help="Checkpoints of the run.")
    ] = 6,
    method: Annotated[str, typer.Option(metavar="METHOD", help="Method.")] = "source",
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="That trains: sgd, adam, adamw or rmsprop.")
    ] = "sgd",
    query_rank: Annotated[
        str | None,
        typer.Option(metavar="INT", help='Rank of query factors, or "auto".'),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="Keep only the strongest examples.")
    ] = None,
    gpus: Annotated[
        str, typer.Option(metavar="N", help="GPUs that share the work.", rich_help_panel=MACHINE)
    ] = "1",
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="b200, h200, h100, a100, a100-40gb, l40s, rtx4090, a10g or mi300x.",
            rich_help_panel=MACHINE,
        ),
    ] = "h100",
    flops: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            metavar="NUMBER",
            help="Of another GPU: operations per second in this dtype, by its data sheet.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=1.0, metavar="NUMBER", help="Its bytes per second.", rich_help_panel=MACHINE
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help='Its memory, such as "80GB".', rich_help_panel=MACHINE),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="float32, tf32 or bfloat16.", rich_help_panel=MACHINE),
    ] = "float32",
    sharded: Annotated[
        bool,
        typer.Option(
            "--sharded",
            help="The model is divided among the GPUs (FSDP2).",
            rich_help_panel=MACHINE,
        ),
    ] = False,
) -> Answer:
    """Estimate time, memory, network and disk before anything was trained.

    The model is built without weights. If it does not fit, the answer says which setting helps.

    Examples:

    - `whence estimate --model gpt2 --examples 1e6 --tokens 512 --gpus 8 --gpu h100`
    - `whence estimate --model my_models:resnet --input 3x32x32 --examples 50000 --gpu a100`
    """
    counts = {
        "examples": whole("--examples", examples),
        "queries": whole("--queries", queries),
        "gpus": whole("--gpus", gpus),
    }
    length, shape = whole("--tokens", tokens), _shape(input)
    if tokens is not None and shape is not None:
        raise CommandError("--tokens together with --input: give one of them")
    rank: int | str | None = (
        query_rank if query_rank == "auto" else whole("--query-rank", query_rank)
    )
    chosen = settings.constructor(settings.find(method))
    if not hasattr(chosen, "counted"):
        raise CommandError(f"--method {method} has no estimate: use source, influence or tracin")
    machine = _gpu(gpu, dtype, flops, bandwidth, memory)
    network, task, batch = _built(model, length or 512, shape)
    from whence.engine.estimate import estimate as of

    result = of(
        network,
        task,
        batch,
        chosen(),
        checkpoints=checkpoints,
        gpu=machine,
        dtype=dtype,
        query_rank=rank,
        top=top,
        sharded=sharded,
        optimizer=optimizer,
        **counts,  # type: ignore[arg-type]
    )
    data = asdict(result) | {"hours": result.hours, "fits": result.fits, "limit": result.limit}
    return Answer(data, str(result))


def _shape(text: str | None) -> list[int] | None:
    if text is None:
        return None
    sizes = text.lower().split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise CommandError(f"--input {text}: give sizes, such as 784 or 3x32x32")
    return [int(size) for size in sizes]


def _gpu(
    name: str, dtype: str, flops: float | None, bandwidth: float | None, memory: str | None
) -> Gpu | str:
    """A known GPU; given numbers replace those of its data sheet."""
    from whence.engine.estimate import DTYPES, GPUS
    from whence.engine.estimate import Gpu as Sheet
    from whence.engine.options import allowance

    if dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    known = GPUS.get(name.lower())
    if known is None and (flops is None or bandwidth is None or memory is None):
        raise CommandError(
            f"--gpu {name} is not known: use one of {', '.join(GPUS)}, or describe it by --flops, "
            "--bandwidth and --memory"
        )
    sheet = known or Sheet(0, 0, 0, 0, 0)
    if flops is not None:
        single = flops / 1e12 if known is None else known.float32
        sheet = replace(sheet, **({"float32": single} | {dtype: flops / 1e12}))
    if bandwidth is not None:
        sheet = replace(sheet, bandwidth=bandwidth / 1e12)
    if memory is not None:
        import torch

        sheet = replace(sheet, memory=allowance(memory, torch.device("cpu")) / 1e9)
    return sheet


def _built(name: str, tokens: int, shape: list[int] | None) -> tuple[nn.Module, Task, Any]:
    """The model on the meta device, its task, and a batch of two examples."""
    import torch

    from whence.language import LanguageModeling
    from whence.task import Classification

    with torch.device("meta"):
        model = _own(name) if ":" in name else _hugging_face(name)
        labels = torch.zeros(2, dtype=torch.long)
        if shape is not None:
            return model, Classification(), (torch.zeros(2, *shape), labels)
        ids = torch.zeros(2, tokens, dtype=torch.long)
        if getattr(model, "config", None) is None:
            return model, LanguageModeling(), ids
        generates = bool(getattr(model, "can_generate", lambda: False)())
        task = LanguageModeling() if generates else Classification()
        return model, task, {"input_ids": ids} | ({} if generates else {"labels": labels})


def _own(name: str) -> nn.Module:
    from torch import nn

    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise CommandError(
            f"--model {name}: {error}. Give module:function, of a module that Python can import "
            "from here"
        ) from None
    finally:
        sys.path.remove(str(Path.cwd()))
    model, problem = None, "it is a model already, with weights"
    if not isinstance(make, nn.Module):
        try:
            model = make()
            problem = f"it returned {type(model).__name__}, not a torch.nn.Module"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    if not isinstance(model, nn.Module):
        raise CommandError(
            f"--model {name}: {problem}. Give a function that returns the model, without arguments"
        )
    return model


def _hugging_face(name: str) -> nn.Module:
    """By the class that the configuration names, or a language model, or a classifier."""
    try:
        import transformers
    except ImportError:
        raise CommandError(f"--model {name} needs transformers: {INSTALL}") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # which warns of every retry
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise CommandError(
            f"--model {name}: no configuration ({reason}). Give the name of a model on the Hugging "
            "Face Hub, a folder or a config.json, or module:function"
        ) from None
    named = [getattr(transformers, n, None) for n in getattr(config, "architectures", None) or ()]
    heads = [cls for cls in named if cls is not None and _has_head(cls.__name__)]
    if heads:
        return heads[0](config)  # type: ignore[no-any-return]
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    causal = causal and getattr(config, "is_decoder", True) is not False
    kind = "AutoModelForCausalLM" if causal else "AutoModelForSequenceClassification"
    try:
        return getattr(transformers, kind).from_config(config)  # type: ignore[no-any-return]
    except ValueError:
        raise CommandError(
            f"--model {name}: {config.model_type} is neither a language model nor a classifier of "
            "texts. Give module:function"
        ) from None


def _has_head(name: str) -> bool:
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForSequenceClassification"))
