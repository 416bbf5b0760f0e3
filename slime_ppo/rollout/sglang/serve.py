"""The program of a server: `python -m slime_ppo.rollout.sglang.serve PARENT_PID ARGS...` runs SGLang's HTTP server with ARGS.

It adds three things and nothing else:
- on a CPU (`--device cpu`) the stand-ins, and SGLang's launcher with forks (`cpu_launch`);
- the API key comes from an environment variable, since everybody on the machine can read the arguments of a process;
- the whole process group ends when PARENT_PID, the process that owns the server, is no longer the parent.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

API_KEY_VARIABLE = "SLIME_PPO_SGLANG_API_KEY"
_PARENT_POLL_S = 0.5


def install_stand_ins(argv: Sequence[str]) -> object:
    """What `argv` needs on its device; nothing on a GPU. Keep what is returned alive."""
    if not _on_cpu(argv):
        return None
    from slime_ppo.rollout.sglang import stand_ins

    stand_ins.install_torchvision()
    stand_ins.install_sgl_kernel()
    stand_ins.hide_megatron()
    stand_ins.admit_batched_attention()
    return stand_ins.allow_seeds() if "--enable-deterministic-inference" in argv else None


def name_processes() -> None:
    """Let SGLang name its processes, by which the owner knows them: where names go must be looked up before SGLang changes
    environment variables that are set, such as TORCHINDUCTOR_CACHE_DIR."""
    from setproctitle import getproctitle

    getproctitle()


def _on_cpu(argv: Sequence[str]) -> bool:
    return "cpu" in [value for name, value in zip(argv, argv[1:], strict=False) if name == "--device"]


def end_with_parent(parent_pid: int) -> None:
    """Kill this process group as soon as `parent_pid` is not our parent any more; looks every half second."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """Serve until stopped."""
    gc.disable()  # imports leave nothing to collect, and looking for it costs 2 s
    kept = install_stand_ins(arguments)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    api_key = os.environ.get(API_KEY_VARIABLE)
    secret = [] if api_key is None else ["--api-key", api_key]
    server_args = prepare_server_args([*arguments, *secret])  # before what takes long: it may find a wrong one
    run_server = _launcher(on_cpu=_on_cpu(arguments))
    gc.enable()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        del kept


def _launcher(*, on_cpu: bool) -> Callable[[Any], None]:
    """What serves until stopped, given SGLang's ServerArgs."""
    if on_cpu:
        from slime_ppo.rollout.sglang import cpu_launch

        return cpu_launch.run_server
    from sglang.launch_server import run_server

    return run_server  # type: ignore[no-any-return]


if __name__ in ("__main__", "__mp_main__"):  # SGLang's spawned processes import the main module again
    name_processes()

if __name__ == "__main__":
    # before the imports, which take long: the owner may die meanwhile
    end_with_parent(int(sys.argv[1]))
    main(sys.argv[2:])
