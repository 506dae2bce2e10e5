"""The command line: a thin layer of Typer verbs over the Python API, one file per group of verbs.

`program` is the process, `main` puts the app together, `console` is the one place that prints, `render` turns results
into tables, `progress` draws what a `Reporter` is told, `interrupts` handles signals. Verbs import the rooms that do
the work inside their bodies, so that help, usage errors and completion never wait for torch.
"""
