"""``verify.py`` with published test vectors, and against fedgen's own accountant."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import mpmath
import pytest
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from mutation import kills

from fedgen import cli, verify
from fedgen.privacy import guarantee
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import PoissonSampledGroup, Relation, RevealedSampling, to_json

VECTORS = Path(__file__).parent / "vectors"
KEYS = json.loads((VECTORS / "keys.json").read_text())
LARGE_PACKAGES = {
    "fedgen",
    "torch",
    "flwr",
    "omegaconf",
    "opacus",
    "pydantic",
    "hydra",
    "ray",
    "sklearn",
}
ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


@pytest.mark.parametrize("path", sorted((VECTORS / "good").iterdir()), ids=lambda path: path.stem)
def test_valid_vectors_verify(path: Path) -> None:
    rows = verify.verify(str(path), KEYS[path.stem])
    kinds = [kind for kind, _ in rows]
    assert kinds[0] == "proven" and kinds.count("asserted") == 2
    text = verify.format_rows(rows)
    assert ("not covered" in kinds) == (path.stem == "secure")
    assert ("secretly sampled" in text) == (path.stem == "amplified")
    assert "obtain the fingerprints" not in text
    assert "obtain the fingerprints" in verify.format_rows(verify.verify(str(path)))


def refused(name: str) -> str:
    """Return the error code of a bad vector, by which its file is named."""
    with pytest.raises(verify.VerificationError) as error:
        verify.verify(str(VECTORS / "bad" / f"{name}.zip"), KEYS.get(name, []))
    return error.value.code


@kills("fedgen/verify.py", "missing == lost[\"clients\"] and", "",
       case="coverage-account_missing")  # fmt: skip
@kills("fedgen/verify.py", "not numbers & covered", "True", case="coverage-account_twice")
@kills("fedgen/verify.py", "except (InvalidSignature, ValueError) as error:\n        raise",
       "except InvalidSignature:\n        pass\n    except ValueError as error:\n        raise",
       case="signature-count_lowered")  # fmt: skip
@kills("fedgen/verify.py", "not keys or name in keys", "True", case="key-stranger")
@kills("fedgen/verify.py", "not changed", "True", case="digest-statement_changed")
@kills("fedgen/verify.py", "proven <= number(claimed) * (1 + TOLERANCE) + TOLERANCE", "True",
       case="epsilon-lowered_gaussian")  # fmt: skip
@kills("fedgen/verify.py", "max(profile(eps) for", "min(profile(eps) for",
       case="epsilon-one_participant")  # fmt: skip
@kills("fedgen/verify.py", "factor = math.sqrt(1 - missing / honest)", "factor = 1.0",
       case="epsilon-lowered_secure")  # fmt: skip
@kills("fedgen/verify.py", "+ stop * (1 + math.exp(min(eps, 700)))", "", case="epsilon-early_end")
@kills(
    "fedgen/verify.py",
    "    bounds = worst + extra +",
    "    bounds = worst +",
    case="epsilon-other_shape",
)
@kills("fedgen/verify.py", "and 0 <= number(shape) <= 1e6", "", case="format-shape")
@kills("fedgen/verify.py", "not mixed, ", "True, ", case="key-coordinator_signs_for_others")
@kills("fedgen/verify.py", "not unused, ", "True, ", case="key-unused")
@kills("fedgen/verify.py", '    expected |= {"participants": account["clients"]}\n', "",
       case="run-hidden_participant")  # fmt: skip
@kills(
    "fedgen/verify.py",
    "MIN_DELTA <= delta <= MAX_DELTA",
    "MIN_DELTA <= delta",
    case="epsilon-delta",
)
@kills("fedgen/verify.py", "for size, _ in groups} <= {", "for size, _ in groups} or {",
       case="format-group_of_one")  # fmt: skip
@kills("fedgen/verify.py", '"<!--" not in text and ', "", case="statement-comment")
@kills("fedgen/verify.py", "mu is not None and claimed >= mu * (1 - 1e-9)", "True",
       case="curve-mu_of_samples")  # fmt: skip
@kills("fedgen/verify.py", "points[0] >= 0 and ", "", case="format-negative_points")
@kills("fedgen/verify.py", "len(dict(pairs)) == len(pairs)", "True", case="format-duplicate_key")
@kills("fedgen/verify.py", "type(value) in (int, float)", "True", case="format-truth_as_number")
@kills("fedgen/verify.py", "not smaller, ", "True, ", case="statement-second_epsilon")
@kills("fedgen/verify.py", "proven <= delta * (1 + 1e-3) + 1e-8", "True",
       case="curve-shifted")  # fmt: skip
@kills("fedgen/verify.py", "1 >= number(c) >= value - 1e-6", "True", case="curve-advantage")
@kills("fedgen/verify.py", 'agrees and all(agrees), "statement"', 'agrees, "statement"',
       case="statement-delta")  # fmt: skip
@pytest.mark.parametrize("name", sorted(path.stem for path in (VECTORS / "bad").iterdir()))
def test_invalid_vectors_are_refused(name: str) -> None:
    assert refused(name) == name.partition("-")[0]


def test_the_standalone_script_runs_without_fedgen() -> None:
    """The script imports none of the large packages that fedgen requires, and sets the exit
    status."""
    watch = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    for folder, status in (("good", 0), ("bad", 1)):
        path = min((VECTORS / folder).iterdir())
        words = [sys.executable, "-c", watch, verify.__file__, str(path), *KEYS[path.stem]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        loaded = set(done.stderr.splitlines()[-1].split())
        assert "dp_accounting" in loaded and not loaded & LARGE_PACKAGES
        assert "Traceback" not in done.stderr
        assert ("proven" in done.stdout) == (status == 0)


SPENDS: list[tuple[dict[DpEvent, int], Relation]] = [
    ({GaussianDpEvent(4.0): 3, GaussianDpEvent(9.0): 1}, REPLACE),
    ({PoissonSampledDpEvent(0.01, GaussianDpEvent(0.8)): 1000}, ADD),
    ({PoissonSampledDpEvent(0.3, GaussianDpEvent(5.0)): 10, GaussianDpEvent(9.0): 2}, ADD),
    ({PoissonSampledDpEvent(0.001, GaussianDpEvent(5.0)): 200}, REPLACE),
    ({SampledWithoutReplacementDpEvent(100, 5, GaussianDpEvent(1.0)): 300}, REPLACE),
    ({PoissonSampledGroup(0.05, 3, GaussianDpEvent(4.0)): 200}, ADD),
    ({RevealedSampling(0.2, GaussianDpEvent(2.0)): 30}, REPLACE),
    # bounded by Renyi divergences
    ({SampledWithoutReplacementDpEvent(10, 2, GaussianDpEvent(1.0)): 500}, REPLACE),
]


@kills("fedgen/verify.py", "weight * ndtr((count - x) / sigma)", "weight * ndtr(-x / sigma)")
@kills("fedgen/verify.py", "np.log1p(np.expm1(np.minimum(grid, 700)) / event.rate)", "grid")
@kills("fedgen/verify.py", "visits.sf(high) + visits.cdf(max(low, 1) - 1)", "0")
@pytest.mark.parametrize(("spend", "relation"), SPENDS)
@pytest.mark.parametrize("delta", [1e-5, 0.01])
def test_two_accountants_agree(spend: dict[DpEvent, int], relation: Relation, delta: float) -> None:
    """Both accountants round up; ε and the profile agree to a thousandth of ε."""
    expected = epsilon(spend, delta, relation).or_infinity
    events = []
    for event, count in spend.items():
        read = verify.read_event(json.loads(json.dumps(to_json(event))))
        assert read is not None
        events.append((read, count))
    profile = verify.profile_of(tuple(events), relation.value, delta)
    assert verify.epsilon_at(profile, delta) == pytest.approx(expected, rel=1e-3, abs=1e-3)
    curve = guarantee.guarantee(spend, delta, relation)
    assert curve is not None
    for index in (0, 20, 100, 300):
        point, stated = float(curve.points[index]), float(curve.deltas[index])
        off, least = 1e-3 * (1 + point), 1e-3 * delta
        assert profile(point + off) <= stated + least
        assert profile(max(point - off, 0.0)) >= 0.97 * stated - 3 * least


def test_gaussian_epsilon_is_exact() -> None:
    """Against the closed form in 50 digits (Balle and Wang 2018)."""
    mpmath.mp.dps = 50
    mu = mpmath.mpf(3) / 4
    cdf = mpmath.ncdf
    profile = verify.profile_of(((verify.Event("gaussian", 4.0), 9),), "replace_one", 1e-5)
    for eps in (0.0, 0.5, 3.0, 6.0):
        exact = cdf(mu / 2 - eps / mu) - mpmath.exp(eps) * cdf(-mu / 2 - eps / mu)
        assert profile(eps) == pytest.approx(float(exact), rel=1e-10)
    assert verify.epsilon_at(lambda eps: 1.0, 1e-5) == math.inf


def test_the_command_verifies_a_release(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good, bad = (VECTORS / "good" / "poisson.zip", VECTORS / "bad" / "curve-shifted.zip")
    signed_by = f"signed_by={json.dumps(KEYS['poisson'])}"
    assert cli.run(["verify", str(good), signed_by]) == 0
    out = capsys.readouterr().out
    assert "recomputed" in out and "keys" not in out
    for words, problem in (
        ([str(bad)], "fails verification (curve: "),
        ([str(good), 'signed_by=["SHA256:no"]'], "fails verification (key: "),
        ([str(tmp_path / "no.zip")], "is not a file"),
    ):
        assert cli.run(["verify", *words]) == 2
        error = capsys.readouterr().err
        assert problem in error and len(error.splitlines()) == 1


@kills("fedgen/verify.py", "c if c.isprintable() else repr(c)[1:-1] for c", "c for c")
def test_texts_of_a_release_are_printed_without_control_codes() -> None:
    assert verify.format_rows([("assumed", "a\x1b[2J\nb")]) == "assumed     a\\x1b[2J\\nb"
