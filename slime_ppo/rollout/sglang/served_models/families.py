"""Language models and reward models of the families that the trainer converts."""

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_classification import LlamaForClassification
from sglang.srt.models.llama_reward import LlamaForSequenceClassification
from sglang.srt.models.mistral import MistralForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen2_classification import Qwen2ForSequenceClassification
from sglang.srt.models.qwen2_rm import Qwen2ForRewardModel
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_classification import Qwen3ForSequenceClassification
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.models.qwen3_rm import Qwen3ForRewardModel

EntryClass = [
    LlamaForCausalLM,
    LlamaForClassification,
    LlamaForSequenceClassification,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen2ForRewardModel,
    Qwen2ForSequenceClassification,
    Qwen3ForCausalLM,
    Qwen3ForRewardModel,
    Qwen3ForSequenceClassification,
    Qwen3MoeForCausalLM,
]
