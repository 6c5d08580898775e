"""What stands above tritonserver: finds it, gives it a repository and ports, starts it, watches it, ends it.

Used by the console command only. Imports nothing heavy and nothing from the engine's rooms, so that a wrong
installation can still be told apart in one sentence.
"""
