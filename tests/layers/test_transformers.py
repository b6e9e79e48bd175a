"""Real Hugging Face models, tiny and random: what is captured is autograd's, whatever the padding,
the batches, the attention, the wrappers and the precision.

The brute force goes one document at a time, without any padding.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from support import dense, models, transformers_models
from support.autograd import of_module, reasons
from support.comparing import close
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset, default_collate

import whence
from whence.run import RunError

hf = pytest.importorskip("transformers")

EXACT = {"dtype": torch.float64, "progress": False}
VOCABULARY = 13
Make = Callable[..., Any]


# --- models ---------------------------------------------------------------------------------------


SETTINGS = {"vocab_size": VOCABULARY, "initializer_range": 0.3}


def bert(attention: str = "sdpa") -> Any:
    more = {"num_hidden_layers": 2, "num_labels": 3, "attn_implementation": attention}
    return transformers_models.bert(**SETTINGS, **more)


def gpt2(attention: str = "sdpa", depth: int = 2) -> Any:
    more = {"n_layer": depth, "n_positions": 32, "n_inner": 12, "attn_implementation": attention}
    return transformers_models.gpt2(**SETTINGS, **more)


def llama(attention: str = "sdpa", **settings: Any) -> Any:
    """Four heads on two of keys and values, and a head of its own."""
    plain = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "attn_implementation": attention,
    }
    return transformers_models.llama(**(SETTINGS | plain | settings))


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
    for batch in dense.examples(data, collate or default_collate):
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


def kept(model: nn.Module, left_out: Sequence[str]) -> list[str]:
    return [name for name, _ in model.named_parameters() if of_module(name) not in left_out]


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
    layers: Any = "matrices",
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
    unseen = [k for k, reason in reasons(scores).items() if not reason.startswith("frozen")]
    assert len(told) == bool(unseen)  # it names the largest three
    assert sum(name in message for message in told for name in unseen) >= min(3, len(unseen))
    wanted = kept(model, left_out) if names is None else names
    expected = products(model, wanted, train, query, task, collate)
    close(scores.values, expected, tolerance)
    return scores


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


def gemma() -> Any:
    """Its embedding is scaled, its norms have offsets from 1, and its head is tied."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "head_dim": 4, "vocab_size": 20}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = hf.Gemma2Config(**sizes, **heads, max_position_embeddings=16)
    return hf.Gemma2ForCausalLM(config)


def resnet() -> Any:
    """The bottleneck blocks of a ResNet-50."""
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 2], "num_channels": 2}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_labels=3))


@pytest.mark.parametrize("make", [bert, gpt2, llama, vit, gemma, resnet])
def test_nothing_is_left_out(make: Make) -> None:
    """Of stock models, all parameters are tracked, and exactly."""
    task, train, query, collate = case(vit if make is resnet else make)
    model = make().double()
    exact = exactness(llama if make is gemma else make)
    scores = check(model, train, query, [], task, collate, layers="all", tolerance=exact)
    assert scores.left_out[0] == 0 and "all" in scores.diagnostics["tracked"]


