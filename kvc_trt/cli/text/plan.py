"""Text of a plan, and of a comparison of policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvc_trt.cli.text.printing import ranges
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

Plan = Mapping[str, Any]
Caches = Sequence[Mapping[str, Any]]
"""The caches of one layer: `heads` and `slots` of each."""

COMPARED = ("policy", "stored per row", "beside K and V", "of dense", "Table 1", "read per step", "of dense", "Table 1")
MOST_KINDS, LAYERS_PER_LINE = 8, 8
SIDES = (("full", "full cache"), ("compressed", "this policy"))


def plan_text(plan: Plan) -> str:
    """Return the plan's sections, each a heading and an aligned table."""
    kinds = (("tensor_parallel", _ranks), ("device_memory", _device), ("host_memory", _host))
    device = [part for name, part in kinds if name in plan]
    apart = (_disaggregation,) if "disaggregation" in plan else ()
    sections = (
        _head,
        _choices,
        _cache,
        _conversation,
        _context,
        _traffic,
        *device,
        *apart,
        _speed,
        _break_even,
        _notes,
    )
    return "\n\n".join(section(plan) for section in sections)


def _head(plan: Plan) -> str:
    model, weights = plan["model"], plan["weights"]
    shape = f"{model['layers']} layers, {model['query_heads']}/{model['kv_heads']} heads of {model['head_size']}"
    return "\n".join(
        [
            f"{model['name']}: {model['architecture']}, {shape}, {weights['parameters'] / 1e9:.3g}B parameters",
            f"weights: {weights['format']}, {readable_size(weights['resident_bytes'])} resident, "
            f"{readable_size(weights['read_bytes_per_step'])} read per step",
        ]
    )


def _choices(plan: Plan) -> str:
    policy = plan["policy"]
    rows = [[choice["name"], _number(choice["value"]), choice["source"]] for choice in plan["choices"]]
    rows.append(["capacity", _number(policy["capacity"]), "derived: cache slots per compressed layer"])
    return _section(f"policy {policy['policy']} (split {policy['split']})", ["parameter", "value", "from"], rows, [1])


def _cache(plan: Plan) -> str:
    cache = plan["cache"]
    rows = [
        [batch["batch"], readable_size(batch["full_bytes"]), readable_size(batch["compressed_bytes"]), _ratio(batch)]
        for batch in cache["batches"]
    ]
    heading = f"cache (format {cache['format']}, allocated)"
    text = _section(heading, ["batch", "full", "compressed", "full/compressed"], rows, [0, 1, 2, 3])
    return "\n".join(line for line in (text, _parts(plan), _layer_kinds(cache["layers"]), _layer_budget(plan)) if line)


def _parts(plan: Plan) -> str:
    """Return the bytes of a compressed row by kind."""
    cache, positions = plan["cache"], plan["conversation"]["slot_positions_bytes_per_row"]
    coded = cache["format"] != AUTO
    parts = [
        ("codes" if coded else "keys and values", cache["keys_values_bytes_per_row"]),
        ("scales", cache["scales_bytes_per_row"]),
        ("bounds and other state", cache["page_bounds_bytes_per_row"] - positions),
        ("positions", positions),
    ]
    return "a compressed row: " + ", ".join(f"{name} {readable_size(size)}" for name, size in parts if size)


def _conversation(plan: Plan) -> str:
    found = plan["conversation"]
    if not found["takes_turns"]:
        return "conversation: an engine of this policy for this backend takes no turns"
    slots = readable_size(found["slot_positions_bytes_per_row"])
    return (
        f"conversation of {_number(found['positions'])} positions, turns to {_number(found['longest_turn'])} tokens: "
        f"{slots} of each row say where its slots are in the text"
    )


def _context(plan: Plan) -> str:
    context = plan["context"]
    if context["shared_by_default"]:
        shared = "prompts share them by themselves, and lose nothing"
    elif context["query_agnostic"]:
        shared = "shared on request; what is kept does not depend on the questions"
    else:
        shared = "shared on request; what is kept was chosen before the questions"
    size = readable_size(context["bytes"])
    return f"stored context or prefix of {_number(context['tokens'])} tokens: {size} ({shared})"


