"""Importing bigbatch changes nothing: no setting of torch, no random state, no environment, no thread, no warning."""

import ast
import subprocess
import sys
import textwrap
from importlib.util import find_spec

import bigbatch

IMPORTS = "import bigbatch; from bigbatch import *"

# Each line is something an import could change; all of them are compared before and after.
CHECKS = """
import os, random, signal, sys, threading, warnings
import torch
from torch.nn.modules import module as m
from torch.optim import optimizer as o

def settings():
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "generator": torch.get_rng_state().tolist(),
        "python's generator": random.getstate(),
        "environment": dict(os.environ),
        "gradients": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "cuda": torch.cuda.is_initialized(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "autocast": torch.is_autocast_enabled("cpu"),
        "running threads": threading.active_count(),
        "filters": list(warnings.filters),
        "hooks": (sys.excepthook, sys.settrace and sys.gettrace(), threading.excepthook),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "recursion": sys.getrecursionlimit(),
        "backward": (torch.Tensor.backward, torch.autograd.backward, torch.optim.Optimizer.step),
        "optimizers": [dict(vars(torch.optim.Optimizer)), dict(vars(torch.nn.Module))],
        "global hooks": [len(v) for k, v in [*vars(o).items(), *vars(m).items()] if k.endswith("_hooks")],
        "folder": os.getcwd(),
    }
"""


def run(code: str) -> str:
    """Run code in a fresh interpreter in which a warning is an error; return what it printed."""
    command = [sys.executable, "-W", "error::UserWarning", "-W", "error::DeprecationWarning:bigbatch", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_importing_changes_nothing() -> None:
    """Every setting that an import could touch is as before; a thread count, a seed or a patch would be seen."""
    compare = "print([name for name, value in settings().items() if value != before[name]])"
    change = "torch.set_num_threads(3); torch.manual_seed(1); os.environ['X'] = '1'; torch.optim.Optimizer.step = None"
    same, changed = run(f"{CHECKS}\nbefore = settings()\n{IMPORTS}\n{compare}\n{change}\n{compare}").splitlines()
    assert same == "[]"
    assert changed == "['threads', 'generator', 'environment', 'backward', 'optimizers']"


def test_importing_prints_nothing_and_needs_torch_alone() -> None:
    """No output, and none of the libraries that the command line, the tests or the benchmarks use."""
    others = {"numpy", "typer", "rich", "click", "matplotlib", "transformers", "accelerate", "lightning", "hypothesis"}
    new = "\nprint(*{name.partition('.')[0] for name in set(sys.modules) - had})"
    loaded = set(run("import torch, sys; had = set(sys.modules)\n" + IMPORTS + new).split())
    assert not loaded & others
    assert "bigbatch" in loaded


def test_the_example_of_the_package_is_python() -> None:
    """`help(bigbatch)` shows it; the loop has its body."""
    assert bigbatch.__doc__ is not None
    _, _, example = bigbatch.__doc__.split("\n\n", 2)
    (loop,) = [node for node in ast.parse(textwrap.dedent(example)).body if isinstance(node, ast.For)]
    assert "accumulator.backward" in ast.unparse(loop.body[0])


# The names a user may rely on: a new one is a decision, a lost one a breakage.

NAMES = "Accumulator BigStep GradientNoise Options Setup Update across counted errors plan scale_lr verify warmup"


def test_the_public_names_are_these() -> None:
    """`__all__` is the surface, and every name is there; two are modules, and no other name is a module's."""
    public = NAMES.split()
    assert sorted(bigbatch.__all__) == public
    assert all(hasattr(bigbatch, name) for name in public)
    assert set(public) <= set(dir(bigbatch))
    assert {name for name in public if find_spec(f"bigbatch.{name}") is not None} == {"across", "errors"}
