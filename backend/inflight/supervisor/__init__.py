"""The supervisor of tritonserver: finds it, gives it a model repository and ports, starts it, watches it, ends it.

Used by the console command only. Imports nothing heavy and nothing from the engine's folders, so that it can still
report a wrong installation in one sentence.
"""