def mixtral(implementation: str = "eager") -> Any:
    """Three experts, of which each token uses two."""
    sizes = {"hidden_size": 8, "intermediate_size": 6, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = hf.MixtralConfig(
        **SETTINGS, **sizes, **heads, num_local_experts=3, experts_implementation=implementation
    )
    return hf.MixtralForCausalLM(config)


def gpt_oss() -> Any:
    """Experts with biases, whose weights are stored transposed and interleaved."""
    torch.manual_seed(0)
    config = hf.GptOssConfig(
        **SETTINGS,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        layer_types=["full_attention"],
        pad_token_id=None,
        experts_implementation="eager",
    )
    model = hf.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts(implementation: str) -> None:
    model = mixtral(implementation).double()
    task = whence.LanguageModeling()
    check(model, TRAIN, QUERY, [], task, padded(), layers="all", tolerance=1e-5)


def test_experts_with_biases() -> None:
    """And the sinks of attention, single parameters beside its projections."""
    model, task = gpt_oss().double(), whence.LanguageModeling()
    check(model, TRAIN, QUERY, [], task, padded(), layers="all", tolerance=1e-5)


@pytest.mark.parametrize("curvature", ["auto", "ekfac", "kfac", "diagonal"])
def test_experts_do_not_depend_on_batches_and_padding(curvature: str) -> None:
    model, task = mixtral().double(), whence.LanguageModeling()
    # an expert that no token is sent to
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[2] = 0.0
            layer.mlp.gate.weight[:2] = layer.mlp.gate.weight[:2].abs()
            layer.post_attention_layernorm.weight.fill_(1.0)
    method = whence.Influence(damping=0.1, curvature=curvature, fisher="empirical")
    every = []
    for size, collate in ((1, padded()), (3, padded()), (7, padded(extra=2))):
        study = whence.Study(model, task, TRAIN, once(model), collate=collate, layers="all")
        every.append(quiet(method, study, QUERY, batch_size=size).values)
        assert np.isfinite(every[-1]).all()
    close(every[1], every[0], 1e-6)
    close(every[2], every[0], 1e-6)


def test_an_expert_that_no_token_is_sent_to_has_no_gradient() -> None:
    """Scores are those without its weights, and no number is NaN."""
    model, task = mixtral().double(), whence.LanguageModeling()
    experts = "model.layers.0.mlp.experts"

    def never(module: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, index = output
        return logits, weights, index.clamp_max(1)

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(never)
    check(model, TRAIN, QUERY, [], task, padded(), layers="all", tolerance=1e-5)
    study = whence.Study(model, task, TRAIN, once(model), collate=padded(), layers="all")
    scores = quiet(whence.Source(segments=1), study, QUERY, by_layer=True)
    assert np.isfinite(scores.values).all()
    gradients = rows(
        model.requires_grad_(True),
        [f"{experts}.gate_up_proj"],
        TRAIN,
        task.losses,
        task,
        padded(),
    ).view(len(TRAIN), 3, -1)
    assert not gradients[:, 2].any() and gradients[:, :2].any()


@pytest.mark.parametrize(
    ("fisher", "curvature"), [("empirical", "kfac"), ("empirical", "ekfac"), ("exact", "ekfac")]
)
@pytest.mark.parametrize("make", LEFT_OUT)
def test_curvature_knows_what_is_padding(make: Make, fisher: str, curvature: str) -> None:
    """Covariances of padded batches are those of documents alone, positions counted too."""
    task, train, query, collate = case(make)
    model = make().double()
    history = models.stationary(model, [1], 1.0)
    oracle = dense.Dense(model, task, train, history, query, collate=collate or default_collate)
    study = whence.Study(model, task, train, history.run, collate=collate, layers="matrices")
    method = whence.Influence.published(1e-3, curvature, fisher)
    found = quiet(method, study, query, batch_size=4).values
    close(found, oracle.influence(1e-3, curvature, fisher), exactness(make))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_source_with_padding(make: Make) -> None:
    task, train, query, collate = case(make)
    model = make().double()
    history = models.stationary(model, [2, 4, 5], 0.1)
    oracle = dense.Dense(model, task, train, history, query, collate=collate)
    study = whence.Study(model, task, train, history.run, collate=collate, layers="matrices")
    method = whence.Source.published(2, fisher="empirical")
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
    found = task.losses(task.outputs(model, batch), batch).detach()
    for row, loss in zip(train, found, strict=True):
        labels = torch.tensor([row.get("labels", row["input_ids"])])
        count = int((labels[0, 1:] != -100).sum())
        tokens = torch.tensor([row["input_ids"]])
        own = model(input_ids=tokens, labels=labels).loss.item() if count else 0.0
        assert loss.item() == pytest.approx(own * (count if reduction == "sum" else 1))
    check(model, train, query, LEFT_OUT[gpt2], task, collate)


def test_padding_without_a_mask_is_known_from_its_labels() -> None:
    """Causal attention never looks at padding on the right."""

    def unmasked(rows: Any) -> Any:
        return {name: x for name, x in padded()(rows).items() if name != "attention_mask"}

    train, query = ([r | {"labels": r["input_ids"]} for r in data] for data in (TRAIN, QUERY))
    check(gpt2().double(), train, query, LEFT_OUT[gpt2], whence.LanguageModeling(), unmasked)


def test_plain_token_ids() -> None:
    """Tensors, not mappings: as packed documents of one length come."""
    g = torch.Generator().manual_seed(0)
    tokens = TensorDataset(torch.randint(VOCABULARY, (9, 6), generator=g))
    train, query = (Subset(tokens, range(*ends)) for ends in ((0, 6), (6, 9)))
    check(gpt2().double(), train, query, LEFT_OUT[gpt2], whence.LanguageModeling())


# --- padding and batches change nothing -----------------------------------------------------------

METHODS: dict[str, Callable[[], Any]] = {
    "TracIn": whence.TracIn,
    "Influence": lambda: whence.Influence.published(1e-3),
    "Source": lambda: whence.Source.published(1),
    "FastSource": lambda: whence.FastSource.published(1),
}


def attributed(
    model: Any, method: Any, train: Any, query: Any, collate: Any, task: Any = None, **options: Any
) -> np.ndarray:
    layers = options.pop("layers", None)
    task = task or whence.LanguageModeling()
    study = whence.Study(model, task, train, once(model), collate=collate, layers=layers)
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


@pytest.mark.parametrize("curvature", ["auto", "ekfac", "kfac"])
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_padding_and_batches_of_all_layers(make: Make, curvature: str) -> None:
    task, train, query, _ = case(make)
    method = whence.Source(1, curvature=curvature)
    found = [
        attributed(make(), method, train, query, padded(k), task, batch_size=size, layers="all")
        for k, size in ((0, 8), (5, 8), (0, 3), (0, 1))
    ]
    for other in found[1:]:
        close(other, found[0], exactness(make))


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
        "Influence": whence.Influence.published(1e-3, fisher="empirical"),
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
        attributed(gpt2(), whence.Influence.published(1e-3), TRAIN, QUERY, collate, batch_size=size)
        for size in (8, 2, 1)
    ]
    for other in found[1:]:
        close(other, found[0], 1e-9)


@pytest.mark.parametrize("method", ["TracIn", "Influence", "Source"])
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_tokens_of_ragged_documents(make: Make, method: str) -> None:
    """Each document has as many as it is long; padding did nothing."""
    task, train, query, _ = case(make)
    model, way, found = make(), METHODS[method](), []
    for extra in (0, 2):
        study = whence.Study(model, task, train, once(model), collate=padded(extra))
        scores = quiet(way, study, query).values
        found.append(way.tokens(study, query, [4, 1], **EXACT))
        for tokens in found[-1]:
            length = len(train[tokens.example]["input_ids"])
            assert tokens.values.shape == (3, length + extra)
            close(tokens.values.sum(1) + tokens.rest, scores[:, tokens.example], exactness(make))
            assert not tokens.values[:, length:].any()
    for plain, longer in zip(*found, strict=True):
        close(longer.values[:, : plain.values.shape[1]], plain.values, exactness(make))


def test_tokens_of_a_layer_used_again_and_again() -> None:
    """ALBERT has one layer, and calls it as often as it is deep."""
    task, train, query, collate = case(bert)
    torch.manual_seed(0)
    config = hf.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=6,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        num_labels=3,
        initializer_range=0.3,
    )
    model = hf.AlbertForSequenceClassification(config).double()
    study = whence.Study(model, task, train, once(model), collate=collate)
    scores = quiet(whence.TracIn(), study, query)
    left_out = [part["name"] for part in scores.excluded]
    assert not any("attention.query" in name or "ffn" in name for name in left_out)
    expected = products(model, kept(model, left_out), train, query, task, collate)
    close(scores.values, expected, 1e-9)
    for tokens in whence.TracIn().tokens(study, query, [4, 1], **EXACT):
        assert tokens.values.shape == (3, len(train[tokens.example]["input_ids"]))
        close(tokens.values.sum(1) + tokens.rest, scores.values[:, tokens.example], 1e-9)


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
        attributed(
            make(), whence.Influence.published(1e-3), data, data, collate, task, batch_size=size
        )
        for size in (6, 2)
    ]
    close(found[1], found[0], 1e-9)


