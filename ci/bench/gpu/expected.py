"""Every figure of the bench: its prediction and its goal, before it is measured.

The goals are those of an 8B Llama on an H200, as shares of what the device can do, so that they hold on others: see
README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from ci.bench.gpu import predictions
from ci.bench.gpu.figure import Expected
from ci.bench.gpu.networks import LLAMA_8B, LLAMA_8B_FP8, QWEN3_06B, QWEN3_30B_A3B, Network
from ci.bench.gpu.predictions import ASSUMED, Model
from ci.bench.gpu.sizes import Sizes
from ci.bench.rates import Rates

GRAPHS = {True: "graphs", False: "no graphs"}
"""How figures name the two ways."""
STEP_SHARE, FP8_STEP_SHARE = 0.80, 0.70
"""E1, E2: of the floor that the bytes of a decode step set."""
OUTPUT_SHARE, FP8_OUTPUT_SHARE, EXPERTS_OUTPUT_SHARE, SMALL_OUTPUT_SHARE = 0.75, 0.71, 0.45, 0.61
"""E3, E4, E13, E6: of the rate of a batch without end; 8,900, 16,500, 9,000 and 24,000 tokens per second on an H200."""
PREFILL_SHARE = 0.70
"""E5: of the products alone; 36,000 tokens per second on an H200."""
PERCENT, MS, RATE = "%", "ms", "tokens/s"


def expectations(rates: Rates, gpu_bytes: float, sizes: Sizes) -> dict[str, Expected]:
    """By name."""
    found = [
        *_correctness(sizes),
        *_machine(),
        *_decode(Model(LLAMA_8B, rates), sizes, "E1", STEP_SHARE, (True, False)),
        *_host(sizes),
        *_requests(Model(LLAMA_8B, rates), gpu_bytes, sizes, "E3", OUTPUT_SHARE),
        *_prompts(Model(LLAMA_8B, rates), sizes),
        *_small(Model(QWEN3_06B, rates), sizes),
        *_peers(Model(LLAMA_8B, rates), gpu_bytes, sizes),
        *_decode(Model(LLAMA_8B_FP8, rates), sizes, "E2", FP8_STEP_SHARE, (True,)),
        *_requests(Model(LLAMA_8B_FP8, rates), gpu_bytes, sizes, "E4", FP8_OUTPUT_SHARE),
        *_drafts(Model(LLAMA_8B, rates), sizes),
        *_requests(Model(QWEN3_30B_A3B, rates), gpu_bytes, sizes, "E13", EXPERTS_OUTPUT_SHARE),
        Expected(name="shapes in the table of tuned kernels", unit="shapes"),
        Expected(name="length of the timeline plot", unit=MS, predicted=1e3 * sizes.timeline_seconds),
    ]
    return {each.name: each for each in found}


def _correctness(sizes: Sizes) -> Iterator[Expected]:
    for folder in ("kernels", "engine"):
        yield Expected(name=f"tests of {folder} that pass", unit="tests")
        yield Expected(name=f"tests of {folder} that fail", unit="tests", predicted=0, goal=0, is_exact=True)
    name = "cases of the kernels' bench that are wrong"
    yield Expected(name=name, unit="cases", predicted=0, goal=0, is_exact=True)
    num_requests, _ = sizes.compared
    for peer in ("without graphs", "of transformers"):
        name = f"requests whose tokens are those {peer}"
        yield _all_right(name, "requests", num_requests)


def _all_right(name: str, unit: str, number: int) -> Expected:
    return Expected(name=name, unit=unit, predicted=number, goal=number, is_least=True, is_exact=True)


def _machine() -> Iterator[Expected]:
    yield Expected(name="copy", unit="TB/s", predicted=ASSUMED.copy / 1e12)
    yield Expected(name="read", unit="TB/s", predicted=ASSUMED.read / 1e12)
    yield Expected(name="bf16 product", unit="TFLOP/s", predicted=ASSUMED.bf16 / 1e12)
    yield Expected(name="fp8 product", unit="TFLOP/s", predicted=ASSUMED.fp8 / 1e12)
    yield Expected(name="one kernel more in a graph", unit="us", predicted=ASSUMED.launch_us)
    yield Expected(name="replay of a graph of one kernel", unit="us", predicted=ASSUMED.replay_us)
    for network in (LLAMA_8B, QWEN3_06B):
        name = f"{network.name} until it is ready, kernels to compile"
        yield Expected(name=name, unit="s", predicted=predictions.COLD_SECONDS)


def _decode(
    model: Model, sizes: Sizes, goal_of: str, share: float | None, ways: tuple[bool, ...], batches: tuple[int, ...] = ()
) -> Iterator[Expected]:
    of = model.network.name
    for graphs in ways:
        way = GRAPHS[graphs]
        name = f"{of} until it is ready, {way}, kernels compiled"
        yield Expected(name=name, unit="s", predicted=predictions.WARM_SECONDS)
        for batch in batches or sizes.batches:
            step, at = model.step(batch, sizes.context, graphs=graphs), f"batch {batch}, {way}"
            goal = model.floor_us(batch, sizes.context) / share / 1e3 if graphs and share else None
            yield Expected(
                name=f"{of} decode step, {at}", unit=MS, goal_of=goal_of, predicted=step.wall_us / 1e3, goal=goal
            )
            yield Expected(name=f"{of} host time of a step, {at}", unit=MS, predicted=step.host_us / 1e3)
            yield Expected(name=f"{of} host time of a step, p99, {at}", unit=MS)
            yield _all_right(f"{of} rows with the right tokens, {at}", "rows", batch)
            if graphs:
                yield Expected(name=f"{of} GPU time of a step, {at}", unit=MS, predicted=step.gpu_us / 1e3)
                yield Expected(
                    name=f"{of} GPU waits for the host, {at}",
                    unit=PERCENT,
                    goal_of="E8",
                    predicted=100 * step.idle,
                    goal=_idle_goal(model.network, batch),
                )
            yield Expected(name=f"{of} kernels of a step, {at}", unit="kernels", predicted=model.decode_launches(batch))
            yield Expected(name=f"{of} time in kernels, a step, {at}", unit=MS, predicted=step.work_us / 1e3)
            yield Expected(
                name=f"{of} no kernel runs, {at}", unit=PERCENT, goal_of="E8", predicted=100 * step.without_kernel
            )


def _idle_goal(network: Network, batch: int) -> float | None:
    """E8, percent."""
    if network.name == QWEN3_06B.name:
        return 8.0
    return 2.0 if batch >= 32 else None


def _host(sizes: Sizes) -> Iterator[Expected]:
    for batch in sizes.batches:
        us = predictions.HOST_US + predictions.HOST_US_OF_ROW * batch
        is_judged = batch == max(sizes.batches)
        for share, goal in (("p50", 1.0), ("p99", 2.0)):
            yield Expected(
                name=f"host work of a step without a device, {share}, batch {batch}",
                unit=MS,
                goal_of="E9",
                predicted=us / 1e3 if share == "p50" else None,
                goal=goal if is_judged else None,
            )


def _requests(model: Model, gpu_bytes: float, sizes: Sizes, goal_of: str, share: float) -> Iterator[Expected]:
    prompt, output = sizes.throughput
    batch = model.fitting_batch(gpu_bytes, prompt + output, sizes.max_batch_size)
    yield Expected(
        name=f"{model.network.name} output, {prompt} in, {output} out",
        unit=RATE,
        goal_of=goal_of,
        predicted=model.output_rate(batch, prompt, output),
        goal=share * model.output_ceiling(prompt, output),
        is_least=True,
    )


def _prompts(model: Model, sizes: Sizes) -> Iterator[Expected]:
    of, goal = model.network.name, PREFILL_SHARE * model.prefill_ceiling()
    _, length = sizes.prefill
    yield Expected(
        name=f"{of} prompts of {length}",
        unit=RATE,
        goal_of="E5",
        predicted=1e6 * predictions.STEP_TOKENS / model.prefill_us(predictions.STEP_TOKENS),
        goal=goal,
        is_least=True,
    )
    yield Expected(
        name=f"{of} first token of a prompt of {sizes.first_token}",
        unit=MS,
        goal_of="E5",
        predicted=model.prefill_us(sizes.first_token) / 1e3,
        goal=1e3 * sizes.first_token / goal,
    )
    # The last block of the prompt is computed again.
    yield Expected(
        name=f"{of} first token of a cached prompt of {sizes.cached}",
        unit=MS,
        goal_of="E11",
        predicted=model.prefill_us(64) / 1e3,
        goal=2 * model.step(1, sizes.cached).wall_us / 1e3 + 10,
    )


def _small(model: Model, sizes: Sizes) -> Iterator[Expected]:
    number, least, most = sizes.mixed
    mean = (least + most) / 2
    yield Expected(
        name=f"{model.network.name} output, {number} requests, {least} to {most} in and out",
        unit=RATE,
        goal_of="E6",
        # The batch falls from all requests to none; most steps are as long as that of half of them.
        predicted=model.output_rate(max(number // 2, 1), mean, mean),
        goal=SMALL_OUTPUT_SHARE * model.output_ceiling(mean, mean),
        is_least=True,
    )
    yield from _decode(model, sizes, "", None, (True,), (sizes.timeline_batch,))


def _peers(model: Model, gpu_bytes: float, sizes: Sizes) -> Iterator[Expected]:
    number, prompt, output = sizes.peers
    ours = model.output_rate(number, prompt, output)
    at = f"{number} requests, {prompt} in, {output} out"
    yield Expected(name=f"8B output, {at}", unit=RATE, predicted=ours)
    for attention, reached in (("flash", predictions.FLASH_REACHED), ("sdpa", predictions.SDPA_REACHED)):
        theirs = model.output_rate(number, prompt, output, reached=reached)
        yield Expected(name=f"transformers with {attention} attention, {at}", unit=RATE, predicted=theirs)
        yield Expected(
            name=f"8B against transformers with {attention} attention",
            unit="times",
            goal_of="E7",
            predicted=ours / theirs,
            goal=3.0,
            is_least=True,
        )
    prompt, output = sizes.throughput
    batch = model.fitting_batch(gpu_bytes, prompt + output, sizes.max_batch_size)
    theirs = model.output_rate(batch, prompt, output, reached=predictions.VLLM_REACHED)
    yield Expected(name=f"vLLM 8B output, {prompt} in, {output} out", unit=RATE, predicted=theirs)


def _drafts(model: Model, sizes: Sizes) -> Iterator[Expected]:
    """A step that verifies drafts is launched one by one, as a prompt."""
    verified = predictions.DRAFTS + 1
    drafted_us = predictions.HOST_US + model.prefill_launches(verified) * predictions.LAUNCH_HOST_US
    ratio = verified * model.step(1, sizes.copied).wall_us / max(drafted_us, model.step(1, sizes.copied).gpu_us)
    for text, predicted, goal in (("copies its prompt", ratio, 1.5), ("is misled by its prompt", 1.0, 0.97)):
        yield Expected(
            name=f"8B output that {text}, with prompt lookup",
            unit="times",
            goal_of="E12",
            predicted=predicted,
            goal=goal,
            is_least=True,
        )