def _layer_kinds(layers: Sequence[Caches]) -> str:
    """Return one line per kind of layer, or a few layers per line if there are many kinds.

    Empty where all layers are alike and cache all their heads together.
    """
    kinds: dict[str, list[int]] = {}
    for number, caches in enumerate(layers):
        kinds.setdefault(_slots(caches), []).append(number)
    if len(kinds) == 1 and len(layers[0]) == 1:
        return ""
    if len(kinds) <= MOST_KINDS:
        return "\n".join(f"{_layer_names(numbers)}: {slots}" for slots, numbers in kinds.items())
    spans = range(0, len(layers), LAYERS_PER_LINE)
    return "\n".join(_span(start, layers[start : start + LAYERS_PER_LINE]) for start in spans)


def _layer_names(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def _slots(caches: Caches) -> str:
    if len(caches) == 1:
        return f"{caches[0]['slots']:,} slots"
    return "; ".join(f"{_heads(cache['heads'])} of {cache['slots']:,} slots" for cache in caches)


def _heads(count: int) -> str:
    return f"{count} KV head{'s' * (count > 1)}"


def _span(start: int, layers: Sequence[Caches]) -> str:
    each = ", ".join(" + ".join(f"{cache['slots']:,}" for cache in caches) for caches in layers)
    return f"{_layer_names(range(start, start + len(layers)))}: {each} slots"


def _layer_budget(plan: Plan) -> str:
    """Explain layer budgets that a plan cannot know yet."""
    policy = plan["policy"]
    if plan.get("layer_budget") == "squeeze" and policy["layer_budgets"] is None:
        return "layer budgets: measured on calibration prompts when the engine is built; alike here, as their mean is"
    if policy["squeeze_share"] is None:
        return ""
    return (
        f"layer budgets: set for each prompt, {_number(policy['prompt_budget'])} tokens of it on average; "
        f"every layer has room for {policy['squeeze_cap']:g} times that"
    )


def _ratio(batch: Mapping[str, Any]) -> str:
    return f"{batch['full_bytes'] / batch['compressed_bytes']:.2f}x"


def _traffic(plan: Plan) -> str:
    traffic, layers = plan["traffic"], plan["cache"]["layers"]
    full, full_bytes = traffic["full_pairs_per_layer"], traffic["full_bytes_per_row"]
    one = [{"heads": plan["model"]["kv_heads"], "slots": plan["policy"]["capacity"]}]
    name, pairs = "this policy", traffic["pairs_per_layer"]
    if any(caches != one for caches in layers):
        name, pairs = "this policy, on average", full * traffic["bytes_per_row"] / full_bytes
    rows = [
        ["full cache", _number(full), readable_size(full_bytes)],
        [name, f"{pairs:,.1f}", readable_size(traffic["bytes_per_row"])],
    ]
    headers = ["", "tokens read per layer", "bytes of cache per row"]
    return _section("one decode step of the longest row (a token is one key and one value)", headers, rows, [1, 2])


def _device(plan: Plan) -> str:
    memory = plan["device_memory"]
    rows = [[line["kind"], readable_size(line["bytes"]), line["known"]] for line in memory["lines"]]
    rows.append(["together", readable_size(memory["total_bytes"]), ""])
    heading = f"GPU memory of a TensorRT engine with {memory['rows']} rows (allocated once, before the first prompt)"
    lines = [_section(heading, ["for", "bytes", "known"], rows, [1])]
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
    return f"{_section(heading, ['for', 'bytes'], rows, [1])}\n{more}"


def _layers(cache: Mapping[str, Any]) -> str:
    pages = f" and {_number(cache['pages'])} pages of bounds" if cache["pages"] else ""
    each = f"{_number(cache['slots'])} slots{pages}, {readable_size(cache['bytes_per_row'])} per layer and row"
    return f"layers {cache['first_layer']}-{cache['last_layer']}: {each}"


def _fits(gpu: Mapping[str, Any]) -> str:
    left, usable = gpu["fits_by_bytes"], f"{gpu['gpu']} (90% of its memory, {readable_size(gpu['usable_bytes'])})"
    if left >= 0:
        return f"{usable}: fits, {readable_size(left)} left"
    return f"{usable}: does not fit by {readable_size(-left)}; {'; or '.join(gpu['what_helps'])}"


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
    headers = ["GPU", "batch", "full: floor ms", "tokens/s", "this: floor ms", "tokens/s", "ceiling"]
    text = _section("floor (modelled: bytes moved over published bandwidth)", headers, rows, range(1, 7))
    batches = ", ".join(
        f"{entry['accelerator']} {entry['full']} full, {entry['compressed']} compressed"
        for entry in plan["largest_batch"]
    )
    return f"{text}\n* does not fit 90% of the memory\nlargest batch that fits: {batches}"


def _side(side: Mapping[str, Any]) -> tuple[str, str]:
    return f"{side['floor_ms']:.2f}", f"{side['floor_tokens_per_s']:,.0f}{'' if side['fits'] else '*'}"


def _break_even(plan: Plan) -> str:
    entries = plan["break_even"]
    if not entries:
        return "break-even: this policy selects nothing while decoding, so it has no overhead over dense attention"
    overheads = sorted({entry["overhead_us_per_layer_assumed"] for entry in entries})
    rows: dict[tuple[str, int], list[object]] = {}
    for entry in entries:
        key = (entry["accelerator"], entry["batch"])
        rows.setdefault(key, [*key]).append(_number(entry["context_tokens"]))
    headers = ["GPU", "batch", *(f"{overhead} us (assumed)" for overhead in overheads)]
    heading = "break-even context, tokens: below it dense is faster, for an assumed overhead per layer"
    return _section(heading, headers, rows.values(), range(1, len(headers)))


def _notes(plan: Plan) -> str:
    return "\n".join(f"- {note}" for note in plan["assumptions"])


def _section(heading: str, headers: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int]) -> str:
    return f"{heading}\n{text_table(headers, rows, right=tuple(right))}"


