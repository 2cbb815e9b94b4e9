"""What remat claims, tried on a GPU in one command of a few minutes.

``make gpu``, or ``python -m studies.gpu``: tests marked ``gpu``, predicted and measured
peaks of ten models, bits, the allocator, time beside other ways, offloading. Lines go
to ``studies/results/gpu.jsonl`` as they come, and a call goes on where the last one
stopped. At the end all are written as tables beside it, each claim kept or broken; the
exit code is 1 if one is broken. ``--device sim`` does the same on the simulated device.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.gpu_claims import BROKEN, claims
from studies.gpu_page import page
from studies.gpu_parts import SIMULATED
from studies.gpu_run import Run, run
from studies.record import RESULTS, ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", SIMULATED), default="cuda")
    parser.add_argument("--limit", type=int, default=480, help="seconds for all")
    parser.add_argument("--scale", type=int, help="of models; default: 2, or 1 for sim")
    parser.add_argument("--tiny", action="store_true", help="the small variants")
    parser.add_argument("--only", nargs="+", default=(), help="cases with these words")
    parser.add_argument("--results", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    is_simulated = options.device == SIMULATED
    folder: Path = options.results or (
        ROOT / "build" / "gpu-sim" if is_simulated else RESULTS
    )
    lines = run(
        Run(
            device=options.device,
            scale=options.scale or (1 if is_simulated else 2),
            tiny=options.tiny,
            limit_s=options.limit,
            file=folder / "gpu.jsonl",
            only=options.only,
        )
    )
    text = page(lines)
    (folder / "gpu.md").write_text(f"{text}\n", encoding="utf-8")
    found = claims(lines, options.device)
    for claim in found:
        print(f"{claim.verdict:8}{claim.text}: {claim.why}", flush=True)
    print(f"tables: {folder / 'gpu.md'}", flush=True)
    return int(any(claim.verdict == BROKEN for claim in found))


if __name__ == "__main__":
    sys.exit(main())
