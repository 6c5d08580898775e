"""One device: turns a SchedulerOutput into tensors, runs the network, picks tokens, brings them back.

    ModelRunner     forward, sample, collect; owns everything below
    RowTable        what the host knows of each row
    StepInput       one step in numbers, made by the host
    RowState        what the device knows of each row: its length, blocks, last token, history and counts
    BatchLayout     what the network takes, made of both on the device
    Sampler         logits to tokens
    KVCache         keys and values of all layers

Nothing here knows requests or decides what runs.
"""
