"""JSON schemas, rewritten to what llguidance's compiler of JSON schemas takes and enforces exactly."""

from inflight.guides.schema.prepare import Prepared, prepare_schema

__all__ = ["Prepared", "prepare_schema"]
