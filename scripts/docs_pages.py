"""Generated pages of the documentation site: README, settings, command line and docstrings. A hook
of mkdocs (``mkdocs.yml``)."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from omegaconf import OmegaConf

from fedgen.cli import help_text

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ["fedgen.methods.api"]
PRIVACY = [
    f"fedgen.privacy.{name}"
    for name in (
        "events", "accounting", "subsampling", "calibration", "mechanisms", "bounds",
        "batch_sampling", "aggregation", "routing", "clipping", "gaussian_noise", "budget",
        "ledger", "audit_bounds", "guarantee",
    )
]  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {
        "index.md": _moved((ROOT / "README.md").read_text()),
        "changelog.md": _moved((ROOT / "CHANGELOG.md").read_text()),
        "contributing.md": _moved((ROOT / "CONTRIBUTING.md").read_text()),
        "security.md": _moved((ROOT / "SECURITY.md").read_text()),
        "reference/command-line.md": f"# Command line\n\n```text\n{help_text()}```\n",
        "reference/settings.md": settings(ROOT / "fedgen" / "configs"),
        "reference/python.md": "# Python\n\n::: fedgen.api\n",
        "reference/contract.md": _modules("A method's contract", CONTRACT),
        "reference/privacy.md": _modules("Privacy", PRIVACY),
    }
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    script = (ROOT / "fedgen" / "verify.py").read_text()
    files.append(File.generated(config, "verify.py", content=script))
    return files


def _moved(text: str) -> str:
    """Return a page of the top folder with links relative to ``docs/``."""
    text = text.replace("](docs/", "](").replace("](SECURITY.md)", "](security.md)")
    for name in ("CHANGELOG", "CONTRIBUTING"):
        text = text.replace(f"]({name}.md)", f"]({name.lower()}.md)")
    return text


def settings(configs: Path) -> str:
    """Return all groups of settings with their comments."""
    parts = [
        "# Settings\n\n`fedgen train --cfg ...` prints those of a run. `group=NAME` chooses a file "
        "of a group, `group.key=VALUE` sets one of its settings."
    ]
    alone = [configs / f"{name}.yaml" for name in ("config", "audit", "sample", "report")]
    parts += [f"## {file.stem}\n\n{_yaml(file)}" for file in alone]
    for group in ("data", "partition", "privacy", "runtime", "evaluation", "warm_up", "method"):
        files = sorted((configs / group).glob("*.yaml"))
        parts += [f"## {group}={file.stem}\n\n{_yaml(file)}" for file in files]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Keep a figure and its spread on one line; link to the copy of ``verify.py`` on the site;
    append to a method's page its algorithm and its settings."""
    markdown = markdown.replace("](../fedgen/verify.py)", "](verify.py)")
    markdown = markdown.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    place = Path(page.file.src_uri)
    if place.parent.name != "methods":
        return markdown
    file = ROOT / "fedgen" / "configs" / "method" / f"{place.stem}.yaml"
    whole = OmegaConf.load(file)
    while "type" not in whole:  # settings that extend those of another method
        whole = OmegaConf.load(file.with_stem(str(whole.defaults[0])))
    module = ROOT / "fedgen" / "methods" / f"{whole.type}.py"
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return (
        f"{markdown}\n\n## The algorithm\n\n```text\n{text}\n```\n\n"
        f"## Settings\n\n`method={place.stem}`:\n\n{_yaml(file)}\n"
    )


def _modules(title: str, names: list[str]) -> str:
    return f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"


def _yaml(file: Path) -> str:
    return f"```yaml\n{file.read_text()}```"