@pytest.mark.parametrize("length", [None, 2], ids=["ragged", "of one length"])
def test_lists_of_token_ids_without_a_collate(length: int | None) -> None:
    """As a Hugging Face dataset gives them: torch's own collate makes no batch of them."""
    data = [{"input_ids": row["input_ids"][:length]} for row in TRAIN]
    model = gpt2()
    study = whence.Study(model, whence.LanguageModeling(), data, once(model))
    try:
        found = quiet(whence.TracIn(), study, data[:2]).values
    except (TypeError, ValueError, RuntimeError) as error:
        assert "collate=" in str(error)
    else:
        close(found, attributed(gpt2(), whence.TracIn(), data, data[:2], padded()), 1e-9)


# --- choosing layers ------------------------------------------------------------------------------

GPT2_MLP = blocks("transformer.h.#.mlp.c_fc", "transformer.h.#.mlp.c_proj")
GPT2_ATTENTION = blocks("transformer.h.#.attn.c_attn", "transformer.h.#.attn.c_proj")
LLAMA_MLP = blocks(*(f"model.layers.#.mlp.{kind}_proj" for kind in ("gate", "up", "down")))
BERT_ATTENTION = blocks(
    *(f"bert.encoder.layer.#.attention.self.{kind}" for kind in ("query", "key", "value")),
    "bert.encoder.layer.#.attention.output.dense",
)
BERT_MLP = blocks("bert.encoder.layer.#.intermediate.dense", "bert.encoder.layer.#.output.dense")
VIT_MLP = ["vit.layers.0.mlp.fc1", "vit.layers.0.mlp.fc2"]
CHOICES: dict[str, tuple[Make, Any, list[str]]] = {
    "GPT-2's MLPs": (gpt2, ["*.mlp.*"], GPT2_MLP),
    "GPT-2's attention": (gpt2, "*attn*", GPT2_ATTENTION),
    "one block of GPT-2": (
        gpt2,
        ["transformer.h.1.*"],
        [*GPT2_ATTENTION[2:], *GPT2_MLP[2:], "transformer.h.1.ln_1", "transformer.h.1.ln_2"],
    ),
    "Llama's MLPs": (llama, ["*.mlp.*"], LLAMA_MLP),
    "Llama's keys, and its head": (
        llama,
        ["*attn.k_proj", "lm_head"],
        [*blocks("model.layers.#.self_attn.k_proj"), "lm_head"],
    ),
    "BERT's attention": (
        bert,
        ["*attention*"],
        [*BERT_ATTENTION, *blocks("bert.encoder.layer.#.attention.output.LayerNorm")],
    ),
    "ViT's MLP and patches": (
        vit,
        ["*.mlp.*", "*.projection"],
        [*VIT_MLP, "vit.embeddings.patch_embeddings.projection"],
    ),
    "mlp_only, GPT-2": (gpt2, whence.layers.mlp_only, GPT2_MLP),
    "mlp_only, Llama": (llama, whence.layers.mlp_only, LLAMA_MLP),
    "mlp_only, BERT": (bert, whence.layers.mlp_only, BERT_MLP),
    "mlp_only, ViT": (vit, whence.layers.mlp_only, VIT_MLP),
    "last_blocks, GPT-2": (
        gpt2,
        whence.layers.last_blocks(1),
        [*GPT2_ATTENTION[2:], *GPT2_MLP[2:]],
    ),
    "last_blocks, BERT": (
        bert,
        whence.layers.last_blocks(1),
        [*BERT_ATTENTION[4:], BERT_MLP[2], BERT_MLP[3], "bert.pooler.dense", "classifier"],
    ),
    "by_type, ViT": (
        vit,
        whence.layers.by_type(nn.Conv2d),
        ["vit.embeddings.patch_embeddings.projection"],
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_chosen_layers(name: str) -> None:
    make, layers, chosen = CHOICES[name]
    task, train, query, collate = case(make)
    model = make().double()
    names = [parameter for parameter, _ in model.named_parameters()]
    left_out = sorted({of_module(parameter) for parameter in names} - set(chosen))
    exact = exactness(make)
    scores = check(model, train, query, left_out, task, collate, layers=layers, tolerance=exact)
    others = [k for k in left_out if not k.lower().endswith(("norm", "embeddings", "wte", "wpe"))]
    assert any(reasons(scores)[k] == "not chosen" for k in others)
    study = whence.Study(model, task, train, once(model), collate=collate, layers=layers)
    table = str(study.describe())
    assert all(name in table for name in chosen)


def test_parts_add_up() -> None:
    task, train, query, collate = case(gpt2)
    model = gpt2().double()
    parts = [
        quiet(
            whence.TracIn(),
            whence.Study(model, task, train, once(model), collate=collate, layers=layers),
            query,
        ).values
        for layers in ("*.mlp.*", ["*attn*"], "matrices")
    ]
    close(parts[0] + parts[1], parts[2], 1e-9)


HEADS: dict[Make, dict[str, int]] = {  # per block
    gpt2: {"attn.c_attn": 2, "attn.c_proj": 2},
    llama: {f"self_attn.{k}_proj": n for k, n in {"q": 4, "k": 2, "v": 2, "o": 4}.items()},
    bert: {f"attention.{k}": 2 for k in ("self.query", "self.key", "self.value", "output.dense")},
    vit: {f"attention.{k}_proj": 2 for k in "qkvo"},
}


@pytest.mark.parametrize("method", ["TracIn", "Influence"])
@pytest.mark.parametrize("make", HEADS)
def test_heads_add_up(make: Make, method: str) -> None:
    """To the layer's score; with TracIn, each is autograd's in its rows or columns."""
    task, train, query, collate = case(make)
    model = make().double()
    study = whence.Study(model, task, train, once(model), collate=collate)
    settings: Any = {"damping": 0.1} if method == "Influence" else {}
    chosen = getattr(whence, method)(**settings)
    layers = quiet(chosen, study, query, by_layer=True)
    heads = quiet(chosen, study, query, by_layer="heads")
    close(heads.values, layers.values, 1e-9)
    close(heads.by_layer.sum(0), layers.values, 1e-9)
    seen: dict[str, int] = {}
    for name, whole in zip(layers.layers, layers.by_layer, strict=True):
        parts = [k for k, part in enumerate(heads.layers) if part.split(", ")[0] == name]
        close(heads.by_layer[parts].sum(0), whole, 1e-9)
        count = sum("head" in heads.layers[k] for k in parts)
        if count:
            seen[name] = count
    for end, count in HEADS[make].items():
        assert count in [n for name, n in seen.items() if name.endswith(end)], (end, seen)
    assert all("mlp" not in name and "intermediate" not in name for name in seen)
    if method == "TracIn" and make is gpt2:  # c_attn is (i, 3, heads, d)
        name, twin = "transformer.h.1.attn.c_attn.weight", model.eval().requires_grad_(True)
        sides = [
            rows(twin, [name], data, of, task, collate).view(-1, 8, 3, 2, 4)
            for data, of in ((query, task.measurements), (train, task.losses))
        ]
        bias = [
            rows(twin, [name.replace("weight", "bias")], data, of, task, collate).view(-1, 3, 2, 4)
            for data, of in ((query, task.measurements), (train, task.losses))
        ]
        for h in range(2):
            f, g = (side[..., h, :].flatten(1) for side in sides)
            u, v = (side[..., h, :].flatten(1) for side in bias)
            index = heads.layers.index(f"transformer.h.1.attn.c_attn, head {h}")
            close(heads.by_layer[index], -(f @ g.T + u @ v.T).numpy(), 1e-9)


def test_heads_of_self_influence_and_of_what_has_none() -> None:
    study = whence.Study(gpt2(), whence.LanguageModeling(), TRAIN, once(gpt2()), collate=padded())
    scores = quiet(whence.TracIn(), study, by_layer="heads")
    close(scores.by_layer.sum(0), scores.values, 1e-9)
    with pytest.raises(ValueError, match="by_layer='head' must be"):
        quiet(whence.TracIn(), study, QUERY, by_layer="head")


def test_mlps_of_an_encoder_and_decoder() -> None:
    """T5 writes SelfAttention and EncDecAttention."""
    config = hf.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=6, num_layers=2, num_heads=2)
    modules = hf.T5ForConditionalGeneration(config).named_modules()
    linear = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    chosen = whence.layers.mlp_only(linear)
    assert chosen == {name for name in linear if "DenseReluDense" in name}


def test_a_pattern_that_matches_nothing_names_the_layers() -> None:
    task, train, query, collate = case(llama)
    model = llama()
    study = whence.Study(
        model, task, train, once(model), collate=collate, layers=["transformer.h.*"]
    )
    with pytest.raises(ValueError, match=r"transformer\.h.*model\.layers\.0\.self_attn\.q_proj"):
        whence.TracIn().attribute(study, query, **EXACT)


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    return pytest.importorskip("peft")


def adapted(peft: Any, make: Make = gpt2, **settings: Any) -> Any:
    """LoRA adapters, as they may be after some training (B starts at zero)."""
    targets = {gpt2: ["c_attn", "c_fc"], llama: ["q_proj", "v_proj", "down_proj"]}
    plain = {"r": 2, "target_modules": targets.get(make, ["query", "value"])}
    model = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        model = peft.get_peft_model(model, peft.LoraConfig(**(plain | settings)))
    g = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5, generator=g)
    return model


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def left_out_of_adapted(model: nn.Module) -> list[str]:
    """All but the adapters: it is frozen."""
    frozen = {of_module(k) for k, p in model.named_parameters() if not p.requires_grad}
    return sorted(frozen - {of_module(name) for name in trained(model)})


