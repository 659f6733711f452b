"""Programs: for each rank a list of steps on named buffers. Pure.

`steps` says what a step is, and what kernels read, update and write, and their flops. `recorder` is what builders
(`composite`, `tracing.lower`) are written in: they are run once for each rank, as a program of MPI would be, and leave
its list. `factorizations` says what there is to know of each factorization, `factor` has block columns, and records
steps of factorizations. `check` runs all lists without numbers, and with a clock; engines run one.

Steps run in the order of the list. What is published does not change until the end of the run; a rank waits only for
what others publish, and everyone publishes without waiting. So if one run in order comes to its end, as `check` shows,
every run does.
"""
