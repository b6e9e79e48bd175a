"""Real Hugging Face models, tiny and random: what is captured is autograd's, whatever the padding,
the batches, the attention, the wrappers and the precision.

The brute force goes one document at a time, without any padding.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import dense
import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor, nn

import whence
from whence.run import RunError

hf = pytest.importorskip("transformers")

EXACT = {"dtype": torch.float64, "progress": False}
VOCABULARY = 13
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine's speed takes longer than any of these attributions."""
    monkeypatch.setattr("whence.curvature.cost.rate", lambda *_: 1e10)


# --- models ---------------------------------------------------------------------------------------


def bert(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        num_labels=3,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return hf.BertForSequenceClassification(config)


def gpt2(attention: str = "sdpa", depth: int = 2) -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=8,
        n_layer=depth,
        n_head=2,
        n_positions=32,
        n_inner=12,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return hf.GPT2LMHeadModel(config)


def llama(attention: str = "sdpa", **settings: Any) -> Any:
    """Four heads on two of keys and values, and a head of its own."""
    torch.manual_seed(0)
    plain = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "attn_implementation": attention,
    }
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(plain | settings)))


def vit(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = hf.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=3,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return hf.ViTForImageClassification(config)


def blocks(*names: str, depth: int = 2) -> list[str]:
    return [name.replace("#", str(k)) for k in range(depth) for name in names]


#: what is left out of each by default
LEFT_OUT: dict[Make, list[str]] = {
    bert: [
        *(f"bert.embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")),
        "bert.embeddings.LayerNorm",
        *blocks("bert.encoder.layer.#.attention.output.LayerNorm"),
        *blocks("bert.encoder.layer.#.output.LayerNorm"),
    ],
    gpt2: [
        *("transformer.wte", "transformer.wpe", "transformer.ln_f"),
        *blocks("transformer.h.#.ln_1", "transformer.h.#.ln_2"),
    ],
    llama: [
        *("model.embed_tokens", "model.norm"),
        *blocks("model.layers.#.input_layernorm", "model.layers.#.post_attention_layernorm"),
    ],
    vit: [
        *("vit.embeddings", "vit.layernorm"),
        *blocks("vit.layers.#.layernorm_before", "vit.layers.#.layernorm_after", depth=1),
    ],
}


# --- data -----------------------------------------------------------------------------------------


def documents(*lengths: int, seed: int = 0, classes: int = 0) -> list[dict[str, Any]]:
    """Documents of these lengths, as lists of token ids; with a label where there are classes."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        row: dict[str, Any] = {
            "input_ids": torch.randint(1, VOCABULARY, (length,), generator=g).tolist()
        }
        if classes:
            row["labels"] = int(torch.randint(classes, (), generator=g))
        rows.append(row)
    return rows


def prompted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same documents, without a loss on some of their tokens."""
    marked = []
    for k, row in enumerate(rows):
        labels = [-100 if t < k % 3 or t == 4 else x for t, x in enumerate(row["input_ids"])]
        marked.append(row | {"labels": labels})
    return marked


def padded(extra: int = 0, side: str = "right", positions: bool = False) -> Callable[..., Any]:
    """A collate that pads a batch to its longest document, and `extra` more."""

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        width = max(len(row["input_ids"]) for row in rows) + extra
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0, "position_ids": 0}

        def put(name: str, values: list[int]) -> list[int]:
            pads = [fill[name]] * (width - len(values))
            return pads + values if side == "left" else values + pads

        batch: dict[str, list[Any]] = {}
        for row in rows:
            lists = {name: value for name, value in row.items() if isinstance(value, list)}
            lists["attention_mask"] = [1] * len(row["input_ids"])
            if positions:
                lists["position_ids"] = list(range(len(row["input_ids"])))
            whole = {name: put(name, values) for name, values in lists.items()}
            for name, value in ({**row} | whole).items():
                batch.setdefault(name, []).append(value)
        return {name: torch.tensor(values) for name, values in batch.items()}

    return collate


def images(n: int, seed: int = 0) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randn(n, 2, 8, 8, generator=g, dtype=torch.float64)
    return [{"pixel_values": x, "labels": k % 3} for k, x in enumerate(pixels)]


TRAIN, QUERY = documents(4, 7, 2, 5, 3, 6, 7), documents(5, 3, 6, seed=1)


