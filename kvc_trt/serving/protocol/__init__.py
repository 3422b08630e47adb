"""OpenAI's API: the fields of requests with the effect of each, and the form of answers and errors.

Nothing here depends on an HTTP library or a server. `fields.py` is the table of all fields, `request.py` reads a body
by it, `prompts.py` turns prompts into token ids, and `choices.py` and `documents.py` write answers, whole or in chunks.
"""
