"""The most that a device holds at one time, from the estimates of its tenants: who is awake together, and with how much."""

from collections.abc import Mapping
from dataclasses import dataclass

from slime_ppo.config.memory_plan import MemoryEstimate, engine_memory, kv_cache, role_memory
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config


@dataclass(frozen=True)
class DevicePlan:
    """The fullest device of a run. `roles` is the fullest rank of each; `engine` the bytes of a process of the rollout engine: its
    weights, and the KV cache that it cannot do without (SGLang: one sample at its longest; embedded: the rollout's).

    `peak` is the most bytes in use at one time, `phase` when that is.
    """

    roles: Mapping[RoleName, MemoryEstimate]
    engine: int
    peak: int
    phase: str

    @property
    def host(self) -> int:
        """Bytes of host memory for the roles' ranks of one device."""
        return sum(one.host for one in self.roles.values())


def device_plan(config: Config, shapes: Mapping[RoleName, ModelShape]) -> DevicePlan:
    """`shapes` of the actor, from which the engine starts, and of every other role in `config.roles`."""
    roles = {role: role_memory(config, shapes[role], role) for role in config.roles}
    return plan_of_roles(config, roles, engine_needs(config, shapes["actor"]))


def plan_of_roles(config: Config, roles: Mapping[RoleName, MemoryEstimate], engine: tuple[int, int]) -> DevicePlan:
    """The plan from the parts: `engine` as `engine_needs`."""
    weights, cache = engine
    phases = {f"{role} trains": one.total for role, one in roles.items()}
    if roles and config.cluster.colocate and not config.offloads:
        stays = weights + cache + sum(one.resident.total for one in roles.values())
        phases = {f"{role} trains, all are awake": stays + one.activations + one.logits for role, one in roles.items()}
    else:
        phases["rollout"] = weights + cache
        if roles and config.offloads:
            phases["weights go to the engine"] = roles["actor"].resident.params + weights
    phase = max(phases, key=lambda name: phases[name])
    return DevicePlan(roles, weights + cache, phases[phase], phase)


def engine_needs(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Weights and the least KV cache of a process of the engine; nothing on our devices where others run the servers."""
    embedded = config.rollout.engine == "embedded"
    if not config.generates or not (embedded or config.engine_bundles):
        return 0, 0
    if embedded:
        return engine_memory(config, shape)
    return engine_memory(config, shape)[0], kv_cache(config, shape, 1)
