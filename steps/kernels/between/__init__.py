"""What a decoder computes between its products, one kernel a file.

    add_and_norm    h += y, and h / its root mean square * weight
    deferred_norm   the same at few tokens without a launch, in the products around it
    attention       of one token of each sequence over the cache, rotary embedding included
    rotary          rotary embedding of a prompt, whose keys and values go to the cache
    swiglu          silu(gate) * up
    gated_product   the same at few tokens without a launch, in the product of gates and ups
    chain           all products from one attention to the next, and their norms, in one launch
    argmax          the largest logit of each row
    router          add_and_norm, and which experts a token goes to

    heads, partial_sums, values, eight      what several of them do with heads, rows and splits
    polled          memory that blocks and launches wait for: chains, and attention between them

`steps.decoder.kernel_operations`, `steps.decoder.deferred` and `steps.decoder.chained` launch them.
results/worklog/decoder.md has what was predicted of each, and measured. Lessons 5 (wide accesses),
10 (arrival counters) and 14 (launches that overlap) teach what they are made of.

A product takes 4 to 19 us at few tokens, a launch that waits for the one before it
some 2 us. So each operation is one launch, it begins while the product before it ends (step 14,
`steps.instructions.memory`), and it leaves room on its SM for a product: few threads, few
registers, no more shared memory than a product leaves. The next product is then resident, and has
issued the copies of its first weights, before the operation ends.

Every kernel here calls `griddepcontrol_launch_dependents` first. Until `griddepcontrol_wait` it
stores nothing, and loads only what no launch that may still run writes: weights, and keys and
values of earlier tokens. So when a launch has passed its wait, all launches before it have ended,
as each of them ended only after its own wait. That is why a kernel may read what was written
several launches ago, and write where an earlier one has read.

Attention that shows its output (`steps.kernels.parts.exchange`), and the layer with experts behind
it (`steps.kernels.experts.layer`), wait for values, each with a flag that says whether it is there,
and for the end of the launch before them only before they end. What they overwrite has been read by
whoever made the values that they have waited for.
"""
