"""What a push of weights to an SGLang server costs by each path, against a plain copy of the same bytes in memory.

    python tools/bench_weight_sync.py                       1M, 50M and 500M parameters in float32, one server each
    python tools/bench_weight_sync.py --sizes 1M --rounds 5
    python tools/bench_weight_sync.py --sizes 500M --paths distributed disk

The server is stock SGLang on a CPU; the trainer is this process with the weights of a random Llama in its memory, so that the
gather over a trainer's ranks is not in the figures. Seconds are the least over rounds in which the paths take turns, pause and
continue of the server and the check of its version included; the checksums (--check-weight-update-equal) are measured apart. Bytes
are those that pass between the processes: request bodies, broadcasts, or files written.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.conversion.hf_io import HfWriter
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.rollout.sglang.client import ServerClient
from slime_ppo.rollout.sglang.server import LocalServer, ServerAddress
from slime_ppo.rollout.sglang.server_args import ServerSpec
from slime_ppo.rollout.sglang.updates import ServerUpdates, UpdateSettings
from slime_ppo.weight_sync.base import Meeting, WeightSync
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, dtype_name, fill_bucket, pack_bucket
from slime_ppo.weight_sync.disk import DiskSync
from slime_ppo.weight_sync.distributed import DistributedSync
from slime_ppo.weight_sync.folder import served_tensors
from slime_ppo.weight_sync.process_group import EngineGroup
from slime_ppo.weight_sync.tensor import TensorSync

# layers, hidden, feed-forward, vocabulary: about as many parameters as the name says
SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "1M": (4, 128, 384, 1024),
    "50M": (8, 640, 1792, 8192),
    "500M": (16, 1536, 4352, 16384),
}
PATHS = ("tensor", "distributed", "disk")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    """One path: seconds of the fastest push and of a checked one (None for the copy), CPU seconds of the push that took the fewest,
    and bytes that were sent."""

    path: str
    seconds: float
    cpu_s: float
    checked_s: float | None
    sent_bytes: int


class Trainer:
    """The weights, and the trainer's end of every path. Counts what it sends."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> None:
        self._folder, self._tensors, self._bucket_bytes = folder, tensors, bucket_bytes
        self._group = EngineGroup(host="127.0.0.1", device="cpu", timeout_s=TIMEOUT_S)
        self.sent_bytes = 0

    def manifest(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in self._tensors.items())

    def export_bucket(self, bucket: Bucket) -> np.ndarray:
        return pack_bucket(bucket, self._tensors)

    def meet_engine(self, num_engine_ranks: int) -> Meeting:
        return self._group.meet(num_engine_ranks)

    def join_engine(self, meeting: Meeting) -> None:
        self._group.join(meeting)

    def broadcast_bucket(self, bucket: Bucket) -> None:
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        fill_bucket(bucket, self._tensors, flat)
        self._group.broadcast(flat)
        self.sent_bytes += bucket.num_bytes

    def leave_engine(self) -> None:
        self._group.leave()

    def publish_hf(self, folder: str) -> None:
        writer = HfWriter(folder, source_folder=self._folder, config_changes={}, durable=False)
        for part in _parts(self._tensors, self._bucket_bytes):
            writer.write(part)
        writer.publish()
        self.sent_bytes += sum(file.stat().st_size for file in Path(folder).iterdir())


