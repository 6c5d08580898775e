"""An OpenAI server on a running engine: a process of its own, attached to the ranks as a front.

`serve` starts it, `app` routes its paths, `guard` keeps keys and limits. `fields` are the requests as clients write
them, `requests` and `sampling` make engine requests of them, `choice` makes text of tokens, `frames` and `answers` make
JSON of text. Knows the executor's interface and nothing of how ranks compute, nor of tritonserver.
"""
