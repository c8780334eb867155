"""Write the test vectors of ``verify.py``: ``python tests/vectors/make.py``.

``good/NAME.zip`` must verify. ``bad/CODE-NAME.zip`` must be refused with the error code CODE. They
are signed with keys that this script generates; ``keys.json`` lists the fingerprints of those that
are accepted, by name of the package.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)

from fedgen.federation.secagg.signing import Signer, fingerprint
from fedgen.federation.signed_accounts import account_file, sign
from fedgen.privacy import guarantee
from fedgen.privacy.accounting import epsilon
from fedgen.privacy.events import (
    PoissonSampledGroup,
    Relation,
    RevealedSampling,
    Selection,
    Spend,
    to_json,
)
from fedgen.privacy.groups import group_epsilons
from fedgen.reporting.progress import format_epsilon
from fedgen.verify import ACCOUNT, MANIFEST, RELEASE

HERE = Path(__file__).parent
DELTA, RUN, SETTINGS = 1e-5, "0123456789abcdef", "00ff"
ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
COORDINATOR, *SITES = (Signer(generate_private_key(SECP384R1()), None) for _ in range(4))
STRANGER = Signer(generate_private_key(SECP384R1()), None)

Bundle = dict[str, Any]
"""Content of a package: ``generator`` and ``accounts`` as data (an account: text, signer), the
accepted ``keys``, and ``files`` as bytes, which override the others."""


def bound(spend: Spend, stop: float = 0.0, assumes: Sequence[str] = ()) -> dict[str, Any]:
    """Return one bound of an account."""
    events = [[to_json(event), count] for event, count in spend.items()]
    return {"events": events, "stop_probability": stop, "assumes": list(assumes)}


def bundle(
    spend: Spend,
    relation: Relation,
    *,
    unit: str = "record",
    clients: int = 1,
    bounds: Sequence[dict[str, Any]] = (),
    aggregation: dict[str, Any] | None = None,
    stop: float = 0.0,
) -> Bundle:
    """Return a release with the figures of ``spend``.

    Args:
        bounds: what each participant signs; empty: ``spend``.
    """
    curve = guarantee.guarantee(spend, DELTA, relation, stop)
    text = {
        "participants": clients,
        "format": ACCOUNT,
        "run": RUN,
        "settings": SETTINGS,
        "fedgen": "0.1.0",
        "noise": "secure",
        "unit": unit,
        "relation": relation.value,
        "aggregation": aggregation or {"kind": "local"},
        "bounds": list(bounds) or [bound(spend)],
    }
    groups = group_epsilons([spend], DELTA, relation) if unit == "record" else None
    privacy = {
        "epsilon": epsilon(spend, 0.99 * DELTA if stop else DELTA, relation).value,
        "guarantee": guarantee.to_json(curve),
        "group_epsilon": None if stop else groups,
        "delta": DELTA,
        "unit": unit,
        "relation": relation.value,
        "noise": "secure",
    }
    return {
        "clients": clients,
        "generator": {"privacy": privacy},
        "accounts": [
            (copy.deepcopy(text) | {"clients": [[client, client]]}, SITES[client % len(SITES)])
            for client in range(clients)
        ],
        "files": {"generator.safetensors": b"weights"},
        "keys": [COORDINATOR, *SITES[:clients]],
    }


def write(content: Bundle, path: Path) -> None:
    """Write a release; its manifest is signed last."""
    files = content["files"]
    generator = content["generator"]
    weights = hashlib.sha256(files["generator.safetensors"]).hexdigest()
    generator.setdefault("generator_sha256", weights)
    privacy = generator["privacy"]
    stated = format_epsilon(privacy["epsilon"])
    accounts = [sign(json.dumps(text), signer) for text, signer in content["accounts"]]
    lost = privacy.get("without_bound", {"clients": 0, "of": 0})
    but = f" For {lost['clients']} of the {lost['of']} clients there is no bound." * bool(
        lost["of"]
    )
    written = {
        "PRIVACY.md": f"-differential privacy with ε = {stated} and δ = {DELTA:g}.{but}".encode(),
        "README.md": f"({stated}, {DELTA:g})-differential privacy per record".encode(),
        "generator.json": json.dumps(generator).encode(),
        "account.json": account_file(RUN, SETTINGS, content["clients"], accounts).encode(),
        **files,
    }
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in written.items()}
    manifest = {"format": RELEASE, "run": RUN, "files": digests}
    written[MANIFEST] = json.dumps(sign(json.dumps(manifest), COORDINATOR)).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in written.items():
            member = zipfile.ZipInfo(f"release/{name}")
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)


def write_altered(source: Path, path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Write a copy of a release with files that were changed after they were signed."""
    with zipfile.ZipFile(source) as archive:
        files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(f"release/{name}"), data, zipfile.ZIP_DEFLATED)


