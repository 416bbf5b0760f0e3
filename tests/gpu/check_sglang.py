"""One SGLang server of ours on a GPU: weights by every path, log-probs, and what an offload gives back. Pytest does not collect it.

python tests/gpu/check_sglang.py                  # bfloat16 on CUDA, a minute or two; exit code 1 when a check fails
python tests/gpu/check_sglang.py --dtype float32  # with SGLang's triton attention, which has it, and tighter tolerances
python tests/gpu/check_sglang.py --device cpu     # the script itself: gloo for NCCL, bytes for CUDA IPC, no memory to free

One line for each check. NCCL takes one rank on each GPU: with a single GPU that path is left out, and said to be.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
import torch  # noqa: E402

from slime_ppo.rollout.engine import EnginePart, check_results  # noqa: E402
from slime_ppo.rollout.sglang.server import LocalServer  # noqa: E402
from slime_ppo.rollout.sglang.server_args import ServerSpec  # noqa: E402
from slime_ppo.types.sample import GenerateRequest, GenerateResult, SamplingParams  # noqa: E402
from slime_ppo.weight_sync.base import WeightSync  # noqa: E402
from slime_ppo.weight_sync.bucket import TensorSpec  # noqa: E402
from slime_ppo.weight_sync.disk import DiskSync  # noqa: E402
from slime_ppo.weight_sync.distributed import DistributedSync  # noqa: E402
from slime_ppo.weight_sync.folder import served_tensors  # noqa: E402
from slime_ppo.weight_sync.tensor import SharedMemorySync, TensorSync  # noqa: E402
from tests.helpers.engine_harness import ReferenceModel, make_requests  # noqa: E402
from tests.helpers.folder_trainer import FolderTrainer  # noqa: E402
from tests.helpers.sglang_servers import tiny_engine  # noqa: E402
from tests.helpers.tiny_llama import make_tiny_llama  # noqa: E402

Device = Literal["cpu", "cuda"]
LOG = logging.getLogger("check_sglang")
BUCKET_BYTES = 32 << 20
MAX_POSITIONS = 512
# heads of 64, which every attention kernel has; on a GPU large enough that freed weights show among a device's memory
SHAPES = {
    "cpu": {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512, "vocab_size": 1000},
    "cuda": {"hidden": 1024, "layers": 4, "heads": 16, "kv_heads": 4, "intermediate": 2816, "vocab_size": 32000},
}
# mean |log-prob - float32 log-prob on the CPU| of the sampled tokens; other weights are off by more than 1
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}
OTHER_WEIGHTS = 0.5
SAMPLINGS = (
    SamplingParams(max_new_tokens=48, temperature=0.8),
    SamplingParams(max_new_tokens=48, temperature=0.8, top_p=0.9, top_k=64),
)
GIVEN_BACK = 0.6
"""Share of what a server takes of a GPU; it keeps CUDA's context, graphs and workspaces of libraries."""
CONTEXT_BYTES = 1 << 30
"""CUDA's, of this process."""


