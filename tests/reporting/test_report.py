"""The report about runs: its content, for whom, and that it works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from hypothesis import given
from hypothesis import strategies as st
from mutation import kills
from PIL import Image
from scipy.optimize import brentq
from scipy.stats import norm
from tiny import Train

from fedgen import cli
from fedgen.privacy.events import Relation
from fedgen.privacy.gaussian_dp import gaussian_delta, gaussian_epsilon
from fedgen.privacy.guarantee import MIN_TPR, PRIORS, guarantee, of_pair, to_json
from fedgen.reporting.headline import format_posterior, posteriors, tier
from fedgen.storage.run_dir import RunDir

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SEVERAL = ["partition=iid", "partition.clients=4", "rounds=3", "sample_every=1", "log_every=1"]


def page(runs: str, out: Path, *more: str) -> str:
    assert cli.run(["report", f"runs={runs}", f"out={out}", *more]) == 0
    return out.read_text()


def tags(html: str) -> list[str]:
    """Return the addresses that a browser would load."""
    return re.findall(r'(?:src|href)="([^"]*)"', html)


def test_a_report_has_the_figures_of_the_run(train: Train, tmp_path: Path) -> None:
    run = train(*SEVERAL, "evaluation=quick", "evaluation.samples=60", "runtime.min_success=0.2",
                "runtime.faults.raises=0.2")  # fmt: skip
    html = page(str(run), tmp_path / "report.html")
    record = json.loads((run / "privacy.json").read_text())
    results = json.loads((run / "results.json").read_text())
    server = -(-record["views"]["server"]["epsilon"] * 100 // 1) / 100
    assert f"<b>{server:.2f}</b>" in html
    assert f"{results['gen2real']['cnn']['mean']:.1%}" in html
    assert "Not for release" in html
    assert "An experiment." in html
    assert results["failures"]
    assert all(kind in html for kind in results["failures"])
    assert html.count('<td class="number" data-value=') == 4 * len(record["clients"])
    # nothing is loaded from anywhere
    assert all(each.startswith(("data:", "#")) for each in tags(html))
    assert "http" not in re.sub(r"data:[^\"]*", "", html)
    assert html.count("data:image/svg+xml") >= 3
    assert html.count("<figcaption>The most that any membership attack can achieve") == 1
    assert '"round 1"' in html
    # a run with a failure, killed while it recorded it
    with (run / "failures.jsonl").open("a") as file:
        file.write('{"round": 1, "cl')
    assert page(str(run), tmp_path / "again.html")
    # what is published is no place for it
    out = run / "public" / "report.html"
    assert cli.run(["report", f"runs={run}", f"out={out}"]) == 2
    assert not out.exists()


def test_no_classifier_is_shown_for_one_label(train: Train, tmp_path: Path) -> None:
    (tmp_path / "photos" / "all").mkdir(parents=True)
    for grey in range(80):
        Image.new("L", (8, 8), 3 * grey).save(tmp_path / "photos" / "all" / f"{grey}.png")
    words = ["method=mixture_small", "data=folder", f"data.path={tmp_path}/photos"]
    words += ["data.public_rows=70", "evaluation=quick", "evaluation.samples=60"]
    html = page(str(train(*words, "partition=single")), tmp_path / "report.html")
    assert "Not evaluated by classifiers: there is only one label." in html
    assert "real2gen" not in html.split("<h2>Utility</h2>")[1].split("<h2>")[0]


def test_the_headline_is_that_of_the_client_that_spent_most(train: Train, tmp_path: Path) -> None:
    run = train(*SEVERAL, "method.routing=per_sample")
    record = json.loads((run / "privacy.json").read_text())
    clients = record["clients"].values()
    for view in ("server", "release"):
        assert record["views"][view]["epsilon"] == max(client[view] for client in clients)
    assert len({client["server"] for client in clients}) > 1
    html = page(str(run), tmp_path / "report.html")
    rows = re.findall(
        r'<tr><td class="number">\d+</td><td class="number" data-value="([^"]+)"', html
    )
    assert len(rows) == len(clients)
    assert [float(value) for value in rows] == sorted(map(float, rows), reverse=True)


def test_the_publishable_report_needs_only_public(train: Train, tmp_path: Path) -> None:
    run = train(*SEVERAL)
    html = page(str(run), tmp_path / "public.html", "audience=public")
    assert "What this generator reveals about the private data" in html
    result = html
    for words in ("derived from its seed", "knows the seed", "A seed"):  # there is one
        result = result.replace(words, "")
    for private in ("ledger", "seed", "accountant", str(run), "real2real", "Clients"):
        assert private not in result, private
    assert "a reader of the release" in html and "the operator of the training" not in html
    # the folder alone makes the same page
    alone = tmp_path / "published"
    shutil.copytree(run / "public", alone)
    assert page(str(alone), tmp_path / "again.html", "audience=public") == html


def test_several_runs_are_compared(train: Train, tmp_path: Path) -> None:
    runs = [
        train("evaluation=quick", "evaluation.samples=40", f"seed={s}", name=f"s{s}")
        for s in (0, 1)
    ]
    html = page(f"[{runs[0]},{runs[1]}]", tmp_path / "both.html")
    assert "<h2>Comparison</h2>" in html
    assert '<td><a href="#run1">s0</a></td>' in html
    assert html.count("1 other run</b> on the same data is in the same folder") == 2
    train("evaluation=none", "held_out=100", name="s2")
    assert "2 other runs</b> on the same data are in the same folder" in page(
        str(runs[0]), tmp_path / "a.html"
    )
    public = page(f"[{runs[0]},{runs[1]}]", tmp_path / "p.html", "audience=public")
    assert "generator 2" in public
    assert "s0" not in re.sub(r'"data:[^"]*"', "", public)


def test_thousands_of_clients_are_summarised_by_extremes(train: Train, tmp_path: Path) -> None:
    run = train()
    for name, change in (("privacy", "clients"), ("results", "per_client")):
        record = json.loads((run / f"{name}.json").read_text())
        clients = record[change] if name == "privacy" else record["bytes"][change]
        one = clients["0"]
        for client in range(1, 2200):
            clients[str(client)] = {**one, "server": client / 100} if name == "privacy" else one
        if name == "results":
            record["sha256"] = RunDir(run).digests()
        (run / f"{name}.json").write_text(json.dumps(record))
    html = page(str(run), tmp_path / "many.html")
    assert "the 2150 between them are omitted" in html
    assert html.count('<td class="number" data-value=') == 4 * 50


@pytest.mark.parametrize(
    ("words", "key", "problem"),
    [
        (["runs=no"], "runs", "not a run directory"),
        (["runs=no", "audience=public"], "runs", "no readable public folder"),
        (["runs=no", "audience=all"], "audience", "cannot be"),
        (["runs=[]"], "runs", "is empty"),
        (["runs=no", "out=a.pdf"], "out", "no .html"),
        ([], "runs", "is not given"),
        (["runs=no", "about=3"], "about", "cannot be 3"),
        (["runs=no", "about.date=today"], "about.date", "there is no"),
    ],
)
def test_invalid_settings_are_refused(
    words: list[str], key: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedgen: {key}: ")
    assert problem in error
    assert error.count("\n") == 1


def test_altered_settings_are_not_reported(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train()
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("clip: 1.0", "clip: 9.0"))
    capsys.readouterr()
    for text in (None, "garbage", ""):
        if text is not None:
            file.write_text(text)
        assert cli.run(["report", f"runs={run}", f"out={tmp_path / 'page.html'}"]) == 2
        assert "config.yaml was altered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("results.json", None, "has no results; finish it: fedgen train resume="),
        ("results.json", "{", "results.json was altered; restore it"),
        ("privacy.json", "{}", "privacy.json was changed after the run wrote it; restore it"),
        ("public/samples.png", None, "has no public/samples.png; restore it"),
    ],
)
def test_a_run_with_altered_files_is_refused(
    file: str,
    text: str | None,
    message: str,
    train: Train,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = train()
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_text(text)
    capsys.readouterr()
    assert cli.run(["report", f"runs={run}", f"out={tmp_path / 'page.html'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedgen: runs: ") and message in error


@pytest.mark.parametrize("audience", ["server", "public"])
def test_no_page_mentions_noise_without_noise(train: Train, tmp_path: Path, audience: str) -> None:
    run = train("method=dpgan_small", "privacy=none", "evaluation=none")
    html = page(str(run), tmp_path / "page.html", f"audience={audience}")
    for word in ("was noised", "remove the noise", "remove it", "Protected:"):
        assert word not in html
    assert "there is no bound" in html.lower()
    assert "seed" not in (run / "public" / "PRIVACY.md").read_text()
    assert "seed" not in (run / "public" / "README.md").read_text()


def test_the_full_report_has_what_the_public_one_lacks(train: Train, tmp_path: Path) -> None:
    run, result = train(), "their bounds are not in this folder"
    assert result in page(str(run), tmp_path / "public.html", "audience=public")
    assert result not in page(str(run), tmp_path / "page.html")


def test_accuracies_by_label_are_bars(train: Train, tmp_path: Path) -> None:
    quick = ["evaluation=quick", "evaluation.samples=260", "evaluation.classifiers.cnn.epochs=1"]
    run = train("method=dp_merf_small", *quick)
    html = page(str(run), tmp_path / "page.html")
    results = json.loads((run / "results.json").read_text())["gen2real"]
    accuracies = [value for scores in results.values() for value in scores["per_class"]]
    assert len(accuracies) == 20
    for value in accuracies:
        assert f'<meter value="{value}">' in html
    assert html.count("<meter") == len(accuracies)
    assert "<meter" not in page(str(run), tmp_path / "public.html", "audience=public")


def test_the_report_states_what_is_protected_and_what_is_not(train: Train, tmp_path: Path) -> None:
    run = train(*SEVERAL, "method=dp_merf_small", "evaluation=none")
    html = page(
        str(run), tmp_path / "a.html", "about.controller=St. Mary's, ${x}", "about.purpose=<b>"
    )
    assert "St. Mary&#39;s, ${x}" in html and "&lt;b&gt;" in html and "<td><b></td>" not in html
    assert html.count('class="missing">missing: about.') == 2
    assert "A person with several images at one client is protected less" in html
    assert "No attack was run" in html and "ε differs between clients" in html
    record = json.loads((run / "privacy.json").read_text())
    pair, _, many = record["views"]["server"]["group_epsilon"].values()
    alone = record["views"]["server"]["epsilon"]
    assert alone < pair < many
    # all of one Gaussian: twice as far
    [[event, count]] = record["clients"]["0"]["events"]
    [sigma] = [event["noise_multiplier"]]
    assert pair == pytest.approx(gaussian_epsilon(2 * count**0.5 / sigma, 1e-5), abs=1e-6)
    statement = (run / "public" / "PRIVACY.md").read_text()
    assert "A person with several images at one client is protected less: ε is at most" in statement
    file = tmp_path / "about.yaml"  # of a release: other keys are not read
    file.write_text("controller: St. John's\npurpose: teaching\nauthor: an author\n")
    html = page(str(run), tmp_path / "b.html", f"about.file={file}", "about.purpose=research")
    assert "St. John&#39;s" in html and "research" in html and "teaching" not in html
    public = page(str(run), tmp_path / "p.html", "audience=public", "about.data=scans of 2024")
    assert "scans of 2024" in public and public.count('class="missing">missing: about.') == 3


@kills(
    "fedgen/reporting/headline.py",
    'if not file.exists():\n        return "No participant',
    'if True:\n        return "No participant',
)
def test_the_report_states_who_vouches_for_it(train: Train, tmp_path: Path) -> None:
    assert "No participant: there are no signed accounts" in page(str(train()), tmp_path / "a.html")
    secure = [*SEVERAL, "method=dp_merf_small", "evaluation=none", "privacy.noise=secure"]
    run = train(*secure, name="secure")
    clients = len(json.loads((run / "privacy.json").read_text())["clients"])
    who = "The only participant" if clients == 1 else f"{clients} of {clients} participants"
    result = f"{who} signed {'its' if clients == 1 else 'their'} own figures, by 1 key (SHA"
    for audience in ("server", "public"):
        assert result in page(str(run), tmp_path / f"{audience}.html", f"audience={audience}")
    alone = tmp_path / "public"
    shutil.copytree(run / "public", alone)
    text = (alone / "account.json").read_text()
    (alone / "account.json").write_text(text.replace("gaussian", "Gaussian"))
    out = f"out={tmp_path / 'x.html'}"
    assert cli.run(["report", f"runs={alone}", "audience=public", out]) == 2


def test_an_audit_is_in_the_report(train: Train, tmp_path: Path) -> None:
    run = train("method=dp_merf_small")
    point = {"releases": 1, "lower_bound": 0.5, "proven": 2.0, "of": "run"}
    outcome = {"confidence": 0.95, "program": {"points": []}, "run": {"points": [point]}}
    (run / "audit.json").write_text(json.dumps(outcome))
    result = "Audit of the run, 1 rounds: ε ≥ 0.50 (95% confidence)"
    assert result in page(str(run), tmp_path / "a.html")
    (run / "audit.json").write_text("{}")
    assert cli.run(["report", f"runs={run}", f"out={tmp_path / 'x.html'}"]) == 2


@given(st.floats(0.05, 30), st.floats(1e-9, 1e-3))
def test_no_attack_on_two_gaussians_exceeds_the_posterior(epsilon: float, delta: float) -> None:
    """The best tests of the worst pair of an (epsilon, delta) bound, at every threshold."""
    mu = brentq(lambda mu: float(gaussian_delta(mu, epsilon)) - delta, 1e-6, 200)
    thresholds = np.linspace(-10, 10 + mu, 2000)
    there, others = norm.sf(thresholds - mu), norm.sf(thresholds)
    enough = there >= MIN_TPR
    of_both = of_pair(epsilon, delta)
    assert of_both.tpr(0.01) >= norm.sf(norm.isf(0.01) - mu) - 1e-9
    for prior in PRIORS:
        after = of_both.posterior(prior)
        right = prior * there / (prior * there + (1 - prior) * others)
        assert right[enough].max() <= after + 1e-9


@pytest.mark.parametrize(
    ("posterior", "shown"),
    [
        (0.0268, "≤ 2.7 %"),
        (0.99591, "≤ 99.6 %"),
        (0.99960, "≤ 99.96 %"),
        (0.9999546, "≤ 99.996 %"),
        (0.99999999, "< 100 %"),
        (1.0, "< 100 %"),
    ],
)
def test_posteriors_are_rounded_up(posterior: float, shown: str) -> None:
    assert format_posterior(posterior) == shown


def test_posteriors_without_a_bound() -> None:
    assert posteriors({"epsilon": None, "guarantee": None}, 1e-5) == ["no bound"] * 3
    assert posteriors({"epsilon": 1.0}, 0.5) == ["no bound"] * 3
    assert posteriors({"epsilon": 0.0}, 1e-12) == ["≤ 1.1 %", "≤ 10.1 %", "≤ 50.1 %"]


@pytest.mark.parametrize(
    ("epsilon", "words"), [(1, "strong"), (1.01, "reasonable"), (10, "reasonable"), (10.1, "weak")]
)
def test_words_of_strength_follow_from_epsilon_and_attacks(epsilon: float, words: str) -> None:
    """A Gaussian is at the threshold exactly at ε = 1 and 10; one (ε, δ) pair, which allows better
    attacks, is beyond it."""
    mu = brentq(lambda mu: gaussian_epsilon(mu, 1e-5) - epsilon, 0.01, 5)
    release = guarantee({GaussianDpEvent(1 / mu): 1}, 1e-5, Relation.ADD_OR_REMOVE_ONE)
    view = {"epsilon": epsilon, "guarantee": to_json(release)}
    assert tier(view, 1e-5, 1000).startswith(words)
    assert not tier({"epsilon": epsilon}, 1e-5, 1000).startswith("strong")
    for delta, protected in ((0.9, None), (0.02, 4), (1e-3, 1437)):
        assert tier(view, delta, protected).startswith("none: δ")
    assert tier({"epsilon": None}, 1e-5, None).startswith("none")


@kills(
    "fedgen/reporting/headline.py",
    'if view["epsilon"] <= epsilon and is_weaker:',
    "if is_weaker:",
)
def test_a_rare_exposure_is_weak() -> None:
    """A record that one batch in a hundred reveals: both figures are small, and ε is not."""
    event = PoissonSampledDpEvent(0.009, GaussianDpEvent(0.1))
    release = guarantee({event: 1}, 1e-5, Relation.ADD_OR_REMOVE_ONE)
    assert release is not None and release.advantage < 0.01 and release.tpr(0.01) < 0.02
    view = {"epsilon": 75.0, "guarantee": to_json(release)}
    assert tier(view, 1e-5, 1000).startswith("weak")


DRIVE = """
<script>
const loaded = [...document.images].every((image) => image.complete && image.naturalWidth > 0);
const slider = document.querySelector("input[type=range]");
const last = document.querySelector("img[data-shown]").src;
slider.value = 0;
slider.dispatchEvent(new Event("input"));
const first = document.querySelector("img[data-shown]").src;
const table = document.querySelector("table.sortable");
const clients = () => [...table.rows].slice(1).map((row) => Number(row.cells[0].textContent));
const button = table.querySelector("button");
button.click();
const down = clients();
button.click();
const up = clients();
document.title = JSON.stringify({
  slid: first !== last, text: document.querySelector("output").textContent, down, up, loaded,
});
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_it_works_in_a_browser(train: Train, tmp_path: Path) -> None:
    run = train(*SEVERAL)
    html = page(str(run), tmp_path / "report.html")
    driven = tmp_path / "driven.html"
    late = DRIVE.replace("<script>", '<script>addEventListener("load", () => {').replace(
        "</script>", "});</script>"
    )
    driven.write_text(html.replace("</body>", f"{late}</body>"))
    assert CHROMIUM is not None
    error = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
         driven.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in error.stderr, error.stderr
    title = re.search(r"<title>(\{.*?\})</title>", error.stdout)
    assert title is not None
    record = json.loads(title[1])
    assert record["slid"]
    assert record["loaded"]
    assert record["text"] == "round 1"
    assert record["down"] == [3, 2, 1, 0]
    assert record["up"] == [0, 1, 2, 3]
