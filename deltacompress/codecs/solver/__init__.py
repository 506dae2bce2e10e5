"""How `obs` solves: a stack of rows under one Hessian (`solving`, `replayed`), and what comes of it (`solved`)."""
