"""Section `model`: the Hugging Face folder that gives shape and first weights to every role."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class ModelConfig:
    """The model of the actor, and what the other roles start from."""

    hf_checkpoint: str = option(help="local Hugging Face folder of the actor's first weights (config.json, safetensors, tokenizer)")
    ref_load: str | None = option(
        None,
        help="local Hugging Face folder of the frozen reference; same shape as the actor",
        default_text="same as --hf-checkpoint",
    )
    trust_remote_code: bool = option(False, help="run Python code found in model folders")
    make_vocab_size_divisible_by: int = option(
        128,
        help="the embedding is padded to a multiple of this times the tensor-parallel size; padded rows enter no softmax",
        unit="rows",
        at_least=1,
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", help="type of weights and activations of every role")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = option(
        "auto",
        help="what transformer layers are made of: transformer_engine has fused kernels for GPUs and bfloat16, local runs on any "
        "device and in float32; auto = transformer_engine on cuda in bfloat16 where it is installed, else local",
    )
    fuse_lm_head: bool = option(
        False,
        help="log-probs from hidden states block by block: the logits of a micro-batch never exist, at the price of making them "
        "again in the backward pass. Same numbers; for large vocabularies and long responses",
    )
    fp32_lm_head: bool = option(
        False,
        help="with --dtype bfloat16 the output layer and its logits are float32, in the actor and the engine; an embedding that is "
        "tied to it is float32 too. Saved and synced as such",
    )
    moe_aux_loss_coeff: float = option(
        0.0,
        help="weight of the load-balancing loss of a mixture of experts: summed over layers, averaged over the micro-batches of a "
        "step, so that the gradient depends on how the step is cut into micro-batches and data-parallel ranks; 0 = off",
        at_least=0,
    )
    save_hf: bool = option(True, help="write the final actor weights as a Hugging Face folder under <save>/hf")

    @property
    def ref_folder(self) -> str:
        """The reference's folder, default resolved."""
        return self.ref_load if self.ref_load is not None else self.hf_checkpoint