def good() -> dict[str, Bundle]:
    """Return valid packages: one for each kind of event and aggregation."""
    gaussian: dict[DpEvent, int] = {GaussianDpEvent(4.0): 3, GaussianDpEvent(9.0): 1}
    share: dict[DpEvent, int] = {GaussianDpEvent(3.0): 2}
    # one of three participants has no bound: two of the three assumed shares of noise remain
    without_one: dict[DpEvent, int] = {GaussianDpEvent(3.0 * (2 / 3) ** 0.5): 2}
    sampled: dict[DpEvent, int] = {
        SampledWithoutReplacementDpEvent(10, 2, GaussianDpEvent(1.0)): 20
    }
    visited: dict[DpEvent, int] = {GaussianDpEvent(1.0): 12}
    amplified = [
        bound(visited),
        bound(sampled, 1e-13, ["coordinator: cohorts were secretly sampled, as planned"]),
    ]
    secure = bundle(without_one, ADD, clients=3, bounds=[bound(share)],
                    aggregation={"kind": "secure", "honest": 3})  # fmt: skip
    del secure["accounts"][1], secure["keys"][2]
    secure["generator"]["privacy"]["without_bound"] = {"clients": 1, "of": 3}
    runs: list[Spend] = [
        {GaussianDpEvent(5.0): 2},
        {PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1)): 200, GaussianDpEvent(40.0): 1},
    ]
    subsets: list[Spend] = [{SampledWithoutReplacementDpEvent(50, 5, GaussianDpEvent(3.0)): 4}]
    return {
        "selected": bundle({Selection.of_spends(runs, 5.0, 1.0): 1}, ADD),
        "selected_subsets": bundle({Selection.of_spends(subsets, 5.0, 0.0): 1}, REPLACE),
        "gaussian": bundle(gaussian, ADD, clients=2),
        "poisson": bundle({PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1)): 500}, ADD),
        "replaced": bundle({PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1)): 500}, REPLACE),
        "person": bundle(
            {PoissonSampledGroup(0.02, 4, GaussianDpEvent(3.0)): 300}, ADD, unit="person"
        ),
        "revealed": bundle({RevealedSampling(0.1, GaussianDpEvent(2.0)): 50}, REPLACE),
        "secure": secure,
        "amplified": bundle(sampled, REPLACE, unit="client", bounds=amplified, stop=1e-13),
    }


