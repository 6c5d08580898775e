"""What a client wants of a model, whoever asks and in whose words: `Ask`, and `Served`, which makes requests of it.

A dialect turns what its clients send into an `Ask` and what comes back into its own form. What no model can do is a
`Refusal` of a field of `Ask`, for which each dialect has its own word. Conversations are rendered by the checkpoint's
chat template (`chats`, `chat_template`), and `tool_use`, `tools` and `reasoning` know how families of models call tools
and mark what they think. Knows neither HTTP nor tensors, nor how requests reach an engine.
"""
