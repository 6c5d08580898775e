"""One device: turns a SchedulerOutput into tensors, runs the network, samples tokens, copies them to the host.

    ModelRunner     forward, sample, collect; owns everything below
    RowTable        the host's record of each row
    StepInput       the numbers that describe one step, made by the host
    RowState        the device's state of each row: its length, blocks, last token, history and counts
    BatchLayout     the network's inputs, made from StepInput and RowState on the device
    Sampler         logits to tokens
    StateStore         keys and values of all layers

Nothing here knows requests or decides what runs.
"""
