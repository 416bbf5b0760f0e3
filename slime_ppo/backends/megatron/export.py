"""Trainer weights as whole HF tensors, bucket by bucket, never the whole model on one device."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from slime_ppo.backends.megatron.model import first_layer
from slime_ppo.conversion.hf_io import HfWriter
from slime_ppo.conversion.mapping import Rule
from slime_ppo.conversion.shard import unshard
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, plan_buckets


class WeightExporter:
    """Gathers parameters over the tensor-parallel group into HF names and shapes."""

    def __init__(self, model: GPTModel, table: ConversionTable) -> None:
        self._table = table
        self._tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self._parameters = [(table.rule(name, first_layer(model)), parameter) for name, parameter in model.named_parameters()]
        self.specs: tuple[TensorSpec, ...] = tuple(
            spec for rule, parameter in self._parameters for spec in self._specs_of(rule, parameter)
        )

    @property
    def config_changes(self) -> dict[str, object]:
        """What a saved folder's config.json must say differently from the folder the model came from."""
        if self._table.head == "language_model":
            return {}
        return {"architectures": [self._table.family.value_architecture], "num_labels": 1}

    def _specs_of(self, rule: Rule, parameter: torch.Tensor) -> list[TensorSpec]:
        shards = [torch.empty(parameter.shape, device="meta", dtype=parameter.dtype)] * self._tp_size
        dtype = str(parameter.dtype).removeprefix("torch.")
        return [
            TensorSpec(name, tuple(whole.shape), dtype) for name, whole in zip(rule.hf, self._unshard(rule, shards), strict=True)
        ]

    def _unshard(self, rule: Rule, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shape = self._table.shape
        return unshard(
            rule.split,
            shards,
            num_query_groups=shape.num_query_groups,
            num_heads=shape.num_attention_heads,
            vocab_size=shape.vocab_size,
        )

    @torch.no_grad()
    def gather(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The bucket's tensors by HF name, whole, on every rank. All ranks of a tensor-parallel group call it."""
        wanted = {spec.name for spec in bucket.specs}
        gathered: dict[str, torch.Tensor] = {}
        for rule, parameter in self._parameters:
            if wanted.isdisjoint(rule.hf):
                continue
            shards = [parameter.data]
            if self._tp_size > 1:
                shards = [torch.empty_like(parameter.data) for _ in range(self._tp_size)]
                dist.all_gather(shards, parameter.data.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            for name, whole in zip(rule.hf, self._unshard(rule, shards), strict=True):
                if name in wanted:
                    gathered[name] = whole.contiguous()
        return gathered


def save_hf_folder(exporter: WeightExporter, folder: str, *, source: str, bucket_bytes: int, writes: bool) -> None:
    """Write the weights as a Hugging Face folder, one bucket at a time, from the rank that `writes`. Collective.

    `source` is the folder whose config and tokenizer are copied. A critic's folder names its head `score.weight`, as
    sequence classifiers do.
    """
    writer = HfWriter(folder, source_folder=source, config_changes=exporter.config_changes) if writes else None
    for bucket in plan_buckets(exporter.specs, bucket_bytes):
        tensors = exporter.gather(bucket)
        if writer is not None:
            writer.write({name: tensor.cpu() for name, tensor in tensors.items()})
    if writer is not None:
        writer.publish()
