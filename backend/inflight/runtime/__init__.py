"""One device: turns a SchedulerOutput into tensors, runs the network, picks tokens, brings them back.

    ModelRunner     launch and collect; owns everything below
    RowTable        what the host knows of each row
    StepInput       one step's numbers, on the device
    RowState        what only the device knows of each row: its last token, history and counts
    Sampler         logits to tokens
    KVCache         keys and values of all layers

Nothing here knows requests or decides what runs.
"""
