"""How `obs` solves: one stack of rows under one Hessian (`solving`), and what comes of it (`solved`)."""