@dataclass
class Bench:
    """The server under test, its engine, two folders of one shape, and their models in float32 on the CPU."""

    device: Device
    dtype: str
    scratch: Path
    folders: tuple[Path, Path]
    server: LocalServer
    free_before: int
    versions: "count[int]" = field(default_factory=count)
    num_failed: int = 0

    def __post_init__(self) -> None:
        self.expected = served_tensors(self.folders[0], self.dtype)
        ranks = ((0,),) if self.device == "cuda" else None
        self.engine = tiny_engine([self.server], self.folders[0], device=self.device, expected=self.expected, trainer_ranks=ranks)
        self.references = [ReferenceModel(folder) for folder in self.folders]

    def check(self, name: str, work: Callable[[], str]) -> None:
        """One line: what `work` has found, or why it failed. The checks after it go on."""
        began = time.perf_counter()
        try:
            found, word = work(), "ok"
        except Exception as error:
            LOG.debug("%s", name, exc_info=True)
            found, word = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", "FAILED"
            self.num_failed += 1
        LOG.info(f"{word:6s} {name:12s} {time.perf_counter() - began:6.1f} s  {found}")

    def gaps(self, which: int, version: int) -> list[float]:
        """Mean gap of each of SAMPLINGS to the model that the server must hold. Raises when another model would fit as well."""
        found = []
        for sampling in SAMPLINGS:
            requests = make_requests(8, sampling, vocab_size=100)
            results = self.engine.generate(requests)
            check_results(requests, results)
            if {span.version for result in results for span in result.weight_versions} != {version}:
                raise AssertionError(f"tokens of another version than {version}")
            own, other = (
                np.concatenate([_gaps(model, *pair) for pair in zip(requests, results, strict=True)])
                for model in (self.references[which], self.references[1 - which])
            )
            if own.mean() > TOLERANCE[self.dtype] or other.mean() < OTHER_WEIGHTS:
                raise AssertionError(
                    f"log-probs are off by {own.mean():.2e} (at most {TOLERANCE[self.dtype]:g}), those of other weights by "
                    f"{other.mean():.2e} (at least {OTHER_WEIGHTS})"
                )
            found.append(float(own.mean()))
        return found


