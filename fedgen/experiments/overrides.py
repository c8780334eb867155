"""The words of a command line: Hydra's grammar, sweeps in it, and its errors in one line."""

from __future__ import annotations

import difflib
import itertools
import numbers
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fedgen import factories
from fedgen.errors import FedgenError

_SHOWN = 200  # letters of a value, in an error
_LONGEST, _DEEPEST = 100_000, 50  # letters of a word; lists within lists
_TOO_MUCH = "is too long or nested too deeply", "shorten it"
_HINTS = 3  # settings that a hint names
_HOME = re.compile(r"(?<=[=,\[])~(?=/)")  # a shell leaves it as it is, within a word or quotes
# what is quoted already; or a name inside of a list with a letter that Hydra's grammar has no place
# for outside of quotes
_FOREIGN = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|"""
    r"[^\[\]{},:'\"$\x00-\x20]*[^\[\]{},:'\"$\x00-\x20\w/.+\-%*@?|\\][^\[\]{},:'\"$]*",
    re.ASCII,
)
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_/][a-z0-9_./-]*", re.ASCII | re.IGNORECASE)


def key_of(word: str) -> str:
    """``KEY=VALUE``'s key."""
    return word.partition("=")[0].lstrip("+~")


def readable(words: Sequence[str]) -> list[str]:
    """Words in Hydra's grammar. It reads no letters beyond ASCII, and none of ``=();&#`` and the
    like, outside of quotes: names with these (``data.path=Hündin``) are quoted here. The ``~`` of a
    path is the home folder.

    Raises:
        FedgenError: for one that it cannot read in quotes either.
    """
    parser = OverridesParser.create()

    def is_read(word: str) -> bool:
        try:
            parser.parse_overrides([word])
        except HydraException:
            return False
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise FedgenError(key_of(word), *_TOO_MUCH) from error
        return True

    def quoted(word: str) -> str:
        key, _, value = word.partition("=")
        text = f"{key}={in_grammar(value)}"
        if set(value) & set("[]{},'\"$"):  # more than a name: those inside of it
            text = f"{key}={_FOREIGN.sub(lambda name: name[1] or in_grammar(name[0]), value)}"
        if not is_read(text):
            remedy = f"""quote it: {key}="'...'" """.strip()
            raise FedgenError(key_of(word), f"cannot be read: {value[:_SHOWN]}", remedy)
        return text

    words = [_HOME.sub(lambda _: str(Path.home()), word) for word in words]
    for word in words:
        if key_of(word).startswith("hydra.") and key_of(word) != "hydra.searchpath":
            problem = "is of Hydra's own command line, and has no effect here"
            remedy = "leave it out; run_dir=DIR says where a run is"
            raise FedgenError(key_of(word), problem, remedy)
        deepest = max(itertools.accumulate((c in "[{") - (c in "]}") for c in word), default=0)
        if len(word) > _LONGEST or deepest > _DEEPEST:
            raise FedgenError(key_of(word)[:_SHOWN], *_TOO_MUCH)
    return [word if is_read(word) else quoted(word) for word in words]


def group_folders() -> dict[str, Path]:
    """The folder of each group: of fedgen's, or of an extension's own."""
    places = [place for place in reversed(factories.places()) if place.is_dir()]
    return {path.name: path for place in places for path in place.iterdir() if path.is_dir()}


def check_groups(overrides: list[str]) -> None:
    """Raises FedgenError for an option of a group that is no word."""
    folders = group_folders()
    parsed = OverridesParser.create().parse_overrides(overrides)
    for word, each in zip(overrides, parsed, strict=True):
        group = folders.get(each.key_or_group)
        value = each.value()
        left_out = each.is_delete() and value is None
        if group and not left_out and not isinstance(value, str | QuotedString | dict):
            known = sorted(path.stem for path in group.glob("*.yaml"))
            problem = f"cannot be {word.partition('=')[2]}"
            raise FedgenError(each.key_or_group, problem, f"choose {', '.join(known)}")


