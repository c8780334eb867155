"""Parse overrides: Hydra's grammar, sweeps, and its errors as one line."""

from __future__ import annotations

import difflib
import itertools
import numbers
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from fedgen.config.explain import MAX_SHOWN
from fedgen.config.extensions import config_folders
from fedgen.config.renamed import REMOVED, RENAMED
from fedgen.errors import FedgenError
from fedgen.storage.io import read_yaml
from fedgen.storage.schemas import validator

_LONGEST, _DEEPEST = 100_000, 50  # characters of an override; nesting of lists
_TOO_LARGE = "is too long or nested too deeply", "shorten it"
_HINTS = 3  # settings named in a hint
_HOME_TILDE = re.compile(r"(?<=[=,\[])~(?=/)")  # unchanged by a shell, in a word or in quotes
# what is quoted already; or a name inside of a list with a letter that Hydra's grammar has no place
# for outside of quotes
_UNQUOTED_NAME = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|"""
    r"[^\[\]{},:'\"$\x00-\x20]*[^\[\]{},:'\"$\x00-\x20\w/.+\-%*@?|\\][^\[\]{},:'\"$]*",
    re.ASCII,
)
# neither hydra.* nor interpolation, which would import, or read the environment
_SETTING = re.compile(r"(?!hydra)[A-Za-z_][\w./]*=[^$]*", re.ASCII)
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_/][a-z0-9_./-]*", re.ASCII | re.IGNORECASE)


def override_key(word: str) -> str:
    """Return the key of ``KEY=VALUE``."""
    return word.partition("=")[0].lstrip("+~")


def parse_overrides(words: Sequence[str]) -> list[str]:
    """Return overrides in Hydra's grammar, which accepts neither non-ASCII letters nor ``=();&#``
    and similar characters outside quotes: names with these (``data.path=Hündin``) are quoted here.
    ``~`` in a path is the home folder.

    Raises:
        FedgenError: for an override that is not valid even in quotes.
    """
    parser = OverridesParser.create()

    def is_read(word: str) -> bool:
        try:
            parser.parse_overrides([word])
        except HydraException:
            return False
        except (ValueError, RecursionError) as error:  # thousands of digits or brackets
            raise FedgenError(override_key(word), *_TOO_LARGE) from error
        return True

    def quoted(word: str) -> str:
        key, _, value = word.partition("=")
        text = f"{key}={to_override_value(value)}"
        if set(value) & set("[]{},'\"$"):  # not a plain name: quote the names in it
            text = _UNQUOTED_NAME.sub(lambda name: name[1] or to_override_value(name[0]), value)
            text = f"{key}={text}"
        if not is_read(text):
            remedy = f"""quote it: {key}="'...'" """.strip()
            raise FedgenError(override_key(word), f"cannot be read: {value[:MAX_SHOWN]}", remedy)
        return text

    words = [_HOME_TILDE.sub(lambda _: str(Path.home()), word) for word in words]
    for word in words:
        if word.startswith("~"):
            remedy = "leave out the ~, or set it to null"
            raise FedgenError(override_key(word), "cannot be removed", remedy)
        if override_key(word).startswith("hydra.") and override_key(word) != "hydra.searchpath":
            problem = "is an option of Hydra's command line, which fedgen does not use"
            remedy = "leave it out; run_dir=DIR says where a run is"
            raise FedgenError(override_key(word), problem, remedy)
        deepest = max(itertools.accumulate((c in "[{") - (c in "]}") for c in word), default=0)
        if len(word) > _LONGEST or deepest > _DEEPEST:
            raise FedgenError(override_key(word)[:MAX_SHOWN], *_TOO_LARGE)
    return [word if is_read(word) else quoted(word) for word in words]


def group_folders() -> dict[str, Path]:
    """Return the folder of each group, of fedgen or of an extension."""
    places = [place for place in reversed(config_folders()) if place.is_dir()]
    return {path.name: path for place in places for path in place.iterdir() if path.is_dir()}


def check_groups(overrides: list[str]) -> None:
    """Raise FedgenError for an option of a group that is not a name."""
    folders = group_folders()
    parsed = OverridesParser.create().parse_overrides(overrides)
    for word, override in zip(overrides, parsed, strict=True):
        group = folders.get(override.key_or_group)
        value = override.value()
        left_out = override.is_delete() and value is None
        if group and not left_out and not isinstance(value, str | QuotedString | dict):
            options = sorted(path.stem for path in group.glob("*.yaml"))
            problem = f"cannot be {word.partition('=')[2]}"
            raise FedgenError(override.key_or_group, problem, f"choose {', '.join(options)}")


def set_values(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Apply overrides of single settings (``key=value``, ``+key=value``) to a composed
    configuration, as Hydra does while composing, which is the slowest step.

    Raises:
        HydraException: for an unknown key.
        FedgenError: for an existing key with ``+``.
    """
    for override in overrides:
        key, value = override.key_or_group, override.value()
        present = OmegaConf.select(config, key, throw_on_missing=False) is not None
        if override.is_add() and present and not isinstance(value, dict | list):
            raise FedgenError(key, "is a setting already", "leave out the +")
        try:
            added = override.is_add() or override.is_force_add()
            OmegaConf.update(config, key, value, merge=True, force_add=added)
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise HydraException(f"Could not override '{key}'") from error