def _gaps(model: ReferenceModel, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
    """|log-prob - the model's|, renormalised over the support where there is one, of each response token."""
    full = model.log_probs(request.prompt_ids, result.response_ids, temperature=request.sampling.temperature)
    everything = [np.arange(full.shape[1])] * len(full)
    rows = everything if result.support is None else np.split(result.support.ids, np.cumsum(result.support.counts)[:-1])
    mass = [np.logaddexp.reduce(row[ids]) for row, ids in zip(full, rows, strict=True)]
    return np.abs(result.log_probs - full[np.arange(len(full)), result.response_ids] + mass)


def check_path(bench: Bench, make: Callable[[FolderTrainer], WeightSync], trainer_device: str) -> str:
    """Push the second folder's weights, then the first one's; checksums are compared at both ends by the push itself."""
    trainer = FolderTrainer(bench.folders[1], device=trainer_device, dtype=bench.dtype)
    sync = make(trainer)
    sync.connect()
    told = []
    try:
        for which in (1, 0):
            trainer.hold(bench.folders[which])
            version, began = next(bench.versions), time.perf_counter()
            sync.push(version)
            seconds = time.perf_counter() - began
            gaps = bench.gaps(which, version)
            told.append(f"push {seconds:.2f} s, gap {gaps[0]:.1e} full and {gaps[1]:.1e} on the support")
    finally:
        sync.close()
    num_bytes = sum(spec.num_bytes for spec in trainer.manifest())
    return f"{num_bytes / 1e6:.0f} MB, checksums agree; " + "; ".join(told)


def check_memory(bench: Bench, sync: WeightSync) -> str:
    """Offload everything, wake weights, push, wake the KV cache; the device's free memory at every stage."""
    engine, free = bench.engine, {"before the server": bench.free_before, "awake": free_bytes(bench.device)}
    engine.offload(EnginePart.ALL)
    free["offloaded"] = free_bytes(bench.device)
    engine.wake(EnginePart.WEIGHTS)
    free["weights awake"] = free_bytes(bench.device)
    version = next(bench.versions)
    sync.push(version)  # wakes the KV cache
    free["awake again"] = free_bytes(bench.device)
    gaps = bench.gaps(0, version)
    serves = f"serves again, gap {gaps[0]:.1e}"
    if bench.device == "cpu":
        return f"{serves}; memory not checked, since SGLang gives none back on a CPU"
    told = ", ".join(f"{stage} {num / 2**30:.2f}" for stage, num in free.items())
    if free["offloaded"] - free["awake"] < GIVEN_BACK * (free["before the server"] - free["awake"]):
        raise AssertionError(f"the server gives back less than {GIVEN_BACK:.0%} of what it takes; GiB free: {told}")
    weights = sum(TensorSpec(name, *entry).num_bytes for name, entry in bench.expected.items())
    if free["offloaded"] - free["weights awake"] < weights / 2 or free["weights awake"] - free["awake again"] < weights / 2:
        raise AssertionError(f"a stage of waking took less than half of the weights' {weights / 2**30:.2f} GiB; GiB free: {told}")
    return f"{serves}; GiB free: {told}"


def free_bytes(device: Device) -> int:
    return torch.cuda.mem_get_info(0)[0] if device == "cuda" else 0


def check_end(bench: Bench) -> str:
    bench.engine.close()
    left = bench.free_before - free_bytes(bench.device)
    if bench.device == "cuda" and left > CONTEXT_BYTES + torch.cuda.memory_reserved(0):
        raise AssertionError(f"{left / 2**30:.2f} GiB are still taken after the end of the server")
    return f"problem: {bench.server.problem()}"


def start(device: Device, dtype: str, scratch: Path) -> Bench:
    """The first check; nothing goes on without it."""
    shape = SHAPES[device]
    folders = tuple(make_tiny_llama(scratch / name, tie=False, seed=seed, **shape) for seed, name in enumerate("ab"))
    on_gpu = (("mem_fraction_static", ("0.3",)), *((("attention_backend", ("triton",)),) if dtype == "float32" else ()))
    spec = ServerSpec(
        hf_folder=str(folders[0]),
        dtype=dtype,
        device=device,
        max_positions=MAX_POSITIONS,
        log_file=str(scratch / "server.log"),
        gpu_ids=(0,) if device == "cuda" else (),
        start_timeout_s=400.0,
        extra=on_gpu if device == "cuda" else (),
    )
    began, free_before = time.perf_counter(), free_bytes(device)
    bench = Bench(device, dtype, scratch, (folders[0], folders[1]), LocalServer(spec), free_before)
    LOG.info(f"ok     {'start':12s} {time.perf_counter() - began:6.1f} s  {dtype} on {device}, torch {torch.__version__}")
    return bench


def run(bench: Bench) -> None:
    """Every path, memory, the end."""
    engine = bench.engine
    common: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "check": "always"}
    own_gpu = "cpu" if bench.device == "cpu" else "cuda:0"
    in_memory = SharedMemorySync if bench.device == "cuda" else TensorSync
    paths: dict[str, Callable[[FolderTrainer], WeightSync]] = {
        "tensor": lambda trainer: in_memory(trainer, engine, **common),
        "distributed": lambda trainer: DistributedSync(trainer, engine, **common),
        "disk": lambda trainer: DiskSync(trainer, engine, folder=str(bench.scratch / "versions"), **common),
    }
    for name, make in paths.items():
        if name == "distributed" and bench.device == "cuda" and torch.cuda.device_count() < 2:
            LOG.info(f"-      {name:12s}           left out: NCCL takes one rank on each GPU, this machine has one")
            continue
        where = "cuda:1" if name == "distributed" and bench.device == "cuda" else own_gpu
        bench.check(name, partial(check_path, bench, make, where))
    trainer = FolderTrainer(bench.folders[0], dtype=bench.dtype)
    sync = TensorSync(trainer, engine, bucket_bytes=BUCKET_BYTES)
    sync.connect()
    bench.check("memory", partial(check_memory, bench, sync))
    bench.check("end", partial(check_end, bench))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where the server runs")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), help="of the server's weights; bfloat16 on CUDA, float32 on a CPU")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of what failed")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    LOG.setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    dtype = arguments.dtype or {"cpu": "float32", "cuda": "bfloat16"}[arguments.device]
    with tempfile.TemporaryDirectory() as folder:
        bench = start(arguments.device, dtype, Path(folder))
        try:
            run(bench)
        finally:
            bench.server.stop()
    return 1 if bench.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
