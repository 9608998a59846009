"""Instructions as functions of a rebuilt kernel, generated: cast operands, call twin, cast result.

Simulated kernels call millions of instructions, and loops over operands and casts would take longer
than the instructions themselves. So each instruction gets a function of exactly its operands:

    def dp4a(x0, x1, x2):
        r0 = function(
            x0 if type(x0) is int and -2147483648 <= x0 <= 2147483647 else cast0(x0),
            ...
        )
        return r0 if type(r0) is int and -2147483648 <= r0 <= 2147483647 else result0(r0)

Arithmetic on integers, half-precision bits among them, is remembered: lanes unpack the same few
codes again and again.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from steps.simulator.c_types import UNCHANGED
from steps.simulator.scheduler import Schedule
from steps.simulator.twins import Twin

_REMEMBERED = 1 << 16  # results of an instruction

_TEXTS = {
    None: """
def call({parameters}):
    {results} = function({operands})
    return {restored}
""",
    "lane": """
def call({parameters}):
    {results} = function(Schedule.current.lane, {operands})
    return {restored}
""",
    "warp": """
def together(lanes):
    return [{restored} for {results} in function(lanes)]

def call({parameters}):
    return Schedule.current.meet_warp(name, together, ({operands}))
""",
    "warpgroup": """
def together(lanes):
    return [{restored} for {results} in function(lanes)]

def call({parameters}):
    return Schedule.current.meet_warpgroup(name, together, ({operands}))
""",
}


@cache
def call_of(twin: Twin) -> Callable:
    """The instruction as a function that a rebuilt kernel can call."""
    if twin.scope not in _TEXTS:
        raise ValueError(f"{twin.name} has the unknown scope {twin.scope!r}")
    names: dict = {"function": twin.function, "name": twin.name, "Schedule": Schedule}
    parameters = [f"x{i}" for i in range(len(twin.casts))]
    results = [f"r{i}" for i in range(len(twin.results))]
    restored = _cast(results, twin.results, "result", names)
    text = _TEXTS[twin.scope].format(
        parameters=", ".join(parameters),
        operands="".join(f"{x}, " for x in _cast(parameters, twin.casts, "cast", names)),
        results=f"({', '.join(results)},)" if twin.is_tuple else results[0] if results else "_",
        restored=f"({', '.join(restored)},)"
        if twin.is_tuple
        else restored[0]
        if restored
        else None,
    )
    exec(text, names)
    call: Callable = names["call"]
    call.__name__ = call.__qualname__ = twin.name
    return lru_cache(_REMEMBERED)(call) if _is_arithmetic(twin) else call


def _is_arithmetic(twin: Twin) -> bool:
    """Whether its result depends on nothing but integers."""
    integers = all("type({value}) is int" in UNCHANGED.get(cast, "") for cast in twin.casts)
    return bool(twin.scope is None and twin.results and twin.casts and integers)


def _cast(
    variables: Sequence[str], casts: Sequence[Callable], prefix: str, names: dict
) -> list[str]:
    """The expression of each variable cast; the casts are added to `names`."""
    expressions = []
    for i, (variable, cast) in enumerate(zip(variables, casts, strict=True)):
        names[f"{prefix}{i}"] = cast
        called = f"{prefix}{i}({variable})"
        if cast in UNCHANGED:
            unchanged = UNCHANGED[cast].format(value=variable, cast=f"{prefix}{i}")
            called = variable if unchanged == "True" else f"{variable} if {unchanged} else {called}"
        expressions.append(called)
    return expressions
