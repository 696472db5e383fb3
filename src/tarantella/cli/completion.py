"""Scripts that complete command lines in bash and zsh, made from the table of options.

They know all options when they are made, so that no program starts when somebody presses Tab.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tarantella.cli.options import Options
from tarantella.runtime.settings import settings_of


@dataclass(frozen=True)
class _Completed:
    """An option to complete.

    Attributes:
        names: its names
        help: what it is for
        value: what its value is called; empty if it has none
        choices: its values, if these are few
        path: whether its value is the path of a "file", of a "folder", or of neither
        repeats: whether it may be given several times
    """

    names: tuple[str, ...]
    help: str
    value: str = ""
    choices: tuple[str, ...] = ()
    path: str = ""
    repeats: bool = False


def completion_script(shell: str) -> str:
    """The script for a shell, `bash` or `zsh`."""
    return _bash() if shell == "bash" else _zsh()


def _completed() -> Iterator[_Completed]:
    for row in settings_of(Options).values():
        if (option := row.option) is not None:
            kind = row.kind if option.metavar else None
            yield _Completed(
                option.names,
                row.help,
                option.metavar,
                kind.choices if kind else (),
                kind.path if kind else "",
                option.repeats,
            )
    yield _Completed(("--version",), "show the version")
    yield _Completed(("-h", "--help"), "show the help")


# `=` separates words in bash: `--a=b` comes in three. Where COMPREPLY is empty, bash completes file
# names.
_BASH = """\
_tarantella() {
    local current option= word joined
    local -a words=()
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        if [ "$word" = "=" ] || [ -n "$joined" ]; then
            words[${#words[@]}-1]+="$word"
            if [ "$word" = "=" ]; then joined=yes; else joined=; fi
        else
            words+=("$word")
        fi
    done
    current="${words[${#words[@]}-1]}"
    unset "words[${#words[@]}-1]"
    COMPREPLY=()
    for word in "${words[@]}"; do
        if [ -n "$option" ]; then
            option=  # this was its value
            continue
        fi
        case "$word" in
            VALUED) option="$word" ;;
            --|-m) return ;;
            -*|*=*) ;;
            *) return ;;
        esac
    done
    case "$current" in
        -*=*) option="${current%%=*}" current="${current#*=}" ;;
    esac
    case "$option" in
CHOICES
        FILES) ;;
        FOLDERS)
            local IFS=$'\n'
            COMPREPLY=($(compgen -d -- "$current"))
            compopt -o filenames +o default 2>/dev/null ;;
        "")
            case "$current" in
                -*) COMPREPLY=($(compgen -W "NAMES" -- "$current")) ;;
            esac ;;
        *) compopt +o default 2>/dev/null ;;
    esac
}
complete -o default -F _tarantella tarantella
"""


def _bash() -> str:
    options = list(_completed())
    choices = [
        f"        {'|'.join(option.names)})\n"
        f'            COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$current")) ;;'
        for option in options
        if option.choices
    ]
    parts = {
        "VALUED": _alternatives(option for option in options if option.value),
        "CHOICES": "\n".join(choices),
        "FILES": _alternatives(option for option in options if option.path == "file"),
        "FOLDERS": _alternatives(option for option in options if option.path == "folder"),
        "NAMES": " ".join(["-m", *(name for option in options for name in option.names)]),
    }
    script = _BASH
    for placeholder, text in parts.items():
        script = script.replace(placeholder, text)
    return script


def _alternatives(options: Iterable[_Completed]) -> str:
    return "|".join(name for option in options for name in option.names)


# Either a file in zsh's `fpath`, which is called to complete something, or evaluated at the start.
_ZSH = """\
#compdef tarantella
_tarantella() {
    _arguments -S -A "-*" \\
        OPTIONS \\
        '(-)-m[run a module, as python -m does]:module: ' \\
        '*:: :_files'
}
if [ "${funcstack[1]}" = "_tarantella" ]; then
    _tarantella "$@"
else
    compdef _tarantella tarantella
fi
"""


def _zsh() -> str:
    specifications = [
        _specification(option, name) for option in _completed() for name in option.names
    ]
    return _ZSH.replace("OPTIONS", " \\\n        ".join(specifications))


def _specification(option: _Completed, name: str) -> str:
    """What zsh's `_arguments` takes for an option."""
    about = option.help
    for special in "\\[]:":
        about = about.replace(special, f"\\{special}")
    many = "*" if option.repeats else ""
    equals = "=" if option.value and name.startswith("--") else ""
    value = f":{option.value}:{_zsh_values(option)}" if option.value else ""
    return "'" + f"{many}{name}{equals}[{about}]{value}".replace("'", "'\\''") + "'"


def _zsh_values(option: _Completed) -> str:
    if option.choices:
        return f"({' '.join(option.choices)})"
    return {"file": "_files", "folder": "_files -/"}.get(option.path, " ")
