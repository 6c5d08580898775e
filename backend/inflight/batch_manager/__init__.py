"""The worker loop of every rank: which sequences run in the next step, with which KV blocks, and what is answered.

    GptManager       the loop and its four callbacks
    Scheduler        decides a step, and what its outcome means for each sequence
    WaitingQueue     sequences without a row, in the order in which they start
    KVCacheManager   blocks of one sequence: allocate, share, free
    BlockPool        blocks of all sequences: reference counts, the table of cached prefixes
    ActiveRequest    a request and its sequences
    Sequence         one continuation that is being made

Nothing here knows torch, text, sockets or ranks; equal input makes equal decisions, so that every rank decides alone.
"""
