"""The command that breaks simulated hardware while it runs.

python -m gpupool_agent.simulated.inject --control DIR NODE ACTION [ARGUMENT...]
"""

import argparse
import json
import sys
from pathlib import Path

from gpupool_agent.simulated.control import InjectionError, inject
from gpupool_agent.simulated.faults import ACTIONS


def main(argv: list[str] | None = None) -> int:
    """Send one command; returns the exit code: 0 done, 1 refused."""
    rows = [(" ".join((name, *action.parameters)), action) for name, action in ACTIONS.items()]
    actions = "\n".join(f"  {name:<20}{action.help}" for name, action in rows)
    parser = argparse.ArgumentParser(
        prog="python -m gpupool_agent.simulated.inject",
        description="Break or mend a simulated node of a running fleet.",
        epilog=f"actions:\n{actions}\n\nGPU is an index, a UUID or a PCI address.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--control", type=Path, required=True, help="the fleet's --control")
    parser.add_argument("node", help="node id")
    parser.add_argument("action", choices=sorted(ACTIONS), metavar="ACTION")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT")
    arguments = parser.parse_args(argv)
    try:
        result = inject(arguments.control, arguments.node, arguments.action, *arguments.arguments)
    except InjectionError as error:
        print(f"inject: {error}", file=sys.stderr)
        return 1
    if result is not None:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
