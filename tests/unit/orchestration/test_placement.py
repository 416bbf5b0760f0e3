"""Which bundle of a placement group a process gets, and how much of it; no cluster is started."""

from types import SimpleNamespace
from typing import Any

import pytest

from slime_ppo.orchestration import placement
from slime_ppo.orchestration.placement import RayCluster, node_by_node
from slime_ppo.orchestration.ray_launcher import _cluster_settings
from tests.helpers.configs import make_config


def test_node_by_node_bundles_of_a_node_stand_together_in_the_order_of_their_first() -> None:
    assert node_by_node({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]
    assert node_by_node({3: "a", 2: "a", 1: "b", 0: "b"}) == [0, 1, 2, 3]
    assert node_by_node({0: "a", 1: "a"}) == [0, 1]


@pytest.mark.parametrize(("colocate", "num_bundles", "share"), [(True, 2, 0.4), (False, 5, 1.0)])
def test_spawn_gives_a_share_of_a_bundle_that_tenants_share_and_all_of_its_own(
    monkeypatch: pytest.MonkeyPatch, colocate: bool, num_bundles: int, share: float
) -> None:
    asked: list[dict[str, Any]] = []

    class Remote:
        def options(self, **options: Any) -> "Remote":
            asked.append(options)
            return self

        def remote(self, *arguments: object) -> tuple[object, ...]:
            return arguments

    monkeypatch.setattr(placement, "ray", SimpleNamespace(remote=lambda **_: lambda process: Remote()))
    config = make_config(parallel__actor_num_gpus_per_node=2, cluster__colocate=colocate)
    settings = _cluster_settings(config)
    assert (settings.num_bundles, settings.colocate) == (num_bundles, colocate)
    cluster: Any = RayCluster(settings)
    cluster.device, cluster._group, cluster._order = "cuda", object(), [0, 2, 1, 3, 4]
    assert cluster.spawn(object, tenant="critic", bundle=1, arguments=("critic-1",)) == ("critic-1",)
    [options] = asked
    assert (options["num_cpus"], options["num_gpus"]) == (share, share)
    assert options["scheduling_strategy"].placement_group_bundle_index == 2, "the second bundle on the first node"
