"""`whence estimate`: what an attribution would take, before training."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli import settings
from whence.cli.options import imported
from whence.cli.screen import Answer, CommandError, command
from whence.cli.signature import POSITIVE

if TYPE_CHECKING:
    from torch import nn

    from whence.engine.estimate import Gpu
    from whence.task import Task

machine_option = partial(typer.Option, rich_help_panel="The machine")
MACHINE = machine_option()
HEADS = ("ForCausalLM", "LMHeadModel", "ForSequenceClassification")  # ends of class names
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
    model: str,
    examples: str,
    tokens: str | None = None,
    input: str | None = None,
    queries: str = "100",
    checkpoints: Annotated[int, POSITIVE] = 6,
    method: str = "source",
    optimizer: str = "sgd",
    query_rank: str | None = None,
    top: Annotated[int | None, POSITIVE] = None,
    gpus: Annotated[str, MACHINE] = "1",
    gpu: Annotated[str, MACHINE] = "h100",
    flops: Annotated[float | None, machine_option(min=1.0)] = None,
    bandwidth: Annotated[float | None, machine_option(min=1.0)] = None,
    memory: Annotated[str | None, MACHINE] = None,
    dtype: Annotated[str, MACHINE] = "float32",
    sharded: Annotated[bool, MACHINE] = False,
) -> Answer:
    """Estimate time, memory, network and disk before training.

    The model is built without weights. If it does not fit, the answer says which setting helps.

    Examples:

    - `whence estimate --model gpt2 --examples 1e6 --tokens 512 --gpus 8 --gpu h100`
    - `whence estimate --model my_models:resnet --input 3x32x32 --examples 50000 --gpu a100`

    Args:
        model (MODEL): A Hugging Face model by its name, folder or config.json, or your own:
            `module:function`, a function that returns a model. No weights are loaded.
        examples (N): Number of training examples, such as 1e6.
        tokens (N): Tokens per example. Default: 512.
        input (SHAPE): For a classifier without tokens: shape of an example, such as 3x32x32.
        queries (N): Number of queries.
        checkpoints: Number of checkpoints of the run.
        method (METHOD): Method to attribute with.
        optimizer (NAME): Optimizer of the training: sgd, adam, adamw or rmsprop.
        query_rank (INT): Rank of query factors, or "auto".
        top: Keep only the strongest examples.
        gpus (N): GPUs that share the work.
        gpu (NAME): b200, h200, h100, a100, a100-40gb, l40s, rtx4090, a10g or mi300x.
        flops (NUMBER): For another GPU: operations per second in this dtype, from its data sheet.
        bandwidth (NUMBER): For another GPU: bytes per second that its memory moves.
        memory (SIZE): For another GPU: its memory, such as "80GB".
        dtype (DTYPE): float32, tf32 or bfloat16.
        sharded: The model is divided among the GPUs (FSDP2).
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
    from whence.engine.workspace import allowance

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
        # of a card that is not known, the other dtypes are taken to be as fast
        rates = dict.fromkeys(DTYPES if known is None else [dtype], flops / 1e12)
        sheet = replace(sheet, **rates)
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
    import torch
    from torch import nn

    with torch.device("cpu"):  # a module may make tensors, or even train, when it is imported
        make = imported("--model", name, call=False)
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
    return model.to("meta")  # with buffers that it takes from its module


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
    heads = [cls for cls in named if cls is not None and cls.__name__.endswith(HEADS)]
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
