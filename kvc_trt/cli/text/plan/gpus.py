"""Text of a plan on GPUs: memory, rows that fit, floors, requests per second, prefill and decode apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvc_trt.cli.text.printing import number, section
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

Plan = Mapping[str, Any]
SIDES = (("full", "full cache"), ("compressed", "this policy"))


def sections(plan: Plan) -> list[Callable[[Plan], str]]:
    """Return the functions that write this plan's sections; one returns an empty text if its section has no content."""
    kinds = (("tensor_parallel", _ranks), ("device_memory", _device), ("host_memory", _host))
    memory = [one for name, one in kinds if name in plan]
    asked = [one for name, one in (("mix", _mix), ("disaggregation", _disaggregation)) if name in plan]
    return [*memory, _gpus, _speed, _break_even, *asked]


def _device(plan: Plan) -> str:
    memory = plan["device_memory"]
    rows = [[line["kind"], readable_size(line["bytes"]), line["known"]] for line in memory["lines"]]
    rows.append(["together", readable_size(memory["total_bytes"]), ""])
    heading = f"GPU memory of a TensorRT engine with {memory['rows']} rows (allocated once, before the first prompt)"
    lines = [section(heading, ["for", "bytes", "known"], rows, [1])]
    lines += [_layers(cache) for cache in memory["caches"]]
    lines.append(f"one more row: {readable_size(memory['bytes_per_further_row'])}")
    return "\n".join([*lines, *map(_fits, memory["gpus"])])


def _host(plan: Plan) -> str:
    memory = plan["host_memory"]
    rows = [[line["kind"], readable_size(line["bytes"])] for line in memory["lines"]]
    rows.append(["together", readable_size(memory["total_bytes"])])
    heading = f"memory of the host with {memory['rows']} rows (a conversation keeps its row between turns)"
    row, prefix = (readable_size(memory[f"bytes_per_{name}"]) for name in ("further_row", "prefix"))
    more = f"one more row: {row}; one stored prefix of the longest prompt: {prefix}"
    return f"{section(heading, ['for', 'bytes'], rows, [1])}\n{more}"


def _layers(cache: Mapping[str, Any]) -> str:
    pages = f" and {number(cache['pages'])} pages of bounds" if cache["pages"] else ""
    each = f"{number(cache['slots'])} slots{pages}, {readable_size(cache['bytes_per_row'])} per layer and row"
    return f"layers {cache['first_layer']}-{cache['last_layer']}: {each}"


def _fits(gpu: Mapping[str, Any]) -> str:
    left, usable = gpu["fits_by_bytes"], f"{gpu['gpu']} (90% of its memory, {readable_size(gpu['usable_bytes'])})"
    if left >= 0:
        return f"{usable}: fits, {readable_size(left)} left"
    return f"{usable}: does not fit by {readable_size(-left)}; {'; or '.join(gpu['what_helps'])}"


def _gpus(plan: Plan) -> str:
    rows = [
        [
            gpu["name"],
            f"{gpu['bandwidth'] / 1e12:.4g}",
            f"{gpu['flops_16bit'] / 1e12:.4g}",
            readable_size(gpu["usable_bytes"]),
            readable_size(gpu["one_row_bytes"]),
            *(f"{gpu['largest_batch'][side]:,}" for side, _ in SIDES),
            "-" if gpu["first_token_floor_ms"] is None else _milliseconds(gpu["first_token_floor_ms"], 1),
        ]
        for gpu in plan["gpus"]
    ]
    headers = [
        "GPU", "TB/s", "TFLOPS", "usable", "with one row", "largest batch: full", "this policy", "first token, ms"
    ]  # fmt: skip
    many = f"each of {plan['ranks']} GPUs" if plan["ranks"] > 1 else "one GPU"
    prompt = number(plan["context"]["tokens"])
    heading = f"{many}: batches that fit 90% of its memory, and the floor of a prompt of {prompt} tokens (modelled)"
    return "\n".join([section(heading, headers, rows, range(1, 8)), *_too_small(plan)])


def _too_small(plan: Plan) -> Iterator[str]:
    """Yield a line for each GPU that does not hold the engine, with a configuration that does."""
    for gpu in plan["gpus"]:
        if not gpu["holds_the_engine"]:
            use = gpu["use"] or "take narrower --weights, a shorter --max-input-len, or more memory"
            weights, usable = readable_size(gpu["weight_bytes"]), readable_size(gpu["usable_bytes"])
            alone = f"weights alone are {weights}" if gpu["weight_bytes"] > gpu["usable_bytes"] else "not one row fits"
            yield f"{gpu['name']}: {alone}, and {usable} can be used: {'use ' if gpu['use'] else ''}{use}"


def _speed(plan: Plan) -> str:
    rows = [
        [
            entry["accelerator"],
            entry["batch"],
            *_side(entry["full"]),
            *_side(entry["compressed"]),
            f"{entry['ceiling_speedup']:.2f}x",
        ]
        for entry in plan["speed"]
    ]
    if not rows:
        return ""
    headers = ["GPU", "batch", "full: floor ms", "tokens/s", "this: floor ms", "tokens/s", "ceiling"]
    many = f" of {plan['ranks']} GPUs, without the sums between them" if plan["ranks"] > 1 else ""
    text = section(
        f"floor of a step{many} (modelled: bytes moved over published bandwidth)", headers, rows, range(1, 7)
    )
    missing = any(not entry[side]["fits"] for entry in plan["speed"] for side, _ in SIDES)
    return f"{text}\n-: does not fit; a ceiling beside it is over a dense step that would not fit" if missing else text


def _side(side: Mapping[str, Any]) -> tuple[str, str]:
    return (_milliseconds(side["floor_ms"], 2), f"{side['floor_tokens_per_s']:,.0f}") if side["fits"] else ("-", "-")


