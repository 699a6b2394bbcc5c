"""FlashInfer's real JIT on a machine without a GPU: its own build.ninja writer, real ninja, a module in C++ only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["SOURCE", "jit", "make_toolkit", "version"]

# A module as tvm-ffi loads them; `answer` returns 7. Header: tvm/ffi/c_api.h of apache-tvm-ffi.
SOURCE = """
#include <tvm/ffi/c_api.h>
extern "C" int __tvm_ffi_answer(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = 7;
  return 0;
}
"""

_CHILD = """
import json, os, subprocess, sys
question = json.loads(sys.argv[1])
from flashinfer.jit import core, cpp_ext, env
said, run = [], subprocess.run
def listen(command, **options):
    if command[0] != "ninja":
        return run(command, **options)
    done = run(command, **{**options, "check": False})
    said.append(done.stdout)
    done.check_returncode()
    return done
subprocess.run = listen
def generated(name):
    path = env.FLASHINFER_GEN_SRC_DIR / name / (name + ".cc")
    core.write_if_different(path, question["source"])
    return path
loaded = {}
for name in question["modules"]:
    loaded[name] = core.gen_jit_spec(name, [generated(name)]).build_and_load()["answer"]()
print(json.dumps({"ninja": said, "answers": loaded, "workspace": str(env.FLASHINFER_WORKSPACE_DIR)}))
"""


def version() -> str:
    """The version of the FlashInfer that children import."""
    code = "import flashinfer.version; print(flashinfer.version.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()[-1]


def make_toolkit(folder: Path) -> Path:
    """A CUDA toolkit for modules that need none: an nvcc that says its version, and empty libraries to link."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib64").mkdir()
    (folder / "include").mkdir()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    for name in ("cuda", "cudart"):
        command = ["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(folder / "lib64" / f"lib{name}.so")]
        subprocess.run(command, check=True, timeout=60)
    return folder


def jit(
    workspace: Path, toolkit: Path, *modules: str, path: str = "", disable: bool = False
) -> tuple[dict[str, int], list[str]]:
    """What `modules` answer, and what ninja said, in a process that loads them as an engine's warmup does.

    `path` comes before ``PYTHONPATH``. With `disable` FlashInfer may not build anything.
    """
    environment = {
        **os.environ,
        "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "CUDA_HOME": str(toolkit),
        "LD_LIBRARY_PATH": str(toolkit / "lib64"),
        "PATH": os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))),
        "PYTHONPATH": os.pathsep.join(part for part in (path, os.environ.get("PYTHONPATH", "")) if part),
    }
    if disable:
        environment["FLASHINFER_DISABLE_JIT"] = "1"
    question = json.dumps({"modules": modules, "source": SOURCE})
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, question],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        raise AssertionError(f"FlashInfer's child failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["answers"], answer["ninja"]
