"""Sweeps of an engine's configuration with NVIDIA's Model Analyzer, against servers that it starts or one that runs.

    variants = make_variants({"max_batch_size": "8,64", "tokens_per_block": "16", …})
    report = run_analysis(AnalysisOptions(variants=variants, target=target), Path("analysis"))

Model Analyzer loads the model once for each variant, has perf_analyzer measure it, and writes its own report. Modules
for plots and tables are imported when they are needed. Knows nothing of the engine: a `Target` says where it is.
"""

from __future__ import annotations

from inflight_client.analyze.analysis import AnalysisOptions, run_analysis
from inflight_client.analyze.results import Analysis, Measurement, table
from inflight_client.analyze.target import RemoteTarget, Target
from inflight_client.analyze.variants import AXES, FIXED, make_variants, parse_levels

__all__ = [
    "AXES",
    "FIXED",
    "Analysis",
    "AnalysisOptions",
    "Measurement",
    "RemoteTarget",
    "Target",
    "make_variants",
    "parse_levels",
    "run_analysis",
    "table",
]
