"""Any `transformers` causal language model under torch.compile, on a GPU and on a CPU by the same code.

The decoder layers are compiled one by one (regional compilation): every layer shares one traced graph, so a
start pays for the shapes a server uses and not for the depth of the model. Prompts are padded to the next
shape bucket, which is what makes those shapes few.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from warmseed.daemon.engines.base import CacheLayout, EngineIdentity, LoadedModel, canonical_digest
from warmseed.daemon.weights.checkpoint import CheckpointIdentity, DigestMode, check_unchanged, digest_checkpoint
from warmseed.daemon.weights.errors import CheckpointInvalid
from warmseed.daemon.weights.fingerprint import Fingerprint, config_digest
from warmseed.daemon.weights.safetensors import check_header, read_header
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.environment import Environment
from warmseed.seeding.kinds.base import Evidence, Kind

if TYPE_CHECKING:
    import torch

__all__ = ["BUCKETS", "Generation", "TorchEngine", "layout_below"]

BUCKETS = (16, 32, 48, 64, 80, 96, 112, 128)  # tokens; the sequence lengths a start warms up
DTYPES = ("bfloat16", "float16", "float32", "float64")
_CONFIG_BYTES = 1 << 20  # bytes in the largest config.json read
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")


@dataclass(slots=True)
class Generation:
    """What greedy decoding produced."""

    text: str
    tokens: list[int] = field(default_factory=list)
    first_token_at: float = 0.0  # time.monotonic(), one clock for all processes of a boot


class TorchEngine:
    """A causal language model from a local folder of safetensors."""

    name = "torch"
    modules: tuple[str, ...] = ("torch._inductor.compile_fx", "transformers.modeling_utils")

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "bfloat16",
        device: str = "",
        local_rank: int = 0,
        checkpoint_digest: DigestMode = "full",
        buckets: Sequence[int] = (),
    ) -> None:
        """Check what was asked for before anything heavy is imported; no `buckets` means `BUCKETS`.

        Raises:
            ConfigurationError: no such folder, no readable ``config.json``, no safetensors, or a truncated one;
                a data type, device or bucket that there is not.
        """
        self.model = _checked_folder(model)
        self.dtype = _checked_dtype(dtype)
        self.buckets = tuple(sorted(set(buckets or BUCKETS)))
        if self.buckets[0] < 1:
            raise ConfigurationError(f"--shape-buckets {self.buckets[0]}: a sequence has at least 1 token")
        if device and not _DEVICE.fullmatch(device):
            raise ConfigurationError(f"--device {printable(device)}: choose cpu, cuda or cuda:N")
        self.checkpoint_digest = checkpoint_digest
        self._device = device
        self._local_rank = local_rank
        self._config = _read_config(self.model)

    @property
    def device(self) -> str:
        """The torch device: as asked for, or this rank's GPU where there is one."""
        if not self._device:
            self._device = f"cuda:{self._local_rank}" if _has_gpu() else "cpu"
        return self._device

    def device_uuid(self) -> str:
        if self.device == "cpu":
            return f"cpu{self._local_rank}"
        import torch

        from warmseed.daemon.weights.devices import device_uuid

        return device_uuid(torch.device(self.device))

    def device_index(self) -> int:
        return -1 if self.device == "cpu" else int(self.device.partition(":")[2] or 0)

    def prepare(self) -> None:
        import transformers.models.auto.modeling_auto  # noqa: F401

    def identity(self) -> EngineIdentity:
        factors = {
            "engine": self.name,
            "model_config": _config_digest(self._config),
            "dtype": self.dtype,
            "buckets": ",".join(map(str, self.buckets)),
            "compile": "layer,static",
            "transformers": version("transformers"),
        }
        return EngineIdentity(canonical_digest(factors), factors)

    def environment(self) -> Environment:
        from warmseed.seeding.host import host_facts

        return Environment({**host_facts(), **_device_facts(self.device)})

    def caches(self, cache_root: Path) -> CacheLayout:
        # A folder for each configuration: torch's caches mix all models of a folder, a bundle must not.
        return layout_below(cache_root / "torch" / self.identity().config_hash[:16])

    def start_over(self, cache_root: Path) -> None:
        """Compile anew below `cache_root`, as if this process had compiled nothing yet."""
        import torch
        from torch._inductor.utils import clear_inductor_caches

        os.environ.update(self.caches(cache_root).variables)
        torch.compiler.reset()
        clear_inductor_caches()  # they remember where half-written kernels were to lie

    def kinds(self) -> Sequence[Kind]:
        from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
        from warmseed.seeding.kinds.compiled.inductor import InductorCache
        from warmseed.seeding.kinds.compiled.triton import TritonCache

        return [CompileCacheKind([InductorCache(), TritonCache()])]

    def load(self) -> LoadedModel:
        # Beside the load, so that the bytes are read from disk once and hashed from the page cache.
        with ThreadPoolExecutor(1, thread_name_prefix="warmseed-digest") as pool:
            digesting = pool.submit(digest_checkpoint, self.model, mode=self.checkpoint_digest)
            module = self.load_module()
            checkpoint = digesting.result()
        check_unchanged(self.model, checkpoint)
        return LoadedModel(module, checkpoint)

    def load_module(self) -> torch.nn.Module:
        """The model from disk, on the device, in evaluation mode."""
        import torch
        from transformers import AutoModelForCausalLM

        module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            self.model, dtype=getattr(torch, self.dtype), local_files_only=True
        )
        return module.to(torch.device(self.device)).eval().requires_grad_(False)

    def shell(self) -> torch.nn.Module:
        """The same model on the meta device: every parameter and buffer named, nothing allocated."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.model, local_files_only=True)
        with torch.device("meta"):
            from_config: Callable[..., torch.nn.Module] = AutoModelForCausalLM.from_config
            module = from_config(config, dtype=getattr(torch, self.dtype))
        return module.eval().requires_grad_(False)

    def fingerprint(self, checkpoint: CheckpointIdentity) -> Fingerprint:
        architectures = self._config.get("architectures") or [str(self._config.get("model_type", "unknown"))]
        facts = self.environment()
        return Fingerprint(
            checkpoint=checkpoint,
            architecture=str(architectures[0]),
            dtype=self.dtype,
            rope=config_digest(self._config.get("rope_parameters") or self._config.get("rope_scaling")),
            engine=self.name,
            engine_version=version("transformers"),
            torch_version=facts["torch"],
            cuda_version=facts.get("cuda", ""),
            gpu_model="" if self.device == "cpu" else facts["device"],
        )

    def table_hash(self) -> str:
        return self.identity().config_hash

    def copies_run_apart(self) -> bool:
        return True

    def release(self) -> None:
        import torch

        if self.device != "cpu":
            torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - torch has no public name for it
            torch.cuda.empty_cache()

    def rehearsal(self, *, socket_dir: Path, cache_root: Path) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "warmseed.daemon.cli.main", "run"),
            *("--engine", self.name, "--model", str(self.model), "--dtype", self.dtype, "--device", self.device),
            *("--shape-buckets", ",".join(map(str, self.buckets))),
            *("--cache-root", str(cache_root), "--load-format", "ipc_cache", "--no-fallback"),
            *("--socket-dir", str(socket_dir), "--prompt", "Hello", "--max-tokens", "1", "--json"),
        ]

    # What the small engine does ---------------------------------------------------------------

    def compile(self, module: torch.nn.Module) -> None:
        """Have every decoder layer compiled at its first call."""
        from torch import _dynamo

        # Each bucket is one entry of a layer's cache; the default limit of 8 would fall back to eager.
        _dynamo.config.recompile_limit = max(64, 4 * len(self.buckets))
        for layer in decoder_layers(module):
            layer.compile(dynamic=False)

    def warm_up(self, module: torch.nn.Module) -> Evidence:
        """Run every shape bucket once; what torch itself counted meanwhile is the evidence of use."""
        import torch
        from torch._dynamo.utils import counters

        start = time.monotonic()
        for bucket in self.buckets:
            self._logits(module, torch.zeros(1, bucket, dtype=torch.long, device=self.device))
        counted = {
            f"{area}_{name}": int(value)
            for area in ("inductor", "aot_autograd")
            for name, value in counters[area].items()
            if "cache" in name
        }
        return Evidence(seconds=time.monotonic() - start, counters=counted)

    def generate(self, module: torch.nn.Module, prompt: str, *, max_tokens: int) -> Generation:
        """The greedy answer to a chat prompt; the longest bucket bounds prompt and answer together.

        Raises:
            ConfigurationError: the prompt has no tokens, or too many for the longest bucket.
        """
        import torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model, local_files_only=True)
        ids = _prompt_ids(tokenizer, prompt)
        if not ids:
            raise ConfigurationError("the prompt has no tokens; ask something")
        if len(ids) >= self.buckets[-1]:
            raise ConfigurationError(
                f"the prompt has {len(ids)} tokens and the longest shape bucket {self.buckets[-1]}; shorten the prompt"
            )
        answer = Generation("")
        while len(answer.tokens) < max_tokens and len(ids) <= self.buckets[-1]:
            bucket = next(b for b in self.buckets if b >= len(ids))
            # Right padding: causal attention keeps it out of every position before it.
            padded = torch.zeros(1, bucket, dtype=torch.long, device=self.device)
            padded[0, : len(ids)] = torch.tensor(ids)
            token = int(self._logits(module, padded)[0, len(ids) - 1].argmax())
            if not answer.tokens:
                answer.first_token_at = time.monotonic()
            answer.tokens.append(token)
            ids.append(token)
            if token == tokenizer.eos_token_id:
                break
        answer.text = str(tokenizer.decode(answer.tokens, skip_special_tokens=True))
        return answer

    @staticmethod
    def _logits(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            return module(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def layout_below(folder: Path) -> CacheLayout:
    """Where torch's compilers keep their caches in `folder`."""
    inductor, triton = folder / "inductor", folder / "triton"
    return CacheLayout(
        roots={"inductor": inductor, "triton": triton},
        variables={"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": str(triton)},
    )


