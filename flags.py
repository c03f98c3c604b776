"""The command line: one flat dataclass whose trailing comments are its help, and one line for every mistake."""
import argparse
import dataclasses
import difflib
import inspect
import os
import re
import sys
import traceback
from pathlib import Path


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; --help lists the flags")


def _int(text):
    value = float(text)
    if not value.is_integer():      # false for inf and nan, too
        raise ValueError
    return int(text) if text.lstrip("-").isdigit() else int(value)


def _bool(text):
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]


_int.__name__, _bool.__name__ = "int", "bool"       # argparse shows these names


def parse_flags(cls, argv, about):
    """Read --flag=value into dataclass `cls`. Returns (config, the set of flags given). Types are those of the fields:
    int takes 1e6, bool takes true/false or nothing, lists repeat. Raises ValueError with the nearest flag's name."""
    help_of = dict(re.findall(r"^    (\w+):[^#\n]*#\s*(.*)$", inspect.getsource(cls), re.M))
    parser = _Parser(description=about, allow_abbrev=False)
    names = [f.name for f in dataclasses.fields(cls)]
    for before, word in zip(["", *argv], argv):
        if before.startswith("--") and "=" not in before and not word.startswith("--"):
            continue                    # "--flag value": the value
        name = word.lstrip("-").partition("=")[0]
        if name not in names and name not in ("help", "h"):
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
            raise ValueError(f"{word} is no flag of this command; {hint}")
        if not word.startswith("--") and word != "-h":
            raise ValueError(f"{word}: flags begin with two dashes: --{word.lstrip('-')}")
    for f in dataclasses.fields(cls):
        kind = type(f.default) if f.default is not dataclasses.MISSING else list
        extra = {bool: {"nargs": "?", "const": True, "metavar": "BOOL"}, list: {"action": "append"}}.get(kind, {})
        help_text = help_of[f.name] + ("" if kind is list else f" (default: {f.default})")
        parser.add_argument(f"--{f.name}", type={int: _int, bool: _bool, float: float}.get(kind, str),
                            default=argparse.SUPPRESS, help=help_text.replace("%", "%%"), **extra)
    try:
        given = vars(parser.parse_args(argv))
    except KeyError as e:
        raise ValueError(f"{e} is neither true nor false") from None
    return cls(**given), set(given)


def flag_words(cfg, given):
    """The command line again: --name=value for every flag in `given`, in the order of the fields; lists repeat."""
    return [f"--{name}={value}" for name in vars(cfg) if name in given
            for value in (getattr(cfg, name) if isinstance(getattr(cfg, name), list) else [getattr(cfg, name)])]


def run_command(main):
    """Call main(); a ValueError of ours is the user's mistake: one line, exit code 2. One raised anywhere else is a
    fault of the program and keeps its traceback."""
    try:
        main()
    except ValueError as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        if Path(frame.filename).resolve().parent != Path(__file__).resolve().parent:
            raise
        rank = os.environ.get("RANK")
        print(f"{'' if rank is None else f'[rank {rank}] '}error: {e}", file=sys.stderr, flush=True)
        sys.exit(2)