@pytest.mark.parametrize("make", [gpt2, llama])
def test_adapters_are_tracked_and_what_is_frozen_adds_nothing(peft: Any, make: Make) -> None:
    task, train, query, collate = case(make)
    model = adapted(peft, make).double()
    adapters = trained(model)
    assert len(adapters) == (8 if make is gpt2 else 12) and all("lora_" in k for k in adapters)
    run = once(model, groups=[adapters])
    left_out = left_out_of_adapted(model)
    exact = exactness(make)
    scores = check(
        model, train, query, left_out, task, collate, names=adapters, run=run, tolerance=exact
    )
    assert scores.left_out == (0, []) and len(scores.excluded) > 10
    assert "trained parameters are tracked; frozen: " in scores.diagnostics["tracked"]
    for method in (whence.Influence.published(1e-3), whence.Source.published(1), whence.TracIn()):
        found = [
            quiet(
                method,
                whence.Study(model, task, train, run, collate=collate, layers=layers),
                query,
            ).values
            for layers in (None, ["*.lora_[AB].*"])
        ]
        close(found[0], found[1], exact)


def test_dora_and_adapters_of_an_embedding(peft: Any) -> None:
    """DoRA calls A and B twice: for a norm, of which it takes no gradient, and for its output. A
    LoRA of an embedding is a table without a module."""
    task, train, query, collate = case(gpt2)
    settings = {"target_modules": ["c_attn"], "use_dora": True}
    model = adapted(peft, **settings).double()
    magnitudes = [name for name in trained(model) if "magnitude" in name]
    run = once(model, groups=[trained(model)])
    left_out = sorted([*left_out_of_adapted(model), *map(of_module, magnitudes)])
    names = [name for name in trained(model) if name not in magnitudes]
    assert len(names) == 4
    data = train, query, left_out, task, collate
    scores = check(model, *data, names=names, run=run, layers="all")
    reasons = {part["name"]: part["reason"] for part in scores.excluded}
    assert "lora_A.default, which is a layer" in reasons[of_module(magnitudes[0])]
    model = adapted(peft, target_modules=["wte"]).double()
    adapters, run = trained(model), once(model, groups=[trained(model)])
    assert len(adapters) == 2
    data = train, query, left_out_of_adapted(model), task, collate
    check(model, *data, names=adapters, run=run, layers="all")


