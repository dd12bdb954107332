"""Chat templates run as transformers runs them; their errors carry their own words."""

import datetime

import pytest

from coremill.config.errors import RequestError
from coremill.coordinator.text.templates import ChatTemplate

NOW = datetime.datetime(2026, 2, 3, 4, 5, 6)


def render(source, **variables):
    return ChatTemplate(source, NOW).render(variables)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ x | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[1,null],"b":"<é>"}'),
        ("{{ x | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": [\n  1,\n  null\n ]\n}'),
        ("{{ x | tojson(ensure_ascii=true) }}", '{"b": "<\\u00e9>", "a": [1, null]}'),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2026"),
        ("{% for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{% for i in [0, 1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set a = 1 %}{% generation %}{{ a }}{% set a = 2 %}{% endgeneration %}{{ a }}", "11"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{{ missing }}{{ x.missing }}{% if missing is not defined %}!{% endif %}", "!"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ x['b'].strip('<>') ~ x.b[::-1] }}", "é>é<"),
    ],
)
def test_helpers(source, expected):
    assert render(source, x={"b": "<é>", "a": [1, None]}) == expected


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("a\n{% if %}", r"Expected an expression.*\(line 2\)"),
        ("{{ 'a' + none }}", "TypeError: can only concatenate str"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% include 'x' %}", "no loader"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{{ [[1, 2]] | map('random') | list }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
    ],
)
def test_errors_have_the_templates_words(source, words):
    with pytest.raises(RequestError, match=words) as caught:
        render(source, messages=[])
    assert caught.value.code == "template_error" and caught.value.param == "messages"
    assert str(caught.value).startswith("the chat template failed: ")


def test_endless_recursion_is_an_error():
    with pytest.raises(RequestError, match="RecursionError"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
