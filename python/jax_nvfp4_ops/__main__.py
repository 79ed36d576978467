"""The command line: `python -m jax_nvfp4_ops bench` and `python -m jax_nvfp4_ops doctor`."""

from __future__ import annotations

import argparse
import os
import sys

import jax_nvfp4_ops


def main() -> int:
    """Runs the command that the arguments name; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_nvfp4_ops",
        description="NVFP4 operations for JAX: what to run from a shell.",
        epilog="`python -m jax_nvfp4_ops COMMAND --help` says more.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in (
        ("bench", "measure this package against JAX and TransformerEngine"),
        ("doctor", "say what is installed, what each device will do, and whether it works"),
    ):
        commands.add_parser(name, help=text, add_help=False)
    words = sys.argv[1:]
    options = parser.parse_args(words[:1])
    if options.command == "doctor":
        from jax_nvfp4_ops import doctor

        return doctor.main(words[1:])
    if jax_nvfp4_ops.import_error is not None:
        print(
            f"{options.command}: jax_nvfp4_ops does not import: {jax_nvfp4_ops.import_error}\n"
            f"{options.command}: `python -m jax_nvfp4_ops doctor` says more",
            file=sys.stderr,
        )
        return 1
    from jax_nvfp4_ops.bench import cli

    return cli.main(words[1:])


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # as in `doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
