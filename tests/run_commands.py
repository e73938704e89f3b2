"""Runs command lines of Python as far as their options are read, all in one process, as on a
machine without a GPU: `python tests/run_commands.py COMMANDS.json RESULTS.json`.

COMMANDS: a list of lists of words, e.g. [["tools/tune.py", "all"], ["-m", "pytest"]]. RESULTS: of
each, "end" ("options read", "exit 2", or an error), "said", what it wrote to stderr, and "options",
all that its parser knows.
"""

import argparse
import contextlib
import importlib
import io
import json
import pathlib
import runpy
import subprocess
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARSE = argparse.ArgumentParser.parse_args


class OptionsRead(BaseException):
    """A program has read its options and would begin."""


known = []  # the options of the parser that was called last


def parse_args(self, *args, **kwargs):
    known[:] = self._option_string_actions
    options = PARSE(self, *args, **kwargs)
    if "in_tree" in sys._getframe(1).f_globals["__name__"]:
        return options  # parse_on_gpu goes on to say that a GPU is needed
    raise OptionsRead


def run_script(path, words):
    sys.argv[:] = [path, *words]
    sys.path.insert(0, str((ROOT / path).parent))
    runpy.run_path(str(ROOT / path), run_name="__main__")


def run_pytest(words):
    """The files that are named must be there; what is collected is a small one's."""
    import pytest

    gone = [word for word in words if word.endswith(".py") and not (ROOT / word).is_file()]
    words = [word for word in words if not word.endswith(".py")]
    small = [*words, "tests/functions/test_api.py"]
    code = pytest.main([*small, "--collect-only", "-p", "no:cacheprovider"])
    raise OptionsRead if code == 0 and not gone else SystemExit(f"{code.name}, not there: {gone}")


def run_ruff(words):
    ran = subprocess.run([sys.executable, "-m", "ruff", *words, "--help"], capture_output=True)
    sys.stderr.write(ran.stderr.decode())
    raise OptionsRead if ran.returncode == 0 else SystemExit(ran.returncode)


def run_pip(words):
    from pip._internal.commands import create_command

    create_command(words[0]).parse_args(list(words[1:]))
    raise OptionsRead


def run_kernels(words):
    sys.argv[:] = ["kernels", *words]
    importlib.import_module("kernels.cli").main()


MODULES = {"pytest": run_pytest, "ruff": run_ruff, "pip": run_pip, "kernels": run_kernels}


def run(words):
    """Returns how a command ended and what it wrote to stderr."""
    path, said = list(sys.path), io.StringIO()
    known.clear()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            if words[0] == "-m":
                MODULES[words[1]](words[2:])
            else:
                run_script(words[0], words[1:])
        end = "ran to its end"
    except OptionsRead:
        end = "options read"
    except SystemExit as stop:
        end = f"exit {stop.code}"
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    finally:
        sys.path[:] = path
    return {"end": end, "said": said.getvalue(), "options": list(known)}


def main():
    commands, results = map(pathlib.Path, sys.argv[1:])
    argparse.ArgumentParser.parse_args = parse_args
    torch.cuda.is_available = lambda: False
    sys.path[0] = str(ROOT / "tools")  # of this file's folder no name is to be found by chance
    found = [run(words) for words in json.loads(commands.read_text())]
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