def _milliseconds(time: float, decimals: int) -> str:
    """Write a time with these decimals, or with two digits where they would be zeros alone."""
    return f"{time:,.{decimals}f}" if time >= 10**-decimals else f"{time:.2g}"


def _break_even(plan: Plan) -> str:
    entries = plan["break_even"]
    if not any(gpu["holds_the_engine"] for gpu in plan["gpus"]):
        return ""
    if not entries:
        return "break-even: this policy selects nothing while decoding, so it has no overhead over dense attention"
    overheads = sorted({entry["overhead_us_per_layer_assumed"] for entry in entries})
    rows: dict[tuple[str, int], list[object]] = {}
    for entry in entries:
        key = (entry["accelerator"], entry["batch"])
        rows.setdefault(key, [*key]).append(number(entry["context_tokens"]))
    headers = ["GPU", "batch", *(f"{overhead} us (assumed)" for overhead in overheads)]
    heading = "break-even context, tokens: below it dense is faster, for an assumed overhead per layer"
    return section(heading, headers, rows.values(), range(1, len(headers)))


def _ranks(plan: Plan) -> str:
    """Return the section on several GPUs: memory, the largest batch and the floor of a step of each."""
    found = plan["tensor_parallel"]
    full, compressed, rows = found["full"], found["compressed"], found["rows"]

    def line(name: str, *sizes: float) -> list[str]:
        return [name, *map(readable_size, sizes)]

    memory = [
        line("weights", found["weight_bytes"], found["weight_bytes"]),
        line("rotary tables", found["rotary_bytes"], found["rotary_bytes"]),
        line(f"caches of {rows} rows", rows * full["cache_bytes_per_row"], rows * compressed["cache_bytes_per_row"]),
        line(
            f"prefill of one prompt of {found['prompt_tokens']:,} tokens", full["prefill_bytes"],
            compressed["prefill_bytes"],
        ),
        line(f"or a step of {rows} rows", found["step_bytes"], found["step_bytes"]),
        line("together", full["total_bytes"], compressed["total_bytes"]),
    ]  # fmt: skip
    sums = f"{found['sums_per_step']} sums over the ranks, each of {readable_size(found['sum_bytes_per_row'])} per row"
    return "\n".join(
        [
            f"tensor parallel: {found['shares']}",
            "memory of each GPU (modelled)",
            text_table(["for", "full", "this policy"], memory, right=(1, 2)),
            f"a step also takes {sums}",
        ]
    )


def _disaggregation(plan: Plan) -> str:
    """Return the section on prefill and decode apart: bytes sent, and decode replicas that one of prefill feeds."""
    found = plan["disaggregation"]
    gigabytes = found["bandwidth"] / 1e9
    sent = [
        [
            title,
            readable_size(found[name]["bytes"]),
            f"{1e3 * found[name]['transfer_seconds']:,.2f} ms",
            f"{found[name]['handoffs_per_second']:,.1f}",
        ]
        for name, title in SIDES
    ]
    ratio = found["full"]["bytes"] / found["compressed"]["bytes"]
    replicas = [
        [
            replica["accelerator"],
            "-" if replica["prefill_seconds"] is None else f"{replica['prefill_seconds']:,.2f} s",
            title,
            *_decode_side(replica[name]),
        ]
        for replica in found["replicas"]
        for name, title in SIDES
    ]
    heading = f"prefill and decode apart: a prompt of {found['prompt_tokens']:,} tokens over {gigabytes:g} GB/s"
    titles = ["GPU", "prefill", "decode from", "rows", "seconds per answer", "replicas fed", "limited by"]
    return "\n".join(
        [
            f"{heading} ({ratio:.1f}x fewer bytes)",
            text_table(["sent per request", "bytes", "transfer", "requests/s"], sent, right=(1, 2, 3)),
            f"decode replicas that one prefill replica feeds, answers of {found['answer_tokens']:,} tokens (estimates)",
            text_table(titles, replicas, right=(1, 3, 4, 5)),
            *(f"- {assumption}" for assumption in found["assumptions"]),
        ]
    )


def _decode_side(side: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if side["rows"] == 0:
        return "0", "-", "-", "no row fits"
    fed = side["decode_replicas"]
    share = f"{fed:,.2f}" if fed >= 0.1 else f"1/{1 / fed:,.0f}"
    return str(side["rows"]), f"{side['answer_seconds']:,.2f}", share, side["limit"]


def _mix(plan: Plan) -> str:
    """Return the section on requests of several lengths."""
    found = plan["mix"]
    rows = [[entry["accelerator"], title, *_rates(entry[side])] for entry in found["gpus"] for side, title in SIDES]
    lengths = f"{found['mean_input_tokens']:,.0f} tokens in, {found['mean_output_tokens']:,.0f} out on average"
    heading = f"requests per second, predicted: {found['concurrency']:,} callers, {lengths}"
    headers = ["GPU", "", "requests/s", "tokens/s", "rows", "first token, s", "step, ms", "in prefill", "s per request"]
    notes = [f"- {assumption}" for assumption in found["assumptions"]]
    return "\n".join([section(heading, headers, rows, range(2, 9)), *notes])


def _rates(side: Mapping[str, Any] | None) -> list[str]:
    if side is None:
        return ["no row fits", *["-"] * 6]
    return [
        f"{side['requests_per_second']:,.3g}",
        f"{side['tokens_per_second']:,.0f}",
        f"{side['rows']:,}",
        f"{side['first_token_seconds']:,.3f}",
        f"{side['step_ms']:,.2f}",
        f"{side['share_of_time_in_prefill']:.0%}",
        f"{side['mean_seconds_per_request']:,.2f}",
    ]
