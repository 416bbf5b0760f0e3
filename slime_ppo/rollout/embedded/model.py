"""The Hugging Face model inside the embedded engine, and the memory of its parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from slime_ppo.errors import CheckpointError, RolloutError

LOAD_FAILURES = (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError)


def load_causal_lm(
    hf_folder: str | Path, *, dtype: str, device: str, trust_remote_code: bool, fp32_lm_head: bool = False
) -> PreTrainedModel:
    """The folder's causal LM with SDPA attention, in eval mode and without gradients. Never reaches the network.

    `fp32_lm_head`: the output layer, its logits, and an embedding that is tied to it are float32 whatever `dtype` is.
    Parameters own their memory, so that it can be freed. Raises CheckpointError for a folder that is missing, can't be
    read, or lacks a tensor of the model.
    """
    folder = Path(hf_folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: it has no config.json (--hf-checkpoint)")
    # Library noise does not reach the console of the run.
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    auto: Any = AutoModelForCausalLM
    try:
        loaded, loading = auto.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except LOAD_FAILURES as error:
        raise CheckpointError(f"{folder} does not load as a causal language model (--hf-checkpoint): {error}") from error
    lost = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if lost:
        raise CheckpointError(f"{folder}: the weight files lack tensors of the model, or have them in another shape: {lost}")
    model: PreTrainedModel = loaded.to(device).eval().requires_grad_(False)
    if fp32_lm_head:
        _widen_output_layer(model)
    for parameter in model.parameters():
        # As loaded, they live in a mapped file, whose memory can't be resized.
        parameter.data = parameter.data.clone()
    return model


def _widen_output_layer(model: Any) -> None:
    dtype = model.dtype
    output = model.get_output_embeddings()
    output.float()
    output.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(), *inputs[1:]))
    # where the two are tied, the line above has cast the embedding as well
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, embedded: embedded.to(dtype))


class ParameterMemory:
    """Frees and allocates the memory of a model's parameters; between the two their values are lost.

    Tied parameters count once, under the first name. Buffers stay: a weight push would not bring them back.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        self._sizes = {name: parameter.untyped_storage().nbytes() for name, parameter in self._parameters.items()}

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Name in a Hugging Face folder -> the parameter itself, or its part of a fused one: writing to it changes the model."""
        named: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            named |= _expert_matrices(name, parameter) or {name: parameter}
        return named

    def bytes_resident(self) -> int:
        """Bytes of parameters and buffers on the device; memory shared by two tensors counts once."""
        storages = [tensor.untyped_storage() for tensor in (*self._parameters.values(), *self._model.buffers())]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes() > 0}.values())

    def free(self) -> None:
        """Give the parameters' memory back; raises RolloutError when some of it is still there."""
        for parameter in self._parameters.values():
            parameter.untyped_storage().resize_(0)
            if parameter.is_cuda:
                torch.cuda.empty_cache()
        left = sum(parameter.untyped_storage().nbytes() for parameter in self._parameters.values())
        if left > 0:
            raise RolloutError(f"offload of the embedded engine left {left} bytes of parameters on the device, expected 0")

    def allocate(self) -> None:
        """Memory for all parameters, of undefined content."""
        for name, parameter in self._parameters.items():
            parameter.untyped_storage().resize_(self._sizes[name])


def _expert_matrices(name: str, fused: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of each expert as folders name them, in the memory of what transformers fuses over all experts of a layer:
    gate_up_proj [E, 2f, h], down_proj [E, h, f]. Nothing for other parameters."""
    experts, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if not experts.endswith(".experts") or parts is None:
        return {}
    return {
        f"{experts}.{index}.{part}.weight": matrix
        for index, expert in enumerate(fused)
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True)
    }
