"""Complete command lines for the TAB key of a shell.

``eval "$(fedgen completion)"`` in ``~/.bashrc``; in zsh after ``autoload bashcompinit`` and
``bashcompinit``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fedgen.errors import FedgenError

SCRIPT = """\
_fedgen() {
    local line="${COMP_LINE:0:$COMP_POINT}" IFS=$'\\n'
    local word="${line##* }"
    COMPREPLY=($(fedgen --complete "$line" 2>/dev/null))
    # bash takes what is behind the last = for a word of its own
    [[ "$word" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    [[ "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _fedgen fedgen
"""


def complete(line: str, commands: Mapping[str, str]) -> list[str]:
    """Return possible completions of the last word of ``line``.

    Args:
        line: the line so far, starting with the name of the program; a trailing space starts a new
            word.
        commands: each with the name of its settings.
    """
    _, *words = line.split(" ")
    if len(words) < 2:
        candidates: Collection[str] = commands
    elif words[0] not in commands:
        candidates = ()
    else:
        candidates = set(
            _settings(commands[words[0]], [word for word in words[1:-1] if word], words[-1])
        )
    return sorted(word for word in candidates if word.startswith(words[-1] if words else ""))


def _settings(name: str, overrides: Sequence[str], last: str) -> Iterator[str]:
    """Return keys with ``=``, of the options chosen so far; or the options of a group."""
    from omegaconf import OmegaConf

    from fedgen.config.compose import compose, defaults
    from fedgen.config.extensions import CONFIGS, config_folders

    key, value_prefix, _ = last.partition("=")
    options = [
        file for place in config_folders() for file in (place / key).glob("*.yaml") if value_prefix
    ]
    if options:
        yield from (f"{key}={file.stem}" for file in options)
        return
    if key == "published" and value_prefix:
        recipes = OmegaConf.load(CONFIGS / "published.yaml")
        yield from (f"published={recipe!s}" for recipe in recipes)
        return
    config, groups = defaults(name)
    with suppress(FedgenError):  # incomplete or invalid overrides: use the defaults
        config = compose(name, list(overrides))
    yield from (f"{group}=" for group in groups)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    for setting in _keys({key: value for key, value in plain.items() if key != "names"}, ""):
        behind, dot, _ = setting[len(last) :].partition(".")
        yield f"{setting[: len(last)]}{behind}{dot or '='}"  # up to the next dot


def _keys(settings: Mapping[Any, Any], above: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{above}{key}.")
        elif key not in ("type", "strategy"):
            yield f"{above}{key}"
