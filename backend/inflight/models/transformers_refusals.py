"""Classes of transformers that cannot be served at all, whatever their configuration, and why.

They are refused by name, before anything is read. `python -m ci.transformers_table` tries them as it tries all others.
"""

from __future__ import annotations

NOT_CAUSAL = "transformers 5.17 computes its attention so that tokens attend to later ones"
SPARSE = "which tokens it attends to depends, in transformers 5.17, on how a prompt is divided"
FROM_OTHERS = "it continues what another network computes, which is not served"
NO_CACHE = "its layers put no keys and values into transformers' cache"
OWN_CACHE = "it keeps its state in a cache of its own"

REFUSED: dict[str, str] = {
    "AXK2ForCausalLM": SPARSE,
    "BigBirdForCausalLM": NOT_CAUSAL,
    "BltForCausalLM": "it joins bytes to patches, whose borders another network finds",
    "CpmAntForCausalLM": "its attention sees a whole prompt at once, with tokens of its own before it",
    "DeepseekV32ForCausalLM": SPARSE,
    "DogeForCausalLM": "its attention is another one for each implementation of it in transformers",
    "Gemma3nForConditionalGeneration": "it needs the package timm",
    "Gemma4AssistantForCausalLM": FROM_OTHERS,
    "Gemma4UnifiedAssistantForCausalLM": FROM_OTHERS,
    "GitForCausalLM": "its attention expects an image before a prompt",
    "GlmMoeDsaForCausalLM": SPARSE,
    "HYV4ForCausalLM": SPARSE,
    "InklingForCausalLM": "its layers convolve tokens, for whose state this engine has no cache",
    "MegatronBertForCausalLM": NOT_CAUSAL,
    "MllamaForCausalLM": "some of its layers attend to an image",
    "MoshiForCausalLM": "its logits differ from those of its own cache",
    "MusicgenForCausalLM": FROM_OTHERS,
    "MusicgenMelodyForCausalLM": FROM_OTHERS,
    "OpenAIGPTLMHeadModel": NO_CACHE,
    "ProphetNetForCausalLM": "it predicts several tokens at once, by streams of its own",
    "ReformerModelWithLMHead": OWN_CACHE,
    "RemBertForCausalLM": NOT_CAUSAL,
    "RoFormerForCausalLM": NOT_CAUSAL,
    "XLMWithLMHeadModel": NOT_CAUSAL,
    "XLNetLMHeadModel": NOT_CAUSAL,
}
"""By the name of the class; the reason is a clause."""
NOT_SPLIT: dict[str, str] = {
    "Gemma3nForCausalLM": "its MLPs keep the largest of all their features, which its tp_plan splits",
}
"""Those that are served, but not on several ranks although their `tp_plan` says so; likewise."""
