"""The parser of requests: what it takes, and that every refusal names its field."""

import contextlib
import datetime
import json
import time
from fractions import Fraction

import numpy as np
import pytest

from coremill.config.errors import RequestError
from coremill.config.joboptions import check_job_options
from coremill.config.request import (
    MAX_JSON_PARTS,
    SamplingParams,
    check_sampling,
    parse_body,
    parse_line,
    parse_row,
    row_seed,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def refusal(line, number=1):
    with pytest.raises(RequestError) as caught:
        parse_line(line if isinstance(line, (str, bytes)) else json.dumps(line), number)
    return caught.value


def test_batch_line():
    body = {
        "model": "default", "messages": HELLO, "max_completion_tokens": 5, "temperature": 0, "top_p": 0.5,
        "top_k": 3, "min_p": 0.1, "seed": -7, "stop": ["x", "\n"], "user": "u", "metadata": {"k": "v"},
    }  # fmt: skip
    request = parse_line(json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}), 1)
    assert (request.custom_id, request.kind, request.model, request.user) == ("a", "chat", "default", "u")
    assert request.metadata == {"k": "v"}
    assert request.sampling == SamplingParams(5, 0.0, 0.5, 3, 0.1, -7, ("x", "\n"))


def test_bare_objects():
    assert parse_line('{"prompt": "x"}', 9).custom_id == "line-9"
    assert parse_line('{"prompt": [1, 2]}', 9).prompt == (1, 2)
    assert parse_line('{"prompt": "x", "custom_id": null, "max_tokens": null}', 9).kind == "completion"
    chat = parse_line(json.dumps({"messages": HELLO, "custom_id": "c", "stop": "end"}), 9)
    assert (chat.kind, chat.custom_id, chat.sampling.stop) == ("chat", "c", ("end",))


def test_control_tokens_only_on_request():
    assert not parse_line('{"prompt": "x"}', 1).allow_special
    assert parse_line('{"prompt": "x", "allow_special": true}', 1).allow_special


def test_defaults_fill_what_the_row_leaves_out():
    defaults = SamplingParams(max_tokens=7, temperature=0.5, stop=("z",))
    request = parse_line('{"prompt": "x", "temperature": 0}', 1, defaults)
    assert request.sampling == SamplingParams(max_tokens=7, temperature=0.0, stop=("z",))


def test_developer_is_system_and_text_parts_are_joined():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": "ok", "tool_calls": [], "refusal": None},
    ]
    parsed = parse_body(CHAT, {"messages": messages}).messages
    assert parsed == ({"role": "system", "content": "be kind"}, {"role": "assistant", "content": "ok"})


@pytest.mark.parametrize(
    "field",
    [
        {"n": 1}, {"stream": False}, {"frequency_penalty": 0}, {"presence_penalty": 0.0}, {"logprobs": False},
        {"response_format": {"type": "text"}}, {"logit_bias": {}}, {"tools": []}, {"tool_choice": "none"},
        {"store": False}, {"n": None}, {"reasoning_effort": None},
    ],
)  # fmt: skip
def test_fields_that_mean_the_default_are_taken(field):
    assert parse_body(CHAT, {"messages": HELLO, **field}).sampling == SamplingParams()


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2}, {"n": True}, {"stream": True}, {"frequency_penalty": 0.1}, {"logprobs": True}, {"logprobs": 0},
        {"response_format": {"type": "json_object"}}, {"logit_bias": {"5": 1}}, {"tools": [{}]},
        {"reasoning_effort": "low"}, {"tool_choice": "required"}, {"stream_options": {}},
    ],
)  # fmt: skip
def test_fields_not_supported_are_refused_by_name(field):
    name = next(iter(field))
    with pytest.raises(RequestError, match=f"'{name}'") as caught:
        parse_body(CHAT, {"messages": HELLO, **field})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize("name", ["best_of", "echo", "suffix"])
