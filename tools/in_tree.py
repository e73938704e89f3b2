"""The package in the tree, imported as it lies, and what scripts on a GPU begin with: for tests,
tools and benchmarks."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext" / "fused_swiglu_gdn"
NAME = "fused_swiglu_gdn_in_tree"


def load_package(name: str = NAME, package: Path = PACKAGE):
    """A folder with the package, imported under a name of its own as the Hub's loader does."""
    if name in sys.modules:
        return sys.modules[name]
    if not (package / "_ops.py").exists():
        subprocess.run([sys.executable, ROOT / "tools" / "build.py", "--in-place"], check=True)
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def submodule(path: str):
    """A module of the package by its dotted path, e.g. "swiglu.portable.forward"."""
    load_package()
    return importlib.import_module(f"{NAME}.{path}")


def parse_on_gpu(parser):
    """The options of a script that computes on a GPU; where torch sees none, the script ends."""
    return need_gpu(parser, parser.parse_args())


def need_gpu(parser, options):
    """The options, where torch sees a GPU or `--device` is another one; else the script ends with
    one line and exit code 2."""
    import torch

    on_gpu = getattr(options, "device", "cuda").startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        sees = f"torch {torch.__version__} sees none here"
        parser.exit(2, f"{parser.prog}: needs a GPU, and {sees}\n")
    return options
