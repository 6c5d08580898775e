"""How an engine is reached, wherever its ranks run.

executor.py    the Executor API, and the one choice of how ranks are started
in_process.py  front and rank in one process
front/         in whoever asks: the account of requests in flight, the link to the leader, the engine as a library
launchers/     how ranks are started, watched and ended; one small file a way
rank/          in every rank: its program, its GptManager's callbacks; in the first rank, the leader
wire/          what those three say to each other, and all that they know of each other

front ══ Submit, Cancel ══> leader ── RankInput, broadcast ──> every rank's GptManager
front <══ Responses, Stats, Heartbeat ══ leader
"""
