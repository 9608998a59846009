"""Which works are asked for, the problems that each must solve, and whether it solves them.

A *work* is one step in one activation family on one weight format: a cell of every table.

    select    the works of some steps, formats and a scheme; their parents
    cases     the problems: shapes, distributions, lane orders
    run       every case of every work on a machine, and what came of them
    verify    one step on one problem
    fuzz      random products, by one line each (fuzz_cases), on a GPU by several processes
              (fuzz_workers)
    fuzz_experts    cases of experts, and what is wrong with one
"""
