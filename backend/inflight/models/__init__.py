"""Networks: what differs between architectures as data, one decoder that all of them share, how its weights are read.

    ModelConfig   a checkpoint's config.json, checked
    Family        what one architecture does its own way
    Checkpoint    safetensors files, sliced and checked
    Decoder       the network of one rank

Nothing here knows requests, sampling or how a step is put together.
"""
