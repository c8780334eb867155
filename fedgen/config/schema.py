"""Settings of all commands as typed models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from fedgen.config.constraints import Fraction
from fedgen.config.explain import explain
from fedgen.errors import FedgenError

RUNTIME_INVARIANT = ("threads", "min_success", "masks", "faults")
"""Settings of the runtime group that a run's bits and its privacy depend on."""

TARGETS = ("target_epsilon", "target_mu", "target_advantage", "target_tpr")
"""Targets that the noise of a run is calibrated to, at most one of them."""

Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""Text without zero bytes."""
Count = Annotated[int, Ge(1), Le(10**9)]
Natural = Annotated[int, Ge(0), Le(10**9)]
Positive = Annotated[float, Gt(0)]
PrivacyLevel = Annotated[float, Ge(1e-9), Le(1e9)]
"""ε, μ, or a noise multiplier."""
OpenFraction = Annotated[float, Gt(0), Lt(1)]
DEFAULT_FPR = 0.01
"""``privacy.at_fpr`` of runs of 0.1.0, which had no such setting."""
Processes = Annotated[int, Ge(1), Le(1024)]


def target_of(privacy: Mapping[str, Any]) -> str | None:
    """Return the name of the first target that is set; None without a target."""
    return next((name for name in TARGETS if privacy.get(name) is not None), None)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _FunctionGroup(_Section):
    """Settings of a group with a function (``type``), which declares further settings."""

    model_config = ConfigDict(extra="allow")
    type: Any  # checked by the registry


class _Data(_FunctionGroup):
    root: Text | None = None
    public_rows: Count | None = None
    public_persons: Count | None = None


class _Privacy(_Section):
    target_epsilon: PrivacyLevel | None
    target_mu: PrivacyLevel | None = None
    target_advantage: OpenFraction | None = None
    target_tpr: OpenFraction | None = None
    at_fpr: OpenFraction = DEFAULT_FPR
    noise_multiplier: PrivacyLevel | None
    delta: OpenFraction
    adversary: Literal["server", "release"]
    unit: Literal["record", "client", "person"] | None
    aggregation: Literal["local", "secure", "trusted"] | None
    threshold: Count | Literal["all"] | None
    colluders: Natural
    budget_epsilon: PrivacyLevel | None
    noise: Literal["seeded", "secure"]


class _Faults(_Section):
    """Probabilities of injected faults, and the round after which the server is killed."""

    raises: Fraction
    returns_error: Fraction
    hangs: Fraction
    wrong_shape: Fraction
    nan: Fraction
    dies: Fraction
    late: Fraction
    twice: Fraction
    vanishes: Fraction
    server_dies: Natural


class _Runtime(_FunctionGroup):
    threads: Processes
    timeout: Positive | None
    min_success: Annotated[float, Gt(0), Le(1)]
    masks: Literal[True, False, "auto"]
    checkpoint_every: Count
    faults: _Faults
    store: Literal["memory", "disk"] | None = None
    cache_gb: Positive | None = None


class _Evaluation(_Section):
    samples: Annotated[int, Ge(0), Le(10**7)]
    seeds: Annotated[int, Ge(0), Le(1000)]
    max_side: Annotated[int, Ge(8), Le(1024)] | None = None
    jobs: Processes | None
    classifiers: dict[str, _FunctionGroup]
    real2real: bool = True
    real2gen: list[str]
    judge: bool
    fid: bool
    inception_weights: Text | None
    leakage: bool


class _WarmUp(_Section):
    """method: None: no warm-up, and none of the others."""

    method: _FunctionGroup | None
    noise_multiplier: PrivacyLevel | None = None
    rounds: Count | None = None
    batch: Count | None = None


PlantedFault = Literal[
    "inverted", "rotated", "mirrored", "labels_shifted", "one_label", "black", "darker", "blurred",
    "repeated",
]  # fmt: skip
"""Faults that ``corruption`` plants, see ``fedgen.data.corruption``."""


class _Corruption(_Section):
    fraction: Fraction
    fault: PlantedFault


class _Command(_Section):
    names: dict[str, Any] = {}  # the options of the groups, from compose


class _Train(_Command):
    """Settings of ``fedgen train``."""

    method: _FunctionGroup
    warm_up: _WarmUp
    data: _Data
    partition: _FunctionGroup
    privacy: _Privacy
    runtime: _Runtime
    evaluation: _Evaluation
    logger: _FunctionGroup
    rounds: Count | None
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)]
    device: Literal["auto", "cpu", "cuda"]
    run_dir: Text | None
    resume: Text | None
    group: Any  # checked against the number of clients
    start: Text | None
    sample_every: Count
    log_every: Count
    evaluate_every: Natural
    held_out: Natural
    corruption: _Corruption
    debug: Any = None  # of an experiment of fedgen debug, like the next
    jobs: Any = None


class _Account(_Train):
    output: Literal["words", "json"]
    spent: bool
    published: Text | None


class _AuditGroup(_Section):
    releases: Natural
    noise_multiplier: PrivacyLevel | None
    canaries: Natural
    confidence: Annotated[float, Ge(0.9), Lt(1)]
    # set by fedgen attack: index of the repetition, and seed of the canaries
    repetition: Natural | None = None
    seed: int | None = None


class _ScoreGroup(_Section):
    """Set by fedgen tune for each of its runs: the query for its score.

    run_index: separates the noise domains of seeded runs; None if noise is secure.
    """

    noise_multiplier: PrivacyLevel
    samples: Count
    run_index: Natural | None


class _Tune(_Train):
    grid: Text
    mean_runs: Annotated[float, Ge(1.01), Le(1000)]
    shape: Annotated[float, Ge(0), Le(100)]
    score_epsilon_ratio: OpenFraction
    score_samples: Annotated[int, Ge(100), Le(10**6)]
    jobs: Processes | None


class _Audit(_Train):
    audit: _AuditGroup


class _Attack(_Command):
    run: Text
    repetitions: Annotated[int, Ge(4), Le(10_000)] | Literal[0]
    canaries: Annotated[int, Ge(1), Le(100_000)] | None
    samples: Annotated[int, Ge(100), Le(10**6)]
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)]
    jobs: Processes | None
    device: Literal["auto", "cpu", "cuda"]


class Run(_Train):
    """Settings of a run, which may be part of an audit or of fedgen tune."""

    audit: _AuditGroup | None = None
    score: _ScoreGroup | None = None


class _DebugGroup(_Section):
    reserved_clients: Count | list[Natural]
    suspect: Fraction
    normal: Fraction
    quantiles: bool
    generators: Annotated[int, Ge(2)]
    samples: Annotated[int, Ge(100), Le(10**6)]
    margin: Fraction
    set_size: Count | None
    halvings: Natural


class _Debug(_Train):
    jobs: Processes | None
    debug: _DebugGroup


class _Benchmark(_Command):
    matrix: Text | None
    methods: Any  # checked against the matrix, like the next three
    data: Any
    epsilons: Any
    seeds: Any
    run_dir: Text | None
    jobs: Processes | None


class _Evaluate(_Command):
    data: _Data | None = None
    evaluation: _Evaluation
    run: Text | None
    samples: Text | None
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)]
    device: Literal["auto", "cpu", "cuda"]


class _Link(_Command):
    host: Text
    port: Annotated[int, Ge(1), Lt(2**16)]
    home: Text
    hosts: list[Text]
    days: Annotated[int, Ge(1), Le(3650)]
    largest: Annotated[int, Ge(1), Le(2000)]
    accept: Text | None
    name: Text | None


class _New(_Command):
    name: Text
    kind: Literal["sums", "dp_sgd"]
    out: Text


class _Node(_Command):
    data: _Data
    number: Natural
    superlink: Text | None
    ca: Text
    key: Text
    home: Text
    policy: Text
    lines: Count
    log: bool


class AboutRelease(_Section):
    """Statements of the publisher of a release."""

    file: Text | None
    name: Text | None
    controller: Text | None
    controller_type: Text | None
    description: Text | None
    purpose: Text | None
    region: Text | None
    data: Text | None
    justification: Text | None
    author: Text | None
    sector: Text | None
    unprotected: Text | None
    tuning: Text | None
    contact: Text | None
    expires: Text | None


class _Release(_Command):
    run: Text
    out: Text
    run_dir: Text | None
    audit: Literal[True, False, "auto"]
    budget_epsilon: PrivacyLevel | None
    max_attack_tpr: OpenFraction | None
    accept_warnings: bool
    registry: bool
    about: AboutRelease


class _About(_Section):
    file: Text | None
    controller: Text | None
    purpose: Text | None
    data: Text | None
    persons: Text | None


class _Report(_Command):
    runs: Text | list[Text]
    audience: Literal["server", "public"]
    out: Text
    about: _About


class _Repeat(_Command):
    run: Text
    repetitions: Count
    jobs: Count | None


class _Sample(_Command):
    run: Text
    n: Any  # checked by the generator, like the next two
    labels: Any
    seed: Any
    out: Text
    npz: Literal["fedgen", "dpimagebench"]
    credentials: Text | None
    credentials_key: Text | None
    device: Literal["auto", "cpu", "cuda"]


class _Verify(_Command):
    package: Text
    signed_by: list[Text]


SCHEMAS: dict[str, type[BaseModel]] = {
    "config": _Train,
    "account": _Account,
    "attack": _Attack,
    "audit": _Audit,
    "benchmark": _Benchmark,
    "debug": _Debug,
    "evaluate": _Evaluate,
    "link": _Link,
    "new": _New,
    "node": _Node,
    "release": _Release,
    "repeat": _Repeat,
    "report": _Report,
    "sample": _Sample,
    "tune": _Tune,
    "verify": _Verify,
}
"""File of ``configs/`` -> its settings."""


def check_resolved(config: DictConfig) -> None:
    """Raise FedgenError for a setting that is missing, or refers to a missing one."""
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        problem = str(error).splitlines()[0]
        raise FedgenError(error.full_key or "override", problem, "correct it") from error
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise FedgenError(missing[0], "is not given", f"add {missing[0]}=...")


def check_settings(
    config: DictConfig, schema: type[BaseModel], extra: Literal["ignore"] | None = None
) -> None:
    """Check all settings of a command, except those that functions declare.

    Args:
        extra: what to do about unknown settings; None: they are errors.

    Raises:
        FedgenError: for the first one that is missing, unknown, or of another type or range.
    """
    plain = OmegaConf.to_container(config, resolve=True)
    try:
        schema.model_validate(plain, extra=extra)
    except ValidationError as error:
        raise explain(error, plain, "") from None
