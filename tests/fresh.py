"""Python programs in processes of their own, as `python -c` and scripts: forked from a process that
has imported torch and its compiler, which the package needs; this takes longer than most of what
they do."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_SERVER = """
import gc, importlib, json, os, runpy, signal, sys, types

importlib.import_module(sys.argv[1])
gc.freeze()
job = None
for line in sys.stdin:
    if os.fork() == 0:
        job = json.loads(line)
        break
    print(os.wait()[1], flush=True)
if job is not None:
    sys.argv, folder, environment, *files, seconds = job
    signal.alarm(seconds)  # nobody waits longer
    for number, file in enumerate([os.devnull, *files]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if sys.argv[0] == "-c":
        code = compile(sys.argv.pop(1), "<string>", "exec")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
"""


@functools.lru_cache(None)
def server(imported: str) -> subprocess.Popen:
    """The process that programs are forked from; it ends when this one's pipe does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", _SERVER, imported], **pipes)


def python(
    *arguments, cwd=None, env=None, timeout=120, imported="torch._dynamo"
) -> subprocess.CompletedProcess:
    """Runs "-c", CODE, or a script, with arguments, and captures its output as text. imported: a
    module that is imported before."""
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        job = [words, str(cwd or os.getcwd()), dict(env or os.environ), *map(str, files), timeout]
        parent = server(imported)
        parent.stdin.write(json.dumps(job) + "\n")
        parent.stdin.flush()
        status = os.waitstatus_to_exitcode(int(parent.stdout.readline()))
        return subprocess.CompletedProcess(words, status, *[file.read_text() for file in files])
