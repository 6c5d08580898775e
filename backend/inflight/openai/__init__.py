"""An OpenAI server on a running engine: a process of its own, attached to the ranks as a front.

`serve` starts it, `app` routes its paths, `guard` keeps keys and limits. `fields` are the requests as clients write
them, `asks` turns them into what `asking` knows, `call_builder` has that prepared for the engine, `choice` makes text
of tokens, `stream` and `answer` make JSON of text. `responses` is OpenAI's other API of chats: items instead of
messages. `page` shows the live batch. Knows the executor's interface and nothing of how ranks compute, nor of
tritonserver.
"""