def _number(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def compare_text(comparison: Mapping[str, Any]) -> str:
    """Return a heading, an aligned table, and the policies that the budget rules out."""
    full, usual = comparison["full_bytes_per_row"], comparison["kv_cache"]
    rows = [*comparison["policies"], *comparison["whole_caches"]]
    lengths = f"prompts to {comparison['max_input_len']:,}, answers to {comparison['max_output_len']:,} tokens"
    dense = f"dense {readable_size(full)} per row (kv-cache {usual})"
    heading = f"{comparison['model']}, token budget {comparison['token_budget']:,}: {lengths}; {dense}"
    fitting = [_cells(row, usual) for row in rows if "not_applicable" not in row]
    lines = [heading, text_table(COMPARED, fitting, right=range(1, len(COMPARED)))]
    lines += [f"{row['policy']}: not applicable: {row['not_applicable']}" for row in rows if "not_applicable" in row]
    lines += [
        "- stored: allocated for one row at full length; read: keys, values and scores of one step of the longest row",
        "- Table 1: RocketKV's formulas at c = sequence / token budget; it counts auxiliary data in keys, not in pairs",
        "- quest, exact-topk: one list per KV head is counted; query heads that choose apart may read more together",
    ]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], usual: str) -> list[str]:
    return [
        row["policy"] if row["kv_cache"] == usual else f"{row['policy']} in {row['kv_cache']}",
        readable_size(row["stored_bytes"]),
        readable_size(row["of_these_beside_keys_and_values"]),
        _share(row["stored_share"]),
        _share(row["stored_share_by_formula"]),
        readable_size(row["read_bytes_per_step"]),
        _share(row["read_share"]),
        _share(row["read_share_by_formula"]),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


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
    speed = [
        [entry["accelerator"], entry["batch"], f"{entry['full_floor_ms']:.2f}", f"{entry['compressed_floor_ms']:.2f}"]
        for entry in found["speed"]
    ]
    sums = f"{found['sums_per_step']} sums over the ranks, each of {readable_size(found['sum_bytes_per_row'])} per row"
    return "\n".join(
        [
            f"tensor parallel: {found['shares']}",
            "memory of each GPU (modelled)",
            text_table(["for", "full", "this policy"], memory, right=(1, 2)),
            *map(_fits_rank, found["gpus"]),
            "floor of one step on each GPU (modelled: its bytes over published bandwidth), ms",
            text_table(["GPU", "batch", "full", "this policy"], speed, right=(1, 2, 3)),
            f"a step also takes {sums}, which are not in the floor; all other tables are for one GPU",
        ]
    )


def _fits_rank(gpu: Mapping[str, Any]) -> str:
    left, batch = gpu["fits_by_bytes"], gpu["largest_batch"]
    fits = f"fits, {readable_size(left)} left" if left >= 0 else f"does not fit by {readable_size(-left)}"
    usable = f"{gpu['gpu']} (90% of its memory, {readable_size(gpu['usable_bytes'])})"
    return f"{usable}: {fits}; largest batch {batch['full']} full, {batch['compressed']} compressed"


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
        [replica["accelerator"], f"{replica['prefill_seconds']:,.2f} s", title, *_decode_side(replica[name])]
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
