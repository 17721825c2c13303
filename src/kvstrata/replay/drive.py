"""Drive a manager as an engine would, one request of a trace after the other."""

from kvstrata.core.keys import OffloadKey
from kvstrata.core.manager import OffloadingManager
from kvstrata.core.request import ReqContext, ScheduleEndContext


def serve(
    manager: OffloadingManager, ctx: ReqContext, keys: list[OffloadKey], storable: list[OffloadKey]
) -> tuple[int, int]:
    """Put one request through a manager: look up, load what is there, store the rest, finish.

    Args:
        manager: Copies end at once; the manager has no tiers whose answer is worth waiting for.
        ctx: The request.
        keys: Its chunks, root first.
        storable: Those that an engine would offer: all, or all but a partial last one.

    Returns:
        The length of the prefix that was there, and the number of chunks stored.
    """
    num_stored = 0
    manager.on_new_request(ctx)
    num_hits = manager.lookup(keys, ctx) or 0
    manager.touch(storable, ctx)
    if num_hits:
        hits = keys[:num_hits]
        manager.prepare_load(hits, ctx)
        manager.complete_load(hits, ctx)
    if rest := storable[num_hits:]:
        output = manager.prepare_store(rest, ctx)
        if output is not None and output.keys_to_store:
            num_stored = len(output.keys_to_store)
            manager.complete_store(output.keys_to_store, ctx)
    manager.on_request_finished(ctx)
    manager.on_schedule_end(ScheduleEndContext((ctx.req_id,), ()))
    manager.take_events()
    return num_hits, num_stored
