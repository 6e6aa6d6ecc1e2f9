"""One module for each entrant: plays rounds of the workload and prints how long they took.

usage: python -m entrants NAME METHOD ROUNDS ..., in the folder benchmarks
"""
