"""How a server starts on a CPU: SGLang's own launcher, its processes forked instead of spawned, and a faster attention.

Importing SGLang costs 10 CPU seconds. Spawned, each of its three processes pays them; forked, the first one does, and they share
its memory too. A fork is safe here because nothing has run before it: one thread besides the main one, which only watches the
parent, no thread pool of torch, no open socket. On a GPU all of this stays as SGLang has it: a fork would break CUDA.
"""

import contextlib
import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager, run_detokenizer_process, run_scheduler_process
from sglang.srt.entrypoints.http_server import _execute_server_warmup, _setup_and_run_http_server
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.server_args import prepare_server_args

from slime_ppo.rollout.sglang import cpu_attention


class ForkedEngine(Engine):  # type: ignore[misc]
    """SGLang's launcher, at the two places where it starts processes and that it offers to subclasses."""

    @classmethod
    def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
        with _forks():
            return super()._launch_scheduler_processes(*args, **kwargs)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
        with _forks():
            return super()._launch_detokenizer_subprocesses(*args, **kwargs)


@contextlib.contextmanager
def _forks() -> Iterator[None]:
    """New processes are forks, without what the garbage collector would write into the pages that they share."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def run_server(arguments: list[str]) -> None:
    """Serve until stopped; what `sglang.launch_server` does for its default kind of server."""
    add_attention_backend_choices([cpu_attention.NAME])
    register_attention_backend(cpu_attention.NAME)(cpu_attention.BatchedAttention)
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    started = ForkedEngine._launch_subprocesses(
        server_args=server_args,
        init_tokenizer_manager_func=init_tokenizer_manager,
        run_scheduler_process_func=run_scheduler_process,
        run_detokenizer_process_func=run_detokenizer_process,
    )
    tokenizer, templates, ports, schedulers, watchdog, _ = started
    _setup_and_run_http_server(
        server_args,
        tokenizer,
        templates,
        ports,
        schedulers.scheduler_infos,
        watchdog,
        execute_warmup_func=_execute_server_warmup,
    )