def test_fields_of_completions(name):
    no_op = {"best_of": 1, "echo": False, "suffix": None}[name]
    parse_body(COMPLETIONS, {"prompt": "x", name: no_op})
    with pytest.raises(RequestError, match=name):
        parse_body(COMPLETIONS, {"prompt": "x", name: "other"})
    with pytest.raises(RequestError, match=name):
        parse_body(CHAT, {"messages": HELLO, name: "other"})


def test_unknown_fields_are_refused_with_the_nearest_name():
    error = refusal({"prompt": "x", "temprature": 1})
    assert (error.code, error.param) == ("unknown_parameter", "temprature")
    assert "did you mean 'temperature'" in error.message
    assert refusal({"prompt": "x", "max_completion_tokens": 3}).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.0, "5", True, 2**31, 10**400, [1]]),
        ("temperature", [-0.1, 2.1, "1", True, []]),
        ("top_p", [-0.1, 1.1, False, {}]),
        ("top_k", [-1, 1.5, 2**31, True]),
        ("min_p", [-1, 1.01, "0"]),
        ("seed", [2**63, -(2**63) - 1, 1.0, "1", True]),
        ("stop", ["", [""], ["a"] * 5, 3, [1], {"a": 1}, "x" * 1025, "\ud800"]),
        ("user", [1, ["a"], "\udfff"]),
        ("metadata", [[], "x", {"k": 1}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "" for i in range(17)}]),
        ("model", [1, [], "\ud800"]),
        ("allow_special", [1, "true", []]),
    ],
)
def test_wrong_types_and_ranges_name_field_and_limit(field, values):
    for value in values:
        error = refusal(json.dumps({"prompt": "x", field: value}))
        assert error.code == "invalid_value", value
        assert field in error.message and error.param.startswith(field), value


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "invalid_value"), ([1, -1], "invalid_value"), ([1, "a"], "invalid_value"), ([True], "invalid_value"),
        ([1.0], "invalid_value"), (["a"], "unsupported_parameter"), ([[1]], "unsupported_parameter"),
        (3, "invalid_value"), ({}, "invalid_value"), ("\ud83d", "invalid_value"), ([2**31], "invalid_value"),
    ],
)  # fmt: skip
def test_bad_prompts(prompt, code):
    error = refusal({"prompt": prompt})
    assert error.code == code and error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ([], "invalid_value", "messages"),
        ("hi", "invalid_value", "messages"),
        (["hi"], "invalid_value", "messages.0"),
        ([{"content": "x"}], "missing_required_parameter", "messages.0.role"),
        ([{"role": "user"}], "missing_required_parameter", "messages.0.content"),
        ([{"role": "user", "content": None}], "missing_required_parameter", "messages.0.content"),
        ([{"role": "king", "content": "x"}], "invalid_value", "messages.0.role"),
        ([{"role": ["user"], "content": "x"}], "invalid_value", "messages.0.role"),
        ([{"role": "tool", "content": "x"}], "unsupported_parameter", "messages.0.role"),
        ([{"role": "user", "content": "x", "name": "bob"}], "unsupported_parameter", "messages.0.name"),
        ([{"role": "user", "content": 5}], "invalid_value", "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "invalid_value", "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_parameter", "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_value", "messages.0.content.0.text"),
        ([{"role": "user", "content": "\ud800"}], "invalid_value", "messages.0.content"),
    ],
)
def test_bad_messages_name_the_path(messages, code, param):
    error = refusal({"messages": messages})
    assert (error.code, error.param) == (code, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{", "invalid_json"),
        ("{'a': 1}", "invalid_json"),
        ('{"prompt": "x"} trailing', "invalid_json"),
        ('{"prompt": "x", "temperature": NaN}', "invalid_json"),
        ('{"prompt": "x", "temperature": -Infinity}', "invalid_json"),
        ('{"prompt": "x", "prompt": "y"}', "invalid_json"),
        ('{"messages": [{"role": "user", "role": "user", "content": ""}]}', "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        ("[1]", "invalid_value"),
        ('"text"', "invalid_value"),
        ("{}", "missing_required_parameter"),
        ('{"prompt": "x", "messages": []}', "invalid_value"),
        ('{"prompt": "x", "custom_id": 5}', "invalid_value"),
        ('{"prompt": "x", "custom_id": ""}', "invalid_value"),
        (json.dumps({"prompt": "x", "custom_id": "i" * 1025}), "invalid_value"),
    ],
)
def test_lines_that_are_no_requests(line, code):
    assert refusal(line).code == code


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"url": "/v1/embeddings"}, "unknown_url", "url"),
        ({"url": 7}, "unknown_url", "url"),
        ({"url": None}, "missing_required_parameter", "url"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"method": ["POST"]}, "invalid_method", "method"),
        ({"method": None}, "missing_required_parameter", "method"),
        ({"body": None}, "missing_required_parameter", "body"),
        ({"body": "x"}, "invalid_value", "body"),
        ({"body": {}}, "missing_required_parameter", "messages"),
        ({"body": {"prompt": "x"}}, "unknown_parameter", "prompt"),
        ({"extra": 1}, "unknown_parameter", "extra"),
    ],
)
def test_bad_batch_lines(change, code, param):
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": HELLO}, **change}
    error = refusal(line)
    assert (error.code, error.param) == (code, param)


