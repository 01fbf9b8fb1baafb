"""`semel demo`: a pipeline under faults, three times side by side, once for each guarantee.

One Spark program runs the same query three times on the same input: at most once, at least once, exactly once. It is
killed (kill -9) while all three are in the middle of a commit, and so is the broker. What came out is then counted by
an independent client.

    play.py       what happens, in order
    plan.py       the faults, and the point at which each guarantee is hit
    stage.py      the broker, the program and the producer as processes and threads
    driver.py     the Spark program; loop_driver.py the one for machines without Java; gate.py holds them at a point
    workloads/    what goes in, and what must come out
    screen.py     live progress; tables.py the result; report/ the page
"""
