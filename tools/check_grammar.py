"""Says whether every file of the shipped package is Python 3.9, as the Hub promises its users."""

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARSE = "import sys; [compile(open(p, encoding='utf-8').read(), p, 'exec') for p in sys.argv[1:]]"


def main():
    files = sorted((ROOT / "torch-ext").rglob("*.py"))
    for path in files:
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 9))
        except SyntaxError as error:
            sys.exit(f"{path.relative_to(ROOT)}:{error.lineno}: not Python 3.9: {error.msg}")
    by = "the ast module"
    try:  # the real thing, where there is one
        real = subprocess.run(["python3.9", "-c", PARSE, *map(str, files)], capture_output=True)
        if b"SyntaxError" in real.stderr:
            sys.exit(real.stderr.decode())
        if real.returncode == 0:
            by = "python3.9 itself"
    except FileNotFoundError:
        pass
    print(f"grammar: {len(files)} files are Python 3.9, says {by}")


if __name__ == "__main__":
    main()