def case(make: Make) -> tuple[Any, Any, Any, Any]:
    """task, train, query, collate."""
    if make is vit:
        return whence.Classification("loss"), images(7), images(3, seed=1), None
    if make is bert:
        data = documents(4, 7, 2, 5, 3, 6, 7, classes=3), documents(5, 3, 6, seed=1, classes=3)
        return whence.Classification(), *data, padded()
    return whence.LanguageModeling(), TRAIN, QUERY, padded()


# --- the brute force ------------------------------------------------------------------------------


def once(model: nn.Module, **options: Any) -> whence.Run:
    """A run of one update at rate 1: TracIn is then minus the product of gradients."""
    return whence.Run.from_checkpoints([model.state_dict()], [1], 1.0, **options)


def rows(
    model: nn.Module, names: Sequence[str], data: Any, value: Any, task: Any, collate: Any
) -> Tensor:
    """Gradients of these parameters, example by example, each alone."""
    parameters = dict(model.named_parameters())
    wanted = [parameters[name] for name in names]
    found = []
    for batch in dense.examples(data, collate or dense.default_collate):
        (number,) = value(task.outputs(model, batch), batch)
        parts = torch.autograd.grad(number, wanted, allow_unused=True, materialize_grads=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


def products(
    model: nn.Module, names: Sequence[str], train: Any, query: Any, task: Any, collate: Any
) -> np.ndarray:
    model = copy.deepcopy(model).double().eval().requires_grad_(True)
    left = rows(model, names, query, task.measurements, task, collate)
    return -(left @ rows(model, names, train, task.losses, task, collate).T).numpy()


def of_module(name: str) -> str:
    return name.rpartition(".")[0] or "(model)"


def kept(model: nn.Module, left_out: Sequence[str]) -> list[str]:
    return [name for name, _ in model.named_parameters() if of_module(name) not in left_out]


def close(values: Any, expected: Any, tolerance: float = 1e-9) -> None:
    values, expected = np.asarray(values), np.asarray(expected)
    assert values.shape == expected.shape
    error = abs(values - expected).max() / abs(expected).max()
    assert error <= tolerance, f"relative error {error:.2e}"


def quiet(method: Any, study: whence.Study, query: Any = None, **options: Any) -> whence.Scores:
    """Attributed exactly, without the warning about what is left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left out")
        return method.attribute(study, query, **(EXACT | options))


def check(
    model: nn.Module,
    train: Any,
    query: Any,
    left_out: Sequence[str],
    task: Any,
    collate: Any = None,
    *,
    names: Sequence[str] | None = None,
    run: whence.Run | None = None,
    layers: Any = None,
    tolerance: float = 1e-9,
) -> whence.Scores:
    """TracIn is autograd's on every parameter but those of the modules that are left out.

    The queries are one batch and the training data are several.
    """
    study = whence.Study(model, task, train, run or once(model), collate=collate, layers=layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = whence.TracIn().attribute(study, query, batch_size=3, **EXACT)
    assert sorted(part["name"] for part in scores.excluded) == sorted(left_out)
    told = [str(w.message) for w in caught if "left out" in str(w.message)]
    assert len(told) == 1 and all(name in told[0] for name in left_out)
    wanted = kept(model, left_out) if names is None else names
    expected = products(model, wanted, train, query, task, collate)
    close(scores.values, expected, tolerance)
    return scores


def reasons(scores: whence.Scores) -> dict[str, str]:
    return {part["name"]: part["reason"] for part in scores.excluded}


def exactness(make: Make) -> float:
    return 1e-5 if make is llama else 1e-9  # RMSNorm and the rotations are in float32 always


# --- every architecture ---------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", LEFT_OUT)
def test_every_layer_is_autograd(make: Make, attention: str) -> None:
    task, train, query, collate = case(make)
    model = make(attention).double()
    assert model.config._attn_implementation == attention
    left_out = LEFT_OUT[make]
    scores = check(model, train, query, left_out, task, collate, tolerance=exactness(make))
    if make is gpt2:
        assert "lm_head is tied to transformer.wte" in reasons(scores)["transformer.wte"]


@pytest.mark.parametrize("curvature", ["kfac", "ekfac"])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("make", LEFT_OUT)
def test_curvature_knows_what_is_padding(make: Make, fisher: str, curvature: str) -> None:
    """Covariances of padded batches are those of documents alone, positions counted too."""
    task, train, query, collate = case(make)
    model = make().double()
    history = models.stationary(model, [1], 1.0)
    oracle = dense.Dense(model, task, train, history, query, collate=collate or _default)
    study = whence.Study(model, task, train, history.run, collate=collate)
    method = whence.Influence(1e-3, curvature, fisher)
    found = quiet(method, study, query, batch_size=4).values
    close(found, oracle.influence(1e-3, curvature, fisher), exactness(make))


_default = dense.default_collate


@pytest.mark.parametrize("make", [gpt2, llama])
def test_source_with_padding(make: Make) -> None:
    task, train, query, collate = case(make)
    model = make().double()
    history = models.stationary(model, [2, 4, 5], 0.1)
    oracle = dense.Dense(model, task, train, history, query, collate=collate)
    study = whence.Study(model, task, train, history.run, collate=collate)
    method = whence.Source(2, fisher="empirical")
    scores = quiet(method, study, query, batch_size=3, by_segment=True)
    expected = oracle.source(2, fisher="empirical")
    close(scores.by_segment, expected, exactness(make))
    close(scores.values, expected.sum(0), exactness(make))


# --- language modeling: which tokens count --------------------------------------------------------


@pytest.mark.parametrize("marked", [False, True], ids=["every token", "some tokens"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_the_models_own(reduction: str, marked: bool) -> None:
    """Hugging Face's own loss of a document alone is the mean over its labelled tokens."""
    change = prompted if marked else list
    train, query, model = change(TRAIN), change(QUERY), gpt2().double().eval()
    task, collate = whence.LanguageModeling(reduction), padded()
    batch = collate(train)
    found = task.losses(task.outputs(model, batch), batch)
    for row, loss in zip(train, found, strict=True):
        labels = torch.tensor([row.get("labels", row["input_ids"])])
        count = int((labels[0, 1:] != -100).sum())
        own = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss if count else 0
        assert float(loss) == pytest.approx(float(own) * (count if reduction == "sum" else 1))
    check(model, train, query, LEFT_OUT[gpt2], task, collate)


def test_padding_without_a_mask_is_told_by_its_labels() -> None:
    """Causal attention never looks at padding on the right."""

    def unmasked(rows: Any) -> Any:
        return {name: x for name, x in padded()(rows).items() if name != "attention_mask"}

    train, query = ([r | {"labels": r["input_ids"]} for r in data] for data in (TRAIN, QUERY))
    check(gpt2().double(), train, query, LEFT_OUT[gpt2], whence.LanguageModeling(), unmasked)


def test_plain_token_ids() -> None:
    """Tensors, not mappings: as packed documents of one length come."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.utils.data.TensorDataset(torch.randint(VOCABULARY, (9, 6), generator=g))
    train, query = (torch.utils.data.Subset(tokens, range(*ends)) for ends in ((0, 6), (6, 9)))
    check(gpt2().double(), train, query, LEFT_OUT[gpt2], whence.LanguageModeling())


# --- padding and batches change nothing -----------------------------------------------------------

METHODS: dict[str, Callable[[], Any]] = {
    "TracIn": whence.TracIn,
    "Influence": lambda: whence.Influence(1e-3),
    "Source": lambda: whence.Source(1),
    "FastSource": lambda: whence.FastSource(1),
}


def attributed(
    model: Any, method: Any, train: Any, query: Any, collate: Any, task: Any = None, **options: Any
) -> np.ndarray:
    study = whence.Study(
        model, task or whence.LanguageModeling(), train, once(model), collate=collate
    )
    return quiet(method, study, query, **options).values


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_more_padding(make: Make, method: str) -> None:
    task, train, query, _ = case(make)
    found = [
        attributed(make(), METHODS[method](), train, query, padded(k), task, batch_size=8)
        for k in (0, 5)
    ]
    close(found[1], found[0], exactness(make))


@pytest.mark.parametrize("selves", [False, True], ids=["queries", "self-influence"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_batches_of_ragged_documents(make: Make, method: str, selves: bool) -> None:
    """Each batch is padded to its own longest document."""
    task, train, query, collate = case(make)
    query = None if selves else query
    found = [
        attributed(make(), METHODS[method](), train, query, collate, task, batch_size=size)
        for size in (8, 3, 2, 1)
    ]
    for other in found[1:]:
        close(other, found[0], exactness(make))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [gpt2, bert])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 3)], ids=["only those", "and longer"])
def test_documents_of_one_token(make: Make, method: str, lengths: tuple[int, ...]) -> None:
    """Where a batch holds no longer one, a layer sees a single position."""
    task, classes = case(make)[0], 3 if make is bert else 0
    train = documents(1, 1, 4, 2, 1, classes=classes)
    query = documents(*lengths, 1, seed=1, classes=classes)
    found = [
        attributed(make(), METHODS[method](), train, query, padded(k), task, batch_size=size)
        for k, size in ((2, 8), (0, 8), (0, 2), (0, 1))
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-9 * (1e-9 + abs(found[0]).max()))
    if make is bert:
        assert abs(found[0]).max() > 0  # a language model has nothing to predict in one token


@pytest.mark.parametrize("method", ["TracIn", "Influence"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_padding_on_the_left(make: Make, method: str) -> None:
    """As many tokenizers do; the positions are told to the model."""
    ways = {
        "TracIn": whence.TracIn(),
        "Influence": whence.Influence(1e-3, fisher="empirical"),
    }
    found = [
        attributed(
            make(), ways[method], TRAIN, QUERY, padded(side=side, positions=True), batch_size=8
        )
        for side in ("right", "left")
    ]
    close(found[1], found[0], exactness(make))


def test_draws_do_not_depend_on_padding_on_the_left() -> None:
    """No score depends on how batches were cut, those of the sampled Fisher neither."""
    collate = padded(side="left", positions=True)
    found = [
        attributed(gpt2(), whence.Influence(1e-3), TRAIN, QUERY, collate, batch_size=size)
        for size in (8, 2, 1)
    ]
    for other in found[1:]:
        close(other, found[0])


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{k}": k for k in range(2, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )


@pytest.mark.parametrize("make", [gpt2, bert])
def test_hugging_faces_own_tokenizer_and_collators(make: Make) -> None:
    """Encodings are padded batch by batch; "label" becomes "labels"; -100 is put on padding."""
    own, classes = tokenizer(), make is bert
    texts = ["w3 w4", "w5 w2 w7 w9 w2", "w8", "w4 w4 w11 w3", "w6 w12 w2", "w2 w9 w9 w9 w9 w3"]
    if classes:
        collate: Any = hf.DataCollatorWithPadding(own)
        data = [dict(own(text)) | {"label": k % 3} for k, text in enumerate(texts)]
    else:
        collate = hf.DataCollatorForLanguageModeling(own, mlm=False)
        data = [dict(own(text)) for text in texts]
    task = whence.Classification() if classes else whence.LanguageModeling()
    plain = collate(data[:2])
    assert {"input_ids", "attention_mask"} <= plain.keys() and plain["attention_mask"].min() == 0
    check(make().double(), data, data[:3], LEFT_OUT[make], task, collate)
    found = [
        attributed(make(), whence.Influence(1e-3), data, data, collate, task, batch_size=size)
        for size in (6, 2)
    ]
    close(found[1], found[0])


# --- choosing layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "layers", "chosen"),
    [
        (gpt2, ["*.mlp.*"], blocks("transformer.h.#.mlp.c_fc", "transformer.h.#.mlp.c_proj")),
        (gpt2, "*attn*", blocks("transformer.h.#.attn.c_attn", "transformer.h.#.attn.c_proj")),
        (gpt2, ["transformer.h.1.*.c_proj"], ["transformer.h.1.attn.c_proj"] * 2),
        (llama, ["*.mlp.*"], blocks(*(f"model.layers.#.mlp.{k}_proj" for k in "gate up down"))),
        (llama, ["*attn.[kv]_proj", "lm_head"], ["lm_head"]),
        (bert, ["*attention*"], []),
        (vit, ["*.mlp.*", "*projection"], []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_patterns(make: Make, layers: Any, chosen: list[str]) -> None:
    task, train, query, collate = case(make)
    model = make().double()
    patterns = [layers] if isinstance(layers, str) else layers
    kinds = [n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")]
    kinds += [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    from fnmatch import fnmatchcase

    wanted = [name for name in kinds if any(fnmatchcase(name, p) for p in patterns)]
    assert wanted and set(chosen) <= set(wanted)
    names = [name for name, _ in model.named_parameters() if of_module(name) in wanted]
    left_out = {of_module(name) for name, _ in model.named_parameters()} - set(wanted)
    scores = check(
        model,
        train,
        query,
        sorted(left_out),
        task,
        collate,
        names=names,
        layers=layers,
        tolerance=exactness(make),
    )
    plain = [name for name in kinds if name in left_out]
    assert plain and all(reasons(scores)[name] == "not chosen" for name in plain)
