"""What an engine's configuration, a checkpoint or a program switches on, for whatever requests: the last rows of the
table of features, with the test that proves each cell.

`ci/unit/house/test_pages.py` looks for these tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from request_kinds import WAYS

RANKS = "ci/L0_executor/test_kv_cache.py::test_the_tokens_are_those_of_an_engine_without_reuse"
SERVER = "ci/L0_llm/test_retention.py::test_tokens_are_the_same_with_retention_and_after_others"
CHUNKS = "ci/unit/runtime/test_cold_blocks.py::test_tokens_do_not_depend_on_what_was_reused"
HISTORIES = "ci/unit/batch_manager/test_cold_blocks.py::test_any_history_keeps_the_books_and_the_tokens"
TEXT = "ci/unit/executor/test_postprocessing.py::test_their_text_is_that_of_reading_threads"
SURVIVAL = "ci/L0_executor/test_survival.py::test_requests_of_all_kinds_go_on_when_ranks_die"
REPLICAS = "ci/L0_llm/test_replicas.py::test_two_replicas_give_the_tokens_of_one"
STAGES = "ci/L0_executor/test_stages.py::test_two_stages_of_two_ranks_give_the_tokens_of_one_rank"
CHUNKS_OF_STAGES = "ci/unit/distributed/test_pipeline.py::test_two_stages_give_the_same_tokens_as_transformers"
PAUSES_OF_STAGES = "ci/unit/distributed/test_pipeline.py::test_paused_sequences_go_on_in_all_stages"
SPARES = "ci/L0_executor/test_spares.py::test_a_spare_sleeps_without_a_kv_cache_until_it_takes_over"
WAY = "ci/unit/executor/test_requests_of_all_kinds.py::test_each_gives_way_to_more_important_ones"
BITS = "ci/unit/models/test_same_bits.py::test_so_they_have_in_torch_if_it_is_deterministic"
BITS_OF_8 = "ci/unit/models/test_same_bits.py::test_so_they_have_with_a_cache_of_8_bits"
HISTORIES_OF_8 = "ci/unit/runtime/test_cold_blocks.py::test_with_8_bits_no_bit_depends_on_it"
KINDS_OF_8 = "ci/unit/executor/test_requests_of_all_kinds.py::test_so_is_each_with_keys_and_values_of_8_bits"
RANKS_OF_8 = "ci/unit/distributed/test_tensor_parallel.py::test_ranks_store_their_heads_in_8_bits"
NETWORKS = "ci/unit/models/test_models.py"
NETWORKS_OF_RANKS = "ci/unit/distributed/test_tensor_parallel.py::test_two_ranks_give_the_same_tokens_as_transformers"
"""Of dense and quantised networks and of mixtures of experts. Prompts come in chunks, and one sequence pauses."""
BITS_OF_WHOLE_EXPERTS = (
    "ci/unit/distributed/test_tensor_parallel.py::test_with_whole_experts_bits_depend_on_no_neighbour"
)
BELOW_LIBRARY = "compared below the library"
NOT_BY_SERVER = "not tried: a stub is a front as the library is"
AS_RELAUNCHED = "as ranks that are launched again"
AS_OTHER_PAUSES = "as after any other pause"
APART = "ci/unit/batch_manager/test_contexts_apart.py"
NOT_OF_RANKS = "the ranks do not know of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFeature:
    feature: str
    """As that table calls it."""
    cells: dict[str, str]
    """Each of WAYS -> the test that proves it, FILE::FUNCTION, or why there is none."""
    kernels: tuple[str, ...] = ()
    """Functions of inflight_kernels that it runs on a GPU and a plain engine does not."""

    @property
    def proofs(self) -> dict[str, str]:
        """Those of the cells that are tests."""
        return {way: cell for way, cell in self.cells.items() if "::" in cell}


def _cells(*cells: str) -> dict[str, str]:
    return dict(zip(WAYS, cells, strict=True))


ENGINE_FEATURES = (
    EngineFeature(
        feature="reuse of parts of a block",
        cells=_cells(RANKS, SERVER, RANKS, CHUNKS, HISTORIES, RANKS),
        kernels=("copy_blocks",),
    ),
    EngineFeature(
        feature="cold blocks in host memory",
        cells=_cells(RANKS, SERVER, RANKS, CHUNKS, HISTORIES, RANKS),
    ),
    EngineFeature(
        feature="KV cache events",
        cells=_cells(RANKS, "no: clients may not see them", RANKS, HISTORIES, HISTORIES, RANKS),
    ),
    EngineFeature(
        feature="text made in processes of their own",
        cells=_cells(TEXT, "no: tritonserver's stub makes it", *[NOT_OF_RANKS] * 4),
    ),
    EngineFeature(
        feature="several replicas",
        cells=_cells(SURVIVAL, REPLICAS, *[NOT_OF_RANKS] * 4),
    ),
    EngineFeature(
        feature="pipeline stages",
        cells=_cells(SURVIVAL, NOT_BY_SERVER, STAGES, CHUNKS_OF_STAGES, PAUSES_OF_STAGES, "not tried"),
    ),
    EngineFeature(
        feature="spare ranks (`spare_ranks`)",
        cells=_cells(SPARES, NOT_BY_SERVER, SPARES, *[AS_RELAUNCHED] * 3),
    ),
    EngineFeature(
        feature="pauses for more important requests (`priority_preemption`)",
        cells=_cells(WAY, NOT_BY_SERVER, "not tried", AS_OTHER_PAUSES, WAY, AS_OTHER_PAUSES),
    ),
    EngineFeature(
        feature="the same bits in torch (`deterministic`)",
        cells=_cells(BELOW_LIBRARY, NOT_BY_SERVER, "not tried", BITS, BITS, BITS),
    ),
    EngineFeature(
        feature="KV cache in fp8 or int8 (`kv_cache_dtype`)",
        cells=_cells(KINDS_OF_8, NOT_BY_SERVER, RANKS_OF_8, BITS_OF_8, BITS_OF_8, HISTORIES_OF_8),
    ),
    EngineFeature(
        feature="mixtures of experts",
        cells=_cells(
            BELOW_LIBRARY,
            NOT_BY_SERVER,
            NETWORKS_OF_RANKS,
            f"{NETWORKS}::test_in_chunks",
            f"{NETWORKS}::test_after_a_pause",
            f"{NETWORKS}::test_with_a_shared_prefix",
        ),
        kernels=("route_experts", "fused_moe", "sigmoid_mul"),
    ),
    EngineFeature(
        feature="whole experts on ranks (`moe_expert_parallel_size`)",
        cells=_cells(
            BELOW_LIBRARY,
            NOT_BY_SERVER,
            NETWORKS_OF_RANKS,
            BITS_OF_WHOLE_EXPERTS,
            NETWORKS_OF_RANKS,
            "not tried",
        ),
        kernels=("route_experts", "fused_moe", "sigmoid_mul"),
    ),
    EngineFeature(
        feature="weights of 4 bits (AWQ)",
        cells=_cells(BELOW_LIBRARY, NOT_BY_SERVER, *[NETWORKS_OF_RANKS] * 3, "not tried"),
        kernels=("int4_linear",),
    ),
    EngineFeature(
        feature="weights in fp8",
        cells=_cells(BELOW_LIBRARY, NOT_BY_SERVER, *[NETWORKS_OF_RANKS] * 3, "not tried"),
        kernels=("quantize_per_token", "scaled_linear", "block_scaled_linear"),
    ),
    EngineFeature(
        feature="contexts and generation apart",
        cells=_cells(
            "ci/unit/executor/test_contexts_apart.py::test_each_kind_gives_what_one_engine_gives",
            "ci/L0_llm/test_contexts_apart.py::test_clients_notice_nothing",
            "ci/L0_executor/test_contexts_apart.py::test_tokens_are_those_of_one_rank",
            f"{APART}::test_the_tokens_are_those_of_one_scheduler",
            f"{APART}::test_a_pause_computes_again_what_had_arrived",
            f"{APART}::test_what_is_cached_is_not_copied_and_the_rest_is_cached_for_others",
        ),
    ),
)
