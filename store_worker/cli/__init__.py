"""The command line `session-kv`: one module per group of commands, each imported when asked for.

A command module has `add_parser(subparsers)`, which adds its command or commands, and
`run(args) -> int`, which does the work and returns the exit code: 0 done, 1 the answer is no (a
failed check, nothing found), 2 it could not be tried. What it needs beyond the standard library it
imports inside `run`, so that `--help` and completion stay quick.
"""
