"""Trainer weights as whole HF tensors, bucket by bucket, never the whole model on one device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from slime_ppo.backends.megatron.collectives import gather_objects
from slime_ppo.backends.megatron.model import converted_parameters
from slime_ppo.conversion.hf_io import HfWriter
from slime_ppo.conversion.mapping import Rule
from slime_ppo.conversion.shard import unshard
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.errors import CheckpointError
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, plan_buckets


@dataclass(frozen=True)
class _Origin:
    """Where a parameter of the whole model lies: the stage, and for an expert the expert-parallel rank (else None)."""

    specs: tuple[TensorSpec, ...]
    pp_rank: int
    ep_rank: int | None


class WeightExporter:
    """Gathers parameters over tensor-, expert- and pipeline-parallel ranks into HF names and shapes. Making it is collective."""

    def __init__(self, models: Sequence[GPTModel], table: ConversionTable, layout: ParallelLayout) -> None:
        self._table = table
        self._own = {rule.megatron: parameter for rule, parameter in converted_parameters(models, table, layout)}
        self._origins = self._agreed_origins()
        self.specs: tuple[TensorSpec, ...] = tuple(spec for origin in self._origins.values() for spec in origin.specs)

    @property
    def config_changes(self) -> dict[str, object]:
        """As ConversionTable's."""
        return self._table.config_changes

    @torch.no_grad()
    def gather(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The bucket's tensors by HF name, whole, on every rank. All ranks of the role call it with the same buckets."""
        wanted = {spec.name for spec in bucket.specs}
        gathered: dict[str, torch.Tensor] = {}
        for name, origin in self._origins.items():
            chosen = [spec.name in wanted for spec in origin.specs]
            if any(chosen):
                parts = zip(origin.specs, chosen, self._whole(name, origin), strict=True)
                gathered |= {spec.name: part for spec, is_wanted, part in parts if is_wanted}
        return gathered

    def _agreed_origins(self) -> dict[str, _Origin]:
        """Every parameter of the whole model by its global name, in the order of the table; the same on all ranks."""
        pp_rank, ep_rank = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
        own = {
            name: _Origin(self._specs_of(self._table.rules[name], parameter), pp_rank, ep_rank if self._is_expert(name) else None)
            for name, parameter in self._own.items()
        }
        found: dict[str, _Origin] = {}
        for of_stage in gather_objects(own, parallel_state.get_pipeline_model_parallel_group()):
            found = of_stage | found
        for of_experts in gather_objects(found, parallel_state.get_expert_model_parallel_group()):
            found = of_experts | found
        exported: set[str] = set()
        origins: dict[str, _Origin] = {}
        for name, rule in self._table.rules.items():
            # the last stage's copy of a tied embedding is no second tensor
            if name in found and exported.isdisjoint(rule.hf):
                origins[name] = found[name]
                exported |= set(rule.hf)
        return origins

    def _is_expert(self, name: str) -> bool:
        return self._table.rules[name].per_expert

    def _specs_of(self, rule: Rule, parameter: torch.Tensor) -> tuple[TensorSpec, ...]:
        shards = [torch.empty(parameter.shape, device="meta", dtype=parameter.dtype)] * _split_group(rule).size()
        dtype = str(parameter.dtype).removeprefix("torch.")
        wholes = self._unshard(rule, shards)
        return tuple(TensorSpec(name, tuple(whole.shape), dtype) for name, whole in zip(rule.hf, wholes, strict=True))

    def _whole(self, name: str, origin: _Origin) -> list[torch.Tensor]:
        """The parameter's HF tensors on every rank: gathered where it lies, then handed to the other experts' ranks and stages."""
        here = parallel_state.get_pipeline_model_parallel_rank() == origin.pp_rank
        parts = self._gathered(self._table.rules[name], self._own[name]) if here and name in self._own else self._room(origin)
        if here and origin.ep_rank is not None:
            _hand_out(parts, parallel_state.get_expert_model_parallel_group(), origin.ep_rank)
        _hand_out(parts, parallel_state.get_pipeline_model_parallel_group(), origin.pp_rank)
        return parts

    def _gathered(self, rule: Rule, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        group, shards = _split_group(rule), [parameter.data]
        if group.size() > 1:
            shards = [torch.empty_like(parameter.data) for _ in range(group.size())]
            dist.all_gather(shards, parameter.data.contiguous(), group=group)
        return [part.contiguous() for part in self._unshard(rule, shards)]

    def _room(self, origin: _Origin) -> list[torch.Tensor]:
        device = next(iter(self._own.values())).device
        return [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in origin.specs]

    def _unshard(self, rule: Rule, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shape = self._table.shape
        return unshard(
            rule.split,
            shards,
            num_query_groups=shape.num_query_groups,
            num_heads=shape.num_attention_heads,
            vocab_size=shape.vocab_size,
        )


def _split_group(rule: Rule) -> dist.ProcessGroup:
    """The ranks over which the rule's parameter is split."""
    tensor, expert = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    group: dist.ProcessGroup = expert if rule.per_expert else tensor
    return group


def _hand_out(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, group_rank: int) -> None:
    """Overwrite the tensors with those of one rank of the group."""
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=group_rank)


def save_hf_folder(
    exporter: WeightExporter, folder: str, *, source: str, bucket_bytes: int, writes: bool, durable: bool = True
) -> None:
    """Write the weights as a Hugging Face folder, one bucket at a time, from the rank that `writes`. Collective.

    `source` is the folder whose config and tokenizer are copied. A critic's folder names its head `score.weight`, as
    sequence classifiers do. When a file can't be written, the rank that writes raises after the last bucket, so that no other
    rank is left in a collective; what it has written is removed.
    """
    writer = HfWriter(folder, source_folder=source, config_changes=exporter.config_changes) if writes else None
    failure: Exception | None = None
    for bucket in plan_buckets(exporter.specs, bucket_bytes):
        tensors = exporter.gather(bucket)
        if writer is not None and failure is None:
            try:
                writer.write({name: tensor.cpu() for name, tensor in tensors.items()})
            except (OSError, CheckpointError) as error:
                failure = error
                writer.discard()
    if failure is not None:
        raise failure
    if writer is not None:
        writer.publish()
