"""Networks: a native decoder, whose architectures differ as data, and transformers' modelling code for all others.

    Network              what both offer to the runtime
    Checkpoint           safetensors files, sliced and checked
    ModelConfig          a checkpoint's config.json, checked, for the native decoder
    Family               what one architecture does its own way
    Decoder              the native network of one rank
    TransformersConfig   a checkpoint's config.json for the other way
    TransformersDecoder  a network of transformers with our attention

Nothing here knows requests, sampling or how a step is put together.
"""