def to_override_value(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, numbers.Real):  # NumPy's too
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)  # 1.0 is 1: the same run as by the command line
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(f"{key}:{to_override_value(entry)}" for key, entry in value.items())
            + "}"
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(to_override_value(entry) for entry in value) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    quoted = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{quoted}'"


def shell_quote(words: Sequence[str]) -> str:
    """Return words quoted for a shell, in double quotes if they contain single ones."""
    return " ".join(
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
        for word in words
    )


def combinations(overrides: list[str]) -> list[list[str]]:
    """Return every combination of comma-separated values, as in Hydra's sweeps, and of the axes of
    ``sweep=NAME``."""
    sweeps = [word.partition("=")[2] for word in overrides if override_key(word) == "sweep"]
    base, axes = _axes(sweeps[-1]) if sweeps else ([], [])
    overrides = parse_overrides([word for word in overrides if override_key(word) != "sweep"])
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        options = [
            [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            if override.is_sweep_override()
            else [word]
            for override, word in zip(parsed, overrides, strict=True)
        ]
    except HydraException as error:
        raise one_line_error(error) from error
    return [
        [*base, *words, *batch] for words in _product(axes) for batch in itertools.product(*options)
    ]


def grid_points(grid: str) -> list[list[str]]:
    """Return the overrides of each point of a grid: a name in ``configs/sweep``, or a file of the
    same form, which may be untrusted.

    Raises:
        FedgenError: if the grid does not exist, or is invalid.
    """
    try:
        path = Path(grid) if grid.endswith(".yaml") else config_name("sweep", grid)
    except FedgenError as error:
        raise FedgenError("grid", error.problem, error.remedy) from error
    try:
        content: Any = yaml.safe_load(read_yaml(path))
        validator("grid").validate(content)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        raise FedgenError("grid", problem, "give a file, or a name in configs/sweep") from error
    except (ValueError, yaml.YAMLError, jsonschema.ValidationError) as error:
        problem = f"{path} cannot be read: {str(error).splitlines()[0][:MAX_SHOWN]}"
        raise FedgenError("grid", problem, "write axes: as in docs/tuning.md") from error
    points = [[*content.get("base", []), *words] for words in _product(content["axes"])]
    for word in itertools.chain(*points):
        if not _SETTING.fullmatch(word):
            raise FedgenError("grid", f"{path}: {word!r} is not a setting", "write key=value")
    return points


def _product(axes: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the overrides of each combination of axes: alternatives of one or more overrides."""
    return [" ".join(point).split() for point in itertools.product(*axes)]


def _axes(name: str) -> tuple[list[str], list[list[str]]]:
    """Return the overrides of all runs of a sweep, and its axes: alternatives of one or more
    overrides."""
    sweep = OmegaConf.to_container(OmegaConf.load(config_name("sweep", name)))
    assert isinstance(sweep, dict)
    return sweep["base"], sweep["axes"]


def config_name(folder: str, name: str) -> Path:
    """Return the file of a sweep or a matrix.

    Raises:
        FedgenError: if there is none with this name.
    """
    folders = [place / folder for place in config_folders()]
    files = {path.stem: path for place in folders for path in place.glob("*.yaml")}
    if name not in files:
        near = difflib.get_close_matches(name, files, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise FedgenError(
            folder, f"there is no {name!r}", f"{hint}choose {', '.join(sorted(files))}"
        )
    return files[name]


def _options_with(key: str) -> list[str]:
    """Return the options of a group that have a setting."""
    group, _, rest = key.partition(".")
    folder = group_folders().get(group)

    def has(file: Path) -> bool:
        settings: Any = OmegaConf.to_container(OmegaConf.load(file))
        for part in rest.split("."):
            if not isinstance(settings, dict) or part not in settings:
                return False
            settings = settings[part]
        return True

    files = sorted(folder.glob("*.yaml")) if folder and rest else []
    return [file.stem for file in files if has(file)]


def _suggestion(wrong: str, keys: Sequence[str]) -> list[str]:
    """Return similar settings: with the same last part, or similar spelling."""
    group, _, word = wrong.rpartition(".")
    word = _SYNONYMS.get(word, word)
    ends = [key for key in keys if key.count(".") == 1 and key.endswith(f".{word}")]
    ends = ends or [key for key in keys if key.count(".") == 1 and key.endswith(f"_{word}")]
    if ends:
        return ends[:_HINTS]
    # the name of a group that is right would make all of its settings look similar
    siblings = {key.removeprefix(f"{group}."): key for key in keys if key.startswith(f"{group}.")}
    if group and siblings:
        return [siblings[near] for near in difflib.get_close_matches(word, siblings, 1)]
    return difflib.get_close_matches(wrong, keys, 1)


_SYNONYMS = {"lr": "learning_rate", "batch_size": "batch", "epochs": "rounds"}


def one_line_error(error: Exception, list_keys: Callable[[], list[str]] = list) -> FedgenError:
    """Return Hydra's error as key, problem, remedy.

    Args:
        list_keys: returns the keys of the chosen groups.
    """
    text = str(error)
    option = re.search(r"Could not find '([\w/]+)/([^'/]*)'", text)
    if option:
        options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        near = difflib.get_close_matches(option[2], options, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        extension_hint = "for your own, set FEDGEN_EXTENSIONS=PACKAGE"
        remedy = f"{hint}choose {', '.join(options)}; {extension_hint}"
        return FedgenError(option[1], f"there is no {option[2]!r}", remedy)
    key = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if key:
        # a wrong key within a value, e.g. method.shares={levels:1}, is named by the cause alone
        wrong, inner = key[1] or key[2], getattr(error.__cause__, "full_key", None) or ""
        wrong = inner if inner.startswith(f"{wrong}.") else wrong
        of_warm_up = "warm_up." * wrong.startswith("warm_up.")
        if present := RENAMED.get(wrong.removeprefix(of_warm_up)):
            return FedgenError(wrong, "was renamed", f"use {of_warm_up}{present}")
        if wrong in REMOVED:
            return FedgenError(wrong, "was removed", REMOVED[wrong])
        group, _, last = wrong.rpartition(".")
        if last == wrong and any(name.startswith(f"{last}.") for name in list_keys()):
            remedy = f"set {last}.KEY=VALUE for one of its settings"
            return FedgenError(wrong, "is a group of settings", remedy)
        if last in list_keys() and not any(name.startswith(f"{group}.") for name in list_keys()):
            return FedgenError(wrong, "is not a setting", f"did you mean {last}?")
        if theirs := _options_with(wrong):
            problem = f"is a setting of {wrong.partition('.')[0]}={'|'.join(theirs)}"
            return FedgenError(wrong, problem, "choose that, or leave it out")
        near = _suggestion(wrong, [name for name in list_keys() if name != wrong])
        hint = f"did you mean {' or '.join(near)}?"
        remedy = hint if near else "see fedgen --help, or --cfg for all"
        return FedgenError(wrong, "is not a setting", remedy)
    several = re.search(r"Ambiguous value for argument '([^=]+)=", text)
    if several:
        remedy = "a list is in brackets: [a,b]; a text in quotes; fedgen train -m runs each"
        return FedgenError(several[1], "has several values", remedy)
    [problem, *_] = text.splitlines() or ["cannot be read"]
    return FedgenError("override", problem, "see fedgen --help")
