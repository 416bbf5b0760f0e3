"""Small failures on a real Ray cluster, told as JSON; a process of its own, because Ray reads its environment on import.

python -m tests.helpers.ray_scenarios        prints {scenario: [type of the error, or "", its message, or the results]}
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from slime_ppo.config.cluster import ClusterConfig
from slime_ppo.errors import EchoedError, NumericsError
from slime_ppo.orchestration.ray_environment import prepare_ray_environment

prepare_ray_environment(ClusterConfig())

import ray  # noqa: E402

from slime_ppo.orchestration import placement, ray_health  # noqa: E402
from slime_ppo.orchestration.placement import ClusterSettings, RayCluster  # noqa: E402
from slime_ppo.orchestration.protocols import BatchHandle  # noqa: E402
from slime_ppo.orchestration.ray_health import Call, gather  # noqa: E402
from slime_ppo.orchestration.ray_train_group import RaySideBySide, RayTrainGroup  # noqa: E402
from slime_ppo.types.stats import Stats  # noqa: E402
from slime_ppo.types.step_plan import StepPlan  # noqa: E402

LONG_S = 120.0  # a wait that only a defect would sit through
RATES = {"critic": (0.25, 0.5), "actor": (1.0, 2.0)}


class Rank:
    """What a rank can do: answer, raise, hang until it is let go, die, train."""

    def __init__(self) -> None:
        self._let_go = threading.Event()
        self._begun = threading.Event()

    def answer(self, value: int) -> int:
        return value

    def fail(self, kind: str) -> None:
        raise {
            "bad number": NumericsError("values of sample 3 is nan"),
            "echo": EchoedError("1 other data-parallel ranks found something wrong with their samples"),
            "broken collective": RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection reset by peer"),
            "plain": ZeroDivisionError("division by zero"),
        }[kind]

    def hang(self) -> None:
        self._let_go.wait(LONG_S)
        self._let_go.clear()

    def die(self) -> None:
        os._exit(1)

    def train(self, plan: StepPlan, rates: Sequence[float], batch: str, *ranks: Any) -> list[Stats]:
        """Ends when all `ranks` are in `train` at the same time; the rate is the loss of each step. What else to do is `batch`
        {rate: "hang" or a kind of failure}, in JSON."""
        self._begun.set()
        if not all(ray.get([rank.has_begun.remote() for rank in ranks])):
            raise TimeoutError("the others have not begun")
        asked = json.loads(batch)
        if str(rates[0]) in asked:
            self.hang() if asked[str(rates[0])] == "hang" else self.fail(asked[str(rates[0])])
        steps = []
        for rate in rates:
            steps.append(Stats())
            steps[-1].add_mean("loss", rate, 1)
        return steps

    @ray.method(concurrency_group="health")
    def has_begun(self) -> bool:
        return self._begun.wait(LONG_S / 2)

    @ray.method(concurrency_group="health")
    def let_go(self) -> None:
        self._let_go.set()

    @ray.method(concurrency_group="health")
    def outlive(self) -> None:
        threading.Event().wait()


def outcome(action: Callable[[], object]) -> tuple[str, object]:
    try:
        return "", action()
    except Exception as error:
        return type(error).__name__, str(error)


class Scenarios:
    """Each method waits for calls of two or three ranks and returns what `gather` made of them."""

    def __init__(self, cluster: RayCluster) -> None:
        spawned = [cluster.spawn(Rank, tenant=tenant, bundle=0, arguments=()) for tenant in ("actor", "critic", "rollout")]
        self.first, self.second, self.victim = spawned
        self.guard = Call(self.victim.outlive.remote(), "rollout engine")
        ray.get([rank.answer.remote(0) for rank in spawned])

    def results_in_order(self) -> object:
        calls = [Call(self.second.answer.remote(2), "b"), Call(self.first.answer.remote(1), "a")]
        return gather(calls, phase="training", timeout_s=LONG_S, watched=[self.guard])

    def failure_beside_success(self) -> object:
        good, bad = self.first.answer.remote(1), self.second.fail.remote("bad number")
        ray.wait([good, bad], num_returns=2)  # both have finished when the wait begins
        return gather([Call(good, "critic rank 0"), Call(bad, "critic rank 1")], phase="critic values", timeout_s=LONG_S)

    def failure_while_another_hangs(self) -> object:
        calls = [Call(self.first.hang.remote(), "actor rank 0"), Call(self.second.fail.remote("plain"), "actor rank 1")]
        try:
            return gather(calls, phase="actor training", timeout_s=LONG_S, watched=[self.guard])
        finally:
            ray.get(self.first.let_go.remote())

    def own_error_beats_echo(self) -> object:
        return self._both_fail("echo", "bad number")

    def own_error_beats_broken_collective(self) -> object:
        return self._both_fail("broken collective", "plain")

    def _both_fail(self, first: str, second: str) -> object:
        refs = [self.first.fail.remote(first), self.second.fail.remote(second)]
        ray.wait(refs, num_returns=2)
        calls = [Call(refs[0], "actor rank 0"), Call(refs[1], "actor rank 1")]
        return gather(calls, phase="actor training", timeout_s=LONG_S)

    def timeout(self) -> object:
        calls = [Call(self.first.hang.remote(), "actor rank 0"), Call(self.second.answer.remote(1), "actor rank 1")]
        try:
            return gather(calls, phase="actor training", timeout_s=0.5, watched=[self.guard])
        finally:
            ray.get(self.first.let_go.remote())

    def watched_process_dies(self) -> object:
        self.victim.die.remote()
        try:
            call = Call(self.first.hang.remote(), "actor rank 0")
            return gather([call], phase="actor training", timeout_s=LONG_S, watched=[self.guard])
        finally:
            ray.get(self.first.let_go.remote())

    def death_beats_error_and_echo(self) -> object:
        calls = [
            Call(self.first.fail.remote("bad number"), "actor rank 0"),
            Call(self.second.fail.remote("echo"), "actor rank 1"),
            self.guard,  # its process has died by now
        ]
        ray.wait([call.ref for call in calls], num_returns=3)
        return gather(calls, phase="actor training", timeout_s=LONG_S)


class Started:
    """In the place of a cluster: the ranks of a role are there already."""

    device = "cpu"

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = ranks

    def spawn(self, process: type, *, tenant: str, bundle: int, arguments: Sequence[object]) -> Any:
        return self._ranks[bundle]


class SideBySideScenarios:
    """A critic of one rank and an actor of two that train at the same time."""

    def __init__(self, cluster: RayCluster) -> None:
        self.ranks = [cluster.spawn(Rank, tenant=tenant, bundle=1, arguments=()) for tenant in ("critic", "actor", "rollout")]
        ray.get([rank.answer.remote(0) for rank in self.ranks])
        watched: list[Call] = []
        common: Any = {"log_dir": "", "timeout_s": LONG_S, "bucket_bytes": 1, "sync_timeout_s": LONG_S, "watched": watched}
        places = {"critic": range(1), "actor": range(1, 3)}
        groups = {role: RayTrainGroup(Started(self.ranks), role, bundles=places[role], **common) for role in ("critic", "actor")}
        self.both = RaySideBySide(groups, timeout_s=LONG_S, watched=watched)
        self.ended: list[str] = []

    def _train(self, **asked: str) -> object:
        handle = BatchHandle(json.dumps({str(RATES[role][0]): what for role, what in asked.items()}), tuple(self.ranks))
        steps = self.both.train(handle, StepPlan(0, ()), RATES, self._on_end)
        return {role: [step.result()["loss"] for step in found] for role, found in steps.items()}

    def _on_end(self, role: str) -> None:
        self.ended.append(role)
        if role == "actor":
            self.ranks[0].let_go.remote()

    def side_by_side(self) -> object:
        """The critic hangs until it is told that the actor has ended."""
        return [self._train(critic="hang"), self.ended]

    def side_by_side_failure(self) -> object:
        try:
            return self._train(critic="hang", actor="bad number")
        finally:
            ray.get(self.ranks[0].let_go.remote())


def settings(num_bundles: int) -> ClusterSettings:
    return ClusterSettings(
        address=None, num_bundles=num_bundles, colocate=True, device="auto", placement_timeout_s=1.0,
        object_store_bytes=100 * 2**20,
    )  # fmt: skip


def placed(num_bundles: int) -> object:
    """Ask for bundles on the cluster that runs already. Returns only if there was room."""
    with RayCluster(settings(num_bundles)) as cluster:
        return cluster.device


def main() -> None:
    ray_health._SETTLE_S = 1.0
    found: dict[str, Any] = {}
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"  # another cluster that Ray would find; --ray-address local means ours
    with RayCluster(settings(2)) as cluster:
        found["device"] = ("", cluster.device)
        found["cpus"] = ("", ray.cluster_resources()["CPU"])
        scenarios = Scenarios(cluster)
        for name in (
            "results_in_order", "failure_beside_success", "failure_while_another_hangs", "own_error_beats_echo",
            "own_error_beats_broken_collective", "timeout", "watched_process_dies", "death_beats_error_and_echo",
        ):  # fmt: skip
            found[name] = outcome(getattr(scenarios, name))
        together = SideBySideScenarios(cluster)
        for name in ("side_by_side", "side_by_side_failure"):
            found[name] = outcome(getattr(together, name))
        real_init, real_shutdown = placement.ray.init, placement.ray.shutdown
        placement.ray.init = placement.ray.shutdown = lambda *_, **__: None  # one process, one cluster
        whole = int(found["cpus"][1])
        found["too_many_bundles"] = outcome(lambda: placed(whole + 3))
        found["bundles_held_by_others"] = outcome(lambda: placed(whole))
        placement.ray.init, placement.ray.shutdown = real_init, real_shutdown
    found["connected_after"] = ("", ray.is_initialized())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
