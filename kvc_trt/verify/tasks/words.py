"""The words of keys, `adjective-noun`; both lists are disjoint, so that the role of a word is known from itself."""

from __future__ import annotations

from kvc_trt.verify.tasks.vocabulary import KEYS

_ADJECTIVES = """
    able agile alert amiable ample ancient awake basic bold brave brief bright broad busy calm careful
    cheerful chilly civil clean clear clever cosy crisp curious daring deep eager early earnest easy exact
    fair famous fancy fast fine firm fresh friendly gentle glad grand handy happy hardy honest humble
    idle jolly keen kind large lively local loud loyal lucky mellow merry mighty mild modest narrow
    neat nimble noble patient plain polite proud quick ready robust rustic sharp shiny silent smooth solid
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = KEYS
KEY_WORDS = len(ADJECTIVES) * len(NOUNS)
