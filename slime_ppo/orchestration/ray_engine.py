"""The process of the rollout engine on a Ray cluster: the embedded engine itself, or the client of SGLang's servers.

Torch and transformers are imported in its methods, in its process; the driver never does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from slime_ppo.orchestration.ray_process import Process, logged
from slime_ppo.rollout.engine import EnginePart

if TYPE_CHECKING:
    from slime_ppo.rollout.embedded.engine import EmbeddedEngine
    from slime_ppo.rollout.sglang.engine import EngineSettings, SGLangEngine
    from slime_ppo.rollout.sglang.server import Server


class EngineProcess(Process):
    """Holds the engine; `call` runs one of its methods, `abort` beside a method that runs."""

    def __init__(self, name: str, log_dir: str) -> None:
        super().__init__(name, log_dir)
        self._started: EmbeddedEngine | SGLangEngine | None = None

    @logged
    def start_embedded(
        self,
        hf_folder: str,
        *,
        dtype: str,
        device: str,
        trust_remote_code: bool,
        fp32_lm_head: bool,
        num_threads: int,
        starts_offloaded: bool,
    ) -> None:
        from slime_ppo.rollout.embedded.engine import EmbeddedEngine

        engine = EmbeddedEngine(
            hf_folder,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            fp32_lm_head=fp32_lm_head,
            num_threads=num_threads,
        )
        self._keep(engine, starts_offloaded)

    @logged
    def start_sglang(self, servers: "Sequence[Server]", settings: "EngineSettings", *, starts_offloaded: bool) -> None:
        """Start those servers that do not run yet."""
        from slime_ppo.rollout.sglang.engine import SGLangEngine

        self._keep(SGLangEngine(servers, settings), starts_offloaded)

    @logged
    def call(self, method: str, *arguments: object, **named: object) -> Any:
        """One of the engine's methods."""
        return getattr(self._engine, method)(*arguments, **named)

    @ray.method(concurrency_group="health")
    def abort(self) -> None:
        self._engine.abort()

    def _keep(self, engine: "EmbeddedEngine | SGLangEngine", starts_offloaded: bool) -> None:
        self._started = engine
        if starts_offloaded:
            engine.offload(EnginePart.ALL)

    @property
    def _engine(self) -> "EmbeddedEngine | SGLangEngine":
        if self._started is None:
            raise RuntimeError("this process has not been started as a rollout engine")
        return self._started
