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


@pytest.mark.parametrize(
    "source, kind",
    [
        ("{{ messages | map(attribute='content') }}", "generator"),
        ("{{ cycler(1) }}", "Cycler"),
        ("{{ raise_exception }}", "function"),
        ("{{ strftime_now }}", "builtin_function_or_method"),
        ("{{ cycler }}{{ namespace }}", "type"),
        ("{{ self }}", "TemplateReference"),
        ("{% macro f() %}{% endmacro %}{{ f }}", "Macro"),
        ("{% for x in [1] %}{{ loop }}{% endfor %}", "LoopContext"),
        ("{{ namespace(a=1) }}", "Namespace"),
        ("{{ 'a'.upper }}", "builtin_function_or_method"),
        ("{{ [1, (2, {'a': [1] | map('abs')})] }}", "generator"),
        ("{{ {'a'.upper: 1} }}", "builtin_function_or_method"),
        ("{% set x %}{{ [1] | map('abs') }}{% endset %}", "generator"),
        ("{{ [1] | map('abs') ~ 'x' }}", "generator"),
        ("{{ ('x' ~ cycler(1)) | length }}", "Cycler"),
        ("{% if 'x' ~ [cycler(1)] %}{% endif %}", "Cycler"),
        ("{% autoescape true %}{{ 'x' ~ cycler(1) }}{% endautoescape %}", "Cycler"),
        ("{% autoescape messages %}{{ 'x' ~ cycler(1) }}{% endautoescape %}", "Cycler"),
        ("{{ '%s' % cycler(1) }}", "Cycler"),
        ("{{ '%(a)s' % {'a': cycler(1)} }}", "Cycler"),
        ("{{ '%d %s' % (1, cycler(1)) }}", "Cycler"),
        ("{{ ('%r'.encode() % cycler(1)).decode() }}", "Cycler"),
        ("{{ cycler(1) | string | length }}", "Cycler"),
        ("{{ [[cycler(1)]] | map('string') | list }}", "Cycler"),
        ("{{ [cycler(1)] | join('-') }}", "Cycler"),
        ("{{ ['a', 'b'] | join(cycler(1)) }}", "Cycler"),
        ("{{ messages | join(',', attribute='keys') }}", "builtin_function_or_method"),
        ("{{ '%s' | format(cycler(1)) }}", "Cycler"),
        ("{{ '%(a)s' | format(a=cycler(1)) }}", "Cycler"),
        ("{{ '{}'.format(cycler(1)) }}", "Cycler"),
        ("{{ '{a[0]}'.format(a=[cycler(1)]) }}", "Cycler"),
        ("{{ '{a}'.format_map({'a': cycler(1)}) }}", "Cycler"),
        ("{% set f = '{}'.format %}{{ f(cycler(1)) }}", "Cycler"),
        ("{{ (''|safe).join([cycler(1)]) }}", "Cycler"),
        ("{{ ('a'|escape).replace('a', cycler(1)) }}", "Cycler"),
        ("{{ {'a': cycler(1)} | xmlattr }}", "Cycler"),
        ("{{ cycler(1) | tojson }}", "Cycler"),
        ("{{ raise_exception(cycler(1)) }}", "Cycler"),
        *(
            (f"{{{{ cycler(1) | {name} }}}}", "Cycler")
            for name in "pprint upper lower title capitalize trim escape e forceescape safe center indent wordwrap "
            "wordcount truncate striptags urlize urlencode string replace('a','b')".split()
        ),
    ],
)
def test_what_spells_its_address_is_refused_by_its_type(source, kind):
    with pytest.raises(RequestError, match=rf"\b{kind}\b") as caught:
        render(source, messages=[{"content": "a"}])
    assert caught.value.code == "template_error" and "0x" not in str(caught.value)


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ [1].index(cycler(1)) }}", "ValueError: "),  # Python's words for it differ between versions
        ("{{ {}[cycler(1)].x }}", "dict object has no element <jinja2.utils.Cycler object>"),
        ("{{ {}['a'.upper].x }}", "dict object has no element <built-in method upper of str object>"),
        ("{{ [1] | map(cycler(1)) | list }}", "No filter named <jinja2.utils.Cycler object>."),
        ("{{ [1] | select(cycler(1)) | list }}", "No test named <jinja2.utils.Cycler object>."),
        ("{{ raise_exception('<a at 0x7f00>') }}", "<a at 0x7f00>"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_errors_are_the_same_in_every_run(source, words):
    with pytest.raises(RequestError) as caught:
        render(source)
    said = str(caught.value)
    assert said.startswith(f"the chat template failed: {words}")
    assert (" at 0x" in said) is (" at 0x" in words)


@pytest.mark.parametrize(
    "source, expected",
    [
        (
            "{{ [1, 2.5, true, none, 'é', (1, 'b'), {'a': [missing]}] }}",
            "[1, 2.5, True, None, 'é', (1, 'b'), {'a': [Undefined]}]",
        ),
        ("{{ 1 ~ none ~ [true] ~ missing ~ 'a' }}", "1None[True]a"),
        ("{{ messages | map(attribute='content') | join('-') }}", "a-b"),
        ("{{ messages | join('-', attribute='content') }}", "a-b"),
        ("{{ ', '.join(messages | map(attribute='content')) }}", "a, b"),
        ("{{ (','|safe).join(['<', 'b'] | map('upper')) }}", "&lt;,B"),
        ("{{ messages[0].keys() | list }} {{ messages[0].items() | list }}", "['content'] [('content', 'a')]"),
        ("{{ [3, 1] | sort | first }} {{ range(3) | list }} {{ range(3) | join }}", "1 [0, 1, 2] 012"),
        ("{{ '%s-%02d' % ('a', 3) }} {{ 7 % 4 }} {{ '%s' | format([1]) }}", "a-03 3 [1]"),
        ("{{ '{} {a} {0.content}'.format(messages[0], a=none) }}", "{'content': 'a'} None a"),
        ("{{ 'a' | upper ~ ('b' | indent) ~ ('c' | replace('c', 'd')) ~ ({'x': 1} | xmlattr) }}", 'Abd x="1"'),
        ("{% autoescape true %}{{ '<' ~ ('<' | safe) }}{% endautoescape %}", "&lt;<"),
        ("{% for x in 'ab' %}{{ cycler('-', '+').next() }}{{ loop.index }}{{ x }}{% endfor %}", "-1a-2b"),
        ("{{ 10 ** 30 }}{{ 1 == 1.0 }}", "1000000000000000000000000000000True"),
    ],
)
def test_what_spells_itself_is_text(source, expected):
    assert render(source, messages=[{"content": "a"}, {"content": "b"}]) == expected
