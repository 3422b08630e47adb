"""Tool calls in the text that a model writes, read character by character. Nothing here knows of servers or engines.

`json_text.py` follows one JSON value; `call_text.py`, `named_call.py` and `xml_call.py` follow one call, and
`reader.py` a whole answer: text, thoughts and calls, as `deltas.py` names them.
"""