def bad() -> dict[str, Bundle | tuple[str, Callable[[dict[str, bytes]], None]]]:
    """Return invalid packages; some as a change to a valid one after it was signed."""
    made: dict[str, Any] = {}

    def base(name: str) -> Bundle:
        return copy_of(good()[name])

    def case(name: str, of: str = "gaussian") -> Bundle:
        made[name] = base(of)
        return made[name]

    def replaced_in(file: str, old: str, new: str) -> Callable[[dict[str, bytes]], None]:
        def change(files: dict[str, bytes]) -> None:
            assert old.encode() in files[file], (file, old)
            files[file] = files[file].replace(old.encode(), new.encode(), 1)

        return change

    def replaced_and_signed(old: str, new: str) -> Callable[[dict[str, bytes]], None]:
        """Change a signed text, and let the coordinator sign the files again."""

        def change(files: dict[str, bytes]) -> None:
            replaced_in("account.json", old, new)(files)
            digests = {n: hashlib.sha256(d).hexdigest() for n, d in files.items() if n != MANIFEST}
            manifest = json.dumps({"format": RELEASE, "run": RUN, "files": digests})
            files[MANIFEST] = json.dumps(sign(manifest, COORDINATOR)).encode()

        return change

    swapped = replaced_in("generator.safetensors", "weights", "WEIGHTS")
    made["digest-generator_swapped"] = "gaussian", swapped
    made["digest-statement_changed"] = "gaussian", replaced_in("PRIVACY.md", "ε = ", "ε =  ")
    removed = '[{\\"event\\": \\"gaussian\\", \\"noise_multiplier\\": 9.0}, 1]'
    made["signature-event_removed"] = "gaussian", replaced_and_signed(f", {removed}", "")
    made["signature-count_lowered"] = "poisson", replaced_and_signed("}}, 500]", "}}, 100]")
    made["signature-manifest"] = "gaussian", replaced_in(MANIFEST, RUN, RUN[::-1])
    made["zip-file_missing"] = "gaussian", lambda files: files.pop("account.json")
    made["zip-file_added"] = "gaussian", lambda files: files.update({"run.py": b""})
    made["zip-too_large"] = "gaussian", lambda files: files.update({"README.md": b" " * 2**23})
    made["format-duplicate_key"] = (
        "gaussian",
        replaced_and_signed('"clients": 2', '"clients": 3, "clients": 2'),
    )
    made["format-no_json"] = "gaussian", lambda files: files.update({MANIFEST: b"[" * 10**5})

    case("digest-other_generator")["generator"]["generator_sha256"] = "00" * 32
    forged = case("signature-other_key")["accounts"]
    forged[0] = forged[0][0], _Forger(SITES[0].key, None)
    case("key-unused")["keys"].append(SITES[2])
    twice_signer = case("key-coordinator_signs_for_others")["accounts"]
    twice_signer[1] = twice_signer[1][0], COORDINATOR
    made["key-coordinator_signs_for_others"]["keys"].remove(SITES[1])
    stranger = case("key-stranger")["accounts"]
    stranger[0] = stranger[0][0], STRANGER
    made["key-stranger"]["keys"].remove(SITES[0])
    case("coverage-account_missing")["accounts"].pop()
    twice = case("coverage-account_twice")["accounts"]
    twice.append(twice[1])
    case("run-hidden_participant")["clients"] = 1
    del made["run-hidden_participant"]["accounts"][1], made["run-hidden_participant"]["keys"][2]
    hidden = case("coverage-too_many_without_bound", "secure")["generator"]["privacy"]
    hidden["without_bound"] = {"clients": 2, "of": 3}
    case("run-other_run")["accounts"][0][0]["run"] = RUN[::-1]
    case("run-other_unit")["accounts"][0][0]["unit"] = "client"
    case("run-other_settings")["accounts"][1][0]["settings"] = "ff00"
    case("noise-seeded")["generator"]["privacy"]["noise"] = "seeded"
    for text, _ in made["noise-seeded"]["accounts"]:
        text["noise"] = "seeded"
    for name in good():
        case(f"epsilon-lowered_{name}", name)["generator"]["privacy"]["epsilon"] *= 0.98
    case("format-group_of_one")["generator"]["privacy"]["group_epsilon"] = {"1": 100.0}
    below = case("format-negative_points", "revealed")["generator"]["privacy"]["guarantee"]
    below |= {"profile": [[-30.0, 0.996], [0.0, 1.0]], "advantage": 0.993}
    for figure in ("tpr", "posterior"):
        below[figure] = dict.fromkeys(below[figure], 1.0)
    gaussian = {"mu": 0.0, "rho": 0.0, "profile": None, "advantage": 0.0}
    case("curve-mu_of_samples", "poisson")["generator"]["privacy"]["guarantee"] |= gaussian
    case("curve-mu_and_profile")["generator"]["privacy"]["guarantee"]["profile"] = [[0.0, 0.0]]
    case("format-text_as_number")["generator"]["privacy"]["delta"] = "1e-05"
    case("format-truth_as_number")["generator"]["privacy"]["guarantee"]["advantage"] = True
    case("epsilon-tiny_delta")["generator"]["privacy"]["delta"] = 1e-320
    case("epsilon-delta")["generator"]["privacy"]["delta"] = 1000.0
    case("format-infinite_group")["generator"]["privacy"]["group_epsilon"]["5"] = float("inf")
    case("format-no_rates")["generator"]["privacy"]["guarantee"]["tpr"] = {}
    case("curve-rho_without_mu", "poisson")["generator"]["privacy"]["guarantee"]["rho"] = 0.1
    case("epsilon-group_of_zero")["generator"]["privacy"]["group_epsilon"]["5"] = 0.0
    case("epsilon-group")["generator"]["privacy"]["group_epsilon"]["5"] *= 0.98
    worse = case("epsilon-one_participant")["accounts"][1][0]["bounds"][0]["events"]
    worse[0][1] += 1
    for key, value in {"mean": 8.0, "shape": 2.0}.items():
        more = case(f"epsilon-other_{key}", "selected")["accounts"][0][0]["bounds"][0]["events"]
        more[0][0][key] = value
    fewer = case("epsilon-less_noise", "selected")["accounts"][0][0]["bounds"][0]["events"]
    for run in fewer[0][0]["alternatives"]:
        run[0][1] *= 2
    for name, change in (
        ("mean", {"mean": 0.5}),
        ("shape", {"shape": -0.5}),
        ("nothing_selected", {"alternatives": []}),
        ("run_without_events", {"alternatives": [[]]}),
        ("selection_selection_divergencess", {"alternatives": [[[{"event": "select"}, 1]]]}),
    ):
        wrong = case(f"format-{name}", "selected")["accounts"][0][0]["bounds"][0]["events"]
        wrong[0][0] |= change
    repeated = case("format-selected_twice", "selected")["accounts"][0][0]["bounds"][0]["events"]
    repeated[0][1] = 2
    mixed = case("format-selection_and_event", "selected")["accounts"][0][0]["bounds"][0]["events"]
    mixed.append([to_json(GaussianDpEvent(9.0)), 1])
    case("epsilon-no_noise")["accounts"][0][0]["bounds"] = [
        {"events": [[{"event": "non_private"}, 1]], "stop_probability": 0.0, "assumes": []}
    ]
    stopped = case("epsilon-early_end", "amplified")["accounts"][0][0]["bounds"]
    stopped[1]["stop_probability"] = 1e-3
    case("curve-mu")["generator"]["privacy"]["guarantee"]["mu"] *= 0.98
    for point in case("curve-shifted", "poisson")["generator"]["privacy"]["guarantee"]["profile"]:
        point[0] *= 0.98
    case("curve-advantage", "poisson")["generator"]["privacy"]["guarantee"]["advantage"] *= 0.99
    case("curve-tpr")["generator"]["privacy"]["guarantee"]["tpr"]["0.01"] *= 0.99
    case("curve-posterior")["generator"]["privacy"]["guarantee"]["posterior"]["0.5"] *= 0.99
    case("curve-rho")["generator"]["privacy"]["guarantee"]["rho"] *= 0.99
    refuted = {"points": [{"lower_bound": 4.2, "proven": 4.0}]}
    case("audit-refuted")["files"]["audit.json"] = json.dumps(refuted).encode()
    case("statement-epsilon")["files"]["PRIVACY.md"] = "with ε = 0.50 and δ = 1e-05".encode()
    hides = "<!-- with ε = 9 and δ = 1e-05 --> epsilon is 0.1".encode()
    case("statement-comment")["files"]["PRIVACY.md"] = hides
    arabic = "with ε = ٠٩ and δ = 1e-05".encode()
    case("statement-digits")["files"]["PRIVACY.md"] = arabic
    smaller = "with ε = 9.00 and δ = 1e-05. In short, ε\u00a0=\u00a00.1".encode()
    case("statement-second_epsilon")["files"]["PRIVACY.md"] = smaller
    silent = "with ε = 3.00 and δ = 1e-05".encode()
    case("statement-without_bound", "secure")["files"]["PRIVACY.md"] = silent
    case("statement-delta")["files"]["README.md"] = b"(9, 1e-09)-differential privacy"
    case("statement-missing")["files"]["PRIVACY.md"] = b"private"
    event = case("format-unknown_event")["accounts"][0][0]["bounds"][0]["events"][0]
    event[0] = {"event": "laplace", "noise_multiplier": 1.0}
    many = case("format-many_points", "poisson")["generator"]["privacy"]["guarantee"]
    many["profile"] = [[n * 1e-4, 0.5] for n in range(10_000)]
    large = {
        "event": "poisson_group",
        "rate": 0.5,
        "size": 10**9,
        "gates": to_json(GaussianDpEvent(9)),
    }
    case("format-large_group")["accounts"][0][0]["bounds"][0]["events"] = [[large, 1]]
    events = case("format-many_events")["accounts"][0][0]["bounds"][0]["events"]
    events += [[to_json(GaussianDpEvent(9.0 + n)), 1] for n in range(200)]
    case("format-negative_count")["accounts"][0][0]["bounds"][0]["events"][0][1] = -1
    case("format-rate", "poisson")["accounts"][0][0]["bounds"][0]["events"][0][0]["rate"] = 2.0
    case("format-participants")["accounts"][0][0]["clients"] = [[0, 10**15]]
    case("format-other_text")["accounts"][0][0]["format"] = RELEASE
    return made


