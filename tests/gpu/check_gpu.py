"""One rollout of both roles on one GPU against the same on the CPU in float32. Needs CUDA; pytest does not collect it.

python tests/gpu/check_gpu.py                # four variants in a few minutes; exit code 1 when an error passes its tolerance
python tests/gpu/check_gpu.py --device cpu   # the script itself, without transformer-engine

Compared are log-probs, entropy, values, token rewards and advantages, the gradients of the first step, the weights after the
last one as they are exported, and in float32 every metric of every step. Also an error: an offload that leaves weights or
gradients on the GPU, or freed blocks with this process's allocator.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from slime_ppo.config.ppo import PpoConfig  # noqa: E402
from slime_ppo.parallel.worker_settings import TransformerImpl  # noqa: E402
from tests.dist.backends.compare import gradient_error  # noqa: E402

if TYPE_CHECKING:
    import torch

    from slime_ppo.backends.megatron.role import MegatronRole
    from slime_ppo.types.stats import Stats

Figures = dict[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """A case as one device computes it. `tolerance` is of a column's largest error relative to its largest value, and of the
    L2 error of the worst gradient or weight relative to its norm."""

    case: str
    dtype: Literal["float32", "bfloat16"]
    impl: TransformerImpl
    tolerance: float

    @property
    def name(self) -> str:
        return f"{self.case}-{self.dtype}-{self.impl}"


# by name: settings, and whether the sampler's supports are recorded
CASES = {
    "reward_kl": (PpoConfig(kl_coef=0.1), False),
    "entropy_on_supports": (PpoConfig(kl_coef=0.1, entropy_coef=0.02, eps_clip_c=1.05), True),
}
EXACT = [Variant(case, "float32", "local", 1e-3) for case in CASES]
BFLOAT16 = [Variant("reward_kl", "bfloat16", impl, 0.1) for impl in ("local", "transformer_engine")]
VARIANTS = {variant.name: variant for variant in (*EXACT, *BFLOAT16)}
COLUMNS = ("old_log_probs", "ref_log_probs", "entropy", "values", "token_rewards", "advantages")
# what stands in for activations that the allocator keeps, and what it may hold offloaded: cuBLAS's workspaces
FREED_BYTES = 1 << 30
MAX_RESERVED_BYTES = 256 << 20
LOG = logging.getLogger("check_gpu")


def run_roles(device: str, variant: Variant, folder: Path, out: Path) -> None:
    """One iteration of a variant on `device`, its figures into `out`."""
    from slime_ppo.backends.megatron.device import prepare_megatron

    prepare_megatron(device)
    import torch

    from slime_ppo.backends.megatron.actor import ActorRole
    from slime_ppo.backends.megatron.critic import CriticRole
    from tests.dist.backends.cases import Case, make_batch, make_plan

    ppo, restricted = CASES[variant.case]
    folders = [str(folder / role) for role in ("actor", "critic", "reference")]
    case = Case(*folders, ppo, temperature=0.8, dtype=variant.dtype, rendezvous=f"{out}.rendezvous")
    settings = {role: case.settings(0, role) for role in ("actor", "critic")}
    settings = {
        role: replace(one, rank=replace(one.rank, device=device), model=replace(one.model, transformer_impl=variant.impl))
        for role, one in settings.items()
    }
    started = perf_counter()
    actor = ActorRole(settings["actor"], case.ppo, case.correction, case.temperature)
    with patch("slime_ppo.backends.megatron.role.init_rank", return_value=torch.device(device)):
        critic = CriticRole(settings["critic"], case.ppo)
    batch, plan = make_batch(restricted=restricted), make_plan()
    rates = [case.lr] * len(plan.steps)
    batch = batch.with_parts([actor.compute_log_probs(batch)[0]])
    batch = batch.with_parts([critic.compute_advantages(batch, case.ppo.kl_coef)[0]])
    figures: Figures = {column: getattr(batch, column) for column in COLUMNS}
    for key, role in (("critic", critic), ("actor", actor)):
        check_offload(device, [actor, critic])
        with first_gradients(role, f"{key} gradient ", figures):
            steps: list[Stats] = role.train(batch, plan, rates)
        for figure in steps[0].result():
            figures[f"{key}/{figure}"] = np.array([stats.result()[figure] for stats in steps])
        figures |= exported(role, f"{key} weight ")
    np.savez(out, **figures)
    LOG.info(f"{variant.name} on {device}: {perf_counter() - started:.1f} s, torch {torch.__version__}")


@contextmanager
def first_gradients(role: "MegatronRole", prefix: str, figures: Figures) -> Iterator[None]:
    """Put the gradients of the first step into `figures`, by the names of the parameters' HF tensors."""
    from slime_ppo.backends.megatron.model import converted_parameters

    apply = role.apply

    def recorded(lr: float) -> object:
        if not any(name.startswith(prefix) for name in figures):
            for rule, parameter in converted_parameters(role.models, role.table, role.layout):
                # Megatron's fused form and dtype: the names say which, and both sides have the same
                figures[prefix + "+".join(rule.hf)] = as_figure(parameter.main_grad)
        return apply(lr)

    with patch.object(role, "apply", recorded):
        yield


