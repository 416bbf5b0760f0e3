"""What a server is started with: one spec, the command line made of it, and the check of the flags a user passes on."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slime_ppo.config.fields import nearest
from slime_ppo.errors import ConfigError
from slime_ppo.rollout.sglang.installed_flags import InstalledFlag, installed_flags
from slime_ppo.rollout.sglang.refused_flags import refusal

# `--context-length N` serves sequences of N - 2 tokens, and prompts that are shorter still by the response
_CONTEXT_MARGIN = 3
_MIN_CPU_KV_TOKENS = 32768
BATCHED_ATTENTION = "torch_batched"
"""The attention that `cpu_launch` adds to those of SGLang."""
LOOPBACK = ("127.0.0.1", "localhost")
_EVERY_INTERFACE = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class ServerSpec:
    """One server: model, device and options. Picklable; `api_key` is not shown.

    `port` None takes a free one at each start. `extra` are further flags of SGLang as (name, values, none for a switch).
    `kv_tokens` is the size of the KV cache in tokens; None: what fits into GPU memory, on a CPU a number that suits tests.
    """

    hf_folder: str
    dtype: str
    device: Literal["cpu", "cuda"]
    max_positions: int
    log_file: str
    tp_size: int = 1
    gpu_ids: tuple[int | str, ...] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    trust_remote_code: bool = False
    fp32_lm_head: bool = False
    deterministic: bool = False
    random_seed: int = 0
    api_key: str | None = field(default=None, repr=False)
    is_reward_model: bool = False
    num_threads: int = 1
    kv_tokens: int | None = None
    start_timeout_s: float = 900.0
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        check_host(self.host, self.api_key)


def server_command(spec: ServerSpec, port: int) -> list[str]:
    """The command that serves `spec` on `port`; without the API key, which must not show in a list of processes."""
    values = {**_common(spec, port), **(_cpu(spec) if spec.device == "cpu" else _cuda(spec))}
    arguments = [part for name, value in values.items() for part in _flag(name, value)]
    arguments += [part for name, values in spec.extra for part in (*_flag(name, True), *values)]
    return [sys.executable, "-m", "slime_ppo.rollout.sglang.serve", str(os.getpid()), *arguments]


def server_environment(spec: ServerSpec) -> dict[str, str]:
    """Variables that SGLang or its libraries read, without the API key."""
    variables = {
        "OMP_NUM_THREADS": str(spec.num_threads),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "slime_ppo.rollout.sglang.served_models",
    }
    if spec.device == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
        if not any(name.replace("-", "_") == "enable_torch_compile" for name, _ in spec.extra):
            # the seeded sampler would be compiled: 8 s and a C++ compiler for a function that is as fast without
            variables["TORCH_COMPILE_DISABLE"] = "1"
        if spec.tp_size > 1:
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = _thread_binding(spec.tp_size)
    elif spec.gpu_ids:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpu_ids))
    return variables


def check_host(host: str, api_key: str | None) -> None:
    """ConfigError for a server that strangers could reach without a key (its control calls run what they are sent), or for a
    host that names no machine."""
    if host in _EVERY_INTERFACE:
        raise ConfigError(f"host {host} is no address to call a server at; expected the address of its machine that others reach")
    if ":" in host:
        raise ConfigError(f"host {host} is an IPv6 address or has a port; expected an IPv4 address or a name (--sglang-host)")
    if host not in LOOPBACK and api_key is None:
        raise ConfigError(
            f"host {host} needs --sglang-api-key-file: whoever reaches a server without a key can replace its weights and run "
            "code in it; or leave the host at 127.0.0.1"
        )


def check_server_args(extra: Sequence[tuple[str, tuple[str, ...]]], origin: str) -> None:
    """Refuse flags that the installed SGLang does not have, that we set ourselves or that break training, and wrong values.

    `extra` are (name without dashes, values, none for a switch), `origin` says where they were given. Raises ConfigError.
    """
    if not extra:
        return
    known = installed_flags()
    for name, values in extra:
        shown = f"{origin}: --{name.replace('_', '-')}"
        flag = known.get(name.replace("-", "_"))
        if flag is None:
            close = nearest(name.replace("-", "_"), known)
            hint = f"; did you mean --{close.replace('_', '-')}?" if close else ""
            raise ConfigError(f"{shown} is not a flag of the installed SGLang{hint}")
        reason = refusal(flag.field)
        if reason is not None:
            raise ConfigError(f"{shown} cannot be given to SGLang here: {reason}")
        problem = _problem_of(flag, values)
        if problem is not None:
            raise ConfigError(f"{shown} {problem}")


def _problem_of(flag: InstalledFlag, values: Sequence[str]) -> str | None:
    found = " ".join(map(repr, values))
    if flag.kind == "switch":
        return f"is a switch and takes no value, found {found}" if values else None
    # what SGLang parses by itself may do without a value
    if not values:
        return None if flag.kind == "text" and not flag.choices else "needs a value"
    if len(values) > 1 and not flag.is_list:
        return f"takes one value, found {found}"
    return next((problem for value in values if (problem := _value_problem(flag, value)) is not None), None)


def _value_problem(flag: InstalledFlag, value: str) -> str | None:
    if flag.choices:
        return None if value in flag.choices else f"takes one of {', '.join(flag.choices)}; found {value!r}"
    try:
        {"int": int, "float": float, "text": str}[flag.kind](value)
    except ValueError:
        return f"takes a number ({flag.kind}), found {value!r}"
    return None


def _thread_binding(tp_size: int) -> str:
    """One core for each rank; without it SGLang wants a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))


def _common(spec: ServerSpec, port: int) -> dict[str, str | bool]:
    return {
        "model_path": spec.hf_folder,
        "host": spec.host,
        "port": str(port),
        "device": spec.device,
        "dtype": spec.dtype,
        "tp_size": str(spec.tp_size),
        "context_length": str(spec.max_positions + _CONTEXT_MARGIN),
        "random_seed": str(spec.random_seed),
        "trust_remote_code": spec.trust_remote_code,
        "enable_fp32_lm_head": spec.fp32_lm_head,
        "enable_deterministic_inference": spec.deterministic,
        "is_embedding": spec.is_reward_model,
        "grammar_backend": "none",
        "sampling_defaults": "openai",
        "log_level": "warning",
        "sleep_on_idle": True,
        "skip_server_warmup": True,
    }


def _cpu(spec: ServerSpec) -> dict[str, str | bool]:
    kv_tokens = spec.kv_tokens or max(_MIN_CPU_KV_TOKENS, 2 * spec.max_positions)
    return {
        # with a batch in one call, the last bit of a log-prob depends on the longest sequence in it
        "attention_backend": "torch_native" if spec.deterministic else BATCHED_ATTENTION,
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "mem_fraction_static": "0.6",
        "max_total_tokens": str(kv_tokens),
    }


def _cuda(spec: ServerSpec) -> dict[str, str | bool]:
    kv_tokens: dict[str, str | bool] = {} if spec.kv_tokens is None else {"max_total_tokens": str(spec.kv_tokens)}
    return {"enable_memory_saver": True, **kv_tokens}


def _flag(name: str, value: str | bool) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, value]
