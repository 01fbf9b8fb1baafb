"""`semel demo`: a pipeline under faults, three times side by side, once for each guarantee.

One Spark program runs the same query three times on the same input: at most once, at least once, exactly once. It is
killed (kill -9) while all three are in the middle of a commit, and so is the broker. What came out is then counted by
an independent client.

    testbed.py    the broker, the producer and the program; what happens, in order; the count
    program.py    the faults, the point at which each guarantee is hit, the gate that holds the pipelines there;
                  live progress
    drivers.py    the Spark program, and the one for machines without Java
    workloads.py  what goes in, and what must come out
    report.py     the result, as a table, as JSON and as a page with drawings
    run.py        the command from its first line to its last
"""
