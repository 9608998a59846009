"""The command line, `python -m steps ...`: one file per group of commands. Nothing imports it."""
