"""How a server starts on a CPU: by SGLang's own launcher, but its processes are forked instead of spawned, and decode in batches.

Importing SGLang costs 10 CPU seconds and 0.4 GB. Spawned, each of its three processes pays them; forked, only the first one does.
A fork is safe here because nothing has run before it: besides the main thread there is one that watches the parent, and numpy's,
which know forks; there is no thread of torch and no open socket. A GPU gets nothing of this: a fork would break CUDA.
"""

import contextlib
import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager, run_detokenizer_process, run_scheduler_process
from sglang.srt.entrypoints.http_server import _setup_and_run_http_server
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from slime_ppo.rollout.sglang.cpu_attention import decode_attention, is_worthwhile
from slime_ppo.rollout.sglang.server_args import BATCHED_ATTENTION


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's attention for CPUs without AMX, but for decoding. Prompts go through its loop, once for each."""

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Write what `decode_attention` gives into `output` [B, Hq, Dv]; the arguments are those of SGLang's loop."""
        if encoder_lens is not None or not is_worthwhile(seq_lens):
            tables = (req_to_token, req_pool_indices, seq_lens, encoder_lens)
            looped: torch.Tensor = super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *tables, **options)
            return looped
        slots = req_to_token[req_pool_indices]
        scaling, window = options["scaling"], options["sliding_window_size"]
        return output.copy_(decode_attention(query, k_cache, v_cache, slots, seq_lens, scaling=scaling, window=window))


class ForkedEngine(Engine):  # type: ignore[misc]
    """SGLang's launcher, at the two places where it starts processes and which it offers to subclasses."""

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
    """New processes are forks, with all that is imported taken out of the garbage collector's rounds: it would write into the
    pages that they share."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def run_server(server_args: Any) -> None:
    """Serve `server_args` (SGLang's ServerArgs) until stopped, as `sglang.launch_server` does for servers of its default kind."""
    register_attention_backend(BATCHED_ATTENTION)(BatchedAttention)
    server_args.resolve_once()
    tokenizer_manager, template_manager, ports, schedulers, watchdog, _ = ForkedEngine._launch_subprocesses(
        server_args=server_args,
        init_tokenizer_manager_func=init_tokenizer_manager,
        run_scheduler_process_func=run_scheduler_process,
        run_detokenizer_process_func=run_detokenizer_process,
    )
    _setup_and_run_http_server(server_args, tokenizer_manager, template_manager, ports, schedulers.scheduler_infos, watchdog)