def decoder_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The repeated blocks of a model: the longest list of modules in it."""
    import torch

    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    yield from max(lists, key=len, default=())


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _checked_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        near = difflib.get_close_matches(dtype, DTYPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(DTYPES)}"
        raise ConfigurationError(f"--dtype {printable(dtype)}: the torch engine has no such data type{hint}")
    return dtype


def _checked_folder(model: Path) -> Path:
    folder = model.expanduser().absolute()
    try:
        shards = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(f"--model {folder}: no such folder; give the folder that holds config.json") from error
    except OSError as error:
        raise ConfigurationError(f"--model {folder} can't be read: {error.strerror}") from error
    if not shards:
        raise ConfigurationError(
            f"--model {folder}: holds no *.safetensors; warmseed's torch engine loads nothing else"
        )
    for shard in shards:
        _check_safetensors(shard)
    return folder


def _check_safetensors(shard: Path) -> None:
    """Refuse a file that ends before its last tensor, before minutes are spent on loading it."""
    try:
        with shard.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            check_header(read_header(file.fileno(), size, shard.name), size, shard.name)
    except OSError as error:
        raise ConfigurationError(f"{shard} can't be read: {error.strerror}") from error
    except CheckpointInvalid as error:
        raise ConfigurationError(f"{shard.parent}: {error}; download it again") from error


def _has_gpu() -> bool:
    """Whether a GPU driver is present; asked without importing torch, which takes seconds."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > _CONFIG_BYTES:
            raise ConfigurationError(f"{path}: larger than {_CONFIG_BYTES} bytes; that is no model configuration")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give the folder that holds config.json") from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path}: not a JSON object ({printable(error)})") from error


def _config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of what shapes the model; where it once lay and who wrote the file do not."""
    shaping = {k: v for k, v in config.items() if not k.startswith("_") and k != "transformers_version"}
    return hashlib.sha256(msgspec.json.encode(shaping, order="deterministic")).hexdigest()


def _device_facts(device: str) -> Mapping[str, str]:
    """What compiled code depends on beyond the host: nothing on a CPU, the GPU and its driver stack otherwise."""
    if not device.startswith("cuda"):
        return {"device": "cpu", "cpu_threads": str(len(os.sched_getaffinity(0)))}
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "compute_capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
    }
