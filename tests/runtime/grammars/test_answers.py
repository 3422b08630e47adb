"""Answers under grammars: whatever a model without sense says, alone and in batches, with drafts, in turns."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime import Grammar, Request, Sampling, Session, Speculation
from kvc_trt.runtime.session import drafting
from tests.runtime.fake_drafts import FakeDraftExecutor
from tests.runtime.fake_executor import FakeExecutor, FakePacking, FakeTurnExecutor
from tests.runtime.grammars.byte_tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = TOKENIZER.get_vocab_size() + 3
"""A model has logits for more tokens than its tokenizer has."""
LONGEST = 120
ENDING = {TOKENIZER.token_to_id(text): 3.0 for text in ('"', "}", "]", '"}', ",")} | {END: 3.0}
"""Biases under which strings, lists and objects end soon."""
ROW = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"]}
ROW |= {"additionalProperties": False}
GRAMMARS = (
    Grammar.json_schema(ROW),
    Grammar.json_object(),
    Grammar.regex("[a-c]{2,5}( [0-9]+)?"),
    Grammar.choice(["yes", "yesterday", "no"]),
    Grammar.lark('start: "<" WORD ">" %json {"type": "boolean"}\nWORD: /[a-z]{1,3}/'),
)


def session(rows=1, executor=FakeExecutor, speculation=None, **options):
    options = {"vocab_size": VOCABULARY, "max_output_len": LONGEST, **options}
    made = executor(**options)
    packing = FakePacking(made) if issubclass(executor, FakeTurnExecutor) else None
    return Session(made, TOKENIZER, rows, end_token_ids=(END,), packing=packing, speculation=speculation)


def asked(grammar, prompt=(5, 6), **rules):
    return Request(list(prompt), **{"logit_bias": ENDING, "grammar": grammar, **rules})


def matches(grammar, text):
    """Return True if the text of an answer obeys its grammar, by code other than the library's."""
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text) is not None
    if grammar.kind == "choice":
        return text in grammar.choices()
    if grammar.kind == "lark":
        return re.fullmatch("<[a-z]{1,3}>(true|false)", text) is not None
    found = json.loads(text)
    if grammar.kind == "json_object":
        return isinstance(found, dict)
    jsonschema.validate(found, json.loads(grammar.text))
    return True


PLAIN = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["null", "boolean"]},
    {"const": [1, {"ä": None}]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    {"type": "string", "format": "date"},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
    {"type": "integer", "multipleOf": 7},
)
COUNTS = st.tuples(st.integers(0, 3), st.integers(0, 3))


def between(start, names, counts, **more):
    least, further = counts
    return {"type": start, names[0]: least, names[1]: least + further, **more}


