"""The command line: a thin layer of Typer verbs over the Python API, one file per group of verbs.

`program` is the process, `main` puts the app together, `interrupts` handles signals. `verbs`, `compressing`, `zoo` and
`bench` hold the verbs, `given` what several of them take, `shown` all that is printed. Verbs import the rooms that do
the work inside their bodies, so that help, usage errors and completion never wait for torch.
"""