class Engine:
    """One server, and the engine's end of every path. Counts the bodies that it posts."""

    def __init__(self, address: ServerAddress, folder: Path, dtype: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = ServerClient(address.url)
        self._address = address
        shape = ModelShape.from_hf_folder(folder)
        self.updates = ServerUpdates(self, UpdateSettings(served_tensors(folder, dtype), shape, "cpu", timeout_s=TIMEOUT_S))
        self.num_ranks, self.incarnation = self.updates.num_ranks, self.updates.incarnation
        self.load_bucket, self.receive_bucket = self.updates.load_bucket, self.updates.receive_bucket
        self.load_folder, self.check_bucket = self.updates.load_folder, self.updates.check_bucket
        self.join_group, self.leave_group = self.updates.join_group, self.updates.leave_group
        self.end_update = self.updates.end
        self.posted_bytes = 0

    def addresses(self) -> Sequence[ServerAddress]:
        return (self._address,)

    def post(self, path: str, bodies: Sequence[Mapping[str, object]], *, timeout_s: float) -> list[Any]:
        self.posted_bytes += sum(_size(value) for body in bodies for value in body.values())
        return [self._loop.run_until_complete(self._client.post(path, body, timeout_s)) for body in bodies]

    def get(self, path: str, *, timeout_s: float) -> list[Any]:
        return [self._loop.run_until_complete(self._client.get(path, timeout_s))]

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        self.updates.begin(manifest, version, bucket_bytes=bucket_bytes, pause_mode="abort")

    def wake(self, parts: EnginePart) -> None:
        """Nothing sleeps here."""

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


def measured(size: str, dtype: str, *, paths: Sequence[str], bucket_bytes: int, rounds: int) -> tuple[int, list[Row]]:
    """Parameters, and the rows of one size: the copy first."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        tensors = make_model(root / "model", SIZES[size], dtype)
        spec = ServerSpec(
            str(root / "model"),
            dtype,
            "cpu",
            max_positions=512,
            log_file=str(root / "server.log"),
            extra=(("skip_tokenizer_init", None),),
        )
        server = LocalServer(spec)
        try:
            engine = Engine(server.start(), root / "model", dtype)
            trainer = Trainer(root / "model", tensors, bucket_bytes)
            syncs = _syncs(engine, trainer, root / "versions", bucket_bytes)
            rows = [_copy_row(tensors, rounds), *_path_rows(engine, trainer, {path: syncs[path] for path in paths}, rounds)]
            engine.close()
        finally:
            server.stop()
    return sum(tensor.numel() for tensor in tensors.values()), rows


def make_model(folder: Path, size: tuple[int, int, int, int], dtype: str) -> dict[str, torch.Tensor]:
    """Write a random Llama's folder, and return its tensors."""
    layers, hidden, ffn, vocab = size
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64,
        "intermediate_size": ffn, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "dtype": dtype, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=random).mul_(0.02).to(getattr(torch, dtype)) for name, shape in shapes.items()}
    source = folder.with_name("config")
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    writer = HfWriter(folder, source_folder=source, config_changes={})
    writer.write(tensors)
    writer.publish()
    return tensors


def _copy_row(tensors: Mapping[str, torch.Tensor], rounds: int) -> Row:
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    seconds, cpu = [], []
    for _ in range(max(3, rounds)):
        began, used = time.perf_counter(), time.process_time()
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    return Row("plain copy", min(seconds), min(cpu), None, sum(tensor.nbytes for tensor in tensors.values()))


def _syncs(engine: Engine, trainer: Trainer, folder: Path, bucket_bytes: int) -> dict[str, WeightSync]:
    return {
        "tensor": TensorSync(trainer, engine, bucket_bytes=bucket_bytes),
        "distributed": DistributedSync(trainer, engine, bucket_bytes=bucket_bytes),
        "disk": DiskSync(trainer, engine, folder=str(folder), bucket_bytes=bucket_bytes),
    }


def _path_rows(engine: Engine, trainer: Trainer, syncs: Mapping[str, WeightSync], rounds: int) -> list[Row]:
    """Paths take turns; the first push of each is the checked one."""
    seconds: dict[str, list[float]] = {path: [] for path in syncs}
    cpu: dict[str, list[float]] = {path: [] for path in syncs}
    sent: dict[str, int] = {}
    version = 0
    for _ in range(1 + rounds):
        for path, sync in syncs.items():
            if not seconds[path]:
                sync.connect()
            before, used, began = trainer.sent_bytes + engine.posted_bytes, _cpu_seconds(), time.perf_counter()
            sync.push(version)
            seconds[path].append(time.perf_counter() - began)
            cpu[path].append(_cpu_seconds() - used)
            sent[path] = trainer.sent_bytes + engine.posted_bytes - before
            version += 1
    for sync in syncs.values():
        sync.close()
    return [Row(path, min(took[1:]), min(cpu[path][1:]), took[0], sent[path]) for path, took in seconds.items()]


def _cpu_seconds() -> float:
    """Of this process and the server's, so far."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _parts(tensors: Mapping[str, torch.Tensor], part_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(one.nbytes for one in part.values()) + tensor.nbytes > part_bytes:
            yield part
            part = {}
        part[name] = tensor
    yield part


def _size(value: object) -> int:
    """Characters of a request's value, without a copy of the long ones."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return sum(map(len, value))
    return len(json.dumps(value))


def main(arguments: Sequence[str]) -> None:
    """Print the table as Markdown, size by size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bucket-mb", type=int, default=64, help="bytes of one bucket, in units of 2^20")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| parameters | path | seconds | times the copy | CPU seconds | seconds of the checked push | MB sent |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for size in asked.sizes:
        number, rows = measured(size, asked.dtype, paths=asked.paths, bucket_bytes=asked.bucket_mb << 20, rounds=asked.rounds)
        for row in rows:
            checked = "" if row.checked_s is None else f"{row.checked_s:.3f}"
            ratio = row.seconds / rows[0].seconds
            times = f"{row.seconds:.4f}", f"{ratio:.1f}", f"{row.cpu_s:.2f}", checked
            cells = (f"{number / 1e6:.1f}M", row.path, *times, f"{row.sent_bytes / 1e6:.1f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
