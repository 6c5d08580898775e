"""How an engine (its ranks and the model that they serve) is started and reached, wherever its ranks run.

executor.py             the Executor, and the choice of how ranks are started
generation_executor.py  the engine as a library: text or token ids in, results out
progress.py             its progress bars
in_process.py           front and rank in one process
front/                  in every process that sends requests: the Executor API, requests in flight, socket to the leader
launchers/              how ranks are started, watched and ended; one small file for each way
rank/                   in every rank: its program and its GptManager's callbacks; in the first rank, the leader
wire/                   the messages between those three, and the interfaces through which they know each other

front ══ Submit, Cancel ══> leader ── RankInput, broadcast ──> every rank's GptManager
front <══ Responses, Stats, Iterations, Heartbeat ══ leader
"""