def test_adapters_of_a_model_in_half_precision(peft: Any) -> None:
    """The frozen model is in bfloat16, as it is usually loaded; the adapters are in float32."""
    task, train, query, collate = case(gpt2)
    low = adapted(peft)
    for name, parameter in low.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    scores = []
    for model in (low, copy.deepcopy(low).float()):
        run = once(model, groups=[trained(low)])
        study = whence.Study(model, task, train, run, collate=collate, layers="all")
        scores.append(quiet(whence.TracIn(), study, query, dtype=torch.float32).values)
    close(scores[0], scores[1], 1e-5)
    assert abs(scores[0]).max() > 0


def test_adapters_beside_a_head_of_their_own(peft: Any) -> None:
    """For classification PEFT trains a copy of the head; the original is never called."""
    task, train, query, collate = case(bert)
    model = adapted(peft, bert, task_type="SEQ_CLS").double()
    adapters = trained(model)
    assert "base_model.model.classifier.modules_to_save.default.bias" in adapters
    run = once(model, groups=[adapters])
    left_out = left_out_of_adapted(model)
    assert "base_model.model.classifier.original_module" in left_out
    check(model, train, query, left_out, task, collate, names=adapters, run=run)


def test_an_adapter_that_is_not_active_is_left_out_by_name(peft: Any) -> None:
    task, train, query, collate = case(gpt2)
    model = adapted(peft)
    adapters = trained(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        model.add_adapter("spare", peft.LoraConfig(r=3, target_modules=["c_attn"]))
    idle = [f"transformer.h.{k}.attn.c_attn.lora_{x}.spare" for k in (0, 1) for x in "AB"]
    run, left_out = once(model, groups=[adapters]), left_out_of_adapted(model)
    assert {f"base_model.model.{name}" for name in idle} <= set(left_out)
    check(model, train, query, left_out, task, collate, names=adapters, run=run)


def test_a_plain_model_of_an_adapted_run_is_refused(peft: Any) -> None:
    task, train, query, collate = case(gpt2)
    study = whence.Study(gpt2(), task, train, once(adapted(peft)), collate=collate)
    with pytest.raises(ValueError, match=r"another architecture.*base_layer|lora_"):
        whence.TracIn().attribute(study, query, **EXACT)


# --- gradient checkpointing -----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", LEFT_OUT)
def test_gradient_checkpointing(make: Make, reentrant: bool) -> None:
    """Left on and in training mode, as training left it."""
    task, train, query, collate = case(make)
    model, plain = make().double().train(), make().double()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    exact = exactness(make)
    found = check(model, train, query, [], task, collate, layers="all", tolerance=exact).values
    study = whence.Study(plain, task, train, once(plain), collate=collate)
    close(found, quiet(whence.TracIn(), study, query, batch_size=3).values, 1e-9)
    assert model.training and model.is_gradient_checkpointing
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_an_adapted_model(peft: Any, reentrant: bool) -> None:
    """The embeddings are then made to require gradients by a hook."""
    task, train, query, collate = case(gpt2)
    model = adapted(peft).double().train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    run, left_out = once(model, groups=[trained(model)]), left_out_of_adapted(model)
    check(model, train, query, left_out, task, collate, names=trained(model), run=run)


# --- precision ------------------------------------------------------------------------------------


def agrees(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(found).all()
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    rank = spearmanr(found.ravel(), expected.ravel()).statistic
    assert error < 0.05 and rank > 0.99, f"relative error {error:.3f}, rank correlation {rank:.4f}"


def lower(model: nn.Module, norms: bool = True) -> nn.Module:
    """In bfloat16, the norms or not."""
    model = model.to(torch.bfloat16)
    if not norms:
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                module.float()
    return model


LONG = documents(20, 9, 26, 15, 24, 17, 12, 30), documents(25, 13, 16, seed=1)
#: sampled pseudo-targets are other ones where rounding moves a probability past its draw
ROUNDED: dict[str, Any] = {
    "TracIn": whence.TracIn(),
    "Influence": whence.Influence.published(0.1, fisher="empirical"),
    "Source": whence.Source.published(1, fisher="empirical"),
}


def precise(make: Make) -> tuple[Any, Any, Any, Any]:
    task, train, query, collate = case(make)
    return (task, *(LONG if make in (gpt2, llama) else (train, query)), collate)


@pytest.mark.parametrize("method", ROUNDED)
@pytest.mark.parametrize("make", LEFT_OUT)
@pytest.mark.parametrize("norms", [True, False], ids=["bf16", "bf16, norms in float32"])
def test_low_precision_weights(make: Make, method: str, norms: bool) -> None:
    """Weights in bfloat16; work in float32, which is the default, and in bfloat16."""
    task, train, query, collate = precise(make)
    low = lower(make(), norms)
    expected, single, half = (
        attributed(model, ROUNDED[method], train, query, collate, task, dtype=dtype, batch_size=8)
        for model, dtype in (
            (make(), torch.float32),
            (low, torch.float32),
            (low, torch.bfloat16),
        )
    )
    agrees(single, expected)
    agrees(half, single)


def test_checkpoints_in_another_precision_than_the_model() -> None:
    task, train, query, collate = case(gpt2)
    low = lower(gpt2())
    rounded = gpt2()
    rounded.load_state_dict(low.state_dict())
    states = [rounded.state_dict(), low.state_dict()]
    mixed = whence.Run.from_checkpoints(states, [1, 2], 1.0)
    plain = whence.Run.from_checkpoints(states[:1] * 2, [1, 2], 1.0)
    for method in (whence.TracIn(), whence.Source.published(2), whence.FastSource.published(1)):
        found = [
            quiet(method, whence.Study(model, task, train, run, collate=collate), query).values
            for model, run in ((gpt2(), plain), (gpt2(), mixed), (low, mixed))
        ]
        close(found[1], found[0], 1e-9)
        close(found[2], found[0], 1e-9)


class Watched(whence.LanguageModeling):
    """Keeps the logits of the first example, whenever it comes alone."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        found = super().outputs(model, batch)
        if len(found) == 1 and not self._seen:
            self._seen.append(found.detach().clone())
        return found


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotations_keep_their_precision(dtype: torch.dtype, given: torch.dtype) -> None:
    """Loaded in bfloat16, a Llama has the frequencies of its rotations in float32: rounded, they
    would turn far positions by another angle."""

    def cast(model: Any, dtype: torch.dtype) -> Any:
        frequencies = model.model.rotary_emb.inv_freq
        model = model.to(dtype).eval()
        model.model.rotary_emb.inv_freq = frequencies
        return model

    model = cast(llama(hidden_size=64, num_attention_heads=2, num_key_value_heads=1), given)
    data, task = documents(600), Watched()
    study = whence.Study(model, task, data, once(model), collate=padded(), layers="lm_head")
    quiet(whence.TracIn(), study, data, dtype=dtype, batch_size=1)
    with torch.no_grad():
        own = cast(copy.deepcopy(model), dtype)(**padded()(data)).logits
    error = float((task._seen[0] - own).norm() / own.norm())
    assert error < 1e-3, f"relative error {error:.3f}"


def test_trained_in_low_precision(tmp_path: Path) -> None:
    """Weights, gradients and second moments in bfloat16."""
    torch.manual_seed(0)
    model, batch = lower(gpt2(depth=1)), padded()(TRAIN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with whence.Recorder(tmp_path / "run", model, optimizer, checkpoints=2, total_steps=6):
        for _ in range(6):
            optimizer.zero_grad()
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
    task = whence.LanguageModeling()
    study = whence.Study(model, task, TRAIN, tmp_path / "run", collate=padded())
    scores = quiet(whence.Source.published(2, damping=1e-3), study, QUERY, dtype=torch.float32)
    assert np.isfinite(scores.values).all() and abs(scores.values).max() > 0


# --- wrappers and their prefixes ------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return attributed(gpt2(), whence.TracIn(), TRAIN, QUERY, padded())


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def by_block(model: Any) -> Any:
    """Compiled block by block, as is advised for models of many equal ones."""
    for k, block in enumerate(model.transformer.h):
        model.transformer.h[k] = torch.compile(block, backend="eager")
    return model


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DataParallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled in DataParallel": lambda model: nn.DataParallel(torch.compile(model)),
    "DataParallel, compiled": lambda model: torch.compile(nn.DataParallel(model)),
    "compiled in place": in_place,
    "compiled block by block": by_block,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models(name: str, expected: np.ndarray) -> None:
    """Wrapped, with the wrapped one's state; and each with the other's."""
    wrapped = WRAPPERS[name](gpt2())
    for model, state in ((wrapped, wrapped), (gpt2(), wrapped), (wrapped, gpt2())):
        study = whence.Study(model, whence.LanguageModeling(), TRAIN, once(state), collate=padded())
        close(quiet(whence.TracIn(), study, QUERY).values, expected, 1e-9)


def test_distributed_models(process_group: None, expected: np.ndarray) -> None:
    wrapped = nn.parallel.DistributedDataParallel(gpt2())
    assert all(name.startswith("module.") for name in wrapped.state_dict())
    close(attributed(wrapped, whence.TracIn(), TRAIN, QUERY, padded()), expected, 1e-9)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_in_files(prefix: str, expected: np.ndarray, tmp_path: Path) -> None:
    state = {prefix + name: tensor for name, tensor in gpt2().state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    once_each = {k: t for k, t in state.items() if k != f"{prefix}lm_head.weight"}
    save_file(once_each, tmp_path / "model.safetensors")
    for name in ("model.pt", "model.safetensors"):
        run = whence.Run.from_checkpoints([tmp_path / name], [1], 1.0)
        study = whence.Study(gpt2(), whence.LanguageModeling(), TRAIN, run, collate=padded())
        close(quiet(whence.TracIn(), study, QUERY).values, expected, 1e-9)


def test_prefixes_in_second_moments_and_groups(expected: np.ndarray) -> None:
    """What goes with the checkpoints may have the prefix as well."""
    model = torch.compile(gpt2())
    state = model.state_dict()
    moments = {name: torch.full_like(p, 0.01) for name, p in model.named_parameters()}
    task, found = whence.LanguageModeling(), []
    for strip in (False, True):
        short = {k.removeprefix("_orig_mod.") if strip else k: v for k, v in state.items()}
        second = {k.removeprefix("_orig_mod.") if strip else k: v for k, v in moments.items()}
        run = whence.Run.from_checkpoints(
            [short],
            [4],
            0.01,
            optimizer="adamw",
            second_moments=[second],
            groups=[list(second)],
        )
        study = whence.Study(model, task, TRAIN, run, collate=padded())
        found.append(quiet(whence.Source.published(1, damping=1e-3), study, QUERY).values)
    close(found[0], found[1], 1e-9)
    assert abs(found[0]).max() > 0


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_saved_by_hugging_face(make: Make, tmp_path: Path) -> None:
    """A tied head is not in the file."""
    task, train, query, collate = case(make)
    model = make()
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in held) == (make is llama)
    run = whence.Run.from_checkpoints([tmp_path / "model.safetensors"], [1], 1.0)
    fresh = make()
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    study = whence.Study(fresh, task, train, run, collate=collate)
    found = quiet(whence.TracIn(), study, query).values
    close(found, attributed(model, whence.TracIn(), train, query, collate, task), 1e-9)


def test_saved_by_hugging_face_under_other_names(tmp_path: Path) -> None:
    """transformers 5 writes ViT under the names it had before, and renames it when it loads."""
    from whence.integrations.huggingface import RecorderCallback

    arguments = hf.TrainingArguments(
        str(tmp_path / "out"),
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    task, data = (
        whence.Classification(),
        [
            {"pixel_values": row["pixel_values"].float(), "labels": row["labels"]}
            for row in images(8)
        ],
    )
    recorder = RecorderCallback(tmp_path / "run", 2)
    trainer = hf.Trainer(vit(), arguments, train_dataset=data, callbacks=[recorder])
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    recorded = quiet(whence.TracIn(), whence.Study(vit(), task, data, tmp_path / "run"), data[:2])
    loaded = [
        hf.ViTForImageClassification.from_pretrained(tmp_path / f"out/checkpoint-{step}")
        for step in (2, 4)
    ]
    rates = whence.Run.open(tmp_path / "run").learning_rates[:, 0]
    states = [model.state_dict() for model in loaded]
    run = whence.Run.from_checkpoints(states, [2, 4], rates)
    found = quiet(whence.TracIn(), whence.Study(vit(), task, data, run), data[:2])
    close(found.values, recorded.values, 1e-9)
    run = whence.Run.from_huggingface(tmp_path / "out", vit(), size=8)
    found = quiet(whence.TracIn(), whence.Study(vit(), task, data, run), data[:2])
    close(found.values, recorded.values, 1e-9)


EVERY_METHOD: dict[str, Any] = {
    "TracIn": whence.TracIn(),
    "Source, one segment": whence.Source.published(1),
    "Source": whence.Source.published(2),
    "FastSource, one segment": whence.FastSource.published(1),
    "FastSource": whence.FastSource.published(2),
}


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_vocabulary_resized_between_checkpoints_is_refused(method: str) -> None:
    small, large = gpt2(), gpt2()
    large.resize_token_embeddings(16, mean_resizing=False)
    states = [small.state_dict(), large.state_dict()]
    run = whence.Run.from_checkpoints(states, [1, 2], 0.1)
    study = whence.Study(large, whence.LanguageModeling(), TRAIN, run, collate=padded())
    with pytest.raises(ValueError, match=r"steps? 1.* architecture.*wte\.weight"):
        quiet(EVERY_METHOD[method], study, QUERY)
    study = whence.Study(small, whence.LanguageModeling(), TRAIN, run, collate=padded())
    with pytest.raises(ValueError, match=r"step 2.*wte\.weight is \(16, 8\).*\(13, 8\)"):
        quiet(EVERY_METHOD[method], study, QUERY)


def test_a_vocabulary_resized_between_saved_checkpoints_is_refused(tmp_path: Path) -> None:
    small, large = gpt2(), gpt2()
    large.resize_token_embeddings(16, mean_resizing=False)
    for step, model in ((1, small), (2, large)):
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text("{}")
    with pytest.raises(RunError, match=r"checkpoint-1.*wte\.weight of shape \(13, 8\)"):
        whence.Run.from_huggingface(tmp_path, large)


# --- trained by the Trainer -----------------------------------------------------------------------

UPDATES, SIZE = 24, 16
DATA = prompted(documents(*[5, 3, 7, 6] * 4))


def train(model: Any, folder: Path, **arguments: Any) -> Any:
    """24 updates of AdamW, a checkpoint every 6, by the Trainer and by the callback."""
    from whence.integrations.huggingface import RecorderCallback

    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_steps": 6,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    made = hf.Trainer(
        model,
        hf.TrainingArguments(str(folder / "out"), **(settings | arguments)),
        train_dataset=DATA,
        data_collator=padded(),
        callbacks=[RecorderCallback(folder / "run", 4)],
    )
    made.remove_callback(hf.PrinterCallback)
    made.train()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    place = tmp_path_factory.mktemp("gpt2")
    train(gpt2(), place)
    return place


def study_of(model: Any, run: Any, **options: Any) -> whence.Study:
    return whence.Study(model, whence.LanguageModeling(), DATA, run, collate=padded(), **options)


QUERY_MARKED = prompted(QUERY)
END: dict[str, Any] = {
    "Source": whence.Source.published(2),
    "FastSource": whence.FastSource.published(2),
}


@pytest.mark.parametrize("name", END)
def test_source_end_to_end(name: str, folder: Path) -> None:
    method = END[name]
    study = study_of(gpt2(), folder / "run")
    run = study.runs[0]
    assert run.optimizer == "adamw" and run.steps == UPDATES
    scores = quiet(method, study, QUERY_MARKED, by_segment=True)
    assert scores.values.shape == (3, SIZE) and scores.by_segment.shape == (2, 3, SIZE)
    assert np.isfinite(scores.values).all() and (abs(scores.by_segment).max((1, 2)) > 0).all()
    np.testing.assert_allclose(scores.by_segment.sum(0), scores.values, rtol=1e-9)
    assert "tied" in reasons(scores)["transformer.wte"]
    segments = scores.diagnostics["segments"]
    assert [(s["start"], s["end"]) for s in segments] == [(0, 12), (12, 24)]
    # The folder that the Trainer left tells the same.
    again = whence.Run.from_huggingface(folder / "out", gpt2(), size=SIZE)
    assert [c.step for c in again.checkpoints] == [c.step for c in run.checkpoints]
    other = quiet(method, study_of(gpt2(), again), QUERY_MARKED, by_segment=True)
    np.testing.assert_allclose(other.by_segment, scores.by_segment, rtol=1e-6, atol=0)
    # In the precision that is the default, too.
    single = quiet(method, study, QUERY_MARKED, dtype=torch.float32).values
    assert np.isfinite(single).all()


@pytest.mark.parametrize("damping", [None, 1e-2])
def test_low_precision_that_cannot_tell_says_so(damping: Any, folder: Path) -> None:
    """At the default damping the mixed form depends on eigenvalues that bfloat16 cannot resolve."""
    method = whence.Source.published(2, fisher="empirical", damping=damping)
    expected = quiet(method, study_of(gpt2(), folder / "run"), QUERY_MARKED).values
    study = study_of(gpt2(), folder / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = method.attribute(study, QUERY_MARKED, dtype=torch.bfloat16, progress=False)
        except ValueError as error:
            said = [str(error)]
        else:
            rank = spearmanr(found.values.ravel(), expected.ravel()).statistic
            said = [str(w.message) for w in caught]
            if rank > 0.99:
                return
    assert damping is None
    assert any("bfloat16" in message and "damping" in message for message in said)


def test_averaging_one_checkpoint_changes_nothing(folder: Path) -> None:
    study = study_of(gpt2(), folder / "run", layers="*.mlp.*")
    found = [
        quiet(kind.published(4), study, QUERY_MARKED).values
        for kind in (whence.Source, whence.FastSource)
    ]
    close(found[1], found[0], 1e-9)


def test_called_where_autocast_is_on(expected: np.ndarray) -> None:
    """The precision is attribute(dtype=...)'s to say."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype, exact in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            found = attributed(gpt2(), whence.TracIn(), TRAIN, QUERY, padded(), dtype=dtype)
            close(found, expected, exact)


def test_a_model_that_the_trainer_ran_in_mixed_precision(tmp_path: Path) -> None:
    """accelerate leaves an autocast around its forward; what is studied is the model itself."""
    model = gpt2()
    trainer = train(model, tmp_path, bf16=True, num_train_epochs=2, gradient_checkpointing=True)
    for dtype in (torch.float32, torch.float64):
        found = [
            quiet(whence.TracIn(), study_of(m, tmp_path / "run"), QUERY_MARKED, dtype=dtype).values
            for m in (gpt2(), model, trainer.model)
        ]
        close(found[1], found[0], 1e-9)
        close(found[2], found[0], 1e-9)


def test_adapters_trained_by_the_trainer(peft: Any, tmp_path: Path) -> None:
    model = adapted(peft, task_type="CAUSAL_LM")
    train(model, tmp_path, num_train_epochs=2, save_steps=4)
    run = whence.Run.open(tmp_path / "run")
    assert sorted(name for group in run.groups for name in group) == sorted(trained(model))
    for method in (
        whence.Source.published(2),
        whence.TracIn(),
        whence.Influence.published("source"),
    ):
        found = [
            quiet(method, study_of(adapted(peft), run, layers=layers), QUERY_MARKED).values
            for layers in (None, ["*.lora_[AB].*"])
        ]
        assert np.isfinite(found[0]).all() and abs(found[0]).max() > 0
        close(found[0], found[1], 1e-6)
    # The Trainer itself saves adapters alone: the frozen weights are the given model's.
    again = whence.Run.from_huggingface(tmp_path / "out", adapted(peft))
    recorded = {c.step: c.weights() for c in run.checkpoints}
    shared = [c for c in again.checkpoints if c.step in recorded]
    assert again.final in shared and again.groups == run.groups
    for checkpoint in shared:
        weights = checkpoint.weights()
        assert weights.keys() == recorded[checkpoint.step].keys()
        assert all(torch.equal(x, recorded[checkpoint.step][k]) for k, x in weights.items())
    scores = [
        quiet(whence.TracIn(), study_of(adapted(peft), r), QUERY_MARKED) for r in (run, again)
    ]
    assert all(np.isfinite(s.values).all() and abs(s.values).max() > 0 for s in scores)
    with pytest.raises(RunError, match=r"holds only an adapter; give the model with its adapter"):
        whence.Run.from_huggingface(tmp_path / "out", gpt2())
