"""Loads one rank's part of a short convolution between gates. Ranks have equal shares of its channels."""

from __future__ import annotations

from inflight.layers.short_conv import ShortConv
from inflight.models.mixer_tensors import ShortConvTensors
from inflight.models.weights import WeightLoader


def load_short_conv(loader: WeightLoader, tensors: ShortConvTensors, prefix: str, hidden_size: int) -> ShortConv:
    """Raises ConfigurationError if the ranks cannot have equal shares, or for tensors of other shapes."""
    channels, conv = loader.even_section("hidden_size", hidden_size), f"{prefix}{tensors.conv.names[0]}"
    return ShortConv(
        inputs=loader.by_outputs(tensors.inputs, prefix, (channels,) * 3, hidden_size),
        conv_weight_CW=loader.stacked_rows(f"{conv}.weight", (channels,), (1, tensors.conv.size)),
        conv_bias_C=loader.stacked_rows(f"{conv}.bias", (channels,)) if tensors.conv.bias else None,
        output=loader.by_inputs(tensors.output, prefix, hidden_size, channels),
        dtype=loader.dtype,
    )