def in_grammar(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, numbers.Real):  # NumPy's too
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)  # 1.0 is 1: the same run as by the command line
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_grammar(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(in_grammar(each) for each in value) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    quoted = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", r"\'")
    return f"'{quoted}'"


def in_shell(words: Sequence[str]) -> str:
    """Words as a shell takes them: those with single quotes in double ones, where these do."""
    return " ".join(
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
        for word in words
    )


def combinations(overrides: list[str]) -> list[list[str]]:
    """Every combination of comma-separated values, as Hydra's own sweeps write them, and of the
    axes of ``sweep=NAME``."""
    sweeps = [word.partition("=")[2] for word in overrides if key_of(word) == "sweep"]
    base, axes = _axes(sweeps[-1]) if sweeps else ([], [])
    overrides = readable([word for word in overrides if key_of(word) != "sweep"])
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        options = [
            [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
            if each.is_sweep_override()
            else [word]
            for each, word in zip(parsed, overrides, strict=True)
        ]
    except HydraException as error:
        raise in_one_line(error) from error
    return [
        [*base, *itertools.chain(*(words.split() for words in point)), *batch]
        for point in itertools.product(*axes)
        for batch in itertools.product(*options)
    ]


def _axes(name: str) -> tuple[list[str], list[list[str]]]:
    """A sweep's words for all of its runs, and its axes: alternatives, of one or more words."""
    found = OmegaConf.to_container(OmegaConf.load(named("sweep", name)))
    assert isinstance(found, dict)
    return found["base"], found["axes"]


def named(folder: str, name: str) -> Path:
    """The file of a sweep or a matrix.

    Raises:
        FedgenError: if there is none of this name.
    """
    there = [place / folder for place in factories.places()]
    files = {path.stem: path for place in there for path in place.glob("*.yaml")}
    if name not in files:
        near = difflib.get_close_matches(name, files, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise FedgenError(
            folder, f"there is no {name!r}", f"{hint}choose {', '.join(sorted(files))}"
        )
    return files[name]


def _options_with(key: str) -> list[str]:
    """A group's options that have a setting."""
    group, _, rest = key.partition(".")
    folder = group_folders().get(group)

    def has(file: Path) -> bool:
        found: Any = OmegaConf.to_container(OmegaConf.load(file))
        for part in rest.split("."):
            if not isinstance(found, dict) or part not in found:
                return False
            found = found[part]
        return True

    files = sorted(folder.glob("*.yaml")) if folder and rest else []
    return [file.stem for file in files if has(file)]


def _near(wrong: str, known: Sequence[str]) -> list[str]:
    """Settings that may be meant: of the same last word within a group, or of such letters."""
    word = wrong.rpartition(".")[2]
    ends = [each for each in known if each.count(".") == 1 and each.endswith(f".{word}")]
    ends = ends or [each for each in known if each.count(".") == 1 and each.endswith(f"_{word}")]
    return ends[:_HINTS] or difflib.get_close_matches(wrong, known, 1)


def in_one_line(error: Exception, known: Callable[[], list[str]] = list) -> FedgenError:
    """Hydra's error as key, problem, remedy. ``known``: the keys of the chosen groups."""
    text = str(error)
    option = re.search(r"Could not find '([\w/]+)/([^'/]*)'", text)
    if option:
        options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        near = difflib.get_close_matches(option[2], options, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        own = "for one of your own set FEDGEN_EXTENSIONS=PACKAGE"
        remedy = f"{hint}choose {', '.join(options)}; {own}"
        return FedgenError(option[1], f"there is no {option[2]!r}", remedy)
    key = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if key:
        wrong = key[1] or key[2]
        group, _, last = wrong.rpartition(".")
        if last == wrong and any(each.startswith(f"{last}.") for each in known()):
            remedy = f"name one, and set {last}.KEY=VALUE for each of its settings"
            return FedgenError(wrong, "is a group of settings", remedy)
        if last in known() and not any(each.startswith(f"{group}.") for each in known()):
            return FedgenError(wrong, "is not a setting", f"did you mean {last}?")
        if theirs := _options_with(wrong):
            problem = f"is a setting of {wrong.partition('.')[0]}={'|'.join(theirs)}"
            return FedgenError(wrong, problem, "choose that, or leave it out")
        near = _near(wrong, [each for each in known() if each != wrong])
        hint = f"did you mean {' or '.join(near)}?"
        remedy = hint if near else "see fedgen --help, or --cfg for all"
        return FedgenError(wrong, "is not a setting", remedy)
    several = re.search(r"Ambiguous value for argument '([^=]+)=", text)
    if several:
        remedy = "a list is in brackets: [a,b]; a text in quotes; fedgen train -m runs each"
        return FedgenError(several[1], "has several values", remedy)
    [problem, *_] = text.splitlines() or ["cannot be read"]
    return FedgenError("override", problem, "see fedgen --help")
