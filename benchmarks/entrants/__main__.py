"""Runs an entrant, as a module of its own, so that worker processes can import what is in it."""

import sys
from importlib import import_module

if __name__ == "__main__":
    import_module(f"entrants.{sys.argv[1]}").main(*sys.argv[2:])
