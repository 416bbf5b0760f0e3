"""A model family's table applied to a model shape: which HF tensors make which Megatron parameter."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.conversion.families import FAMILIES
from slime_ppo.conversion.mapping import ModelFamily, Rule, Split
from slime_ppo.errors import ConversionError

Head = Literal["language_model", "value"]

# transformer-engine makes a norm and the linear after it one module; the families' tables name them as two
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class ConversionTable:
    """Looks up the rule of a Megatron parameter, with layer numbers filled in."""

    def __init__(self, shape: ModelShape, head: Head) -> None:
        self.family = FAMILIES[shape.model_type]
        self.rules = _expand(self.family, shape, head)
        self.derived = {name.format(layer=layer) for name in self.family.derived for layer in range(shape.num_layers)}
        self.shape = shape
        self.head = head

    @property
    def config_changes(self) -> dict[str, object]:
        """What a saved folder's config.json must say differently from the folder the model came from."""
        if self.head == "language_model":
            return {}
        return {"architectures": [self.family.value_architecture], "num_labels": 1}

    def rule(self, megatron_name: str, first_layer: int, first_expert: int = 0) -> Rule:
        """The rule of a parameter by its local name; `first_layer` is the global number of the chunk's layer 0, `first_expert`
        that of the rank's expert 0."""
        name = _global_name(megatron_name, first_layer, first_expert)
        if name not in self.rules:
            raise ConversionError(f"the {self.shape.model_type} table has no rule for the Megatron parameter {name}")
        return self.rules[name]

    def check_hf_names(self, present: Iterable[str], *, source: str, optional: frozenset[str] = frozenset()) -> None:
        """One error that lists every HF tensor the table needs and does not find, or finds and does not use.

        `optional` names may be present without being used, or missing.
        """
        found = set(present)
        needed = {name for rule in self.rules.values() for name in rule.hf}
        missing = sorted(needed - found - optional)
        unused = sorted(found - needed - optional - self.derived)
        if missing or unused:
            raise ConversionError(
                f"{source} does not fit the {self.shape.model_type} table: "
                + "; ".join(f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("not used", unused)) if names)
            )


def _expand(family: ModelFamily, shape: ModelShape, head: Head) -> dict[str, Rule]:
    """Every rule by its global Megatron name, in the order of the model."""
    rules = list(family.rules)
    if head == "value":
        rules.append(family.value_head)
    elif shape.tie_word_embeddings:  # the last of several pipeline stages has a copy of the embedding
        embedding = next(rule for rule in family.rules if rule.split is Split.VOCAB)
        rules.append(replace(family.output_layer, hf=embedding.hf))
    else:
        rules.append(family.output_layer)
    expanded: dict[str, Rule] = {}
    for rule in rules:
        for layer in range(shape.num_layers) if "{layer}" in rule.megatron else (0,):
            for expert in range(shape.num_experts) if rule.per_expert else (0,):
                name = rule.megatron.format(layer=layer, expert=expert)
                hf = tuple(one.format(layer=layer, expert=expert) for one in rule.hf)
                expanded[name] = replace(rule, megatron=name, hf=hf)
    return expanded


def _global_name(local_name: str, first_layer: int, first_expert: int) -> str:
    matched = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", local_name)
    if matched is None:
        return local_name
    layer, parameter = int(matched[1]) + first_layer, FUSED_NORMS.get(matched[2], matched[2])
    parameter = re.sub(r"(?<=local_experts\.)\d+", lambda expert: str(int(expert[0]) + first_expert), parameter)
    return f"decoder.layers.{layer}.{parameter}"
