"""The methods' settings as command-line options, declared without importing torch.

Each method lists the arguments of its constructor in order: type (as annotated), default, help and
choices. An alternative constructor is a method of its own: `"Source.published"` is selected by
`--method source.published`. A test compares this table with the real constructors and says what
differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

REQUIRED = object()


@dataclass(frozen=True)
class Option:
    """An argument of a method's constructor.

    Attributes:
        type: its annotation: "int", "float", "str", "bool", "Sequence[int]", "None", joined by "|".
        help: a sentence or two for `--help`.
        choices: the texts that are allowed where the type includes "str"; empty for any text.
        from_study: whether the study file provides it, instead of the command line.
    """

    type: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    from_study: bool = False


STAGE = Option("str | None", None, "Attribute to the examples of this stage. Default: all stages.")
SEED = Option("int", 0, "Seed of the pseudo-targets.")
PROJECTION_SEED = replace(SEED, help="Seed of the projection; every run has its own.")
DIMENSION = Option("int", 4096, "Dimension of the projection.")
CURVATURE = Option(
    "str",
    "auto",
    "Curvature approximation, layer by layer: auto (EK-FAC, with bases of whole gradients in "
    "layers that share weights over positions), ekfac, shampoo, kfac, diagonal or identity; or "
    "gauss-newton, the full matrix over all layers, at the price of dozens of passes over the data "
    "per checkpoint.",
    ("auto", "ekfac", "shampoo", "kfac", "diagonal", "identity", "gauss-newton"),
)
FISHER = Option(
    "str",
    "sampled",
    "Fisher matrix: sampled (seeded pseudo-targets), exact (one backward pass per output) or "
    "empirical (true targets).",
    ("sampled", "exact", "empirical"),
)
EXCLUDE_DIVERGED = Option(
    "bool", False, "Leave out trainings that diverged, instead of stopping with an error."
)
SEGMENTS = Option(
    "int | str | Sequence[int]",
    3,
    "Number of segments; or the updates at which they end, such as 30,60; or stages (one segment "
    "per stage).",
    ("stages",),
)
WEIGHT_DECAY = Option(
    "str",
    "ignore",
    "ignore weight decay, as the paper does, or count it as curvature.",
    ("ignore", "curvature"),
)
COUPLING = Option(
    "bool", True, "Do not take into account that all layers correct the same error together."
)
SOURCE = {
    "segments": replace(
        SEGMENTS,
        default="auto",
        help=f"{SEGMENTS.help} auto: three if one stage trained mostly weights that are shared "
        "over positions, such as those of convolutions and transformers, and stages otherwise.",
        choices=("auto", "stages"),
    ),
    "curvature": CURVATURE,
    "fisher": FISHER,
    "stage": STAGE,
    "damping": Option("float", 0.0, "Added to the eigenvalues of the curvature."),
    "weight_decay": WEIGHT_DECAY,
    "coupling": COUPLING,
    "query_at": Option(
        "str",
        "run",
        "Take the query gradient along the run (the mean over the checkpoints of the last stage), "
        "or at the final model.",
        ("run", "final"),
    ),
    "floor": Option(
        "float",
        0.1,
        "For Adam-type optimizers: lower bound of √v̂, as a fraction of the root mean v̂ of its "
        "parameter.",
    ),
    "seed": SEED,
}
PUBLISHED_SOURCE = {
    "segments": SEGMENTS,
    "curvature": replace(CURVATURE, default="ekfac"),
    "fisher": FISHER,
    "damping": Option(
        "float | None",
        None,
        "Added to the eigenvalues. Default: none for SGD, 1e-8 in the inverse for Adam.",
    ),
    "weight_decay": WEIGHT_DECAY,
    "stage": STAGE,
    "seed": SEED,
}
INFLUENCE = {
    "damping": Option(
        "float | str | None",
        None,
        "λ added to the curvature; or source, for λ = 1/(η̄K). Default: source; 1e-8 for arnoldi; "
        "for datainf 0.1 × the mean squared entry of a layer's gradients.",
        ("source",),
    ),
    "curvature": replace(
        CURVATURE,
        type="str | None",
        default=None,
        help="Curvature approximation of ekfac, and of the preconditioner of cg: auto, ekfac, "
        "shampoo, kfac, diagonal or identity.",
        choices=CURVATURE.choices[:-1],
    ),
    "fisher": replace(FISHER, type="str | None", default=None),
    "stage": STAGE,
    "seed": Option(
        "int | None",
        None,
        "Seed of the pseudo-targets, of Arnoldi's start vector, and of the choice of examples.",
    ),
    "solver": Option(
        "str",
        "ekfac",
        "ekfac: layer by layer, in closed form. cg: the Gauss-Newton matrix of all layers, by "
        "conjugate gradients. arnoldi: the same matrix on its leading eigenvectors. datainf: a "
        "mean of closed-form inverses over the examples.",
        ("ekfac", "cg", "arnoldi", "datainf"),
    ),
    "coupling": replace(
        COUPLING,
        type="bool | None",
        default=None,
        help="With ekfac: do not take into account that all layers correct the same error "
        "together.",
    ),
    "rank": Option("int | None", None, "Number of eigenvectors of arnoldi. Default: 100."),
    "iterations": Option(
        "int | None",
        None,
        "Iterations of arnoldi (default 200); at most this many per query for cg (default 100).",
    ),
    "tolerance": Option(
        "float | None", None, "Relative residual at which cg accepts a solution. Default: 0.01."
    ),
    "examples": Option(
        "int | None",
        None,
        "Number of examples that cg and arnoldi use for the curvature, chosen by the seed. "
        "Default: all that the run trained on.",
    ),
}
PUBLISHED_INFLUENCE = INFLUENCE | {
    "damping": replace(
        INFLUENCE["damping"],
        help="λ added to the curvature; or source, for λ = 1/(η̄K). Default: 1e-8; other solvers "
        "than ekfac: as for influence.",
    ),
}

METHODS: dict[str, dict[str, Option]] = {
    "Source": SOURCE,
    "Source.published": PUBLISHED_SOURCE,
    "FastSource": SOURCE,
    "FastSource.published": PUBLISHED_SOURCE,
    "Influence": INFLUENCE,
    "Influence.published": PUBLISHED_INFLUENCE,
    "Best": {
        "iterations": Option(
            "int", 8, "Most iterations of conjugate gradients: each is a pass over the data."
        ),
        "relative_damping": Option(
            "float", 3.0, "δ: the response is halved where η̄K P̄ times the curvature is δ."
        ),
        "stage": STAGE,
        "segments": replace(SEGMENTS, default="stages"),
        "curvature": replace(
            CURVATURE,
            help="Curvature of the preconditioner, layer by layer: auto, ekfac, shampoo, kfac, "
            "diagonal or identity.",
            choices=CURVATURE.choices[:-1],
        ),
        "fisher": FISHER,
        "query_at": SOURCE["query_at"],
        "floor": SOURCE["floor"],
        "seed": SEED,
    },
    "BM25": {
        "field": Option(
            "str | None",
            None,
            "Field of an example that has its text. Default: token ids are the words.",
        ),
        "k1": Option("float", 1.2, "How soon repetitions of a word stop counting."),
        "b": Option("float", 0.75, "How much longer examples are discounted, from 0 to 1."),
        "stage": STAGE,
    },
    "Downsampling": {
        "truth": Option(
            "Truth | str | os.PathLike[str]",
            REQUIRED,
            "A folder written by `whence truth`. Do not judge the scores by the same one.",
        ),
        "exclude_diverged": EXCLUDE_DIVERGED,
    },
    "GradientCosine": {"stage": STAGE},
    "GradientNorm": {"stage": STAGE},
    "Hydra": {"stage": STAGE},
    "LESS": {"dimension": DIMENSION, "seed": PROJECTION_SEED, "stage": STAGE},
    "LeaveOneOut": {
        "recipe": Option("Recipe", REQUIRED, "How to train.", from_study=True),
        "examples": Option(
            "Sequence[int] | None",
            None,
            "Examples to leave out. Default: every one, which takes n + 1 trainings per seed.",
        ),
        "seeds": Option(
            "int | Sequence[int]",
            1,
            "Number of seeds, or the seeds themselves. Several give the expectation, with standard "
            "errors.",
        ),
        "stage": replace(STAGE, help="Leave out examples of this stage. Default: the first."),
        "exclude_diverged": replace(
            EXCLUDE_DIVERGED,
            help="Leave out pairs of trainings if one of them diverged, instead of stopping with "
            "an error.",
        ),
    },
    "Random": {"seed": replace(SEED, help="Seed of the draws."), "stage": STAGE},
    "RepSim": {
        "metric": Option(
            "str",
            "cosine",
            "Similarity: cosine (as in the paper), dot, or l2 (the negative squared distance).",
            ("cosine", "dot", "l2"),
        ),
        "layer": Option(
            "str | None",
            None,
            "Name of the module whose input is compared. Default: what `Task.representations` "
            "returns if you override it, else the input of the last tracked linear layer.",
        ),
        "stage": STAGE,
    },
    "TracIn": {"stage": STAGE},
    "TrackStar": {
        "dimension": DIMENSION,
        "mixing": Option(
            "float", 0.5, "Share of the queries' curvature; 0 takes the training data's only."
        ),
        "damping": Option("float", 1e-2, "Added to R, in units of its mean eigenvalue."),
        "unit_norm": Option("bool", True, "Take inner products instead of cosines."),
        "second_moments": Option(
            "bool", True, "Do not divide gradients by the roots of Adam's second moments."
        ),
        "whiten": Option("bool", True, "Leave the curvature R out."),
        "seed": PROJECTION_SEED,
        "stage": STAGE,
    },
    "Trak": {
        "dimension": replace(
            DIMENSION, help="Dimension of the projection, at most the number of training examples."
        ),
        "seed": PROJECTION_SEED,
        "stage": STAGE,
        "joint": Option(
            "bool",
            True,
            "Project each layer on its own instead of all together, with an equal share of the "
            "dimension.",
        ),
        "damping": Option("float", 0.0, "λ in (ΦᵀΦ + NλI)⁻¹. 0 as published."),
    },
    "Unrolled": {
        "curvature": Option(
            "str",
            "hessian",
            "hessian, or gauss-newton, which has no negative directions along which the derivative "
            "could grow.",
            ("hessian", "gauss-newton"),
        ),
        "expected": Option(
            "bool", False, "Credit every example at every update, by 1/N, not only when drawn."
        ),
        "curvature_batch": Option(
            "int | None",
            None,
            "With --expected: examples per update for the curvature. Default: 512, or all.",
        ),
        "credit_every": Option(
            "int | None",
            None,
            "With --expected: number of updates over which the weights count as constant when "
            "every example is credited. Default: a 32nd of the stage.",
        ),
        "stage": STAGE,
        "damping": SOURCE["damping"],
        "query_at": replace(SOURCE["query_at"], default="final"),
        "seed": replace(SEED, help="Seed of the curvature's batches."),
    },
}