def exported(role: "MegatronRole", prefix: str) -> Figures:
    """The weights as the engine would get them."""
    from slime_ppo.backends.megatron.export import WeightExporter
    from slime_ppo.weight_sync.bucket import plan_buckets

    exporter, whole = WeightExporter(role.models, role.table, role.layout), {}
    for bucket in plan_buckets(exporter.specs, 100_000):
        whole |= {prefix + name: as_figure(tensor) for name, tensor in exporter.gather(bucket).items()}
    return whole


def as_figure(tensor: "torch.Tensor") -> np.ndarray:
    """A copy: memory that numpy sees cannot be freed by an offload any more."""
    return tensor.detach().float().cpu().clone().numpy()


def check_offload(device: str, roles: "Sequence[MegatronRole]") -> None:
    """Offload and wake all roles; AssertionError when this process holds device memory in between."""
    import torch

    awake = sum(role.memory.resident_bytes() for role in roles)
    torch.empty(FREED_BYTES if device == "cuda" else 0, dtype=torch.uint8, device=device)
    for role in roles:
        role.memory.offload()
    left = sum(role.memory.resident_bytes() for role in roles)
    reserved = torch.cuda.memory_reserved() if device == "cuda" else 0
    LOG.info(f"{device}: roles hold {awake} bytes awake, {left} offloaded; the allocator then reserves {reserved}")
    if left or reserved > MAX_RESERVED_BYTES:
        raise AssertionError(
            f"offloaded, {left} bytes (expected 0) and {reserved} reserved (at most {MAX_RESERVED_BYTES}) are left"
        )
    for role in roles:
        role.memory.wake()


def compare(found: Path, expected: Path, variant: Variant) -> bool:
    """Report the errors of a variant; True when all are within its tolerance."""
    own, other = dict(np.load(found)), dict(np.load(expected))
    errors = {"names": 0.0 if own.keys() == other.keys() else np.inf}
    for kind in ("actor gradient ", "critic gradient ", "actor weight ", "critic weight "):
        sides = [{name: figure for name, figure in side.items() if name.startswith(kind)} for side in (own, other)]
        errors[f"{kind}(worst tensor)"] = gradient_error(*sides)
    metrics = [name for name in other if "/" in name and " " not in name] if variant.dtype == "float32" else []
    for name in (*COLUMNS, *metrics):
        errors[name] = float(np.abs(own[name] - other[name]).max() / max(np.abs(other[name]).max(), 1e-2))
    for name, error in errors.items():
        LOG.info(f"{name:32s} {error:.1e}{'' if error <= variant.tolerance else '  FAILED'}")
    return all(error <= variant.tolerance for error in errors.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what is compared with the CPU")
    parser.add_argument("--only", nargs=3, metavar=("VARIANT", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    LOG.setLevel(logging.INFO)  # and not the root's: Megatron says much at that level
    if arguments.only:
        run_roles(arguments.device, VARIANTS[arguments.only[0]], Path(arguments.only[1]), Path(arguments.only[2]))
        return 0
    from tests.dist.backends.cases import make_folders

    with tempfile.TemporaryDirectory() as folder:
        make_folders(Path(folder), tie=True)
        expected = {variant.case: run_apart("cpu", variant, folder) for variant in EXACT}
        passed = [
            compare(run_apart(arguments.device, variant, folder), expected[variant.case], variant)
            for variant in VARIANTS.values()
            if arguments.device == "cuda" or variant.impl == "local"
        ]
    return 0 if all(passed) else 1


def run_apart(device: str, variant: Variant, folder: str) -> Path:
    """The file of a variant's figures, made by a process of its own: on the CPU megatron.core is imported through the shim."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "figures.npz"
    command = [sys.executable, __file__, "--device", device, "--only", variant.name, folder, str(out)]
    subprocess.run(command, check=True, timeout=240)
    return out


if __name__ == "__main__":
    sys.exit(main())
