"""Check settings against each other; each error is one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedgen.config import registry
from fedgen.config.extensions import is_extension, load_named
from fedgen.config.parameters import check_function, check_functions, check_parameters
from fedgen.config.schema import Run, check_resolved, check_settings, target_of
from fedgen.errors import FedgenError
from fedgen.evaluation.inception import check_weights
from fedgen.testing.fault_rates import FaultRates

_MIN_SAMPLES = 256  # for the inception score and the covariance of 128 features


def faults(config: DictConfig) -> FaultRates:
    """Return the rates of injected faults."""
    kinds = registry.to_plain(config.runtime.faults)
    return FaultRates(**{str(k): float(v) for k, v in kinds.items() if k != "server_dies"})


def check(config: DictConfig) -> None:
    """Raise FedgenError for the first invalid setting."""
    check_resolved(config)
    registry.check(OmegaConf.to_container(config, resolve=True), "")
    check_settings(config, Run, extra="ignore")
    for key, problem, remedy in _conflicts(config):
        raise FedgenError(key, problem, remedy)
    check_evaluation(config)
    check_functions(config)
    for place in ("runtime", "logger"):
        check_parameters(config[place], place)


def _conflicts(config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """Yield key, problem and remedy of settings that contradict others."""
    privacy, secure = config.privacy, config.privacy.noise == "secure"
    if privacy.colluders and privacy.aggregation != "secure":
        problem = "applies to secure sums, which this run does not use"
        yield "privacy.colluders", problem, "set privacy.aggregation=secure, or 0"
    if config.evaluate_every and not config.evaluation.classifiers:
        yield "evaluate_every", "there are no classifiers to evaluate with", "set it to 0"
    if OmegaConf.select(config, "debug") is not None:
        problem = "is an experiment of fedgen debug, which trains several generators"
        yield "experiment", problem, "run fedgen debug instead"
    if OmegaConf.select(config, "jobs") is not None:
        yield "jobs", "is a setting of fedgen debug and fedgen benchmark", "leave it out"
    yield from _runtime_conflicts(config)
    if secure:
        yield from _release_conflicts(config)
    elif privacy.budget_epsilon is not None:
        problem = "applies to secure runs, and a seeded run is an experiment"
        yield "privacy.budget_epsilon", problem, "take privacy.noise=secure, or set it to null"
    if config.start is not None and (target := target_of(privacy)) is not None:
        remedy = f"set privacy.{target}=null and privacy.noise_multiplier, "
        remedy += "or take privacy=none"
        yield "start", "a run that starts from the weights of another has no ε", remedy
    if config.method.get("strategy") is None:
        words = ", ".join(registry.words("method.strategy"))
        yield "method.strategy", "is not given", f"choose one of {words}"
    if config.warm_up.method is not None and config.start is not None:
        problem = "cannot be combined with the networks of another run"
        yield "warm_up", problem, "take warm_up=none, or start=null"


def _runtime_conflicts(config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """Yield invalid settings of the runtime."""
    runtime = config.runtime
    for key in ("num_cpus", "num_gpus"):
        value = runtime.get(key, 0.0)
        if round(value, 3) != value:
            remedy = "use at most three decimals, e.g. 0.5"
            yield f"runtime.{key}", f"cannot be {value:g}", remedy
    if faults(config).total > 1:
        yield "runtime.faults", "the probabilities sum to more than 1", "lower them"
    if runtime.faults.hangs and runtime.timeout is None:
        yield "runtime.faults.hangs", "needs a deadline to sleep past", "set runtime.timeout"
    if runtime.faults.dies and config.names.runtime != "ray":
        problem = "clients share the process of the server"
        yield "runtime.faults.dies", problem, "take runtime=ray"


def _release_conflicts(config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """Yield settings that are forbidden with privacy.noise=secure."""
    if config.evaluation.samples:
        problem = "uses private images without noise, which privacy.noise=secure refuses"
        yield "evaluation", problem, "set evaluation=none"
    if config.start is not None:
        yield "start", "has no ε, which privacy.noise=secure requires", "set it to null"
    if config.corruption.fraction:
        problem = "plants a fault for an experiment, which privacy.noise=secure refuses"
        yield "corruption.fraction", problem, "set it to 0"
    if config.held_out:
        yield "held_out", "nothing is evaluated under privacy.noise=secure", "set it to 0"
    if OmegaConf.select(config, "audit.canaries"):
        problem = "a run with canaries cannot be released"
        yield "audit.canaries", problem, "take privacy.noise=seeded, or set it to 0"


def check_evaluation(config: DictConfig) -> None:
    """Raise FedgenError unless there is something to evaluate with, or no evaluation."""
    evaluation = config.evaluation
    if evaluation.samples < min_samples(evaluation):
        problem = f"must be at least {min_samples(evaluation)}, got {evaluation.samples}"
        remedy = "raise it; to have none judged take evaluation=none"
        raise FedgenError("evaluation.samples", problem, remedy)
    if evaluation.classifiers and not evaluation.seeds:
        problem = "must be positive for classifiers, got 0"
        raise FedgenError("evaluation.seeds", problem, "raise it")
    for name, classifier in evaluation.classifiers.items():
        key = f"evaluation.classifiers.{name}"
        check_parameters(classifier, key)
        if "architecture" in classifier:
            from fedgen.models.residual import check_depth  # torch takes a second

            check_depth(classifier.architecture, classifier.depth, f"{key}.depth")
        if "model" in classifier:
            registry.check_model(classifier.model, f"{key}.model")
            model_settings = registry.to_plain(classifier)
            model_settings = {
                n: v for n, v in model_settings.items() if n not in ("type", "model", "most_rows")
            }
            if model_settings or is_extension(classifier.model):
                model = load_named(classifier.model, f"{key}.model")
                check_function(model, classifier.model, model_settings, key, frozenset())
    if evaluation.real2gen and not evaluation.get("real2real", True):
        problem = "needs classifiers of real images, and evaluation.real2real is false"
        raise FedgenError("evaluation.real2gen", problem, "set it to []")
    unknown = [name for name in evaluation.real2gen if name not in evaluation.classifiers]
    if unknown:
        names = ", ".join(map(str, evaluation.classifiers)) or "none"
        raise FedgenError(
            "evaluation.real2gen",
            f"{unknown[0]} is not a known classifier",
            f"choose from: {names}",
        )
    if evaluation.fid and evaluation.inception_weights is not None:
        check_weights(Path(evaluation.inception_weights))


def min_samples(evaluation: DictConfig) -> int:
    """Return the minimum number of samples for an evaluation."""
    if evaluation.judge:
        return _MIN_SAMPLES
    return 2 if evaluation.fid else 1 if evaluation.classifiers or evaluation.leakage else 0