class _Forger(Signer):
    """Attach the public key of this signer to signatures of a stranger."""

    def sign(self, text: bytes) -> bytes:
        return super().sign(text)[:49] + STRANGER.sign(text)[49:]


def copy_of(content: Bundle) -> Bundle:
    """Return a copy with the same keys."""
    accounts = [(copy.deepcopy(text), signer) for text, signer in content["accounts"]]
    kept = ("accounts", "keys")
    rest = {name: copy.deepcopy(part) for name, part in content.items() if name not in kept}
    return {**rest, "accounts": accounts, "keys": list(content["keys"])}


def main() -> None:
    """Write all vectors."""
    for folder in ("good", "bad"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
        (HERE / folder).mkdir()
    keys = {}
    for name, content in good().items():
        write(content, HERE / "good" / f"{name}.zip")
        keys[name] = content["keys"]
    for name, made in bad().items():
        path = HERE / "bad" / f"{name}.zip"
        if isinstance(made, dict):
            write(made, path)
            keys[name] = made["keys"]
        else:
            source, change = made
            keys[name] = keys[source]
            write_altered(HERE / "good" / f"{source}.zip", path, change)
    with zipfile.ZipFile(HERE / "good" / "gaussian.zip") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice
        with zipfile.ZipFile(HERE / "bad" / "zip-file_twice.zip", "w") as twice:
            for name in (*archive.namelist(), archive.namelist()[0]):
                twice.writestr(zipfile.ZipInfo(name), archive.read(name))
    (HERE / "bad" / "zip-no_archive.zip").write_bytes(b"no archive")
    accepted = {
        name: [fingerprint(signer.key.public_key()) for signer in signers]
        for name, signers in keys.items()
    }
    (HERE / "keys.json").write_text(json.dumps(accepted, indent=1) + "\n")


if __name__ == "__main__":
    main()