def bounded(one):
    """Schemas whose answers are short."""
    return st.one_of(
        st.sampled_from(PLAIN),
        st.tuples(st.integers(-300, 300), st.integers(0, 2000)).map(
            lambda counts: between("integer", ("minimum", "maximum"), counts)
        ),
        COUNTS.map(lambda counts: between("string", ("minLength", "maxLength"), counts)),
        st.lists(st.one_of(st.text(max_size=4), st.integers(-(2**53), 2**53), st.none()), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
        st.lists(one, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        st.builds(lambda part, counts: between("array", ("minItems", "maxItems"), counts, items=part), one, COUNTS),
        st.lists(st.tuples(st.text(min_size=1, max_size=4), one, st.booleans()), max_size=3).map(object_of),
    )


def object_of(parts):
    properties = {name: part for name, part, _ in parts}
    required = sorted({name for name, _, needed in parts if needed})
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(st.just({"type": "boolean"}), bounded, max_leaves=6)


@given(SCHEMAS, st.lists(st.integers(1, 200), min_size=1, max_size=8), st.sampled_from([0.0, 1.0, 5.0]))
@settings(max_examples=60, deadline=None)
def test_every_finished_answer_validates(schema, prompt, temperature):
    sampling = Sampling(temperature=temperature, seed=1)
    [output] = session().generate([asked(Grammar.json_schema(schema), prompt, sampling=sampling)])
    assert output.finish_reason in ("stop", "length")
    if output.finish_reason == "stop":
        jsonschema.validate(json.loads(output.text), schema)


def test_most_answers_of_the_property_test_are_finished():
    """Or it would hold of nothing."""
    one = Grammar.json_schema({"type": "array", "items": ROW, "minItems": 1, "maxItems": 2})
    outputs = session(4).generate([asked(one, [n], sampling=Sampling(temperature=1.0, seed=n)) for n in range(20)])
    finished = [output for output in outputs if output.finish_reason == "stop"]
    assert len(finished) > 10
    assert all(matches(one, output.text) for output in finished)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda one: one.kind)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_each_kind_of_grammar_is_kept(grammar, temperature):
    requests = [
        asked(grammar, [n, 9], sampling=Sampling(temperature=temperature, seed=n, repetition_penalty=1.2))
        for n in range(1, 9)
    ]
    outputs = session(3).generate(requests)
    assert all(matches(grammar, output.text) for output in outputs if output.finish_reason == "stop")
    assert sum(output.finish_reason == "stop" for output in outputs) >= 4
    assert outputs == [session().generate([request])[0] for request in requests], "a row depends on the rows beside it"


def test_an_answer_ends_where_nothing_can_follow():
    [output] = session().generate([asked(Grammar.regex("abc"), logit_bias=None)])
    assert (output.text, output.finish_reason) == ("abc", "stop")
    assert TOKENIZER.decode(list(output.token_ids)) == "abc", "no end token is needed"


@pytest.mark.parametrize("rules", [{"ignore_eos": True}, {"min_tokens": 9}, {"stop_token_ids": (7,)}])
def test_a_complete_answer_ends_under_any_other_rules(rules):
    [output] = session().generate([asked(Grammar.regex("abc"), logit_bias=None, **rules)])
    assert (output.text, output.finish_reason) == ("abc", "stop")


def test_an_end_token_comes_only_where_the_grammar_may_end():
    wished = {END: 100.0}
    [output] = session().generate([asked(Grammar.regex("[ab]{3,}"), logit_bias=wished)])
    assert re.fullmatch("[ab]{3}", output.text)
    assert (output.token_ids[-1], output.finish_reason) == (END, "stop")
    [longer] = session().generate([asked(Grammar.regex("[ab]{3,}"), logit_bias=wished, min_tokens=6)])
    assert re.fullmatch("[ab]{6}", longer.text)
    assert longer.finish_reason == "stop"


def test_a_stop_token_of_the_request_ends_it_as_an_end_token_does():
    stop = TOKENIZER.token_to_id("a")
    [output] = session().generate([asked(Grammar.regex("[ab]{3,}"), logit_bias={stop: 100.0}, stop_token_ids=(stop,))])
    assert (output.text, output.finish_reason) == ("bbb", "stop")


def test_a_cut_answer_ends_with_length():
    [output] = session().generate([asked(Grammar.json_schema(ROW), max_new_tokens=4)])
    assert output.finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(output.text)


def test_bans_that_leave_no_allowed_token_fail_their_row_alone():
    made = session(2)
    first, second = made.add(
        [asked(Grammar.regex("a+b"), banned_token_ids=[[TOKENIZER.token_to_id("a")]]), asked(None)]
    )
    events, failed = made.sample_each()
    assert [event.row for event in events] == [second]
    assert isinstance(failed[first], InputError)
    assert "bans leave no token that the grammar allows" in str(failed[first])


def test_logprobs_are_the_models_own():
    rules = {"logprobs": 2, "max_new_tokens": 3, "logit_bias": None}
    grammar = Grammar.choice(["yes", "no"])
    [free] = session().generate([asked(None, **rules)])
    [kept] = session().generate([asked(grammar, **rules)])
    assert kept.logprobs[0].top == free.logprobs[0].top
    assert kept.logprobs[0].logprob < kept.logprobs[0].top[0][1]


@pytest.mark.parametrize("bias", [{7: 100.0}, {7: 100}, {np.int64(7): np.float32(100)}])
def test_a_bias_is_added_to_the_logits(bias):
    rules = {"logit_bias": bias, "max_new_tokens": 3}
    assert session().generate([asked(None, **rules)])[0].token_ids == (7, 7, 7)
    drawn = asked(None, **rules, sampling=Sampling(temperature=1.0, seed=3))
    assert session().generate([drawn])[0].token_ids == (7, 7, 7)
    [least] = session().generate([asked(None, logit_bias={token: -100.0 for token in range(VOCABULARY) if token != 9})])
    assert set(least.token_ids) == {9}


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({VOCABULARY: 1.0}, "logit_bias has token .* expected ids from 0 to"),
        ({3: 101.0}, "logit_bias of token 3 must be from -100 to 100"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(bias, message):
    with pytest.raises(InputError, match=message):
        session().check(asked(None, logit_bias=bias))


def test_a_grammar_that_cannot_be_compiled_is_refused_before_it_joins():
    made = session()
    with pytest.raises(InputError, match=r"^prompt: the regular expression cannot be compiled: .*look-around"):
        made.check(asked(Grammar.regex("(?=a)b")))
    with pytest.raises(InputError, match="look-around"):
        made.add([asked(Grammar.regex("(?=a)b"))])
    assert made.rows == ()


def test_a_grammar_without_a_tokenizer_is_refused():
    made = Session(FakeExecutor(vocab_size=VOCABULARY), None, 1)
    with pytest.raises(InputError, match="a grammar needs a tokenizer, and this engine has none"):
        made.check(asked(GRAMMARS[0]))


@given(
    st.lists(
        st.tuples(st.sampled_from(GRAMMARS), st.lists(st.integers(0, 30), min_size=2, max_size=9)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 4),
    st.lists(st.integers(0, 60)),
)
@settings(max_examples=40, deadline=None)
def test_drafts_change_no_answer(rows, temperature, period, breaks):
    requests = [
        asked(grammar, prompt, max_new_tokens=40, sampling=Sampling(temperature=temperature, seed=seed))
        for seed, (grammar, prompt) in enumerate(rows)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "Payoff", Always)
        options = {"executor": FakeDraftExecutor, "period": period, "breaks": breaks}
        with_drafts = session(2, speculation=Speculation(), **options)
        assert with_drafts.generate(requests) == session(2, **options).generate(requests)


class Always:
    """Drafts are always worth it."""

    def affords(self):
        return True

    def pays(self, rows, expected):
        return True

    def accepted(self, rows, tokens):
        pass

    spent = stepped = passed = accepted


def test_drafts_are_made_of_what_the_grammar_allows():
    """A list of equal items repeats itself: many tokens of its drafts hold."""
    grammar = Grammar.regex("(abcdefgh){8}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "Payoff", Always)
        made = session(executor=FakeDraftExecutor, speculation=Speculation(), breaks=range(LONGEST))
        [output] = made.generate([asked(grammar, logit_bias=None)])
    assert output.text == "abcdefgh" * 8
    assert made.timings.accepted_tokens > 20


def test_each_answer_of_a_conversation_begins_the_grammar_anew():
    made = session(executor=FakeTurnExecutor)
    (row,) = made.add([asked(Grammar.choice(["yes", "no"]), stay=True)])
    texts = [answer(made)]
    made.turn(row, [5, 6, 7])
    texts.append(answer(made))
    made.constrain(row, Grammar.regex("[0-9]{3}"))
    made.turn(row, [5, 6, 8])
    texts.append(answer(made))
    made.constrain(row, None)
    made.turn(row, [5, 6, 9], 4)
    answer(made)
    assert texts[0] in ("yes", "no")
    assert texts[1] in ("yes", "no")
    assert re.fullmatch("[0-9]{3}", texts[2])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_that_a_grammar_names_ends_the_answer(ignore_eos):
    grammar = Grammar.lark('start: "yes" <|end|>')
    tokenizer = byte_tokenizer("<|end|>")
    made = Session(FakeExecutor(vocab_size=VOCABULARY), tokenizer, 1, end_token_ids=(END,))
    [output] = made.generate([asked(grammar, ignore_eos=ignore_eos)])
    assert output.text == "yes"
    assert output.token_ids[-1] == END
    assert output.finish_reason == "stop"


def test_a_row_that_is_being_answered_keeps_its_grammar():
    made = session(executor=FakeTurnExecutor)
    (row,) = made.add([asked(Grammar.regex("[0-9]{6}"), stay=True)])
    for _ in range(3):
        with pytest.raises(InputError, match="row 0 is being answered") as caught:
            made.constrain(row, Grammar.choice(["yes"]))
        assert "once its answer has ended" in caught.value.hint
        made.step()
    assert re.fullmatch("[0-9]{6}", answer(made))
    with pytest.raises(InputError, match="cannot be compiled"):
        made.constrain(row, Grammar.regex("("))
    made.turn(row, [5, 6, 7])
    assert re.fullmatch("[0-9]{6}", answer(made))


def answer(made):
    while True:
        for event in made.sample():
            if event.output is not None:
                return event.output.text
        made.advance()


def test_an_answer_from_a_context_begins_the_grammar_anew():
    made = session(executor=FakeTurnExecutor)
    (row,) = made.add([asked(Grammar.regex("[a-z]{20}"), keep_logits=True)])
    for _ in range(4):
        made.step()
    context = made.take(row)
    made.remove(row)
    request = replace(asked(Grammar.choice(["yes", "no"])), context=context, prompt_token_ids=())
    assert made.generate([request])[0].text in ("yes", "no")
