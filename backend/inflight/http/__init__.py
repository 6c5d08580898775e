"""The HTTP server of an engine's clients: a process of its own, attached to the ranks as a front.

`serve` starts it, `app` routes its paths to `dialects`, which read bodies and write answers; `guard` keeps keys and
limits. What a dialect's body asks for becomes a call (`call_builder`), which `call_runner` sends to the engine;
`choice` makes text of tokens, `respond` sends what a dialect's rendering makes of it. `page` shows the live batch.
Knows the executor's interface and nothing of how ranks compute, nor of tritonserver; and but for `app` and `serve`
nothing of any dialect.
"""
