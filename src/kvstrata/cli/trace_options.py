"""Options of the verbs that read a trace."""

from pathlib import Path
from typing import Annotated

import typer

from kvstrata.replay.simulate import Order, Partial

TracePath = Annotated[Path, typer.Argument(help="Request trace, plain or gzip.")]
Sessions = Annotated[int | None, typer.Option(help="Sessions to interleave.")]
StepSeconds = Annotated[float, typer.Option(help="Seconds between two sessions' starts.")]
HorizonSeconds = Annotated[float | None, typer.Option(help="Leave out what comes later.")]
Group = Annotated[int, typer.Option(min=1, help="Recorded blocks per chunk.")]
TokensPerChunk = Annotated[int | None, typer.Option(min=1, help="For traces without block hashes.")]
PrefillRate = Annotated[
    float | None, typer.Option(help="Tokens/s that the engine computes; gives the time saved.")
]
OrderOption = Annotated[Order | None, typer.Option(help="Order within a request.")]
PartialOption = Annotated[
    Partial | None, typer.Option(help="Whether last blocks that are not full are stored.")
]
ChunkBytes = Annotated[str | None, typer.Option(help='Bytes of a chunk, such as "2MiB".')]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
