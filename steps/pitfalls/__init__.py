"""The museum: twelve bugs this problem is known for, each caught by the checks of this
laboratory.

    python -m steps.pitfalls          the table and the stories
    python -m steps.pitfalls --json   the same as data

Each exhibit `pNN_*.py` holds a story, the wrong kernel (or codec) and the right one beside it;
they differ in a line or two. The museum runs both on the golden block and on small problems and
says which layer of the checks caught the wrong one. A bug that gets through is an error: the
exhibits are tests of the tests.
"""

from steps.pitfalls.exhibit import Finding, Pitfall, examine, pitfalls

__all__ = ["Finding", "Pitfall", "examine", "pitfalls"]
