"""How the server side reaches an engine, wherever its ranks run.

    Executor                           the interface: enqueue, await, cancel, stats
    InProcExecutor                     one rank on a thread of this process
    UniProcExecutor, MpiExecutor       ranks in processes of their own: one, or several under an MPI launcher
    FrontExecutor, ProcessExecutor     what those have in common: the journal; launching, watching and ending processes
    RankProcesses, EngineLink          one launch of the ranks, and the socket to their leader
    worker                             the program of a rank: GptManager, and on the leader an EngineServer
    EngineServer, RequestBook          the leader's socket, and its account of what every front asked for
    RankCallbacks                      GptManager's four callbacks on every rank

Front and leader exchange the messages of `messages`; the leader passes on what concerns all ranks by RankGroup.
"""
