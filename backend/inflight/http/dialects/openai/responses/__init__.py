"""OpenAI's Responses API: `api` answers its paths, `store` keeps responses for later ones.

A request's items become a chat (`items`, `conversation`, `asks`), which the engine answers as any other; what the
model writes becomes items again (`output_item`, `output`), sent whole or as events (`rendering`).
"""