def test_numbers_too_large_for_a_float():
    for number in ("1e999", "-1e999", "9" * 400):
        assert refusal(f'{{"prompt": "x", "temperature": {number}}}').param == "temperature"
    error = refusal('{"prompt": "x", "temperature": 1e400}')
    assert str(error).startswith("'temperature' is a number too large for a float: it must be a number from 0 to 2")
    assert "is a negative number too large" in str(refusal('{"prompt": "x", "max_tokens": -1e400}'))


def test_numbers_of_more_digits_than_python_reads():
    error = refusal('{"prompt": "x", "seed": ' + "9" * 5000 + "}")
    assert error.code == "invalid_json"
    assert str(error) == "the line has a number of more than 4300 digits: it is too large"


class Hostile:
    """A program's own object."""

    def __index__(self):
        raise ZeroDivisionError

    __eq__ = __bool__ = __repr__ = __index__
    __hash__ = object.__hash__


class HostileNumber(float):
    def __le__(self, other):
        raise ZeroDivisionError

    __ge__ = __le__


VALUES = [
    Hostile(),
    HostileNumber(1.5),
    np.array([1, 2]),
    np.array([]),
    Fraction(10**5000),
    10**5000,
    object(),
    {1: 2},
    [{1: 2}],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_that_only_programs_have(value):
    body = {"messages": HELLO}
    for name in (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "model", "user", "metadata", "n",
        "stream", "logit_bias", "tools", "tool_choice", "response_format", "allow_special", "messages", "nobodys",
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            parse_body(CHAT, body | {name: value})
        assert (caught.value.param or "").startswith(name)
    for where in ("role", "content", "name"):
        with pytest.raises(RequestError) as caught:
            parse_body(CHAT, {"messages": [{**HELLO[0], where: value}]})
        assert caught.value.param.startswith(f"messages.0.{where}")
    for part in (value, {"type": value, "text": "a"}, {"type": "text", "text": value}):
        with pytest.raises(RequestError, match=r"messages\.0\.content\.0"):
            parse_body(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    for name in ("url", "method", "body", "custom_id"):
        with pytest.raises(RequestError):
            parse_row({"url": CHAT, "method": "POST", "body": body, name: value}, 1)
    for name in ("priority", "retries", "timeout", "deadline"):
        with pytest.raises(RequestError) as caught:
            check_job_options({name: value})
        assert (caught.value.code, caught.value.param) == ("invalid_value", name)


def test_keys_that_only_programs_have():
    for key in (1, None, ("a",), Hostile()):
        for row, param in (
            ({"prompt": "x", key: 1}, "row"),
            ({"url": CHAT, "method": "POST", "body": {"messages": HELLO, key: 1}}, "body"),
            ({"messages": [{key: "x", **HELLO[0]}]}, "messages.0"),
            (
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", key: 1}]}]},
                "messages.0.content.0",
            ),
        ):
            with pytest.raises(RequestError, match="it must be a string") as caught:
                parse_row(row, 1)
            assert (caught.value.code, caught.value.param) == ("invalid_value", param)
    for moment in (datetime.datetime.min, datetime.datetime.max):
        with contextlib.suppress(RequestError):
            check_job_options({"deadline": moment})


def test_both_token_limits_must_agree():
    assert check_sampling({"max_tokens": 3, "max_completion_tokens": 3}).max_tokens == 3
    with pytest.raises(RequestError, match=r"3.*4"):
        check_sampling({"max_tokens": 3, "max_completion_tokens": 4})


def test_messages_stay_short_whatever_the_value():
    for value in ("x" * 10**6, [0] * 10**5, 10**4000, {"k": "v" * 10**6}):
        assert len(refusal({"prompt": "x", "temperature": value}).message) < 400


def test_row_seeds_are_uint64_and_distinct():
    seeds = {row_seed(run, f"row-{i}", None) for run in (0, 1, -1) for i in range(1000)}
    assert len(seeds) == 3000 and all(0 <= seed < 2**64 for seed in seeds)
    assert row_seed(0, "a", -1) == 2**64 - 1 and row_seed(5, "a", 3) == 3


def test_messages_say_what_to_do():
    for body, words in [
        ({"logprobs": 5}, "'logprobs' is 5: coremill takes it only as false; leave it out"),
        ({"logit_bias": {"1": 2}}, "coremill takes it only as {}"),
        ({"audio": {"x": 1}}, "coremill has it not"),
    ]:
        with pytest.raises(RequestError) as caught:
            parse_body("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **body})
        assert words in caught.value.message
    with pytest.raises(RequestError, match="at character 2 of the line"):
        parse_line("{bad json", 1)
    with pytest.raises(RequestError, match='write "7" with quotes'):
        parse_line('{"custom_id": 7, "prompt": "x"}', 1)


@pytest.mark.parametrize("part", [b"[],", b"{},", b"7,", b'"",', b'"\\"",', b'[{"a":', b'"[' * 2])
def test_lines_of_too_many_values_are_not_parsed(part, monkeypatch):
    line = b'{"prompt":[' + part * (4 * MAX_JSON_PARTS // len(part)) + b"1]}"
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(RequestError, match="more than 2097152 JSON values") as caught:
        parse_line(line, 1)
    assert caught.value.code == "line_too_long"


def test_long_lines_of_few_values_are_parsed():
    text = "a, [b], {c} \\" * MAX_JSON_PARTS
    assert parse_line(json.dumps({"prompt": text}).encode(), 1).prompt == text
    ids = list(range(MAX_JSON_PARTS // 2))
    assert parse_line(json.dumps({"prompt": ids}).encode(), 1).prompt == tuple(ids)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "k" * 10**6: 1},
        {"url": "/v1/completions", "method": "POST", "body": {"prompt": "x"}, "k" * 10**6: 1},
        {"messages": [{"role": "user", "content": "x", "k" * 10**6: 1}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "k" * 10**6: 1}]}]},
        {"prompt": "x", "metadata": {"k" * 10**6: "v"}},
        {"prompt": "x", "k" * 10**6: "k" * 10**6},
    ],
)
def test_errors_quote_little_of_a_row(row):
    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        parse_row(row, 1)
    assert len(caught.value.message) < 1000 and len(caught.value.param) < 300
    assert time.monotonic() - started < 10
