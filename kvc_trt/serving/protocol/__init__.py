"""OpenAI's API: what a request may say, what becomes of each field, and the form of answers and errors.

Nothing here knows an HTTP library or a server. `fields.py` is the table of all fields, `request.py` reads a body by it,
`prompts.py` makes token ids of it, and `choices.py` and `documents.py` write answers, whole or in chunks.
"""
