"""The halves of a step where it is computed: from a StepInput to hidden states and logits, and on to sampled tokens.

On a GPU everything here only launches. A decode step replays CUDA graphs, if those of its key were recorded; all others
launch each kernel. Either way the same functions say what is launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inflight.distributed.parallel_groups import ParallelGroups
from inflight.log_progress import LogProgress
from inflight.models.network import LayeredNetwork, Network
from inflight.output_config import Pooling
from inflight.request_limits import RequestLimits
from inflight.runtime.adapters.adapter_store import AdapterStore
from inflight.runtime.batch_layout import lay_out
from inflight.runtime.decode_graphs import Graph, GraphSet, NetworkKey, SamplingKey
from inflight.runtime.draft_model import DraftModel, place_drafts
from inflight.runtime.guided.token_mask import StepMask, TokenMask
from inflight.runtime.host_units import HostUnits
from inflight.runtime.logits_post_processing import LogitsPostProcessing, ProcessedLogits, ProcessedRow
from inflight.runtime.prompt_blocks import PromptBlocks
from inflight.runtime.result_copies import ResultCopies
from inflight.runtime.row_state import RowState
from inflight.runtime.row_table import RowTable
from inflight.runtime.sampler import SampledTokens, Sampler, find_allowed
from inflight.runtime.sampling_input import SamplingInput, SamplingNeeds, find_sampling, plain_needs
from inflight.runtime.staging import InputBuffer
from inflight.runtime.state_store import StateStore
from inflight.runtime.step_handle import Forwarded, Logits, StepResult
from inflight.runtime.step_input import StepInput, padding_step
from inflight.runtime.step_sizes import StepSizes
from inflight.runtime.step_tensors import NO_PLAN, StepTensors, of_prompts, of_samples
from inflight.scheduler_output import HIDDEN_STATES, layer_output

logger = logging.getLogger(__name__)

SAMPLING_VARIANTS = ((False, False), (True, False), (True, True))
"""What graphs sample: greedily, at random, at random with filters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What the network makes of a step."""

    hidden: dict[str, Tensor]
    """(T, D) by name: the last hidden states, and those of layers that are asked for."""
    sampling_tokens_S: Tensor | None
    """This and the following as in BatchLayout."""
    rows_S: Tensor
    lengths_S: Tensor


class StepComputation:
    def __init__(
        self,
        *,
        decoder: Network,
        draft_network: Network | None,
        store: StateStore,
        block_size: int,
        table: RowTable,
        limits: RequestLimits,
        sizes: StepSizes,
        input_bytes: int,
        post_processing: LogitsPostProcessing,
        groups: ParallelGroups,
        device: torch.device,
        host_blocks: HostUnits | None,
        host_states: HostUnits | None,
        prompt_blocks: PromptBlocks | None,
        adapters: AdapterStore | None,
        busy_wait_events: bool,
        scores_of: Pooling | None = None,
    ) -> None:
        """`draft_network`: its states stand behind those of `decoder` in `store`; None = no draft model.
        `input_bytes`: for the arrays of a step. `busy_wait_events`: see EngineConfig. `scores_of`: see LoadedEngine."""
        self.decoder = decoder
        self.state = RowState(table, limits.max_seq_len, limits.vocab_size, device, is_reserved=sizes.pads)
        self.input = InputBuffer(input_bytes, device, packs=sizes.pads)
        self.results = ResultCopies(table.num_rows, device, busy_wait_events=busy_wait_events)
        self._sizes = sizes
        self._store = store
        self._states = store.states[: len(decoder.state_specs)]
        self._block_size = block_size
        self._sampler = Sampler()
        self.draft_model: DraftModel | None = None
        if draft_network is not None:
            self.draft_model = DraftModel(
                draft_network,
                store.states[len(decoder.state_specs) :],
                block_size=block_size,
                state=self.state,
                sampler=self._sampler,
                input_buffer=InputBuffer(input_bytes, device, packs=sizes.pads),
                filler_block=store.filler_block if any(store.windows) else None,
            )
        self._post_processing = post_processing
        self._groups = groups
        self._device = device
        self._host_blocks = host_blocks
        self._host_states = host_states
        self._prompt_blocks = prompt_blocks
        self._adapters = adapters
        self._scores_of = scores_of
        self._has_sequences = store.num_slots > 0 or (bool(limits.pooled) and not limits.is_causal)
        self._has_adapters = limits.num_adapter_slots > 0
        """Also where a step's memory is measured, before there are adapters to fill the slots with."""
        self._networks: GraphSet[NetworkKey, Computed] = GraphSet()
        self._samplings: GraphSet[SamplingKey, SampledTokens] = GraphSet()

    @torch.inference_mode()
    def record_graphs(self, make_graph: Callable[[], Graph]) -> int:
        """Record the graphs of decode steps of all sizes, on rows of padding alone. Returns how many they are."""
        progress = LogProgress(logger, "sizes of decode steps are recorded", len(self._sizes.num_rows))
        for number, num_rows in enumerate(reversed(self._sizes.num_rows)):
            progress.note(number)
            for has_adapters in (False, True) if self._has_adapters else (False,):
                network = NetworkKey(num_rows=num_rows, has_adapters=has_adapters)
                step = padding_step(num_rows, self.state.padding_row, has_adapters=has_adapters)
                arrays = self.input.load(step.arrays)
                self._networks.record(network, make_graph(), partial(self._compute, step, arrays))
                for is_random, is_filtered in SAMPLING_VARIANTS:
                    for log_probs in (False, True):
                        key = SamplingKey(
                            network=network, is_random=is_random, is_filtered=is_filtered, log_probs=log_probs
                        )
                        self._samplings.record(key, make_graph(), partial(self._sample_all, key))
        return len(self._networks) + len(self._samplings)

    def drop_graphs(self) -> None:
        """Give them up. NCCL waits for the end of all graphs that hold its launches before it lets go of a group."""
        self._samplings.clear()
        self._networks.clear()

    # -- the first half ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, step: StepInput, is_processed: bool) -> Forwarded:
        """`is_processed`: masks or functions of the host decide what may be sampled."""
        arrays = self.input.load(step.arrays)
        self._change(step, arrays)
        if not step.num_tokens:
            return Forwarded(logits=None, prompt_tensors=[])
        drafts: Tensor | None = None
        if step.draft_passes is not None:
            assert self.draft_model is not None, "drafts of a draft model that is not there were not refused"
            drafts = self.draft_model.draft(step.draft_passes, arrays)
            if drafts is not None:
                place_drafts(arrays, drafts)
        if self.draft_model is not None:
            self.draft_model.carry_states(arrays)
        self.state.note_drafts(arrays)
        key = _network_key(step) if self._networks else None
        computed = self._compute(step, arrays) if key is None else self._networks.replay(key)
        if step.exports:
            assert self._prompt_blocks is not None, "what is not served was not refused"
            self._prompt_blocks.export(step.exports)
        if not self._groups.samples:
            return Forwarded(logits=None, prompt_tensors=[])
        of_prompt = of_prompts(
            step.tensor_plan,
            arrays,
            computed.hidden,
            self.decoder.logits,
            self.results.in_order,
            self._scores_of,
        )
        if step.needs is None:
            return Forwarded(logits=None, prompt_tensors=of_prompt)
        sampling = find_sampling(step.needs, arrays, computed.rows_S, computed.lengths_S, step.ngram_extent)
        if key is not None and step.tensor_plan is NO_PLAN and sampling.is_plain and not is_processed:
            return Forwarded(logits=None, prompt_tensors=[], drafts=drafts, graph_key=_sampling_key(key, step.needs))
        hidden = computed.hidden
        if computed.sampling_tokens_S is not None:
            hidden = {name: states_TD.index_select(0, computed.sampling_tokens_S) for name, states_TD in hidden.items()}
        logits_SV = self.decoder.logits(hidden[HIDDEN_STATES])
        logits = Logits(step=step, arrays=arrays, logits_SV=logits_SV, hidden=hidden, sampling=sampling)
        return Forwarded(logits=logits, prompt_tensors=of_prompt, drafts=drafts)

    def _change(self, step: StepInput, arrays: dict[str, Tensor]) -> None:
        """Apply what the step changes of blocks, adapters and rows before it computes."""
        self._store.scrub(step.scrubbed_block_ids)
        if self._host_blocks is not None:
            self._host_blocks.offload(step.offloads)
            self._host_blocks.onboard(step.onboards)
        if self._host_states is not None:
            self._host_states.offload(step.state_offloads)
            self._host_states.onboard(step.state_onboards)
        if "copied_from" in arrays:
            self._store.copy_blocks(arrays["copied_from"], arrays["copied_to"])
        if "states_from" in arrays:
            self._store.copy_slots(arrays["states_from"], arrays["states_to"])
        if step.arrivals:
            assert self._prompt_blocks is not None, "what is not served was not refused"
            self._prompt_blocks.place(step.arrivals)
        self._store.scrub(step.scrubbed_copies)
        for slot, adapter in step.adapter_loads:
            assert self._adapters is not None, "a slot that is not served was not refused"
            self._adapters.fill(slot, adapter)
        self.state.begin(step.new_sequences, arrays)

    def _compute(self, step: StepInput, arrays: dict[str, Tensor]) -> Computed:
        """Run the network. Recorded for steps of decodes."""
        layout = lay_out(step, arrays, self.state, self._block_size, has_sequences=self._has_sequences)
        inputs = (layout.token_ids_T, self._states, layout.metadata)
        wanted = step.tensor_plan.layers
        if wanted:
            assert isinstance(self.decoder, LayeredNetwork), "a layer that is not offered was not refused"
            hidden_TD, of_layers = self.decoder.forward_layers(*inputs, wanted)
        else:
            hidden_TD, of_layers = self.decoder.forward(*inputs), {}
        return Computed(
            hidden={HIDDEN_STATES: hidden_TD, **{layer_output(number): found for number, found in of_layers.items()}},
            sampling_tokens_S=layout.sampling_tokens_S,
            rows_S=layout.rows_S,
            lengths_S=layout.lengths_S,
        )

    # -- the second half -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(
        self, forwarded: Future[Forwarded], mask: StepMask | None, processed_rows: list[ProcessedRow]
    ) -> StepResult:
        first_half = forwarded.result()
        self.results.release()
        sampled: SampledTokens | None = None
        of_sample: dict[str, Tensor] = {}
        if first_half.graph_key is not None:
            sampled = self._samplings.replay(first_half.graph_key)
        elif first_half.logits is not None:
            sampled, of_sample = self._sample_logits(first_half.logits, mask, processed_rows)
        tensors = StepTensors(prompts=first_half.prompt_tensors, samples=of_sample)
        return self.results.start(StepResult(sampled=sampled, tensors=tensors, drafts=first_half.drafts))

    def _sample_logits(
        self, logits: Logits, mask: StepMask | None, processed_rows: list[ProcessedRow]
    ) -> tuple[SampledTokens, dict[str, Tensor]]:
        """Sampled tokens, and what rows want besides."""
        step, sampling = logits.step, logits.sampling
        of_sample = of_samples(
            step.tensor_plan,
            logits.arrays,
            logits.logits_SV,
            logits.hidden,
            lambda: find_allowed(logits.logits_SV, sampling, self.state.history),
        )
        token_mask = None if mask is None else mask.to(self._device)
        processed = self._post_processing.apply(processed_rows, logits.logits_SV) if processed_rows else None
        return self._choose(logits.logits_SV, sampling, token_mask, processed), of_sample

    def _sample_all(self, key: SamplingKey) -> SampledTokens:
        """Sample for every row of a decode step whose network is recorded. Recorded."""
        computed = self._networks.result(key.network)
        needs = plain_needs(is_random=key.is_random, is_filtered=key.is_filtered, log_probs=key.log_probs)
        sampling = find_sampling(needs, {}, computed.rows_S, computed.lengths_S)
        return self._choose(self.decoder.logits(computed.hidden[HIDDEN_STATES]), sampling)

    def _choose(
        self,
        logits_SV: Tensor,
        sampling: SamplingInput,
        mask: TokenMask | None = None,
        processed: ProcessedLogits | None = None,
    ) -> SampledTokens:
        memory = self.results.memory(len(logits_SV))
        sampled = self._sampler(logits_SV, sampling, self.state, mask, processed, self.state.last_token_R, memory)
        self.state.end(sampling, sampled.token_ids_S)
        return sampled


def _network_key(step: StepInput) -> NetworkKey | None:
    """Of a step of decodes alone, in which every row samples; None = another one, which no graph computes."""
    others = {"sampled_tokens", "given_places", "kept_states", "sequence_starts"} & step.arrays.keys()
    if step.num_prefills or others or step.tensor_plan.layers:
        return None
    return NetworkKey(num_rows=step.num_decodes, has_adapters="adapters" in step.arrays)


def _sampling_key(network: NetworkKey, needs: SamplingNeeds) -> SamplingKey:
    is_filtered = needs.any_top_k or needs.any_top_p or needs.any_min_p
    return SamplingKey(network=network, is_random=needs.is_random, is_filtered=is_filtered, log_probs=needs.log_probs)
