"""What the ranks run: a script, a module or a program, and the file that identifies it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from tarantella.cli.habits import is_python
from tarantella.cli.module_file import is_file, module_file
from tarantella.cli.options import Options
from tarantella.errors import InputError

USAGE = "tarantella [options] -- script.py [script args]"


def check_program(options: Options) -> None:
    """Raises an InputError if there is nothing to run."""
    if not options.program:
        raise InputError(f"There is no script to run: {USAGE}")
    name = options.program[0]
    if options.module and not options.runs_script:
        raise InputError("-m needs Python, and --python-interpreter '' runs a program without it.")
    if options.module:
        _check_module(name, options)
    elif options.cleanup:
        pass  # the script may be gone by now
    elif options.runs_script:
        _check_script(name, options)
    elif shutil.which(name) is None:
        raise InputError(
            f"{name} is not a program that can be run: give the name of one on the PATH, "
            "or the path of an executable file."
        )


def file_of(options: Options) -> str:
    """The file of the script, module or program; empty for a module that only a rank can find."""
    name = options.program[0]
    if options.module:
        return module_file(name, _search_path(options))
    if not options.runs_script:
        name = shutil.which(name) or name
    return str(Path(name).absolute())


def identity_of(options: Options) -> str:
    """The text that identifies the runs of a script, module or program."""
    file = file_of(options)
    return os.path.realpath(file) if file else f"-m {options.program[0]}"


def _search_path(options: Options) -> list[str]:
    """Where ranks look for modules, as far as we know."""
    environ = {**os.environ, **dict(options.environment)}
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path.cwd()), *(folder for folder in given if folder), *sys.path[1:]]


def _check_module(name: str, options: Options) -> None:
    if name.endswith(".py") and is_file(Path(name)):
        raise InputError(
            f"-m takes the name of a module, and {name} is a file: leave out -m, or write "
            f"-m {name.removesuffix('.py').replace('/', '.')}."
        )
    top = name.partition(".")[0]
    if options.interpreter is not None or PathFinder.find_spec(top, _search_path(options)):
        return  # another Python may find others; and the ranks find out what is in a package
    if not any(finder.find_spec(top, None) for finder in sys.meta_path):
        raise InputError(
            f"There is no module {name}: check its name, and that this directory, PYTHONPATH or "
            f"the Python environment has {top or 'it'}."
        )


def _check_script(name: str, options: Options) -> None:
    try:
        Path(name).open("rb").close()
    except FileNotFoundError:
        if is_python(name) and options.program[1:]:
            ours = shlex.join(options.program[1:])
            advice = f"leave it out, as the command starts Python: tarantella [options] -- {ours}"
        else:
            advice = "check its path."
        raise InputError(f"There is no script {name}: {advice}") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a directory: give the path of a Python script.") from None
    except OSError as error:
        raise InputError(f"The script {name} cannot be read: {error.strerror}.") from None
    if name.lower().endswith(".ipynb"):
        script = f"{name[: -len('.ipynb')]}.py"
        raise InputError(
            f"{name} is a notebook: call tnt.run in it, or make a script of it with `jupyter "
            f"nbconvert --to script {shlex.quote(name)}` and run `tarantella [options] -- "
            f"{shlex.quote(script)}`."
        )
