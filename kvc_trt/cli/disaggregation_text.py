"""Text of what a plan says of prefill and decode on different machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

SIDES = (("full", "full cache"), ("compressed", "this policy"))


def disaggregation_text(found: Mapping[str, Any]) -> str:
    """Return the section: what travels, and how many decode replicas one prefill replica feeds."""
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
        [replica["accelerator"], f"{replica['prefill_seconds']:,.2f} s", title, *_side(replica[name])]
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


def _side(side: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if side["rows"] == 0:
        return "0", "-", "-", "no row fits"
    fed = side["decode_replicas"]
    share = f"{fed:,.2f}" if fed >= 0.1 else f"1/{1 / fed:,.0f}"
    return str(side["rows"]), f"{side['answer_seconds']:,.2f}", share, side["limit"]
