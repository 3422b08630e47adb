"""Asks a model over one gRPC stream; run by the Python of Triton's environment, which has the client library.

Reads a JSON object from standard input: `url`, `model`, `requests` (each an `id`, `fields`, and a `timeout` in
microseconds or null), and when all that is left is cancelled: `leave_after` that number of responses (null: never), and
with the last response to one of the ids in `leave_with`. Prints a JSON list of what came, in that order.
"""

from __future__ import annotations

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as grpc

TYPES = {bool: ("BOOL", bool), int: ("INT32", np.int32), float: ("FP32", np.float32), str: ("BYTES", np.object_)}


def tensor(name, value):
    """Every tensor is [1, n], as the OpenAI frontend sends them."""
    values = value if isinstance(value, list) else [value]
    kind, dtype = TYPES[type(values[0])]
    made = grpc.InferInput(name, [1, len(values)], "UINT64" if name == "seed" else kind)
    made.set_data_from_numpy(np.array([values], np.uint64 if name == "seed" else dtype))
    return made


def read(result):
    """Return the fields of one response."""
    response = result.get_response()
    outputs = {one.name: result.as_numpy(one.name) for one in response.outputs}
    text = outputs.get("text_output")
    return {
        "id": response.id,
        "final": response.parameters["triton_final_response"].bool_param,
        "text": text.item().decode() if text is not None else "",
        "dimensions": text.ndim if text is not None else None,
        "ids": outputs.get("output_ids", np.empty(0, int)).reshape(-1).tolist(),
    }


def main():
    asked = json.load(sys.stdin)
    came: queue.Queue = queue.Queue()
    client = grpc.InferenceServerClient(asked["url"])
    client.start_stream(lambda result, error: came.put((result, error)))
    for one in asked["requests"]:
        inputs = [tensor(name, value) for name, value in one["fields"].items()]
        rules = {"request_id": one["id"], "timeout": one["timeout"], "enable_empty_final_response": True}
        client.async_stream_infer(asked["model"], inputs, **rules)
    printed, open_requests, leaves = [], len(asked["requests"]), False
    while open_requests and not leaves:
        result, error = came.get(timeout=240)
        one = {"id": None, "error": str(error), "final": True} if error is not None else read(result)
        printed.append(one)
        open_requests -= one["final"]
        leaves = len(printed) == asked["leave_after"] or (one["final"] and one["id"] in asked["leave_with"])
    client.stop_stream(cancel_requests=leaves)
    client.close()
    json.dump(printed, sys.stdout)


if __name__ == "__main__":
    main()
