"""What a chat template may turn into text: only what spells the same in every process.

A generator, a method, a helper that was not called spells itself with its address in memory, so a prompt would differ
from run to run. Jinja turns values into text in five places, and all of them look here first: `{{ }}`, the `~`
operator, `%`, filters, and methods of strings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Number
from typing import Any

from jinja2 import TemplateRuntimeError, Undefined, nodes, pass_context, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Filters that make no text of what they get. `tojson` does, but refuses other types by itself.
_TEXTLESS_FILTERS = frozenset(
    "abs attr batch count d default dictsort first float groupby int items last length list map max min reject "
    "rejectattr reverse round select selectattr slice sort sum tojson unique".split()
)


def check_printable(value: Any) -> None:
    """TemplateRuntimeError that names the type, unless value is text, a number, a boolean, none, undefined, or a list,
    tuple or dictionary of such."""
    if value is None or isinstance(value, (str, Number, Undefined)):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            check_printable(key)
            check_printable(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_printable(item)
    else:
        raise TemplateRuntimeError(
            f"a value of type '{type(value).__name__}' has no text: it must be text, a number, a boolean, none, "
            "a list, a tuple or a dictionary"
        )


@pass_context  # so that nothing becomes text while the template is compiled
def _finalize(context: Context, value: Any) -> Any:
    check_printable(value)
    return value


def _checked_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja gives some filters a context of its own in front.
    num_own = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_printable(args[num_own:])
        check_printable(kwargs)
        return function(*args, **kwargs)

    return checked


def _checked_join(join: Callable[..., Any]) -> Callable[..., Any]:
    @pass_eval_context
    def checked(eval_ctx: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        if attribute is not None:
            value = map(make_attrgetter(eval_ctx.environment, attribute), value)
        items = list(value)  # what is joined may well come from a generator
        check_printable([d, items])
        return join(eval_ctx, items, d)

    return checked


class _CheckedCode(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        if frame.eval_ctx.volatile:
            join = "(markup_join if context.eval_ctx.volatile else str_join)"
        self.write(f"{join}((")
        for part in node.nodes:
            self.write("environment.finalize(context, ")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class PrintableEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which check_printable is asked before a value becomes text. `options` as for Jinja's Environment."""

    code_generator_class = _CheckedCode
    intercepted_binops = frozenset("%")

    def __init__(self, **options: Any) -> None:
        # The optimizer would join constants by itself.
        super().__init__(finalize=_finalize, optimized=False, **options)
        for name, function in self.filters.items():
            if name not in _TEXTLESS_FILTERS:
                self.filters[name] = _checked_filter(function)
        self.filters["join"] = _checked_join(self.filters["join"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, (str, bytes)):
            check_printable(right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        if isinstance(getattr(method, "__self__", None), str):
            if method.__name__ == "join" and len(args) == 1:
                args = (list(args[0]),)
            check_printable([args, kwargs])
        return super().call(context, function, *args, **kwargs)
